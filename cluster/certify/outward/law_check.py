"""The check of draws at temperatures above zero, against the law of the reference or of the server's own
log-probabilities."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch

from cluster.certify.asking import SamplingLaw
from cluster.certify.law import Law, expected_law
from cluster.certify.outward.draws import (
    BIAS,
    FAMILY_ERROR,
    POWER,
    DrawCounts,
    adjusted,
    draws_for_bias,
    p_value,
    pooled,
)
from cluster.certify.outward.reference import Reference
from cluster.certify.outward.served import NotOffered, OpenAIServer, ServedAnswer, ServedPrompt
from cluster.certify.promises import Promise
from cluster.measure.measurement import Begin, Step
from cluster.router.tokenizer import INCOMPLETE

CELLS = 5
"""Likeliest tokens that have a cell each."""
WANTED_CHANCE = 0.6
"""Chance of the likeliest token at the places that are chosen: there its bias shows with few draws."""
SURE = 0.85
"""Least chance of the first token where the second is of interest."""
SEED_STEP = 1009
"""Difference of the seeds of two requests; some servers give the answers of one request its seed and the next ones."""
LEAST_GAP, LEAST_MARGIN = 0.5, 0.03
"""How clearly a top-k (in log-probability) and a top-p (in probability) cut, so that no arithmetic moves the cut."""
REPORTED_TOLERANCE = 0.002
"""Tolerance of laws that are made of the log-probabilities that the server gave with its draws."""
PLAIN, LOWEST = SamplingLaw(1.0), 0.7
"""The law of most draws, and the temperature of others."""


@dataclass(frozen=True, slots=True)
class LawPlace:
    """A prompt and the reference's law after it."""

    prompt: ServedPrompt
    logprobs: torch.Tensor  # [V] float64


@dataclass(slots=True)
class PlaceDraws:
    """Tokens drawn after one text, in its cells, with the log-probabilities that came with them."""

    ids: tuple[int, ...]  # the text
    logprobs: torch.Tensor  # [V] the reference's
    cells: tuple[int, ...]  # the tokens that have a cell
    names: dict[str, int]  # texts of these, each with its cell
    counts: list[int]  # draws of each cell; the last is that of all other tokens
    reports: int = 0  # draws that came with log-probabilities
    reported: list[int] = field(default_factory=list)  # by cell: log-probabilities of its token
    sums: list[float] = field(default_factory=list)  # by cell: sum of the laws' probabilities of the cell

    @classmethod
    def after(cls, reference: Reference, ids: Sequence[int], logprobs: torch.Tensor) -> PlaceDraws:
        """No draws yet. The likeliest tokens that have a text of their own get a cell."""
        cells: list[int] = []
        names: dict[str, int] = {}
        for token in logprobs.topk(min(2 * CELLS, len(logprobs))).indices.tolist():
            texts = {reference.token_text(token), reference.text_after(ids, [token])}
            if token in reference.end_ids or any(not each or INCOMPLETE in each or each in names for each in texts):
                continue
            names |= dict.fromkeys(texts, len(cells))
            cells.append(token)
            if len(cells) == CELLS:
                break
        none = [0] * len(cells)
        return cls(tuple(ids), logprobs, tuple(cells), names, [*none, 0], 0, none, [0.0] * len(cells))

    def add(self, text: str, tops: dict[str, float] | None) -> None:
        """Count a draw. tops: log-probabilities that were given with it"""
        self.counts[self.names.get(text, len(self.cells))] += 1
        if tops is None:
            return
        self.reports += 1
        for name, value in tops.items():
            if (cell := self.names.get(name)) is not None:
                self.reported[cell] += 1
                self.sums[cell] += math.exp(min(value, 0.0))

    def served_law(self) -> torch.Tensor | None:
        """The server's own law: the logarithms [V] of the reference's probabilities, with the mean reported ones in the
        cells that came with every draw. The other cells are given up. None where the likeliest token's did not."""
        if not self.reports or not self.cells or self.reported[0] != self.reports:
            return None
        kept = [cell for cell, times in enumerate(self.reported) if times == self.reports]
        means = torch.tensor([self.sums[cell] / self.reports for cell in kept], dtype=torch.float64)
        rest = sum(self.counts) - sum(self.counts[cell] for cell in kept)
        place = {cell: new for new, cell in enumerate(kept)}
        self.names = {name: place[cell] for name, cell in self.names.items() if cell in place}
        self.counts = [*(self.counts[cell] for cell in kept), rest]
        self.cells = tuple(self.cells[cell] for cell in kept)
        law = self.logprobs.exp()
        law[list(self.cells)] = 0.0
        law *= (1 - means.sum()).clamp(min=1e-12) / law.sum().clamp(min=1e-300)
        law[list(self.cells)] = means
        return law.log()


