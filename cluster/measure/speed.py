"""`dendro bench speed`: the plan, the measurement, and the rows computed from it."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product, zip_longest
from statistics import fmean, median
from typing import Any

from dendro.errors import EngineFailed

from cluster.measure.measurement import (
    AUTO,
    BASELINES,
    GENERATE,
    GREEDY_ROWS,
    GRIDS,
    LLAMA_CPP,
    LLAMA_CPP_FILE,
    LLAMA_CPP_ROWS,
    OFF,
    Step,
    TimedAnswer,
)
from cluster.measure.ours import ClusterClient
from cluster.measure.processes import ContenderProcess
from cluster.measure.report import Row
from cluster.measure.statistics import Key, estimate, lower_bound, paired_ratio, ratios_by_prompt

OWN = "own"
"""A user's target, among what is judged."""
COMPARED = (*BASELINES, LLAMA_CPP, LLAMA_CPP_FILE, OFF)
"""The rows to which the ratios of all others are reported."""


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """What is measured on one target."""

    target: str
    prompts: tuple[tuple[int, ...], ...]
    tokens: int  # new tokens of every answer, or the most where `lengths` has fewer
    temperatures: tuple[float, ...]
    repetitions: int
    shapes: tuple[str, ...]  # the configured shapes; neither `off` nor `auto`
    baselines: tuple[str, ...]
    seed: int
    judged: str = ""  # target whose aims are judged by the rows: OWN or COSTLY; empty: none
    choosing: tuple[tuple[int, ...], ...] = ()  # other prompts, on which the library's settings are chosen
    categories: tuple[str, ...] = ()  # category of each prompt; empty: prompts have none
    lengths: Mapping[tuple[int, int, float], int] = field(default_factory=dict)
    """New tokens by prompt, repetition and temperature, where answers stop at their ends."""

    @property
    def ours(self) -> tuple[str, ...]:
        return (OFF, *self.shapes, AUTO)

    @property
    def rows(self) -> tuple[str, ...]:
        return (*self.baselines, *self.ours)

    def rows_at(self, temperature: float) -> tuple[str, ...]:
        return self.rows if temperature == 0 else tuple(row for row in self.rows if row not in GREEDY_ROWS)

    def length(self, prompt: int, repetition: int, temperature: float) -> int:
        """New tokens of an answer."""
        return self.lengths.get((prompt, repetition, temperature), self.tokens)

    def half(self, prompt: int) -> int:
        """0 or 1: the prompts of each category alternate."""
        before = self.categories[:prompt].count(self.categories[prompt]) if self.categories else prompt
        return before % 2

    @property
    def passes(self) -> list[tuple[int, int]]:
        """Repetition and prompt of each pass over all rows: all prompts once before any is repeated."""
        return list(product(range(self.repetitions), range(len(self.prompts))))

    @property
    def answers(self) -> int:
        return len(self.passes) * sum(len(self.rows_at(temperature)) for temperature in self.temperatures)

    @property
    def chosen_rows(self) -> tuple[str, ...]:
        """The rows whose setting is chosen before anything is measured."""
        return tuple(row for row in self.baselines if row in GRIDS)

    @property
    def choosing_answers(self) -> int:
        """Number of answers by all settings at all temperatures, and one for warm-up."""
        settings = sum(len(GRIDS[row]) for row in self.chosen_rows)
        return settings * len(self.choosing) * len(self.temperatures) + bool(settings)

    def answer_seed(self, prompt: int, repetition: int) -> int:
        """One seed for all rows of a pair: all rows of ours must sample the same tokens."""
        return self.seed * 1_000_003 + repetition * 1009 + prompt

    def order(self, repetition: int, temperature: float, prompt: int) -> list[str]:
        """The rows in a seeded random order, so that no row always follows the same other one."""
        rows = list(self.rows_at(temperature))
        random.Random(f"{self.seed}/{self.target}/{repetition}/{temperature}/{prompt}").shuffle(rows)
        return rows


