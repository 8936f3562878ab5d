"""The measurements of a tuning: the drafter's ranks of the target's tokens, and the costs of rounds.

Target and drafter share their noise, so at every temperature the target's text does not depend on any tree. The rank of
each of its tokens among the drafter's candidates therefore determines which guesses of a tree of fixed form are
accepted (docs/design/policies.md#rank-replay); rounds that are run must agree with that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
import torch
from dendro.answer import SpeculationStats
from dendro.client import AsyncClient
from dendro.errors import BadRequest, EngineFailed
from dendro.shapes import TreeShape
from dendro.text import Finish, Sampling

from cluster.config import DrafterConfig
from cluster.policies.replay import round_lengths
from cluster.policies.sequoia import forwarded_rows
from cluster.policies.step_time import TargetSteps, nonnegative_fit
from drafter_service.models import load_model
from drafter_service.options import DTYPES
from drafter_service.plan import EMPTY_TEXT, Chains, DraftPlan
from drafter_service.runner import DraftRunner

CHUNK = 256
"""Tokens of a text that the drafter processes at once."""


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """An answer and its rounds."""

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]  # tokens of each round
    speculation: SpeculationStats

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: without the first round. 0 if there is no other."""
        return self.speculation.tokens_per_s

    @property
    def round_us(self) -> float | None:
        """Mean time of the rounds after the first, which waits for the prefill. None if there are none."""
        rounds = self.speculation.rounds - 1
        return self.speculation.decode_us / rounds if rounds > 0 else None


class Strangers:
    """Sends every request as a tenant of its own: proposers remember a tenant's answers, and each prompt is answered in
    several ways."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._tenants = 0

    async def answer(
        self, model: str, prompt: Sequence[int], sampling: Sampling, tokens: int, speculation: str
    ) -> RunAnswer:
        """Generate at most `tokens` tokens after a prompt. Raises EngineFailed for another number that does not end the
        text."""
        self._tenants += 1
        async with AsyncClient(self._address, tenant=f"tune-{self._tenants}", proxy=False) as client:
            done = await client.generate_text(
                prompt,
                model=model,
                temperature=sampling.temperature,
                seed=sampling.seed,
                max_new_tokens=tokens,
                speculation=speculation,
            )
        ended = done.complete.finish is Finish.END_OF_TEXT
        if len(done.token_ids) != tokens and not (ended and len(done.token_ids) < tokens):
            raise EngineFailed(f"{speculation}: {len(done.token_ids)} tokens instead of {tokens}")
        lengths = tuple(len(part.token_ids) for part in done.rounds)
        return RunAnswer(done.token_ids, lengths, done.complete.speculation)


class Ranker:
    """The drafter, loaded in this process. It orders candidates as in service: scaled logits plus the shared noise."""

    def __init__(self, drafter: DrafterConfig, device: str, width: int) -> None:
        """width: the candidates that are ranked. Raises BadRequest for a checkpoint that cannot be used."""
        dtype = DTYPES[drafter.dtype]
        place = torch.device(device)
        model, _ = load_model(drafter.checkpoint, dtype, place, drafter.tokenizer)
        if width > model.vocabulary:
            raise BadRequest("max_children", f"{width}; the vocabulary has {model.vocabulary} tokens")
        self._runner = DraftRunner(model, 2, 1, place)
        self._width = width

    @torch.inference_mode()
    def ranks(self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> list[int]:
        """The rank of every answer token among the candidates, given the true text before it; `width` if it is none."""
        ids = np.array([*prompt, *answer], np.int64)
        self._runner.admit(0, sampling, self._runner.vocabulary)
        found: list[int] = []
        slot, last = EMPTY_TEXT, len(ids) - 1
        for start in range(0, last, CHUNK):
            stop = min(start + CHUNK, last)
            guessed = np.arange(max(start + 1, len(prompt)), stop + 1)  # positions that this chunk has candidates for
            rows = Chains(
                tokens=ids[None, start:stop],
                lengths=np.array([stop - start]),
                starts=np.array([start]),
                source=np.array([slot]),
                target=np.array([1]),
                roots=np.zeros(0, np.int64),
            )
            plan = DraftPlan(
                rows,
                scored=guessed - 1 - start,
                groups=[1] * len(guessed),
                sessions=[0] * len(guessed),
                positions=guessed.tolist(),
                width=self._width,
            )
            outcome, slot = self._runner.run(plan), 1
            if len(guessed):
                hits = outcome.candidates == ids[guessed, None]
                found += np.where(hits.any(1), hits.argmax(1), self._width).tolist()
        self._runner.forget(0)
        return found


def replayed(traces: Sequence[Sequence[int]], shape: TreeShape) -> float | None:
    """Tokens per round if every round drafts a tree of fixed form; None if no round fits into a trace.

    Rounds that the trace's end could cut short are not counted.
    """
    lengths = [length for trace in traces for length in round_lengths(shape, trace)]
    return fmean(lengths) if lengths else None


def whole_rounds(answer: RunAnswer, shape: TreeShape) -> list[int]:
    """Tokens of each round that the answer's end could not cut short, as in `round_lengths`."""
    lengths, position = [], 0
    for length in answer.lengths:
        if position + shape.depth >= len(answer.tokens):
            break
        lengths.append(length)
        position += length
    return lengths


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Linear costs in microseconds. A draft takes `draft_us`, `level_us` for each forward and `row_us` for each of its
    rows; a step takes `step_us`, and `step_row_us` for each row, padding included. `hops_us` is the rest of a round
    with a draft, `off_hops_us` of one without.
    """

    draft_us: float
    level_us: float
    row_us: float
    step_us: float
    step_row_us: float
    hops_us: float
    off_hops_us: float
    target: TargetSteps

    def level(self, rows: int) -> float:
        """Microseconds of a drafter's forward of `rows` rows."""
        return self.level_us + self.row_us * rows

    def step(self, rows: int) -> float:
        """A verifier's step of so many rows, which are padded."""
        return self.step_us + self.step_row_us * self.target.padded(rows)

    @property
    def fixed_us(self) -> float:
        """The part of a round with a draft that does not depend on its tree."""
        return self.draft_us + self.hops_us

    def round_us(self, shape: TreeShape) -> float:
        """A round with a tree of fixed form, or with `off`."""
        if shape.off:
            return self.step(1) + self.off_hops_us
        return self.fixed_us + sum(map(self.level, forwarded_rows(shape))) + self.step(shape.rows)

    @property
    def cost_ratio(self) -> float:
        """Leviathan's c: the cost of a drafter's forward of one row over that of a step without guesses."""
        return self.level(1) / self.step(1)


