"""Checks a request's `speculation` and verification mode and makes its policy, before a model sees the request.

A field without effect in its mode is refused by name, so that no client relies on a bound that is not applied.

Where guesses are drawn, a policy may pick the arm of each round: its choice precedes the round's draws and depends on
earlier rounds alone (kernels/tree_kernels/sampled_walk/README.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from dendro.errors import BadRequest
from dendro.modes import LISTED_MODES, VerificationMode
from dendro.shapes import MAX_ROWS, MarginalShape, ProposedShape, TreeShape
from dendro.text import Sampling
from dendro.tree import LAW_TOKENS
from dendro.v1 import generation_pb2 as pb

from cluster.arms import OFF_ARM, Arm, maker_and_shape
from cluster.config import Config
from cluster.policies import Experience, InformedPolicy, Static, make_policy, policy_named, with_chain_and_off
from cluster.policies.prior import NO_PRIOR, Prior
from cluster.policies.replay import replayed_arms, step_tables

MODES = {
    pb.Speculation.MODE_UNSPECIFIED: "auto",
    pb.Speculation.MODE_AUTO: "auto",
    pb.Speculation.MODE_OFF: "off",
    pb.Speculation.MODE_FIXED: "fixed",
}


@dataclass(frozen=True, slots=True)
class TargetArms:
    """What a configuration says of one target's arms. It is read once, while the router loads."""

    config: Config
    target: str
    drafters: tuple[str, ...]
    names_drafters: bool  # True if statistics name the drafter beside the shape: the target has several
    configured: tuple[Arm, ...]
    completed: tuple[Arm, ...]  # arms among which policies choose, unless a request has bounds: with chains and `off`

    @classmethod
    def of(cls, config: Config, target: str) -> Self:
        arms = config.arms_of(target)
        completed, drafters = with_chain_and_off(arms), config.drafters_of(target)
        for drafter in drafters:  # `step_tables` keeps what policies read, so no request computes it
            step_tables(tuple(arm.shape for arm in replayed_arms(completed, drafter)))
        return cls(config, target, drafters, config.names_drafters(target), arms, completed)


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """Policy of one request, and limits on its trees and drafts."""

    name: str  # name of the policy; "off" and "fixed" in these modes
    policy: InformedPolicy
    free: bool = False  # True if speculation trials may include it: configured policy, no bounds, no listed mode
    proposed_rows: int = 1  # most rows of a tree with proposals; 1: none are added to a fixed shape that is drafted
    deadline_s: float = math.inf  # the request's limit on a round's wait for its draft
    stops: bool = False  # True if an arm is `until(auto,...)`, whose numbers are computed before each round
    adaptive: bool = True  # True if a round may stop waiting for a slow draft sooner; False in modes off and fixed
    plain_first: bool = False  # True if the first round has no tree, so that the verifier runs it with the prompt
    learns: bool = True  # True if rounds teach later requests' costs; False for a fixed shape in LISTED_MODES
    names_drafters: bool = False  # True if statistics name the drafter beside the shape: the target has several

    @property
    def off(self) -> bool:
        """True in mode `off`."""
        return self.name == MODES[pb.Speculation.MODE_OFF]


def plan_speculation(
    speculation: pb.Speculation,
    arms: TargetArms,
    experience: Experience,
    sampling: Sampling,
    prior: Prior = NO_PRIOR,
) -> SpeculationPlan:
    """Check a request's `speculation` against its target. Raises BadRequest with the name of the field."""
    mode = MODES.get(speculation.mode)
    if mode is None:
        raise BadRequest("speculation.mode", f"{speculation.mode} is not one of AUTO, OFF and FIXED")
    if speculation.shape and mode != "fixed":
        raise BadRequest("speculation.shape", f"is {speculation.shape!r}, but the mode is {mode.upper()}; use FIXED")
    if speculation.policy and mode != "auto":
        raise BadRequest("speculation.policy", f"has no effect in mode {mode.upper()}; use AUTO")
    check_mode(sampling, speculation, arms.config)
    if mode == "auto":
        return _auto(speculation, arms, experience, sampling, prior)
    return _fixed(mode, speculation, arms, sampling)


def _fixed(mode: str, speculation: pb.Speculation, arms: TargetArms, sampling: Sampling) -> SpeculationPlan:
    """The plan of a request whose rounds all have the same arm: `off`, or that of its shape."""
    arm = _fixed_arm(speculation, arms.target, arms.config) if mode == "fixed" else OFF_ARM
    check_arm(sampling, arm)
    if arm.off and speculation.HasField("max_nodes"):
        raise BadRequest("speculation.max_nodes", "has no effect without trees")
    if not arm.drafted and speculation.HasField("deadline_ms"):
        raise BadRequest("speculation.deadline_ms", "has no effect without a drafter")
    return SpeculationPlan(
        mode,
        Static(arm),
        proposed_rows=1 if arm.drafted else arm.rows,
        deadline_s=_deadline_s(speculation),
        stops=isinstance(arm.shape, MarginalShape),
        adaptive=False,
        plain_first=arm.off,
        learns=sampling.mode not in LISTED_MODES,
        names_drafters=arms.names_drafters,
    )


