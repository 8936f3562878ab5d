"""Mamba-2's kernels for an accelerator: against the references in float64 and, bit for bit, against themselves beside
other rows.

Without an accelerator they run in Triton's interpreter. Memory that nothing was written to has NaN in it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tree_kernels.tree_conv import tree_conv
from tree_kernels.tree_scan import Group, Paths, TokenInputs, reference

from tests.support.compiled import printed_by
from tests.support.tensor_core_products import multiply_as_tensor_cores

pytest.importorskip("triton", reason="triton is not installed")
from tree_kernels.tree_conv.triton import ConvWeights, KeptRows, conv_rows
from tree_kernels.tree_scan.triton import (
    FOLD_WIDTH,
    ITEM_ROWS,
    ScanTable,
    fold_and_weigh,
    move,
    scan_rows,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_DEVICE = DEVICE.type == "cuda"
NAN = float("nan")
BLOCK, RING, STATES, FOLDS = 16, 120, 6, 5
SIZES = (9, 1, 17, 5, 2, 3) if ON_DEVICE else (6, 1, 5, 3)  # an interpreter takes seconds for each step
WIDE: dict[str, Any] = {"heads": 80, "width": 64, "size": 128} if ON_DEVICE else {}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    taken = torch.Tensor.new_empty

    def made(*args, **named):
        found = taken(*args, **named)
        return found.fill_(NAN) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", made)
    if not ON_DEVICE:
        multiply_as_tensor_cores(monkeypatch)


@dataclass(frozen=True)
class PathRow:
    """A row of a step: its text's state, the slots of its path before this step, and its ancestors in the step."""

    source: int
    before: tuple[int, ...]
    above: tuple[int, ...]  # numbers of rows
    number: int  # of its own inputs


