"""A decoder layer in one call gives the bits of the single calls, for any rows and threads."""

from __future__ import annotations

import pytest
import torch
from tree_kernels.decoder_layer import DecoderLayers, LayerWeights, Workspace, reference, why_not_compiled
from tree_kernels.matmul import PackedWeight
from tree_kernels.processor import has_dots
from tree_kernels.row_functions import CompiledNorm, gated_silu
from tree_kernels.tree_attention import Layout, RowRotation, TreeRows
from tree_kernels.tree_attention.compiled import attend_compiled, compiled_step, layout_for

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())

WIDTH, INNER, HEADS, LAYOUT, NEAR, EPS = 48, 2100, 4, Layout(2, 16, 24), 16, (1e-5, 1e-3)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = {
    "query": (HEADS * LAYOUT.key_dim, WIDTH),
    "key": (LAYOUT.kv_heads * LAYOUT.key_dim, WIDTH),
    "value": (LAYOUT.kv_heads * LAYOUT.value_dim, WIDTH),
    "output": (WIDTH, HEADS * LAYOUT.value_dim),
    "gate": (INNER, WIDTH),
    "up": (INNER, WIDTH),
    "down": (WIDTH, INNER),
}


def weights(dtype, biased=True, **changed):
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    packed = {
        name: PackedWeight(numbers(*shape), numbers(shape[0]) if biased else None) for name, shape in SHAPES.items()
    }
    norms = 1 + numbers(WIDTH), 1 + numbers(WIDTH)
    return LayerWeights(**{"norms": norms, "eps": EPS, **packed, "layout": LAYOUT, "scaling": 0.25, **changed})