@dataclass(frozen=True, slots=True)
class Timed:
    """The parts of a shape's mean round in microseconds: medians over answers."""

    draft_us: float
    verify_us: float
    round_us: float
    queue_us: float

    @property
    def hops_us(self) -> float:
        return max(self.round_us - self.draft_us - self.verify_us - self.queue_us, 0.0)

    @classmethod
    def of(cls, answers: Sequence[RunAnswer]) -> Timed | None:
        """None if no answer had more than one round."""
        kept = [(answer.speculation, answer.round_us) for answer in answers if answer.round_us is not None]
        if not kept:
            return None
        return cls(
            median(stats.draft_us / stats.timed_rounds for stats, _ in kept),
            median((stats.verify_us + stats.ahead_us) / stats.timed_rounds for stats, _ in kept),
            median(us for _, us in kept if us is not None),
            median(stats.queue_us / stats.timed_rounds for stats, _ in kept),
        )


def costs_of(timed: Mapping[TreeShape, Timed], target: TargetSteps) -> LinearCosts:
    """The costs that fit the timed shapes best by least squares, none negative.

    Raises BadRequest if the shapes have fewer than two depths or two padded row counts, or `off` is not among them.
    """
    trees = {shape: each for shape, each in timed.items() if not shape.off}
    plain = next((each for shape, each in timed.items() if shape.off), None)
    buckets = {target.padded(shape.rows) for shape in timed}
    depths = {shape.depth for shape in trees}
    if plain is None or len(buckets) < 2 or len(depths) < 2:
        raise BadRequest("max_rows", "and max_depth of the target leave too few shapes to time; raise them")
    forwards = {shape: forwarded_rows(shape) for shape in trees}
    draft_us, level_us, row_us = nonnegative_fit(
        [[1.0, len(forwards[shape]), sum(forwards[shape])] for shape in trees],
        [each.draft_us for each in trees.values()],
    )
    step_us, step_row_us = nonnegative_fit(
        [[1.0, target.padded(shape.rows)] for shape in timed], [each.verify_us for each in timed.values()]
    )
    hops = median(each.hops_us for each in trees.values())
    return LinearCosts(draft_us, level_us, row_us, step_us, step_row_us, hops, plain.hops_us, target)
