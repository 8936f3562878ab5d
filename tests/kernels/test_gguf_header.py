"""The header of a GGUF file is read in bounded time and memory, whatever it claims."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from tree_layers.errors import CheckpointError
from tree_layers.gguf_header import MAX_ELEMENTS, MAX_KEYS, MAX_TENSORS, read_gguf_header

from tests.support.tiny_gguf import array, header, scalar, tensor, text, whole, write_llama

gguf = pytest.importorskip("gguf")
HUGE = (1 << 64) - 1
PADDED = bytes(32)
LONG, LONGISH = text("a" * 64_000), text("a" * 8_000)


def test_the_shapes_and_types_are_those_that_the_gguf_library_reads(tmp_path, monkeypatch):
    file = write_llama(tmp_path, monkeypatch)
    found = read_gguf_header(file)
    tensors = gguf.GGUFReader(file).tensors
    renamed = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
    assert found.shapes == {renamed.get(each.name, each.name): tuple(map(int, each.shape[::-1])) for each in tensors}
    assert found.stored == {"F32": len(tensors)}
    assert (found.architecture, found.layers) == ("llama", 3)
    for each in tensors:
        its = found.tensors[each.name]
        assert (its.type_name, its.begin, its.length) == ("F32", each.data_offset, each.n_bytes)


HOSTILE = {
    "keys": (header(keys=HUGE), f"{HUGE} keys; at most {MAX_KEYS}"),
    "tensors": (header(tensors=HUGE), f"{HUGE} tensors; at most {MAX_TENSORS}"),
    "no keys though it claims some": (header(keys=9), "ends within its header"),
    "a key longer than the file": (header(b"\xff" * 8, PADDED, keys=1), "ends within its header"),
    "a string longer than the file": (header(text("a"), b"\x08\0\0\0" + b"\xff" * 8, keys=1), "ends within its header"),
    "an endless array of nothing": (header(array("a", 0, HUGE), keys=1), f"more than {MAX_ELEMENTS} elements"),
    "an endless array of strings": (header(array("a", 8, 1 << 20), keys=1), "ends within its header"),
    "arrays that are endless together": (header(*[array(k, 0, 1 << 20) for k in "ab"], keys=2), "header"),
    "an array of arrays": (header(array("a", 9, 2), keys=1), "a has values of type 9"),
    "an unknown type of value": (header(text("a"), b"\x63\0\0\0", keys=1), "a has values of type 99"),
    "a name that is no text": (header(b"\x01" + bytes(7) + b"\xff", keys=1), "is not text"),
    "many dimensions": (header(tensor("a", (1,) * 5), tensors=1), "5 dimensions of a; at most 4"),
    "a huge tensor": (header(tensor("a", (HUGE, HUGE)), PADDED, tensors=1), "its tensors need"),
    "a tensor that lies elsewhere": (header(tensor("a", (1,), offset=1 << 40), PADDED, tensors=1), "its tensors need"),
    "tensors on top of each other": (header(tensor("a", (8,)), tensor("b", (8,)), bytes(60), tensors=2), "its tensors"),
    "two tensors of a name": (header(tensor("a", (1,)), tensor("a", (1,)), PADDED, tensors=2), "two tensors a"),
    "an unknown type of tensor": (header(tensor("a", (1,), kind=999), tensors=1), "a is of type 999"),
    "half a block": (header(tensor("a", (31,), kind=8), PADDED, tensors=1), "a is of type Q8_0 and has the shape"),
    "no alignment": (header(whole("general.alignment", (1 << 32) - 1), PADDED, keys=1), "general.alignment is"),
    "more layers than tensors": (header(whole("llama.block_count", 1 << 31), keys=1), "llama.block_count is"),
    "layers of a signed number": (header(scalar("qwen2.block_count", 11, "q", 1 << 40), keys=1), "is no unsigned"),
    "layers of a fraction": (header(scalar("qwen2.block_count", 12, "d", 1e12), keys=1), "is no unsigned whole number"),
    "layers of a list": (header(array("qwen2.block_count", 11, 1, bytes(8)), keys=1), "is no unsigned whole number"),
    "fewer than no layers that predict": (
        header(scalar("qwen35.nextn_predict_layers", 5, "i", -1 << 30), keys=1),
        "qwen35.nextn_predict_layers is no unsigned whole number",
    ),
    "two keys of a name": (header(whole("a", 1), whole("a", 2), keys=2), "it has two keys a"),
    "a token that is long": (header(array("tokenizer.ggml.tokens", 8, 1, LONG), keys=1), "with those of tokenizer"),
    "tokens that are long together": (header(array("a", 8, 99, LONGISH * 99), keys=1), "its arrays are too long"),
    "an old version": (header(version=1), "its version is 1"),
    "the other byte order": (header(version=3 << 24), "its version is"),
    "a part of a model": (header(whole("split.count", 3), keys=1), "one of 3 files .* join them"),
}


@pytest.mark.parametrize(("content", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_in_little_memory(content: bytes, reason: str, tmp_path: Path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"bad\.gguf cannot be read: .*{reason}"):
            read_gguf_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_was_cut_anywhere_is_refused(tmp_path, monkeypatch):
    whole_file = write_llama(tmp_path, monkeypatch).read_bytes()
    file = tmp_path / "cut.gguf"
    for length in range(0, len(whole_file), len(whole_file) // 40):
        file.write_bytes(whole_file[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf_header(file)


def test_without_the_package_gguf_the_extra_that_has_it_is_named(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(header(tensor("a", (1,)), PADDED, tensors=1))
    monkeypatch.setitem(__import__("sys").modules, "gguf.constants", None)
    with pytest.raises(CheckpointError, match=r"needs the package gguf: pip install 'dendroaspis\[serve\]'"):
        read_gguf_header(file)
