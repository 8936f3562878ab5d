"""The Triton kernels against the references; without an accelerator, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from dendro.tree import DraftTree
from tree_kernels.commit import commit
from tree_kernels.noise import gumbel_noise
from tree_kernels.tree_attention import PAGE, FarRows, Layout, TreeRows
from tree_kernels.tree_attention import reference as plain_attention
from tree_kernels.tree_walk import walk
from tree_kernels.warp import Warp, batched, tokens_of
from tree_kernels.warp.batched import WarpRows, _filtered, _softmax, tokens_of_rows

from tests.support.compiled import printed_by
from tests.support.joined_rows import joined
from verifier_service.rows import NO_ROWS, text_rows

triton = pytest.importorskip("triton", reason="triton is not installed")
from tree_kernels.commit.triton import commit_rows  # noqa: E402
from tree_kernels.noise.triton import gumbel_rows  # noqa: E402
from tree_kernels.tree_attention.triton import TableRows, attend_table  # noqa: E402
from tree_kernels.tree_walk.triton import walk_rows  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = 16


# Noise


def test_noise_has_the_references_bits():
    seeds, positions, samples = [0, 7, 2**63 + 5, 2**64 - 1], [0, 1, 2**31, 2**32 - 1], [0, 3, 0, 2**32 - 1]
    signed = np.array(seeds, np.uint64).view(np.int64)
    ours = gumbel_rows(  # type: ignore[call-arg]
        *(torch.as_tensor(np.array(each, np.int64), device=DEVICE) for each in (signed, positions, samples)), 263
    )
    for row, (seed, position, sample) in enumerate(zip(seeds, positions, samples, strict=True)):
        assert torch.equal(ours[row].cpu(), gumbel_noise(seed, [position], 263, sample)[0])


# The walk


def random_tree(rng, rows):
    parents = [-1] + [int(rng.integers(0, row)) for row in range(1, rows)]
    tokens = rng.permutation(500)[:rows].tolist()
    return tokens, parents


def test_walks_equal_the_references():
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, int(rng.integers(1, 64))) for _ in range(20)]
    tokens = [token for tree in trees for token in tree[0]]
    parents = [parent for tree in trees for parent in tree[1]]
    first = np.cumsum([0] + [len(tree[0]) for tree in trees])[:-1]
    picked = []
    for own, above in trees:  # mostly a child's token, so that walks go deep
        for row in range(len(own)):
            children = [own[child] for child in range(len(own)) if above[child] == row]
            picked.append(int(rng.choice(children)) if children and rng.random() < 0.8 else 999)
    counts = [len(tree[0]) for tree in trees] + [0]  # the last is padding

    def tensor(values):
        return torch.as_tensor(np.array(values, np.int64), device=DEVICE)

    paths, lengths = walk_rows(*map(tensor, (tokens, parents, picked, [*first, 0], counts)), 63, 63)  # type: ignore[call-arg]
    assert lengths[-1] == 0
    for index, (own, above) in enumerate(trees):
        start = int(first[index])
        truth = walk(own, above, lambda row, start=start: picked[start + row])
        assert (paths[index, : lengths[index]] - start).tolist() == list(truth.path)
        assert [picked[row] for row in paths[index, : lengths[index]].tolist()] == list(truth.tokens)
    assert int(lengths.max()) > 4


# Tokens of rows


def rows_of(warps, device="cpu"):
    """What `WarpRows.of` takes, of a warp for each row."""
    return {
        each.name: torch.tensor(
            [getattr(warp, each.name) for warp in warps],
            dtype=torch.int64 if each.name == "top_k" else torch.float64,
            device=device,
        )
        for each in dataclasses.fields(Warp)
    }


def test_rows_with_parameters_per_row_give_the_references_tokens():
    rng = np.random.default_rng(1)
    plain = [Warp(), Warp(1.0)]
    filtered = [Warp(0.7, 5), Warp(1.3, 0, 0.9), Warp(0.9, 50, 0.8, 0.05), Warp(1.0, 0, 1.0, 0.2), Warp(0.5, 1)]
    warps = (plain + filtered) * 8
    logits = torch.as_tensor(rng.normal(size=(len(warps), 200)).astype(np.float32)) * 3
    logits[::3] = logits[::3].round()  # ties
    logits[-1] = -1e9
    logits[-1, 20:24] = 0.0  # four equal probabilities of 1/4: top-p 0.5 keeps exactly two
    warps[-1] = Warp(1.0, 0, 0.5)
    noise = torch.cat([gumbel_noise(9, [row], 200) for row in range(len(warps))])

    given = rows_of(warps)
    rows = WarpRows.of(given)
    ours = tokens_of_rows(logits, rows, noise, masks=True)
    for row, warp in enumerate(warps):
        truth = tokens_of(logits[row : row + 1], warp, None if warp.greedy else noise[row : row + 1])
        assert ours[row] == truth[0], warp
    bare = [row for row, warp in enumerate(warps) if warp in plain]
    few = WarpRows.of({name: each[bare] for name, each in given.items()})
    assert torch.equal(tokens_of_rows(logits[bare], few, noise[bare], masks=False), ours[bare])


@pytest.mark.parametrize("vocabulary", [203, 1000, 4099, 50277, 50278])
def test_the_law_of_filters_is_a_softmax_of_rows_that_all_begin_at_a_multiple_of_16_bytes(monkeypatch, vocabulary):
    """A GPU's softmax adds in an order of the row's address; on a CPU the padding changes no bit."""
    softmax, given = torch.softmax, []
    monkeypatch.setattr(torch, "softmax", lambda scores, dim: given.append(scores) or softmax(scores, dim))
    scores = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    scores[1, 7:] = -math.inf
    assert torch.equal(_softmax(scores), softmax(scores, 1))
    assert [row.data_ptr() % 16 for row in given[0]] == [0] * 5


@pytest.mark.parametrize("count", [1, 32, 33, 80])
def test_rows_are_filtered_in_parts_of_32_with_the_tokens_of_one_part(monkeypatch, count):
    logits = (torch.randn(count, 301, generator=torch.Generator().manual_seed(2)) * 3).to(DEVICE)
    noise = torch.cat([gumbel_noise(9, [row], 301) for row in range(count)]).to(DEVICE)
    warps = [Warp(1.0, 0, 0.8), Warp(), Warp(0.7, 40, 0.9), Warp(0.9, 0, 1.0, 0.1), Warp(1.3)] * count
    rows, before = WarpRows.of(rows_of(warps[:count], DEVICE)), logits.clone()
    parts, filtered = [], batched._filtered
    monkeypatch.setattr(batched, "_filtered", lambda scores, warp: parts.append(len(scores)) or filtered(scores, warp))
    found = tokens_of_rows(logits, rows, noise, masks=True)
    assert max(parts) <= 32 and sum(parts) == count and torch.equal(logits, before)
    monkeypatch.setattr(batched, "PART_ROWS", count)
    assert torch.equal(found, tokens_of_rows(logits, rows, noise, masks=True))


@pytest.mark.parametrize("vocabulary", [50277, 50280])
def test_the_tokens_that_filters_keep_of_a_row_do_not_depend_on_the_number_of_rows(vocabulary):
    """The nucleus ends at a tie of some rows: a sum of another order would keep one token more or less."""
    logits = torch.randn(48, vocabulary, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 2
    logits[::2] = logits[::2].round()

    def kept(rows):
        count = rows.stop - rows.start
        top_p = torch.linspace(0.05, 0.999, 48, dtype=torch.float64, device=DEVICE)[rows]
        given = rows_of([Warp(1.0, 20_000, 1.0, 1e-7)] * count, DEVICE) | {"top_p": top_p}
        return _filtered(logits[rows], WarpRows.of(given))

    whole = kept(slice(0, 48))
    assert 0 < int(whole[47].isfinite().sum()) < 20_000
    for count in (1, 2, 3, 8, 16):
        for first in range(0, 48 - count + 1, max(count, 5)):
            rows = slice(first, first + count)
            assert torch.equal(kept(rows), whole[rows]), (count, first)


# Attention


class Step:
    """Texts with random keys in one pool, each with a tree, as inputs of both kernels."""

    def __init__(self, lengths, kv_heads=2, group=3, dim=24, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.layout = Layout(kv_heads, dim, dim)
        pages = 1 + sum(-(-length // PAGE) + 1 for length in lengths)
        self.pool = self.layout.pool((pages + 4) * PAGE, torch.device("cpu"))
        self.pool[PAGE:] = torch.randn(self.pool[PAGE:].shape, generator=generator)
        self.pool[..., 2 * dim] = 1.0  # the ones with which a CPU sums weights
        free = (1 + rng.permutation(pages - 1)).tolist()
        self.parts, scratch = [], pages * PAGE
        for length in lengths:
            table = [free.pop() for _ in range(-(-(length + 8) // PAGE))]
            rows = int(rng.integers(1, 9))
            tree = DraftTree.of(list(range(rows)), [-1, *(int(rng.integers(0, row)) for row in range(1, rows))])
            self.parts.append(text_rows([0] * length, NO_ROWS, tree, table, scratch, NEAR))
            scratch += rows
        rows = sum(len(part.tokens) for part in self.parts)
        self.queries = torch.randn(rows, kv_heads * group, dim, generator=generator)

    def take(self, texts):
        """The plan of these texts, and their queries."""
        starts = np.cumsum([0] + [len(part.tokens) for part in self.parts])
        rows = np.concatenate([np.arange(starts[text], starts[text + 1]) for text in texts])
        return joined([self.parts[text] for text in texts]), self.queries[rows]

    def reference(self, texts, window=None, **more):
        plan, queries = self.take(texts)
        far = [FarRows(each.start, each.stop, each.pages) for each in plan.far]
        arrays = map(torch.from_numpy, (plan.positions, plan.slots, plan.near))
        step = TreeRows(*arrays, far, len(queries))  # type: ignore[call-arg]
        query = queries.transpose(0, 1)
        return plain_attention.attend(query, self.pool, step, self.layout, 0.2, window, **more).float()

    def accelerated(self, texts, window=None, pad=0, tables=0, **more):
        plan, queries = self.take(texts)
        rows = len(queries) + pad
        book = np.full((len(plan.far) + tables + 1, 40), 10**6)
        owner = np.zeros(rows, np.int64)
        for index, each in enumerate(plan.far, tables):
            book[index, : len(each.pages)] = each.pages
            owner[each.start : each.stop] = index

        def padded(values):
            return np.concatenate([values, np.zeros((pad, *values.shape[1:]), np.int64)])

        arrays = (padded(plan.positions), padded(plan.slots), padded(plan.near), owner, book)
        step = TableRows(*(torch.as_tensor(each, device=DEVICE) for each in arrays))
        query = torch.nn.functional.pad(queries, (0, 0, 0, 0, 0, pad)).transpose(0, 1).to(DEVICE)
        sinks = more.pop("sinks", None)
        out = attend_table(
            query, self.pool.to(DEVICE), step, self.layout, 0.2, window,
            sinks=None if sinks is None else sinks.to(DEVICE), **more
        ).cpu()  # fmt: skip
        assert not out[len(queries) :].any(), "padding rows are zero"
        return out[: len(queries)]


LENGTHS = (1, 15, 16, 63, 64, 65, 130, 200, 333)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "short-window": {"window": 9},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-2, 2, 6)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_equals_the_references_within_1e_5(variant):
    step, texts = Step(LENGTHS), range(len(LENGTHS))
    ours, theirs = (run(texts, **VARIANTS[variant]) for run in (step.accelerated, step.reference))
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_attention_of_a_row_has_the_same_bits_beside_any_other_rows():
    step = Step(LENGTHS)
    together = step.accelerated(range(len(LENGTHS)), pad=5)
    start = 0
    for text in range(len(LENGTHS)):
        alone = step.accelerated([text], pad=text % 3, tables=text)
        assert torch.equal(alone, together[start : start + len(alone)])
        start += len(alone)


# Commit


@pytest.mark.parametrize("layers, width", [(1, 40), (3, 1500)])
def test_accepted_rows_are_committed_as_by_the_reference_and_no_other_slot_is_written(layers, width):
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(layers, 30, 2, width // 2, generator=generator)
    source, target = torch.tensor([20, 0, 25, 21, 0]), torch.tensor([3, 7, 1, 9, 0])
    truth, ours = pool.clone(), pool.to(DEVICE)
    commit(truth, source[source > 0], target[source > 0])
    commit_rows(ours, source.to(DEVICE), target.to(DEVICE))
    assert torch.equal(ours.cpu(), truth)


# Compilation for an accelerator, without one

COMPILED = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tree_kernels.commit.triton import _commit
from tree_kernels.noise.triton import _gumbel
from tree_kernels.tree_attention.triton import _attend
from tree_kernels.tree_walk.triton import _walk

def compiled(kernel, types, **constants):
    names = kernel.arg_names
    signature = dict(zip(names, types)) | {name: "constexpr" for name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert "sm_90" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

compiled(_gumbel, ["*i64", "*i64", "*i64", "*fp32", "i32"], BLOCK=256)
compiled(_commit, ["*fp32", "*i64", "*i64", "i32"], WIDTH=8 * 272, BLOCK=1024)
compiled(_walk, ["*i64"] * 7, DEPTH=17, ROWS=64)
heads = dict(KV_HEADS=8, GROUP=4, GROUP_PAD=4, KEY=128, KEY_PAD=128, VALUE=128, VALUE_PAD=128, WIDTH=272)
shape = dict(**heads, NEAR=16, PAGE=64)
for extra in (dict(CAPPED=False, WINDOWED=False, SINKS=False), dict(CAPPED=True, WINDOWED=True, SINKS=True)):
    pointers = ["*bf16", "*fp32", "*i64", "*i64", "*i64", "*i64", "*fp32", "*bf16"]
    compiled(_attend, [*pointers, "fp32", "fp32", "i32", "i32", "i32", "i32"], **shape, **extra)
print("compiled")
"""


def test_every_kernel_compiles_for_sm_90():
    assert printed_by(COMPILED) == ["compiled"]
