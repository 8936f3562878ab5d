"""Attention on tensor cores against the formula in float64 and, bit for bit, against itself beside other rows.

Without an accelerator the kernels run in Triton's interpreter, repaired (`tests/tensor_core_products.py`). Memory that
nothing was written to has NaN in it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE, FarRows, Layout, RowRotation, TreeRows
from tree_kernels.tree_attention import reference as plain_attention
from tree_kernels.tree_attention.splits import (
    GROWTH,
    ITEM,
    OF_A_LENGTH,
    SHORTEST,
    FarSplits,
    first_positions,
    why_not_on_tensor_cores,
)

from tests.support.compiled import printed_by
from tests.support.joined_rows import joined
from tests.support.tensor_core_products import multiply_as_tensor_cores
from verifier_service.rows import NO_ROWS, text_rows

triton = pytest.importorskip("triton", reason="triton is not installed")
from tree_kernels.tree_attention import tensor_cores  # noqa: E402
from tree_kernels.tree_attention.rotation import rotate_and_write  # noqa: E402
from tree_kernels.tree_attention.tensor_cores import SplitRows, attend_pages, write_pages  # noqa: E402
from tree_kernels.tree_attention.triton import shared_bytes, stages_of  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_DEVICE = DEVICE.type == "cuda"
LONGEST = 9100
NAN = float("nan")


@pytest.fixture(autouse=True)
def repaired(monkeypatch):
    if not ON_DEVICE:
        multiply_as_tensor_cores(monkeypatch)
    taken = torch.Tensor.new_empty

    def poisoned(self, *args, **named):
        made = taken(self, *args, **named)
        return made.fill_(NAN) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


class PagedTexts:
    """Texts with random keys on scattered pages, each with a tree."""

    def __init__(self, lengths, rows, kv_heads=2, group=3, key_dim=32, value_dim=None, near=16, dtype=torch.bfloat16):
        generator, rng = torch.Generator().manual_seed(len(lengths)), np.random.default_rng(key_dim + group)
        self.layout = Layout(kv_heads, key_dim, value_dim or key_dim, dtype)
        self.group, self.near = group, near
        count = 1 + sum(-(-(length + near) // PAGE) for length in lengths)
        scratch = count * PAGE
        self.pages = torch.full((scratch + sum(rows), kv_heads, self.layout.width), NAN, dtype=dtype)
        self.pages[:PAGE] = 0
        free, self.parts, self.tables = (1 + rng.permutation(count - 1)).tolist(), [], []
        for length, own in zip(lengths, rows, strict=True):
            table = [free.pop() for _ in range(-(-(length + near) // PAGE))]
            self.tables.append(table)
            depths, parents = [0], [-1]
            for row in range(1, own):
                parents.append(int(rng.choice([each for each in range(row) if depths[each] < near])))
                depths.append(depths[parents[-1]] + 1)
            tree = DraftTree.of(list(range(own)), parents)
            self.parts.append(text_rows([0] * length, NO_ROWS, tree, table, scratch, near))
            written = [table[at // PAGE] * PAGE + at % PAGE for at in range(length)] + [
                scratch + row for row in range(own - 1)
            ]
            self.pages[written] = torch.randn(len(written), kv_heads, self.layout.width, generator=generator).to(dtype)
            scratch += own
        total = sum(rows)
        self.starts = np.cumsum([0, *rows])
        self.queries = torch.randn(total, kv_heads * group, key_dim, generator=generator).to(dtype)

    def plan(self, texts, rows=None):
        """These texts, or these rows of each; and the numbers of the rows among all."""
        picked = [np.arange(len(self.parts[text].tokens)) if rows is None else np.array(rows[text]) for text in texts]
        parts = []
        for text, own in zip(texts, picked, strict=True):
            part = self.parts[text]
            fields = {name: getattr(part, name)[own] for name in ("tokens", "positions", "slots", "homes", "near")}
            parts.append(replace(part, **fields, far=tuple(replace(each, stop=len(own)) for each in part.far)))
        numbers = [self.starts[text] + own for text, own in zip(texts, picked, strict=True)]
        return joined(parts), np.concatenate(numbers)

    def reference(self, **more):
        plan, numbers = self.plan(range(len(self.parts)))
        far = [FarRows(each.start, each.stop, each.pages) for each in plan.far]
        arrays = map(torch.from_numpy, (plan.positions, plan.slots, plan.near))
        step = TreeRows(*arrays, far, len(numbers))  # type: ignore[call-arg]
        query = self.queries[numbers].transpose(0, 1)
        return plain_attention.attend(query, self.pages, step, self.layout, 0.2, **more)

    def attended(self, texts=None, rows=None, pad=0, seed=None, block=None, **more):
        """seed: the items are in a random order   block: rows of an item"""
        plan, numbers = self.plan(range(len(self.parts)) if texts is None else texts, rows)
        count = len(numbers) + pad
        splits = FarSplits.of(LONGEST, self.near, self.group)
        if block is not None:
            splits = FarSplits(splits.bounds, self.near, block)
        items = np.zeros((splits.most_items(count, len(self.parts)), ITEM), np.int64)
        seen = np.zeros((count, 2), np.int64)
        jobs = splits.fill(plan.positions, plan.far, items, seen)
        if seed is not None:
            items[:jobs] = items[np.random.default_rng(seed).permutation(jobs)]
        book = np.full((len(self.parts), -(-LONGEST // PAGE)), 10**6)
        owner = np.zeros(count, np.int64)
        for index, each in enumerate(plan.far):
            book[index, each.first : each.first + len(each.pages)] = each.pages
            owner[each.start : each.stop] = index

        def padded(values):
            return np.concatenate([values, np.zeros((pad, *values.shape[1:]), np.int64)])

        arrays = (padded(plan.positions), padded(plan.slots), padded(plan.near), owner, book, items, np.array([jobs]))
        tensors = [torch.as_tensor(each, device=DEVICE) for each in (*arrays, seen)]
        step = SplitRows(*tensors, splits.count)  # type: ignore[call-arg]
        query = torch.nn.functional.pad(self.queries[numbers], (0, 0, 0, 0, 0, pad)).transpose(0, 1).to(DEVICE)
        sinks = more.pop("sinks", None)
        found = attend_pages(
            query, self.pages.to(DEVICE), step, self.layout, 0.2,
            sinks=None if sinks is None else sinks.to(DEVICE), **more
        ).cpu()  # fmt: skip
        assert not found[len(numbers) :].any(), "padding rows are zero"
        return found[: len(numbers)], numbers


LENGTHS, ROWS = (1, 17, 64, 130, 700, 333), (2, 1, 3, 2, 4, 9)
BESIDE: dict[str, Any] = {"lengths": (70, 700, 333), "rows": (2, 4, 6), "group": 2}
if ON_DEVICE:
    BESIDE = {"lengths": (17, 700, 1024, 4096, 9000), "rows": (1, 24, 8, 32, 9), "kv_heads": 8, "group": 4}
    BESIDE |= {"key_dim": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 300},
    "short-window": {"window": 9},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-2, 2, 6)},
}


def error(found, truth):
    """The largest error of a row, as a share of the row's size."""
    return float(((found.double() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_is_that_of_the_formula_in_float64_within_two_byte_rounding(variant):
    texts = PagedTexts(LENGTHS, ROWS)
    found, _ = texts.attended(pad=3, **VARIANTS[variant])
    assert error(found, texts.reference(**VARIANTS[variant])) < 2**-7


@pytest.mark.parametrize(
    "key_dim, value_dim, group, near, dtype",
    [
        (64, 64, 8, 16, torch.bfloat16),
        (80, 80, 1, 32, torch.bfloat16),
        (96, 96, 2, 16, torch.float16),
        (112, 112, 3, 32, torch.bfloat16),
        (48, 32, 5, 64, torch.bfloat16),
        (256, 256, 7, 16, torch.bfloat16),
    ],
)
def test_heads_of_any_size_in_groups_of_any_size_are_those_of_the_formula(key_dim, value_dim, group, near, dtype):
    texts = PagedTexts((40, 150), (2, 11), 1, group, key_dim, value_dim, near, dtype)
    found, _ = texts.attended()
    assert error(found, texts.reference()) < (2**-7 if dtype == torch.bfloat16 else 2**-9)


def test_splits_of_all_lengths_are_summed():
    texts = PagedTexts((9000,), (2,), 1, 2, 16)
    found, _ = texts.attended()
    assert error(found, texts.reference()) < 2**-7


@pytest.mark.parametrize("variant", ["plain", "window"])
def test_a_row_has_the_same_bits_beside_any_other_rows(variant):
    """Rows alone, some of a text's in any order, beside other texts, padded, in other blocks, with the items in other
    orders, and in fewer programs."""
    texts = PagedTexts(**BESIDE)
    whole, _ = texts.attended(**VARIANTS[variant])
    rng = np.random.default_rng(0)
    for text, own in enumerate(BESIDE["rows"]):
        for count in {1, own}:
            rows = {text: rng.permutation(own)[:count], (text + 1) % len(texts.parts): [0]}
            order = [*rows] if count % 2 else [*rows][::-1]
            found, numbers = texts.attended(order, rows, pad=count % 3, seed=count, **VARIANTS[variant])
            assert torch.equal(found, whole[numbers]), (text, count)
    again, _ = texts.attended(seed=7, block=2, **VARIANTS[variant])
    assert torch.equal(again, whole)


def test_a_row_has_the_same_bits_whatever_number_of_programs_runs(monkeypatch):
    texts = PagedTexts((700, 40), (3, 2))
    whole, _ = texts.attended()
    monkeypatch.setattr(tensor_cores, "PROGRAMS", 3)
    assert torch.equal(texts.attended()[0], whole)


def test_rows_of_a_prompt_have_the_bits_of_decoding():
    """A chunk of a prompt, whose rows see each other's keys, and each row alone."""
    texts = PagedTexts((400,), (1,))
    texts.parts = [text_rows([0] * 400, np.arange(360, 400), None, texts.tables[0], 0, texts.near)]
    texts.starts = np.array([0, 40])
    texts.queries = torch.randn(40, 6, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole, _ = texts.attended()
    for row in (0, 23, 39):
        found, _ = texts.attended([0], {0: [row]})
        assert torch.equal(found[0], whole[row])


def test_keys_and_values_are_written_to_their_slots_and_those_of_padding_nowhere():
    layout = Layout(2, 48, 32, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(20, 2, layout.width, generator=generator).bfloat16()
    key = torch.randn(5, 2, 48, generator=generator).bfloat16().transpose(0, 1)
    value = torch.randn(2, 5, 32, generator=generator).bfloat16()
    slots = torch.tensor([7, 0, 3, 19, 0])
    expected, found = pages.clone(), pages.to(DEVICE)
    for row, slot in ((0, 7), (2, 3), (3, 19)):
        expected[slot] = torch.cat([key[:, row], value[:, row]], 1)
    nothing = torch.zeros(0, dtype=torch.int64)
    step = SplitRows(nothing, slots.to(DEVICE), *[nothing] * 6, 0)  # type: ignore[call-arg]
    write_pages(found, key.to(DEVICE), value.to(DEVICE), step, layout)
    assert torch.equal(found.cpu(), expected)


def turned(x, cos, sin):
    """transformers' rotary embedding of the leading numbers of x [heads, rows, dim]."""
    turning, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    low, high = turning.chunk(2, -1)
    return torch.cat([turning * cos + torch.cat([-high, low], -1) * sin, rest], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kv_heads, group, key_dim, value_dim, count",
    [(2, 4, 32, 32, 32), (3, 1, 48, 32, 12), (1, 7, 80, 80, 80), (8, 4, 128, 128, 128)],
)
def test_queries_and_keys_are_rotated_with_torchs_bits_and_written(kv_heads, group, key_dim, value_dim, count, dtype):
    """Some heads are strided, as those of one product for queries, keys and values are."""
    layout, generator = Layout(kv_heads, key_dim, value_dim, dtype), torch.Generator().manual_seed(count)

    def random(*shape):
        return (torch.randn(shape, generator=generator) * 3).to(dtype)

    pages, query = random(20, kv_heads, layout.width), random(kv_heads * group, 5, key_dim)
    key, value = random(5, kv_heads, key_dim + value_dim).transpose(0, 1).split([key_dim, value_dim], 2)
    cos, sin = random(5, count), random(5, count)
    expected, found, on = pages.clone(), pages.to(DEVICE), [each.to(DEVICE) for each in (query, key, value, cos, sin)]
    for row, slot in ((0, 7), (2, 3), (3, 19)):
        expected[slot, :, : key_dim + value_dim] = torch.cat([turned(key, cos, sin), value], 2)[:, row]
    slots = torch.tensor([7, 0, 3, 19, 0]).to(DEVICE)
    made = rotate_and_write(found, on[0], on[1], on[2], slots, layout, RowRotation(on[3], on[4]))
    assert torch.equal(made.cpu(), turned(query, cos, sin))
    assert torch.equal(found.cpu(), expected)
    if DEVICE.type == "cuda":
        assert torch.equal(made, turned(on[0], *on[3:]))


# What runs on tensor cores, and its items


def test_layers_that_tensor_cores_do_not_attend_are_named_with_the_reason():
    two, three = [torch.bfloat16] * 3, [torch.float16] * 3
    for dim in (64, 80, 96, 112, 128, 256):
        for group in (1, 4, 8, 16):
            assert not why_not_on_tensor_cores(Layout(2, dim, dim), group, two)
            assert not why_not_on_tensor_cores(Layout(2, dim, 64), group, three)
    assert "float32" in why_not_on_tensor_cores(Layout(2, 64, 64), 4, [torch.float32] * 3)
    assert "float32, bfloat16" in why_not_on_tensor_cores(Layout(2, 64, 64), 4, [torch.float32, *two[:2]])
    assert "17 heads" in why_not_on_tensor_cores(Layout(2, 64, 64), 17, two)
    assert "24 numbers" in why_not_on_tensor_cores(Layout(2, 64, 24), 4, two)
    assert "272 numbers" in why_not_on_tensor_cores(Layout(2, 272, 64), 4, two)


def test_splits_are_the_same_for_texts_of_any_length_and_few_for_long_ones():
    longest = first_positions(1 << 20)
    assert longest[1] == SHORTEST and not (longest % PAGE).any()
    lengths = np.diff(longest)
    assert lengths[OF_A_LENGTH - 1] == SHORTEST and lengths[OF_A_LENGTH] == GROWTH * SHORTEST
    assert len(longest) < 5 * OF_A_LENGTH
    for length in (1, 256, 257, 9000, 40_000):
        own = first_positions(length)
        assert own[-1] >= length and own[-2] < length
        assert np.array_equal(own, longest[: len(own)])


@pytest.mark.parametrize("group", [1, 4, 7])
def test_items_hold_each_rows_far_keys_once_and_read_no_page_of_none(group):
    rng = np.random.default_rng(group)
    for _ in range(8):
        near, parts, positions = 16, [], []
        for _ in range(int(rng.integers(1, 6))):
            its = int(rng.integers(0, 20_000)) + rng.integers(0, 300, int(rng.integers(1, 200)))
            first = int(rng.integers(0, its.min() // PAGE + 1))
            reach = max(int(near * (its.max() // near - 1)), 0)
            pages = tuple(range(first, -(-reach // PAGE)))
            if pages:
                parts.append(FarRows(len(positions), len(positions) + len(its), pages, first))
            positions += its.tolist()
        splits = FarSplits.of(21_000, near, group)
        items = np.zeros((splits.most_items(len(positions), 5), ITEM), np.int64)
        sums = np.zeros((len(positions), 2), np.int64)
        count = splits.fill(np.array(positions), parts, items, sums)
        assert not items[count:].any()
        read = {}
        for start, rows, split, begin, stop in items[:count].tolist():
            (part,) = (each for each in parts if each.start <= start and start + rows <= each.stop)
            assert begin == splits.bounds[split] < stop <= splits.bounds[split + 1] and rows * group <= 64
            assert stop <= (part.first + len(part.pages)) * PAGE
            for row in range(start, start + rows):
                assert (row, split) not in read
                read[row, split] = stop
        for part in parts:
            for row in range(part.start, part.stop):
                end = max(near * (positions[row] // near - 1), 0)
                for split in range(*sums[row]):
                    assert read[row, split] >= min(end, splits.bounds[split + 1])
                if end > part.first * PAGE:
                    assert splits.bounds[sums[row, 0]] <= part.first * PAGE
                    assert splits.bounds[sums[row, 1] - 1] < end <= splits.bounds[sums[row, 1]]
        far = {row for part in parts for row in range(part.start, part.stop)}
        assert not sums[[row for row in range(len(positions)) if row not in far]].any()


@pytest.mark.parametrize("shared, wide", [(101_376, 1), (166_912, 2), (232_448, 2)], ids=["99-KB", "163-KB", "227-KB"])
def test_pages_of_wide_heads_are_read_ahead_only_where_they_fit_in_shared_memory(monkeypatch, shared, wide):
    """`_far` with heads of 256 takes 106,496 bytes with two pages and 73,728 with one, when compiled for sm_86."""
    device = torch.device("cuda", 7)
    properties = {device: SimpleNamespace(shared_memory_per_block_optin=shared)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    shared_bytes.cache_clear()
    found = [stages_of(Layout(8, dim, 64), device, wide=2) for dim in (64, 128, 144, 256)]
    assert found == [3, 3, wide, wide]


# Compilation for an accelerator, without one

COMPILED = """
import subprocess, tempfile
from pathlib import Path
import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tree_kernels.tree_attention import Layout
from tree_kernels.tree_attention.rotation import _rotate_write
from tree_kernels.tree_attention.splits import ITEM, LINES
from tree_kernels.tree_attention.tensor_cores import (
    NEAR_KEYS, NEAR_LINES, PROGRAMS, SUMMED_AT_ONCE, _far, _near, _write, warps_of
)
from tree_kernels.tree_attention.triton import stages_of

TOOL = Path(next(iter(nvidia.__path__)), "bin", "cuobjdump")
STRIDES = ("query_head", "query_row", "key_head", "key_row", "value_head", "value_row")

def compiled(kernel, types, constants, **options):
    names = kernel.arg_names
    given = iter(types)
    signature = {name: "constexpr" if name in constants else next(given) for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in STRIDES]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, **options})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    counts = [made.asm["ptx"].count(each) for each in ("wgmma.mma_async", "mma.sync", "cp.async.cg.shared.global")]
    print(kernel.__name__, constants, "SHARED", made.metadata.shared, usage.stdout.splitlines()[-1], *counts)

def attention(kv_heads, group, dim, near, capped=False, windowed=False, sinks=False):
    width = triton.next_power_of_2(dim)
    layout = Layout(kv_heads, dim, dim)
    shape = dict(KV_HEADS=kv_heads, GROUP=group, KEY=dim, KEY_PAD=width, VALUE=dim, VALUE_PAD=width, WIDTH=2 * dim)
    shape |= dict(NEAR=near, CAPPED=capped, WINDOWED=windowed)
    numbers = ["fp32", "fp32", "i32", "i32", "i32"]
    far = dict(PAGE=64, LINES=LINES, FIELDS=ITEM, PROGRAMS=PROGRAMS)
    types = ["*bf16", "*bf16", *["*i64"] * 5, *["*fp32"] * 3, *numbers, "i32", "i32"]
    stages = stages_of(layout, torch.device("cpu"), wide=2)
    compiled(_far, types, shape | far, num_stages=stages, num_warps=warps_of(layout))
    own = dict(GROUP_PAD=max(triton.next_power_of_2(group), NEAR_LINES), KEYS=NEAR_KEYS, AT_ONCE=SUMMED_AT_ONCE)
    own |= dict(SINKS=sinks)
    types = ["*bf16", "*bf16", *["*i64"] * 3, *["*fp32"] * 4, "*bf16", *numbers, "i32"]
    compiled(_near, types, shape | own)

attention(8, 4, 128, 16)
attention(8, 8, 80, 16, windowed=True, sinks=True)
attention(8, 2, 256, 64, capped=True, windowed=True)
compiled(_write, [*["*bf16"] * 3, "*i64", *["i32"] * 4], dict(KV_HEADS=8, KEY=128, VALUE=128, PAD=128, WIDTH=256))
heads = dict(KV_HEADS=8, KEY=128, KEY_PAD=128, VALUE=128, VALUE_PAD=128, WIDTH=256)
for group, count in ((4, 128), (16, 32)):
    types = [*["*bf16"] * 5, "*i64", *["*bf16"] * 2, *["i32"] * 6]
    compiled(_rotate_write, types, heads | dict(GROUP=group, GROUP_PAD=group, TURNED=count), num_warps=1)
"""
SHARED_BYTES = 232_448
"""Of an H100's multiprocessor, for one program."""


@pytest.mark.slow
def test_the_kernels_compile_for_sm_90_without_spilling_and_use_its_tensor_cores():
    lines = printed_by(COMPILED)
    assert len(lines) == 9
    for line in lines:
        assert "STACK:0" in line and "LOCAL:0" in line, line
        assert int(re.search(r"SHARED (\d+)", line)[1]) <= SHARED_BYTES, line
        warpgroups, warps, copies = map(int, line.split()[-3:])
        # The lines of a tile decide which instruction multiplies them: one for each kernel, for any number of rows.
        assert (warpgroups > 0, warps > 0) == (line.startswith("_far"), line.startswith("_near")), line
        assert copies > 0 or not line.startswith("_far"), line