@dataclass(slots=True)
class Identity:
    """Whether ours answered with the same tokens in every way, at every temperature; `off` is the reference."""

    answers_compared: int = 0
    tokens_compared: int = 0
    differences: list[str] = field(default_factory=list)

    def compare(self, name: str, ours: Sequence[int], off: Sequence[int]) -> None:
        self.answers_compared += 1
        self.tokens_compared += len(off)
        if tuple(ours) != tuple(off):
            position = next(at for at, (mine, its) in enumerate(zip_longest(ours, off)) if mine != its)
            self.differences.append(f"{name}: token {position + 1} differs from that without speculation")

    def add(self, other: Identity) -> None:
        self.answers_compared += other.answers_compared
        self.tokens_compared += other.tokens_compared
        self.differences += other.differences

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"differing": str(len(self.differences))}


@dataclass(slots=True)
class SpeedResult:
    """All measurements of one target's plan."""

    plan: SpeedPlan
    answers: dict[tuple[str, float], dict[Key, TimedAnswer]] = field(default_factory=dict)  # key: row, temperature
    identity: Identity = field(default_factory=Identity)
    note: str = ""

    def names(self, temperature: float) -> list[str]:
        """The rows that were measured."""
        return [row for row in self.plan.rows_at(temperature) if (row, temperature) in self.answers]

    def rates(self, row: str, temperature: float) -> dict[Key, float]:
        return {key: answer.tokens_per_second for key, answer in self.answers[row, temperature].items()}


@dataclass(frozen=True, slots=True)
class Contenders:
    """Our cluster, and the library and llama.cpp where they can be used. While one answers, the others idle. A failure
    of one that is not ours leaves out its rows alone."""

    ours: ClusterClient
    others: Mapping[str, ContenderProcess] = field(default_factory=dict)  # row -> who answers it
    llama_facts: Mapping[str, Any] = field(default_factory=dict)  # version and instructions of its build
    left_out: dict[str, str] = field(default_factory=dict)  # rows that do not answer -> the reason
    best: dict[tuple[str, float], str] = field(default_factory=dict)  # row of GRIDS and temperature -> its setting

    async def choose(self, plan: SpeedPlan, step: Step) -> None:
        """Let every setting of the plan's rows in `GRIDS` answer the choosing prompts; `best` gets the one whose rate
        has the highest geometric mean. A plain answer comes first, as warm-up. `step` is called after each of
        `plan.choosing_answers` answers."""
        library = self.others[GENERATE]
        await library.answer(GENERATE, plan.choosing[0], 0.0, 0, plan.tokens)
        step()
        for temperature, row in product(plan.temperatures, plan.chosen_rows):
            rates: dict[str, float] = {}
            for setting in GRIDS[row]:
                logs = []
                for at, prompt in enumerate(plan.choosing):
                    request = prompt, temperature, plan.answer_seed(-1 - at, 0), plan.tokens
                    found = await library.answer(setting, *request)
                    logs.append(math.log(found.tokens_per_second))
                    step()
                rates[setting] = fmean(logs)
            self.best[row, temperature] = max(rates, key=lambda setting: rates[setting])

    async def answer(
        self, plan: SpeedPlan, row: str, prompt: int, temperature: float, repetition: int
    ) -> TimedAnswer | None:
        """Time an answer. None for a row that is left out, which it is from its first failure on."""
        if row in self.left_out:
            return None
        seed, tokens = plan.answer_seed(prompt, repetition), plan.length(prompt, repetition, temperature)
        request = (plan.prompts[prompt], temperature, seed, tokens)
        if row in plan.ours:
            return await self.ours.answer(row, *request)
        try:
            return await self.others[row].answer(self.best.get((row, temperature), row), *request)
        except EngineFailed as error:
            self.left_out[row] = str(error)
            return None


