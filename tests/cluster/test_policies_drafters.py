"""Policies choose among drafters, too: they find the better one, and finding it costs little."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import RANKED, DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies import Experience, make_policy
from cluster.policies.prior import Prior
from cluster.policies.replay import static_path
from cluster.policies.sequoia import expected_tokens

SHAPES = tuple(map(TreeShape.parse, ("(1,1,1,1)", "(2,1,1)", "(3,2,1)", "beam(5,3)", "dynamic(4,5,15)", "(3,2,2,1,1)")))
GROWN = {"beam(5,3)": "(3,1,1,1,1)", "dynamic(4,5,15)": "(4,2,1)"}
"""The static trees that stand for trees whose form depends on values."""
ANSWER_TOKENS = 128
HOP_US, STEP_US, ROW_US = 300, 10_000, 60


@dataclass(frozen=True)
class SimulatedDrafter:
    """A drafter whose first guess is right with chance `first`, each next one with a share `others` of the rest."""

    first: float
    level_us: int
    others: float = 0.35
    opening_rounds: int = 2  # from its first request on, in which no tree comes
    lost: bool = False
    switch_us: int = 0  # by which its round takes longer if the previous one had none of its trees

    @property
    def chances(self) -> list[float]:
        """Of each rank; the last is that of a token that is not ranked."""
        left = (1 - self.first) * (1 - self.others) ** np.arange(RANKED)
        return [self.first, *(self.others * left[:-1]), left[-1]]

    def ranks(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.choice(RANKED + 1, size=count, p=self.chances)

    def emitted(self, shape: TreeShape) -> float:
        """Expected tokens of a round."""
        return expected_tokens(shape, self.chances[:RANKED])


@dataclass
class SimulatedText:
    """One answer: the ranks of its tokens by drafter, the same whatever is played."""

    drafters: dict[str, SimulatedDrafter]
    seed: tuple[int, ...]
    rounds: Counter[str] = field(default_factory=Counter)  # by arm
    makers: Counter[str] = field(default_factory=Counter)
    switches: int = 0  # rounds of an arm whose drafter made no tree in the previous one
    us: int = 0
    expected: float = 0.0  # tokens: sums over rounds, as the tokens that came are mostly chance

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        count = ANSWER_TOKENS + 64
        self.ranks = {name: drafter.ranks(rng, count) for name, drafter in sorted(self.drafters.items())}
        self.requested: dict[str, int] = {}  # round of a drafter's first request
        self.traced: dict[str, int] = {}  # tokens at its last tree

    def answer(self, name: str, arms: list[Arm], experience: Experience, prior: Prior) -> Prior:
        """Run the answer. Returns its notes, and keeps its time and arms."""
        policy, notes, position, last_maker = make_policy(name, arms, experience, prior), Prior(), 0, ""
        with experience.concurrency.running():
            while position < ANSWER_TOKENS:
                arm = policy.choose()
                self.rounds[str(arm)] += 1
                self.makers[arm.maker] += 1
                tree, found = self.round(arm, position)
                policy.learn(arm, tree, found)
                notes.learn(arm, tree, found, True)
                took_us = found.verify_us + tree.draft_us + HOP_US
                if arm.drafted and not tree.missed and arm.maker != last_maker:
                    took_us += self.drafters[arm.maker].switch_us
                experience.learn_time(arm, tree, found, took_us, last_maker=last_maker)
                self.switches += arm.drafted and arm.maker != last_maker
                last_maker = "" if tree.missed else arm.maker
                position, self.us = position + found.length, self.us + took_us
        return notes

    def round(self, arm: Arm, position: int) -> tuple[DraftTree, Verdict]:
        number = self.rounds.total()
        length, rows, trace, draft_us, missed = 1, 1, [], 0, False
        emitted = 1.0
        if arm.drafted:
            drafter = self.drafters[arm.maker]
            # The first drafter of a text is opened beside the verifier, so it is open in the first round.
            first = self.requested.setdefault(arm.maker, number if self.requested else -drafter.opening_rounds)
            missed = drafter.lost or number - first < drafter.opening_rounds
        if arm.drafted and not missed:
            shape = TreeShape.parse(GROWN.get(str(arm.shape), str(arm.shape)))
            ranks, emitted = self.ranks[arm.maker], drafter.emitted(shape)
            length, rows = len(static_path(shape, ranks[position : position + shape.depth].tolist())), arm.rows
            trace = ranks[self.traced.get(arm.maker, position) : position].tolist()
            self.traced[arm.maker], draft_us = position, drafter.level_us * arm.depth
        self.expected += emitted
        plain = DraftTree.of(range(rows), range(-1, rows - 1))
        tree = replace(plain, trace=np.array(trace[-64:], np.int32), draft_us=draft_us, missed=missed)
        step_us = STEP_US + ROW_US * (-(-rows // 8) * 8)
        return tree, Verdict(
            (1,) * length, tuple(range(length)), (0,) * (length - 1), None, length, step_us, step_rows=rows
        )


def run(name: str, drafters: dict[str, SimulatedDrafter], answers: int, seed: int) -> tuple[float, SimulatedText]:
    """Expected tokens per second of a router's rounds over some answers, and the last of these."""
    experience, prior, expected, us = Experience(), Prior(), 0.0, 0
    arms = [OFF_ARM, *(Arm(drafter, shape) for shape in SHAPES for drafter in drafters)]
    for number in range(answers):
        text = SimulatedText(drafters, (seed, number))
        prior.add(text.answer(name, arms, experience, prior))
        expected, us = expected + text.expected, us + text.us
    return 1e6 * expected / us, text


