"""Levels of trees from inputs against `level_scan/reference.py`, node by node in float64
(docs/design/numbers.md#oracles)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tree_kernels.level_scan import Lines, NodeInputs, level_scan, reference
from tree_kernels.state_step import mamba2_drive, mamba2_fold

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
    of = Lines.of(lines, widest, torch.device("cpu"))
    y = level_scan(inputs, of, states, C, A)
    exact = level_scan(
        NodeInputs(*(each.double() for each in inputs)),
        Lines(of.sums.double(), of.bars.double()),
        [state.double() for state in states],
        C.double(),
        A.double(),
    )
    truth = reference.level_scan(inputs, lines, states, C, A)
    for tree, (_, new) in enumerate(sizes):
        for row in range(widest - new, widest):
            wanted = truth[tree, row]
            assert (y[tree, row].double() - wanted).norm() / wanted.norm() < (2e-6 if strength == 1 else 2e-5)
            assert (exact[tree, row] - wanted).norm() / wanted.norm() < 1e-12


def test_siblings_are_hidden_even_where_the_exponential_would_overflow():
    """One sibling decays by exp(-200), so its difference to the other one is +200."""
    generator = torch.Generator().manual_seed(0)
    inputs = random_inputs(generator, 1, 3, 2, 1, 1.0)
    inputs.dt[0, 1:] = torch.tensor([[1e-3, 1e-3], [200.0, 200.0]])
    lines = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    C, A = torch.randn(1, 2, 1, SIZE, generator=generator), torch.full((2,), -1.0)
    state = torch.randn(2, WIDTH, SIZE, generator=generator)
    y = level_scan(inputs, Lines.of(lines, 2, torch.device("cpu")), [state], C, A)
    wanted = reference.level_scan(inputs, lines, [state], C, A)
    torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=1e-5)


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
        wanted = reference.advanced(inputs, row, range(lengths[row]), before[source], A)
        torch.testing.assert_close(states[target].double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(states[[1, 2, 4]], before[[1, 2, 4]])
