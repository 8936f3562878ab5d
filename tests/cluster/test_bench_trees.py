"""`dendro bench trees`: replays equal drafter and verifier, and the report is computed correctly."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_mamba
import torch
from cases import few_of
from dendro.errors import BadRequest
from dendro.shapes import (
    OFF,
    BeamShape,
    DynamicShape,
    LevelShape,
    NodeShape,
    ProposedShape,
    TreeShape,
    child_counts,
)
from dendro.state import NoStates
from dendro.text import Limits, Text, Verdict
from dendro.tree import EMPTY_TRACE, DraftTree

from cluster.arms import Arm
from cluster.bench.costs import STEP_ROWS, ReplayCosts, level_shapes, measure_drafts, measure_steps
from cluster.bench.live import live_rounds
from cluster.bench.replay import arm_of, run_fixed, run_policy, run_stream
from cluster.bench.traces import (
    SPARE,
    Forward,
    Guesses,
    Trace,
    TracedAnswer,
    disagreements,
    grow_trees,
    guesses_of,
    record_proposals,
    trimmed,
    walk,
    write_answer,
)
from cluster.bench.trees import (
    LIKELIEST,
    MASTERS,
    SIZES,
    TreesRecord,
    acceptance,
    best_static,
    cut_trees,
    dynamic_shapes,
    emitted_per_round,
    fixed_arms,
    grown_arms,
    lengths,
    level_shapes_up_to,
    likeliest_tree,
)
from cluster.bench.trees_aims import DYNAMIC_BAR
from cluster.bench.trees_causes import causes_of, reliability
from cluster.bench.trees_command import TreesSettings, analyse, bench_trees, cost_rows, parse_drafters
from cluster.bench.trees_context import context_rows, key_bytes
from cluster.bench.trees_report import facts_of, plot, tables_of
from cluster.config import DEMO_MODELS
from cluster.demo.corpus import HELD_OUT
from cluster.demo.kinds import BLOCK_TOKENS, EDITS, KINDS, PROSE, kind_prompts
from cluster.demo.prompts import load_passages, load_tokenizer
from cluster.measure.in_process import EngineText
from cluster.measure.report import as_markdown
from cluster.policies import POLICIES, Experience, make_policy
from cluster.policies.replay import static_path
from cluster.router.rounds import rounds
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

CHAIN, TREE = LevelShape((1, 1, 1)), LevelShape((3, 2, 1))
ARMS: tuple[TreeShape, ...] = (OFF, CHAIN, TREE, DynamicShape(3, 3, 8))
TOKENS = 12


def tiny_pair(folder: Path) -> tuple[Path, Path]:
    """A target, and a similar drafter: its guesses are often, but not always, accepted."""
    target, drafter = folder / "target", folder / "drafter"
    for each in (target, drafter):
        each.mkdir()
    model = tiny_mamba.make_checkpoint(target, "mamba2")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(drafter)
    tiny_mamba.write_tokenizer(drafter)
    return target, drafter


@asynccontextmanager
async def engines(folder: Path) -> AsyncIterator[tuple[DrafterEngine, VerifierEngine, Forward]]:
    target, small = tiny_pair(folder)
    drafter = DrafterEngine.load(small, DrafterOptions(name="d", max_sessions=8), states=NoStates())
    await drafter.start()
    verifier = VerifierEngine.load(
        target, VerifierOptions(name="v", dtype=torch.float32, max_length=256, max_sessions=4)
    )
    await verifier.start()
    try:
        yield drafter, verifier, Forward(small, "float32")
    finally:
        await drafter.stop()
        await verifier.stop()


async def answers(verifier: VerifierEngine, temperature: float, count: int = 3) -> list[TracedAnswer]:
    prompts = [[(7 * index + step * step) % 96 for step in range(20)] for index in range(count)]
    return [
        await write_answer(verifier, KINDS[index % 3], f"p{index}", prompt, temperature, 40 + index, TOKENS)
        for index, prompt in enumerate(prompts)
    ]


def flat_costs() -> ReplayCosts:
    """A step takes 20 ms and 0.4 ms per row, a draft 2 ms per level and 0.01 ms per row."""
    step = {rows: 20_000.0 + 400 * rows for rows in (1, *range(8, 65, 8))}
    shapes = {shape: 2000.0 * shape.depth + 10 * shape.rows for shape in (*fixed_arms(ARMS), *grown_arms(ARMS))}
    levels = {shape: 2000.0 * shape.depth + 10 * shape.rows for pair in level_shapes().values() for shape in pair}
    return ReplayCosts(step, {shape: us for shape, us in (shapes | levels).items() if not shape.off})


def test_replayed_proposals_follow_a_repetitive_text_and_cost_a_step_of_their_rows():
    """A text of period 6 repeats; one without repetition is plain decoding. Neither asks a drafter."""
    few, many = ProposedShape(3), ProposedShape(7)
    for ids, emitted in ((tuple(index % 6 for index in range(60)), 1), (tuple(range(60)), 0)):
        trace = Trace(TracedAnswer("code", "p", 0.0, 0, ids, 24, 20), None)
        record_proposals(trace, [few, many])
        for shape in (few, many):
            rows = 1 + emitted * shape.total
            assert {trace.emitted(shape, base) for base in range(24, 44)} == {rows}
            assert {trace.rows(shape, base) for base in range(24, 44)} == {rows}
            run = run_fixed(shape, trace, flat_costs())
            assert {played.took_us for played in run.rounds} == {flat_costs().step_us(rows)}


# Prompts


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_each_kind_are_held_out_of_the_right_length_and_always_the_same(kind):
    prompts = kind_prompts(kind, 8, 128)
    assert prompts == kind_prompts(kind, 8, 128)
    assert [len(prompt.token_ids) for prompt in prompts] == [128] * 8
    assert len({prompt.token_ids for prompt in prompts}) == 8
    modules = {prompt.name.rpartition(":")[0] for prompt in prompts}
    assert modules <= set(HELD_OUT)


def test_prose_ends_inside_a_docstring_and_edits_repeat_a_block_under_other_names():
    texts = {passage.name: passage.text for passage in load_passages()}
    for prompt in kind_prompts(PROSE, 8, 128):
        prose = prompt.text.removeprefix('"""')
        assert prose != prompt.text and '"""' not in prose
        assert prose.strip() in texts[prompt.name], "unchanged from the passage"
    tokenizer = load_tokenizer()
    for prompt in kind_prompts(EDITS, 8, 128):
        name = texts[prompt.name].split("(")[0].split(":")[0].split()[1]
        copies = [f"{name}_{letter}" for letter in "abc"]
        assert all(copy in prompt.text for copy in copies)
        blocks = prompt.text.replace("_a", "").replace("_b", "").replace("_c", "")
        first = texts[prompt.name].splitlines()[0]
        assert blocks.count(first) >= 3, "nothing but the name differs"
        assert len(tokenizer.encode(prompt.text.split(copies[1])[0]).ids) <= BLOCK_TOKENS + 10


