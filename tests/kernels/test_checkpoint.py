"""Facts of checkpoints of each layout and tokenizer format, including ones with stale keys."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tree_layers.checkpoint import read_facts, weight_files, weights_fingerprint
from tree_layers.errors import CheckpointError
from tree_layers.headers import tensor_shapes
from tree_layers.tokens import read_tokens

from tests.support.layouts import sentencepiece
from tests.support.unsafe_pickles import UnsafePickle

LLAMA = {"model_type": "llama", "vocab_size": 12, "hidden_size": 4, "num_hidden_layers": 1}
MAMBA = {"model_type": "mamba", "vocab_size": 12, "hidden_size": 4, "num_hidden_layers": 1}
STATE_SPACES = {"d_model": 4, "n_layer": 1, "vocab_size": 10, "ssm_cfg": {}, "pad_vocab_size_multiple": 8}
TEXTS = ["a", "b", "c", "d", "e", "f", "g", "h", "None", "</s>"]


def write(folder: Path, name: str, value: Any) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(json.dumps(value))


def tokenizer_json(texts: list[str], added: dict[int, str] | None = None, kind: str = "BPE") -> dict[str, Any]:
    pairs = [[text, -1.0 * place] for place, text in enumerate(texts)]
    vocabulary = pairs if kind == "Unigram" else {text: place for place, text in enumerate(texts)}
    entries = [{"id": place, "content": text, "special": True} for place, text in (added or {}).items()]
    return {"model": {"type": kind, "vocab": vocabulary, "merges": []}, "added_tokens": entries}


def mixer(kind: str, width: int = 4, channels: int = 8) -> dict[str, torch.Tensor]:
    """The tensors of a layer from which the kind of Mamba and its sizes are derived."""
    own = {"x_proj.weight": (5, channels)} if kind == "mamba" else {"dt_bias": (2,)}
    shapes = {**own, "out_proj.weight": (width, channels)}
    named = {f"backbone.layers.0.mixer.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    return named | {"backbone.norm_f.weight": torch.zeros(width)}


def ends(rows: int, name: str = "model.embed_tokens.weight", width: int = 4) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, width)}


def header(json_text: bytes) -> bytes:
    """The header of a safetensors file."""
    return struct.pack("<Q", len(json_text)) + json_text


def test_reading_facts_imports_neither_torch_nor_transformers_nor_numpy():
    heavy = "{'torch', 'transformers', 'numpy', 'dendro'}"
    script = f"import sys, tree_layers.checkpoint; print(sorted({heavy} & {{*sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_embeddings_rows_are_read_from_the_tensors_if_there_are_any(tmp_path: Path):
    write(tmp_path, "config.json", LLAMA | {"vocab_size": None})
    save_file(ends(16) | {"model.norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert read_facts(tmp_path).rows == 16


def test_a_matrix_that_embeds_images_is_not_taken_for_the_vocabulary(tmp_path: Path):
    """gemma3n has `embed_vision.embedding.weight` of 128 rows beside the text's embedding."""
    write(tmp_path, "config.json", LLAMA)
    save_file(ends(16) | ends(8, "model.embed_vision.embedding.weight"), tmp_path / "model.safetensors")
    assert read_facts(tmp_path).rows == 16


def test_tensors_with_unusual_names_and_shapes_are_ignored(tmp_path: Path):
    write(tmp_path, "config.json", MAMBA | {"d_model": 4, "n_layer": 1})
    odd = ("weight", "backbone.norm_f.weight", "backbone.layers.0.mixer.out_proj.weight", "lm_head.weight")
    save_file(
        {name: torch.tensor(1.0) for name in odd} | {".weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors"
    )
    facts = read_facts(tmp_path)
    assert (facts.layout, facts.rows, facts.numbers) == ("transformers", 12, 16)


@pytest.mark.parametrize("old_format", [False, True], ids=["zip", "before-1.6"])
def test_shapes_of_a_pickled_checkpoint_are_read(tmp_path: Path, old_format: bool):
    tensors = {"a.weight": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7)[2:], "c": torch.tensor(1.0)}
    tensors["p"] = torch.nn.Parameter(torch.zeros(2, 2))
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    shapes = tensor_shapes([tmp_path / "pytorch_model.bin"])
    assert shapes == {"a.weight": (3, 5), "b": (5,), "c": (), "p": (2, 2)}