async def answer_lengths(plan: SpeedPlan, ours: ClusterClient, step: Step) -> dict[tuple[int, int, float], int]:
    """Number of tokens of each of the target's own answers, up to its end. All rows are then timed on as many."""
    found = {}
    for temperature, (repetition, at) in product(plan.temperatures, plan.passes):
        seed = plan.answer_seed(at, repetition)
        found[at, repetition, temperature] = await ours.length(plan.prompts[at], temperature, seed, plan.tokens)
        step()
    return found


async def measure(plan: SpeedPlan, contenders: Contenders, seconds: float, step: Step) -> SpeedResult:
    """Time every prompt at every temperature in every way, interleaved, and compare our answers with those of `off`.

    Ends early if the next pass would exceed `seconds`: all rows lose the same prompts, and `note` reports it. A row
    that is left out loses all its answers.
    """
    measured = SpeedResult(plan, {(row, each): {} for each in plan.temperatures for row in plan.rows_at(each)})
    passes, started = plan.passes, time.monotonic()
    for done, (repetition, prompt) in enumerate(passes):
        if done and (time.monotonic() - started) * (done + 1) / done > seconds:
            measured.note = f"the time limit ended the measurement after {done} of {len(passes)} passes over all rows"
            break
        for temperature in plan.temperatures:
            found = {}
            for row in plan.order(repetition, temperature, prompt):
                answer = await contenders.answer(plan, row, prompt, temperature, repetition)
                if answer is not None:
                    found[row] = measured.answers[row, temperature][prompt, repetition] = answer
                step()
            for row in plan.ours[1:]:
                name = f"{plan.target}, {row}, prompt {prompt + 1}, temperature {temperature:g}"
                measured.identity.compare(name, found[row].tokens, found[OFF].tokens)
    measured.answers = {key: found for key, found in measured.answers.items() if key[0] not in contenders.left_out}
    return measured


def equal_answers(measured: SpeedResult, row: str, temperature: float) -> str:
    """How many of a row's answers have the tokens of `generate`. Other arithmetic than the target's may round to
    another of two tokens that are almost equally likely."""
    answers, reference = (measured.answers[each, temperature] for each in (row, GENERATE))
    same = sum(answer.tokens == reference[key].tokens for key, answer in answers.items())
    return f"{same} of {len(answers)}"


def _by_prompt(values: Mapping[Key, float]) -> list[float]:
    """The mean of each prompt's repetitions."""
    groups: dict[int, list[float]] = {}
    for (prompt, _), value in values.items():
        groups.setdefault(prompt, []).append(value)
    return [fmean(group) for group in groups.values()]


def over_best_arm(measured: SpeedResult, temperature: float) -> Row:
    """The policy's rates over those of the best fixed arm, each half of the prompts with the arm that was best on the
    other half: an arm chosen on the prompts that it is compared on has their luck. `arms`: the two arms. Empty where no
    fixed arm was measured."""
    if not measured.plan.shapes:
        return {}
    rates = {row: measured.rates(row, temperature) for row in measured.plan.ours}
    fixed: dict[Key, float] = {}
    arms: list[str] = []
    for half in (0, 1):
        compared = [key for key in rates[AUTO] if measured.plan.half(key[0]) == half]
        others = rates[AUTO].keys() - set(compared)
        if not compared or not others:
            return {}
        means = {row: fmean(math.log(found[key]) for key in others) for row, found in rates.items() if row != AUTO}
        arms.append(max(means, key=lambda row: means[row]))
        fixed |= {key: rates[arms[-1]][key] for key in compared}
    chosen = " and ".join(dict.fromkeys(arms))
    return {"over_best_arm": paired_ratio(rates[AUTO], fixed).as_json() | {"arms": arms}, "best_arms": chosen}


