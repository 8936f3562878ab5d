"""`dendro bench context`: fitted lines, and a small complete run."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
import torch
from dendro.errors import BadRequest
from dendro.shapes import TreeShape

from cluster.bench.context import (
    CHAIN,
    CONTEXT,
    OFF,
    TREE,
    WAYS,
    ContextOptions,
    ContextRow,
    LibrarySteps,
    fit_of,
    line,
    measure_context,
    rows_of,
    with_positions,
)
from cluster.measure.bench import draw
from cluster.measure.in_process import tree_of
from cluster.measure.targets import Which
from tests.support import tiny_models
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions


def lengths(contexts=(100, 200, 400), slope=1e-5, fixed=0.02):
    """Measurements on a line, scaled by a factor per repetition."""
    made = []
    for context in contexts:
        each = ContextRow(context, prefill_s=0.001 * context, session_bytes=1000 * context)
        for way in WAYS:
            each.seconds[way] = [factor * (fixed + slope * context) for factor in (1.0, 1.0, 2.0)]
        made.append(each)
    return made


def test_a_line_is_fitted_exactly():
    assert line([(1, 5.0), (2, 7.0), (4, 11.0)]) == pytest.approx((3.0, 2.0))
    fit = fit_of(lengths(), OFF, token_bytes=5000)
    assert fit["fixed_ms"] == pytest.approx(20.0)
    assert (fit["slope_us_per_token"]["median"], fit["slope_us_per_token"]["high"]) == pytest.approx((10.0, 20.0))
    assert fit["read_gb_per_second"] == pytest.approx(0.5)
    assert fit["largest_residual"] == 0


def test_measurements_off_a_line_have_a_large_residual():
    bent = lengths()
    bent[1].seconds[OFF] = [2 * seconds for seconds in bent[1].seconds[OFF]]
    assert fit_of(bent, OFF, 5000)["largest_residual"] > 0.1
    flat = lengths(slope=0.0)
    assert fit_of(flat, OFF, 5000)["read_gb_per_second"] is None


def test_trees_have_the_shapes_they_are_named_after():
    off, chain, tree = (tree_of(TreeShape.parse(way), 7) for way in (OFF, CHAIN, TREE))
    assert (off.rows, chain.rows, tree.rows) == (1, 5, 16)
    assert tree.depths.tolist() == [0] + [1] * 3 + [2] * 6 + [3] * 6
    assert tree.tokens[0] == 7 and len(set(tree.tokens[1:].tolist())) == 15


@pytest.mark.parametrize("target", [Which.BOTH, Which.MAMBA2])
def test_only_one_target_with_attention_is_measured(target):
    """The memory of other targets does not grow with the context."""
    with pytest.raises(BadRequest, match="target: one at a time: demo or costly"):
        ContextOptions(target=target)


def chosen(**given) -> ContextOptions:
    return CONTEXT.chosen({each.name: given.get(each.name) for each in fields(ContextOptions)}, quick=False)


@pytest.mark.parametrize("text", ["", "64", "64,64", "1,64", "a,b"])
def test_contexts_that_determine_no_line_are_refused(text):
    with pytest.raises(BadRequest, match="contexts"):
        chosen(contexts=text)
    assert chosen(contexts="512,256").contexts == (256, 512)


async def test_a_small_run_measures_every_way_at_every_length(tmp_path):
    source, copies = tmp_path / "tiny", tmp_path / "copies"
    for folder in (source, copies):
        folder.mkdir()
    tiny_models.make_checkpoint(source, max_position_embeddings=64)
    longer = with_positions(source, 300, copies)
    assert json.loads((longer / "config.json").read_text())["max_position_embeddings"] == 300
    engine = VerifierEngine.load(
        longer, VerifierOptions(name="tiny", max_length=300, max_sessions=1, share_prefixes=False)
    )
    await engine.start()
    steps = []
    try:
        library = LibrarySteps(longer, "bfloat16", torch.device("cpu"))
        found = await measure_context(engine, library, range(250), (60, 200), 2, lambda: steps.append(1))
    finally:
        await engine.stop()
    assert len(steps) == 6 and engine.stats()["pages_held"] == 0
    pages = [each.session_bytes // (64 * engine.runner.target.token_bytes) for each in found]
    assert pages == [1, 4], "as many pages as the text and its deepest guess need"
    report: dict[str, Any] = {"rows": rows_of(found), "fits": [fit_of(found, way, 100) for way in WAYS]}
    assert [(row["context"], set(row["ms"])) for row in report["rows"]] == [(at, set(WAYS)) for at in (60, 200)]
    report["aims"] = []
    assert len(list(CONTEXT.all_tables(report))) == 2
    draw(CONTEXT.plots, report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