def test_reading_the_header_of_a_pickled_checkpoint_runs_no_code(tmp_path: Path):
    write(tmp_path, "config.json", STATE_SPACES)
    torch.save({"backbone.embedding.weight": UnsafePickle()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a file of plain weights"):
        read_facts(tmp_path)


class SharedShape:
    """A tensor whose shape is two lists, which are one, of two lists, which are one, and so on: 22 in memory, and four
    million as text."""

    def __reduce__(self):
        shape: list[object] = []
        for _ in range(22):
            shape = [shape, shape]
        return torch._utils._rebuild_tensor_v2, (None, 0, shape)


def test_a_pickled_shape_that_is_long_as_text_is_refused_in_little_memory(tmp_path: Path):
    torch.save({"a": SharedShape()}, tmp_path / "pytorch_model.bin")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="not a file of plain weights: .*a tensor has the shape"):
            tensor_shapes([tmp_path / "pytorch_model.bin"])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        header(b"[]"),
        header(b'{"a": 1}}'),
        header(b"[" * 100_000),
        *(header(b'{"a": {"shape": [%s]}}' % size) for size in (b"Infinity", b"-1", b"1.5", b"null")),
    ],
    ids=["empty", "huge", "list", "cut", "nested", "infinity", "negative", "fraction", "null"],
)
def test_a_safetensors_file_with_a_broken_header_is_refused_by_name(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        tensor_shapes([tmp_path / "model.safetensors"])


def test_a_single_file_is_preferred_to_an_index_beside_it(tmp_path: Path):
    """granite-4.0-h-1b-base has both; transformers reads the single file."""
    write(tmp_path, "config.json", LLAMA)
    save_file(ends(12), tmp_path / "model.safetensors")
    write(tmp_path, "model.safetensors.index.json", {"weight_map": {"x": "model-00001-of-00002.safetensors"}})
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    assert read_facts(tmp_path).rows == 12 and weights_fingerprint(tmp_path)


def test_safetensors_are_preferred_to_pickles_and_shards_are_all_read(tmp_path: Path):
    write(tmp_path, "config.json", LLAMA)
    torch.save(ends(99), tmp_path / "pytorch_model.bin")
    shards = {"lm_head.weight": "model-00002-of-00002.safetensors", "x": "model-00001-of-00002.safetensors"}
    write(tmp_path, "model.safetensors.index.json", {"weight_map": shards})
    with pytest.raises(CheckpointError, match=r"names files that are missing: \['model-00001"):
        weight_files(tmp_path)
    assert read_facts(tmp_path).rows == LLAMA["vocab_size"], "as without any weights"
    save_file(ends(16), tmp_path / "model-00001-of-00002.safetensors")
    save_file(ends(14, "lm_head.weight"), tmp_path / "model-00002-of-00002.safetensors")
    assert read_facts(tmp_path).rows == 14  # ids past the head's rows have no logits


@pytest.mark.parametrize(
    "changed, tensors, layout, kind, width",
    [
        ({}, mixer("mamba"), "state-spaces", "mamba", 4),
        ({"ssm_cfg": {"layer": "Mamba2"}}, mixer("mamba2"), "state-spaces", "mamba2", 4),
        ({"model_type": "mamba", "ssm_cfg": {"layer": "Mamba2"}}, mixer("mamba2"), "state-spaces", "mamba2", 4),
        (
            {"model_type": "mamba", "ssm_cfg": {}, "torch_dtype": "float16"},
            mixer("mamba2"),
            "state-spaces",
            "mamba2",
            4,
        ),
        # mamba-790m-hf: d_model of another model, and the true hidden_size
        (MAMBA | {"d_model": 2048, "hidden_size": 4}, mixer("mamba"), "transformers", "mamba", 4),
        # transformers' defaults, and the true d_model
        (MAMBA | {"d_model": 4, "hidden_size": 768}, mixer("mamba"), "state-spaces", "mamba", 4),
        (MAMBA | {"d_model": 2048}, {}, "transformers", "mamba", 4),
    ],
    ids=["own", "own-2", "fine-tune", "fine-tune-without-layer", "stale-d_model", "stale-hidden_size", "no-weights"],
)
def test_the_tensors_decide_if_keys_of_two_layouts_contradict_each_other(
    tmp_path: Path, changed, tensors, layout, kind, width
):
    write(tmp_path, "config.json", STATE_SPACES | changed)
    if tensors:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    facts = read_facts(tmp_path)
    assert (facts.layout, facts.model_type, facts.config["hidden_size"]) == (layout, kind, width)


@pytest.mark.parametrize(
    "changed, channels",
    [({"d_inner": 160}, 8), ({"expand": 16, "intermediate_size": 8}, 8), ({"intermediate_size": 5}, 8)],
    ids=["d_inner", "expand", "intermediate_size"],
)
def test_the_tensors_decide_how_many_channels_a_mixer_has(tmp_path: Path, changed: dict[str, int], channels: int):
    """mamba-370m-hf has d_inner: 160; falcon-mamba has expand: 16 and its true intermediate_size."""
    write(tmp_path, "config.json", MAMBA | changed)
    save_file(mixer("mamba"), tmp_path / "model.safetensors")
    config = read_facts(tmp_path).config
    assert config.get("intermediate_size", config.get("expand", 2) * config["hidden_size"]) == channels


@pytest.mark.parametrize(
    "changed, field",
    [
        ({"d_model": 0}, "d_model"),
        ({"ssm_cfg": "Mamba2"}, "ssm_cfg"),
        ({"ssm_cfg": {"layer": ["Mamba2"]}}, "ssm_cfg.layer"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 0}}, "headdim"),
        ({"ssm_cfg": {"d_state": "16"}}, "d_state"),
        ({"ssm_cfg": {"expand": "2"}}, "ssm_cfg.expand"),
        ({"ssm_cfg": {"expand": float("inf")}}, "ssm_cfg.expand"),
    ],
    ids=str,
)
def test_a_state_spaces_configuration_with_an_impossible_number_is_refused_by_its_key(tmp_path: Path, changed, field):
    write(tmp_path, "config.json", STATE_SPACES | changed)
    with pytest.raises(CheckpointError, match=rf"config\.json: {field} "):
        read_facts(tmp_path)


