"""The card that a training run writes beside an acceptance head, and the table of its quality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.training.card import markdown_table
from cluster.training.head_plan import HeadPlan
from drafter_service.acceptance_head import HeadFacts
from drafter_service.training.examples import TEXT
from drafter_service.training.heads import BINS

HEADER = ("prompts", "rows", "first accepted", "chances", "log loss, first", "log loss, all", "ECE, first", "ECE, all")


def quality_rows(qualities: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """A line for every kind of prompt and way to make chances, under HEADER."""
    return [
        [
            kind,
            f"{quality['rows']:,}",
            f"{quality['accepted']:.1%}",
            {"head": "acceptance head", "calibrated": "calibrated scores"}[way],
            *(f"{quality[field]:.4f}" for field in ("first_loss", "loss", "first_error", "error")),
        ]
        for kind, ways in qualities.items()
        for way, quality in ways.items()
    ]


def head_card(
    plan: HeadPlan, facts: HeadFacts, stages: Mapping[str, Mapping[str, Any]], made: Mapping[str, Any]
) -> str:
    """The card, as Markdown. stages: facts by stage; made: size and qualities of the head"""
    examples, trained = stages["examples"], stages["train"]
    laws = ", ".join(f"{warp.temperature:g}" for warp in plan.law.warps)
    first = plan.law.warps[-1]
    masks = f" with top-k {first.top_k} and top-p {first.top_p:g}" if first.masks else ""
    read = "the target's tokens" if plan.law.feed == TEXT else "the mixture of drafted tokens and the target's"
    data = "\n".join(
        f"- {name}: tokens to train on: {kind['train']:,}, held out: {kind['held_out']:,}"
        for name, kind in stages["data"].items()
    )
    return f"""# Acceptance head of `{plan.drafter_name}` for `{plan.target_name}`

Chances that this drafter's candidates are the next token of this target, made by `dendro train head`.
`drafters.{plan.drafter_name}.head` of a configuration names the file.

- Command: `{plan.command}`
- Seed: {plan.seed}
- Residual blocks: {facts.blocks}, {"tied" if facts.tied else "untied"}; width {facts.width}; {made["bytes"]:,} bytes
- Weight of rejections in the loss: {plan.rejection_weight:g}
- Drafter's weights: {facts.drafter[:16]}

## Data

{data}

The target wrote {examples["answers"]:,} answers, at temperatures {laws}{masks}. They gave {examples["rows"]:,} rows of
the drafter, of which {examples["drafted"]:,} have a loss; each position has up to {plan.law.draws} draws of the noise.
The drafter had consumed {read}. {plan.law.from_target:.0%} of the tokens count as the target's own and have no loss.

Training: {trained["steps"]:,} steps, {trained["seconds"] / 60:.1f} minutes, loss {trained["loss"]:.4f} at the end.

## Held out

On answers to other prompts of each kind. First: whether the first candidate is the next token. All: which candidate
is, or none. ECE: calibration error in {BINS} bins of equal mass. Calibrated scores are what the drafter uses without a
head, fitted as it goes, after the rows to which the head was calibrated.

{markdown_table(HEADER, quality_rows(made["qualities"]))}
"""