def test_more_prompts_than_there_are_and_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="prompts of prose"):
        kind_prompts(PROSE, 50, 128)
    with pytest.raises(ValueError, match="is not one of code, prose, edits"):
        kind_prompts("poetry", 1, 128)


# Traces


@pytest.mark.parametrize("temperature", few_of([0.0, 1.0], 1.0))
async def test_replayed_rounds_emit_the_same_as_rounds_with_the_verifier(temperature, tmp_path):
    """Static shapes by ranks alone, the others by the trees grown at every position."""
    shapes: list[TreeShape] = [OFF, CHAIN, TREE, NodeShape((3, 1, 0, 0, 2)), BeamShape(3, 2), DynamicShape(3, 3, 8)]
    async with engines(tmp_path) as (drafter, verifier, forward):
        traces = [Trace(answer, guesses_of(forward, answer)) for answer in await answers(verifier, temperature)]
        await grow_trees(drafter, traces, shapes[4:], lambda: None)
        grown = sum(len(trace.trees[shape]) for trace in traces for shape in shapes[4:])
        assert grown == 2 * len(traces) * TOKENS
        emitted = []
        for trace in traces:
            for shape in shapes[:4]:
                live, _ = await live_rounds(drafter, verifier, shape, trace.answer)
                assert live == [count for _, count in trace.rounds(shape)], shape
                emitted += live
            for shape in shapes[4:]:
                for offset, tree in enumerate(trace.trees[shape]):
                    base = trace.answer.begin + offset
                    peer = EngineText(trace.answer.ids[:base], trace.answer.sampling)
                    await peer.open(verifier, 2 * SPARE)
                    verdict = await peer.verify(verifier, tree, base)
                    await peer.close(verifier)
                    assert (verdict.length, verdict.path) == (trace.emitted(shape, base), trace.path(shape, base))
        assert {1, 2, 4} <= set(emitted), "guesses are accepted and rejected"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_ranks_of_static_shapes_give_the_same_rounds_as_grown_trees(temperature, tmp_path):
    shapes: list[TreeShape] = [CHAIN, TREE, NodeShape((3, 1, 0, 0, 2))]
    async with engines(tmp_path) as (drafter, verifier, forward):
        traces = [Trace(answer, guesses_of(forward, answer)) for answer in await answers(verifier, temperature)]
        await grow_trees(drafter, traces, shapes, lambda: None)
    for trace, shape in itertools.product(traces, shapes):
        assert disagreements(trace, shape) == 0
        assert (
            trace.trees[shape][0].parents.tolist()
            == Trace(trace.answer, trace.guesses).tree(shape, 20).parents.tolist()
        )


