"""The cost of a tree in one Mamba-2 layer: packed, as a batch of its paths, and by transformers' chunk scan.

The layer has random weights and a published model's size. The text ends one and a half blocks after its checkpoint; a
tree below it is computed in every way, interleaved. Ours are the mixers and the rows that the engine runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from dendro.errors import EngineFailed
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan
from tree_kernels import step_size
from tree_kernels.tree_scan import BlockFold, fold
from tree_layers.tree_mixers import MixerLayout, RecurrentMemory, RecurrentStep, TreeMamba2

from cluster.bench.allocations import peak_bytes
from cluster.measure.measurement import Step
from cluster.measure.report import aim_row
from cluster.measure.statistics import Estimate, Key, median_estimate, paired_ratio
from verifier_service.models.head import HEAD_ROWS, Logits
from verifier_service.models.mixers import seat_mixers
from verifier_service.models.seats import ForwardContext
from verifier_service.recurrent import Extent, FoldOf, RecurrentRows
from verifier_service.recurrent_steps import recurrent_step

PACKED = "packed"
UNROLLED = "unrolled"
LIBRARY = "transformers, checkpoint and ring"
NEWEST = "transformers, newest state"
WAYS = (PACKED, UNROLLED, LIBRARY, NEWEST)
WIDTH = 4
"""Taps of the convolution."""
VOCABULARY = 50288
LIBRARY_BOUND = 1e-3
"""Bound of the relative difference of ours and the library's: all is float32 but the convolution's output, where
another order of summation may round to another bfloat16."""
AIM_ROWS = 15
SPEED_BAR, MEMORY_BAR = 1.0, 1.05
MEMORY_ROWS = 63
"""Rows of the tree whose memory is judged."""
BINARY_DEPTHS, BEAM_STEPS, BEAM_WIDTHS = (0, 3, 4, 5), (4, 8, 16), (2, 3, 4, 5)

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ScanModelSize:
    """The sizes of a Mamba-2 model."""

    name: str
    hidden: int
    layers: int
    heads: int
    width: int = 64
    groups: int = 1
    state: int = 128
    vocabulary: int = VOCABULARY

    @property
    def layout(self) -> MixerLayout:
        inner = self.heads * self.width
        channels = inner + 2 * self.groups * self.state
        return MixerLayout(channels, self.heads, self.width, self.groups, self.state, torch.bfloat16)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a checkpoint in bfloat16, with embeddings tied to the head."""
        inner, channels = self.heads * self.width, self.layout.channels
        layer = self.hidden * (inner + channels + self.heads) + (WIDTH + 1) * channels + 3 * self.heads
        layer += inner + inner * self.hidden + self.hidden
        return 2 * (self.layers * layer + self.vocabulary * self.hidden + self.hidden)


