"""Kernels of a drafter's levels on an accelerator, against the references in float64.

Without an accelerator they run in Triton's interpreter. Memory that nothing was written to has NaN in it.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tree_kernels.level_scan import NodeInputs
from tree_kernels.level_scan import reference as levels
from tree_kernels.noise import NoiseTokens, gumbel_noise
from tree_kernels.rows_product import reference as products
from tree_kernels.state_step import reference as steps
from tree_kernels.tree_conv import reference as convolutions
from tree_kernels.warp import Warp, drafter_ranking
from tree_layers.mixers import turned

from tests.support.compiled import printed_by
from tests.support.tensor_core_products import multiply_as_tensor_cores

pytest.importorskip("triton", reason="triton is not installed")
from tree_kernels.level_scan.triton import LevelSlots, LevelTable, LevelWeights, mix_level
from tree_kernels.ranking.triton import RowOrders, embed_guesses, embed_tokens, rank_rows, ranked_of
from tree_kernels.rows_product.triton import RowsWeight, block_of, rows_product
from tree_kernels.state_step.triton import StepWeights, step_level

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_DEVICE = DEVICE.type == "cuda"
KINDS = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    taken = torch.Tensor.new_empty

    def made(*args, **named):
        found = taken(*args, **named)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", made)
    if not ON_DEVICE:
        multiply_as_tensor_cores(monkeypatch)


def draw(generator, *shape, kind=torch.float32):
    return torch.randn(*shape, generator=generator).to(DEVICE, kind)


def relative(found, truth):
    truth = truth.double().cpu()
    return float((found.double().cpu() - truth).norm() / truth.norm())


def tolerance(kind):
    return 2e-6 if kind == torch.float32 else 8e-3


@KINDS
@pytest.mark.parametrize(
    "rows, inputs, outputs, groups, bias, norm, added",
    [
        (3, 48, 43, 1, True, True, False),  # rows of the weight do not begin at multiples of 16 bytes
        (17, 200, 72, 1, False, True, True),
        (1, 33, 16, 1, True, False, False),
        (70, 64, 40, 2, False, True, True),
        (5, 352, 48, 1, False, False, True),
        (1, 40, 3200, 1, True, True, True),  # more programs than are needed to fill an accelerator
        (8, 96, 21, 3, True, True, True),
        (9, 96, 21, 3, False, True, False),
        (2, 4104, 17, 1, True, True, True),  # more inputs than are loaded at once
    ],
)
def test_products_are_the_references(rows, inputs, outputs, groups, bias, norm, added, kind):
    generator = torch.Generator().manual_seed(rows)
    x, weight = draw(generator, rows, inputs), draw(generator, inputs, outputs, kind=kind)
    its_bias = draw(generator, outputs, kind=kind) if bias else None
    its_norm = draw(generator, inputs, kind=kind) if norm else None
    before = draw(generator, rows, outputs) if added else None
    by = RowsWeight.of(weight, its_bias, its_norm, 1e-5, groups)
    given = x if norm else x.to(kind)
    truth = products.rows_product(given, weight, its_bias, its_norm, 1e-5, groups, before)
    for squared in (False, True) if groups == 1 and norm else (norm,):
        squares = (x.unflatten(1, (groups, -1, 4)) ** 2).sum(2).contiguous() if squared else None
        found = rows_product(given, by, None if before is None else before.clone(), squares)
        assert relative(found, truth) < tolerance(kind)


def test_mixers_weights_on_an_accelerator_are_not_copied_for_products():
    assert turned(torch.empty(24, 64, device="meta"), torch.bfloat16).stride() == (1, 64)
    assert turned(torch.empty(24, 64), torch.bfloat16).stride() == (24, 1), "which a CPU's products read"


@pytest.mark.parametrize("layout", ["inputs adjacent", "outputs adjacent"])
def test_a_weight_whose_inputs_are_adjacent_is_not_copied(layout):
    weight = torch.zeros(24, 64)
    given = weight.t() if layout == "inputs adjacent" else weight.t().contiguous()
    by = RowsWeight.of(given)
    assert (by.inputs, by.outputs) == (64, 24)
    assert (by.weight.data_ptr() == weight.data_ptr()) == (layout == "inputs adjacent")


@pytest.mark.parametrize("inputs, groups, block", [(768, 1, 64), (24, 1, 32), (64, 2, 32), (48, 2, 0), (96, 6, 16)])
def test_a_programs_inputs_are_of_one_group(inputs, groups, block):
    assert block_of(inputs, groups) == block


@KINDS
@pytest.mark.parametrize("groups, width, size, limit", [(1, 16, 20, (0.0, float("inf"))), (2, 24, 16, (0.02, 0.5))])
@pytest.mark.parametrize("trees, new, above", [(1, 1, 4), (2, 4, 4), (1, 8, 8)])
def test_a_mamba2_level_is_the_references(groups, width, size, limit, trees, new, above, kind):
    generator, rng = torch.Generator().manual_seed(new), np.random.default_rng(new)
    heads, taps, texts, nodes = 4, 4, 3, 40
    inner, shared = heads * width, 2 * groups * size
    first = texts * (taps - 1)
    kept = LevelSlots(
        draw(generator, texts, heads, width, size),
        draw(generator, first + nodes, inner + shared),
        draw(generator, nodes, heads, width),
        draw(generator, nodes, groups, size),
        F.softplus(draw(generator, nodes, heads)),
    )
    for each in kept[2:]:
        each[0] = 0
    by = LevelWeights(
        draw(generator, taps, inner + shared) / 2,
        draw(generator, inner + shared),
        draw(generator, heads),
        -draw(generator, heads).exp(),
        draw(generator, heads),
        limit,
    )
    given = draw(generator, trees * new, 2 * inner + shared + heads, kind=kind)
    free = (1 + rng.permutation(nodes - 1)).tolist()
    slots = [free.pop() for _ in range(trees * new)]
    its_taps, paths = np.zeros((trees * new, taps), np.int64), np.zeros((trees * new, above), np.int64)
    for row, slot in enumerate(slots):
        old = rng.choice(free, int(rng.integers(0, above + 1)), replace=False)
        paths[row, above - len(old) :] = old
        tail = [*range(3 * (row // new), 3 * (row // new) + 3), *(first + old)][-3:]
        its_taps[row] = [*tail, first + slot]
    table = LevelTable(*(torch.as_tensor(each, device=DEVICE) for each in (slots, its_taps, paths, list(range(trees)))))
    before = [each.clone() for each in kept]
    out, squares = mix_level(given, kept, table, by)

    inputs = given[:, inner : 2 * inner + shared]
    before[1][first + table.slots] = inputs.float()
    mixed = convolutions.tree_conv(before[1].cpu(), table.taps.cpu(), by.conv_weight.cpu(), by.conv_bias.cpu())
    x, B, C = mixed.split((inner, shared // 2, shared // 2), 1)
    dt = F.softplus(given[:, -heads:].double() + by.dt_bias.double()).clamp(*limit)
    assert torch.equal(kept.raw, before[1])
    for store, old, new_rows in zip(kept[2:], before[2:], (x, B, dt), strict=True):
        old[table.slots] = new_rows.to(DEVICE, torch.float32).view(-1, *old.shape[1:])
        assert torch.allclose(store, old, rtol=2e-5, atol=2e-6)
    gate = given[:, :inner].double().cpu()
    for row in range(trees * new):
        path = [*(paths[row][paths[row] > 0]), slots[row]]
        seen = NodeInputs(*(each[None, path].cpu() for each in kept[2:]))
        line = np.tri(len(path), dtype=bool)[None]
        state = kept.recurrent[row // new].cpu()
        y = levels.level_scan(seen, line, [state], C[row].view(1, 1, groups, size), by.A.cpu())[0, 0]
        y = (y + by.D.cpu().double()[:, None] * x[row].view(heads, width)).flatten() * F.silu(gate[row])
        assert relative(out[row], y) < 1e-5
        assert torch.allclose(squares[row].sum(1).cpu().double(), (y * y).view(groups, -1).sum(1), rtol=1e-4)


@KINDS
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_mamba1_level_is_the_references(rows, kind):
    generator = torch.Generator().manual_seed(rows)
    channels, size, rank, taps, slots = 72, 12, 5, 4, 100
    recurrent = draw(generator, slots, channels, size)
    conv = draw(generator, slots, taps - 1, channels, kind=kind)
    by = StepWeights(
        draw(generator, taps, channels, kind=kind),
        draw(generator, channels, kind=kind),
        draw(generator, channels, rank + 2 * size, kind=kind) / 9,
        draw(generator, rank, channels),
        draw(generator, channels),
        -draw(generator, channels, size).exp(),
        draw(generator, channels),
    )
    given = draw(generator, rows, 2 * channels, kind=kind)
    source = torch.randint(0, 50, (rows,), generator=generator)
    target = 50 + torch.randperm(50, generator=generator)[:rows]
    states, tails = recurrent.double().cpu(), conv.double().cpu()
    wide = [each.double().cpu() for each in (given, *by)]
    x = steps.conv_step(tails, source, target, wide[0][:, :channels], wide[1], wide[2])
    low, B, C = (x @ wide[3]).split((rank, size, size), 1)
    dt = F.softplus(low @ wide[4] + wide[5])
    y = steps.mamba1_step(states, source, target, x, dt, wide[6], B, C, wide[7])
    truth = y * F.silu(wide[0][:, channels:])
    found = step_level(given, recurrent, conv, source.to(DEVICE), target.to(DEVICE), by)
    assert torch.equal(conv.double().cpu(), tails)
    assert relative(found, truth) < 3 * tolerance(kind) and relative(recurrent, states) < 3 * tolerance(kind)


@pytest.mark.parametrize("vocabulary", [5, 512, 1301])
def test_guesses_are_ranked_as_by_the_reference_with_the_targets_noise(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = draw(generator, 4, vocabulary).bfloat16()  # many are equal
    logits[2] = -0.0
    logits[2, 3:] = 0.0
    temperature, seed, position, sample = [0.0, 0.7, 0.0, 1.0], [0, 2**64 - 5, 0, 9], [0, 77, 0, 5], [0, 2, 0, 0]
    below = [vocabulary, vocabulary, vocabulary - 1, vocabulary]
    bits = np.array(temperature, np.float32).view(np.int32).astype(np.int64)
    numbers = (bits, np.array(seed, np.uint64).view(np.int64), position, sample, below)
    orders = RowOrders(*(torch.as_tensor(np.array(each), device=DEVICE) for each in numbers))
    width = min(9, vocabulary - 1)
    some = np.arange(vocabulary, dtype=np.int64) * 3 + 1
    for ids in (None, torch.from_numpy(some).to(DEVICE)):
        tokens, scores = ranked_of(rank_rows(logits, orders, width, ids).cpu().numpy())
        for row in range(4):
            noise = None
            if temperature[row]:
                law = seed[row], [position[row]]
                noise = gumbel_noise(*law, vocabulary, sample[row])
                if ids is not None:
                    noise = NoiseTokens(some).noise(*law, sample[row])
            wanted = drafter_ranking(logits[row : row + 1, : below[row]].cpu(), Warp(temperature[row]), noise, width)
            assert wanted.ids[0].tolist() == tokens[row].tolist()
            assert torch.allclose(wanted.scores[0], torch.from_numpy(scores[row]), atol=1e-5)


def test_a_row_with_a_score_that_is_not_a_number_has_it_first():
    logits = torch.zeros(1, 600, device=DEVICE)
    logits[0, 550] = -float("nan")
    orders = RowOrders(*torch.tensor([[0], [0], [0], [0], [600]], device=DEVICE))
    tokens, scores = ranked_of(rank_rows(logits, orders, 3, None).cpu().numpy())
    assert tokens[0].tolist() == [550, 0, 1] and np.isnan(scores[0, 0])


@pytest.mark.parametrize("width, kind", [(40, torch.float32), (1030, torch.bfloat16)], ids=str)
def test_guesses_are_embedded_from_their_ranking_and_those_past_the_embedding_are_read_as_the_foreign_token(
    width, kind
):
    generator = torch.Generator().manual_seed(width)
    logits, embedding = draw(generator, 3, 600), draw(generator, 590, width + 2, kind=kind)[:, :width]
    logits[1, 595] = 99.0
    orders = RowOrders(*(torch.tensor([number] * 3, device=DEVICE) for number in (0, 0, 0, 0, 600)))
    best = rank_rows(logits, orders, 4, None)
    tokens = ranked_of(best.cpu().numpy())[0].ravel()
    places = torch.tensor([4, 11, 0, 5], device=DEVICE)
    assert tokens[4] == 595
    wanted = embedding[[7, *tokens[[11, 0, 5]]]].float()
    assert torch.equal(embed_guesses(best, places, embedding, 7, torch.float32), wanted)
    tokens = torch.tensor([589, 0], device=DEVICE)
    assert torch.equal(embed_tokens(tokens, embedding, torch.float32), embedding[[589, 0]].float())


# Compilation for an accelerator, without one

COMPILED = """
import subprocess, tempfile
from pathlib import Path
import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tree_kernels.rows_product import triton as products

