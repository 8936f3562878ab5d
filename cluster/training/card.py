"""The model card that a training run writes beside its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dendro.options import MAX_TOP_LOGPROBS

from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS, Acceptance
from cluster.training.answering import TEMPERATURES
from drafter_service.training.batches import HARD_SHARE
from drafter_service.training.teacher import KEPT, OWN_TEXT_TEMPERATURES


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def acceptance_table(measured: Mapping[str, Acceptance]) -> str:
    """A row for each temperature and each drafter, by its name."""
    first = next(iter(measured.values()))
    shapes = list(next(iter(first.emitted.values())))
    return markdown_table(
        ("", "temperature", "ranked first", *(f"`{shape}`" for shape in shapes)),
        (
            (
                name,
                temperature,
                f"{each.first_rank[temperature]:.1%}",
                *(_cell(each.emitted[temperature][shape]) for shape in shapes),
            )
            for temperature in first.emitted
            for name, each in measured.items()
        ),
    )


def drafter_card(
    title: str,
    target: str,
    model: str,  # kind, size and origin
    conversations: bool,  # True if the target answered the data's prompts
    source: str,  # origin of the data
    command: str,
    seed: int,
    facts: Mapping[str, Mapping[str, Any]],  # stage -> its facts
    after: Mapping[str, Any],  # held-out loss and acceptance of the exported checkpoint
) -> str:
    """The card of a drafter, as Markdown."""
    data, before = facts["data"], facts["answers"]
    labels = facts["teacher"] or facts["distil"]  # labels on disk, or those computed during the training
    own, prompts = OWN_TEXT_TEMPERATURES, f"prompts of {PROMPT_TOKENS} tokens with\nanswers of {ANSWER_TOKENS} that"
    kept = f"The target labelled {labels['labelled']:,} tokens with its {KEPT} largest log-probabilities;"
    if conversations:
        own, prompts = TEMPERATURES, "prompts of the data and of its own, with\nanswers that"
        kept = (
            f"The target labelled {labels['labelled']:,} tokens of its answers with its {MAX_TOP_LOGPROBS} largest\n"
            "log-probabilities;"
        )
    temperatures = ", ".join(f"{each:g}" for each in sorted(own))
    measured = (("before", before), ("after", after))
    emitted = acceptance_table({name: Acceptance(**each["acceptance"]) for name, each in measured})
    stages = markdown_table(
        ("stage", "steps", "tokens seen", "minutes", "loss at the end, nats/token"),
        (
            (
                stage,
                str(facts[stage]["steps"]),
                millions(facts[stage]["tokens"]),
                f"{facts[stage]['seconds'] / 60:.1f}",
                f"{facts[stage]['loss']:.3f}",
            )
            for stage in ("pretrain", "distil")
            if facts[stage]
        ),
    )
    return f"""# {title}

A drafter for the target `{target}`, distilled from it by `dendro train drafter`; it has the target's tokenizer.
{model}.

- Command: `{command}`
- Seed: {seed}

## Data

{source}: files: {data["files"]:,}, bytes: {data["bytes"]:,}, tokens to train on: {data["train"]:,}, held out:
{data["held_out"]:,}.

{kept}
{labels["own_share"]:.0%} of them are its own text, at temperatures {temperatures}.
{HARD_SHARE:.0%} of the distillation's loss is the text's next token.

## Training

{stages}

The loss on held-out text is {before["held_out_loss"]:.3f} nats per token before and {after["held_out_loss"]:.3f} after.
Tokens seen include repetitions.

## Emitted per round

Tokens per round, the target's own one included, on {before["prompts"]} held-out {prompts} the target wrote,
under the shared-noise rule, by replaying the drafter's ranks of the target's text through static shapes; "ranked first"
is the share of the target's tokens that were the drafter's first choice. Answers that repeat themselves are predicted
easily: compare drafters on one target, not targets.

{emitted}
"""
