"""What proposals promise by their chances, and what came of it in earlier texts."""

from __future__ import annotations

import math

import pytest
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies import Experience
from cluster.policies.prior import Prior, PriorKey, Promises, pack_prior, pair_prior, unpack_prior
from cluster.router.priors import Priors

PROPOSED, CHAIN = Arm.parse("lookup:proposed(3)"), Arm.parse("mamba:(1,1)")


def notes_of(arm: Arm, emitted: int, rounds: int = 8) -> Prior:
    """The notes of a request whose trees had three guesses with a chance of 0.8 each."""
    notes, chances = Prior(), [0.0, *(math.log(0.8),) * 3]
    found = Verdict((1,) * emitted, tuple(range(emitted)), (0,) * (emitted - 1), None, emitted, 10_000, step_rows=4)
    for _ in range(rounds):
        notes.learn(arm, DraftTree.of(range(4), range(-1, 3), chances), found, chosen=True)
    return notes


def test_a_stranger_judges_proposals_by_the_median_share_of_promises_that_came() -> None:
    tenants = [notes_of(PROPOSED, emitted) for emitted in (1, 2, 4)]
    assert [each.promises.share for each in tenants] == pytest.approx([2 / 21.2, 10 / 21.2, 26 / 21.2])
    pair = pair_prior([*tenants, notes_of(PROPOSED, 4, rounds=1)])  # this one promised too little to count
    assert pair.begun().promises.promised == pytest.approx(8)
    assert pair.begun().promises.came == pytest.approx(8 / 2.4)


def test_promises_are_those_of_proposals_alone_and_are_kept_in_the_store() -> None:
    assert notes_of(CHAIN, 2).promises == Promises() and Promises().share == 1
    notes = notes_of(PROPOSED, 2)
    read = unpack_prior(pack_prior(notes))
    assert read is not None and read.promises == notes.promises


async def test_tenants_who_only_began_with_others_figures_do_not_vote_for_them() -> None:
    priors = Priors()
    for number, emitted in enumerate([1, 4, 4, 4, 4]):
        for name, notes in (("asks", notes_of(PROPOSED, emitted)), ("idle", notes_of(CHAIN, 2))):
            key = PriorKey.of("t", ("mamba",), 1.0, f"{name} {number}")
            await priors.of(key, Experience())
            priors.learn(key, notes, Experience())
    stranger = await priors.of(PriorKey.of("t", ("mamba",), 1.0, "stranger"), Experience())
    assert stranger.promises.came == pytest.approx(8 * 3 / 2.4)
