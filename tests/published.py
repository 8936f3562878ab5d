"""Makes tiny checkpoints with the facts of published ones, and docs/pairs.md, the table of which drafter fits which.

The checkpoints keep vocabularies, paddings, key names of configurations, layer layouts, names and forms of files, the
tokenizer files that exist and the differences of tokenizers. Width and depth are shrunk.

python -m tests.published                   writes docs/pairs.md
python -m tests.published PAIR FOLDER       writes the shrunk pair; then: dendro generate FOLDER/cluster.yaml --local
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from tree_layers.checkpoint import Facts
from tree_layers.tokens import TokenTable

from cluster.pairing import TokenFit, fit_of
from tests.support import tiny_hybrids
from tests.support.layouts import copy_as, sentencepiece
from tests.support.tiny_mamba import randomise as randomise_mamba
from tests.support.tiny_models import randomise

PAGE = Path(__file__).parents[1] / "docs" / "pairs.md"
FORM = {"safetensors": "", "bin": "bin", "sharded .bin": "bin-shards", "sharded safetensors": "safetensors-shards"}

Form = Literal["safetensors", "bin", "sharded .bin", "sharded safetensors"]


@dataclass(frozen=True)
class Words:
    """A tokenizer whose token texts are the family's name and the id, so those of two families all differ."""

    family: str
    ordinary: int
    added: int  # after the ordinary ones
    control: int = 0  # how many of the first ordinary tokens are control tokens

    @property
    def size(self) -> int:
        return self.ordinary + self.added

    def table(self) -> TokenTable:
        return _table(self)


@cache
def _table(words: Words) -> TokenTable:
    texts = {token: f"{words.family}{token}" for token in range(words.ordinary)}
    if words.family == "llama2":
        texts |= {0: "<unk>", 1: "<s>", 2: "</s>"} | {3 + byte: f"<0x{byte:02X}>" for byte in range(256)} | {259: "▁"}
    special = [*range(words.control), *range(words.ordinary, words.size)]
    texts |= {token: f"<|{words.family} {token}|>" for token in range(words.ordinary, words.size)}
    return TokenTable(texts, frozenset(special))


NEOX = Words("neox", 50000, 277)
LLAMA2 = Words("llama2", 32000, 0, control=3)
LLAMA3 = Words("llama3", 128000, 256)
GRANITE4 = Words("granite4", 100256, 96)
ZAMBA2 = Words("zamba2", 32000, 0, control=3)
FALCON_H1, FALCON_H1_SMALL = Words("falcon-h1", 65536, 0), Words("falcon-h1-0.5b", 32768, 0)
QWEN25, QWEN3 = Words("qwen", 151643, 22), Words("qwen", 151643, 26)


Kind = Literal[
    "mamba",
    "mamba2",
    "mamba-hf",
    "neox",
    "llama",
    "qwen2",
    "qwen3",
    "bamba",
    "falcon_h1",
    "zamba2",
    "granite-4.0-350m",
    "granite-4.0-h-350m",
    "granite-4.0-h-tiny",
]
"""A model type, or for Granite 4.0 the configuration in `tiny_hybrids.PUBLISHED`."""


@dataclass(frozen=True)
class Published:
    """Facts of a published checkpoint."""

    name: str
    kind: Kind
    rows: int  # of the embedding
    words: Words
    form: Form = "safetensors"
    tokenizer: Literal["tokenizer.json", "tokenizer.model", ""] = "tokenizer.json"
    stale: dict[str, Any] = field(default_factory=dict)  # wrong keys in its configuration, of another model
    without: tuple[str, ...] = ()  # keys missing in its configuration
    tied: bool = False

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def short_name(self) -> str:
        return self.name.split("/")[1]

    @property
    def state_spaces(self) -> bool:
        """Whether its files have state-spaces' own layout."""
        return self.kind in ("mamba", "mamba2")

    def facts(self) -> Facts:
        """Facts with the published numbers; the folder does not exist."""
        return Facts(
            folder=Path(self.name),
            layout="state-spaces" if self.state_spaces else "transformers",
            config={"model_type": self.kind},
            rows=self.rows,
            positions=None,
            named_end_ids=frozenset(),
            tokens=self.words.table() if self.tokenizer else None,
            unpadded=self.words.size if self.state_spaces else None,
            digest="",
        )


def state_spaces(size: str, kind: Literal["mamba", "mamba2"] = "mamba") -> Published:
    """One of state-spaces: config.json, pytorch_model.bin and no tokenizer; rows padded to a multiple of 8 or 16."""
    return Published(f"state-spaces/{kind}-{size}", kind, 50280 if kind == "mamba" else 50288, NEOX, "bin", "")


def pythia(size: str, rows: int, form: Form = "safetensors") -> Published:
    return Published(f"EleutherAI/pythia-{size}", "neox", rows, NEOX, form)


