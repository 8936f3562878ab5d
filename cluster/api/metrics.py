"""The metrics of our processes: names, labels, meanings, and a query of each. docs/metrics.md has the same table.

Counters rather than ratios, so that a query chooses the time and what to sum over. No label has a tenant, a request or
a text; all values of labels are from closed lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from dendro.measured import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

RATE = "[5m]"


class MetricType(StrEnum):
    """Prometheus's type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


Sample = tuple[tuple[str, ...], float | Histogram]
"""The values of a metric's labels, and its value with them."""


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric. `stat`: the number's name in a replica's `stats()`, where it is taken from there."""

    name: str  # name in Prometheus; a histogram's without _bucket, _sum and _count
    type: MetricType
    text: str
    query: str  # PromQL
    labels: tuple[str, ...] = ()
    stat: str = ""

    def of(self, samples: Iterable[Sample]) -> Metric:
        """The metric with these samples."""
        labels = self.labels
        if self.type is MetricType.HISTOGRAM:
            found = HistogramMetricFamily(self.name, self.text, labels=labels)
            for values, value in samples:
                assert isinstance(value, Histogram)
                found.add_metric(values, _buckets(value), value.total)
            return found
        kind = CounterMetricFamily if self.type is MetricType.COUNTER else GaugeMetricFamily
        made = kind(self.name, self.text, labels=labels)
        for values, value in samples:
            assert not isinstance(value, Histogram)
            made.add_metric(values, value)
        return made


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    below, found = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        below += count
        found.append((bound, float(below)))
    return found


def _counter(name: str, text: str, query: str, labels: str = "", stat: str = "") -> MetricFamily:
    return MetricFamily(name, MetricType.COUNTER, text, query, tuple(labels.split()), stat)


def _gauge(name: str, text: str, query: str, labels: str = "", stat: str = "") -> MetricFamily:
    return MetricFamily(name, MetricType.GAUGE, text, query, tuple(labels.split()), stat)


def _histogram(name: str, text: str, labels: str, quantile: float) -> MetricFamily:
    query = f"histogram_quantile({quantile}, sum by (le, {labels}) (rate({name}_bucket{RATE})))"
    return MetricFamily(name, MetricType.HISTOGRAM, text, query, tuple(labels.split()))


def _rate(name: str, *by: str) -> str:
    """The query of a counter's rate."""
    labels = f" by ({', '.join(by)}) " if by else ""
    return f"sum{labels}(rate({name}{RATE}))"


def _rated(name: str, text: str, labels: str = "", by: str = "", stat: str = "") -> MetricFamily:
    """A counter whose query is its rate."""
    return _counter(name, text, _rate(name, *by.split()), labels, stat)


R = "dendro_router_"
REQUESTS = _rated(f"{R}requests_total", "Requests that were admitted to run.")
REFUSED = _counter(
    f"{R}refused_total",
    "Requests that were refused because the places were taken.",
    f"{_rate(f'{R}refused_total')} / ({_rate(f'{R}refused_total')} + {_rate(f'{R}requests_total')})",
)
RUNNING = _gauge(f"{R}running", "Answers that run now.", f"sum({R}running)")
PLACES = _gauge(f"{R}places", "Answers that may run at once.", f"sum({R}running) / sum({R}places)")
ANSWERS = _rated(
    f"{R}answers_total",
    "Answers that ended. outcome: the reason for which the text ended, written, refused, left (by the client), or the "
    "error's class. target: empty if the request named none that exists.",
    "target outcome",
    "outcome",
)
ERRORS = _rated(
    f"{R}errors_total",
    "Requests that ended with an error, by gRPC code, and refused connections of HTTP, as UNAVAILABLE.",
    "code",
    "code",
)
PROMPT_TOKENS = _rated(f"{R}prompt_tokens_total", "Tokens of prompts.", "target", "target")
FIRST_TOKEN = _histogram(
    f"{R}first_token_seconds", "From a request's arrival to its answer's first round.", "target", 0.95
)
BETWEEN_TOKENS = _histogram(
    f"{R}between_tokens_seconds",
    "Time of a round divided by its tokens, counted for each; no first round.",
    "target",
    0.5,
)
ANSWER_TIME = _histogram(f"{R}answer_seconds", "From a request's arrival to the end of its answer.", "target", 0.95)

