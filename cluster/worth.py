"""What a drafter is worth at a target here, in short: tokens a round by its checkpoint's figures, and the tokens that a
round of its trees needs, by a few timed steps and drafts. What a round takes beside these is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.engine import Engine
from dendro.shapes import TreeShape

from cluster.drafter_figures import DrafterFigures, RankFigures

SHAPES = tuple(map(TreeShape.parse, ("(1)", "(1,1)", "(1,1,1,1)", "(2,1,1)", "(3,2,1)")))
"""The trees that are appraised."""
TEMPERATURES = (0.0, 1.0)

Steps = Mapping[int, float]
"""Microseconds of a target's step by its rows."""
Drafts = Mapping[TreeShape, float]
"""Microseconds of a drafter's tree by its shape."""


class TargetEngine(Engine, VerifierPeer, Protocol):
    """A target's engine of this process."""


class DraftingEngine(Engine, DrafterPeer, Protocol):
    """A drafter's engine of this process."""


class Timer(Protocol):
    """Times loaded engines that were not started, for a second or so, and stops them."""

    async def steps(self, target: TargetEngine, most_rows: int) -> Steps: ...

    async def drafts(self, drafter: DraftingEngine) -> Drafts: ...


def needed(shape: TreeShape, steps: Steps, drafts: Drafts) -> float | None:
    """Tokens a round at which a tree is as fast as no guesses; None where its size was not timed."""
    fitting = [rows for rows in steps if rows >= shape.rows]
    if 1 not in steps or not fitting or shape not in drafts:
        return None
    return (drafts[shape] + steps[min(fitting)]) / steps[1]


def worth_of(figures: DrafterFigures | None, steps: Steps, drafts: Drafts) -> str:
    """What a drafter is worth, in a sentence or two. steps, drafts: empty where the models were not loaded"""
    needs = {shape: need for shape in SHAPES if (need := needed(shape, steps, drafts)) is not None}
    if figures is None:
        least = min(needs.items(), key=lambda each: each[1] / (each[0].depth + 1), default=None)
        unknown = "its checkpoint has no figures of its guesses"
        return unknown if least is None else f"{unknown}; a round of {least[0]} needs {least[1]:.2f} tokens to pay here"
    found = "; ".join(_at(figures.at(temperature), needs) for temperature in TEMPERATURES)
    card = f"for {figures.target}, {found}"
    return card if needs else f"{card}; by its checkpoint alone: nothing was timed"


def _at(figures: RankFigures, needs: Mapping[TreeShape, float]) -> str:
    emitted = {shape: each for shape in needs or SHAPES if (each := figures.emitted(shape)) is not None}
    best = max(emitted, key=lambda shape: emitted[shape] / needs.get(shape, 1.0))
    text = f"temperature {figures.temperature:g}: {emitted[best]:.2f} tokens a round of {best}"
    if best not in needs:
        return text
    ratio = emitted[best] / needs[best]
    bound = f"at most {ratio:.2f} of off" if ratio >= 1 else "cannot pay"
    return f"{text}, which needs {needs[best]:.2f} here: {bound}"