MAMBA_HF = Published("state-spaces/mamba-130m-hf", "mamba-hf", 50280, NEOX)
MAMBA_370M_HF = Published("state-spaces/mamba-370m-hf", "mamba-hf", 50280, NEOX, stale={"d_inner": 160})
MAMBA_790M_HF = Published(
    "state-spaces/mamba-790m-hf", "mamba-hf", 50280, NEOX, stale={"d_model": 2048, "n_layer": 48, "ssm_cfg": {}}
)
VICUNA = Published("lmsys/vicuna-7b-v1.3", "llama", 32000, LLAMA2, "sharded .bin", "tokenizer.model")
LLAMA_68M = Published("JackFram/llama-68m", "llama", 32000, LLAMA2, without=("num_key_value_heads",))
TINY_LLAMA = Published("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "llama", 32000, LLAMA2)
LLAMA2_7B = Published("meta-llama/Llama-2-7b-chat-hf", "llama", 32000, LLAMA2, "sharded safetensors")
LLAMA31 = Published("meta-llama/Llama-3.1-8B-Instruct", "llama", 128256, LLAMA3, "sharded safetensors")
LLAMA32 = Published("meta-llama/Llama-3.2-1B-Instruct", "llama", 128256, LLAMA3, tied=True)
BAMBA = Published("ibm-ai-platform/Bamba-9B-v1", "bamba", 128256, LLAMA3, "sharded safetensors")
GRANITE_350M = Published("ibm-granite/granite-4.0-350m", "granite-4.0-350m", 100352, GRANITE4, tied=True)
GRANITE_H_350M = Published("ibm-granite/granite-4.0-h-350m", "granite-4.0-h-350m", 100352, GRANITE4, tied=True)
GRANITE_H_1B = Published("ibm-granite/granite-4.0-h-1b", "granite-4.0-h-350m", 100352, GRANITE4, tied=True)
GRANITE_H_TINY = Published(
    "ibm-granite/granite-4.0-h-tiny", "granite-4.0-h-tiny", 100352, GRANITE4, "sharded safetensors", tied=True
)
GRANITE_H_SMALL = Published(
    "ibm-granite/granite-4.0-h-small", "granite-4.0-h-tiny", 100352, GRANITE4, "sharded safetensors", tied=True
)
ZAMBA2_12B = Published("Zyphra/Zamba2-1.2B-instruct", "zamba2", 32000, ZAMBA2, tied=True)
ZAMBA2_7B = Published("Zyphra/Zamba2-7B-Instruct", "zamba2", 32000, ZAMBA2, "sharded safetensors", tied=True)
FALCON_H1_05B = Published("tiiuae/Falcon-H1-0.5B-Instruct", "falcon_h1", 32784, FALCON_H1_SMALL)
FALCON_H1_15B = Published("tiiuae/Falcon-H1-1.5B-Deep-Instruct", "falcon_h1", 65536, FALCON_H1)
FALCON_H1_3B = Published("tiiuae/Falcon-H1-3B-Instruct", "falcon_h1", 65536, FALCON_H1, "sharded safetensors")
QWEN25_05B = Published("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 151936, QWEN25, tied=True)
QWEN25_7B = Published("Qwen/Qwen2.5-7B-Instruct", "qwen2", 152064, QWEN25, "sharded safetensors")
QWEN3_06B = Published("Qwen/Qwen3-0.6B", "qwen3", 151936, QWEN3, tied=True)
QWEN3_8B = Published("Qwen/Qwen3-8B", "qwen3", 151936, QWEN3, "sharded safetensors")


@dataclass(frozen=True)
class PublishedPair:
    drafter: Published
    target: Published
    tokenizer: Published | None = None  # whose tokenizer is configured, if the target has none

    def __str__(self) -> str:
        return f"{self.drafter.short_name}-for-{self.target.short_name}"

    def fit(self) -> TokenFit:
        target = self.target if self.tokenizer is None else self.tokenizer
        return fit_of(target.facts(), self.drafter.facts())


PYTHIA_14B = pythia("1.4b", 50304)
COMMON = [
    PublishedPair(state_spaces("130m"), PYTHIA_14B),
    PublishedPair(state_spaces("130m", "mamba2"), pythia("12b", 50688, "sharded safetensors")),
    PublishedPair(LLAMA_68M, VICUNA),
]
"""Pairs that `make test` serves; the long tests serve the others."""
PAIRS = [
    *COMMON,
    PublishedPair(state_spaces("370m"), pythia("6.9b", 50432, "sharded safetensors")),
    PublishedPair(MAMBA_HF, pythia("12b", 50688, "sharded .bin")),
    PublishedPair(MAMBA_370M_HF, PYTHIA_14B),
    PublishedPair(MAMBA_790M_HF, pythia("6.9b", 50432)),
    PublishedPair(state_spaces("130m"), state_spaces("2.8b"), tokenizer=PYTHIA_14B),
    PublishedPair(state_spaces("130m", "mamba2"), state_spaces("2.7b", "mamba2"), tokenizer=PYTHIA_14B),
    PublishedPair(LLAMA32, LLAMA31),
    PublishedPair(LLAMA32, BAMBA),
    PublishedPair(TINY_LLAMA, LLAMA2_7B),
    PublishedPair(TINY_LLAMA, VICUNA),
    PublishedPair(QWEN25_05B, QWEN25_7B),
    PublishedPair(QWEN3_06B, QWEN3_8B),
    PublishedPair(QWEN25_05B, QWEN3_8B),
    PublishedPair(GRANITE_H_350M, GRANITE_H_TINY),
    PublishedPair(GRANITE_H_350M, GRANITE_H_SMALL),
    PublishedPair(GRANITE_H_1B, GRANITE_H_TINY),
    PublishedPair(GRANITE_H_1B, GRANITE_H_SMALL),
    PublishedPair(GRANITE_350M, GRANITE_H_SMALL),
    PublishedPair(ZAMBA2_12B, ZAMBA2_7B),
    PublishedPair(FALCON_H1_15B, FALCON_H1_3B),
]
UNRELATED = [
    PublishedPair(state_spaces("130m"), LLAMA31),
    PublishedPair(LLAMA_68M, LLAMA31),
    PublishedPair(LLAMA32, QWEN3_8B),
    PublishedPair(FALCON_H1_05B, FALCON_H1_3B),
]


# ---- Checkpoints of these facts, tiny ----


def make(published: Published, folder: Path, seed: int) -> Path:
    """Write a checkpoint of two layers and random weights; returns its folder."""
    plain = folder / "plain"
    plain.mkdir(parents=True)
    model = _model(published)
    (randomise_mamba if "mamba" in published.kind else randomise)(model, seed)
    if published.state_spaces:
        plain.rmdir()
        return _state_spaces(published, model, folder / "own")
    model.save_pretrained(plain)
    config = json.loads((plain / "config.json").read_text()) | published.stale
    config = {key: value for key, value in config.items() if key not in published.without}
    (plain / "config.json").write_text(json.dumps(config))
    write_tokenizer(published, plain)
    form = FORM[published.form]
    return copy_as(plain, folder / form, form) if form else plain


def _model(published: Published) -> Any:
    import transformers as library

    common: dict[str, Any] = {"vocab_size": published.rows, "hidden_size": 32, "num_hidden_layers": 2}
    common |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": published.tied}
    attention = {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 512}
    if published.words is LLAMA2:
        common |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    match published.kind:
        case "mamba" | "mamba-hf":
            config = library.MambaConfig(**common | {"state_size": 8, "tie_word_embeddings": True})
            return library.MambaForCausalLM(config)
        case "mamba2":
            heads = {"state_size": 16, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
            config = library.Mamba2Config(**common | heads | {"tie_word_embeddings": True})
            return library.Mamba2ForCausalLM(config)
        case "neox":
            return library.GPTNeoXForCausalLM(library.GPTNeoXConfig(**common | attention))
        case "bamba":
            mixers = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
            mixers |= {"mamba_expand": 2, "mamba_chunk_size": 16, "attn_layer_indices": [1], "num_key_value_heads": 1}
            return library.BambaForCausalLM(library.BambaConfig(**common | attention | mixers))
        case "falcon_h1" | "zamba2":
            mixed = tiny_hybrids.SETTINGS[published.kind][1]
            return library.AutoModelForCausalLM.from_config(
                library.AutoConfig.for_model(published.kind, **common | {"max_position_embeddings": 512} | mixed)
            )
        case "granite-4.0-350m" | "granite-4.0-h-350m" | "granite-4.0-h-tiny":
            plain = tiny_hybrids.PUBLISHED[published.kind] | {"vocab_size": published.rows, "torch_dtype": "float32"}
            return library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**plain))
        case "qwen2":
            return library.Qwen2ForCausalLM(library.Qwen2Config(**common | attention | {"num_key_value_heads": 1}))
        case "qwen3":
            heads = {"num_key_value_heads": 1, "head_dim": 16}
            return library.Qwen3ForCausalLM(library.Qwen3Config(**common | attention | heads))
        case _:
            heads = {} if published.without else {"num_key_value_heads": 1}
            return library.LlamaForCausalLM(library.LlamaConfig(**common | attention | heads))


def _state_spaces(published: Published, model: Any, folder: Path) -> Path:
    """Write config.json and pytorch_model.bin with state-spaces' names."""
    folder.mkdir()
    two = published.kind == "mamba2"
    ssm = {"layer": "Mamba2", "d_state": 16, "headdim": 16} if two else {"d_state": 8}
    config = {"d_model": 32, "n_layer": 2, "vocab_size": published.words.size, "ssm_cfg": ssm}
    config |= {"rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True}
    config |= {"pad_vocab_size_multiple": 16 if two else 8}
    config |= {"attn_layer_idx": [], "attn_cfg": {}, "tie_embeddings": True} if two else {}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name.replace("embeddings", "embedding"): tensor for name, tensor in model.state_dict().items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def write_tokenizer(published: Published, folder: Path) -> None:
    """Write the tokenizer's files, by the published names."""
    table = published.words.table()
    if published.tokenizer == "tokenizer.model":
        kinds = [2, *[3] * 2, *[6] * 256, *[1] * (table.size - 259)]  # unknown, control, bytes, normal
        pieces = [(table.texts[token], kind) for token, kind in enumerate(kinds)]
        (folder / "tokenizer.model").write_bytes(sentencepiece(pieces))
        config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    elif published.tokenizer:
        added = [
            {"id": token, "content": table.texts[token], "special": True}
            | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for token in sorted(table.added)
        ]
        vocabulary = {text: token for token, text in table.texts.items() if token < published.words.ordinary}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": table.texts[0]}
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}))