def test_a_state_spaces_checkpoint_has_padded_rows_and_an_unpadded_vocabulary(tmp_path: Path):
    write(tmp_path, "config.json", STATE_SPACES)
    facts = read_facts(tmp_path)
    assert (facts.rows, facts.known, facts.vocabulary, facts.tokens, facts.tokenizer) == (16, 10, 10, None, "")


def test_a_checkpoint_without_a_tokenizer_uses_that_of_another_folder(tmp_path: Path):
    write(tmp_path / "own", "config.json", LLAMA)
    write(tmp_path / "other", "tokenizer.json", tokenizer_json(TEXTS))
    with pytest.raises(CheckpointError, match="there is no tokenizer that can be read"):
        _ = read_facts(tmp_path / "own").known
    assert read_facts(tmp_path / "own", tmp_path / "other").known == 10
    with pytest.raises(CheckpointError, match="nowhere: there is no tokenizer"):
        read_facts(tmp_path / "own", tmp_path / "nowhere")


@pytest.mark.parametrize("rows, tokens, vocabulary", [(12, 10, 10), (8, 10, 8)], ids=["padding", "more-tokens"])
def test_the_vocabulary_is_the_tokenizers_or_the_rows_whichever_is_smaller(
    tmp_path: Path, rows: int, tokens: int, vocabulary: int
):
    write(tmp_path, "config.json", LLAMA | {"vocab_size": rows})
    write(tmp_path, "tokenizer.json", tokenizer_json(TEXTS[:tokens]))
    assert read_facts(tmp_path).vocabulary == vocabulary