BY_ARM = "target drafter arm"
ROUNDS = _rated(
    f"{R}rounds_total",
    "Rounds. drafter: what made the arm's trees, empty for off. arm: its shape; other: one that a request named.",
    BY_ARM,
    "arm",
)
TOKENS = _counter(
    f"{R}tokens_total",
    "Tokens of answers.",
    f"{_rate(f'{R}tokens_total', 'target')} / {_rate(f'{R}rounds_total', 'target')}",
    BY_ARM,
)
GUESSES = _rated(f"{R}guesses_total", "Guesses that were sent to a verifier.", BY_ARM, "target")
ACCEPTED = _counter(
    f"{R}accepted_total",
    "Guesses that were emitted.",
    f"{_rate(f'{R}accepted_total', 'drafter', 'arm')} / {_rate(f'{R}guesses_total', 'drafter', 'arm')}",
    BY_ARM,
)
TRIMMED = _rated(f"{R}trimmed_total", "Guesses that a verifier left out of its step.", BY_ARM, "arm")
WITHOUT_TREE = _rated(
    f"{R}rounds_without_tree_total",
    "Rounds without the tree of a model. reason: chosen (the policy chose off), first (of an answer), announced (the "
    "verifier began the round without a tree); "
    "or, where a drafter was asked: late, busy (an earlier draft is late), opening, unwanted, "
    "limits, malformed, struck (too many malformed), mismatch, stale, lost, failed; of ordered trees also: unknown "
    "(the verifier had no such order), unlinked (it cannot call the drafter).",
    "target drafter reason",
    "drafter reason",
)
WAYS = _rated(
    f"{R}trees_total",
    "Rounds with a drafter's shape. way: ordered (the drafter sends its tree straight to the verifier); or why the "
    "tree passes through the router: open (the policy's next choice was not clear), opening, missed (an ordered tree "
    "did not come shortly before), drawn (guesses are drawn), stops (until shapes), not ordered here (by the "
    "configuration, or the verifier cannot), busy, limits, struck, mismatch.",
    "target way",
    "target way",
)
ROUND_TIME = _rated(
    f"{R}round_seconds_total",
    "Time of rounds, from the choice of a shape to the verdict. part: draft, verify and queue, at the peers; opening, "
    "the rest of first rounds; hop, that of the others.",
    "target part",
    "target part",
)
MOVES = _rated(f"{R}verifier_moves_total", "Texts that were opened at another verifier.", "target", "target")
REOPENED = _rated(
    f"{R}reopened_total", "Texts that were opened again at a verifier that had forgotten them.", "target", "target"
)
RESUMED = _rated(f"{R}resumed_total", "Answers that a client resumed after a broken stream.", "target", "target")
TURNS_KEPT = _rated(f"{R}turns_kept_total", "Turns that were written to their sessions.")
TURNS_NOT_KEPT = _counter(
    f"{R}turns_not_kept_total",
    "Turns that were not written, or of which that is not known, by the error's class.",
    f"sum(increase({R}turns_not_kept_total[1h]))",
    "error",
)
SERVING = _gauge(
    f"{R}serving",
    "1 while the router serves; 0 before a target has a replica, and while it drains.",
    f"min({R}serving)",
)
FAULT = _gauge(
    f"{R}fault",
    "1 for a part that does not work. part: redis; target and its name; or new requests, of a router that drains.",
    f"max by (part) ({R}fault)",
    "part",
)
ROUTER = (
    *(REQUESTS, REFUSED, RUNNING, PLACES, ANSWERS, ERRORS, PROMPT_TOKENS, FIRST_TOKEN, BETWEEN_TOKENS, ANSWER_TIME),
    *(
        ROUNDS,
        TOKENS,
        GUESSES,
        ACCEPTED,
        TRIMMED,
        WITHOUT_TREE,
        WAYS,
        ROUND_TIME,
        MOVES,
        REOPENED,
        RESUMED,
        TURNS_KEPT,
        TURNS_NOT_KEPT,
    ),
    *(SERVING, FAULT),
)
"""Metrics of routers."""

REDIS_CALLS = _rated(
    "dendro_redis_calls_total",
    "Calls to Redis. store: sessions, states or priors. outcome: answered, refused (answered with an error), failed "
    "(not answered in time), skipped (not made, as the breaker was open).",
    "store outcome",
    "store outcome",
)
REDIS_TIME = _counter(
    "dendro_redis_call_seconds_total",
    "Time of the answered calls.",
    f"{_rate('dendro_redis_call_seconds_total', 'store')} / "
    f'sum by (store) (rate(dendro_redis_calls_total{{outcome="answered"}}{RATE}))',
    "store",
)
BREAKER = _gauge(
    "dendro_redis_breaker_open",
    "1 while the breaker is open: no calls are made, but one to probe every 5 s.",
    "max by (store) (dendro_redis_breaker_open)",
    "store",
)
BREAKER_OPENED = _counter(
    "dendro_redis_breaker_opened_total",
    "Times that the breaker opened.",
    "sum by (store) (increase(dendro_redis_breaker_opened_total[1h]))",
    "store",
)
REDIS = (REDIS_CALLS, REDIS_TIME, BREAKER, BREAKER_OPENED)
"""Metrics of every process with a connection to Redis."""