async def test_a_trimmed_dynamic_tree_equals_the_smaller_one(tmp_path):
    async with engines(tmp_path) as (drafter, verifier, forward):
        (answer,) = await answers(verifier, 0.0, 1)
        peer = EngineText(answer.ids[: answer.begin], answer.sampling)
        await peer.open(drafter, 4)
        for k, depth in ((4, 5), (8, 8), (16, 15)):
            master = await peer.draft(drafter, DynamicShape(k, depth, 63), answer.begin)
            for rows in (depth + 1, *SIZES):
                grown = await peer.draft(drafter, DynamicShape(k, depth, rows - 1), answer.begin)
                cut = trimmed(master, rows)
                assert cut.tokens.tolist() == grown.tokens.tolist()
                assert cut.parents.tolist() == grown.parents.tolist()


def test_a_path_ends_at_a_row_without_a_child_of_the_token():
    tree = DraftTree.of([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3])
    assert walk(tree, [2, 3, 4, 5]) == (0, 2, 3, 4)
    assert walk(tree, [1, 3]) == (0, 1)
    assert walk(tree, [3]) == (0,)


def test_ranks_determine_the_path_through_a_static_tree():
    shape = NodeShape((2, 0, 2, 1))
    assert child_counts(shape) == (2, 0, 2, 1, 0, 0)
    assert static_path(shape, [1, 0, 0, 0]) == (0, 2, 3, 5)
    assert static_path(shape, [1, 1, 0]) == (0, 2, 4)
    assert static_path(shape, [0, 0]) == (0, 1)
    assert static_path(OFF, [0, 0]) == (0,)
    with pytest.raises(ValueError, match="is not static"):
        child_counts(BeamShape(2, 2))


