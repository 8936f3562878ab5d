"""`dendro bench tree-scan`: the cost of a tree in one Mamba-2 layer, packed, as a batch of its paths, and by
transformers' chunk scan.

The layer has random weights and a published model's size. The text ends one and a half blocks after its checkpoint; a
tree below it is computed in every way, interleaved. Ours are the mixers and the rows that the engine runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from dendro.errors import BadRequest, EngineFailed
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan
from tree_kernels import step_size
from tree_kernels.tree_attention import NEAR_CHOICES
from tree_layers.tree_mixers import MixerLayout, RecurrentMemory, RecurrentStep, TreeMamba2

from cluster.bench.allocations import peak_bytes
from cluster.measure.bench import Aim, Bench, Plot, ReportTable, option, seed
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Row
from cluster.measure.turns import estimates, over
from verifier_service.recurrent import FoldOf, RecurrentRows, recurrent_step

PACKED = "packed"
UNROLLED = "unrolled"
LIBRARY = "transformers, checkpoint and ring"
WAYS = (PACKED, UNROLLED, LIBRARY)
WIDTH = 4
"""Taps of the convolution."""
LIBRARY_BOUND = 1e-3
"""Bound of the relative difference of ours and the library's: all is float32 but the convolution's output, where
another order of summation may round to another bfloat16."""
BINARY_DEPTHS, BEAM_STEPS, BEAM_WIDTHS = (0, 3, 4, 5), (4, 8, 16), (2, 3, 4, 5)

CPU = torch.device("cpu")
MIB = 2**20


class PublishedSize(StrEnum):
    SMALLEST = "130m"
    SMALL = "370m"
    MIDDLE = "780m"
    LARGE = "1.3b"
    LARGEST = "2.7b"


@dataclass(frozen=True, slots=True)
class TreeScanOptions:
    size: PublishedSize = option("Published Mamba-2 model of the layer's size.", PublishedSize.SMALLEST)
    block: int = option("Tokens of a block: 16, 32 or 64, at least the depth of the deepest tree.", 16)
    repetitions: int = option("Repetitions of each step.", 20, 5, least=1)
    beams: bool = option("Also measure trees of beams.", True, False)
    seed: int = seed()

    def __post_init__(self) -> None:
        if self.block not in NEAR_CHOICES:
            raise BadRequest("block", f"{self.block} is none of {', '.join(map(str, NEAR_CHOICES))}")


@dataclass(frozen=True, slots=True)
class ScanModelSize:
    """The sizes of a layer of a Mamba-2 model."""

    name: str
    heads: int
    width: int = 64
    groups: int = 1
    state: int = 128

    @property
    def layout(self) -> MixerLayout:
        inner = self.heads * self.width
        channels = inner + 2 * self.groups * self.state
        return MixerLayout(channels, self.heads, self.width, self.groups, self.state, torch.bfloat16)


SIZES = {
    size.name: size
    for size in (
        ScanModelSize("130m", 24),
        ScanModelSize("370m", 32),
        ScanModelSize("780m", 48),
        ScanModelSize("1.3b", 64),
        ScanModelSize("2.7b", 80),
    )
}


@dataclass(frozen=True, eq=False)
class ScanTree:
    """A tree by the parents of its rows, the root first."""

    name: str
    parents: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.parents)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The rows from the root to each row, itself last."""
        paths: list[tuple[int, ...]] = []
        for row, parent in enumerate(self.parents):
            paths.append((*paths[parent], row) if row else (row,))
        return tuple(paths)

    @cached_property
    def leaves(self) -> tuple[tuple[int, ...], ...]:
        """The paths to the leaves."""
        return tuple(path for row, path in enumerate(self.paths) if row not in self.parents)

    @property
    def depth(self) -> int:
        return max(map(len, self.paths)) - 1

    @property
    def unrolled_rows(self) -> int:
        return sum(map(len, self.leaves))


