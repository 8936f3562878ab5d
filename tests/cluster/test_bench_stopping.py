"""`dendro bench stopping`: replayed drafts equal the drafter's own, and the report is computed correctly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.shapes import DynamicShape, LevelShape, TreeShape, UntilShape
from dendro.state import NoStates
from dendro.tree import DraftTree

from cluster.bench.replay import STEP_ROWS, ReplayCosts, rate, run_fixed
from cluster.bench.stopping import (
    CHAIN,
    FORMS,
    STOPPING,
    THRESHOLDS,
    TREE,
    Form,
    Point,
    StoppedTrace,
    comparison_rows,
    cost_rows,
    front_at,
    outside,
    point_of,
    rule_rows,
    run_marginal,
    stopped,
    sweep_of,
)
from cluster.bench.traces import SPARE, TracedAnswer, grown_trees
from cluster.measure.bench import draw
from cluster.measure.in_process import EngineText
from drafter_service.confidence import Calibration
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support import tiny_mamba
from tests.support.cases import few_of

CHAINS, TREES = FORMS
TOKENS = 20


def drafter_at(folder: Path, form: str) -> DrafterEngine:
    options = DrafterOptions(name="d", dtype=torch.float32, max_sessions=4, form=form)
    return DrafterEngine.load(folder, options, states=NoStates())


async def text_of(engine: DrafterEngine, temperature: float) -> TracedAnswer:
    """A text in which the drafter's first guess comes in three positions of four."""
    begin, rng = 20, np.random.default_rng(3)
    peer = EngineText([(7 * step + step * step) % 96 for step in range(begin)], _sampling(temperature))
    await peer.open(engine, 4 * TOKENS)
    for index in range(TOKENS + SPARE):
        tree = await peer.draft(engine, LevelShape((2,)), len(peer.text) - (index > 0))
        peer.text.extend([int(tree.tokens[1 + (rng.random() < 0.25)])])
    await peer.close(engine, len(peer.text) - 1)
    return TracedAnswer("code", "text", temperature, 11, tuple(peer.text.ids), begin, TOKENS)


def _sampling(temperature: float):
    return TracedAnswer("", "", temperature, 11, (), 0, 0).sampling


@pytest.mark.parametrize("case", few_of([("mamba", 0.0), ("mamba2", 1.0), ("mamba2", 0.0)], ("mamba2", 1.0)))
async def test_a_replayed_draft_equals_the_drafters_own(tmp_path, monkeypatch, case):
    """The drafts are recorded by an engine of its own, in the eager form: at every position, of the whole chain and the
    whole tree. Other engines, in both forms, draft round after round by each rule. Calibrations are fixed: what they
    have learned at a position depends on where the rounds before it began."""
    model, temperature = case
    monkeypatch.setattr(Calibration, "learn", lambda self, scores, rank: self)
    tiny_mamba.make_checkpoint(tmp_path, model)
    recorder = drafter_at(tmp_path, "eager")
    await recorder.start()
    answer = await text_of(recorder, temperature)
    (trees,) = await grown_trees(recorder, [answer], [form.recorded for form in FORMS], lambda: None)
    await recorder.stop()
    drafts = {form: StoppedTrace(answer, form, trees[form.recorded]) for form in FORMS}
    levels_seen = set[int]()
    shapes: list[tuple[Form, TreeShape]] = [(form, form.until(h)) for form in FORMS for h in (0.1, 0.5, 0.9)]
    shapes += [(form, UntilShape(form.largest, 0.7, 0.05)) for form in FORMS]
    shapes += [(form, form.lengths[3]) for form in FORMS]
    for kind in ("eager", "fused"):
        for form, shape in shapes:
            engine = drafter_at(tmp_path, kind)
            await engine.start()
            peer = EngineText(answer.ids[: answer.begin], answer.sampling)
            await peer.open(engine, 4 * TOKENS)
            sent = base = answer.begin
            while base < answer.end:
                own = await peer.draft(engine, shape, sent)
                tree, levels = drafts[form].part(shape, base)
                assert own.tokens.tolist() == tree.tokens.tolist(), (kind, str(shape), base)
                assert own.parents.tolist() == tree.parents.tolist()
                np.testing.assert_allclose(own.values, tree.values, atol=1e-4)
                levels_seen.add(levels)
                sent = base
                base += drafts[form].emitted(shape, base)
                peer.text.extend(answer.ids[len(peer.text) : base])
            await engine.stop()
    assert {1, 2, 3} <= levels_seen