# ---- The page ----

HEAD = """# Published pairs

Which published drafters fit which published targets, by the rule of `cluster/pairing.py`: the meaning of token ids
decides, never the size of a vocabulary or the bytes of a file. A pair that does not fit is served through a bridge,
where one can be made ([bridge.md](bridge.md)), else `dendro serve` refuses it with the reason. The sizes below are
those of the published checkpoints, kept in `tests/published.py`; the texts of their tokens are made up there.
`tests/cluster/test_pairs.py` serves each pair that fits, with width and depth shrunk. This page is made by
`python -m tests.published`.

A drafter guesses ids below the smaller vocabulary. state-spaces publishes no tokenizer: as a drafter such a
checkpoint fits where its count of tokens is the target's; as a target it needs `tokenizer`.

| drafter | its rows | target | its rows | tokens | the target's files | fits |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The text of docs/pairs.md."""
    rows = []
    for pair in [*PAIRS, *UNRELATED]:
        fit, target = pair.fit(), pair.target
        words = (pair.tokenizer or target).words.size
        files = f"{target.form}, {target.tokenizer or 'no tokenizer'}"
        if fit.fits:
            answer = "; ".join(filter(None, ("yes", fit.warning, fit.note)))
        else:
            answer = "no: another tokenizer" if fit.different else f"no: {fit.refusal}"
        cells = (pair.drafter.name, pair.drafter.rows, target.name, target.rows, words, files, answer)
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    parts = [HEAD + "\n".join(rows), "## Configurations to copy"]
    parts += [f"```yaml\n{configuration(pair)}```" for pair in PAIRS]
    return "\n\n".join(parts) + "\n"


