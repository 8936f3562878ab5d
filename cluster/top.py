"""`dendro top`: a cluster's status ports as tables, once or again and again."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from dendro.errors import BadRequest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from cluster.router.account import ROUND_PARTS
from cluster.showing import visible
from cluster.tables import folding_table

SCRAPE_S = 5.0
"""Seconds that a status port may take to answer."""
MOST_BYTES = 4 << 20
"""Bytes of a page that are read."""
MOST_ADDRESSES = 256

Labels = frozenset[tuple[str, str]]
Series = Mapping[tuple[str, Labels], float]
"""Values by name and labels."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one status port answered."""

    address: str
    at_s: float
    series: Series
    fault: str = ""  # why there is no answer

    @property
    def running_s(self) -> float:
        """Seconds since the process began."""
        began_s = self.series.get(("process_start_time_seconds", frozenset()), self.at_s)
        return max(self.at_s - began_s, 1e-3)


@dataclass(frozen=True, slots=True)
class RouterRow:
    """A router now, and its rates."""

    address: str
    serving: bool
    faults: tuple[str, ...]
    running: float
    places: float
    requests_per_s: float
    tokens_per_s: float
    refused: float
    errors: float


@dataclass(frozen=True, slots=True)
class TargetRow:
    """The answers of a target at all routers."""

    target: str
    tokens_per_s: float
    tokens_per_round: float | None
    acceptance: float | None  # accepted guesses of those sent to a verifier
    first_token_s: float | None  # mean
    between_tokens_s: float | None  # mean
    round_ms: Mapping[str, float]  # mean time of a round, by part


@dataclass(frozen=True, slots=True)
class ArmRow:
    """The rounds of an arm at all routers."""

    target: str
    drafter: str
    arm: str
    rounds_per_s: float
    share: float  # share of the target's rounds
    tokens_per_round: float | None
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A replica of a drafter or a verifier."""

    address: str
    role: str
    model: str
    texts: float
    places: float
    waiting: float
    memory: float | None  # share of pages and states, or of slots, in use
    steps_per_s: float
    rows_per_step: float | None
    step_ms: float | None


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster over a time."""

    seconds: float | None  # time of the rates; None: since the start of each process
    routers: tuple[RouterRow, ...]
    targets: tuple[TargetRow, ...]
    arms: tuple[ArmRow, ...]
    pools: tuple[PoolRow, ...]
    unreachable: Mapping[str, str]  # reasons by address

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def metrics_url(address: str) -> str:
    """The page of an address: `host:port`, or the beginning of a URL. Raises BadRequest for what is neither.

    >>> metrics_url("127.0.0.1:9100"), metrics_url("https://status.example/")
    ('http://127.0.0.1:9100/metrics', 'https://status.example/metrics')
    """
    url = address if "//" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or "//" in address)
    except ValueError:
        known = None
    if not known or parts.query or parts.fragment or parts.username is not None:
        raise BadRequest("ADDRESS", f"{address!r} is no host:port of a status port")
    return f"{url.rstrip('/')}/metrics"


