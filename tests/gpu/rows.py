"""Tests whether a row's bits depend on the number of rows, by library setting, operation, dtype and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from step import DEVICE, DRY, require_device, write_result
from torch import Tensor

ROWS = (1, 2, 3, 8, 16) if DRY else (1, 2, 3, 4, 5, 7, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)
SHAPES = ((64, 96),) if DRY else ((576, 1536), (2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336), (14336, 4096))
HEADS = ((64, 300),) if DRY else ((576, 49152), (2048, 50280), (4096, 128256))
WIDTHS = (64,) if DRY else (576, 2048, 4096)
TILE = 32


@contextmanager
def reduced(allowed: bool) -> Iterator[None]:
    """Allow or forbid bfloat16 sums in bfloat16 products that split the inner dimension."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = allowed
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


@contextmanager
def library(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


SETTINGS = {
    "as it comes": lambda: reduced(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    "no reduced precision": lambda: reduced(False),
    "cublas": lambda: library("cublas"),
    "cublaslt": lambda: library("cublaslt"),
}
if DEVICE.type == "cpu":
    SETTINGS = {"as it comes": SETTINGS["as it comes"]}


def cancelling(rows: int, outputs: int, inner: int) -> tuple[Tensor, Tensor]:
    """Rows [rows, inner] and a weight [outputs, inner] whose products are 0 but for rounding."""
    generator = torch.Generator().manual_seed(0)
    row, column = (torch.randn(count, inner // 2, generator=generator) for count in (rows, outputs))
    return torch.cat([row, -row], 1), torch.cat([column, column], 1)


def differing(run: Callable[[Tensor], Tensor], rows: Tensor) -> list[int]:
    """The row counts with which some row has other bits than among all rows."""
    truth = run(rows)
    found = []
    for count in ROWS:
        for start in range(0, len(rows) - count + 1, count):
            if not torch.equal(run(rows[start : start + count].contiguous()), truth[start : start + count]):
                found.append(count)
                break
    return found


def in_full_tiles(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def tiled(x: Tensor) -> Tensor:
        tiles = F.pad(x, (0, 0, 0, -len(x) % TILE)).split(TILE)
        return torch.cat([run(tile) for tile in tiles])[: len(x)]

    return tiled


def norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def main() -> None:
    require_device()
    table = []

    def note(what: str, setting: str, dtype: torch.dtype, shape: str, found: list[int]) -> None:
        name = str(dtype).removeprefix("torch.")
        table.append({"operation": what, "setting": setting, "dtype": name, "shape": shape, "differ": found})
        print(f"{what:<22} {setting:<22} {name:<9} {shape:<14} {found or 'independent'}", flush=True)

    with torch.inference_mode():
        for setting, use in SETTINGS.items():
            with use():
                for what, dtype, shapes in (
                    ("product", torch.bfloat16, SHAPES),
                    ("product", torch.float32, SHAPES),
                    ("head", torch.float32, HEADS),
                ):
                    for inner, outputs in shapes:
                        made = cancelling(max(ROWS), outputs, inner)
                        rows, weight = (each.to(DEVICE, dtype) for each in made)

                        def run(x: Tensor, weight: Tensor = weight) -> Tensor:
                            return F.linear(x, weight)

                        for form, each in ((what, run), (f"{what} in full tiles", in_full_tiles(run))):
                            note(form, setting, dtype, f"{inner}x{outputs}", differing(each, rows))
        for dtype in (torch.bfloat16, torch.float32):
            for width in WIDTHS:
                rows = torch.randn(max(ROWS), width, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
                operations = {
                    "norm": norm,
                    "silu": F.silu,
                    "softmax": lambda x: x.float().softmax(-1),
                    "softplus": lambda x: F.softplus(x.float()),
                }
                for what, each in operations.items():
                    note(what, "as it comes", dtype, str(width), differing(each, rows))
    free = sum(not each["differ"] for each in table)
    write_result(f"{free} of {len(table)} independent", table=table, rows=ROWS)


main()