def test_end_ids_past_the_vocabulary_are_left_out(tmp_path: Path):
    """A smaller model's configuration may have GPT-2's 50256; masking it would write past the logits."""
    write(tmp_path, "config.json", LLAMA | {"eos_token_id": [2, 50256]})
    write(tmp_path, "tokenizer.json", tokenizer_json(TEXTS))
    assert read_facts(tmp_path).end_ids == {2}


@pytest.mark.parametrize(
    "generation, config, tokenizer, ids",
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {"eos_token": "</s>"}, {3, 4}),
        ({"eos_token_id": None}, {"eos_token_id": 5}, {"eos_token": "</s>"}, {5}),
        (None, {"eos_token_id": 0}, {"eos_token": "</s>"}, {0}),
        (None, {"text_config": {"eos_token_id": 7}}, None, {7}),
        (None, {"eos_token_id": 6, "text_config": {"eos_token_id": None}}, None, set()),
        (None, {}, {"eos_token": {"content": "</s>"}}, {9}),
        (None, {}, {"eos_token": "a token that is added"}, {10}),
        (None, {}, {"eos_token": None}, set()),
        (None, {}, {"bos_token": "a"}, set()),
        ({}, {}, None, set()),
    ],
)
def test_end_ids_are_those_of_the_first_file_that_names_any(tmp_path: Path, generation, config, tokenizer, ids):
    write(tmp_path, "config.json", LLAMA | config)
    write(tmp_path, "tokenizer.json", tokenizer_json(TEXTS))
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
    if tokenizer is not None:
        write(tmp_path, "tokenizer_config.json", tokenizer)
    assert read_facts(tmp_path).end_ids == ids


@pytest.mark.parametrize("end", ["</s>", [1, None], -1, 1 << 40, True])
def test_an_end_id_that_is_no_token_id_is_refused_by_the_files_name(tmp_path: Path, end: object):
    write(tmp_path, "config.json", LLAMA)
    write(tmp_path, "generation_config.json", {"eos_token_id": end})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        read_facts(tmp_path)


def test_the_text_models_part_of_a_configuration_is_read(tmp_path: Path):
    """Qwen3.5's vocabulary is inside text_config."""
    text = {"vocab_size": 12, "max_position_embeddings": 99, "eos_token_id": 3}
    write(tmp_path, "config.json", {"model_type": "qwen3_5", "text_config": text})
    facts = read_facts(tmp_path)
    assert (facts.rows, facts.positions, facts.end_ids) == (12, 99, {3})


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece"])
def test_a_token_table_is_the_vocabulary_overlaid_with_added_tokens(tmp_path: Path, kind: str):
    write(tmp_path, "tokenizer.json", tokenizer_json(["<unk>", "a", "b"], {0: "<s>", 5: "<end>"}, kind))
    table = read_tokens(tmp_path)
    assert table is not None
    assert table.texts == {0: "<s>", 1: "a", 2: "b", 5: "<end>"}
    assert (table.added, table.size) == ({0, 5}, 6)


def test_a_tokenizer_that_differs_only_in_formatting_has_the_same_fingerprint(tmp_path: Path):
    same, other = tokenizer_json(TEXTS, {9: "</s>"}), tokenizer_json([*TEXTS[:8], "I", "</s>"], {9: "</s>"})
    (tmp_path / "b").mkdir()
    write(tmp_path / "a", "tokenizer.json", same)
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(same | {"normalizer": {"type": "NFC"}}, indent=4))
    write(tmp_path / "c", "tokenizer.json", other)
    a, b, c = (read_tokens(tmp_path / name) for name in "abc")
    assert a is not None and b is not None and c is not None
    assert a.fingerprint == b.fingerprint != c.fingerprint


