"""Checks a request's verification mode against the configuration and its trees, before a model sees the request.

Where guesses are drawn, a policy may pick the arm of each round: its choice precedes the round's draws and depends on
earlier rounds alone (kernels/tree_kernels/sampled_walk/README.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from dendro.errors import BadRequest
from dendro.modes import LISTED_MODES, VerificationMode
from dendro.text import Sampling
from dendro.tree import LAW_TOKENS
from dendro.v1 import generation_pb2 as pb

from cluster.arms import Arm
from cluster.config import Config
from cluster.policies import with_chain_and_off


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
    """The arms among which a policy chooses in the request's mode, with the chains and `off` that are added. Raises
    BadRequest where no tree is left."""
    mode = sampling.mode
    if sampling.draws_guesses:
        arms = with_chain_and_off([arm for arm in arms if arm.shape.drawable])
        most = 1 if mode is VerificationMode.BLOCK else LAW_TOKENS
        arms = [arm for arm in arms if arm.shape.width <= most]
    arms = with_chain_and_off(arms)
    if mode in LISTED_MODES and all(arm.off for arm in arms):
        raise BadRequest("speculation.mode", f"is AUTO, but no arm has trees of mode {mode}; use FIXED")
    return arms
