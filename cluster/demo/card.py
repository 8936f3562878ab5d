"""The model card that a training run writes beside its checkpoints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from cluster.demo.corpus import HELD_OUT, VOCABULARY
from cluster.demo.measure import LONG_ANSWER_TOKENS, REPEATED_LIMIT, DrafterFacts, TargetFacts
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS, PROMPTS, Acceptance
from cluster.training.card import markdown_table, millions
from drafter_service.training.teacher import KEPT


def _listed(title: str, names: Iterable[str]) -> str:
    text = f"{title}: {', '.join(f'`{name}`' for name in names)}."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def model_card(
    stages: Mapping[Any, Mapping[str, Any]],  # stage -> its facts
    prompt_names: list[str],
    targets: Mapping[str, TargetFacts],
    drafters: Mapping[str, DrafterFacts],
    acceptance: Mapping[str, Mapping[str, Acceptance]],  # target -> drafter -> its acceptance
    seed: int,
    hard_share: float,  # share of the text's next token in a drafter's loss
) -> str:
    """The card, as Markdown."""
    corpus, teacher = stages["corpus"], stages["teacher"]
    distilled, own_share = millions(teacher["tokens"]), f"{teacher['own_share']:.0%}"
    trained: dict[str, TargetFacts | DrafterFacts] = {**targets, **drafters}
    models = markdown_table(
        ("model", "parameters", "tokens seen", "minutes", "held-out loss, nats/token"),
        (
            (
                name,
                millions(facts.parameters),
                millions(stages[name]["tokens"]),
                f"{stages[name]['seconds'] / 60:.0f}",
                f"{facts.loss:.3f}",
            )
            for name, facts in trained.items()
        ),
    )
    agreement = " and ".join(f"{facts.agreement_with_text:.1%} (`{name}`)" for name, facts in targets.items())
    shapes = list(next(iter(acceptance["target"]["mamba2"].emitted.values())))
    emitted = markdown_table(
        ("target", "drafter", "temperature", "ranked first", *(f"`{shape}`" for shape in shapes)),
        (
            (
                target,
                name,
                temperature,
                f"{facts.first_rank[temperature]:.1%}",
                *(f"{facts.emitted[temperature][shape]:.2f}" for shape in shapes),
            )
            for target, of_drafters in acceptance.items()
            for name, facts in of_drafters.items()
            for temperature in facts.emitted
        ),
    )
    candidates = targets["target"].repetition.candidates
    repetition = markdown_table(
        ("target", "prompts", "answers of", "repeated 4-grams"),
        (
            (name, prompts, f"{length} tokens", f"{share:.1%}")
            for name, facts in targets.items()
            for prompts, length, share in (
                (f"all {candidates}", ANSWER_TOKENS, facts.repetition.in_all),
                (f"the {PROMPTS} measured", ANSWER_TOKENS, facts.repetition.in_measured),
                (f"the {PROMPTS} measured", LONG_ANSWER_TOKENS, facts.repetition.in_measured_long),
            )
        ),
    )
    under_limit = " and ".join(f"{facts.repetition.under_limit} (`{name}`)" for name, facts in targets.items())
    held_out = _listed("Held out of training and tokenizer", HELD_OUT)
    measured_on = _listed("Measured on", prompt_names)
    return f"""# The demo pair

A target, a second one of state-space layers, and three drafters, small enough to train on a laptop and to keep in git;
written by `dendro train demo` (seed {seed}). They write poor Python: they exist to show and test speculation on real
text.

## Data

The standard library of Python {corpus["python"]}, its `test` package included where installed:
{corpus["files"]:,} files, {corpus["bytes"] / 1e6:.1f} MB, {millions(corpus["tokens"])} tokens of a byte-level BPE of
{VOCABULARY:,} tokens made from the same files.
Digest (sha256 over the sorted lines `name sha256-of-file`):
`{corpus["digest"]}`.

{held_out}
Their tests are part of the training text. The text is Python's own source, under the PSF licence.

## Models

{models}

`target` is a Llama, trained on the text. `mamba` (Mamba-1), `mamba2` and `llama` are drafters, distilled from its
{KEPT} largest log-probabilities on {distilled} tokens; {own_share} of them are its own text at temperatures 0, 0.7
and 1, the others the corpus's. {hard_share:.0%} of their loss is the text's next token. `target_mamba2` is a Mamba-2
that begins as the drafter `mamba2` with twice its width, heads and layers, and is then trained on the text.
Tokens seen include repetitions. Held-out loss is over all passages of `cluster/demo/held_out.json`, in fp32.
The target's first guess is the text's next token in {agreement} of them.
`dendro train demo --only target_mamba2 --out FOLDER` trains this one alone, for all of `--minutes`, with the
vocabulary of the folder's `target`.

## Emitted per round

Tokens per round, the target's own one included, on {PROMPTS} held-out prompts of {PROMPT_TOKENS} tokens with answers
of {ANSWER_TOKENS} that the target wrote, under the shared-noise rule, by replaying the drafter's ranks of the target's
text through static shapes; "ranked first" is the share of the target's tokens that were the drafter's first choice.
No drafter was distilled from `target_mamba2`. It agrees most with `mamba2`, as it grew from that drafter.

{emitted}

## Repetition, and the prompts

Greedy answers of a target this small loop, and looping text is trivially predicted. So measurements use short answers
and passages on which `target` does not loop: greedy answers of {ANSWER_TOKENS} tokens after prompts of
{PROMPT_TOKENS} that repeat less than {REPEATED_LIMIT:.0%} of their 4-grams (these were chosen alike among all
definitions of the held-out modules). Of the {candidates} shipped passages these numbers meet the limit:
{under_limit}.
The more a target loops, the longer every drafter's acceptance length on it: compare drafters on one target, not
targets. The mean share of repeated 4-grams in greedy answers:

{repetition}

{measured_on}

`held_out_prompts` returns passages in the order of `measuring_prompts.json`, these first. Prompts of other lengths and
longer answers have other shares of repetition.
"""