def _auto(
    speculation: pb.Speculation, target: TargetArms, experience: Experience, sampling: Sampling, prior: Prior
) -> SpeculationPlan:
    """The plan of a request whose policy chooses the arm of each round."""
    configured = target.config.speculation.policy
    name, listed = speculation.policy or configured, sampling.mode in LISTED_MODES
    bounded, arms, rows = speculation.HasField("max_nodes"), target.configured, MAX_ROWS
    if bounded:
        arms = _bounded(arms, speculation.max_nodes)
        rows = min(1 + speculation.max_nodes, MAX_ROWS)
    if listed:
        arms = arms_in_mode(sampling, arms)
    return SpeculationPlan(
        name,
        make_policy(name, arms, experience, prior)
        if bounded or listed
        else policy_named(name, target.completed, experience, prior),
        name == configured and not (bounded or listed or speculation.HasField("deadline_ms")),
        1 if sampling.draws_guesses else rows,  # proposals are not drawn
        _deadline_s(speculation),
        stops=any(isinstance(arm.shape, MarginalShape) for arm in arms),
        plain_first=not sampling.draws_guesses,
        names_drafters=target.names_drafters,
    )


def _fixed_arm(speculation: pb.Speculation, target: str, config: Config) -> Arm:
    """The arm of every round. Its drafter is the one that the shape names, else the target's first."""
    if not speculation.shape:
        raise BadRequest("speculation.shape", "is empty, but the mode is FIXED; name one, or use AUTO")
    try:
        drafter, shape = maker_and_shape(speculation.shape)
    except ValueError as error:
        raise BadRequest("speculation.shape", str(error).removeprefix("shape: ")) from None
    limits = config.targets[target]
    if not limits.holds(shape):
        raise BadRequest(
            "speculation.shape",
            f"{shape} has {shape.rows} rows and depth {shape.depth}; "
            f"{target} allows at most {limits.max_rows} and {limits.max_depth}",
        )
    if drafter and not shape.drafted:
        raise BadRequest("speculation.shape", f"names the drafter {drafter!r}, but no drafter makes {shape}")
    makers = config.makers_of(target, shape)
    if not makers:
        missing = "drafter" if shape.drafted else "proposers"
        raise BadRequest("speculation.shape", f"is {shape}, but {target} has no {missing}")
    if drafter and drafter not in makers:
        raise BadRequest("speculation.shape", f"names the drafter {drafter!r}; {target} has {', '.join(makers)}")
    if speculation.HasField("max_nodes") and _guesses(shape) > speculation.max_nodes:
        raise BadRequest(
            "speculation.max_nodes", f"is {speculation.max_nodes}, but {shape} has {_guesses(shape)} guesses"
        )
    return Arm(drafter or makers[0], shape)


def _deadline_s(speculation: pb.Speculation) -> float:
    if not speculation.HasField("deadline_ms"):
        return math.inf
    if speculation.deadline_ms == 0:
        raise BadRequest("speculation.deadline_ms", "must be at least 1; without drafts, use mode OFF")
    return speculation.deadline_ms / 1e3


def _bounded(arms: Sequence[Arm], guesses: int) -> tuple[Arm, ...]:
    """Arms of at most `guesses` guesses: proposed shapes are cut to fit, other larger ones left out."""
    cut = (
        replace(arm, shape=ProposedShape(min(arm.shape.total, guesses)))
        if guesses and isinstance(arm.shape, ProposedShape)
        else arm
        for arm in arms
    )
    return tuple(dict.fromkeys(arm for arm in cut if _guesses(arm.shape) <= guesses)) or (OFF_ARM,)


def _guesses(shape: TreeShape) -> int:
    return shape.rows - 1


def check_mode(sampling: Sampling, speculation: pb.Speculation, config: Config) -> None:
    """Raise BadRequest, naming the field, for a mode that is not served, or that has no use for a field."""
    mode = sampling.mode
    if mode not in LISTED_MODES:
        return
    if mode not in config.verification_modes:
        listed = ", ".join(config.verification_modes) or "none"
        raise BadRequest("mode", f"{mode} is not among the configuration's verification_modes ({listed})")
    if sampling.draws_guesses and speculation.HasField("deadline_ms"):
        raise BadRequest("speculation.deadline_ms", f"has no use in mode {mode}, which waits for every tree")


def check_arm(sampling: Sampling, arm: Arm) -> None:
    """Raise BadRequest, naming the field, for the arm of a fixed shape whose trees the request's mode cannot have."""
    mode, shape = sampling.mode, arm.shape
    if mode in LISTED_MODES and arm.off:
        raise BadRequest("mode", f"{mode} has no effect without trees; use a shape or AUTO")
    if not sampling.draws_guesses:
        return
    if not shape.drawable:
        known = "one such as (3,2,1), nodes(2,1) or dynamic(6,5,24)"
        raise BadRequest("speculation.shape", f"is {shape}, which chooses its guesses; mode {mode} needs {known}")
    if mode is VerificationMode.BLOCK and shape.width > 1:
        raise BadRequest("speculation.shape", f"is {shape}, but mode block needs a chain, such as (1,1,1,1)")
    if shape.width > LAW_TOKENS:
        raise BadRequest("speculation.shape", f"is {shape}; a row has at most {LAW_TOKENS} children in mode {mode}")


def arms_in_mode(sampling: Sampling, arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """The arms among which a policy chooses in a mode of LISTED_MODES. Raises BadRequest where no tree is left.

    Where guesses are drawn, each drafter's chain is added before arms that are too wide are left out: its depth is that
    of the drafter's deepest arm, wide or not.
    """
    mode = sampling.mode
    if sampling.draws_guesses:
        most = 1 if mode is VerificationMode.BLOCK else LAW_TOKENS
        drawn = with_chain_and_off([arm for arm in arms if arm.shape.drawable])
        arms = [arm for arm in drawn if arm.shape.width <= most]
    if all(arm.off for arm in arms):
        raise BadRequest("speculation.mode", f"is AUTO, but no arm has trees of mode {mode}; use FIXED")
    return tuple(arms)
