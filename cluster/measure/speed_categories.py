"""The rows of `dendro bench speed` by category of prompts, as rows, table and plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.measure.measurement import AUTO, LLAMA_CPP, LLAMA_CPP_FILE, OFF
from cluster.measure.report import Cells, Row, interval, medians, number
from cluster.measure.speed import SpeedResult
from cluster.measure.statistics import median_estimate, paired_ratio

PLOTTED = {LLAMA_CPP_FILE: "#9db4d3", LLAMA_CPP: "#4a6fa5", OFF: "#b8b8b8", AUTO: "#2a7f62"}


def categories_of(measured: SpeedResult) -> Iterator[Row]:
    """One row for each category, temperature and row of the plan; none where prompts have no categories."""
    plan = measured.plan
    for temperature in plan.temperatures:
        for category in dict.fromkeys(plan.categories):
            for name in measured.names(temperature):
                rates, off = (
                    {
                        key: rate
                        for key, rate in measured.rates(row, temperature).items()
                        if plan.categories[key[0]] == category
                    }
                    for row in (name, OFF)
                )
                if not rates:
                    continue
                answers = [measured.answers[name, temperature][key] for key in rates]
                tokens = sum(len(answer.tokens) for answer in answers)
                yield {
                    "category": category,
                    "target": plan.target,
                    "temperature": temperature,
                    "name": name,
                    "prompts": len({prompt for prompt, _ in rates}),
                    "answer_tokens": round(tokens / len(answers), 1),
                    "tokens_per_second": median_estimate(list(rates.values())).as_json(),
                    "over_off": paired_ratio(rates, off).as_json(),
                    "emitted_per_round": round(tokens / sum(answer.round_count for answer in answers), 3),
                }


def category_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Cells:
    """A column for each category: the rate without speculation, and every other row over it."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    by_name = {
        name: [row for row in rows if row["name"] == name] for name in dict.fromkeys(row["name"] for row in rows)
    }
    off, auto = by_name.pop(OFF), by_name[AUTO]
    cells = [
        ("prompts", *(str(row["prompts"]) for row in off)),
        ("tokens of an answer", *(number(row["answer_tokens"], 0) for row in off)),
        ("off, tokens/s", *(number(row["tokens_per_second"]["median"], 1) for row in off)),
        *((f"{name} over off", *(number(row["over_off"]["median"]) for row in mine)) for name, mine in by_name.items()),
        ("its 90 %", *(interval(row["over_off"]) for row in auto)),
        ("auto, tokens a round", *(number(row["emitted_per_round"]) for row in auto)),
    ]
    return f"{title}: by category", ("", *(category or "none" for category in categories)), cells


def plot_categories(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars of tokens per second for each category."""
    names = [name for name in PLOTTED if any(row["name"] == name for row in rows)]
    categories = list(dict.fromkeys(row["category"] for row in rows))[::-1]
    height = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        found = {row["category"]: row["tokens_per_second"] for row in rows if row["name"] == name}
        middles, reach = medians(found[category] for category in categories)
        at = [place + index * height for place in range(len(categories))]
        axis.barh(at, middles, height, xerr=reach, color=PLOTTED[name], ecolor="black", capsize=2, label=name)
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(categories))], categories)
    axis.set_xlabel("tokens per second (median and 90 % interval)")
    if names:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names), frameon=False, fontsize=8)