@dataclass(eq=False)
class StateMixer:
    """A mixer with random weights, and memory in which some texts have tokens and states."""

    heads: int = 6
    width: int = 24
    size: int = 20
    groups: int = 2
    repeats: int = 1
    taps: int = 4
    dtype: torch.dtype = torch.bfloat16
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    rows: int = 40
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self):
        own, readers = self.heads // self.repeats, self.groups * self.repeats
        self.shapes = (own, self.width), (self.groups, self.size), (readers, self.size)
        channels = sum(a * b for a, b in self.shapes)
        self.A, self.D = -self.draw(self.heads).exp(), self.draw(self.heads)
        self.by = ConvWeights(
            self.draw(self.taps, channels) / 2, self.draw(channels), self.draw(self.heads), self.dt_limit
        )
        self.given = self.draw(self.rows, channels + self.heads).to(self.dtype)  # as a projection's
        slots = RING + self.rows
        self.kept = KeptRows(
            self.poisoned(self.draw(slots, channels).to(self.dtype)),
            self.poisoned(self.draw(slots, *self.shapes[0]).to(self.dtype)),
            self.poisoned(self.draw(slots, *self.shapes[1]).to(self.dtype)),
            self.poisoned(F.softplus(self.draw(slots, self.heads))),
        )
        self.states = self.draw(STATES, self.heads, self.width, self.size)
        self.states[0] = 0

    def draw(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape)).float().to(DEVICE)

    @staticmethod
    def poisoned(kept):
        kept[0], kept[RING:] = 0, NAN
        return kept

    def texts(self, sizes):
        """Rows of texts with random trees of these sizes, from scattered slots."""
        free = iter(1 + self.rng.permutation(RING - 1))
        found, number = [], 0
        for text, rows in enumerate(sizes):
            before = tuple(int(next(free)) for _ in range(BLOCK + int(self.rng.integers(0, 6))))
            first, paths = number, []
            for row in range(rows):
                parent = int(self.rng.integers(max(row - 3, 0), row)) if row else -1
                paths.append(() if parent < 0 else (*paths[parent], first + parent))
                found.append(PathRow(text % STATES, before, paths[row], number))
                number += 1
        return found

    def table(self, rows, padded=0, shuffled=False):
        """The table of a step of these rows, whose ancestors are rows of the step, or hidden in slots."""
        count = len(rows) + padded
        place = {row.number: at for at, row in enumerate(rows)}
        columns, last = np.zeros((count, 2 * BLOCK), np.int64), np.zeros(count, np.int64)
        for at, row in enumerate(rows):
            path = [*row.before, *(RING + place[each] for each in row.above), RING + at]
            columns[at, : len(path)], last[at] = path, len(path)
        items = []
        for source in sorted({row.source for row in rows}):
            its = [at for at, row in enumerate(rows) if row.source == source]
            for start in range(0, len(its), ITEM_ROWS):
                part = its[start : start + ITEM_ROWS]
                items.append([len(part), source, *part, *[10**6] * (ITEM_ROWS - len(part))])
        if shuffled:
            items = [items[each] for each in self.rng.permutation(len(items))]
        items.append([0] * (2 + ITEM_ROWS))
        none = np.zeros((1, 2))
        arrays = (columns, last, items, none, np.zeros((FOLDS, BLOCK)), np.zeros((FOLDS, 2)), np.zeros(FOLDS))
        return ScanTable(*(torch.as_tensor(np.array(each), dtype=torch.int64, device=DEVICE) for each in arrays))

    def step(self, rows, padded=0, shuffled=False):
        """y of these rows [rows, H P], and the table; the memory's scratch slots are written."""
        table = self.table(rows, padded, shuffled)
        picked = [row.number for row in rows]
        given = F.pad(self.given[picked], (0, 0, 0, padded), value=NAN)
        for each in self.kept:
            each[RING:] = NAN
        channels = self.kept.raw.shape[1]
        C, y = conv_rows(given[:, :channels], given[:, channels:], self.kept, table.columns, table.last, RING, self.by)
        room = torch.full((FOLDS, *self.states.shape[1:]), NAN, device=DEVICE)
        inputs = TokenInputs(*self.kept[1:])
        weighed = fold_and_weigh(inputs, self.states, room, C, table, self.A)
        scan_rows(inputs, self.states, room, C, weighed, table, RING, self.D, y)
        assert not y[len(rows) :].any(), "rows of padding are zero"
        return y[: len(rows)].cpu(), table, C


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one group": {"groups": 1},
    "shared": {"heads": 8, "groups": 2, "repeats": 2},
    "float32": {"dtype": torch.float32},
    "limited": {"dt_limit": (0.01, 0.5)},
    "two taps": {"taps": 2},
    "three taps": {"taps": 3, "groups": 1},
}


def relative(found, truth):
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_references(kind):
    mixer = StateMixer(**KINDS[kind])
    rows = mixer.texts((5, 1, 9, 2))
    y, table, C = mixer.step(rows, padded=3)
    channels, count = mixer.kept.raw.shape[1], len(rows)
    own = slice(RING, RING + count)
    assert torch.equal(mixer.kept.raw[own], mixer.given[:count, :channels])
    taps = torch.stack([each[at - mixer.taps : at] for each, at in zip(table.columns, table.last, strict=True) if at])
    mixed = tree_conv(mixer.kept.raw, taps, mixer.by.weight, mixer.by.bias)
    found = torch.cat([mixer.kept.x[own].flatten(1), mixer.kept.B[own].flatten(1), C[:count]], 1)
    step = 2.0**-7 if mixer.dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(found.float(), mixed.float(), rtol=step, atol=step / 100)
    dt = F.softplus(mixer.given[:count, channels:].double() + mixer.by.dt_bias.double()).clamp(*mixer.dt_limit)
    assert torch.allclose(mixer.kept.dt[own].double(), dt, rtol=2e-6, atol=0)
    groups = []
    for source in {row.source for row in rows} - {0}:
        its = [at for at, row in enumerate(rows) if row.source == source]
        groups.append(Group(source, torch.tensor(its), len(its)))
    kept = TokenInputs(*(each.cpu() for each in mixer.kept[1:]))
    read = C[:count].unflatten(1, mixer.shapes[2]).cpu()
    given = (each.cpu() for each in (mixer.A, mixer.D))
    truth = reference.tree_scan(
        kept, mixer.states.cpu(), [], Paths(table.columns[:count].cpu(), groups, []), kept.x[own], read, *given
    )
    assert relative(y, truth.flatten(1)) < 1e-6