async def scraped(session: aiohttp.ClientSession, address: str) -> Scrape:
    """What a status port answers now."""
    try:
        async with session.get(metrics_url(address), allow_redirects=False) as response:
            body = await response.content.read(MOST_BYTES)
            while len(body) < MOST_BYTES and (more := await response.content.read(MOST_BYTES - len(body))):
                body += more
            if response.status != 200:
                return Scrape(address, time.time(), {}, f"answers {response.status}")
        found = {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Scrape(address, time.time(), {}, f"cannot be reached: {type(error).__name__}")
    except ValueError:
        return Scrape(address, time.time(), {}, "answers no metrics")
    if not any(name.startswith("dendro_") for name, _ in found):
        return Scrape(address, time.time(), {}, "has no metrics of a cluster")
    return Scrape(address, time.time(), found)


async def all_scraped(session: aiohttp.ClientSession, addresses: Sequence[str]) -> list[Scrape]:
    return list(await asyncio.gather(*(scraped(session, each) for each in addresses)))


class Change:
    """Growth of one process's counters between two scrapes, and its gauges at the second."""

    def __init__(self, before: Scrape | None, now: Scrape) -> None:
        """before: the first scrape; None: growth since the process began"""
        restarted = before is None or not before.series or before.running_s > now.running_s
        self._before: Series = {} if restarted or before is None else before.series
        self._now = now.series
        self.seconds = now.running_s if restarted or before is None else max(now.at_s - before.at_s, 1e-3)

    def counted(self, name: str, **labels: str) -> float:
        """Growth of the counters of a name with these labels."""
        return sum(value - self._before.get(key, 0.0) for key, value in self._matching(name, labels))

    def gauge(self, name: str, **labels: str) -> float:
        """The sum of the values now."""
        return sum(value for _, value in self._matching(name, labels))

    def rate(self, name: str, **labels: str) -> float:
        return self.counted(name, **labels) / self.seconds

    def values_of(self, name: str, *labels: str) -> list[tuple[str, ...]]:
        """The values that labels have together, in order."""
        found = (dict(given) for each, given in self._now if each == name)
        return sorted({tuple(given.get(label, "") for label in labels) for given in found})

    def _matching(self, name: str, labels: Mapping[str, str]) -> Iterator[tuple[tuple[str, Labels], float]]:
        wanted = labels.items()
        return ((key, value) for key, value in self._now.items() if key[0] == name and wanted <= key[1])


R, V, D = "dendro_router_", "dendro_verifier_", "dendro_drafter_"


def view_of(now: Sequence[Scrape], before: Sequence[Scrape] | None = None) -> ClusterView:
    """The cluster since `before`, or since its processes began. Both have the same addresses."""
    earlier = {each.address: each for each in before or ()}
    well = [each for each in now if not each.fault]
    changes = [(each.address, Change(earlier.get(each.address), each)) for each in well]
    routers = [(address, each) for address, each in changes if each.values_of(f"{R}serving")]
    both = [each for _, each in routers]
    return ClusterView(
        seconds=None if before is None else max((each.seconds for _, each in changes), default=0.0),
        routers=tuple(_router_row(*each) for each in routers),
        targets=tuple(_target_row(both, name) for name in _names(both, f"{R}tokens_total", "target")),
        arms=tuple(_arm_rows(both)),
        pools=tuple(row for each in changes for row in _pool_rows(*each)),
        unreachable={each.address: each.fault for each in now if each.fault},
    )


def _names(changes: Iterable[Change], name: str, label: str) -> list[str]:
    return sorted({value for each in changes for (value,) in each.values_of(name, label)})


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _router_row(address: str, its: Change) -> RouterRow:
    return RouterRow(
        address,
        serving=bool(its.gauge(f"{R}serving")),
        faults=tuple(part for (part,) in its.values_of(f"{R}fault", "part") if its.gauge(f"{R}fault", part=part)),
        running=its.gauge(f"{R}running"),
        places=its.gauge(f"{R}places"),
        requests_per_s=its.rate(f"{R}requests_total"),
        tokens_per_s=its.rate(f"{R}tokens_total"),
        refused=its.counted(f"{R}refused_total"),
        errors=its.counted(f"{R}errors_total"),
    )


def _target_row(changes: Sequence[Change], target: str) -> TargetRow:
    def counted(name: str, **labels: str) -> float:
        return sum(each.counted(name, target=target, **labels) for each in changes)

    def mean(name: str) -> float | None:
        return _share(counted(f"{name}_sum"), counted(f"{name}_count"))

    rounds = counted(f"{R}rounds_total")
    parts = {part: counted(f"{R}round_seconds_total", part=part) for part in ROUND_PARTS}
    return TargetRow(
        target,
        tokens_per_s=sum(each.rate(f"{R}tokens_total", target=target) for each in changes),
        tokens_per_round=_share(counted(f"{R}tokens_total"), rounds),
        acceptance=_share(counted(f"{R}accepted_total"), counted(f"{R}guesses_total")),
        first_token_s=mean(f"{R}first_token_seconds"),
        between_tokens_s=mean(f"{R}between_tokens_seconds"),
        round_ms={part: 1e3 * seconds / rounds for part, seconds in parts.items()} if rounds else {},
    )


def _arm_rows(changes: Sequence[Change]) -> Iterator[ArmRow]:
    """Arms that had rounds, the most frequent of each target first."""
    sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0] * 5)
    for its in changes:
        for labels in its.values_of(f"{R}rounds_total", "target", "drafter", "arm"):
            target, drafter, arm = labels
            names = ("rounds", "tokens", "guesses", "accepted")
            grown = [its.counted(f"{R}{name}_total", target=target, drafter=drafter, arm=arm) for name in names]
            sums[labels] = [old + new for old, new in zip(sums[labels], [*grown, grown[0] / its.seconds], strict=True)]
    totals: defaultdict[str, float] = defaultdict(float)
    for (target, _, _), (rounds, *_) in sums.items():
        totals[target] += rounds
    for (target, drafter, arm), (rounds, tokens, guesses, accepted, rate) in sorted(
        sums.items(), key=lambda each: (each[0][0], -each[1][0], each[0])
    ):
        if rounds:
            share, each_round = rounds / totals[target], tokens / rounds
            yield ArmRow(target, drafter, arm, rate, share, each_round, _share(accepted, guesses))


