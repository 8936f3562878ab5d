"""Convolution and recurrence of packed trees against each path separately, in float64 (docs/design/numbers.md#oracles).

The recurrence of each path separately is `tree_scan/reference.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tree_kernels import ROW_MULTIPLE
from tree_kernels.tree_conv import tree_conv
from tree_kernels.tree_scan import (
    BlockFold,
    Group,
    Paths,
    TokenInputs,
    fold,
    fold_in_order,
    reference,
    tree_scan,
    tree_scan_in_order,
)

CHAIN = 5  # committed tokens between the checkpoint and the tree


def random_tree(rng, rows):
    """Parents of a random tree of `rows` rows, the root first."""
    return [-1, *(int(rng.integers(0, row)) for row in range(1, rows))]


def paths_of(parents, chain=CHAIN):
    """Slots of every row's path: 1 to `chain` for the committed tokens, then one per row."""
    paths = []
    for row, parent in enumerate(parents):
        above = list(range(1, chain + 1)) if parent < 0 else paths[parent]
        paths.append([*above, chain + 1 + row])
    return paths


def packed(paths, source, folds=(), room=3):
    """The paths as a step, with `room` or more empty columns on either side."""
    columns = torch.zeros(len(paths), max(map(len, paths)) + 2 * room, dtype=torch.int64)
    for row, path in enumerate(paths):
        columns[row, room : room + len(path)] = torch.tensor(path)
    groups = []
    if source:
        rows = torch.zeros(-(-len(paths) // ROW_MULTIPLE) * ROW_MULTIPLE, dtype=torch.int64)
        rows[: len(paths)] = torch.arange(len(paths))
        groups = [Group(source, rows, len(paths))]
    return Paths(columns, groups, folds)


def random_inputs(generator, slots, heads, width, groups, size, dtype=torch.float64):
    x = torch.randn(slots, heads, width, generator=generator, dtype=torch.float64)
    B = torch.randn(slots, groups, size, generator=generator, dtype=torch.float64)
    dt = F.softplus(torch.randn(slots, heads, generator=generator, dtype=torch.float64) * 5)
    for each in (x, B, dt):
        each[0] = 0
    return TokenInputs(x.to(dtype), B.to(dtype), dt if dtype == torch.float64 else dt.float())


def repeated(inputs, own, groups):
    """Inputs with `own` distinct x and `groups` distinct B; and the same inputs with a copy of them for every head."""
    heads, readers = inputs.x.shape[1], inputs.B.shape[1]
    few = TokenInputs(inputs.x[:, :own].contiguous(), inputs.B[:, :groups].contiguous(), inputs.dt)
    x, B = few.x.repeat_interleave(heads // own, 1), few.B.repeat_interleave(readers // groups, 1)
    return few, TokenInputs(x, B, inputs.dt)


def relative(found, truth):
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
@pytest.mark.parametrize("rows", [1, 15, 64])
def test_the_reference_equals_the_sum_over_each_path_in_float64(rows, kind):
    """docs/design/scan.md#paths: y_i = exp(c_i) S C_i + sum_j exp(c_i - c_j) dt_j (C_i . B_j) x_j + D x_i."""
    rng, generator = np.random.default_rng(rows), torch.Generator().manual_seed(rows)
    heads, width, size = (8, 1, 16) if kind == "mamba1" else (8, 64, 16)
    paths = paths_of(random_tree(rng, rows))
    A = -torch.rand(heads, size if kind == "mamba1" else 1, generator=generator, dtype=torch.float64) * 16
    D = torch.randn(heads, generator=generator, dtype=torch.float64)
    C = torch.randn(rows, 1, size, generator=generator, dtype=torch.float64)
    states = torch.randn(3, heads, width, size, generator=generator, dtype=torch.float64)
    inputs = random_inputs(generator, CHAIN + 1 + rows, heads, width, 1, size)
    x = inputs.x[torch.tensor([path[-1] for path in paths])]
    y = reference.tree_scan(inputs, states, [], packed(paths, 2), x, C, A.squeeze(1), D)
    for row, path in enumerate(paths):
        x_j, B_j, dt_j = (each[torch.tensor(path)] for each in inputs)
        c = (dt_j[..., None] * A).cumsum(0)  # [K, H, 1 or N]
        state = torch.exp(c[-1])[:, None] * states[2]
        state += torch.einsum("khn,kh,khp,kn->hpn", torch.exp(c[-1] - c).expand(-1, -1, size), dt_j, x_j, B_j[:, 0])
        assert relative(y[row], state @ C[row, 0] + D[:, None] * x[row]) < 1e-12


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("rows", [1, 2, 15, 64])
@pytest.mark.parametrize("source", [0, 2])
def test_a_tree_scan_equals_each_path_separately(rows, groups, source):
    rng, generator = np.random.default_rng(rows), torch.Generator().manual_seed(rows)
    heads, width, size = 8, 64, 16
    paths = paths_of(random_tree(rng, rows))
    A = -torch.rand(heads, generator=generator, dtype=torch.float64) * 16
    D = torch.randn(heads, generator=generator, dtype=torch.float64)
    C = torch.randn(rows, groups, size, generator=generator, dtype=torch.float64)
    states = torch.randn(3, heads, width, size, generator=generator, dtype=torch.float64)
    states[0] = 0
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2e-3)):
        inputs = random_inputs(generator, CHAIN + 1 + rows, heads, width, groups, size, dtype)
        own = torch.tensor([path[-1] for path in paths])
        x, c = inputs.x[own], C.to(dtype)
        y = tree_scan(inputs, states.float(), [], packed(paths, source), x, c, A.float(), D.float())
        truth = reference.tree_scan(inputs, states.float(), [], packed(paths, source), x, c, A.float(), D.float())
        assert relative(y, truth) < bound


@pytest.mark.parametrize("rows", [1, 2, 15, 64])
@pytest.mark.parametrize("source", [0, 2])
def test_a_tree_scan_in_order_equals_each_path_separately_bit_for_bit(rows, source):
    """Mamba-1: a row has the same bits in a forest with other rows as in a step without them."""
    rng, generator = np.random.default_rng(rows), torch.Generator().manual_seed(rows)
    heads, size = 40, 16  # with 40 heads a bmm of batch size 1 has other bits than a larger one; with 24 it has not
    paths = paths_of(random_tree(rng, rows))
    A = -torch.rand(heads, size, generator=generator) * 16
    D = torch.randn(heads, generator=generator)
    C = torch.randn(rows, 1, size, generator=generator)
    states = torch.randn(3, heads, 1, size, generator=generator)
    states[0] = 0
    inputs = random_inputs(generator, CHAIN + 1 + rows, heads, 1, 1, size, torch.float32)
    x = inputs.x[torch.tensor([path[-1] for path in paths])]
    y = tree_scan_in_order(inputs, states, [], packed(paths, source), x, C, A, D)
    assert relative(y, reference.tree_scan(inputs, states, [], packed(paths, source), x, C, A, D)) < 2e-6
    for row, path in enumerate(paths):
        alone = tree_scan_in_order(inputs, states, [], packed([path], source), x[row : row + 1], C[row : row + 1], A, D)
        assert torch.equal(alone[0], y[row])


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_folds_equal_steps_one_after_another(kind):
    generator = torch.Generator().manual_seed(3)
    heads, width, groups, size = (8, 1, 1, 16) if kind == "mamba1" else (8, 32, 2, 16)
    run = fold_in_order if kind == "mamba1" else fold
    A = (
        -torch.rand(heads, size, generator=generator) * 4
        if kind == "mamba1"
        else -torch.rand(heads, generator=generator)
    )
    inputs = random_inputs(generator, 40, heads, width, groups, size, torch.float32)
    states = torch.randn(3, heads, width, size, generator=generator)
    blocks = torch.randperm(39, generator=generator)[:32].view(2, 16) + 1
    folds = [BlockFold(2, blocks[0], 1), BlockFold(-1, blocks[1], -1), BlockFold(0, blocks[1], -1)]
    done = run(inputs, states, folds, A)
    for state, truth in zip(done, reference.fold(inputs, states, folds, A), strict=True):
        assert relative(state, truth) < 2e-6


def test_a_row_may_start_from_a_fold_of_its_own_step():
    """Its block and its columns are then one path from zero."""
    generator = torch.Generator().manual_seed(4)
    heads, width, groups, size = 4, 8, 1, 16
    A, D = -torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    inputs = random_inputs(generator, 30, heads, width, groups, size, torch.float32)
    states = torch.zeros(1, heads, width, size)
    C = torch.randn(1, groups, size, generator=generator)
    folds = [BlockFold(0, torch.arange(1, 17), -1)]
    paths = Paths(torch.arange(17, 30)[None], [Group(-1, torch.zeros(8, dtype=torch.int64), 1)], folds)
    y = tree_scan(inputs, states, fold(inputs, states, folds, A), paths, inputs.x[29:], C, A, D)
    whole = Paths(torch.arange(1, 30)[None], [], [])
    assert relative(y, reference.tree_scan(inputs, states, [], whole, inputs.x[29:], C, A, D)) < 2e-6


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_rows_of_one_step_start_from_zero_from_two_checkpoints_and_from_a_fold(kind):
    rng, generator = np.random.default_rng(7), torch.Generator().manual_seed(7)
    heads, width, groups, size = (8, 1, 1, 16) if kind == "mamba1" else (8, 32, 2, 16)
    A = -torch.rand(heads, size if kind == "mamba1" else 1, generator=generator).squeeze(1)
    D = torch.randn(heads, generator=generator)
    C = torch.randn(20, groups, size, generator=generator)
    states = torch.randn(3, heads, width, size, generator=generator)
    inputs = random_inputs(generator, 40, heads, width, groups, size, torch.float32)
    columns = packed(paths_of(random_tree(rng, 20)), 0).columns
    rows = torch.from_numpy(rng.permutation(20))
    folds = [BlockFold(2, torch.arange(26, 40), -1)]
    starts = [Group(source, rows[at : at + 8], count) for source, at, count in ((2, 0, 5), (-1, 5, 6), (1, 11, 4))]
    paths = Paths(columns, starts, folds)
    x = inputs.x[columns.amax(1)]
    run, advance = (tree_scan_in_order, fold_in_order) if kind == "mamba1" else (tree_scan, fold)
    y = run(inputs, states, advance(inputs, states, folds, A), paths, x, C, A, D)
    truth = reference.tree_scan(inputs, states, reference.fold(inputs, states, folds, A), paths, x, C, A, D)
    for row in range(20):
        assert relative(y[row], truth[row]) < 2e-6


@pytest.mark.parametrize("run", [tree_scan, tree_scan_in_order], ids=["mamba2", "mamba1"])
def test_decays_that_underflow_give_no_infinities_and_siblings_stay_hidden(run):
    """200 nats of decay per token remove all earlier tokens; a sibling's huge input has no effect."""
    heads, width, size = 2, 1, 4
    slots = 12
    inputs = TokenInputs(torch.ones(slots, heads, width), torch.ones(slots, 1, size), torch.full((slots, heads), 200.0))
    inputs.x[9] = 1e30  # row 3, which has no descendants
    for each in inputs:
        each[0] = 0
    paths = paths_of([-1, 0, 0, 0, 1], chain=5)
    A = -torch.ones(heads, size) if run is tree_scan_in_order else -torch.ones(heads)
    states = torch.full((2, heads, width, size), 1e30)
    C = torch.ones(5, 1, size)
    x = inputs.x[torch.tensor([path[-1] for path in paths])]
    y = run(inputs, states, [], packed(paths, 1), x, C, A, torch.zeros(heads))
    assert torch.isfinite(y).all()
    assert torch.equal(y[[0, 1, 2, 4]], torch.full((4, heads, width), 200.0 * size))


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("chain", [0, 1, 5])
def test_a_tree_convolution_equals_each_paths_convolution(rows, chain):
    rng, generator = np.random.default_rng(rows), torch.Generator().manual_seed(rows)
    channels, width = 12, 4
    raw = torch.randn(chain + 1 + rows, channels, generator=generator)
    raw[0] = 0
    weight = torch.randn(width, channels, generator=generator)
    bias = torch.randn(channels, generator=generator)
    paths = paths_of(random_tree(rng, rows), chain)
    taps = torch.tensor([([0] * width + path)[-width:] for path in paths])
    found = tree_conv(raw, taps, weight, bias)
    for row, path in enumerate(paths):
        line = raw[torch.tensor(path)].double().t()[None]
        truth = F.conv1d(line, weight.double().t()[:, None], bias.double(), padding=width - 1, groups=channels)
        assert (found[row] - F.silu(truth[0, :, len(path) - 1])).abs().max() < 1e-6


@pytest.mark.parametrize(("own", "groups"), [(2, 2), (1, 1), (4, 2), (8, 1)])
def test_heads_that_share_x_and_b_equal_heads_with_copies_of_them(own, groups):
    """Mamba-in-Llama: x and B are stored once for several heads. Outputs and folded states are the same."""
    rng, generator = np.random.default_rng(6), torch.Generator().manual_seed(6)
    heads, width, readers, size, rows = 8, 16, 4, 16, 15
    paths = paths_of(random_tree(rng, rows))
    A, D = -torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    C = torch.randn(rows, readers, size, generator=generator)
    states = torch.randn(3, heads, width, size, generator=generator)
    inputs = random_inputs(generator, 40, heads, width, readers, size, torch.float32)
    few, whole = repeated(inputs, own, groups)
    at = torch.tensor([path[-1] for path in paths])
    folds = [BlockFold(2, torch.arange(1, 17), 1), BlockFold(0, torch.arange(20, 36), -1)]
    for found, truth in zip(fold(few, states, folds, A), reference.fold(whole, states, folds, A), strict=True):
        assert relative(found, truth) < 1e-6
    y = tree_scan(few, states, [], packed(paths, 2), few.x[at], C, A, D)
    truth = reference.tree_scan(whole, states, [], packed(paths, 2), whole.x[at], C, A, D)
    assert relative(y, truth) < 2e-6
    assert torch.equal(reference.tree_scan(few, states, [], packed(paths, 2), few.x[at], C, A, D), truth)


@pytest.mark.parametrize(
    ("heads", "width", "own", "groups", "readers", "size"),
    [(8, 64, 8, 2, 2, 64), (8, 128, 2, 2, 8, 128), (4, 8, 2, 2, 4, 8)],
    ids=["mamba2", "mamba-in-llama", "a tiny mamba-in-llama"],
)
def test_a_rows_bits_do_not_depend_on_the_other_rows(heads, width, own, groups, readers, size):
    """Mamba-2: as a single row, in a tree, and in another order."""
    rng, generator = np.random.default_rng(5), torch.Generator().manual_seed(5)
    rows = 63
    paths = paths_of(random_tree(rng, rows))
    A, D = -torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    C = torch.randn(rows, readers, size, generator=generator)
    states = torch.randn(2, heads, width, size, generator=generator)
    inputs, _ = repeated(
        random_inputs(generator, CHAIN + 1 + rows, heads, width, readers, size, torch.float32), own, groups
    )
    x = inputs.x[torch.tensor([path[-1] for path in paths])]
    whole = packed(paths, 1)
    y = tree_scan(inputs, states, [], whole, x, C, A, D)
    for count in (1, 8, 24, 40):
        places = torch.from_numpy(rng.permutation(rows)[:count])
        columns = torch.zeros(-(-count // 8) * 8, whole.columns.shape[1], dtype=torch.int64)
        columns[:count] = whole.columns[places]
        group = torch.zeros(-(-count // 8) * 8, dtype=torch.int64)
        group[:count] = torch.arange(count)
        some = Paths(columns, [Group(1, group, count)], [])
        their_x, their_C = x.new_zeros(len(columns), own, width), C.new_zeros(len(columns), readers, size)
        their_x[:count], their_C[:count] = x[places], C[places]
        found = tree_scan(inputs, states, [], some, their_x, their_C, A, D)[:count]
        assert torch.equal(found, y[places]), count
