"""The model card that a training run writes beside its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.demo.corpus import HELD_OUT, VOCABULARY
from cluster.demo.measure import (
    ANSWER_TOKENS,
    LONG_ANSWER_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    REPEATED_LIMIT,
    ChosenPrompts,
    DrafterFacts,
    TargetFacts,
)
from drafter_service.training.teacher import KEPT


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def model_card(
    stages: Mapping[Any, Mapping[str, Any]],  # stage -> what it left to say
    chosen: ChosenPrompts,
    prompt_names: list[str],
    target: TargetFacts,
    drafters: Mapping[str, DrafterFacts],
    seed: int,
    hard_share: float,  # of a drafter's loss
) -> str:
    """The card, as Markdown."""
    corpus, teacher = stages["corpus"], stages["teacher"]
    distilled, own_share = _millions(teacher["tokens"]), f"{teacher['own_share']:.0%}"
    trained = [("target", target.parameters, target.loss)]
    trained += [(name, facts.parameters, facts.loss) for name, facts in drafters.items()]
    models = _table(
        ("model", "parameters", "tokens seen", "minutes", "held-out loss, nats/token"),
        (
            (
                name,
                _millions(parameters),
                _millions(stages[name]["tokens"]),
                f"{stages[name]['seconds'] / 60:.0f}",
                f"{loss:.3f}",
            )
            for name, parameters, loss in trained
        ),
    )
    shapes = list(next(iter(next(iter(drafters.values())).emitted.values())))
    emitted = _table(
        ("drafter", "temperature", "ranked first", *(f"`{shape}`" for shape in shapes)),
        (
            (
                name,
                temperature,
                f"{facts.first_rank[temperature]:.1%}",
                *(f"{facts.emitted[temperature][shape]:.2f}" for shape in shapes),
            )
            for name, facts in drafters.items()
            for temperature in facts.emitted
        ),
    )
    repetition = _table(
        ("prompts", "answers of", "repeated 4-grams"),
        (
            (f"all {chosen.candidates}", f"{ANSWER_TOKENS} tokens", f"{chosen.repeated_in_all:.1%}"),
            (f"the {PROMPTS} measured", f"{ANSWER_TOKENS} tokens", f"{chosen.repeated_in_chosen:.1%}"),
            (f"the {PROMPTS} measured", f"{LONG_ANSWER_TOKENS} tokens", f"{chosen.repeated_in_chosen_long:.1%}"),
        ),
    )
    held_out = ", ".join(f"`{name}`" for name in HELD_OUT)
    measured_on = ", ".join(f"`{name}`" for name in prompt_names)
    return f"""# The demo pair

A target and three drafters, small enough to train on a laptop and to keep in git; written by `dendro train demo`
(seed {seed}). They write Python, badly: they exist to show and to test speculation on real text.

## Data

The standard library of Python {corpus["python"]}, its `test` package included where installed:
{corpus["files"]:,} files, {corpus["bytes"] / 1e6:.1f} MB, {_millions(corpus["tokens"])} tokens of a byte-level BPE of
{VOCABULARY:,} tokens made from the same files.
Digest (sha256 over the sorted lines `name sha256-of-file`): `{corpus["digest"]}`.

Held out of training and tokenizer: {held_out}.
Their tests are part of the training text. The text is Python's, under the PSF licence.

## Models

{models}

`target` is a Llama, trained on the text. `mamba` (Mamba-1), `mamba2` and `llama` are drafters, distilled from the
target's {KEPT} largest log-probabilities on {distilled} tokens; {own_share} of them are the target's own text at
temperatures 0, 0.7 and 1, the others the corpus's. {hard_share:.0%} of their loss is the text's next token.
Tokens seen count repetitions. Held-out loss is over all passages of `cluster/demo/held_out.json`, in fp32.
The target's first guess is the text's next token in {target.agreement_with_text:.1%} of them.

## Emitted per round

Tokens per round, the target's own one included, on {PROMPTS} held-out prompts of {PROMPT_TOKENS} tokens with answers
of {ANSWER_TOKENS}, under the shared-noise rule, by replaying the drafter's ranks of the target's text through static
shapes; "ranked first" is the share of the target's tokens that were the drafter's first choice.

{emitted}

## Repetition, and the prompts

A target this small loops when it is greedy, and text that loops is trivially predicted. So measurements use short
answers and passages on which it does not: greedy answers of {ANSWER_TOKENS} tokens after prompts of {PROMPT_TOKENS}
that repeat less than {REPEATED_LIMIT:.0%} of their 4-grams, which {chosen.under_limit} of {chosen.candidates} shipped
passages do (these were chosen alike among all definitions of the held-out modules).
The share of repeated 4-grams in greedy answers, mean:

{repetition}

Measured on: {measured_on}.

`held_out_prompts` returns passages in the order of `measuring_prompts.json`, these first. Other lengths of prompt and
longer answers repeat themselves differently.
"""
