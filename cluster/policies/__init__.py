"""Policies choose the arm of each round. Pure arithmetic: no clock, no store, no global random state."""

from __future__ import annotations

from collections.abc import Sequence

from dendro.errors import BadRequest
from dendro.shapes import LevelShape

from cluster.arms import OFF_ARM, Arm, drafters_of
from cluster.policies.conservative_ucb import ConservativeUCB
from cluster.policies.experience import Experience, Experiences, RunningRequest
from cluster.policies.offers import InformedPolicy, Offer
from cluster.policies.paper_ucb import PaperUCB
from cluster.policies.prior import NO_PRIOR, Prior
from cluster.policies.static import Static

POLICIES = ("conservative_ucb", "paper_ucb")
REPLACED = ("ratio_ucb", "discounted_ucb", "thompson", "fullinfo", "ucbspec")
"""Names of former policies. The error for each names POLICIES[0] instead."""
CHAIN_DEPTH = 4
"""Most levels of the chain that `with_chain_and_off` adds."""

__all__ = [
    "POLICIES",
    "ConservativeUCB",
    "Experience",
    "Experiences",
    "InformedPolicy",
    "Offer",
    "PaperUCB",
    "RunningRequest",
    "Static",
    "make_policy",
    "policy_named",
    "unknown_policy",
    "with_chain_and_off",
]


def unknown_policy(name: str) -> str:
    """The reason in the error for a policy name that is not in POLICIES."""
    if name in REPLACED:
        return f"{name!r} was replaced by {POLICIES[0]!r}"
    return f"{name!r} is not one of {', '.join(POLICIES)}"


def make_policy(
    name: str,
    arms: Sequence[Arm],
    experience: Experience,
    prior: Prior = NO_PRIOR,
) -> InformedPolicy:
    """Make the policy of one request. A chain and `off` are added to the arms (`with_chain_and_off`).

    experience: costs shared by a tenant's requests at a target   prior: statistics of earlier requests of its kind
    Raises BadRequest for an unknown policy, and where there are no arms.
    """
    if not arms:
        raise BadRequest("speculation.arms", "is empty: name at least one shape")
    return policy_named(name, with_chain_and_off(arms), experience, prior)


def policy_named(name: str, arms: Sequence[Arm], experience: Experience, prior: Prior = NO_PRIOR) -> InformedPolicy:
    """The policy of this name, which chooses among these arms alone. Raises BadRequest for an unknown name."""
    match name:
        case "conservative_ucb":
            return ConservativeUCB(arms, experience, prior)
        case "paper_ucb":
            return PaperUCB(arms, experience.draft_ratio)
    raise BadRequest("speculation.policy", unknown_policy(name))


def with_chain_and_off(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Prepend `off` where it is missing, then a chain for each drafter that has arms and no chain among them.

    The chain has at most CHAIN_DEPTH levels and the depth of the drafter's deepest arm, so it keeps the arms' bounds on
    depth and rows.

    >>> [str(arm) for arm in with_chain_and_off([Arm("mamba", LevelShape((3, 2, 1)))])]
    ['off', 'mamba:(1,1,1)', 'mamba:(3,2,1)']
    """
    added = [] if OFF_ARM in arms else [OFF_ARM]
    for drafter in drafters_of(arms):
        own = [arm for arm in arms if arm.drafted and arm.maker == drafter]
        if not any(arm.rows == arm.depth + 1 for arm in own):
            depth = min(max(arm.depth for arm in own), CHAIN_DEPTH)
            added.append(Arm(drafter, LevelShape((1,) * depth)))
    return (*added, *arms)