def places_of(reference: Reference, passages: Sequence[Sequence[int]], each: int) -> list[LawPlace]:
    """Places in passages where a bias shows well: `each` where the first token's likeliest has about WANTED_CHANCE, and
    as many where the first is almost sure and the second's has it."""
    first: list[tuple[float, int, int]] = []
    second: list[tuple[float, int, int]] = []
    laws: list[torch.Tensor] = []
    for number, ids in enumerate(passages):
        begin = max(len(ids) // 2, 1)
        laws.append(reference.logprobs(ids, begin))
        best = laws[-1].max(-1)
        chances = best.values.exp().tolist()
        for place, chance in enumerate(chances):
            first.append((abs(chance - WANTED_CHANCE), number, begin + place))
            follows = place + 1 < len(chances) and int(best.indices[place]) == ids[begin + place]
            if follows and chance >= SURE:
                second.append((abs(chances[place + 1] - WANTED_CHANCE), number, begin + place))
    found: list[LawPlace] = []
    for ranked in (sorted(first), sorted(second)):
        chosen: set[int] = set()  # one place of a passage
        for _, number, place in ranked:
            ids = passages[number][:place]
            prompt = None if number in chosen or len(chosen) == each else reference.prompt_of_ids(ids)
            if prompt is not None and all(one.prompt.ids != prompt.ids for one in found):
                chosen.add(number)
                found.append(LawPlace(prompt, laws[number][place - max(len(passages[number]) // 2, 1)]))
    return found


def whole_prompts(reference: Reference, prompts: Sequence[ServedPrompt], each: int) -> list[LawPlace]:
    """Places after whole prompts, for a server of chats alone."""
    found = [LawPlace(prompt, reference.logprobs(prompt.ids, len(prompt.ids))[0]) for prompt in prompts]
    return sorted(found, key=lambda place: abs(float(place.logprobs.max().exp()) - WANTED_CHANCE))[: 2 * each]


class LawCheck:
    """(b) Draws from a server at temperatures above zero follow the law."""

    def __init__(
        self,
        server: OpenAIServer,
        reference: Reference,
        places: Sequence[LawPlace],
        tolerance: float,
        in_time: Callable[[], bool],
        begin: Begin,
    ) -> None:
        """tolerance: of the law's log-probabilities, where the server does not give its own   in_time: False once no
        more draws are to be asked for"""
        self.server, self.reference, self.places, self.tolerance = server, reference, places, tolerance
        self.promise = Promise("(b) draws follow the law")
        self._seeds = count(1, SEED_STEP)
        self._in_time, self._late = in_time, False
        self._begin = begin
        self._step: Step = lambda: None
        self._tests: list[tuple[DrawCounts, float]] = []  # each with its tolerance

    async def run(self, draws: int, further: int) -> Promise:
        """Run the check. draws: number at temperature 1, at each place   further: by other laws, at two places"""
        if not self.places:
            self.promise.why = "no prompt's law has a likeliest token that could be biased"
            return self.promise
        self._step = self._begin("(b) draws", draws * len(self.places) + 3 * further * min(2, len(self.places)))
        first: list[DrawCounts] = []
        second: list[DrawCounts] = []
        laws: list[tuple[torch.Tensor, float]] = []
        for number, place in enumerate(self.places, 1):
            drawn, after = await self._plain_draws(place, draws)
            if not any(drawn.counts):
                break
            laws.append(self._law_of(drawn))
            first.append(self._test(f"temperature 1, prompt {number}, first token", drawn, PLAIN, *laws[-1]))
            if after is not None and any(after.counts):
                token = self.reference.token_text(after.ids[-1])
                what = f"temperature 1, prompt {number}, second token after {token!r}"
                second.append(self._test(what, after, PLAIN, *self._law_of(after)))
        for what, found in (("first", first), ("second", second)):
            if len(found) > 1:
                one = pooled(f"temperature 1, {what} tokens, the likeliest of all {len(found)} laws together", found)
                self._tests.append((one, max(tolerance for _, tolerance in laws)))
        if not self.server.offer.names_tokens:
            self.promise.found.append("not offered: second tokens; answers do not say which tokens they are made of")
        for number in range(min(2, len(laws))):
            await self._other_laws(number, *laws[number], further)
        late = "the limit of time was reached: raise --time-limit, or ask for less (--samples)"
        if not self._tests:
            self.promise.why = late
            return self.promise
        self._judge()
        if self._late:
            self.promise.found.append(f"ended before all draws: {late}")
        return self.promise

    def _law_of(self, drawn: PlaceDraws) -> tuple[torch.Tensor, float]:
        """Log-probabilities [V] that draws are tested against, and their tolerance: the server's own law
        (`served_law`) if it reports one, else the reference's."""
        served = drawn.served_law()
        return (drawn.logprobs, self.tolerance) if served is None else (served, REPORTED_TOLERANCE)

    async def _plain_draws(self, place: LawPlace, draws: int) -> tuple[PlaceDraws, PlaceDraws | None]:
        """First tokens, and second tokens after the likeliest first one."""
        ids, reference = place.prompt.ids, self.reference
        drawn = PlaceDraws.after(reference, ids, place.logprobs)
        after: PlaceDraws | None = None
        if self.server.offer.names_tokens and drawn.cells:
            longer = [*ids, drawn.cells[0]]
            logprobs = (await asyncio.to_thread(reference.logprobs, longer, len(longer)))[0]
            after = PlaceDraws.after(reference, longer, logprobs)
        for answer in await self._drawn(place.prompt, draws, PLAIN, 2 if after is not None else 1):
            texts = self._texts(answer)
            drawn.add(texts[0] if texts else "", _tops(answer, 0))
            if after is not None and texts and drawn.names.get(texts[0]) == 0:
                after.add(texts[1] if len(texts) > 1 else "", _tops(answer, 1))
        return drawn, after

    def _texts(self, answer: ServedAnswer) -> list[str]:
        """The texts of an answer's tokens; of an answer that does not name them, its text."""
        if answer.token_ids is not None:
            return [self.reference.token_text(token) for token in answer.token_ids]
        return list(answer.tokens) if answer.tokens is not None else [answer.text]

    async def _drawn(self, prompt: ServedPrompt, draws: int, law: SamplingLaw, tokens: int) -> list[ServedAnswer]:
        """`draws` answers or some more; each request has a seed of its own, where the server takes one."""
        fields = {"temperature": law.temperature, "top_p": law.top_p, "max_tokens": tokens}
        fields |= {"top_k": law.top_k} if law.top_k else {}
        samples = self.server.offer.samples

        found: list[ServedAnswer] = []
        left = iter(range(-(-draws // samples)))

        async def ask() -> None:
            for _ in left:
                if not self._in_time():
                    self._late = True
                    return
                seed = {"seed": next(self._seeds)} if self.server.offer.seed else {}
                many = {"n": samples} if samples > 1 else {}
                for answer in await self.server.answers(prompt, **fields, **seed, **many):
                    found.append(answer)
                    self._step()

        await asyncio.gather(*(ask() for _ in range(self.server.at_once)))
        self.promise.answers += len(found)
        self.promise.tokens_compared += len(found) * tokens
        return found

    def _test(
        self, what: str, drawn: PlaceDraws, law: SamplingLaw, logits: torch.Tensor, tolerance: float
    ) -> DrawCounts:
        made = DrawCounts(what, np.array(drawn.counts), _in_cells(logits, drawn.cells, law))
        self._tests.append((made, tolerance / law.temperature))
        return made

    async def _other_laws(self, number: int, logits: torch.Tensor, tolerance: float, draws: int) -> None:
        """Another temperature and cuts at one place, whose law at temperature 1 is known."""
        place = self.places[number]
        for law in (SamplingLaw(LOWEST), *_clear_cuts(logits.log_softmax(-1))):
            drawn = PlaceDraws.after(self.reference, place.prompt.ids, place.logprobs)
            try:
                answers = await self._drawn(place.prompt, draws, law, 1)
            except NotOffered as error:
                self.promise.found.append(f"not offered: {law}, prompt {number + 1}: {error}")
                continue
            for answer in answers:
                texts = self._texts(answer)
                drawn.add(texts[0] if texts else "", None)
            if answers:
                self._test(f"{law}, prompt {number + 1}, first token", drawn, law, logits, tolerance)

    def _judge(self) -> None:
        family = len(self._tests)
        found = adjusted([p_value(draws, tolerance, family) for draws, tolerance in self._tests])
        promise = self.promise
        for (draws, tolerance), p in zip(self._tests, found, strict=True):
            chance, share = draws.chances[0], draws.counts[0] / max(draws.draws, 1)
            needed = draws_for_bias(draws.chances, tolerance, family)
            enough = needed is not None and needed <= draws.draws
            few = f" takes {needed:,}" if needed is not None and not enough else ""
            power = f"showing {chance * BIAS:.1%}{few}" if needed is not None else "no number shows 5 % more"
            line = f"{draws.what}: {draws.draws:,} draws ({power}), the likeliest {share:.2%} for {chance:.2%}"
            promise.check(p > FAMILY_ERROR, f"{line}, p = {p:.2g}")
        largest = max(tolerance for _, tolerance in self._tests)
        whose = "the reference's float32 law"
        if largest <= REPORTED_TOLERANCE / LOWEST:
            whose = "the law of the log-probabilities that came with the draws"
        promise.found.append(
            f"{family} tests against {whose}, within {largest:.2g} in log-probability: a server within it fails one "
            f"run in {1 / FAMILY_ERROR:,.0f}; p by Holm's rule; a likeliest token drawn {BIAS - 1:.0%} too often "
            f"shows with probability {POWER:.0%}"
        )
        if promise.broken:
            promise.found.append(
                "where the server has cuts or penalties of its own, send its fields for none: --fields"
            )


def _tops(answer: ServedAnswer, place: int) -> dict[str, float] | None:
    return dict(answer.tops[place]) if place < len(answer.tops) else None


def _in_cells(logits: torch.Tensor, cells: Sequence[int], law: SamplingLaw) -> Law:
    whole = expected_law(logits, law.temperature, law.top_k, law.top_p)
    tops = whole[list(cells)]
    return np.concatenate([tops, [max(1 - float(tops.sum()), 0.0) if len(tops) < np.count_nonzero(whole) else 0.0]])


def _clear_cuts(logprobs: torch.Tensor) -> Iterator[SamplingLaw]:
    """A top-p and a top-k that cut the law clearly between two tokens, where there are such."""
    best = logprobs.sort(descending=True).values[: CELLS + 1]
    added = best.exp().cumsum(0).tolist()
    ends = [(added[at] - added[at - 1], (added[at] + added[at - 1]) / 2) for at in range(1, CELLS)]
    margin, middle = max(ends)
    if margin / 2 >= LEAST_MARGIN and round(middle, 3) < 1:
        yield SamplingLaw(1.0, 0, round(middle, 3))
    gaps = [(float(best[at - 1] - best[at]), at) for at in range(2, CELLS + 1)]
    gap, at = max(gaps)
    if gap >= LEAST_GAP:
        yield SamplingLaw(1.0, at)
