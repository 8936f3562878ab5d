"""Quantised weights of a model as its GGUF file has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from tree_kernels.matmul.quantised import QuantisedBlocks
from tree_kernels.matmul.quantised_shapes import QuantisedForm

from tree_layers.checkpoint import GGUF
from tree_layers.gguf_forms import FORMS_OF
from tree_layers.gguf_header import StoredTensor, read_gguf_header

Bytes = npt.NDArray[np.uint8]


def _halves(blocks: Bytes, at: int) -> Tensor:
    """Numbers [outputs, blocks] float16 at this byte of each block."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0])


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack fields of four bits: a block's first half of inputs is in the lower bits, the second in the upper ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _of_q4_1(blocks: Bytes) -> QuantisedBlocks:
    fields = torch.from_numpy(_nibbles(blocks[..., 4:])).flatten(1)
    return QuantisedBlocks(QuantisedForm.Q4_1, fields, _halves(blocks, 0), _halves(blocks, 2))


def _of_q4_0(blocks: Bytes) -> QuantisedBlocks:
    """Read blocks of Q4_0, whose numbers are `scale * (field - 8)`."""
    fields, scales = torch.from_numpy(_nibbles(blocks[..., 2:])).flatten(1), _halves(blocks, 0)
    return QuantisedBlocks(QuantisedForm.Q4_1, fields, scales, scales * -8)


def _of_q5_0(blocks: Bytes) -> QuantisedBlocks:
    """Read blocks of Q5_0, whose numbers are `scale * (field - 16)`; the fields' fifth bits are stored apart."""
    fifth = np.unpackbits(np.ascontiguousarray(blocks[..., 2:6]), axis=-1, bitorder="little")
    fields = (_nibbles(blocks[..., 6:]) | (fifth << 4)) + np.uint8(128 - 16)
    return QuantisedBlocks(QuantisedForm.Q8_0, torch.from_numpy(fields).flatten(1), _halves(blocks, 0), None)


def _of_q8_0(blocks: Bytes) -> QuantisedBlocks:
    fields = torch.from_numpy(blocks[..., 2:] ^ np.uint8(128)).flatten(1)  # a signed number plus 128
    return QuantisedBlocks(QuantisedForm.Q8_0, fields, _halves(blocks, 0), None)


def _of_q4_k(blocks: Bytes) -> QuantisedBlocks:
    """Read blocks of Q4_K: 8 parts of 32 numbers. A part's scale and offset have 6 bits each, times the block's own."""
    first, second, mixed = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], -1)
    offsets = np.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], -1)
    packed = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)  # bytes have fields of two parts each
    return QuantisedBlocks(
        QuantisedForm.Q4_K,
        torch.from_numpy(_nibbles(packed)).flatten(1),
        _parts(_halves(blocks, 0), scales),
        _parts(-_halves(blocks, 2), offsets),
    )


def _of_q6_k(blocks: Bytes) -> QuantisedBlocks:
    """Read blocks of Q6_K: 16 parts of 16 numbers `scale * (field - 32)`. A part's scale has 8 bits."""
    lower = _nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64))
    upper = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    fields = (lower | (upper.reshape(lower.shape) & 3) << 4) + np.uint8(128 - 32)
    scales = _parts(_halves(blocks, 208), blocks[..., 192:208].view(np.int8))
    return QuantisedBlocks(QuantisedForm.Q6_K, torch.from_numpy(fields).flatten(1), scales, None)


def _parts(own: Tensor, of_parts: npt.NDArray[Any]) -> Tensor:
    """Numbers of all parts [outputs, parts] float32: each block's number [outputs, blocks] times its parts'."""
    return (own.float()[..., None] * torch.from_numpy(of_parts.astype(np.float32))).flatten(1)


class BlockType(NamedTuple):
    """A type of a file's blocks."""

    numbers: int  # numbers of a block
    bytes: int
    read: Callable[[Bytes], QuantisedBlocks]


READ = {
    "Q4_0": BlockType(32, 18, _of_q4_0),
    "Q4_1": BlockType(32, 20, _of_q4_1),
    "Q5_0": BlockType(32, 22, _of_q5_0),
    "Q8_0": BlockType(32, 34, _of_q8_0),
    "Q4_K": BlockType(256, 144, _of_q4_k),
    "Q6_K": BlockType(256, 210, _of_q6_k),
}
"""The types that are read."""


class QuantisedTensors:
    """Finds a weight of a loaded model in the file that it was unpacked from."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        """folder: of a GGUF file, which transformers has read"""
        import gguf

        header = read_gguf_header(folder / GGUF)
        architecture = next((each for each, its in gguf.MODEL_ARCH_NAMES.items() if its == header.architecture), None)
        self._tensors: dict[int, StoredTensor] = {}  # key: address of the weight
        if architecture is None:
            return
        self._file: Bytes = np.asarray(np.memmap(folder / GGUF, np.uint8, "r"))
        names = gguf.get_tensor_name_map(architecture, header.layers)
        for key, weight in model.named_parameters():
            tensor = header.tensors.get(names.get_name(key, try_suffixes=(".weight",)) or "")
            if tensor is not None and weight.dim() == 2 and tensor.type_name in READ:
                self._tensors[weight.data_ptr()] = tensor

    def form_of(self, weight: Tensor) -> QuantisedForm | None:
        """The form of the weight's blocks, which are not read for it; None where the file has none."""
        tensor = self._tensors.get(weight.data_ptr())
        return None if tensor is None else QuantisedForm[FORMS_OF[tensor.type_name]]

    def blocks_of(self, weight: Tensor) -> QuantisedBlocks | None:
        """The blocks of a bfloat16 weight [outputs, inputs], which may be a model's first rows; None where the file has
        none whose unpacked numbers are the weight's, in any order of rows, and that fit our kernels."""
        tensor = self._tensors.get(weight.data_ptr())
        if tensor is None or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
            return None
        if len(tensor.shape) != 2 or tensor.shape[1] != weight.shape[1]:
            return None
        its = READ[tensor.type_name]
        stored = self._file[tensor.begin : tensor.begin + tensor.length]
        blocks = its.read(stored.reshape(tensor.shape[0], -1, its.bytes))
        rounded = blocks.unpacked().bfloat16()
        if len(weight) > len(rounded) or not torch.equal(rounded[: len(weight)], weight):
            rows = _rows_in(rounded, weight)
            if rows is None:
                return None
            blocks = blocks.of_rows(rows)
        elif len(weight) < len(rounded):
            blocks = blocks.of_rows(torch.arange(len(weight)))
        return blocks if blocks.fits(rounded) else None


def _rows_in(given: Tensor, wanted: Tensor) -> Tensor | None:
    """The row of `given` that equals each row of `wanted`: transformers reorders rows of some projections. None where
    one is missing. Zeros of both signs are the same: a sum that begins at zero has no other bits."""
    places = {row.tobytes(): place for place, row in enumerate((given + 0.0).view(torch.int16).numpy())}
    found = [places.get(row.tobytes(), -1) for row in (wanted.detach() + 0.0).view(torch.int16).numpy()]
    return None if -1 in found else torch.tensor(found)
