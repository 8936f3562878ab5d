"""Policies on a text whose tokens' ranks are known, against slow references that follow the equations."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from dendro.shapes import OFF, BeamShape, LevelShape, NodeShape, TreeShape, child_counts
from dendro.text import Limits, Sampling, Text, Verdict
from dendro.tree import LONGEST_TRACE, RANKED, DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies import ConservativeUCB, Experience, Static
from cluster.policies.costs import EmittedLength
from cluster.policies.experience import Concurrency
from cluster.policies.prior import Prior
from cluster.policies.replay import WINDOW, RankTrace, Replay, replayed, static_path
from cluster.policies.trial import SpeculationTrial
from cluster.router.rounds import Policy, rounds
from drafter_service.options import DrafterOptions

PAIR, CHAIN, BUSHY = LevelShape((1, 1)), LevelShape((1, 1, 1, 1)), LevelShape((3, 2, 2, 1, 1))
SHAPES: tuple[TreeShape, ...] = (
    PAIR,
    CHAIN,
    BUSHY,
    LevelShape((4, 2, 1)),
    LevelShape((8,)),
    NodeShape((3, 2, 1, 0, 1)),
    NodeShape((1, 2, 0, 2, 1)),
)
DRAFTER = "toy"
ARMS = (OFF_ARM, *(Arm(DRAFTER, shape) for shape in SHAPES))
CHAIN_ARM, PAIR_ARM, BUSHY_ARM = (Arm(DRAFTER, shape) for shape in (CHAIN, PAIR, BUSHY))
LENGTH = 400


def ranks_of(kind: str, count: int = LENGTH) -> list[int]:
    """Ranks of a text: `mixed`, `prose` with alternating easy and hard parts, or all `right` or `wrong`."""
    rng = random.Random(kind)
    hard = [1, 0, 8, 8, 3, 8, 5]
    easy = [0, 0, 0, 0, 0, 1, 0, 2]
    match kind:
        case "right":
            return [0] * count
        case "wrong":
            return [RANKED] * count
        case "prose":
            return [rng.choice(hard if place // 20 % 2 else easy) for place in range(count)]
    return [rng.choice([0, 0, 0, 0, 1, 1, 2, 3, 7, 8]) for _ in range(count)]


# -- a toy drafter and a toy verifier of a text whose ranks are known --------------------------------------------------


class Toy:
    """The text is 1000, 1001, ...; its token at position p has the rank ranks[p] among the drafter's candidates."""

    def __init__(self, ranks: Sequence[int], promises: bool = False) -> None:
        """promises: trees have random values, unrelated to what is accepted"""
        self.ranks = ranks
        self.rng = random.Random(1) if promises else None
        self.text = Text([999], Sampling(), Limits(len(ranks)))
        self.traced: int | None = None  # length of the text at the last tree
        self.first_traced = self.last_traced = 0  # at the first tree, and at the last with a trace
        self.off = False  # whether no tree comes
        self.requested: list[TreeShape] = []  # shapes
        self.lengths: list[int] = []

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        shape = arm.shape
        self.requested.append(shape)
        if shape.off or self.off:
            return DraftTree.root_only(text.root)
        base = len(text)
        tokens, parents, depths, right = [text.root], [-1], [0], [True]
        for row in range(shape.rows):
            for rank in range(children(shape, row, depths[row])):
                place = base - 1 + depths[row]  # of the toy's ranks: the prompt has one token
                hit = right[row] and place < len(self.ranks) and self.ranks[place] == rank
                tokens.append(1000 + place if hit else 1 + rank)
                parents.append(row)
                depths.append(depths[row] + 1)
                right.append(hit)
        traced, self.traced = self.traced, base
        trace = self.ranks[traced - 1 : base - 1] if traced is not None else []
        values = [0.0] * len(tokens)
        for row in range(1, len(tokens)) if self.rng else ():
            values[row] = values[parents[row]] + math.log(self.rng.uniform(0.05, 1))
        tree = DraftTree.of(tokens, parents, values)
        draft_us = 100 + 300 * shape.depth + 40 * shape.forwarded
        return replace(tree, trace=np.array(trace, np.int32), draft_us=draft_us)

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        row, emitted, ranks = 0, [], []
        while True:
            token = 1000 + len(text) - 1 + len(emitted)
            emitted.append(token)
            below = tree.children(row)
            hits = [rank for rank, child in enumerate(below) if tree.tokens[child] == token]
            if not hits:
                break
            ranks.append(hits[0])
            row = below[hits[0]]
        self.lengths.append(len(emitted))
        rows = -(-tree.rows // 8) * 8
        path = tuple(range(len(emitted)))
        return Verdict(tuple(emitted), path, tuple(ranks), None, len(emitted), 8000 + 50 * rows, step_rows=tree.rows)


def children(shape: TreeShape, row: int, depth: int) -> int:
    if isinstance(shape, LevelShape):
        return shape.widths[depth] if depth < shape.depth else 0
    assert isinstance(shape, NodeShape)
    return shape.children[row] if row < len(shape.children) else 0


async def run(policy: Policy, toy: Toy, count: int) -> None:
    """Run rounds until at least so many tokens are emitted."""
    async for _ in rounds(toy.text, toy, toy, policy):
        if len(toy.text) > count:
            return


# -- references -------------------------------------------------------------------------------------------------------


def emitted(shape: TreeShape, ranks: Sequence[int], start: int) -> int | None:
    """Tokens of a round that starts at `start`; None where the ranks end before the round."""
    row, depth, first, depths = 0, 0, {0: 1}, [0]
    for above in range(shape.rows):  # rows level by level, a row's children side by side
        first[above] = len(depths)
        depths += [depths[above] + 1] * children(shape, above, depths[above])
    while True:
        if start + depth >= len(ranks):
            return None
        rank = ranks[start + depth]
        if rank >= children(shape, row, depth):
            return depth + 1
        row, depth = first[row] + rank, depth + 1


def rerun(shape: TreeShape, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Rounds of this shape alone on these ranks: the index of each one's last token, and its number of tokens."""
    start, found = 0, []
    while (count := emitted(shape, ranks, start)) is not None:
        start += count
        found.append((start - 1, count))
    return found


def mean_of_window(shape: TreeShape, ranks: Sequence[int], window: int = WINDOW) -> float | None:
    counts = [count for last, count in rerun(shape, ranks) if last >= len(ranks) - window]
    return sum(counts) / len(counts) if counts else None


def test_a_level_shapes_round_emits_one_more_than_the_levels_that_its_ranks_pass():
    """Checks the reference by the formula of docs/design/policies.md#rank-replay."""
    ranks = ranks_of("mixed")
    for shape in SHAPES:
        if not isinstance(shape, LevelShape):
            continue
        for start in range(len(ranks) - shape.depth - 1):
            passed = [ranks[start + i] < width for i, width in enumerate(shape.widths)]
            assert emitted(shape, ranks, start) == 1 + (passed + [False]).index(False)


def test_ranks_determine_the_path_through_a_static_tree():
    shape = NodeShape((2, 0, 2, 1))
    assert child_counts(shape) == (2, 0, 2, 1, 0, 0)
    assert static_path(shape, [1, 0, 0, 0]) == (0, 2, 3, 5)
    assert static_path(shape, [1, 1, 0]) == (0, 2, 4)
    assert static_path(shape, [0, 0]) == (0, 1)
    assert static_path(OFF, [0, 0]) == (0,)
    with pytest.raises(ValueError, match="is not static"):
        child_counts(BeamShape(2, 2))


# -- the replay -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixed", "prose", "right", "wrong"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_a_replay_equals_a_run_of_that_shape_through_drafter_and_verifier(shape, kind):
    """The replay uses the trace of another run, which played a chain."""
    ranks = ranks_of(kind)
    alone = Toy(ranks)
    await run(Static(Arm(DRAFTER, shape)), alone, LENGTH - 20)
    other, replay, trace = Toy(ranks), Replay([shape], window=LENGTH), RankTrace()

    class Traced(Static):
        def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
            ranked = trace.learn(DRAFTER, tree, verdict)
            assert ranked.joined
            replay.feed(ranked.ranks)

    await run(Traced(CHAIN_ARM), other, LENGTH - 20)
    lengths, tokens = [], 0
    for length in alone.lengths:
        if tokens + length <= replay.positions:
            lengths.append(length)
            tokens += length
    assert replay.positions > LENGTH // 2
    assert (int(replay.tokens[0]), int(replay.rounds[0])) == (tokens, len(lengths))


@pytest.mark.parametrize("kind", ["mixed", "prose"])
def test_a_window_counts_the_rounds_that_ended_in_it_for_any_split_of_the_ranks(kind):
    ranks, rng = ranks_of(kind), random.Random(1)
    replay, fed = Replay(SHAPES), 0
    while fed < len(ranks):
        count = min(rng.randint(0, LONGEST_TRACE), len(ranks) - fed)
        replay.feed(ranks[fed : fed + count])
        fed += count
        for place, shape in enumerate(SHAPES):
            mean = mean_of_window(shape, ranks[:fed])
            assert int(replay.rounds[place]) == sum(last >= fed - WINDOW for last, _ in rerun(shape, ranks[:fed]))
            assert mean is None or replay.tokens[place] / replay.rounds[place] == pytest.approx(mean)


def test_means_are_over_rounds_and_not_over_positions():
    """Alternately five right and five wrong: a pair's round emits 1.9 tokens by positions, and 10 / 6 by rounds."""
    ranks = ([0] * 5 + [8] * 5) * 30
    replay = Replay([PAIR])
    for start in range(0, len(ranks), 50):
        replay.feed(ranks[start : start + 50])
    counts = [emitted(PAIR, ranks, start) for start in range(10)]
    assert sum(counts) / 10 == 1.9
    assert replay.tokens[0] / replay.rounds[0] == pytest.approx(10 / 6, rel=0.03)


def test_a_round_cut_off_by_a_gap_does_not_count():
    replay = Replay([CHAIN])
    replay.feed([0, 0])
    replay.cut()
    replay.feed([8, 0, 8])
    assert (replay.tokens[0], replay.rounds[0]) == (3, 2)


def verdict(emitted: int) -> Verdict:
    return Verdict((1,) * emitted, tuple(range(emitted)), (0,) * (emitted - 1), None, emitted, 10_000)


def traced(*ranks: int) -> DraftTree:
    return replace(DraftTree.of(range(3), (-1, 0, 1)), trace=np.array(ranks, np.int32))


def test_each_token_is_ranked_once_with_its_depth_in_its_round():
    trace = RankTrace()
    assert trace.learn(DRAFTER, traced(), verdict(2)).ranks == ()
    ranked = trace.learn(DRAFTER, traced(0, 9), verdict(3))
    assert (ranked.ranks, ranked.depths, ranked.joined) == ((0, RANKED), (1, 2), True)
    trace.learn(DRAFTER, DraftTree.root_only(1), verdict(1))  # off: its token is ranked later
    ranked = trace.learn(DRAFTER, traced(0, 0, 1, 2), verdict(1))
    assert (ranked.ranks, ranked.depths, ranked.joined) == ((0, 0, 1, 2), (1, 2, 3, 1), True)


def test_a_trace_that_is_too_short_leaves_a_gap():
    trace = RankTrace()
    trace.learn(DRAFTER, traced(), verdict(4))
    ranked = trace.learn(DRAFTER, traced(1), verdict(2))
    assert (ranked.ranks, ranked.depths, ranked.joined) == ((1,), (4,), False)
    assert trace.learn(DRAFTER, traced(0, 0), verdict(2)).joined


def test_a_trace_longer_than_a_drafter_ranks_is_ignored():
    trace = RankTrace()
    for _ in range(LONGEST_TRACE + 1):
        trace.learn(DRAFTER, DraftTree.root_only(1), verdict(1))
    assert trace.learn(DRAFTER, traced(*[RANKED] * (LONGEST_TRACE + 1)), verdict(1)).ranks == ()
    ranked = trace.learn(DRAFTER, traced(0), verdict(1))
    assert ranked.ranks == (0,) and not ranked.joined


def test_assumptions_of_policies_about_drafters_and_handles_hold():
    assert DrafterOptions(name="d").prefill_chunk == LONGEST_TRACE
    assert not replayed(LevelShape((9,))), "a ninth candidate has no rank of its own"


# -- what a text learns by the ranks of its tokens --------------------------------------------------------------------


async def test_a_text_stops_drafting_while_guesses_are_wrong_and_resumes_when_they_are_right():
    """The guesses of the first 150 tokens are wrong, the others right."""
    ranks = [RANKED] * 150 + [0] * 250
    policy, toy = ConservativeUCB([OFF_ARM, PAIR_ARM, CHAIN_ARM], Experience()), Toy(ranks)
    await run(policy, toy, 380)
    hard = toy.requested[20:140]
    assert Counter(shape.off for shape in hard)[False] <= 5
    later = [shape for shape in toy.requested if not shape.off][-10:]
    assert later == [CHAIN] * 10 and sum(shape.off for shape in toy.requested[150:]) <= 84


async def test_no_probe_is_drafted_while_speculation_does_not_pay():
    experience = Experience(Concurrency(requests=2, expected=2.0))
    experience.concurrency.trials[1] = SpeculationTrial(
        speculating=False, gain=0.5, turns_left=0, settled=False, rounds=0.0, last_round=1e9
    )
    toy = Toy(ranks_of("right"))
    await run(ConservativeUCB([OFF_ARM, PAIR_ARM], experience), toy, 200)
    assert set(toy.requested) == {OFF_ARM.shape}


async def test_off_is_chosen_where_trees_do_not_come():
    toy = Toy(ranks_of("right"))
    policy = ConservativeUCB([OFF_ARM, PAIR_ARM, CHAIN_ARM], Experience())
    await run(policy, toy, 100)
    toy.off = True
    chosen = []
    for _ in range(100):
        chosen.append(policy.choose())
        late_us = 0 if chosen[-1].off else 20_000
        policy.learn(chosen[-1], replace(DraftTree.root_only(1), draft_us=late_us, missed=late_us > 0), verdict(1))
    assert Counter(shape.off for shape in chosen[40:])[False] <= 2


def test_a_prior_and_the_requests_rounds_are_averaged_by_their_weights():
    """8 rounds of the prior and one of the request: a mean of (8 * 4 + 1) / 9 for chains."""
    prior = Prior({CHAIN_ARM: EmittedLength(4.0, 1000.0)})
    policy = ConservativeUCB([OFF_ARM, CHAIN_ARM], Experience(), prior)
    policy.learn(CHAIN_ARM, traced(), verdict(1))
    assert policy.lengths[CHAIN_ARM].mean == pytest.approx(33 / 9)
