"""Weights of AWQ checkpoints in the format GEMM.

A weight is `scale * (field - zero)`, where the fields and zeros have 4 bits; a scale and a zero belong to an output and
a group of neighbouring inputs. `qweight` is [inputs, outputs / 8] int32, `qzeros` [groups, outputs / 8] int32, `scales`
[groups, outputs] float16. A word's fields are of 8 neighbouring outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tree_kernels.matmul.quantised import QuantisedBlocks
from tree_kernels.matmul.quantised_shapes import FORMS, QuantisedForm

from tree_layers.awq_settings import BITS, FIELDS, IN_WORD, SCALES, ZEROS
from tree_layers.checkpoint import weight_files
from tree_layers.errors import CheckpointError

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word has the field of each of its outputs, the lowest bits first."""
FORM = QuantisedForm.Q4_K
"""The form of its blocks: those of a group have the same scale and offset."""


@dataclass(frozen=True, slots=True, eq=False)
class AwqWeight:
    """A weight's tensors, unpacked to numbers."""

    fields: Tensor  # [outputs, inputs] uint8
    zeros: Tensor  # [outputs, groups] uint8
    scales: Tensor  # [outputs, groups] float32

    def unpacked(self) -> Tensor:
        """[outputs, inputs] float32, exact."""
        groups = self.fields.unflatten(1, (self.zeros.shape[1], -1)).float()
        weights: Tensor = (groups - self.zeros[..., None]) * self.scales[..., None]
        return weights.flatten(1)

    def blocks(self) -> QuantisedBlocks | None:
        """The weight as products take it; None for groups that are not a whole number of blocks."""
        repeats, left = divmod(self.fields.shape[1], self.zeros.shape[1] * FORMS[FORM].block)
        if left or not repeats:
            return None
        scales = self.scales.repeat_interleave(repeats, 1)
        offsets = (self.scales * self.zeros).neg().repeat_interleave(repeats, 1)
        return QuantisedBlocks(FORM, self.fields, scales, offsets)


def unpacked_tensors(folder: Path, tensors: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A checkpoint's tensors, with the quantised ones unpacked into a dtype, by the library's names. Raises
    CheckpointError, naming the tensor."""
    found = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in (FIELDS, ZEROS, SCALES)}
    for module in _modules(tensors):
        found[f"{module}.weight"] = read_weight(folder, module, tensors).unpacked().to(dtype)
    return found


def _modules(tensors: Mapping[str, Any]) -> list[str]:
    return [module for module, _, part in (name.rpartition(".") for name in tensors) if part == FIELDS]


def read_weight(folder: Path, module: str, tensors: Mapping[str, Any]) -> AwqWeight:
    """Read a module's weight. Raises CheckpointError, naming the tensor."""
    parts = []
    for part in (FIELDS, ZEROS, SCALES):
        name = f"{module}.{part}"
        if name not in tensors:
            raise CheckpointError(f"{folder}: there is no tensor {name}")
        tensor: Tensor = tensors[name][:]
        if tensor.dim() != 2 or (tensor.dtype != torch.int32 if part != SCALES else not tensor.is_floating_point()):
            raise CheckpointError(f"{folder}: {name} is {tensor.dtype} of shape {list(tensor.shape)}")
        parts.append(tensor)
    fields, zeros, scales = parts
    groups, outputs = scales.shape
    if not groups or zeros.shape != (groups, outputs // IN_WORD) or outputs % IN_WORD or len(fields) % groups:
        raise CheckpointError(
            f"{folder}: {module}: {ZEROS} and {SCALES} have the shapes {[*zeros.shape]} and {[*scales.shape]}"
        )
    if fields.shape[1] != outputs // IN_WORD:
        raise CheckpointError(f"{folder}: {module}.{FIELDS} has the shape {[*fields.shape]}, for {outputs} outputs")
    return AwqWeight(_numbers(fields), _numbers(zeros), scales.t().float().contiguous())


def _numbers(words: Tensor) -> Tensor:
    """[outputs, rows] uint8 of words [rows, outputs / 8]."""
    shifts = BITS * torch.tensor(PLACES, dtype=torch.int32)
    fields = (words[..., None] >> shifts) & ((1 << BITS) - 1)
    return fields.to(torch.uint8).flatten(1).t().contiguous()


class AwqTensors:
    """Finds a weight of a loaded model in the checkpoint that it was unpacked from."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}  # the file of each tensor
        for file in weight_files(folder):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
        modules = {f"{module}.weight": module for module in _modules(self._files)}
        self._modules = {  # the module of each weight, by the weight's address
            weight.data_ptr(): modules[name] for name, weight in model.named_parameters() if name in modules
        }

    def form_of(self, weight: Tensor) -> QuantisedForm | None:
        """The form of the weight's blocks, which are not read for it; None where the checkpoint has none."""
        return FORM if weight.data_ptr() in self._modules else None

    def blocks_of(self, weight: Tensor) -> QuantisedBlocks | None:
        """The blocks of a bfloat16 weight [outputs, inputs]; None where the checkpoint has none whose unpacked numbers
        are the weight's, and that fit our kernels."""
        module = self._modules.get(weight.data_ptr())
        if module is None or weight.dtype != torch.bfloat16:
            return None
        found = read_weight(self._folder, module, self._read(module))
        blocks = found.blocks() if found.fields.shape == weight.shape else None
        if blocks is None:
            return None
        rounded = blocks.unpacked().bfloat16()
        return blocks if torch.equal(rounded, weight) and blocks.fits(rounded) else None

    def _read(self, module: str) -> dict[str, Tensor]:
        found = {}
        for name in (f"{module}.{part}" for part in (FIELDS, ZEROS, SCALES)):
            if name in self._files:
                with safe_open(self._files[name], framework="pt") as opened:
                    found[name] = opened.get_tensor(name)
        return found