GOOD, POOR = SimulatedDrafter(0.75, 500), SimulatedDrafter(0.45, 500)
USELESS, DEAD = SimulatedDrafter(0.05, 3_000, 0.02), SimulatedDrafter(0.75, 500, lost=True)


@pytest.mark.parametrize("name", ["conservative_ucb"])
@pytest.mark.parametrize("better", ["first", "second"])
def test_a_policy_finds_the_better_of_two_drafters(name: str, better: str):
    drafters = {"one": GOOD, "two": POOR} if better == "first" else {"one": POOR, "two": GOOD}
    _, last = run(name, drafters, 6, seed=1)
    good = "one" if better == "first" else "two"
    assert last.makers[good] > 0.75 * last.makers.total()


@pytest.mark.parametrize("name", ["conservative_ucb"])
def test_a_second_drafter_costs_at_most_two_percent_of_the_answers_rate(name: str):
    """Over 12 answers, the first of which knows nothing, and three seeds."""
    alone = sum(run(name, {"one": GOOD}, 12, seed)[0] for seed in range(3))
    for other in (POOR, USELESS, GOOD):
        both = sum(run(name, {"one": GOOD, "two": other}, 12, seed)[0] for seed in range(3))
        assert both >= 0.98 * alone, other


def test_of_two_equal_drafters_a_text_keeps_to_one_where_switching_takes_time():
    """A drafter that made no tree in the previous round reads the tokens of that round first."""
    slow = replace(GOOD, switch_us=4_000)
    alone = sum(run("conservative_ucb", {"one": slow}, 12, seed)[0] for seed in range(3))
    both = [run("conservative_ucb", {"one": slow, "two": slow}, 12, seed) for seed in range(3)]
    assert sum(rate for rate, _ in both) >= 0.98 * alone
    assert max(text.switches for _, text in both) <= 3


def test_two_useless_drafters_cost_at_most_two_percent_against_off():
    rate, last = run("conservative_ucb", {"one": USELESS, "two": USELESS}, 12, seed=2)
    off = 1e6 / (STEP_US + 8 * ROW_US + HOP_US)
    assert rate >= 0.98 * off and last.makers[""] > 0.9 * last.makers.total()


def test_a_drafter_of_two_that_is_gone_is_asked_ever_less_often():
    _, text = run("conservative_ucb", {"one": DEAD, "two": GOOD}, 1, seed=3)
    assert text.makers["one"] <= 5 and text.makers["two"] > 25


def test_the_shapes_of_a_second_drafter_are_not_tried_one_by_one():
    """Its chain is played twice to learn what it costs; what its other shapes would emit follows from its ranks."""
    _, text = run("conservative_ucb", {"one": GOOD, "two": USELESS}, 1, seed=4)
    assert text.makers["two"] <= 5