def step_of(rows, padded):
    """Rows of one text, each of which sees those before it."""
    places = torch.arange(rows)
    near = torch.zeros(rows, 2 * NEAR, dtype=torch.int64)
    for row in range(rows):
        first = NEAR * (row // NEAR - 1)
        for column in range(2 * NEAR):
            if 0 <= first + column <= row:
                near[row, column] = 1 + first + column
    return TreeRows(places, places + 1, near, [], padded)


def given(padded, dtype):
    generator = torch.Generator().manual_seed(1)
    x = (3 * torch.randn(padded, WIDTH, generator=generator)).to(dtype)
    angles = torch.arange(padded)[:, None] * torch.rand(LAYOUT.key_dim // 2, generator=generator)
    turned = torch.cat([angles, angles], 1)
    return x, RowRotation(turned.cos().to(dtype), turned.sin().to(dtype))


def single_calls(its, x, pool, step, rotation):
    """The layer by `reference.py`'s steps, each of them a call of its own."""

    def heads(rows, dim):
        return rows.view(len(x), -1, dim).transpose(0, 1)

    normed = CompiledNorm(its.norms[0], its.eps[0])(x)
    parts = heads(its.query(normed), 16), heads(its.key(normed), 16), heads(its.value(normed), 24)
    rest = its.layout, its.scaling, its.window, its.softcap, its.sinks, rotation
    middle = x + its.output(attend_compiled(*parts, pool, step, *rest).flatten(1))
    normed = CompiledNorm(its.norms[1], its.eps[1])(middle)
    return middle + its.down(gated_silu(its.gate(normed), its.up(normed)))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "changed", [{}, {"window": 5, "softcap": 2.0, "sinks": torch.arange(4.0)}], ids=["plain", "all"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_gives_the_bits_of_its_single_calls(dtype, changed, threads):
    its = weights(dtype, **changed)
    layer = DecoderLayers([its], Workspace(), threads)
    for rows, padded in ((1, 1), (40, 48), (3, 3), (7, 8), (1, 1)):  # the workspace grows, and is used again
        x, rotation = given(padded, dtype)
        step = compiled_step(step_of(rows, padded), threads)
        pools = [LAYOUT.pool(64, x.device) for _ in range(2)]
        got = layer(x, pools[:1], step, rotation)
        assert got.dtype == dtype and torch.equal(got, single_calls(its, x, pools[1], step, rotation))
        assert torch.equal(*pools) and bool(pools[0].any())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_keeps_subnormal_numbers_of_its_input_as_a_sum_of_torch_does(dtype, threads):
    nothing = {name: PackedWeight(torch.zeros(SHAPES[name], dtype=dtype)) for name in ("output", "down")}
    its = weights(dtype, **nothing)
    x, rotation = given(8, dtype)
    x[:, ::2] = torch.finfo(dtype).tiny / 16
    pools, step = [LAYOUT.pool(64, x.device) for _ in range(2)], compiled_step(step_of(8, 8), threads)
    got = DecoderLayers([its], Workspace(), threads)(x, pools[:1], step, rotation)
    assert bool(x.all()) and torch.equal(got, x)
    assert torch.equal(got, single_calls(its, x, pools[1], step, rotation))


@pytest.mark.skipif(not has_dots(), reason="this processor has no dot products of bfloat16")
def test_a_layer_has_the_same_bits_with_dot_products_and_without(monkeypatch):
    found = []
    for used in (True, False):
        monkeypatch.setattr("tree_kernels.matmul.cpu.dots_pay", lambda used=used: used)
        x, rotation = given(40, torch.bfloat16)
        layer, pool = DecoderLayers([weights(torch.bfloat16)], Workspace(), 2), LAYOUT.pool(64, x.device)
        found.append(layer(x, [pool], compiled_step(step_of(40, 40), 2), rotation))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_gives_the_same_bits_with_pages_in_its_dtype_by_head(dtype):
    layer, found = DecoderLayers([weights(dtype)], Workspace(), 2), []
    x, rotation = given(20, dtype)
    for layout in (LAYOUT, layout_for(LAYOUT, [dtype] * 3)):
        pool = layout.pool(64, x.device)
        found.append(layer(x, [pool], compiled_step(step_of(20, 20), 2, 2), rotation))
    assert pool.dtype == dtype and torch.equal(*found)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_among_others(threads):
    layer = DecoderLayers([weights(torch.bfloat16, biased=False)], Workspace(), threads)
    x, rotation = given(20, torch.bfloat16)
    step, pool = step_of(20, 20), LAYOUT.pool(64, x.device)
    truth = layer(x, [pool], compiled_step(step, threads), rotation)
    for row in range(20):
        one = slice(row, row + 1)
        alone = TreeRows(step.positions[one], step.slots[one], step.near[one], [], 1)
        turn = RowRotation(rotation.cos[one], rotation.sin[one])
        assert torch.equal(layer(x[one], [pool], compiled_step(alone, threads), turn)[0], truth[row])


def test_layers_that_share_a_workspace_do_not_change_each_others_results():
    shared = Workspace()
    its = weights(torch.bfloat16), weights(torch.bfloat16, eps=(0.5, 0.5))
    layers = [DecoderLayers([each], shared, 2) for each in its]
    for rows in (2, 33, 2, 5):
        x, rotation = given(rows, torch.bfloat16)
        step = compiled_step(step_of(rows, rows), 2)
        for layer, each in zip(layers, its, strict=True):
            pools = [LAYOUT.pool(64, x.device) for _ in range(2)]
            assert torch.equal(layer(x, pools[:1], step, rotation), single_calls(each, x, pools[1], step, rotation))


@pytest.mark.parametrize("threads", [1, 2])
def test_layers_in_one_call_give_the_bits_of_one_call_each(threads):
    its = [weights(torch.bfloat16), weights(torch.bfloat16, eps=(0.5, 0.5)), weights(torch.bfloat16, window=5)]
    together, single = DecoderLayers(its, Workspace(), threads), [DecoderLayers([each], Workspace()) for each in its]
    for rows in (2, 33, 2, 5, 33):
        x, rotation = given(rows, torch.bfloat16)
        step = compiled_step(step_of(rows, rows), threads)
        pools, others = ([LAYOUT.pool(64, x.device) for _ in its] for _ in range(2))
        got, expected = together(x, pools, step, rotation), x
        for layer, pool in zip(single, others, strict=True):
            expected = layer(expected, [pool], step, rotation)
        assert torch.equal(got, expected)
        assert all(torch.equal(*each) for each in zip(pools, others, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wanted_rows_alone_have_the_bits_that_they_have_among_all(dtype, layers, threads):
    its = [weights(dtype, eps=(each, 0.5)) for each in (1e-5, 1e-3, 0.5)[:layers]]
    together = DecoderLayers(its, Workspace(), threads)
    for rows, wanted in ((1, [0]), (5, [4, 0, 0]), (33, [32]), (5, [2]), (33, [*range(1, 30, 2)])):
        x, rotation = given(rows, dtype)
        step = compiled_step(step_of(rows, rows), threads)
        pools, others = ([LAYOUT.pool(64, x.device) for _ in its] for _ in range(2))
        few = together(x, pools, step, rotation, torch.tensor(wanted))
        assert torch.equal(few, together(x, others, step, rotation)[wanted])
        assert all(torch.equal(*each) for each in zip(pools, others, strict=True))


def test_a_layer_is_near_its_formula():
    its = weights(torch.float32)
    x, rotation = given(8, torch.float32)
    step, pools = compiled_step(step_of(8, 8)), [LAYOUT.pool(16, x.device) for _ in range(2)]

    def attention(normed):
        query, key, value = (part(normed).view(8, -1, 16) for part in (its.query, its.key, its.value))
        heads = query.transpose(0, 1), key.transpose(0, 1), value.reshape(8, -1, 24).transpose(0, 1)
        return its.output(attend_compiled(*heads, pools[1], step, LAYOUT, 0.25, rotation=rotation).flatten(1))

    its_eps = weights(torch.float32, eps=(1e-5, 1e-5))
    got = DecoderLayers([its_eps], Workspace())(x, pools[:1], step, rotation)
    expected = reference.decoder_layer(x, its.norms, 1e-5, attention, (its.gate, its.up, its.down))
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_weights_and_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="MLP"):
        DecoderLayers([weights(torch.float32, gate=PackedWeight(torch.ones(5, WIDTH)))], Workspace())
    with pytest.raises(ValueError, match="dtypes"):
        DecoderLayers([weights(torch.float32, gate=PackedWeight(torch.ones(INNER, WIDTH).half()))], Workspace())
    layer = DecoderLayers([weights(torch.float32)], Workspace())
    x, rotation = given(8, torch.float32)
    step, pool = compiled_step(step_of(8, 8)), LAYOUT.pool(16, x.device)
    with pytest.raises(ValueError, match="rows"):
        layer(x[:7], [pool], step, rotation)
    with pytest.raises(ValueError, match="rows"):
        layer(x.half(), [pool], step, rotation)
    with pytest.raises(ValueError, match="pool"):
        layer(x, [pool.half()], step, rotation)
    with pytest.raises(ValueError, match="rotation"):
        layer(x, [pool], step, RowRotation(rotation.cos[:7], rotation.sin[:7]))
    with pytest.raises(ValueError, match="rotation"):
        layer(x, [pool], step, RowRotation(rotation.cos.half(), rotation.sin.half()))
