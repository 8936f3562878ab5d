"""What a request asks of speculation: checked whole, and turned into a policy before any model sees the request.

A field that means nothing in its mode is refused by its name, so that nobody believes in a bound that does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dendro.errors import BadRequest
from dendro.shapes import MAX_ROWS, OFF, ProposedShape, TreeShape
from dendro.text import Sampling
from dendro.v1 import generation_pb2 as pb

from cluster.config import Config
from cluster.policies import Experience, InformedPolicy, Static, make_policy
from cluster.policies.prior import NO_PRIOR, Prior

MODES = {
    pb.Speculation.MODE_UNSPECIFIED: "auto",
    pb.Speculation.MODE_AUTO: "auto",
    pb.Speculation.MODE_OFF: "off",
    pb.Speculation.MODE_FIXED: "fixed",
}


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How the rounds of one request are to be guessed at."""

    name: str  # of the policy; "off" or "fixed" where the request leaves none a choice
    policy: InformedPolicy
    free: bool = False  # nothing was asked: the texts of such requests may be tried together
    proposed_rows: int = 1  # of a tree that proposers may add to; a client who names a shape gets that shape
    deadline_s: float = math.inf  # how long a round waits for its draft at most, whatever the server would wait
    adaptive: bool = True  # whether a round may end its wait for a slow draft sooner; not where the shape is fixed


def plan_speculation(
    said: pb.Speculation,
    target: str,
    config: Config,
    experience: Experience,
    sampling: Sampling,
    prior: Prior = NO_PRIOR,
) -> SpeculationPlan:
    """Check a request's `speculation` against its target. Raises BadRequest with the name of the field."""
    mode = MODES.get(said.mode)
    if mode is None:
        raise BadRequest("speculation.mode", f"{said.mode} is none of AUTO, OFF and FIXED")
    if said.shape and mode != "fixed":
        raise BadRequest("speculation.shape", f"is {said.shape!r}, but the mode is {mode.upper()}; ask for FIXED")
    if said.policy and mode != "auto":
        raise BadRequest("speculation.policy", f"picks nothing in mode {mode.upper()}; ask for AUTO")
    if mode == "auto":
        return _auto(said, target, config, experience, sampling, prior)
    shape = _fixed_shape(said, target, config) if mode == "fixed" else OFF
    if shape.off and said.HasField("max_nodes"):
        raise BadRequest("speculation.max_nodes", "bounds nothing where no tree is asked for")
    if not shape.drafted and said.HasField("deadline_ms"):
        raise BadRequest("speculation.deadline_ms", "bounds nothing where no drafter is asked")
    proposed_rows = 1 if shape.drafted else shape.rows
    return SpeculationPlan(
        mode, Static(shape), proposed_rows=proposed_rows, deadline_s=_deadline_s(said), adaptive=False
    )


def _auto(
    said: pb.Speculation, target: str, config: Config, experience: Experience, sampling: Sampling, prior: Prior
) -> SpeculationPlan:
    arms, rows = config.arms_of(target), MAX_ROWS
    if said.HasField("max_nodes"):
        arms = _bounded(arms, said.max_nodes)
        rows = min(1 + said.max_nodes, MAX_ROWS)
    name = said.policy or config.speculation.policy
    policy = make_policy(name, arms, experience, sampling.temperature, sampling.seed, prior)
    bounded = said.HasField("max_nodes") or said.HasField("deadline_ms")
    return SpeculationPlan(name, policy, name == config.speculation.policy and not bounded, rows, _deadline_s(said))


def _fixed_shape(said: pb.Speculation, target: str, config: Config) -> TreeShape:
    if not said.shape:
        raise BadRequest("speculation.shape", "is empty, but the mode is FIXED; name one, or ask for AUTO")
    try:
        shape = TreeShape.parse(said.shape)
    except ValueError as error:
        raise BadRequest("speculation.shape", str(error).removeprefix("shape: ")) from None
    limits = config.targets[target]
    if not limits.holds(shape):
        raise BadRequest(
            "speculation.shape",
            f"{shape} has {shape.rows} rows and depth {shape.depth}; "
            f"{target} takes {limits.max_rows} and {limits.max_depth}",
        )
    if not config.makes(target, shape):
        who = "drafter" if shape.drafted else "proposers"
        raise BadRequest("speculation.shape", f"is {shape}, but {target} has no {who}")
    if said.HasField("max_nodes") and _guesses(shape) > said.max_nodes:
        raise BadRequest("speculation.max_nodes", f"is {said.max_nodes}, but {shape} has {_guesses(shape)} guesses")
    return shape


def _deadline_s(said: pb.Speculation) -> float:
    if not said.HasField("deadline_ms"):
        return math.inf
    if said.deadline_ms == 0:
        raise BadRequest("speculation.deadline_ms", "must be at least 1; to wait for no draft, ask for OFF")
    return said.deadline_ms / 1e3


def _bounded(arms: Sequence[TreeShape], guesses: int) -> tuple[TreeShape, ...]:
    """Arms of so many guesses at most. Proposals are cut to them; trees that have more are left out."""
    cut = (
        ProposedShape(min(arm.total, guesses)) if guesses and isinstance(arm, ProposedShape) else arm for arm in arms
    )
    return tuple(dict.fromkeys(arm for arm in cut if _guesses(arm) <= guesses)) or (OFF,)


def _guesses(shape: TreeShape) -> int:
    return shape.rows - 1