def _round_split(answers: Mapping[Key, TimedAnswer]) -> Row:
    """Medians over prompts of the mean round's parts and of the hops' share, and each shape's share of the rounds.

    `kept`: the rate after the first chunk over the tokens of a round / (draft + verify): what no hop or wait takes. Of
    answers with two rounds or more; left out if there are none, as all fields are without times of rounds."""
    rounds = {key: answer.rounds for key, answer in answers.items() if answer.rounds is not None}
    if not rounds:
        return {}
    shapes, kept = Counter[str](), dict[Key, float]()
    for key, each in rounds.items():
        shapes.update(each.shapes)
        answer = answers[key]
        if (rate := answer.decode_tokens_per_second) is not None:
            emitted = (len(answer.tokens) - answer.first_tokens) / (answer.round_count - 1)
            kept[key] = rate * (each.draft_ms + each.verify_ms) / 1000 / emitted
    parts = {
        part: {key: getattr(each, f"{part}_ms") for key, each in rounds.items()}
        for part in ("draft", "verify", "queue", "hop", "total")
    }
    return {
        "round_ms": {part: round(median(_by_prompt(values)), 3) for part, values in parts.items()},
        "hop_share": estimate(_by_prompt({key: each.hop_ms / each.total_ms for key, each in rounds.items()})),
        "arms": {shape: round(count / shapes.total(), 4) for shape, count in shapes.most_common()},
    } | ({"kept": estimate(_by_prompt(kept))} if kept else {})


def figures_of(answers: Mapping[Key, TimedAnswer]) -> Row:
    """The fields that rows of all prompts and rows of a category have."""
    tokens = sum(len(answer.tokens) for answer in answers.values())
    return {
        "prompts": len({prompt for prompt, _ in answers}),
        "answer_tokens": round(tokens / len(answers), 1),
        "tokens_per_second": estimate(_by_prompt({key: each.tokens_per_second for key, each in answers.items()})),
        "emitted_per_round": round(tokens / sum(answer.round_count for answer in answers.values()), 3),
    }


def rows_of(measured: SpeedResult) -> Iterator[Row]:
    """One report row for each row of the plan at each temperature."""
    plan = measured.plan
    for temperature in plan.temperatures:
        names = measured.names(temperature)
        for name in names:
            answers = measured.answers[name, temperature]
            rates = measured.rates(name, temperature)
            decode = [rate for answer in answers.values() if (rate := answer.decode_tokens_per_second) is not None]
            row: Row = {
                "name": name,
                "target": plan.target,
                "judged": plan.judged,
                "temperature": temperature,
                "answers": len(answers),
                **figures_of(answers),
                "decode_tokens_per_second": round(median(decode), 2) if decode else None,
                "first_token_ms": round(1000 * median(answer.first_seconds for answer in answers.values()), 2),
                "ratio_over": {
                    other: paired_ratio(rates, measured.rates(other, temperature)).as_json()
                    for other in COMPARED
                    if other in names and other != name
                },
            }
            if name in LLAMA_CPP_ROWS and temperature == 0 and GENERATE in names:
                row["equal_to_generate"] = equal_answers(measured, name, temperature)
            row |= _round_split(answers)
            if name == AUTO:
                ratios = ratios_by_prompt(rates, measured.rates(OFF, temperature))
                row |= {"over_off_at_least": lower_bound(ratios).as_json()} | over_best_arm(measured, temperature)
                over = {each: row["ratio_over"][each] for each in BASELINES if each in row["ratio_over"]}
                if over:
                    closest = min(over, key=lambda each: float(over[each]["low"]))
                    row |= {"over_library": over[closest], "closest": closest}
            yield row


def categories_of(measured: SpeedResult) -> Iterator[Row]:
    """One row for each category, temperature and row of the plan; none where prompts have no categories."""
    plan = measured.plan
    for temperature in plan.temperatures:
        for category in dict.fromkeys(plan.categories):
            for name in measured.names(temperature):
                own = [key for key in measured.rates(name, temperature) if plan.categories[key[0]] == category]
                if not own:
                    continue
                rates, off = ({key: measured.rates(row, temperature)[key] for key in own} for row in (name, OFF))
                yield {
                    "category": category or "none",
                    "target": plan.target,
                    "temperature": temperature,
                    "name": name,
                    "over_off": paired_ratio(rates, off).as_json(),
                    **figures_of({key: measured.answers[name, temperature][key] for key in own}),
                }