def chain_of(chances: Sequence[float]) -> DraftTree:
    values = np.log(np.cumprod([1.0, *chances]))
    return DraftTree.of(range(len(values)), range(-1, len(values) - 1), values)


def test_a_chain_is_cut_where_the_rule_stops():
    recorded = chain_of([0.9, 0.8, 0.9, 0.5, *[0.9] * 8])
    for h, guesses in ((0.05, 1), (0.2, 2), (0.3, 3), (0.5, 4), (0.69, 5), (0.99, 12)):
        tree, levels = stopped(recorded, CHAINS.until(h))
        assert (tree.guesses, levels) == (guesses, guesses)
        np.testing.assert_array_equal(tree.values, recorded.values[: guesses + 1])
    tree, levels = stopped(recorded, UntilShape(CHAINS.largest, 0.5, 0.33))
    assert (tree.guesses, levels) == (3, 4), "the fourth guess is drafted and left out"


def test_a_fixed_length_is_the_beginning_of_the_recorded_draft():
    recorded = chain_of([0.5] * 12)
    for length, shape in enumerate(CHAINS.lengths, 1):
        assert stopped(recorded, shape)[0].guesses == length


def test_a_draft_that_was_not_recorded_far_enough_is_refused():
    with pytest.raises(ValueError, match="recorded: a row of it without children gets some in until"):
        stopped(chain_of([0.99] * 4), CHAINS.until(0.9))


def test_every_tree_of_the_sweep_is_part_of_the_recorded_one():
    """Neither form's recorded shape drops a candidate, so it does not depend on values what it has."""
    for form in FORMS:
        if isinstance(form.recorded, DynamicShape):
            assert form.recorded.total == form.recorded.candidates
        assert form.recorded.width == form.largest.width and form.recorded.depth == form.largest.depth
        assert len(form.lengths) == len(form.grown) == form.largest.depth


def flat_costs() -> ReplayCosts:
    """A step takes 20 ms and 0.4 ms per row, a draft 2 ms per level."""
    shapes = [shape for form in FORMS for shape in (*form.lengths, *form.grown)]
    return ReplayCosts({rows: 20_000.0 + 400 * rows for rows in STEP_ROWS}, {s: 2000.0 * s.depth for s in shapes})


SIBLINGS = (0.6, 0.3)
"""Shares of the second and the third guess in what the first one leaves."""


