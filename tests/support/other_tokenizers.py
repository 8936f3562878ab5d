"""Token ids that differ: the same tokens under other ids, tokenizers trained on other text, and of other kinds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from cluster.router.tokenizer import CheckpointTokenizer

END = "<|end|>"


def permuted_ids(count: int, seed: int = 7) -> np.ndarray:
    """[count] the new id of each id."""
    return np.random.default_rng(seed).permutation(count)


def write_permuted(source: Path, folder: Path) -> np.ndarray:
    """A checkpoint with the tokens and weights of `source`, whose tokens have other ids; returns `permuted_ids`."""
    shutil.copytree(source, folder)
    form = json.loads((source / "tokenizer.json").read_text())
    vocabulary = form["model"]["vocab"]
    new = permuted_ids(1 + max([*vocabulary.values(), *(added["id"] for added in form["added_tokens"])]))
    form["model"]["vocab"] = {text: int(new[token]) for text, token in vocabulary.items()}
    for added in form["added_tokens"]:
        added["id"] = int(new[added["id"]])
        # An added token that the vocabulary lacks would get the id after the vocabulary's, whatever is written here.
        form["model"]["vocab"][added["content"]] = added["id"]
    (folder / "tokenizer.json").write_text(json.dumps(form))
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if "embed" in name or "lm_head" in name:
            moved = weight.clone()
            moved[torch.from_numpy(new)] = weight[: len(new)]
            weights[name] = moved
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if config.get(key) is not None:
                config[key] = int(new[config[key]])
        (folder / name).write_text(json.dumps(config))
    return new


def byte_level(texts: Iterable[str], count: int) -> Tokenizer:
    """A byte-level BPE trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=count, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def metaspace(texts: Iterable[str], count: int) -> Tokenizer:
    """A BPE of SentencePiece's kind, as Llama 2's: a space first, `▁` for spaces, byte tokens for other characters."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words, lines = pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Split("\n", "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, lines])
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=count - 259, show_progress=False))
    form = json.loads(trained.to_str())
    heads = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = sorted(form["model"]["vocab"], key=form["model"]["vocab"].__getitem__)
    vocabulary = {piece: token for token, piece in enumerate([*heads, *pieces])}
    merges = [tuple(pair) for pair in form["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(heads[:3])
    return tokenizer


# Tokenizers that mark the beginning of a text, and some that do not

SENTENCE = "the cat sat on the mat and a person saw the sons sit; 漢字 né € 👍🏽 "
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def llama() -> Tokenizer:
    """As Llama 2's: `▁` before a text, which the decoder strips."""
    return metaspace([SENTENCE * 9], 420)


def llama_with_metaspace(scheme: str) -> Tokenizer:
    """As transformers builds Llama's now: byte fallback, and a pre-tokeniser in place of the normaliser."""
    tokenizer = llama()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


def unigram(scheme: str) -> Tokenizer:
    """SentencePiece's Unigram with byte fallback."""
    words = [*(f"▁{word}" for word in SENTENCE.split()), *SENTENCE.split(), "▁", "s", "a", "t", "er", "on"]
    vocabulary = ["<unk>", "<s>", "</s>", *BYTES, *dict.fromkeys(words)]
    scored = [(word, -8.0 if word.startswith("<0x") else -1.0 / len(word)) for word in vocabulary]
    tokenizer = Tokenizer(models.Unigram(scored, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def spaced_byte_level(prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SENTENCE * 9], trainer)
    return tokenizer


STYLES: dict[str, Callable[[], Tokenizer]] = {
    "llama": llama,
    "llama, first": lambda: llama_with_metaspace("first"),
    "llama, always": lambda: llama_with_metaspace("always"),
    "unigram, first": lambda: unigram("first"),
    "unigram, always": lambda: unigram("always"),
    "unigram, never": lambda: unigram("never"),
    "byte-level": lambda: spaced_byte_level(False),
    "byte-level, prefix": lambda: spaced_byte_level(True),
}


def templated(tokenizer: Tokenizer) -> Tokenizer:
    """With special tokens before and after a text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>")]
    )
    return tokenizer


def loaded(folder: Path, tokenizer: Tokenizer, **config: object) -> CheckpointTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return CheckpointTokenizer(folder, "")
