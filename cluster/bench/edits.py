"""`dendro bench edits`: answers of which a client sends a prediction, as of a file that is to be edited.

A target as small as the demo's does not edit a file as asked. Its answer without a prediction therefore counts as the
edited file, and the prediction, the file before the edit, is made from it by the opposite edit.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dendro.client import AsyncClient

from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.bench import Aim, Bench, Plot, ReportTable, models, option, seed, temperatures
from cluster.measure.measurement import AUTO, OFF, Begin, TimedAnswer
from cluster.measure.ours import ClusterClient, TenantRule
from cluster.measure.statistics import estimate, over
from cluster.measure.targets import COSTLY, target_config
from cluster.running import running
from cluster.training.acceptance import PROMPT_TOKENS

GUESSING = "proposed(15)"
"""The shape whose guesses are the prediction's and the lookup's alone."""
WORD = re.compile(r"[A-Za-z_]\w{2,}")
NONE = "none"


def renamed(text: str) -> str:
    """The text with another name in place of its most frequent identifier.

    >>> renamed("total = 0\\nfor each in found:\\n    total += each")
    'other_name = 0\\nfor each in found:\\n    other_name += each'
    """
    words = Counter(word for word in WORD.findall(text) if not keyword.iskeyword(word))
    if not words:
        return text
    return re.sub(rf"\b{words.most_common(1)[0][0]}\b", "other_name", text)


def changed_line(text: str) -> str:
    """The text with another line in place of the one in the middle.

    >>> changed_line("a = 1\\nb = 2\\nc = 3")
    'a = 1\\nchanged = None\\nc = 3'
    """
    lines = text.split("\n")
    lines[len(lines) // 2] = "changed = None"
    return "\n".join(lines)


CHANGES: Mapping[str, Callable[[str], str]] = {
    "the answer itself": lambda text: text,
    "an identifier renamed": renamed,
    "a line changed": changed_line,
}


@dataclass(frozen=True, slots=True)
class EditsOptions:
    prompts: int = option("Number of prompts.", 8, 1, least=1)
    tokens: int = option("New tokens of every answer.", 200, 32, least=8)
    temperatures: tuple[float, ...] = temperatures()
    seed: int = seed()
    models: Path = models()


async def measure(options: EditsOptions, begin: Begin) -> dict[str, Any]:
    prompts = held_out_prompts(options.prompts, PROMPT_TOKENS, load_tokenizer(options.models), options.models)
    ways = [(NONE, OFF), (NONE, GUESSING), (NONE, AUTO), *((name, row) for name in CHANGES for row in (GUESSING, AUTO))]
    step = begin("answers", len(options.temperatures) * len(prompts) * (1 + len(ways)))
    rows, differences = [], list[str]()
    async with (
        running(target_config(options.models, COSTLY), True) as address,
        AsyncClient(address, proxy=False) as client,
    ):
        ours = ClusterClient(client, TenantRule.ANSWERS)
        for temperature in options.temperatures:
            answers: dict[tuple[str, str], list[TimedAnswer]] = {way: [] for way in ways}  # one to each prompt
            for place, prompt in enumerate(prompts):
                asked = prompt.token_ids, temperature, options.seed + place, options.tokens
                truth = await ours.text(*asked)
                step()
                for way in ways[place % len(ways) :] + ways[: place % len(ways)]:
                    prediction = [CHANGES[way[0]](truth)] if way[0] in CHANGES else []
                    answers[way].append(await ours.answer(way[1], *asked, prediction))
                    step()
            off = answers[NONE, OFF]
            for (edit, name), found in answers.items():
                row = {
                    "temperature": temperature,
                    "prediction": edit,
                    "row": name,
                    "rate": estimate([each.tokens_per_second for each in found]),
                    "emitted": estimate([options.tokens / each.round_count for each in found]),
                }
                if name != OFF:
                    row["over_off"] = over([each.seconds for each in off], [each.seconds for each in found])
                rows.append(row)
                differences += [
                    f"{name}, {edit}, temperature {temperature:g}, {prompt.name}"
                    for prompt, each, plain in zip(prompts, found, off, strict=True)
                    if each.tokens != plain.tokens
                ]
    plan = {
        "tokens": options.tokens,
        "prompts": len(prompts),
        "answers": (len(ways) - 1) * len(options.temperatures) * len(prompts),
    }
    return {"plan": plan, "rows": rows, "differences": differences}


EDITS = Bench(
    "edits",
    "Measure answers of which a client sends a prediction that differs from them by an edit, next to answers without "
    "one. Exits with status 1 if an answer had other tokens than without speculation.",
    "Under a minute: one prompt, short answers.",
    EditsOptions,
    measure,
    facts=(
        f"{{prompts}} held-out passages of {PROMPT_TOKENS} tokens, answers of {{tokens}} tokens of the costly target, "
        "each of a tenant of its own; {answers} answers compared with those of off",
        "A prediction is the answer without speculation, itself or edited: what a client sends that wants this edit",
        f"{GUESSING} without a prediction has the guesses of prompt lookup alone",
    ),
    tables=(
        ReportTable(
            "Temperature {temperature:g}",
            "rows",
            "prediction; row; tokens/s = rate:.1f; over off = over_off:.2f; tokens a round = emitted:.2f",
        ),
    ),
    aims=(
        Aim(
            "{row} with a prediction over off, temperature {temperature:g}",
            "rows",
            "over_off",
            least=1.0,
            where=lambda row: row["prediction"] in CHANGES,
            why="prediction: {prediction}",
        ),
    ),
    plots=(
        Plot(
            "rows",
            "prediction",
            "over off = over_off",
            line="{row}",
            panel="Temperature {temperature:g}",
            where=lambda row: "over_off" in row,
        ),
    ),
    code=("cluster/bench/edits.py", "cluster/proposers"),
)