def made_trace(ranks: list[int], kind: str = "code", tokens: int | None = None) -> Trace:
    """A trace with these ranks; everything else is a placeholder."""
    count = tokens or len(ranks) - SPARE
    answer = TracedAnswer(kind, "made", 0.0, 0, tuple(range(4 + len(ranks))), 4, count)
    scores = np.tile(-np.arange(16, dtype=np.float32), (len(ranks), 1))
    candidates = np.tile(np.arange(16), (len(ranks), 1))
    return Trace(answer, Guesses(candidates, scores, scores, np.array(ranks), np.zeros(len(ranks), np.float32)))


def test_a_shape_whose_trees_were_not_recorded_is_refused():
    with pytest.raises(ValueError, match="no trees of dynamic"):
        made_trace([0] * 20).emitted(DynamicShape(3, 3, 8), 4)


def test_a_round_begins_after_the_tokens_of_the_one_before():
    trace = made_trace([0, 1, 0, 0, 9, 0, 0, 0] + [9] * SPARE)
    assert list(trace.rounds(CHAIN)) == [(4, 2), (6, 3), (9, 4)]
    assert list(trace.rounds(LevelShape((2, 2)))) == [(4, 3), (7, 2), (9, 3)]


# Costs


def test_steps_cost_as_the_next_measured_size_and_levels_are_interpolated():
    costs = flat_costs()
    assert costs.step_us(1) == 20_400 and costs.step_us(2) == costs.step_us(8) == 23_200 and costs.step_us(16) == 26_400
    assert costs.round_us(OFF) == 20_400
    assert costs.round_us(TREE) == costs.draft[TREE] + 26_400
    assert costs.level_us(4) == 2000 + 40 and costs.level_us(3) == 2000 + 30, "linear between measured numbers"
    unmeasured = LevelShape((2, 2, 2))
    assert costs.draft_us(unmeasured) == pytest.approx(costs.draft[LevelShape((1,))] + 2020 + 2040)
    with pytest.raises(ValueError, match="was not measured"):
        costs.draft_us(DynamicShape(2, 2, 4))


async def test_costs_are_measured_of_every_row_count_and_shape(tmp_path):
    async with engines(tmp_path) as (drafter, verifier, _):
        steps, ids = [], list(range(20))
        step = await measure_steps(verifier, ids, 1.0, 1, lambda: steps.append(1))
        draft = await measure_drafts(drafter, ids, 1.0, [OFF, TREE, MASTERS[0]], 1, lambda: steps.append(1))
        assert verifier.stats()["sessions"] == drafter.sessions == 0
    assert set(step) == set(STEP_ROWS) and OFF not in draft and {TREE, MASTERS[0]} <= set(draft)
    assert len(steps) == 4 and min(*step.values(), *draft.values()) > 0


# Policies


class Charged:
    """Drafter and verifier of the loop, at engines of this process, with the table's costs instead of real time."""

    def __init__(
        self, drafter: DrafterEngine, verifier: VerifierEngine, answer: TracedAnswer, costs: ReplayCosts
    ) -> None:
        self.peer = EngineText(answer.ids[: answer.begin], answer.sampling)
        self.drafter, self.verifier, self.costs = drafter, verifier, costs
        self.drafter_length = self.verifier_length = answer.begin

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        shape = arm.shape
        self.peer.text.extend(text.ids[len(self.peer.text) :])
        if shape.off:
            return DraftTree.root_only(text.root)
        tree = await self.peer.draft(self.drafter, shape, self.drafter_length)
        self.drafter_length = len(text)
        return replace(tree, draft_us=round(self.costs.draft_us(shape)), texts=1)

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        verdict = await self.peer.verify(self.verifier, tree, self.verifier_length)
        self.verifier_length = len(text)
        us = round(self.costs.step_us(tree.rows))
        return replace(verdict, verify_us=us, queue_us=0, texts=1, step_rows=tree.rows)


