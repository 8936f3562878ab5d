"""Checks a request's verification mode against the configuration and its trees, before a model sees the request."""

from __future__ import annotations

from dendro.errors import BadRequest
from dendro.modes import LISTED_MODES, VerificationMode
from dendro.shapes import LevelShape, NodeShape
from dendro.text import Sampling
from dendro.tree import LAW_TOKENS
from dendro.v1 import generation_pb2 as pb

from cluster.arms import Arm
from cluster.config import Config


def check_mode(sampling: Sampling, speculation: pb.Speculation, arm: Arm | None, config: Config) -> None:
    """Raise BadRequest, naming the field, for a mode that is not served or that the request's trees cannot have.

    arm: of every round; None where a policy chooses, which would learn from a mode what does not hold for the others
    """
    mode = sampling.mode
    if mode not in LISTED_MODES:
        return
    if mode not in config.verification_modes:
        listed = ", ".join(config.verification_modes) or "none"
        raise BadRequest("mode", f"{mode} is not among the configuration's verification_modes ({listed})")
    if arm is None:
        raise BadRequest(
            "speculation.mode", f"is AUTO, but the verification mode {mode} needs a fixed shape; use FIXED"
        )
    if arm.off:
        raise BadRequest("mode", f"{mode} has no effect without trees; use a fixed shape")
    if not sampling.draws_guesses:
        return
    shape = arm.shape
    if not isinstance(shape, LevelShape | NodeShape):
        raise BadRequest("speculation.shape", f"is {shape}, but mode {mode} needs a static one, such as (3,2,1)")
    if mode is VerificationMode.BLOCK and shape.width > 1:
        raise BadRequest("speculation.shape", f"is {shape}, but mode block needs a chain, such as (1,1,1,1)")
    if shape.width > LAW_TOKENS:
        raise BadRequest("speculation.shape", f"is {shape}; a row has at most {LAW_TOKENS} children in mode {mode}")
    if speculation.HasField("deadline_ms"):
        raise BadRequest("speculation.deadline_ms", f"has no use in mode {mode}, which waits for every tree")