def _pool_rows(address: str, its: Change) -> Iterator[PoolRow]:
    for role, prefix in (("verifier", V), ("drafter", D)):
        for (model,) in its.values_of(f"{prefix}places", "model"):
            steps = its.counted(f"{prefix}steps_total", model=model)
            rows = its.counted(f"{prefix}rows_total", model=model)
            yield PoolRow(
                address,
                role,
                model,
                texts=its.gauge(f"{prefix}sessions", model=model),
                places=its.gauge(f"{prefix}places", model=model),
                waiting=its.gauge(f"{prefix}waiting", model=model),
                memory=_memory(its, prefix, model),
                steps_per_s=steps / its.seconds,
                rows_per_step=_share(rows, steps),
                step_ms=_share(1e3 * its.counted(f"{prefix}step_seconds_total", model=model), steps),
            )


def _memory(its: Change, prefix: str, model: str) -> float | None:
    """The greatest share in use of pages, states or slots."""
    shares = [
        _share(its.gauge(f"{prefix}{name}_held", model=model), its.gauge(f"{prefix}{name}", model=model))
        for name in ("pages", "states")
    ]
    slots = its.gauge(f"{prefix}slots", model=model)
    shares.append(_share(slots - its.gauge(f"{prefix}slots_free", model=model), slots))
    return max((each for each in shares if each is not None), default=None)


def _number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    return _number(None if value is None else 100 * value, 0, " %")


def tables_of(view: ClusterView) -> list[Table]:
    """The view as tables."""
    time_of = "since the start" if view.seconds is None else f"of {view.seconds:.1f} s"
    states = {
        each.address: "serving" if each.serving and not each.faults else f"no {', '.join(each.faults) or 'service'}"
        for each in view.routers
    }
    made = [
        folding_table(
            f"Routers, {time_of}",
            ("router", "state", "running", "places", "requests/s", "tokens/s", "refused", "errors"),
            [
                (each.address, visible(states[each.address]), f"{each.running:.0f}", f"{each.places:.0f}")
                + (_number(each.requests_per_s, 2), _number(each.tokens_per_s))
                + (f"{each.refused:.0f}", f"{each.errors:.0f}")
                for each in view.routers
            ],
            right=range(2, 8),
        ),
        folding_table(
            "Targets",
            (
                "target",
                "tokens/s",
                "a round",
                "accepted",
                "first token",
                "between",
                *(f"{each} ms" for each in ROUND_PARTS),
            ),
            [
                (visible(each.target), _number(each.tokens_per_s), _number(each.tokens_per_round, 2))
                + (_percent(each.acceptance), _number(each.first_token_s, 2, " s"))
                + (_number(_ms(each.between_tokens_s), 1, " ms"),)
                + tuple(_number(each.round_ms.get(part)) for part in ROUND_PARTS)
                for each in view.targets
            ],
            right=range(1, 11),
        ),
        folding_table(
            "Arms",
            ("target", "drafter", "arm", "rounds/s", "of rounds", "tokens a round", "accepted"),
            [
                (*map(visible, (each.target, each.drafter, each.arm)), _number(each.rounds_per_s), _percent(each.share))
                + (_number(each.tokens_per_round, 2), _percent(each.acceptance))
                for each in view.arms
            ],
            right=range(3, 7),
        ),
        folding_table(
            "Pools",
            ("replica", "role", "model", "texts", "places", "waiting", "memory", "steps/s", "rows a step", "a step"),
            [
                (each.address, each.role, visible(each.model), f"{each.texts:.0f}", f"{each.places:.0f}")
                + (f"{each.waiting:.0f}", _percent(each.memory), _number(each.steps_per_s))
                + (_number(each.rows_per_step), _number(each.step_ms, 1, " ms"))
                for each in view.pools
            ],
            right=range(3, 10),
        ),
    ]
    if view.unreachable:
        made.append(folding_table("Not reached", ("address", "why"), [*view.unreachable.items()]))
    return [each for each in made if each.row_count]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


async def view_once(addresses: Sequence[str]) -> ClusterView:
    """The cluster since its start."""
    async with _session() as session:
        return view_of(await all_scraped(session, addresses))


async def show_live(console: Console, addresses: Sequence[str], interval_s: float) -> None:
    """Show the cluster's last seconds, until cancelled."""
    async with _session() as session:
        before = await all_scraped(session, addresses)
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            live.update(Group(*tables_of(view_of(before))), refresh=True)
            while True:
                await asyncio.sleep(interval_s)
                now = await all_scraped(session, addresses)
                live.update(Group(*tables_of(view_of(now, before))), refresh=True)
                before = now


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SCRAPE_S))


def checked_addresses(addresses: Sequence[str]) -> list[str]:
    """The addresses, each once. Raises BadRequest for one that is none, and for too many."""
    found = list(dict.fromkeys(part.strip() for each in addresses for part in each.split(",") if part.strip()))
    if not 1 <= len(found) <= MOST_ADDRESSES:
        raise BadRequest("ADDRESS", f"names {len(found)} status ports; must be 1 to {MOST_ADDRESSES}")
    for each in found:
        metrics_url(each)
    return found