class ObservedPolicy:
    """A policy, and the updates that the router makes after a round."""

    def __init__(self, policy, experience: Experience, running, costs: ReplayCosts) -> None:
        self.policy, self.experience, self.running, self.costs = policy, experience, running, costs
        self.played: list[tuple[TreeShape, int]] = []
        self.trees: list[DraftTree] = []

    def choose(self) -> Arm:
        return self.policy.choose()

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        self.trees.append(replace(tree, trace=EMPTY_TRACE, draft_us=0))
        self.policy.learn(arm, tree, verdict)
        self.running.begun()
        if self.played:
            self.experience.learn_time(arm, tree, verdict, self.costs.round_us(arm.shape))
        self.played.append((arm.shape, verdict.length))


def test_a_replayed_draft_has_the_cost_of_one_text_though_several_were_recorded_together():
    trace, beam, experience = made_trace([9] * 40), BeamShape(5, 3), Experience()
    trace.trees[beam] = [replace(DraftTree.of(range(3), (-1, 0, 1)), texts=8)] * trace.answer.tokens
    costs = flat_costs()
    run_policy(make_policy("conservative_ucb", [arm_of(beam)], experience), experience, trace, costs)
    assert experience.costs.draft[arm_of(beam)].us == costs.draft_us(beam)


class LiveTrace(Trace):
    """A trace with the live trees of its rounds, in order."""

    def __init__(self, answer: TracedAnswer, guesses: Guesses, trees: Sequence[DraftTree]) -> None:
        super().__init__(answer, guesses)
        self.live = iter(trees)

    def tree(self, shape: TreeShape, base: int) -> DraftTree:
        return next(self.live)


@pytest.mark.parametrize("name", POLICIES)
async def test_a_replayed_policy_makes_the_same_choices_as_live(name, tmp_path):
    """With the real loop, drafter and verifier, and the table's times. One experience over all answers."""
    costs, arms = flat_costs(), [arm_of(shape) for shape in ARMS[:3]]
    async with engines(tmp_path) as (drafter, verifier, forward):
        written = [answer for temperature in (0.0, 1.0) for answer in await answers(verifier, temperature)]
        replayed_with, live_with = Experience(), Experience()
        chosen = set()
        for answer in written:
            limits = Limits(len(answer.ids) + 2 * SPARE, ignore_end=True)
            text = Text(list(answer.ids[: answer.begin]), answer.sampling, limits)
            peers = Charged(drafter, verifier, answer, costs)
            await peers.peer.open(verifier, 3 * SPARE + TOKENS)
            await peers.peer.open(drafter, 3 * SPARE + TOKENS)
            with live_with.concurrency.running() as running:
                observed = ObservedPolicy(make_policy(name, arms, live_with), live_with, running, costs)
                async for _ in rounds(text, peers, peers, observed):
                    if len(text) >= answer.end:
                        break
            await peers.peer.close(verifier)
            await peers.peer.close(drafter, peers.drafter_length)
            # Values of trees depend on the drafter's calibration at the time, so the live trees are replayed.
            trace = LiveTrace(answer, guesses_of(forward, answer), observed.trees)
            policy = make_policy(name, arms, replayed_with)
            run = run_policy(policy, replayed_with, trace, costs)
            assert observed.played == [(played.shape, played.emitted) for played in run.rounds]
            chosen |= {shape for shape, _ in observed.played}
    assert len(chosen) > 1, "more than one arm was chosen"


def test_a_stream_learns_from_one_answer_to_the_next():
    """A chain that is always accepted: after the first pass, every round drafts it."""
    traces = [made_trace([0] * (30 + SPARE)) for _ in range(4)]
    first, second = run_stream("conservative_ucb", ARMS[:3], traces, flat_costs(), 2)
    assert CHAIN in {played.shape for run in first for played in run.rounds}
    assert {played.shape for run in second for played in run.rounds} == {CHAIN}
    fixed = run_fixed(CHAIN, traces[0], flat_costs())
    assert second[0].tokens_per_second == pytest.approx(fixed.tokens_per_second)
    assert fixed.tokens_per_second == pytest.approx(4e6 / flat_costs().round_us(CHAIN))


