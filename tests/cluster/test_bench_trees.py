"""`dendro bench trees`: replays equal drafter and verifier, and the report is computed correctly."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dendro.errors import BadRequest
from dendro.shapes import (
    OFF,
    BeamShape,
    DynamicShape,
    LevelShape,
    NodeShape,
    TreeShape,
    child_counts,
)
from dendro.state import NoStates
from dendro.text import Limits, Text, Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.bench.replay import STEP_ROWS, ReplayCosts, costed, level_shapes
from cluster.bench.traces import (
    SPARE,
    Trace,
    TracedAnswer,
    grown_trees,
    trimmed,
    walk,
    write_answer,
)
from cluster.bench.trees import (
    MASTERS,
    RANKS,
    SIZES,
    TREES,
    TreesOptions,
    TreesRecord,
    ablation_rows,
    acceptance,
    arm_rows,
    best_static,
    cost_rows,
    cut_trees,
    emitted_per_round,
    fixed_arms,
    grown_arms,
    lengths,
)
from cluster.config import DrafterConfig
from cluster.demo.corpus import HELD_OUT
from cluster.demo.kinds import BLOCK_TOKENS, EDITS, KINDS, PROSE, kind_prompts
from cluster.demo.prompts import load_passages, load_tokenizer
from cluster.measure.bench import draw
from cluster.measure.engine_times import measure_drafts, measure_steps
from cluster.measure.in_process import EngineText
from cluster.policies import Static
from cluster.policies.replay import static_path
from cluster.router.rounds import Policy, rounds
from cluster.tune.measuring import Ranker
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support import tiny_mamba
from tests.support.cases import few_of
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
async def engines(folder: Path) -> AsyncIterator[tuple[DrafterEngine, VerifierEngine, Ranker]]:
    target, small = tiny_pair(folder)
    drafter = DrafterEngine.load(small, DrafterOptions(name="d", max_sessions=8), states=NoStates())
    await drafter.start()
    verifier = VerifierEngine.load(
        target, VerifierOptions(name="v", dtype=torch.float32, max_length=256, max_sessions=4)
    )
    await verifier.start()
    try:
        yield drafter, verifier, Ranker(DrafterConfig(checkpoint=small, dtype="float32"), "cpu", RANKS)
    finally:
        await drafter.stop()
        await verifier.stop()


async def answers(verifier: VerifierEngine, temperature: float, count: int = 3) -> list[TracedAnswer]:
    prompts = [[(7 * index + step * step) % 96 for step in range(20)] for index in range(count)]
    return [
        await write_answer(verifier, KINDS[index % 3], f"p{index}", prompt, temperature, 40 + index, TOKENS)
        for index, prompt in enumerate(prompts)
    ]


def traced(ranker: Ranker, answer: TracedAnswer) -> Trace:
    return Trace(answer, ranker.ranks(*answer.parts, answer.sampling))


async def grow(drafter: DrafterEngine, traces: Sequence[Trace], shapes: Sequence[TreeShape]) -> None:
    grown = await grown_trees(drafter, [trace.answer for trace in traces], shapes, lambda: None)
    for trace, trees in zip(traces, grown, strict=True):
        trace.trees |= trees


def flat_costs() -> ReplayCosts:
    """A step takes 20 ms and 0.4 ms per row, a draft 2 ms per level and 0.01 ms per row."""
    step = {rows: 20_000.0 + 400 * rows for rows in (1, *range(8, 65, 8))}
    shapes = {shape: 2000.0 * shape.depth + 10 * shape.rows for shape in (*fixed_arms(ARMS), *grown_arms(ARMS))}
    levels = {shape: 2000.0 * shape.depth + 10 * shape.rows for pair in level_shapes().values() for shape in pair}
    return ReplayCosts(step, {shape: us for shape, us in (shapes | levels).items() if not shape.off})


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
    async with engines(tmp_path) as (drafter, verifier, ranker):
        traces = [traced(ranker, answer) for answer in await answers(verifier, temperature)]
        await grow(drafter, traces, shapes[4:])
        grown = sum(len(trace.trees[shape]) for trace in traces for shape in shapes[4:])
        assert grown == 2 * len(traces) * TOKENS
        emitted = []
        for trace in traces:
            for shape in shapes[:4]:
                played = await rounds_of(
                    Charged(drafter, verifier, trace.answer, flat_costs()), Static(Arm.of("drafter", shape))
                )
                assert played == [count for _, count in trace.rounds(shape)], shape
                emitted += played
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
    async with engines(tmp_path) as (drafter, verifier, ranker):
        traces = [traced(ranker, answer) for answer in await answers(verifier, temperature)]
        await grow(drafter, traces, shapes)
    for trace, shape in itertools.product(traces, shapes):
        for base, tree in enumerate(trace.trees[shape], trace.answer.begin):
            assert walk(tree, trace.answer.ids[base:]) == Trace(trace.answer, trace.ranks).path(shape, base)
        assert trace.trees[shape][0].rows == Trace(trace.answer, trace.ranks).rows(shape, 20)


async def test_a_trimmed_dynamic_tree_equals_the_smaller_one(tmp_path):
    async with engines(tmp_path) as (drafter, verifier, ranker):
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
    return Trace(answer, ranks)


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
        step = await measure_steps(verifier, ids, 1.0, STEP_ROWS, 1, lambda: steps.append(1))
        shapes = costed([OFF, TREE, MASTERS[0]])
        draft = await measure_drafts(drafter, ids, 1.0, shapes, 1, lambda: steps.append(1))
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
        self.answer, self.drafter, self.verifier, self.costs = answer, drafter, verifier, costs
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


async def rounds_of(peers: Charged, policy: Policy) -> list[int]:
    """N of every round of an answer by the real loop with this policy."""
    answer, emitted = peers.answer, list[int]()
    text = Text(list(answer.ids[: answer.begin]), answer.sampling, Limits(len(answer.ids) + 2 * SPARE, ignore_end=True))
    await peers.peer.open(peers.verifier, 3 * SPARE + TOKENS)
    await peers.peer.open(peers.drafter, 3 * SPARE + TOKENS)
    async for verdict in rounds(text, peers, peers, policy):
        emitted.append(verdict.length)
        if len(text) >= answer.end:
            break
    await peers.peer.close(peers.verifier)
    await peers.peer.close(peers.drafter, peers.drafter_length)
    return emitted


# Trees


def test_acceptance_is_counted_along_the_path_of_candidates():
    table = acceptance([made_trace([0, 1, 9] + [9] * SPARE, tokens=2)], depths=3, children=4)
    assert table[0].tolist() == [0.5, 0.5, 0, 0], "from two positions"
    assert table[1].tolist() == [0, 0.5, 0, 0], "the path went on at one; at the other the next rank was no candidate"
    assert table[2].tolist() == [0, 0, 0, 0]


def test_the_best_static_tree_emits_as_much_as_any_chain_of_its_rows():
    traces = [made_trace([1, 0, 0, 3, 0, 2, 0, 1] * 5 + [9] * SPARE)]
    found = best_static(traces, 8)
    best = emitted_per_round(lengths(found, traces))
    assert found.rows <= 8 and best >= emitted_per_round(lengths(LevelShape((1,) * 7), traces))


# The whole


@pytest.fixture
async def recorded(tmp_path):
    """A complete record of a tiny pair, with made-up costs."""
    traces = {}
    async with engines(tmp_path) as (drafter, verifier, ranker):
        for temperature in (0.0, 1.0):
            mine = [traced(ranker, answer) for answer in await answers(verifier, temperature)]
            await grow(drafter, mine, grown_arms(ARMS))
            for trace in mine:
                cut_trees(trace)
            traces["tiny", temperature] = mine
            traces["slow", temperature] = [Trace(trace.answer, trace.ranks) for trace in mine]
    costs = {("tiny", temperature): flat_costs() for temperature in (0.0, 1.0)}
    slow = ReplayCosts(flat_costs().step, {shape: 9 * us for shape, us in flat_costs().draft.items()})
    costs |= {("slow", temperature): slow for temperature in (0.0, 1.0)}
    return TreesRecord(traces, costs, "tiny", ARMS)


async def test_the_report_has_every_table_and_every_aim(recorded, tmp_path):
    report = {
        "rows": list(arm_rows(recorded)),
        "ablation": list(ablation_rows(recorded)),
        "costs": list(cost_rows(recorded)),
    }
    report["aims"] = [row for aim in TREES.aims for row in aim.judged(report)]
    titles = [title for title, _, _ in TREES.all_tables(report)]
    assert len(titles) == 2 * 2 * 4 + 2 * len(SIZES) + 2 + 1
    assert {rows for row in report["costs"] for rows in row["ms"]} >= {"1", "31", "64"}
    assert len(report["aims"]) == 2 * len(SIZES)
    draw(TREES.plots, report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_drafters_that_are_not_beside_the_target_are_refused():
    for names in ("none", "mamba2,,llama", "mamba2,mamba2"):
        with pytest.raises(BadRequest, match="drafters"):
            TreesOptions(drafters=tuple(names.split(",")))
