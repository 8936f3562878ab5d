"""`dendro bench tree-scan`: its trees, the agreement of all ways, and a small complete run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest, EngineFailed
from dendro.tree import DraftTree

from cluster.bench.allocations import peak_bytes
from cluster.bench.tree_scan import (
    LIBRARY,
    PACKED,
    SIZES,
    TREE_SCAN,
    UNROLLED,
    WAYS,
    ScanLayer,
    ScanModelSize,
    TreeScanOptions,
    beams,
    binary,
    check_agreement,
    measure,
    rows_of,
    shapes_of,
    ways_of,
)
from cluster.measure.bench import draw
from verifier_service.recurrent import Extent, place_of, recurrent_rows

TINY = ScanModelSize("tiny", heads=4, width=16, groups=2, state=8)


def test_trees_have_the_rows_they_are_named_after():
    assert [binary(depth).rows for depth in (0, 3, 4, 5)] == [1, 15, 31, 63]
    assert [len(binary(depth).leaves) for depth in (0, 3, 5)] == [1, 8, 32]
    assert binary(3).unrolled_rows == 32 and binary(5).depth == 5
    for steps, width in ((4, 2), (16, 5)):
        tree = beams(steps, width, seed=1)
        assert tree.rows == steps * width + 1 and tree.depth == steps
        assert np.bincount([len(path) for path in tree.paths]).tolist() == [0, 1, *[width] * steps]
    assert len(shapes_of(TreeScanOptions())) == 16 and len(shapes_of(TreeScanOptions(beams=False))) == 4


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


def test_a_peak_counts_tensors_held_at_the_same_time():
    def run():
        first = torch.ones(1 << 18)  # 1 MiB
        del first
        second = torch.ones(1 << 19)
        return second + 1

    run()
    assert peak_bytes(run) == pytest.approx(4 << 20, rel=0.01)


def test_aims_are_judged_for_their_sizes_alone():
    def row(rows, low):
        ratio = {"median": 2.0, "low": low, "high": 3.0, "coverage": 0.93}
        return {"tree": "t", "rows": rows, "over_packed": {UNROLLED: ratio}}

    report = {"rows": [row(1, 0.5), row(15, 0.99), row(31, 1.2)]}
    assert [row["met"] for aim in TREE_SCAN.aims for row in aim.judged(report)] == [False, True]


def test_unknown_blocks_are_refused():
    with pytest.raises(BadRequest, match="block"):
        TreeScanOptions(block=24)


def test_a_small_run_measures_every_way_of_every_tree(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "130m", TINY)
    steps = []
    options = TreeScanOptions(repetitions=2, beams=False)
    report = measure(options, lambda title, count: lambda: steps.append(count)) | {"aims": []}
    assert steps == [3, 3, 3]
    assert [row["rows"] for row in report["rows"]] == [1, 15, 31, 63]
    for row in report["rows"]:
        assert set(row["ms"]) == set(row["temporary_mib"]) == set(WAYS) and min(row["temporary_mib"].values()) > 0
    assert len(list(TREE_SCAN.all_tables(report))) == 3
    draw(TREE_SCAN.plots, report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