# Trees


def test_all_level_shapes_whose_widths_never_increase_are_found():
    found = {shape.widths for shape in level_shapes_up_to(6, deepest=3)}
    assert found == {(1,), (2,), (3,), (4,), (5,), (1, 1), (2, 1), (1, 1, 1)}


def every_tree(rows: int, depth: int, children: int):
    """Every set of `rows` paths that contains each path's parent and previous siblings."""
    grown = {frozenset([()])}
    for _ in range(rows - 1):
        grown = {
            tree | {(*path, rank)}
            for tree in grown
            for path in tree
            if len(path) < depth
            for rank in range(children)
            if (*path, rank) not in tree and all((*path, elder) in tree for elder in range(rank))
        }
    return grown


@pytest.mark.parametrize("rows", [2, 4, 6, 8])
def test_no_static_tree_of_as_many_rows_emits_more_than_the_likeliest(rows):
    accept = np.array([[0.4, 0.35, 0.2], [0.5, 0.1, 0.05], [0.4, 0.35, 0.2]])

    def worth(path):
        return np.prod([accept[depth, rank] for depth, rank in enumerate(path)])

    best = max(sum(worth(path) for path in tree) for tree in every_tree(rows, 3, 3))
    shape = likeliest_tree(accept, rows)
    assert shape.rows == rows
    paths: list[tuple[int, ...]] = [()]
    for row, count in enumerate(child_counts(shape)):
        paths += [(*paths[row], rank) for rank in range(count)]
    assert sum(map(worth, paths)) == pytest.approx(best)


def test_acceptance_is_counted_along_the_path_of_candidates():
    table = acceptance([made_trace([0, 1, 9] + [9] * SPARE, tokens=2)], depths=3, children=4)
    assert table[0].tolist() == [0.5, 0.5, 0, 0], "from two positions"
    assert table[1].tolist() == [0, 0.5, 0, 0], "the path went on at one; at the other the next rank was no candidate"
    assert table[2].tolist() == [0, 0, 0, 0]


def test_the_best_static_tree_is_the_best_of_level_shapes_and_the_likeliest():
    traces = [made_trace([1, 0, 0, 3, 0, 2, 0, 1] * 5 + [9] * SPARE)]
    best = emitted_per_round(lengths(best_static(traces, 8), traces))
    others = [*level_shapes_up_to(8), *(likeliest_tree(acceptance(traces, *most), 8) for most in LIKELIEST)]
    assert best == max(emitted_per_round(lengths(shape, traces)) for shape in others)


def test_reliability_weights_distances_by_counts():
    found = reliability(np.array([0.05, 0.05, 0.95, 1.0]), np.array([False, True, True, True]))
    assert [(each["from"], each["accepted"], each["guesses"]) for each in found["bins"]] == [
        (0.0, 0.5, 2),
        (0.9, 1.0, 2),
    ]
    assert found["expected_error"] == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)


# Longer texts