def recorded_texts(form: Form, easy: float, count: int = 3, tokens: int = 64, seed: int = 0) -> list[StoppedTrace]:
    """Texts whose positions are easy or hard to guess, by turns; the drafter knows which, but not what comes.

    The first guess of an easy position is right with 0.95, of a hard one with 0.4; the others share the rest.
    """
    found, rng = list[StoppedTrace](), np.random.default_rng(seed)
    for number in range(count):
        length = tokens + SPARE + 20
        hard = (rng.random(length) < np.where(np.arange(length) // 8 % 2, 1 - easy, easy)).cumsum() % 2 == 1
        chances = np.where(hard, 0.4, 0.95)
        of_ranks = np.stack([chances, *(share * (1 - chances) for share in SIBLINGS)], 1)
        right = (rng.random(length)[:, None] >= of_ranks.cumsum(1)).sum(1)  # the rank of what comes; 3: none of them
        ids = tuple(range(1, length + 1))
        answer = TracedAnswer(("code", "prose")[number % 2], f"p{number}", 0.0, 1, ids, 1, tokens)
        trees = [_whole_tree(form, ids, base, of_ranks, right) for base in range(answer.begin, answer.end)]
        found.append(StoppedTrace(answer, form, trees))
    return found


def _whole_tree(form: Form, ids: Sequence[int], base: int, of_ranks: np.ndarray, right: np.ndarray) -> DraftTree:
    """On every level the k rows of greatest value get k children each."""
    tokens, parents, values, frontier, k = [ids[base - 1]], [-1], [0.0], [0], form.largest.k
    for position in range(base, base + form.largest.depth):
        first = len(tokens)
        for row in frontier:
            for rank in range(k):
                tokens.append(ids[position] if rank == right[position] else 1000 + rank)
                parents.append(row)
                values.append(values[row] + math.log(of_ranks[position, rank]))
        frontier = sorted(sorted(range(first, len(tokens)), key=lambda row: -values[row])[:k])
    return DraftTree.of(tokens, parents, values)


def test_rates_of_a_hand_example():
    """Two rounds of 3 guesses: one emits 4 tokens, the other 1. Two tokens of five are discarded less than guessed."""
    ids = tuple(range(1, 40))
    answer = TracedAnswer("code", "p", 0.0, 1, ids, 1, 5)
    right = DraftTree.of([1, 2, 3, 4, *range(50, 59)], range(-1, 12), np.linspace(0, -1, 13))
    wrong = DraftTree.of([5, 70, 71, 72, *range(50, 59)], range(-1, 12), np.linspace(0, -1, 13))
    trace = StoppedTrace(answer, CHAINS, [right, right, right, right, wrong])
    runs = [run_fixed(CHAINS.lengths[2], trace, flat_costs())]
    assert [(each.emitted, each.guesses) for each in runs[0].rounds] == [(4, 3), (1, 3)]
    assert point_of("3", runs) == Point("3", discard=3 / 5, verification=2 / 5)
    assert rate(runs) == pytest.approx(5e6 / (2 * (6000 + 20_000 + 400 * 4)))


def test_a_front_lies_between_its_points():
    front = [Point("a", 0.2, 0.6), Point("b", 0.6, 0.4), Point("c", 0.5, 0.7)]
    assert front_at(front, 0.1) is None
    assert front_at(front, 0.2) == 0.6
    assert front_at(front, 0.4) == pytest.approx(0.5)
    assert front_at(front, 0.5) == pytest.approx(0.45)  # c is above the line from a to b
    assert front_at(front, 0.6) == pytest.approx(0.4)
    assert front_at(front, 5.0) is None
    fixed = [Point("1", 0.1, 0.9), Point("2", 0.4, 0.6), Point("3", 0.55, 0.4), Point("4", 0.9, 0.38)]
    assert [(point.rule, round(ratio, 3)) for point, ratio in outside(fixed, front)] == [("2", 1.2), ("3", 0.941)]


@pytest.fixture(scope="module")
def sweeps():
    return [sweep_of(form, 0.0, recorded_texts(form, 0.9, count=6, tokens=96), flat_costs()) for form in FORMS]


def test_where_the_drafter_knows_what_is_hard_the_sweeps_front_lies_outside_that_of_every_length(sweeps):
    for sweep in sweeps:
        for row in comparison_rows(sweep):
            assert row["front_over_closest"] > 1.0, row
            assert row["lengths_compared"] >= 2


def test_the_marginal_rule_is_within_a_percent_of_the_best_h_of_a_simulated_drafter(sweeps):
    for sweep in sweeps:
        for row in comparison_rows(sweep):
            assert row["marginal_over_best_h"] >= 0.99, row


def test_the_marginal_rule_starts_from_nothing_and_learns_the_costs_that_it_needs():
    traces = recorded_texts(CHAINS, 0.9)
    first, second = run_marginal(CHAINS, traces, flat_costs())
    assert len(first) == len(traces) and rate(second) >= 0.98 * rate(first)
    again = run_marginal(CHAINS, traces, flat_costs())
    assert [[run.rounds for run in runs] for runs in (first, second)] == [
        [run.rounds for run in runs] for runs in again
    ], "a replay is deterministic"


def test_a_report_has_every_rule_of_every_form_and_kind_and_an_aim_for_each(sweeps, tmp_path):
    rows = [row for sweep in sweeps for row in rule_rows(sweep)]
    compared = [row for sweep in sweeps for row in comparison_rows(sweep)]
    assert len(rows) == 2 * sum(len(form.lengths) + len(THRESHOLDS) + 1 for form in FORMS)
    assert {(row["form"], row["kind"]) for row in compared} == {
        (f, k) for f in (CHAIN, TREE) for k in ("code", "prose")
    }
    report = {"rows": rows, "compared": compared, "costs": list(cost_rows(flat_costs(), 0.0))}
    report["aims"] = [row for aim in STOPPING.aims for row in aim.judged(report)]
    assert len(report["aims"]) == 2 * len(compared)
    titles = [title for title, *_ in STOPPING.all_tables(report)]
    assert len(titles) == 1 + 2 * 2 + (1 + 2 * 2) + 1
    draw(STOPPING.plots, report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