def _steps_of(role: str) -> tuple[MetricFamily, MetricFamily]:
    steps, seconds = f"dendro_{role}_steps_total", f"dendro_{role}_step_seconds_total"
    return (
        _rated(steps, "Steps of the model, by their padded number of rows.", "model rows", "model rows"),
        _counter(
            seconds,
            "Time of those steps.",
            f"{_rate(seconds, 'model', 'rows')} / {_rate(steps, 'model', 'rows')}",
            "model rows",
        ),
    )


def _replica(role: str) -> tuple[MetricFamily, ...]:
    """Metrics that drafters and verifiers have alike."""
    p = f"dendro_{role}_"

    def counted(name: str, text: str, stat: str) -> MetricFamily:
        return _rated(f"{p}{name}_total", text, "model", "model", stat)

    return (
        counted("openings", "Texts that routers opened.", "openings"),
        counted("calls", "Calls of routers.", "calls"),
        counted("call_errors", "Calls that were answered with an error.", "refused_calls"),
        counted("streams", "Streams of routers.", "streams"),
        _gauge(f"{p}leases", "Leases that are held now.", f"sum by (model) ({p}leases)", "model", "open_leases"),
        _gauge(f"{p}sessions", "Texts that are open now.", f"sum by (model) ({p}sessions)", "model", "sessions"),
        _gauge(
            f"{p}places",
            "Texts that may be open at once.",
            f"sum by (model) ({p}sessions) / sum by (model) ({p}places)",
            "model",
            "places",
        ),
        counted("rows", "Rows of steps, without padding.", "rows"),
        counted("states_restored", "Openings that went on from a saved state.", "states_restored"),
        counted("states_missed", "Openings that found no saved state.", "states_missed"),
        counted("states_refused", "Saved states that were not valid.", "states_refused"),
        counted("states_saved", "States that were saved.", "states_saved"),
    )


