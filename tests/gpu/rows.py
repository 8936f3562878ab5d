"""Tests whether a row's bits depend on the number of rows or on its place, by library setting, operation, dtype and
shape. The libraries read some settings once in a process, so each setting has its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tree_kernels.norm import GATE_FIRST, RowNorm
from tree_kernels.norm.triton import norm_rows
from tree_layers.wide_results import may_widen, widening

from tests.gpu.step import DEVICE, DRY, require_device, write_result

ROWS = (1, 2, 3, 8, 16) if DRY else (1, 2, 3, 4, 5, 7, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)
SHAPES = ((64, 96),) if DRY else ((576, 1536), (2048, 2048), (2048, 8192), (4096, 4096), (4096, 14336), (14336, 4096))
HEADS = ((64, 300),) if DRY else ((576, 49152), (2048, 50280), (4096, 128256))
WIDTHS = (64,) if DRY else (576, 2048, 4096)
VOCABULARIES = (301, 304) if DRY else (50277, 50280)
TILE = 32


def as_it_comes() -> None:
    pass


def without_reduced_sums() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def without_split_k() -> None:
    """As a target is loaded."""
    from verifier_service.models.gpu_products import settle_products  # imports a library of models

    settle_products()


def by_cublas() -> None:
    torch.backends.cuda.preferred_blas_library("cublas")


SETTINGS: Mapping[str, tuple[Callable[[], None], Mapping[str, str]]] = {
    "as it comes": (as_it_comes, {}),
    "no reduced sums": (without_reduced_sums, {}),
    "no split-K": (without_split_k, {}),
    "no workspace": (as_it_comes, {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
    "cublas": (by_cublas, {}),
}
"""By name: what is called before the first product, and the process's environment variables."""
PLAIN = "as it comes"


def cancelling(rows: int, outputs: int, inner: int) -> tuple[Tensor, Tensor]:
    """Rows [rows, inner] and a weight [outputs, inner] whose products are 0 but for rounding."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    row, column = (torch.randn(count, inner // 2, generator=generator, device=DEVICE) for count in (rows, outputs))
    order = torch.randperm(inner, generator=generator, device=DEVICE)
    return torch.cat([row, -row], 1)[:, order], torch.cat([column, column], 1)[:, order]


def differing(run: Callable[[Tensor], Tensor], rows: Tensor) -> list[int]:
    """The row counts with which some row has other bits than among all rows: in a view of them, in which its address is
    the same, or in a copy in another order, in which it is another."""
    truth = run(rows)
    found = []
    for count in ROWS:
        same = torch.tensor(True, device=DEVICE)
        for start in range(0, len(rows) - count + 1, count):
            part = slice(start, start + count)
            same &= (run(rows[part]) == truth[part]).all()
            same &= (run(rows[part].roll(1, 0)) == truth[part].roll(1, 0)).all()
        if not same:
            found.append(count)
    return found


def in_full_tiles(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def tiled(x: Tensor) -> Tensor:
        tiles = F.pad(x, (0, 0, 0, -len(x) % TILE)).split(TILE)
        return torch.cat([run(tile) for tile in tiles])[: len(x)]

    return tiled


def norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def products() -> Iterator[tuple[str, torch.dtype, str, list[int]]]:
    """Operation, dtype, shape, and the row counts that differ."""
    for what, dtype, shapes in (
        ("product", torch.bfloat16, SHAPES),
        ("product", torch.float16, SHAPES),
        ("product", torch.float32, SHAPES),
        ("head", torch.float32, HEADS),
        ("head", torch.bfloat16, HEADS),
    ):
        for inner, outputs in shapes:
            rows, weight = (each.to(dtype) for each in cancelling(max(ROWS), outputs, inner))

            def run(x: Tensor, weight: Tensor = weight) -> Tensor:
                return F.linear(x, weight)

            forms = {what: run, f"{what} in full tiles": in_full_tiles(run)}
            if what == "head" and may_widen(weight):
                forms["head with float32 results"] = widening(weight, None)
            for form, each in forms.items():
                yield form, dtype, f"{inner}x{outputs}", differing(each, rows)


def others() -> Iterator[tuple[str, torch.dtype, str, list[int]]]:
    """As `products`, of operations that no setting changes."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    for dtype in (torch.bfloat16, torch.float32):
        for width in WIDTHS:
            rows = torch.randn(max(ROWS), width, generator=generator, device=DEVICE).to(dtype)
            for what, run in {
                "norm": norm,
                "norm kernel": lambda x: norm_rows(x, RowNorm(1e-6)),
                "layer norm kernel": lambda x: norm_rows(x, RowNorm(1e-6, centred=True)),
                "gated norm kernel": lambda x: norm_rows(x, RowNorm(1e-6, gate=GATE_FIRST), x),
                "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
                "silu": F.silu,
                "softplus": lambda x: F.softplus(x.float()),
            }.items():
                yield what, dtype, str(width), differing(run, rows)
    for width in VOCABULARIES:
        rows = torch.randn(max(ROWS), width, generator=generator, device=DEVICE) * 3
        for what, run in {
            "softmax": lambda x: x.softmax(-1),
            "softmax padded to 4": lambda x: F.pad(x, (0, -x.shape[-1] % 4), value=-torch.inf).softmax(-1),
            "log_softmax": lambda x: x.log_softmax(-1),
            "logsumexp": lambda x: x.logsumexp(-1),
            "cumsum": lambda x: x.softmax(-1).double().cumsum(-1),
            "sort": lambda x: x.sort(dim=-1, descending=True, stable=True).values,
            "sum": lambda x: x.sum(-1),
        }.items():
            yield what, torch.float32, str(width), differing(run, rows)


