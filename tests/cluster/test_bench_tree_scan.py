"""`dendro bench tree-scan`: its trees, the agreement of all ways, and a small complete run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest, EngineFailed
from dendro.tree import DraftTree
from transformers import Mamba2Config, Mamba2ForCausalLM

from cluster.bench.allocations import peak_bytes
from cluster.bench.tree_scan import (
    LIBRARY,
    PACKED,
    SIZES,
    UNROLLED,
    WAYS,
    ScanLayer,
    ScanMemory,
    ScanModelSize,
    aims_of,
    beams,
    binary,
    check_agreement,
    rows_of,
    shapes_of,
    ways_of,
)
from cluster.bench.tree_scan_command import parse_size, run_tree_scan
from cluster.bench.tree_scan_report import facts_of, plot, tables_of
from verifier_service.recurrent import Extent, place_of, recurrent_rows

TINY = ScanModelSize("tiny", hidden=32, layers=2, heads=4, width=16, groups=2, state=8, vocabulary=96)


def test_trees_have_the_rows_they_are_named_after():
    assert [binary(depth).rows for depth in (0, 3, 4, 5)] == [1, 15, 31, 63]
    assert [len(binary(depth).leaves) for depth in (0, 3, 5)] == [1, 8, 32]
    assert binary(3).unrolled_rows == 32 and binary(5).depth == 5
    for steps, width in ((4, 2), (16, 5)):
        tree = beams(steps, width, seed=1)
        assert tree.rows == steps * width + 1 and tree.depth == steps
        assert np.bincount([len(path) for path in tree.paths]).tolist() == [0, 1, *[width] * steps]
    assert len(shapes_of(quick=False, seed=0)) == 16 and len(shapes_of(quick=True, seed=0)) == 4


def test_rows_equal_the_engines():
    block, root, first = 16, 40, 50
    tree = binary(5)
    states = place_of(0, Extent.of_whole(block, 48, 5))
    states.fold_to(1)
    theirs = recurrent_rows(
        states, np.zeros(0, np.int64), root, DraftTree.of(range(tree.rows), tree.parents), scratch=first
    )
    ours = rows_of([[first + row for row in path] for path in tree.paths], root, block, (0, 2))
    assert np.array_equal(ours.columns, theirs.columns) and np.array_equal(ours.own, theirs.own)
    assert np.array_equal(ours.sources, theirs.sources) and not theirs.folds


@pytest.mark.parametrize("shape", [binary(0), binary(3), beams(16, 3, 2)], ids=lambda shape: shape.name)
def test_all_ways_agree(shape):
    layer = ScanLayer(TINY, 16, shape.unrolled_rows, seed=3)
    with torch.inference_mode():
        ways = ways_of(layer, shape)
        assert ways[PACKED]().shape == (shape.rows, 64)
        assert {len(ways[way]()) for way in WAYS if way != PACKED} == {shape.unrolled_rows}
        assert check_agreement(shape, ways) < 1e-3


@pytest.mark.parametrize("way", [UNROLLED, LIBRARY])
def test_ways_that_disagree_are_not_measured(way):
    shape = binary(3)
    layer = ScanLayer(TINY, 16, shape.unrolled_rows, seed=3)
    with torch.inference_mode():
        ways = ways_of(layer, shape)
        with pytest.raises(EngineFailed, match="binary, depth 3"):
            check_agreement(shape, ways | {way: lambda: 1.01 * ways[UNROLLED]()})


def test_weights_are_counted_as_the_library_has_them():
    size = SIZES["130m"]
    with torch.device("meta"):
        model = Mamba2ForCausalLM(
            Mamba2Config(
                vocab_size=size.vocabulary,
                hidden_size=size.hidden,
                num_hidden_layers=size.layers,
                num_heads=size.heads,
                head_dim=size.width,
                n_groups=size.groups,
                state_size=size.state,
                tie_word_embeddings=True,
            )
        )
    model.tie_weights()
    assert size.weight_bytes == 2 * sum(each.numel() for each in model.parameters())


def test_a_peak_counts_tensors_held_at_the_same_time():
    def run():
        first = torch.ones(1 << 18)  # 1 MiB
        del first
        second = torch.ones(1 << 19)
        return second + 1

    run()
    assert peak_bytes(run) == pytest.approx(4 << 20, rel=0.01)


def test_aims_are_judged_only_for_their_sizes():
    def row(rows, low):
        ratio = {"median": 2.0, "low": low, "high": 3.0, "coverage": 0.93}
        return {"tree": "t", "rows": rows, "over_packed": {UNROLLED: ratio}}

    memory = [
        ScanMemory("small", "plain", 1, 100, 10, 1, 1, 0),
        ScanMemory("small", "a", 63, 100, 10, 20, 10, 0),
        ScanMemory("large", "plain", 1, 1000, 10, 1, 1, 0),
        ScanMemory("large", "a", 63, 1000, 10, 20, 10, 0),
        ScanMemory("large", "b", 81, 1000, 90, 1, 1, 0),
    ]
    aims = aims_of([row(1, 0.5), row(15, 0.99), row(31, 1.2)], memory)
    assert [aim["met"] for aim in aims] == [False, True, False, True, None]
    assert aims[3]["value"] == pytest.approx(1040 / 1012, abs=1e-4)


def test_unknown_sizes_and_blocks_are_refused():
    assert parse_size("1.3b").heads == 64
    with pytest.raises(BadRequest, match="size"):
        parse_size("13b")
    with pytest.raises(BadRequest, match="block"):
        run_tree_scan(TINY, 24, 1, True, 0, lambda title, steps: lambda: None)


def test_a_small_run_measures_every_way_of_every_tree(tmp_path):
    steps = []
    report = run_tree_scan(TINY, 16, 2, True, 0, lambda title, count: lambda: steps.append(count))
    assert steps == [3, 3, 3, 1]
    assert [row["rows"] for row in report["rows"]] == [1, 15, 31, 63]
    for row in report["rows"]:
        assert set(row["ms"]) == set(row["temporary_bytes"]) == set(WAYS) and min(row["temporary_bytes"].values()) > 0
    assert [each["rows"] for each in report["memory"]] == [1, 63, 81]
    assert report["memory"][0]["over_plain"] == 1
    for _, columns, cells in tables_of(report):
        assert cells and all(len(each) == len(columns) for each in cells)
    assert all(facts_of(report))
    plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