V, D = "dendro_verifier_", "dendro_drafter_"
VERIFIER_STEPS, DRAFTER_STEPS = _steps_of("verifier"), _steps_of("drafter")
VERIFIER_NUMBERS = (
    *_replica("verifier"),
    _gauge(
        f"{V}waiting",
        "Texts that wait for pages or a place.",
        f"sum by (model) ({V}waiting) / sum by (model) ({V}waiting_places)",
        "model",
        "waiting",
    ),
    _gauge(
        f"{V}waiting_places",
        "Texts that may wait at once.",
        f"sum by (model) ({V}waiting_places)",
        "model",
        "waiting_places",
    ),
    _rated(f"{V}waited_total", "Texts that had to wait.", "model", "model", "waited"),
    _rated(
        f"{V}refused_total", "Texts that were refused because the queue was full.", "model", "model", "refused_texts"
    ),
    _gauge(f"{V}pages", "Pages of 64 positions.", f"sum by (model) ({V}pages)", "model", "pages"),
    _gauge(
        f"{V}pages_held",
        "Pages that texts hold now.",
        f"sum by (model) ({V}pages_held) / sum by (model) ({V}pages)",
        "model",
        "pages_held",
    ),
    _gauge(f"{V}states", "Places for states of state-space layers.", f"sum by (model) ({V}states)", "model", "states"),
    _gauge(
        f"{V}states_held",
        "Places for states that texts hold now.",
        f"sum by (model) ({V}states_held) / sum by (model) ({V}states)",
        "model",
        "states_held",
    ),
    _rated(
        f"{V}shared_tokens_total", "Tokens of prompts found on pages of other texts.", "model", "model", "shared_tokens"
    ),
    _rated(f"{V}preempted_total", "Texts whose pages went to an older one.", "model", "model", "preempted"),
    _rated(f"{V}guesses_total", "Guesses that were rows of steps.", "model", "model", "guesses"),
    _rated(f"{V}trimmed_total", "Guesses that were sent and left out of a step.", "model", "model", "trimmed"),
    _rated(f"{V}ahead_total", "Rounds that were begun before their call.", "model", "model", "ahead"),
    _rated(f"{V}ordered_total", "Trees that drafters were asked for.", "model", "model", "ordered"),
    _counter(
        f"{V}ordered_missed_total",
        "Trees that drafters were asked for and that did not come, came late or were malformed.",
        f"{_rate(f'{V}ordered_missed_total', 'model')} / {_rate(f'{V}ordered_total', 'model')}",
        "model",
        "ordered_missed",
    ),
    _counter(
        f"{V}ordered_dropped_total",
        "Trees that drafters were asked for and that no round had.",
        f"{_rate(f'{V}ordered_dropped_total', 'model')} / {_rate(f'{V}ordered_total', 'model')}",
        "model",
        "ordered_dropped",
    ),
    _rated(
        f"{V}prepared_total", "Trees that drafters sent before they were asked for them.", "model", "model", "prepared"
    ),
    _counter(
        f"{V}prepared_used_total",
        "Those with which a round began. Of all trees that drafters were asked for, this many were not waited for.",
        f"{_rate(f'{V}prepared_used_total', 'model')} / {_rate(f'{V}ordered_total', 'model')}",
        "model",
        "prepared_used",
    ),
    _counter(
        f"{V}prepared_refused_total",
        "Those that were dropped on arrival: without a live order, too many, too large, or twice the same.",
        f"{_rate(f'{V}prepared_refused_total', 'model')} / {_rate(f'{V}prepared_total', 'model')}",
        "model",
        "prepared_refused",
    ),
    _counter(
        f"{V}unclaimed_total",
        "Rounds begun ahead whose verdict no call asked for.",
        f"{_rate(f'{V}unclaimed_total', 'model')} / {_rate(f'{V}ahead_total', 'model')}",
        "model",
        "unclaimed",
    ),
    _rated(f"{V}structures_compiled_total", "Structures that were compiled.", "model", "model", "structures_compiled"),
    _rated(
        f"{V}structures_refused_total",
        "Structures that were refused when they were compiled.",
        "model",
        "model",
        "structures_refused",
    ),
    _rated(f"{V}structures_total", "Texts with a structure that ended.", "model", "model", "structures"),
    _counter(
        f"{V}structure_items_total",
        "Items of the masks of ended texts.",
        f"{_rate(f'{V}structure_items_total', 'model')} / {_rate(f'{V}structure_budget_total', 'model')}",
        "model",
        "structure_items",
    ),
    _rated(
        f"{V}structure_budget_total",
        "Items that the masks of those texts were allowed.",
        "model",
        "model",
        "structure_budget",
    ),
    _rated(
        f"{V}structures_stuck_total",
        "Rounds after which a structure or its budget allowed no token: their answers ended with an error.",
        "model",
        "model",
        "structures_stuck",
    ),
    _rated(
        f"{V}masks_late_total",
        "Rounds that were left out of a step because their masks were not ready.",
        "model",
        "model",
        "masks_late",
    ),
)
"""Numbers in a verifier's `stats()`."""
DRAFTER_NUMBERS = (
    *_replica("drafter"),
    _rated(f"{D}trees_total", "Trees that were sent.", "model", "model", "trees"),
    _rated(
        f"{D}prepared_total",
        "Trees that were begun before they were asked for, for a likely outcome of a verification each.",
        "model",
        "model",
        "prepared",
    ),
    _counter(
        f"{D}prepared_used_total",
        "Trees that were sent and had been prepared, or begun.",
        f"{_rate(f'{D}prepared_used_total', 'model')} / {_rate(f'{D}trees_total', 'model')}",
        "model",
        "prepared_used",
    ),
    _counter(
        f"{D}prepared_dropped_total",
        "Prepared trees that were thrown away.",
        f"{_rate(f'{D}prepared_dropped_total', 'model')} / {_rate(f'{D}prepared_total', 'model')}",
        "model",
        "prepared_dropped",
    ),
    _rated(
        f"{D}prepared_sent_total", "Prepared trees that were sent before their call.", "model", "model", "prepared_sent"
    ),
    _rated(f"{D}prepared_us_total", "Microseconds of forwards of prepared trees.", "model", "model", "prepared_us"),
    _counter(
        f"{D}prepared_used_us_total",
        "Microseconds of those forwards whose trees were sent.",
        f"{_rate(f'{D}prepared_used_us_total', 'model')} / {_rate(f'{D}prepared_us_total', 'model')}",
        "model",
        "prepared_used_us",
    ),
    _gauge(f"{D}slots", "Slots for states of texts.", f"sum by (model) ({D}slots)", "model", "slots"),
    _gauge(
        f"{D}slots_free",
        "Slots that are free.",
        f"1 - sum by (model) ({D}slots_free) / sum by (model) ({D}slots)",
        "model",
        "free_slots",
    ),
    _gauge(f"{D}nodes", "Slots for states of trees' rows.", f"sum by (model) ({D}nodes)", "model", "nodes"),
    _gauge(
        f"{D}nodes_free",
        "Slots for rows that are free.",
        f"1 - sum by (model) ({D}nodes_free) / sum by (model) ({D}nodes)",
        "model",
        "free_nodes",
    ),
)
"""Numbers in a drafter's `stats()`."""
VERIFIER, DRAFTER = (*VERIFIER_NUMBERS, *VERIFIER_STEPS), (*DRAFTER_NUMBERS, *DRAFTER_STEPS)
"""Metrics of verifiers and of drafters."""
