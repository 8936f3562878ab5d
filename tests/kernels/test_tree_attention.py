"""Tree attention: each row attends to its own path, and its bits do not depend on the other rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from tree_kernels.commit import commit
from tree_kernels.tree_attention import PAGE, FarRows, Layout, RowRotation, TreeRows, near_window, reference
from tree_kernels.tree_attention.compiled import (
    attend_compiled,
    compiled_step,
    layout_for,
    why_not_compiled,
    why_not_for,
)
from tree_kernels.tree_attention.cpu import attend, prepare, write

from tests.support.other_kernels import give_a_batch_of_one_other_bits

NEAR = 16
needs_kernels = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())
COMPILED = [pytest.param(form, marks=needs_kernels) for form in ("compiled", "by head")]
FORMS = [*COMPILED, "library"]


@dataclass
class AttentionCase:
    """Texts with random keys and values on random pages of one pool, and steps of their rows."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.float32
    form: str = "library"  # "by head": compiled, with pages as `layout_for` has them; else pages are slots of float32
    threads: int = 1  # of the compiled form
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    seed: int = 0
    texts: list[dict] = field(default_factory=list)
    pages: int = 80

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.layout = Layout(self.kv_heads, self.dim, self.dim)
        if self.form == "by head":
            self.layout = layout_for(self.layout, [self.dtype] * 3)
        self.pool = self.layout.pool(self.pages * PAGE, torch.device("cpu"))
        self.free = (1 + torch.randperm(self.pages - 9, generator=self.generator)).tolist()  # the last 8: scratch
        self.scratch = (self.pages - 8) * PAGE

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def text(self, base, parents):
        """A text of `base` tokens, its last the root of a tree with these parents; with all of its q, k and v."""
        rows = base - 1 + len(parents)
        depth = [0] * len(parents)
        for row, parent in enumerate(parents[1:], 1):
            depth[row] = depth[parent] + 1
        table = [self.free.pop() for _ in range(-(-(base + max(depth)) // PAGE))]
        made = {
            "base": base,
            "parents": parents,
            "depth": depth,
            "table": table,
            "q": self.random(rows, self.heads, self.dim),
            "k": self.random(rows, self.kv_heads, self.dim),
            "v": self.random(rows, self.kv_heads, self.dim),
            "scratch": self.scratch,
        }
        self.scratch += len(parents)
        self.texts.append(made)
        return made

    def position(self, text, row):
        return row if row < text["base"] else text["base"] - 1 + text["depth"][row - text["base"] + 1]

    def path(self, text, row):
        """The rows that a row attends to, in order of position, itself last."""
        if row < text["base"]:
            return list(range(row + 1))
        above = [row - text["base"] + 1]
        while above[-1]:
            above.append(text["parents"][above[-1]])
        return list(range(text["base"] - 1)) + [text["base"] - 1 + node for node in reversed(above)]

    def slot(self, text, row):
        if row < text["base"]:
            return text["table"][row // PAGE] * PAGE + row % PAGE
        return text["scratch"] + row - text["base"] + 1

    def step(self, wanted, padded):
        """The step of rows [(text, [rows])]; each text's rows are consecutive."""
        positions, slots, near, far = [], [], [], []
        for text, rows in wanted:
            start = len(positions)
            reach = 0
            for row in rows:
                position, path = self.position(text, row), self.path(text, row)
                first = NEAR * (position // NEAR - 1)
                reach = max(reach, first)
                keys = range(first, first + 2 * NEAR)
                near.append([self.slot(text, path[key]) if 0 <= key <= position else 0 for key in keys])
                positions.append(position)
                slots.append(self.slot(text, row))
            lowest = 0 if self.window is None else max(min(positions[start:]) - self.window + 1, 0) // PAGE
            if pages := tuple(text["table"][lowest : -(-max(reach, 0) // PAGE)]):
                far.append(FarRows(start, len(positions), pages, lowest))
        long = torch.int64
        return TreeRows(torch.tensor(positions), torch.tensor(slots), torch.tensor(near, dtype=long), far, padded)

    def run(self, wanted, extra=0):
        """Attention [rows, heads, dim] of the wanted rows in one step, whose keys are written first."""
        step, pack = self.call(wanted, extra)
        if self.form != "library":
            shared = compiled_step(step, self.threads, self.kv_heads)
            given = pack["q"], pack["k"], pack["v"], self.pool, shared, self.layout
            out = attend_compiled(*given, self.dim**-0.5, self.window, self.softcap, self.sinks)
        else:
            prepared = prepare(step, self.kv_heads, self.window)
            write(self.pool, pack["k"], pack["v"], prepared)
            out = attend(pack["q"], self.pool, prepared, self.layout, self.dim**-0.5, self.softcap, self.sinks)
        assert out.dtype == self.dtype and out.shape == (step.padded, self.heads, self.dim)
        assert torch.isfinite(out).all()
        return out[: len(step.positions)]

    def plain(self, wanted):
        """The reference's attention of these rows, whose keys were written before."""
        step, pack = self.call(wanted)
        return reference.attend(
            pack["q"], self.pool, step, self.layout, self.dim**-0.5, self.window, self.softcap, self.sinks
        )

    def call(self, wanted, extra=0):
        """The step of the wanted rows, and their q, k and v [heads, padded, dim]; padding rows are random."""
        rows = [(text, row) for text, mine in wanted for row in mine]
        padded = -(-len(rows) // 8) * 8 + 8 * extra
        pack = {
            name: torch.stack(
                [text[name][row] for text, row in rows]
                + [self.random(*rows[0][0][name].shape[1:])] * (padded - len(rows))
            ).transpose(0, 1)
            for name in "qkv"
        }
        return self.step(wanted, padded), pack


TREES = {
    "lone-root": [-1],
    "chain": [-1, *range(15)],
    "star": [-1] + [0] * 20,
    "fork": [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
}
BASES = [1, 2, 15, 16, 17, 18, 63, 64, 65, 66, 200, 1000]


def rows_of(text):
    return list(range(text["base"] - 1 + len(text["parents"])))


def prefilled(case, base, parents):
    """A text whose committed keys were written in chunks of 23 rows, and the attention of each row."""
    text = case.text(base, parents)
    committed = list(range(base))
    return text, torch.cat([case.run([(text, committed[at : at + 23])]) for at in range(0, base, 23)])


@pytest.mark.parametrize("variant", ["plain", "grouped", "window", "softcap", "sinks"])
@pytest.mark.parametrize(
    ("dtype", "atol", "rel_rms"), [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 4e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("form", FORMS)
def test_every_row_equals_the_reference_the_softmax_over_its_own_path(variant, dtype, atol, rel_rms, form):
    kv_heads = 2 if variant == "grouped" else 4
    case = AttentionCase(4, kv_heads, 16, dtype, form)
    case.window = 20 if variant == "window" else None
    case.softcap = 2.0 if variant == "softcap" else None
    case.sinks = case.random(4) if variant == "sinks" else None
    for base in (1, 17, 64, 150):
        for parents in TREES.values():
            text, _ = prefilled(case, base, parents)
            rows = rows_of(text)[-len(parents) - 3 :] if base > 3 else rows_of(text)[base - 1 :]
            ours = case.run([(text, rows)]).double()
            truth = case.plain([(text, rows)])
            assert (ours - truth).abs().max() < atol
            assert (ours - truth).norm() / truth.norm() < rel_rms


@pytest.mark.parametrize("base", [1, 17, 64, 150])
@pytest.mark.parametrize("tree", TREES)
def test_the_reference_reads_the_keys_from_the_root_of_the_tree_to_the_row_by_position(tree, base):
    case = AttentionCase(4, 2, 16)
    text = case.text(base, TREES[tree])
    rows = rows_of(text)
    step = case.step([(case.text(70, [-1]), [69]), (text, rows)], 8)
    for index, row in enumerate(rows, 1):
        slots = [case.slot(text, above) for above in case.path(text, row)]
        assert reference.path_keys(step, index) == list(enumerate(slots))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_keys_and_values_are_written_as_by_the_reference_and_nothing_else_is(dtype, form):
    case = AttentionCase(4, 2, 16, dtype, form)
    texts = [case.text(base, TREES["fork"]) for base in (1, 70)]
    step, pack = case.call([(text, rows_of(text)) for text in texts], extra=1)
    ours = case.pool.normal_(generator=case.generator)
    truth = ours.clone()
    if form != "library":
        attend_compiled(pack["q"], pack["k"], pack["v"], ours, compiled_step(step), case.layout, 1.0)
    else:
        write(ours, pack["k"], pack["v"], prepare(step, case.kv_heads))
    reference.write(truth, pack["k"], pack["v"], step)
    assert torch.equal(ours, truth)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(5, 5, 64), (6, 2, 64), (4, 1, 16)])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_alone_in_a_chunk_and_in_a_tree(base, heads, kv_heads, dim, form):
    case = AttentionCase(heads, kv_heads, dim, form=form)
    text, chunked = prefilled(case, base, TREES["fork"])
    tree = rows_of(text)[base - 1 :]
    in_tree = case.run([(text, tree)])
    assert torch.equal(in_tree[0], chunked[-1])  # the root
    for index, row in enumerate(tree):
        assert torch.equal(case.run([(text, [row])])[0], in_tree[index])
    for row in (0, base // 2, base - 1):
        assert torch.equal(case.run([(text, [row])])[0], chunked[row])


@pytest.mark.parametrize("base", [1, 2, 65])
def test_a_row_has_the_same_bits_where_the_library_computes_a_batch_of_one_with_another_kernel(base, monkeypatch):
    give_a_batch_of_one_other_bits(monkeypatch)
    test_a_row_has_the_same_bits_alone_in_a_chunk_and_in_a_tree(base, 4, 1, 16, "library")


@pytest.mark.parametrize("form", FORMS)
def test_a_guess_has_the_bits_it_has_once_it_is_committed(form):
    """A path of a tree, computed again as plain text, row by row."""
    for base in (15, 16, 50, 64, 130):
        case = AttentionCase(6, 2, 64, form=form)
        tree, _ = prefilled(case, base, TREES["fork"])
        path = [0, 2, 6, 12, 18]
        guessed = case.run([(tree, [base - 1 + node for node in range(len(tree["parents"]))])])[path]
        plain = case.text(base + len(path) - 1, [-1])
        rows = case.path(tree, base - 1 + path[-1])
        for name in "qkv":
            plain[name] = tree[name][rows]
        for row in range(len(rows)):
            last = case.run([(plain, [row])])
            if row >= base - 1:
                assert torch.equal(last[0], guessed[row - base + 1])


@pytest.mark.parametrize("form", FORMS)
def test_texts_in_one_step_have_the_bits_they_have_in_separate_steps(form):
    for kv_heads in (1, 2, 6):
        case = AttentionCase(6, kv_heads, 64, form=form)
        texts = [
            prefilled(case, base, TREES[name])[0]
            for base, name in (
                (200, "fork"),
                (1, "star"),
                (70, "lone-root"),
                (33, "chain"),
                (500, "lone-root"),
                (9, "lone-root"),
            )
        ]
        wanted = [(text, rows_of(text)[text["base"] - 1 :]) for text in texts]
        together = case.run(wanted)
        backwards = case.run(wanted[::-1], extra=2)
        at, end = 0, len(together)
        for text, rows in wanted:
            alone = case.run([(text, rows)])
            assert torch.equal(together[at : at + len(rows)], alone)
            assert torch.equal(backwards[end - len(rows) : end], alone)
            at, end = at + len(rows), end - len(rows)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_hides_far_and_near_keys_with_the_same_bits_in_any_step(form):
    case = AttentionCase(4, 2, 16, form=form, window=40)
    text, chunked = prefilled(case, 300, TREES["fork"])
    for row in (10, 39, 40, 41, 104, 200, 299):
        assert torch.equal(case.run([(text, [row])])[0], chunked[row])
        assert (chunked[row].double() - case.plain([(text, [row])])[0]).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 10, 40, 70])
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("form", COMPILED)
def test_a_value_that_is_not_finite_counts_in_the_rows_that_see_it_alone(form, number, window):
    """In rows before it and in rows whose window it has left it changes no bit, whatever rows share their step."""
    case = AttentionCase(6, 2, 16, form=form, window=window)
    text, _ = prefilled(case, 200, [-1])

    def attended(rows):
        step, pack = case.call([(text, rows)])
        given = pack["q"], pack["k"], pack["v"], case.pool, compiled_step(step), case.layout
        return attend_compiled(*given, 0.25, window)[: len(rows)]

    rows = list(range(95, 200))
    finite = attended(rows)
    text["v"][100, :, 3] = number
    together = attended(rows)
    seen = torch.tensor([row >= 100 and (window is None or row - 100 < window) for row in rows])
    assert torch.equal(together[~seen], finite[~seen])
    assert torch.equal(together.isfinite().all(-1).all(-1), ~seen)
    alone = torch.cat([attended([row]) for row in rows])
    assert torch.allclose(together, alone, rtol=0, atol=0, equal_nan=True)
    shifted = torch.cat([attended(rows[at : at + 13]) for at in range(0, len(rows), 13)])
    assert torch.allclose(together, shifted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_10000_equal_weights_keep_the_bound_that_a_long_text_has(form):
    """Sums in float32 lose digits with the number of keys, most with equal weights and values, as torch's do."""
    count = 10_000
    case = AttentionCase(2, 1, 16, form=form, pages=180)
    text = case.text(count, [-1])
    text["q"].zero_()
    text["v"].fill_(0.1)
    slots = torch.tensor([case.slot(text, row) for row in range(count)])
    case.pool[slots] = 1.0
    case.pool[slots, :, :16], case.pool[slots, :, 16:32] = text["k"], text["v"]
    ours, truth = case.run([(text, [count - 1])]).double(), case.plain([(text, [count - 1])])
    assert ((ours - truth).abs() < 2e-4 * truth.abs()).all()


BITS = """
import os, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads({threads})
from test_tree_attention import AttentionCase, TREES, prefilled, rows_of
bad = []
for dtype in (torch.float32, torch.bfloat16):
    case = AttentionCase(6, 2, 64, dtype, {form!r}, {threads})
    text, chunked = prefilled(case, 330, TREES["fork"])
    for count in (1, 2, 7, 8, 9, 16, 46, 48, 64, 100, 256, 300):
        rows = list(range(330 - count, 330))
        if not torch.equal(case.run([(text, rows)]), chunked[-count:]):
            bad.append((str(dtype), count))
print(bad)
"""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_number_of_rows(threads, form):
    paths = [os.path.dirname(__file__), *sys.path]
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive", MKL_CBWR="AUTO,STRICT")
    script = BITS.format(paths=paths, threads=threads, form=form)
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(run.stdout) == []


@needs_kernels
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 4), (7, 7, 12), (15, 3, 8), (16, 2, 80), (9, 1, 128)])
def test_the_compiled_form_takes_heads_and_dimensions_that_fill_no_tile(heads, kv_heads, dim):
    case = AttentionCase(heads, kv_heads, dim, form="compiled")
    text, chunked = prefilled(case, 150, TREES["fork"])
    rows = rows_of(text)[149:]
    ours = case.run([(text, rows)])
    assert torch.equal(ours[0], chunked[-1])
    assert (ours.double() - case.plain([(text, rows)])).abs().max() < 1e-5


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_compiled_form_takes_queries_keys_and_values_of_any_strides(dtype):
    """As views of one projection's results, and of another order of dimensions."""
    case = AttentionCase(4, 2, 16, dtype)
    text, _ = prefilled(case, 100, TREES["fork"])
    wanted = [(text, rows_of(text)[99:])]
    step, pack = case.call(wanted)
    rows = torch.cat([pack[name].transpose(0, 1).flatten(1) for name in "qkv"], 1)  # [padded, 8 heads]
    views = [part.unflatten(1, (-1, 16)).transpose(0, 1) for part in rows.split((64, 32, 32), 1)]
    turned = [pack[name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"]
    assert turned[0].stride(-1) != 1
    contiguous = [pack[name].contiguous() for name in "qkv"]
    plain, *others = (
        attend_compiled(q, k, v, case.pool, compiled_step(step), case.layout, 0.25)
        for q, k, v in (contiguous, views, turned)
    )
    assert plain.dtype == dtype and all(torch.equal(plain, other) for other in others)


@pytest.mark.parametrize("form", COMPILED)
def test_the_compiled_form_has_the_same_bits_in_several_threads(form):
    cases = [AttentionCase(6, 2, 64, form=form, threads=threads, pages=200) for threads in (1, 3)]
    alone, shared = (prefilled(case, 3000, TREES["fork"])[1] for case in cases)
    assert torch.equal(alone, shared)


@needs_kernels
@pytest.mark.parametrize("variant", ["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 20), (2, 2, 7)])
def test_pages_in_the_models_dtype_by_head_give_the_bits_of_slots_in_float32(heads, kv_heads, dim, dtype, variant):
    found = []
    for form, threads in (("compiled", 1), ("by head", 2)):
        case = AttentionCase(heads, kv_heads, dim, dtype, form, threads)
        case.window = 70 if variant == "window" else None
        case.softcap = 2.0 if variant == "softcap" else None
        case.sinks = case.random(heads) if variant == "sinks" else None
        text, chunked = prefilled(case, 200, TREES["fork"])
        found.append(torch.cat([chunked, case.run([(text, rows_of(text)[199:])])]))
    assert case.pool.dtype == dtype and case.pool.stride(0) < case.pool.stride(1)
    assert torch.equal(*found)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_pages_by_head_give_these_bits_for_subnormal_and_for_the_largest_numbers_too(dtype):
    found = []
    for form in ("compiled", "by head"):
        case = AttentionCase(4, 2, 16, dtype, form)
        text = case.text(100, [-1])
        tiny, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        text["k"] = (text["k"].float() * tiny).to(dtype)
        text["v"] = (text["v"].float() * tiny / 8).to(dtype)
        text["k"][::7, :, 0], text["v"][::5, :, 3] = largest / 64, -largest
        assert (text["v"][..., 0] != 0).any() and (text["v"][..., 0].abs() < tiny).all()
        text["q"] = (text["q"].float() / 1024).to(dtype)
        step, pack = case.call([(text, list(range(100)))])
        given = pack["q"], pack["k"], pack["v"], case.pool, compiled_step(step), case.layout, 0.25
        turn = RowRotation(torch.ones(step.padded, 16).to(dtype), torch.zeros(step.padded, 16).to(dtype))
        found.append((attend_compiled(*given, rotation=turn), case.pool[..., :32].float()))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_pages_of_layers_with_keys_and_values_of_several_dtypes_stay_in_float32():
    mixed = layout_for(Layout(2, 16, 16), [torch.bfloat16, torch.bfloat16, torch.float32])
    assert mixed.dtype == torch.float32 and mixed.by_head


@needs_kernels
def test_a_pool_of_another_dtype_than_the_rows_is_refused():
    case = AttentionCase(4, 2, 16, torch.bfloat16)
    step, pack = case.call([(case.text(8, [-1]), [7])])
    given = pack["q"], pack["k"], pack["v"], case.pool.half(), compiled_step(step), case.layout
    with pytest.raises(ValueError, match="pool"):
        attend_compiled(*given, 0.25)


def rotated(x, cos, sin):
    """transformers' rotary embedding of the leading numbers of x [heads, rows, dim]."""
    turning, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    low, high = turning.chunk(2, -1)
    return torch.cat([turning * cos + torch.cat([-high, low], -1) * sin, rest], -1)


@needs_kernels
@pytest.mark.parametrize("count", [16, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", COMPILED)
def test_queries_and_keys_are_rotated_with_the_bits_of_torchs_operations(dtype, count, form):
    case = AttentionCase(6, 2, 16, dtype, form)
    text, _ = prefilled(case, 40, TREES["fork"])
    step, pack = case.call([(text, rows_of(text)[20:])])
    cos, sin = (case.random(step.padded, count) for _ in range(2))
    pools = [case.pool.clone() for _ in range(2)]
    q, k = (rotated(pack[name], cos, sin) for name in "qk")
    expected = attend_compiled(q, k, pack["v"], pools[0], compiled_step(step), case.layout, 0.25)
    given = pack["q"], pack["k"], pack["v"], pools[1], compiled_step(step), case.layout, 0.25
    found = attend_compiled(*given, rotation=RowRotation(cos, sin))
    assert torch.equal(found, expected) and torch.equal(*pools)


@needs_kernels
@pytest.mark.parametrize("shape", [(8, 18), (8, 5), (7, 16)], ids=str)
def test_a_rotation_that_does_not_fit_is_refused(shape):
    case = AttentionCase(4, 2, 16)
    step, pack = case.call([(case.text(8, [-1]), [7])])
    given = pack["q"], pack["k"], pack["v"], case.pool, compiled_step(step), case.layout, 0.25
    with pytest.raises(ValueError, match="rotation"):
        attend_compiled(*given, rotation=RowRotation(torch.ones(shape), torch.ones(shape)))
    with pytest.raises(ValueError, match="rotation"):
        attend_compiled(*given, rotation=RowRotation(torch.ones(8, 16).half(), torch.ones(8, 16).half()))


@needs_kernels
def test_higher_scores_of_later_keys_replace_earlier_sums():
    """Scores that grow along the text, past what exp2 of their difference to the first can be."""
    case = AttentionCase(4, 2, 16, form="compiled")
    text = case.text(400, [-1])
    text["k"] *= torch.linspace(0, 100, len(text["k"]))[:, None, None]
    case.run([(text, list(range(300)))])
    ours = case.run([(text, list(range(300, 400)))])
    assert (ours.double() - case.plain([(text, list(range(300, 400)))])).abs().max() < 1e-4


@needs_kernels
def test_padding_rows_of_the_compiled_form_are_zero():
    case = AttentionCase(4, 2, 16, torch.bfloat16)
    text, _ = prefilled(case, 20, [-1])
    step, pack = case.call([(text, [19])], extra=1)
    given = pack["q"], pack["k"], pack["v"], case.pool, compiled_step(step), case.layout
    assert not attend_compiled(*given, 0.25)[1:].any()


def test_layouts_whose_values_would_be_read_past_their_slot_are_left_to_the_library():
    assert not why_not_for(Layout(2, 64, 64)) and not why_not_for(Layout(1, 12, 12))
    assert "13 and 2" in why_not_for(Layout(1, 13, 2))


@pytest.mark.parametrize("path", [(0, 2, 3, 5), (0, 1, 2, 3), (0, 5), (0,)])
def test_commit_loads_every_row_before_it_stores_one(path):
    """In a contiguous cache the target of one row is the source of the next."""
    pool = torch.arange(2 * 8 * 3).view(2, 8, 3).float()
    expected = pool.clone()
    expected[:, : len(path)] = pool[:, list(path)].clone()
    commit(pool, torch.tensor(path), torch.arange(len(path)))
    assert torch.equal(pool, expected)


def test_commit_may_swap_two_slots():
    pool = torch.arange(2 * 4 * 3).view(2, 4, 3).float()
    expected = pool[:, [1, 0, 2, 3]].clone()
    commit(pool, torch.tensor([1, 0]), torch.tensor([0, 1]))
    assert torch.equal(pool, expected)


def test_near_blocks_hold_the_deepest_tree():
    assert [near_window(depth) for depth in (1, 16, 17, 63)] == [16, 16, 32, 64]
    with pytest.raises(ValueError, match="max_depth"):
        near_window(65)