def configuration(pair: PublishedPair) -> str:
    """The pair's part of a configuration, by names on the hub."""
    tokenizer = f", tokenizer: {pair.tokenizer.name}" if pair.tokenizer else ""
    return (
        f"targets:\n  {pair.target.short_name}: {{checkpoint: {pair.target.name}{tokenizer}}}\n"
        f"drafters:\n  {pair.drafter.short_name}: {{checkpoint: {pair.drafter.name}}}\n"
    )


def write_pair(pair: PublishedPair, folder: Path) -> Path:
    """Write both checkpoints and, if it is another checkpoint's, the target's tokenizer; returns cluster.yaml."""
    entry = {"dtype": "float32", "max_length": 64, "max_rows": 8, "max_depth": 4, "max_sessions": 2}
    target = entry | {"checkpoint": str(make(pair.target, folder / "target", seed=1))}
    if pair.tokenizer is not None:
        (folder / "words").mkdir()
        write_tokenizer(pair.tokenizer, folder / "words")
        target["tokenizer"] = str(folder / "words")
    drafter = {"checkpoint": str(make(pair.drafter, folder / "drafter", seed=2)), "dtype": "float32"}
    cluster = {"targets": {"t": target}, "drafters": {"d": drafter}, "speculation": {"proposers": []}}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


def main() -> None:
    pairs = {str(pair): pair for pair in PAIRS}
    parser = argparse.ArgumentParser(description="Without arguments: write docs/pairs.md.")
    parser.add_argument("pair", nargs="?", choices=pairs, metavar="PAIR", help=", ".join(pairs))
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where the shrunk pair goes")
    given = parser.parse_args()
    if given.pair is None:
        PAGE.write_text(page())
        sys.stdout.write(f"{PAGE} is written\n")
    elif given.folder is None:
        parser.error("PAIR needs a FOLDER")
    else:
        sys.stdout.write(f"{write_pair(pairs[given.pair], given.folder.absolute())} is written\n")


if __name__ == "__main__":
    main()