def of_setting(setting: str, out: Path) -> None:
    """One setting's table, in this process."""
    SETTINGS[setting][0]()
    table = []
    with torch.inference_mode():
        for part in (products, others) if setting == PLAIN else (products,):
            for what, dtype, shape, found in part():
                name = str(dtype).removeprefix("torch.")
                table.append({"operation": what, "setting": setting, "dtype": name, "shape": shape, "differ": found})
                print(f"{what:<22} {setting:<16} {name:<9} {shape:<12} {found or 'independent'}", flush=True)
    out.write_text(json.dumps(table))


def main() -> None:
    require_device()
    table: list[dict[str, Any]] = []
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, (setting, (_, variables)) in enumerate(SETTINGS.items()):
            out = Path(folder) / f"{number}.json"
            command = [sys.executable, __file__, "--setting", setting, "--out", str(out), *(["--dry"] if DRY else [])]
            running.append((setting, out, subprocess.Popen(command, env=os.environ | variables)))
        for setting, out, process in running:
            if process.wait() == 0:
                table += json.loads(out.read_text())
            else:
                failed.append(setting)

    def kind(each: dict[str, Any]) -> tuple[str, str, str]:
        return each["setting"], each["operation"], each["dtype"]

    for setting, operation, dtype in sorted({kind(each) for each in table}):
        its = [
            each for each in table if (each["setting"], each["operation"], each["dtype"]) == (setting, operation, dtype)
        ]
        free = sum(not each["differ"] for each in its)
        print(f"{setting:<16} {operation:<22} {dtype:<9} {free} of {len(its)} shapes independent")
    free = sum(not each["differ"] for each in table)
    write_result(f"{free} of {len(table)} independent", table=table, rows=ROWS, failed=failed)
    sys.exit(bool(failed))


parser = argparse.ArgumentParser()
parser.add_argument("--dry", action="store_true")
parser.add_argument("--setting", choices=SETTINGS, help="this one alone, in this process")
parser.add_argument("--out", type=Path, help="where its table is written")
given = parser.parse_args()
if given.setting:
    of_setting(given.setting, given.out)
else:
    main()