SIZES = {
    size.name: size
    for size in (
        ScanModelSize("130m", 768, 24, 24),
        ScanModelSize("370m", 1024, 48, 32),
        ScanModelSize("780m", 1536, 48, 48),
        ScanModelSize("1.3b", 2048, 48, 64),
        ScanModelSize("2.7b", 2560, 64, 80),
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
        """For every row, the rows from the root to it, itself last."""
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
        # Checkpoints after one block and after two, and for the library one after the whole text.
        self.memory = RecurrentMemory([layout], self.scratch + max(step_size(rows), self.root), 4, CPU).layers[0]
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
        rest = BlockFold(2, torch.from_numpy(slots[2 * self.block :]), 3)
        (self.memory.states[3],) = fold(self.memory.inputs, self.memory.states, [rest], self.mixer.A)

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

    def library(self, given: ScanInputs, shape: ScanTree, ring: bool) -> Callable[[], Tensor]:
        """The paths as a batch for transformers' chunk scan; the returned function computes y [rows, H P].

        ring: start from the checkpoint, with the tokens since it prepended, instead of from the newest state.

        The convolution runs over the tree's tokens alone, after the text's last inputs.
        """
        layout, mixer, memory = self.size.layout, self.mixer, self.memory
        batch, longest = len(shape.leaves), max(map(len, shape.leaves))
        index = torch.tensor([[*path, *[path[-1]] * (longest - len(path))] for path in shape.leaves])
        wanted = torch.tensor([index < len(path) for path in shape.leaves for index in range(longest)])
        raw, dt = given.raw[index], given.dt[index].float()
        before = memory.raw[self.root + 2 - WIDTH : self.root + 1].expand(batch, -1, -1)
        weight, bias = mixer.conv_weight.t().contiguous(), mixer.conv_bias
        slots = slice(1 + self.block, 1 + self.root) if ring else slice(0, 0)
        ring_x, ring_B = (each[slots].expand(batch, -1, -1, -1) for each in memory.inputs[:2])
        ring_dt = self.text.dt[slots.start - 1 : slots.stop - 1].float() if ring else self.text.dt[:0].float()
        ring_dt = ring_dt.expand(batch, -1, -1)
        state = memory.states[1 if ring else 3].expand(batch, -1, -1, -1)
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


def shapes_of(quick: bool, seed: int) -> tuple[ScanTree, ...]:
    """The measured trees; a quick run has no beams."""
    trees = [binary(depth) for depth in BINARY_DEPTHS]
    if not quick:
        trees += [beams(steps, width, seed) for steps in BEAM_STEPS for width in BEAM_WIDTHS]
    return tuple(trees)


@dataclass(slots=True)
class ScanResult:
    """The measurements of one tree in every way."""

    shape: ScanTree
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    temporary_bytes: dict[str, int] = field(default_factory=dict)

    def over_packed(self, way: str) -> Estimate:
        """The paired ratio of this way's time to packed's."""
        over, packed = self._keyed(way), self._keyed(PACKED)
        return paired_ratio(over, packed)

    def _keyed(self, way: str) -> dict[Key, float]:
        return {(repetition, 0): seconds for repetition, seconds in enumerate(self.seconds[way])}


def ways_of(layer: ScanLayer, shape: ScanTree) -> dict[str, Callable[[], Tensor]]:
    """The tree in every way, from the same inputs."""
    given = layer.inputs(shape.rows)
    return {
        PACKED: layer.packed(given, shape),
        UNROLLED: layer.unrolled(given, shape),
        LIBRARY: layer.library(given, shape, ring=True),
        NEWEST: layer.library(given, shape, ring=False),
    }


def check_agreement(shape: ScanTree, ways: Mapping[str, Callable[[], Tensor]]) -> float:
    """The relative difference of the library's results from ours. Raises EngineFailed if it reaches LIBRARY_BOUND, or
    if a packed row is not bitwise equal to the same row on its own path."""
    packed = ways[PACKED]()[torch.tensor([row for path in shape.leaves for row in path])]
    if not torch.equal(packed, ways[UNROLLED]()):
        raise EngineFailed(f"{shape.name}: rows packed in a tree differ from the same rows on their own paths")
    far = max(float((ways[way]() - packed).norm() / packed.norm()) for way in (LIBRARY, NEWEST))
    if not far < LIBRARY_BOUND:
        raise EngineFailed(f"{shape.name}: ours and transformers' differ by {far:.1e}, relative")
    return far


def measure_tree_scan(
    layer: ScanLayer, shapes: Sequence[ScanTree], repetitions: int, step: Step
) -> tuple[list[ScanResult], float]:
    """All ways of all trees, interleaved, after a warm-up; also the library's largest relative difference."""
    found = [ScanResult(shape) for shape in shapes]
    with torch.inference_mode():
        ways = [ways_of(layer, shape) for shape in shapes]
        far = max(check_agreement(shape, mine) for shape, mine in zip(shapes, ways, strict=True))
        for each, mine in zip(found, ways, strict=True):
            each.temporary_bytes = {way: peak_bytes(mine[way]) for way in WAYS}
        step()
        order = random.Random(0)
        for _ in range(repetitions):
            for each, mine in zip(found, ways, strict=True):
                # Caches depend on what ran before: no way always follows the same one.
                for way in order.sample(WAYS, len(WAYS)):
                    started = time.perf_counter()
                    mine[way]()
                    each.seconds[way].append(time.perf_counter() - started)
            step()
    return found, far


@dataclass(frozen=True, slots=True)
class ScanMemory:
    """The memory of a whole model for one text and a step of one tree, in bytes."""

    size: str
    name: str
    rows: int
    weights: int
    kept: int  # the text's checkpoints and ring
    scratch: int  # the inputs of a step's rows
    temporaries: int  # peak of a step
    logits: int  # of the temporaries; of one block of rows

    @property
    def total(self) -> int:
        return self.weights + self.kept + self.scratch + self.temporaries


def plain_of(memory: Sequence[ScanMemory], other: ScanMemory) -> ScanMemory:
    """The same model's memory in plain decoding."""
    return next(each for each in memory if each.size == other.size and each.rows == 1)


def model_memory(size: ScanModelSize, block: int, shapes: Sequence[ScanTree]) -> list[ScanMemory]:
    """The memory for each tree, packed, at an engine whose deepest tree it is.

    Temporaries are measured on a model of one layer: a layer's are freed before the next layer's are allocated.
    """
    layout = size.layout
    run = ForwardContext()
    config = Mamba2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=1,
        num_heads=size.heads,
        head_dim=size.width,
        n_groups=size.groups,
        state_size=size.state,
        expand=size.heads * size.width // size.hidden,
        conv_kernel=WIDTH,
        tie_word_embeddings=True,
    )
    model: Any = Mamba2ForCausalLM(config)
    model = model.bfloat16().eval().requires_grad_(False)
    seat_mixers(Path("random"), model, run)
    head = model.lm_head.weight.float()
    layer = ScanLayer(size, block, max(shape.rows for shape in shapes), seed=0)
    run.recurrent = RecurrentMemory([layout], len(layer.memory.raw), len(layer.memory.states), CPU)
    found = []
    for shape in shapes:
        step = layer.step([[layer.scratch + row for row in path] for path in shape.paths])
        tokens = torch.zeros(1, len(step.slots), dtype=torch.int64)
        run.recurrent_step = step

        def forward(tokens: Tensor = tokens) -> None:
            hidden = model.backbone(tokens, use_cache=False).last_hidden_state[0]
            logits = Logits(hidden, lambda rows: F.linear(rows.float(), head))  # the engine's, float32
            for row in range(len(hidden)):  # as a walk that visits all rows
                logits.row(row)

        with torch.inference_mode():
            forward()
            temporaries = peak_bytes(forward)
        extent = Extent.of(block, shape.depth + 1, shape.depth)
        kept = size.layers * (extent.ring * layout.token_bytes + extent.checkpoints * layout.state_bytes)
        scratch = size.layers * len(step.slots) * layout.token_bytes
        logits = min(len(step.slots), HEAD_ROWS) * size.vocabulary * 4
        found.append(
            ScanMemory(size.name, shape.name, shape.rows, size.weight_bytes, kept, scratch, temporaries, logits)
        )
    return found


def rows_of_report(found: Sequence[ScanResult]) -> list[dict[str, Any]]:
    """One object per tree."""
    return [
        {
            "tree": each.shape.name,
            "rows": each.shape.rows,
            "depth": each.shape.depth,
            "paths": len(each.shape.leaves),
            "unrolled_rows": each.shape.unrolled_rows,
            "ms": {way: median_estimate([1e3 * took for took in each.seconds[way]]).as_json() for way in WAYS},
            "over_packed": {way: each.over_packed(way).as_json() for way in WAYS if way != PACKED},
            "temporary_bytes": each.temporary_bytes,
        }
        for each in found
    ]


def aims_of(rows: Sequence[Mapping[str, Any]], memory: Sequence[ScanMemory]) -> list[dict[str, Any]]:
    """The aims: never slower than unrolled paths, and at most MEMORY_BAR times the memory of plain decoding."""
    aims: list[dict[str, Any]] = []
    for row in rows:
        if row["rows"] >= AIM_ROWS:
            found = Estimate.of(row["over_packed"][UNROLLED])
            aim = f"unrolled over packed, {row['tree']}, {row['rows']} rows"
            why = "judged by the interval's lower end"
            aims.append(aim_row(aim, SPEED_BAR, found.low > SPEED_BAR, found, why))
    for each in memory:
        plain = plain_of(memory, each)
        if each is not plain:
            ratio = each.total / plain.total
            judged = each.rows == MEMORY_ROWS
            aim = f"memory over plain decoding's, {each.size}, {each.name}, {each.rows} rows"
            why = "" if judged else f"the aim is for {MEMORY_ROWS} rows"
            met = ratio <= MEMORY_BAR if judged else None
            aims.append(aim_row(aim, MEMORY_BAR, met, None, why) | {"value": round(ratio, 4)})
    return aims