def binary(depth: int) -> ScanTree:
    """A full binary tree, as in STree's Figure 3."""
    rows = 2 ** (depth + 1) - 1
    return ScanTree(f"binary, depth {depth}", (-1, *((row - 1) // 2 for row in range(1, rows))))


def beams(steps: int, width: int, seed: int) -> ScanTree:
    """A beam search without pruning, as in STree's Table 1: each beam continues a random one of the step before."""
    rng = np.random.default_rng([seed, steps, width])
    parents, before = [-1], [0]
    for _ in range(steps):
        here = list(range(len(parents), len(parents) + width))
        parents += sorted(before[int(choice)] for choice in rng.integers(0, len(before), width))
        before = here
    return ScanTree(f"beams, {steps} x {width}", tuple(parents))


def rows_of(trails: Sequence[Sequence[int]], root: int, block: int, checkpoints: Sequence[int]) -> RecurrentRows:
    """Rows of a step. trails: for each row the slots of its path from position `root` on, its own last.

    The text's position p is in slot 1 + p. checkpoints[n]: the state slot after n blocks. Equals `recurrent_rows`, but
    has no limit on the rows of a tree.
    """
    text = np.arange(1, root + 1)
    columns = np.zeros((len(trails), 2 * block), np.int64)
    own, sources = np.zeros(len(trails), np.int64), np.zeros(len(trails), np.int64)
    for row, trail in enumerate(trails):
        path = np.concatenate([text, trail]).astype(np.int64)
        position = len(path) - 1
        start = block * (position // block - 1)
        inputs = path[max(start, 0) :]
        own[row], sources[row] = position - start, checkpoints[max(position // block - 1, 0)]
        columns[row, own[row] + 1 - len(inputs) : own[row] + 1] = inputs
    return RecurrentRows(columns, own, np.zeros(len(trails), np.int64), sources, ())


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """The outputs of a layer's input projection, for the rows of one tree."""

    raw: Tensor  # [rows, channels] before the convolution
    dt: Tensor  # [rows, H] before softplus


class ScanLayer:
    """One layer of random weights and the memory of one text, of which `root` tokens are consumed."""

    def __init__(self, size: ScanModelSize, block: int, rows: int, seed: int) -> None:
        """rows: the most rows of a step."""
        self.size, self.block, self.root = size, block, 2 * block + block // 2
        self.scratch = 1 + self.root
        layout = size.layout
        self._generator = torch.Generator().manual_seed(seed)
        self.mixer = TreeMamba2(
            layout,
            conv_weight=0.5 * self._random(WIDTH, layout.channels),
            conv_bias=0.1 * self._random(layout.channels),
            dt_bias=self._random(layout.heads) - 4,  # most tokens weigh little, as in trained models
            A=-1 - 15 * torch.rand(layout.heads, generator=self._generator),
            D=1 + 0.1 * self._random(layout.heads),
            dt_limit=(0.0, float("inf")),
        )
        # Checkpoints after one block and after two.
        self.memory = RecurrentMemory([layout], self.scratch + max(step_size(rows), self.root), 3, CPU).layers[0]
        self.text = self.inputs(self.root)
        self._fill()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def inputs(self, rows: int) -> ScanInputs:
        """Random inputs of `rows` rows."""
        layout = self.size.layout
        return ScanInputs(self._random(rows, layout.channels).bfloat16(), self._random(rows, layout.heads).bfloat16())

    def _fill(self) -> None:
        slots = np.arange(1, self.root + 1)
        blocks = slots[: 2 * self.block].reshape(2, self.block)
        rows = rows_of([range(1, position + 2) for position in range(self.root)], 0, self.block, (0, -1, -2))
        folds = (FoldOf(0, blocks[0], 1), FoldOf(-1, blocks[1], 2))
        step = recurrent_step(replace(rows, folds=folds), self.root, 1, CPU)
        self.mixer(self.text.raw, self.text.dt, self.memory, step)

    def step(self, trails: Sequence[Sequence[int]]) -> RecurrentStep:
        """A step whose rows write consecutive slots from `scratch` on; padding is for matrix products only."""
        rows = rows_of(trails, self.root, self.block, (0, 1, 2))
        return recurrent_step(rows, step_size(len(trails)), self.scratch, CPU)

    def ours(self, given: ScanInputs, trails: Sequence[Sequence[int]]) -> Callable[[], Tensor]:
        """Rows at these paths of scratch slots; the returned function computes y [rows, H P]."""
        step = self.step(trails)
        missing = len(step.slots) - len(trails)
        raw, dt = (F.pad(each, (0, 0, 0, missing)) for each in (given.raw, given.dt))
        return lambda: self.mixer(raw, dt, self.memory, step)[: len(trails)]

    def packed(self, given: ScanInputs, shape: ScanTree) -> Callable[[], Tensor]:
        """The tree's rows, each once."""
        return self.ours(given, [[self.scratch + row for row in path] for path in shape.paths])

    def unrolled(self, given: ScanInputs, shape: ScanTree) -> Callable[[], Tensor]:
        """The rows of all paths from the root to a leaf, each path with its own slots."""
        index = torch.tensor([row for path in shape.leaves for row in path])
        trails, first = [], self.scratch
        for path in shape.leaves:
            trails += [range(first, first + count) for count in range(1, len(path) + 1)]
            first += len(path)
        return self.ours(ScanInputs(given.raw[index], given.dt[index]), trails)

    def library(self, given: ScanInputs, shape: ScanTree) -> Callable[[], Tensor]:
        """The paths as a batch for transformers' chunk scan, from the checkpoint, with the tokens since it in front.
        Returns what computes y [rows, H P]. The convolution runs over the tree's tokens alone."""
        layout, mixer, memory = self.size.layout, self.mixer, self.memory
        batch, longest = len(shape.leaves), max(map(len, shape.leaves))
        index = torch.tensor([[*path, *[path[-1]] * (longest - len(path))] for path in shape.leaves])
        wanted = torch.tensor([index < len(path) for path in shape.leaves for index in range(longest)])
        raw, dt = given.raw[index], given.dt[index].float()
        before = memory.raw[self.root + 2 - WIDTH : self.root + 1].expand(batch, -1, -1)
        weight, bias = mixer.conv_weight.t().contiguous(), mixer.conv_bias
        slots = slice(1 + self.block, 1 + self.root)
        ring_x, ring_B = (each[slots].expand(batch, -1, -1, -1) for each in memory.inputs[:2])
        ring_dt = self.text.dt[slots.start - 1 : slots.stop - 1].float().expand(batch, -1, -1)
        state = memory.states[1].expand(batch, -1, -1, -1)
        shared = layout.groups * layout.size
        parts = (layout.heads * layout.width, shared, shared)

        def run() -> Tensor:
            convolved = torch.cat([before, raw], 1).transpose(1, 2)
            mixed = causal_conv1d_fn(convolved.float(), weight, bias, "silu")[..., WIDTH - 1 :].to(raw.dtype)
            x, B, C = mixed.transpose(1, 2).split(parts, -1)
            x = torch.cat([ring_x, x.unflatten(-1, (layout.heads, layout.width))], 1)
            # The ring's outputs are discarded, so its C may have any value.
            B, C = (torch.cat([ring_B, each.unflatten(-1, (layout.groups, layout.size))], 1) for each in (B, C))
            y: Tensor = mamba2_chunk_scan(
                x,
                torch.cat([ring_dt, dt], 1),
                mixer.A,
                B,
                C,
                chunk_size=x.shape[1],  # the fastest here; that of the published models pads to 256 tokens
                D=mixer.D,
                dt_bias=mixer.dt_bias,
                initial_states=state,
                dt_softplus=True,
            )
            return y[:, -longest:].reshape(batch * longest, -1)[wanted]

        return run


def shapes_of(options: TreeScanOptions) -> tuple[ScanTree, ...]:
    trees = [binary(depth) for depth in BINARY_DEPTHS]
    if options.beams:
        trees += [beams(steps, width, options.seed) for steps in BEAM_STEPS for width in BEAM_WIDTHS]
    return tuple(trees)


def ways_of(layer: ScanLayer, shape: ScanTree) -> dict[str, Callable[[], Tensor]]:
    """The tree in every way, from the same inputs."""
    given = layer.inputs(shape.rows)
    return {
        PACKED: layer.packed(given, shape),
        UNROLLED: layer.unrolled(given, shape),
        LIBRARY: layer.library(given, shape),
    }


def check_agreement(shape: ScanTree, ways: Mapping[str, Callable[[], Tensor]]) -> float:
    """The relative difference of the library's results from ours. Raises EngineFailed if it reaches LIBRARY_BOUND, or
    if a packed row is not bitwise equal to the same row on its own path."""
    packed = ways[PACKED]()[torch.tensor([row for path in shape.leaves for row in path])]
    if not torch.equal(packed, ways[UNROLLED]()):
        raise EngineFailed(f"{shape.name}: rows packed in a tree differ from the same rows on their own paths")
    far = float((ways[LIBRARY]() - packed).norm() / packed.norm())
    if not far < LIBRARY_BOUND:
        raise EngineFailed(f"{shape.name}: ours and transformers' differ by {far:.1e}, relative")
    return far


def layer_rows(layer: ScanLayer, shapes: Sequence[ScanTree], repetitions: int, step: Step) -> tuple[list[Row], float]:
    """A row for each tree, all ways of all trees interleaved after a warm-up; and the library's largest difference."""
    seconds: list[dict[str, list[float]]] = [{way: [] for way in WAYS} for _ in shapes]
    with torch.inference_mode():
        ways = [ways_of(layer, shape) for shape in shapes]
        far = max(check_agreement(shape, mine) for shape, mine in zip(shapes, ways, strict=True))
        temporaries = [{way: round(peak_bytes(mine[way]) / MIB, 4) for way in WAYS} for mine in ways]
        step()
        order = random.Random(0)
        for _ in range(repetitions):
            for times, mine in zip(seconds, ways, strict=True):
                # Caches depend on what ran before: no way always follows the same one.
                for way in order.sample(WAYS, len(WAYS)):
                    started = time.perf_counter()
                    mine[way]()
                    times[way].append(time.perf_counter() - started)
            step()
    return [
        {
            "tree": shape.name,
            "rows": shape.rows,
            "paths": len(shape.leaves),
            "unrolled_rows": shape.unrolled_rows,
            "ms": estimates(times),
            "over_packed": {way: over(times[way], times[PACKED]) for way in WAYS[1:]},
            "temporary_mib": held,
        }
        for shape, times, held in zip(shapes, seconds, temporaries, strict=True)
    ], far


def measure(options: TreeScanOptions, begin: Begin) -> dict[str, Any]:
    size, shapes = SIZES[options.size], shapes_of(options)
    layer = ScanLayer(size, options.block, max(shape.unrolled_rows for shape in shapes), options.seed)
    step = begin(f"a layer of {size.name}", options.repetitions + 1)
    rows, far = layer_rows(layer, shapes, options.repetitions, step)
    return {"plan": {"largest_difference": far}, "rows": rows}


TREE_SCAN = Bench(
    "tree-scan",
    "Time a tree in a state-space layer, and measure its temporaries: packed, as a batch of its paths, and by "
    "transformers' chunk scan. Runs on the CPU, in this process.",
    "A few seconds: binary trees alone, five repetitions.",
    TreeScanOptions,
    measure,
    facts=(
        "A Mamba-2 layer of random weights; inputs in bfloat16, decays and sums in float32. The tree's root is one and "
        "a half blocks after the checkpoint",
        "Times are of the convolution and the scan, from the linear layer's output to y; without linear layers, folds, "
        "and the index lists that all layers of a step share",
        f"{PACKED}: each row of the tree once. {UNROLLED}: all rows of all paths from the root to a leaf, by the same "
        "kernels in one batch that reads the checkpoint once. Both are padded to 8 rows",
        f"{LIBRARY}: `mamba2_chunk_scan` in PyTorch over the paths as a batch, the ring's tokens in front, already "
        "convolved, in one chunk (the published 256 would pad each path to 256 tokens)",
        "Before measuring: every packed row has the bits of the same row on its own path; the library's answers are "
        "within {largest_difference:.1e} of ours, relative",
        "Temporaries: peak bytes of torch tensors allocated by the call, its result included, by torch.profiler",
    ),
    tables=(
        ReportTable(
            "A layer's step, median and 90 %",
            "rows",
            "tree; rows; paths; rows unrolled = unrolled_rows; * ms = ms/*:.2f",
        ),
        ReportTable("Over packed, median and 90 % of paired ratios", "rows", "tree; rows; * = over_packed/*:.2f"),
        ReportTable("Temporaries of a layer's step, MiB", "rows", "tree; rows; * = temporary_mib/*:.2f"),
    ),
    aims=(
        Aim(
            "unrolled over packed, {tree}, {rows} rows",
            "rows",
            f"over_packed/{UNROLLED}",
            least=1.0,
            end="low",
            where=lambda row: row["rows"] >= 15,
        ),
    ),
    plots=(
        Plot("rows", "rows of the tree = rows", "time of a layer's step * (ms) = ms/*", log="y"),
        Plot("rows", "rows of the tree = rows", "over packed * = over_packed/*", log="y"),
    ),
    code=("kernels/tree_kernels/tree_scan", "kernels/tree_layers/tree_mixers.py", "verifier_service/recurrent.py"),
)
bench_tree_scan = TREE_SCAN.command()
