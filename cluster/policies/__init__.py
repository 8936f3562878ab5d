"""Policies choose a shape for every round. Arithmetic alone: no clock, no store, no global random."""

from __future__ import annotations

from collections.abc import Sequence

from dendro.errors import BadRequest
from dendro.shapes import TreeShape

from cluster.policies.experience import Experience, Place
from cluster.policies.paper_ucb import PaperUCB
from cluster.policies.ratio_ucb import RatioUCB
from cluster.policies.static import Static
from cluster.rounds import Policy

POLICIES = ("ratio_ucb", "paper_ucb")

__all__ = ["POLICIES", "Experience", "PaperUCB", "Place", "RatioUCB", "Static", "make_policy"]


def make_policy(name: str, arms: Sequence[TreeShape], experience: Experience, temperature: float) -> Policy:
    """The policy of one request. `experience` is the router's, shared by the requests of a (target, drafter) pair."""
    if not arms:
        raise BadRequest("speculation.arms", "is empty: name at least one shape")
    if name == "ratio_ucb":
        return RatioUCB(arms, experience, temperature)
    if name == "paper_ucb":
        return PaperUCB(arms, experience.draft_ratio)
    raise BadRequest("speculation.policy", f"{name!r} is not one of {', '.join(POLICIES)}")