def test_small_steps_of_time_keep_their_digits():
    """softplus of -12 is 6.1e-6, where 1 plus the exponential has three digits of it left."""
    mixer = StateMixer(dtype=torch.float32)
    mixer.by = mixer.by._replace(dt_bias=torch.linspace(-12, 30, mixer.heads, device=DEVICE))
    mixer.given[:, -mixer.heads :] /= 10
    mixer.step(mixer.texts((4,)))
    dt = F.softplus(mixer.given[:4, -mixer.heads :].double() + mixer.by.dt_bias.double())
    assert torch.allclose(mixer.kept.dt[RING : RING + 4].double(), dt, rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_rows_at_any_place(kind):
    mixer = StateMixer(**KINDS[kind], **(WIDE if kind in ("plain", "one group", "float32") else {}))
    rows = mixer.texts(SIZES)
    whole, *_ = mixer.step(rows)
    number = [row.number for row in rows]

    def same(picked, **more):
        found, *_ = mixer.step(picked, **more)
        return torch.equal(found, whole[[number.index(row.number) for row in picked]])

    assert same(rows, shuffled=True) and same(rows, padded=9) and same(rows[::-1])
    for source in {row.source for row in rows}:
        assert same([row for row in rows if row.source == source], padded=1)
    for row in rows[4::7]:  # its path alone
        assert same([rows[each] for each in (*row.above, row.number)])
    mixer.given[: SIZES[0]] = 5  # the first text's
    changed, *_ = mixer.step(rows)
    others = [at for at, row in enumerate(rows) if row.before != rows[0].before]
    assert torch.equal(changed[others], whole[others]) and not torch.equal(changed, whole)


def test_a_row_has_the_same_bits_after_guesses_as_after_committed_tokens():
    mixer = StateMixer(groups=1, **WIDE)
    rows = mixer.texts((12,))
    whole, *_ = mixer.step(rows)
    row = max(rows, key=lambda each: len(each.above))
    assert len(row.above) > 2
    free = [slot for slot in range(1, RING) if slot not in row.before]
    for each, slot in zip(row.above, free, strict=False):
        for kept in mixer.kept:
            kept[slot] = kept[RING + each]
    alone = replace(row, before=(*row.before, *free[: len(row.above)]), above=())
    found, *_ = mixer.step([alone])
    assert torch.equal(found[0], whole[row.number])


@pytest.mark.parametrize("kind", ["plain", "shared", "float32"])
def test_folds_are_the_references_and_independent_of_other_chains(kind):
    mixer = StateMixer(**KINDS[kind])
    assert mixer.width % FOLD_WIDTH, "the last program of a head has fewer channels"
    slots = 1 + mixer.rng.permutation(RING - 1)[: FOLDS * BLOCK].reshape(FOLDS, BLOCK)
    truth, states = mixer.states.clone(), mixer.states.clone()

    def run(chains, where, moved):
        mixer.states.copy_(states)
        room = torch.full((FOLDS, *states.shape[1:]), NAN, device=DEVICE)
        arrays = (np.zeros((1, 2 * BLOCK)), [0], [[0]], chains, slots, where, moved)
        table = ScanTable(*(torch.as_tensor(np.array(each), dtype=torch.int64, device=DEVICE) for each in arrays))
        C = mixer.given.new_full((1, math.prod(mixer.shapes[2])), NAN)
        fold_and_weigh(TokenInputs(*mixer.kept[1:]), mixer.states, room, C, table, mixer.A)
        before = mixer.states.clone()
        move(mixer.states, room, table)
        return before, mixer.states.clone()

    # A chain of three from state 1: into slot 4, into the room and on to slot 1, and into slot 5; another of two.
    chains = [[0, 3], [3, 2], [0, 0]]
    where = [[1, 4], [9, STATES + 1], [9, 5], [0, STATES + 3], [9, 2]]
    before, after = run(chains, where, [0, 1, 0, 0, 0])
    assert torch.equal(before[1], states[1]), "rows of the step may start from it"
    kept = TokenInputs(*(each.cpu() for each in mixer.kept[1:]))
    for source, its, targets in ((1, (0, 1, 2), (4, 1, 5)), (0, (3, 4), (None, 2))):
        state = states[source].double().cpu()
        for fold, target in zip(its, targets, strict=True):
            state = reference.advanced(kept, state, slots[fold].tolist(), mixer.A.cpu())
            if target is not None:
                truth[target] = state
                assert relative(after[target].cpu(), state) < 1e-6
    assert torch.equal(after[[0, 3]], states[[0, 3]])
    _, alone = run([[0, 0], [0, 3], [0, 0]], where, [0, 1, 0, 0, 0])
    assert torch.equal(alone[[1, 4, 5]], after[[1, 4, 5]]) and torch.equal(alone[2], states[2])


# Compilation for accelerators, without one

COMPILED = """
import subprocess, tempfile
from pathlib import Path
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tree_kernels.tree_scan.triton import (
    FOLD_STEP, FOLD_WIDTH, HEADS_BLOCK, ITEM_ROWS, SCAN_STEP, SCAN_WARPS, SCAN_WIDTH, STATE_PART, _fold_and_weigh, _scan
)

TOOL = Path(next(iter(nvidia.__path__)), "bin", "cuobjdump")

def compiled(capability, kernel, types, constants, warps):
    given = iter(types)
    signature = {name: "constexpr" if name in constants else next(given) for name in kernel.arg_names}
    floats = ("*bf16", "*fp32")
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind in floats}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    print(kernel.__name__, capability, usage.stdout.splitlines()[-1])

for capability in (90, 80):
    for heads, groups, columns in ((80, 1, 32), (128, 8, 64)):
        sizes = dict(HEADS=heads, OWN=heads, GROUPS=groups, READERS=groups, P=64, N=128, K=columns)
        given = ["*bf16", "*bf16", "*fp32", "*fp32", "*bf16", "*fp32", "*fp32", *["*i64"] * 5, "*fp32", "*fp32", "i32"]
        blocks = triton.cdiv(heads // groups, HEADS_BLOCK)
        folds = dict(FOLDING=4 * heads, P_BLOCK=FOLD_WIDTH, N_BLOCK=128, TOKENS=columns // 2, STEP=FOLD_STEP)
        weights = dict(BLOCK=HEADS_BLOCK, BLOCKS=blocks)
        compiled(capability, _fold_and_weigh, given, sizes | folds | weights, 4)
        given = ["*bf16", "*bf16", *["*fp32"] * 5, *["*i64"] * 3, "*fp32", "i32", "i32"]
        scan = dict(P_BLOCK=SCAN_WIDTH, PART=STATE_PART, ROWS=ITEM_ROWS, STEP=SCAN_STEP)
        compiled(capability, _scan, given, sizes | scan, SCAN_WARPS)
"""


@pytest.mark.slow
def test_the_scans_kernels_compile_for_sm_90_and_sm_80_without_spilling():
    lines = printed_by(COMPILED)
    assert len(lines) == 8
    for line in lines:
        assert "STACK:0" in line and "LOCAL:0" in line, line
        assert int(re.search(r"REG:(\d+)", line)[1]) <= (160 if line.startswith("_scan") else 64), line