def test_a_sentencepiece_model_gives_the_table_of_its_tokenizer_json(tmp_path: Path):
    """Vicuna has only tokenizer.model. Control pieces correspond to the added tokens of tokenizer.json."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<0x0A>", 6), ("▁the", 1), ("é", 1)]
    (tmp_path / "spm").mkdir()
    (tmp_path / "spm" / "tokenizer.model").write_bytes(sentencepiece(pieces))
    write(tmp_path / "spm", "added_tokens.json", {"<pad>": 6})
    write(tmp_path / "spm", "tokenizer_config.json", {"added_tokens_decoder": {"2": {"content": "</s>"}}})
    added = {0: "<unk>", 1: "<s>", 2: "</s>", 6: "<pad>"}
    write(tmp_path / "json", "tokenizer.json", tokenizer_json([text for text, _ in pieces], added))
    assert read_tokens(tmp_path / "spm") == read_tokens(tmp_path / "json")


def test_vocab_json_is_a_tokenizer_only_with_merges_txt(tmp_path: Path):
    write(tmp_path, "vocab.json", {"a": 0, "b": 1})
    assert read_tokens(tmp_path) is None
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    table = read_tokens(tmp_path)
    assert table is not None and table.texts == {0: "a", 1: "b"}


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": {"vocab": {}}}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": -1}}}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 99999999999}}}'),
        ("tokenizer.json", b'{"model": {"vocab": [["a", 0.0], 3]}}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": 3, "id": 1}]}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": ["b"], "id": 1}]}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}, "added_tokens": 7}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.model", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
        ("tokenizer.model", b"\x0a\x09short"),
        ("tokenizer.model", b"\x0a\x03\x0a\x01\xff"),
        ("tokenizer.model", b""),
    ],
)
def test_a_file_without_a_tokenizer_is_refused_by_name(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="unreadable"):
        read_tokens(tmp_path)


@pytest.mark.parametrize(
    "name, content",
    [
        ("special_tokens_map.json", {"extra_special_tokens": 7}),
        ("special_tokens_map.json", {"additional_special_tokens": 7}),
        ("tokenizer_config.json", {"extra_special_tokens": 7, "eos_token": ["</s>"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": 7}),
        ("tokenizer.json", tokenizer_json(TEXTS) | {"padding": 7}),
    ],
)
def test_tokens_of_another_kind_beside_the_tokenizer_are_left_out_or_refused_by_name(tmp_path: Path, name, content):
    write(tmp_path, "tokenizer.json", tokenizer_json(TEXTS))
    write(tmp_path, name, content)
    try:
        table = read_tokens(tmp_path)
        assert table is not None and table.size == len(TEXTS)
    except CheckpointError as error:
        assert str(tmp_path) in str(error)


def test_the_digest_depends_on_end_ids_and_not_on_formatting_or_weights(tmp_path: Path):
    for name in "abc":
        write(tmp_path / name, "config.json", LLAMA)
        write(tmp_path / name, "tokenizer.json", tokenizer_json(TEXTS))
    (tmp_path / "b" / "config.json").write_text(json.dumps(LLAMA, indent=8))
    save_file(ends(12), tmp_path / "b" / "model.safetensors")
    write(tmp_path / "c", "generation_config.json", {"eos_token_id": 3})
    a, b, c = (read_facts(tmp_path / name) for name in "abc")
    assert a.digest == b.digest != c.digest


@pytest.mark.parametrize("prefix", ["", "text_config."])
@pytest.mark.parametrize(
    ("key", "value"),
    [("model_type", 7), ("model_type", ["llama"]), ("layer_types", "full"), ("layer_types", [["full_attention"]])],
)
def test_a_configuration_whose_names_are_not_strings_is_refused_by_the_key(tmp_path: Path, prefix, key, value):
    write(tmp_path, "config.json", {**LLAMA, "text_config": {key: value}} if prefix else {**LLAMA, key: value})
    with pytest.raises(CheckpointError, match=f"config.json: {prefix}{key} must be a"):
        read_facts(tmp_path)