def test_key_bytes_count_all_layers():
    llama = DEMO_MODELS / "llama"
    config = json.loads((llama / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    assert key_bytes(llama) == 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * width


# The whole


@pytest.fixture
async def recorded(tmp_path):
    """A complete record of a tiny pair, with made-up costs."""
    traces = {}
    async with engines(tmp_path) as (drafter, verifier, forward):
        for temperature in (0.0, 1.0):
            mine = [Trace(answer, guesses_of(forward, answer)) for answer in await answers(verifier, temperature)]
            await grow_trees(drafter, mine, grown_arms(ARMS), lambda: None)
            for trace in mine:
                cut_trees(trace)
            traces["tiny", temperature] = mine
            traces["slow", temperature] = [Trace(trace.answer, trace.guesses) for trace in mine]
            traces["unserved", temperature] = [Trace(trace.answer, trace.guesses) for trace in mine]
    costs = {("tiny", temperature): flat_costs() for temperature in (0.0, 1.0)}
    slow = ReplayCosts(flat_costs().step, {shape: 9 * us for shape, us in flat_costs().draft.items()})
    costs |= {("slow", temperature): slow for temperature in (0.0, 1.0)}
    return TreesRecord(traces, costs, "tiny", ARMS)


def test_rounds_are_classified_by_their_end():
    """The root's two best guesses and the best one's best, with two candidates per row and two levels."""
    shape = DynamicShape(2, 2, 3)
    trace = made_trace([0, 0, 9, 1, 0, 9, 0, 1, 9, 9] + [9] * SPARE)
    parents = [-1, 0, 0, 1]
    trees = []
    for offset in range(trace.answer.tokens):
        true, ranks = trace.answer.ids[trace.answer.begin + offset :], trace.guesses.ranks[offset:].tolist()
        first = [true[0] if ranks[0] == rank else 1000 + rank for rank in (0, 1)]
        below = true[1] if ranks[0] == ranks[1] == 0 else 2000
        trees.append(DraftTree.of([0, *first, below], parents))
    trace.trees[shape] = trees
    found = causes_of(shape, LevelShape((1, 1)), [trace])
    assert [count for _, count in trace.rounds(shape)] == [3, 2, 1, 2, 1, 1]
    # Ranks 0 0 | 1, then 0: left out | no candidate | 0, then 1: left out | no candidate | no candidate
    assert (found.rounds, found.depth_reached, found.left_out, found.past_candidates) == (6, 1, 2, 3)
    assert found.lost_left_out == 2 and found.ended_at == {2: 1, 1: 2, 0: 3}
    assert (found.positions, found.dynamic_more, found.static_more) == (10, 2, 0), "the chain has no second child"


async def test_the_counts_of_how_rounds_end_add_up(recorded):
    for temperature, rows in itertools.product((0.0, 1.0), SIZES):
        for dynamic in dynamic_shapes(rows):
            traces = recorded.traces["tiny", temperature]
            causes = causes_of(dynamic, TREE, traces)
            assert causes.rounds == causes.depth_reached + causes.past_candidates + causes.left_out
            assert causes.rounds == sum(causes.ended_at.values()) == sum(map(len, lengths(dynamic, traces)))
            assert causes.positions == causes.static_too + causes.static_more + causes.dynamic_more == 3 * TOKENS
            assert causes.lost_left_out >= causes.left_out


async def small_contexts(folder: Path) -> list[dict[str, Any]]:
    """Longer texts at a tiny pair; a page counts as 1 byte."""
    models = folder / "contexts"
    models.mkdir()
    async with engines(models) as (drafter, verifier, _):
        ids = [step % 96 for step in range(100)]
        rows = await context_rows(drafter, verifier, ids, (20, 100), (OFF, TREE), 1, lambda: None)
        assert drafter.sessions == verifier.stats()["sessions"] == 0
    return rows


async def test_a_longer_text_takes_more_verifier_memory_and_no_more_drafter_memory(tmp_path):
    rows = {(row["context"], row["arm"]): row for row in await small_contexts(tmp_path)}
    assert rows[100, "(3,2,1)"]["verifier_peak_bytes"] > rows[20, "(3,2,1)"]["verifier_peak_bytes"]
    for context in (20, 100):
        opened, node = rows[context, "off"]["drafter_peak_bytes"], 2 * 4 * (96 + 64 + 16 + 4)
        assert opened == 2 * 4 * (4 * 16 * 8 + 3 * 96), "the text as opened: all layers' states and convolutions"
        grown = rows[context, "(3,2,1)"]["drafter_peak_bytes"]
        assert grown == 2 * opened + 10 * node, "a second text, and the inputs of the tree's rows with children"
    assert rows[20, "off"]["emitted_per_round"] == rows[20, "off"]["over_off"] == 1.0


async def test_the_report_has_every_table_and_every_aim(recorded, tmp_path):
    live = {
        "temperature": 0.0,
        "arm": "(3,2,1)",
        "rounds": 3,
        "differences": 0,
        "tokens_per_second": 1.0,
        "predicted_tokens_per_second": 1.1,
    }
    context = [each | {"transformer_drafter_bytes": 100} for each in await small_contexts(tmp_path)]
    plan = {
        "target": "costly",
        "parameters": 1,
        "dtype": "bfloat16",
        "drafter": "tiny",
        "drafter_dtype": "float32",
        "kinds": list(KINDS),
        "prompts": 1,
        "prompt_tokens": 20,
        "tokens": TOKENS,
        "places": 72,
        "checked_shapes": ["(3,3,2,1)"],
        "disagreements": 0,
        "repetitions": 1,
    }
    machine = {"libraries": {}, "environment": {}, "processor": "p", "cores": 2, "accelerator": None}
    report = {
        "bench": "trees",
        "machine": machine | {"threads": 2, "python": "3"},
        "settings": {"command": "c", "local": True, "date": "d", "commit": "c", "seconds": 1.0, "seed": 0},
        "plan": plan,
        "live": [live],
        "context": context,
    } | analyse(recorded, lambda title, steps: lambda: None)
    tables = list(tables_of(report))
    titles = "\n".join(title for title, _, _ in tables)
    for part in (
        "Table 4",
        "Table 5",
        "Table 6",
        "Every arm: edits, temperature 1",
        "Policies on the configured arms, temperature 0",
        "EAGLE-2's ablation",
        "rounds of dynamic trees end",
        "Figure 6",
        "Costs in ms",
        "In real time",
        "Longer texts (as Table 2)",
        "Aims",
    ):
        assert part in titles
    for title, columns, rows in tables:
        assert rows and all(len(cells) == len(columns) for cells in rows), title
    mine = {
        (row["kind"], row["arm"]): f"{row['tokens_per_second']['median']:.1f}"
        for row in report["rows"]
        if (row["drafter"], row["temperature"]) == ("tiny", 0.0)
    }
    search = next(rows for title, _, rows in tables if "temperature 0 (as Table 6)" in title)
    assert search[1] == ("off, (3,3,2,1)", *(mine[kind, "(3,3,2,1)"] for kind in (*KINDS, "all"))), (
        "of the main drafter"
    )
    for row in report["policies"]:
        if row["temperature"] == 0.0:
            at = f"{row['best_arm_tokens_per_second']['median']:.1f}"
            assert at == mine[row["kind"], row["best_arm"]], "arms and policies are reported in the same measure"
    assert "unserved" in {row["drafter"] for row in report["rows"]}
    assert {row["policy"] for row in report["policies"]} == set(POLICIES)
    assert {row["rows"] for row in cost_rows(recorded)} >= {1, 31, 64}
    assert len(report["aims"]) == 2 * (len(SIZES) + 2 * len(KINDS))
    dynamic = [aim for aim in report["aims"] if aim["aim"].startswith("dynamic")]
    assert all(aim["met"] is (aim["value"] >= DYNAMIC_BAR) for aim in dynamic)
    assert all("of positions the static tree" in aim["why"] for aim in dynamic if not aim["met"])
    text = as_markdown(report, facts_of(report), tables)
    assert "72 positions by tiny" in text
    plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_drafters_that_are_not_beside_the_target_are_refused():
    with pytest.raises(BadRequest, match="drafters"):
        bench_trees(drafters="none")
    with pytest.raises(BadRequest, match="drafters"):
        parse_drafters("mamba2,,llama")
    assert TreesSettings(1, 1, 1, (0.0,), 0, DEMO_MODELS, ("mamba2",), False, ()).drafters == ("mamba2",)
