"""Collectors, which read the counters of routers, replicas and clients of Redis when a process is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from dendro.engine import Engine
from dendro.errors import ERROR_FOR, BadRequest
from dendro.measured import StepTotals
from prometheus_client.core import Metric

from cluster.api import metrics
from cluster.api.health import HealthReport
from cluster.api.metrics import MetricFamily, Sample
from cluster.router.account import OTHER, ArmTotals, TargetTotals
from cluster.router.ingress import Ingress
from cluster.router.turns import WRITE_ERRORS
from cluster.state_store import CircuitBreaker

ARM_COUNTS = {
    metrics.ROUNDS: "rounds",
    metrics.TOKENS: "tokens",
    metrics.GUESSES: "guesses",
    metrics.ACCEPTED: "accepted",
    metrics.TRIMMED: "trimmed",
}
TARGET_COUNTS = {
    metrics.PROMPT_TOKENS: "prompt_tokens",
    metrics.MOVES: "moves",
    metrics.REOPENED: "reopened",
    metrics.RESUMED: "resumed",
    metrics.FIRST_TOKEN: "first_token_s",
    metrics.BETWEEN_TOKENS: "between_tokens_s",
    metrics.ANSWER_TIME: "answer_s",
}
ERROR_CODES = tuple(code.name for code in (BadRequest.code, *ERROR_FOR))
REDIS_OUTCOMES = ("answered", "refused", "failed", "skipped")


class RouterMetrics:
    """The metrics of a router."""

    def __init__(
        self, ingress: Ingress, stats: Callable[[], Mapping[str, int]], health: Callable[[], HealthReport]
    ) -> None:
        """stats: counts of the router's gRPC server   health: report of the router"""
        self._ingress = ingress
        self._stats = stats
        self._health = health

    def collect(self) -> Iterator[Metric]:
        found, totals, turns = self._stats(), self._ingress.totals, self._ingress.turns
        for family in (metrics.REQUESTS, metrics.REFUSED, metrics.RUNNING, metrics.PLACES):
            yield family.of([((), found[family.name.removeprefix(metrics.R).removesuffix("_total")])])
        yield metrics.ANSWERS.of((labels, count) for labels, count in totals.outcomes.items())
        yield metrics.ERRORS.of(_from_zero(ERROR_CODES, totals.errors))
        for family, field in TARGET_COUNTS.items():
            yield family.of(((name,), getattr(target, field)) for name, target in totals.targets.items())
        for family, field in ARM_COUNTS.items():
            yield family.of(
                ((name, drafter, arm), getattr(counts, field))
                for name, target in totals.targets.items()
                for drafter, arm, counts in _arms_of(target)
            )
        yield metrics.WITHOUT_TREE.of(
            ((name, *labels), count)
            for name, target in totals.targets.items()
            for labels, count in target.without_tree.items()
        )
        yield metrics.WAYS.of(
            ((name, way), count) for name, target in totals.targets.items() for way, count in target.ways.items()
        )
        yield metrics.ROUND_TIME.of(
            ((name, part), seconds)
            for name, target in totals.targets.items()
            for part, seconds in target.round_s.items()
        )
        report = self._health()
        yield metrics.SERVING.of([((), report.serving)])
        yield metrics.FAULT.of(((part,), 1) for part in report.faults)
        yield metrics.TURNS_KEPT.of([((), turns.kept)])
        yield metrics.TURNS_NOT_KEPT.of(_from_zero(WRITE_ERRORS, turns.not_kept))


def _from_zero(names: Iterable[str], counts: Mapping[str, int]) -> Iterator[Sample]:
    """Counts by one label, with 0 for names that have none yet: of a series that begins at its first count, Prometheus
    sees no increase."""
    for name, count in {**dict.fromkeys(names, 0), **counts}.items():
        yield (name,), count


def _arms_of(target: TargetTotals) -> Iterator[tuple[str, str, ArmTotals]]:
    """Drafter, shape and counts of each arm; those of arms that are not configured once there are any."""
    for arm, counts in target.arms.items():
        yield arm.maker, str(arm.shape), counts
    for maker, counts in target.others.items():
        if counts.rounds:
            yield maker, OTHER, counts


class RedisMetrics:
    """The metrics of a process's connections to Redis."""

    def __init__(self, breakers: Mapping[str, CircuitBreaker]) -> None:
        """breakers: the circuit breaker of each store, by the store's name"""
        self._breakers = breakers

    def collect(self) -> Iterator[Metric]:
        stores = self._breakers.items()
        yield metrics.REDIS_CALLS.of(
            ((store, outcome), getattr(breaker.counters, outcome))
            for store, breaker in stores
            for outcome in REDIS_OUTCOMES
        )
        yield metrics.REDIS_TIME.of(((store,), breaker.counters.answer_us / 1e6) for store, breaker in stores)
        yield metrics.BREAKER.of(((store,), breaker.shut) for store, breaker in stores)
        yield metrics.BREAKER_OPENED.of(((store,), breaker.counters.opened) for store, breaker in stores)


class ReplicaMetrics:
    """The metrics of a drafter or a verifier."""

    def __init__(
        self,
        model: str,
        numbers: Iterable[MetricFamily],
        steps: tuple[MetricFamily, MetricFamily],
        engine: Engine,
        calls: Callable[[], Mapping[str, int]],
    ) -> None:
        """model: its name in the configuration   calls: `stats` of its stream server"""
        self._model = model
        self._numbers = tuple(numbers)
        self._steps = steps
        self._engine = engine
        self._calls = calls

    def collect(self) -> Iterator[Metric]:
        calls, engine = self._calls(), self._engine.stats()
        # The stream counts calls refused with any error, the scheduler those refused because it was full.
        found = {
            **engine,
            **calls,
            "refused_calls": calls["refused"],
            "refused_texts": engine.get("refused", 0),
            "sessions": self._engine.sessions,
        }
        for family in self._numbers:
            yield family.of([((self._model,), found.get(family.stat, 0))])
        by_rows = self._engine.steps_by_rows()
        count, seconds = self._steps
        yield count.of(self._by_rows(by_rows, lambda totals: totals.steps))
        yield seconds.of(self._by_rows(by_rows, lambda totals: totals.took_us / 1e6))

    def _by_rows(self, totals: Mapping[int, StepTotals], number: Callable[[StepTotals], float]) -> Iterator[Sample]:
        for rows, each in totals.items():
            if each.steps:
                yield (self._model, str(rows)), number(each)
