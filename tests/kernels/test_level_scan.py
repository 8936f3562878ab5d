"""Levels of trees from inputs against each path computed separately, token by token in float64 (ALGORITHMS 11)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tree_kernels.level_scan import Lines, NodeInputs, level_scan
from tree_kernels.state_step import mamba2_drive, mamba2_fold, mamba2_step

WIDTH, SIZE = 8, 16


def random_tree(rng, nodes, new):
    """Which nodes are on each node's path, [nodes, nodes]; the last `new` nodes have no children."""
    lines = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        lines[node] |= lines[rng.integers(0, max(min(node, nodes - new), 1))]
    return lines


def random_inputs(generator, trees, nodes, heads, groups, strength):
    x = torch.randn(trees, nodes, heads, WIDTH, generator=generator)
    B = torch.randn(trees, nodes, groups, SIZE, generator=generator)
    dt = F.softplus(torch.randn(trees, nodes, heads, generator=generator) * strength)
    return NodeInputs(x, B, dt)


def stepped(inputs, tree, path, state, C, A):
    """The recurrence by its definition along one path of a tree, in float64: y [H, P] and the state after it."""
    heads, groups = inputs.dt.shape[2], inputs.B.shape[2]
    states, first = state.double()[None].clone(), torch.zeros(1, dtype=torch.int64)
    y = torch.zeros(1)
    for node in path:
        x, B, dt = (part[tree, node].double()[None] for part in inputs)
        y = mamba2_step(states, first, slice(0, 1), x, dt, A.double(), B, C.double()[None], torch.zeros(heads))
    assert heads % groups == 0
    return y[0], states[0]


@pytest.mark.parametrize("strength", [1.0, 10.0], ids=["mild", "strong-decay"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("sizes", [[(1, 1)], [(9, 4)], [(1, 1), (16, 9), (7, 3)], [(63, 30), (40, 1)]], ids=str)
def test_every_new_node_equals_its_path_computed_separately_beside_any_other_trees(sizes, groups, strength):
    """sizes: nodes of each tree, and how many of them are new. Padding has random inputs and dt = 0."""
    rng, generator = np.random.default_rng(len(sizes)), torch.Generator().manual_seed(groups)
    heads, trees = 4, len(sizes)
    most, widest = max(size for size, _ in sizes), max(new for _, new in sizes)
    inputs = random_inputs(generator, trees, most, heads, groups, strength)
    lines = np.zeros((trees, most, most), bool)
    for tree, (size, new) in enumerate(sizes):
        inputs.dt[tree, : most - size] = 0
        lines[tree, most - size :, most - size :] = random_tree(rng, size, new)
    states = [torch.randn(heads, WIDTH, SIZE, generator=generator) for _ in sizes]
    C = torch.randn(trees, widest, groups, SIZE, generator=generator)
    A = -torch.rand(heads, generator=generator) * 4
    y = level_scan(inputs, Lines.of(lines, widest, torch.device("cpu")), states, C, A)
    for tree, (_, new) in enumerate(sizes):
        for row in range(widest - new, widest):
            path = np.flatnonzero(lines[tree, most - widest + row])
            wanted, _ = stepped(inputs, tree, path, states[tree], C[tree, row], A)
            error = (y[tree, row].double() - wanted).norm() / wanted.norm()
            assert error < (2e-6 if strength == 1 else 2e-5)


def test_siblings_are_hidden_even_where_the_exponential_would_overflow():
    """One sibling decays by exp(-200), so its difference to the other one is +200."""
    generator = torch.Generator().manual_seed(0)
    inputs = random_inputs(generator, 1, 3, 2, 1, 1.0)
    inputs.dt[0, 1:] = torch.tensor([[1e-3, 1e-3], [200.0, 200.0]])
    lines = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    C, A = torch.randn(1, 2, 1, SIZE, generator=generator), torch.full((2,), -1.0)
    state = torch.randn(2, WIDTH, SIZE, generator=generator)
    y = level_scan(inputs, Lines.of(lines, 2, torch.device("cpu")), [state], C, A)
    for row, path in enumerate(([0, 1], [0, 2])):
        wanted, _ = stepped(inputs, 0, path, state, C[0, row], A)
        torch.testing.assert_close(y[0, row].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_folding_paths_of_several_lengths_gives_the_states_of_single_steps(groups):
    generator, heads, lengths = torch.Generator().manual_seed(3), 4, [1, 5, 3]
    inputs = random_inputs(generator, 3, 5, heads, groups, 1.0)
    for row, length in enumerate(lengths):
        inputs.dt[row, length:] = 0
    states, A = torch.randn(6, heads, WIDTH, SIZE, generator=generator), -torch.rand(heads, generator=generator)
    before = states.clone()
    left, driven = mamba2_drive(inputs.x, inputs.dt, A)
    mamba2_fold(states, torch.tensor([2, 0, 1]), torch.tensor([3, 0, 5]), left, driven, inputs.B)
    for row, (source, target) in enumerate([(2, 3), (0, 0), (1, 5)]):
        _, wanted = stepped(inputs, row, range(lengths[row]), before[source], torch.zeros(groups, SIZE), A)
        torch.testing.assert_close(states[target].double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(states[[1, 2, 4]], before[[1, 2, 4]])