TOOL = Path(next(iter(nvidia.__path__)), "bin", "cuobjdump")
KINDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*given, num_warps, num_stages=3, **constants):
            names = self.kernel.arg_names
            tensors = {name: KINDS[each.dtype] for name, each in zip(names, given) if isinstance(each, torch.Tensor)}
            numbers = {"rows": "i32", "x_row": "i32", "eps": "fp32"}
            signature = tensors | numbers | {name: "constexpr" for name in constants}
            aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*tensors, "x_row")}
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(made.asm["cubin"])
                file.flush()
                tool = [TOOL, "--dump-resource-usage", file.name]
                usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            wide = sum(made.asm["ptx"].count(each) for each in ("ld.volatile.global.v4", "cp.async.cg.shared.global"))
            print(self.kernel.__name__, grid[0], "SHARED", made.metadata.shared, "WIDE", wide, usage)
        return launch

for name in ("_few", "_tiles"):
    setattr(products, name, Compiled(getattr(products, name)))

def product(rows, inputs, outputs, kind=torch.bfloat16, normed=False, parts=0, groups=1, added=False):
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16).t()
    norm = torch.empty(inputs, dtype=torch.bfloat16) if normed or parts else None
    by = products.RowsWeight.of(weight, torch.empty(outputs, dtype=torch.bfloat16), norm, 1e-5, groups)
    squares = torch.empty(rows, groups, parts) if parts else None
    x = torch.empty(rows, inputs, dtype=kind)
    products.rows_product(x, by, torch.empty(rows, outputs) if added else None, squares)

product(1, 768, 3352, torch.float32, normed=True)
product(1, 1536, 768, parts=24, added=True)
product(1, 768, 50288, torch.float32, normed=True)
for rows in (8, 16, 64):
    product(rows, 768, 3352, torch.float32, normed=True)
    product(rows, 1536, 768, parts=24, added=True)
    product(rows, 768, 50288, torch.float32, normed=True)
product(8, 2048, 4096, torch.float32, normed=True, added=True)
product(4, 4096, 2048, torch.float32, parts=4, groups=8, added=True)
"""


@pytest.mark.slow
def test_products_compile_for_sm_90_without_spilling_and_few_rows_load_16_bytes_at_a_time():
    lines = printed_by(COMPILED)
    assert [line.split()[0] for line in lines] == ["_few"] * 3 + ["_tiles"] * 11
    for line in lines:
        assert "STACK:0" in line and "LOCAL:0" in line, line
        assert int(re.search(r"SHARED (\d+)", line)[1]) <= 232_448, line
        assert int(re.search(r"WIDE (\d+)", line)[1]) > 0, line
