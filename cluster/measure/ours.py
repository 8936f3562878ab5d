"""Measures the answers of a running cluster at its client."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Unpack, cast

from dendro.answer import Completion, Event, Round, SpeculationStats, collect_stream
from dendro.client import Asking, AsyncClient
from dendro.errors import EngineFailed
from dendro.options import Options

from cluster.measure.measurement import OFF, RoundTimes, TimedAnswer


def mean_round(stats: SpeculationStats) -> RoundTimes | None:
    """The mean round of an answer; None for fewer than two rounds."""
    if stats.rounds < 2:
        return None
    return RoundTimes(
        total_ms=stats.decode_us / (stats.rounds - 1) / 1000,
        draft_ms=stats.draft_us / stats.timed_rounds / 1000,
        verify_ms=(stats.verify_us + stats.ahead_us) / stats.timed_rounds / 1000,
        queue_ms=stats.queue_us / stats.timed_rounds / 1000,
        shapes=stats.rounds_by_shape,
    )


class TenantRule(StrEnum):
    """The tenant of each answer of a bench. What a router learns of a tenant's texts is used for that tenant alone."""

    ANSWERS = "answers"
    """Each answer has a tenant of its own."""
    ROWS = "rows"
    """A row has one tenant; when it answers a request again, another, which has not seen the answer."""


class TenantClients:
    """Gives the client for each answer of a bench, by a rule of tenants; without a rule, always the same client."""

    def __init__(self, client: Asking, rule: TenantRule | None) -> None:
        """rule: needs an AsyncClient"""
        self._client = client
        self._rule = rule
        self._times: Counter[object] = Counter()  # number of times that a row has answered a request

    def client_for(self, row: str, request: object) -> Asking:
        if self._rule is None:
            return self._client
        key = None if self._rule is TenantRule.ANSWERS else (row, request)
        self._times[key] += 1
        return cast(AsyncClient, self._client).for_tenant(f"{row if key else 'answer'} {self._times[key]}")


async def timed(client: Asking, prompt: Sequence[int], **options: Unpack[Options]) -> tuple[Completion, list[float]]:
    """An answer, and the times of its call and of each of its rounds."""
    times = [time.perf_counter()]

    def note(event: Event) -> None:
        if isinstance(event, Round):
            times.append(time.perf_counter())

    return await collect_stream(client.generate(prompt, **options), note), times


class ClusterClient:
    """Answers over the public gRPC API: times include the client's and the router's hops."""

    def __init__(self, client: AsyncClient, rule: TenantRule | None = None) -> None:
        self._clients = TenantClients(client, rule)

    async def length(self, prompt: Sequence[int], temperature: float, seed: int, tokens: int) -> int:
        """Tokens of the answer up to its end, at most `tokens`."""
        done, _ = await self._ask("length", prompt, temperature, seed, tokens, speculation=OFF)
        return len(done.token_ids)

    async def text(self, prompt: Sequence[int], temperature: float, seed: int, tokens: int) -> str:
        """The text of an answer without speculation."""
        done, _ = await self._ask("text", prompt, temperature, seed, tokens, ignore_end=True, speculation=OFF)
        return done.text

    async def answer(
        self,
        row: str,
        prompt: Sequence[int],
        temperature: float,
        seed: int,
        tokens: int,
        prediction: Sequence[str] = (),
    ) -> TimedAnswer:
        """`tokens` tokens after a prompt; `row` is the request's `speculation`.

        Timed from the request to the last tokens. Returns at the stream's end, when the cluster is idle again. Raises
        EngineFailed for another number of tokens.
        """
        done, times = await self._ask(
            row, prompt, temperature, seed, tokens, ignore_end=True, speculation=row, prediction=list(prediction)
        )
        if len(done.token_ids) != tokens:
            raise EngineFailed(f"{row}: {len(done.token_ids)} tokens instead of {tokens}")
        return TimedAnswer(
            done.token_ids,
            times[-1] - times[0],
            times[1] - times[0],
            len(done.rounds[0].token_ids),
            len(done.rounds),
            mean_round(done.complete.speculation),
        )

    async def _ask(
        self, row: str, prompt: Sequence[int], temperature: float, seed: int, tokens: int, **options: Any
    ) -> tuple[Completion, list[float]]:
        client = self._clients.client_for(row, (tuple(prompt), temperature, seed))
        return await timed(client, prompt, temperature=temperature, seed=seed, max_new_tokens=tokens, **options)
