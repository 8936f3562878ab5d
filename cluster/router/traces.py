"""Traces of answers by OpenTelemetry: a span for each sampled answer, with its rounds as events, and below it a span
for each opening at a drafter or verifier, with the peer's answers as events. Spans have no text.

Without `trace` in the configuration there is no tracer: nothing is imported, and a round costs one comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING, Protocol

from dendro.calls import Opened
from dendro.errors import BadRequest
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.sections import TraceExport

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

INSTALL = "needs the exporter of OpenTelemetry: pip install 'dendroaspis[trace]'"
SERVICE = "dendro-{}"
"""Service name of a process, filled in with its role."""
TRACEPARENT = "traceparent"
"""The header of HTTP, and the metadata of gRPC, with the caller's span (W3C Trace Context)."""
MOST_EVENTS = 512
"""Most events of a span: the last ones are kept. An answer's attributes count all of its rounds."""
LAST_SPANS_S = 5.0
"""Seconds that a process which ends waits for its last spans to be sent."""

Facts = Mapping[str, str | int | float | bool]


class AnswerSpan(Protocol):
    """The span of one sampled answer."""

    traceparent: str
    """Name of this span for the peers, whose spans are below it."""

    def round(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        """Add an event for a round that ends now."""
        ...

    def end(self, facts: Facts, failed: bool) -> None:
        """End the span with attributes."""
        ...


class Tracer(Protocol):
    """Begins spans."""

    def begin(self, parent: str, model: str) -> AnswerSpan | None:
        """The span of an answer that begins, below the caller's; None where it is not sampled. parent: `traceparent`"""
        ...

    def close(self) -> None:
        """Send the spans that were not sent yet. Blocks; may take many seconds where the collector does not answer."""
        ...


class _Answer:
    def __init__(self, span: Span, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent

    def round(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        facts: dict[str, str | int | float | bool] = {
            "dendro.arm": str(arm),
            "dendro.guesses": tree.guesses,
            "dendro.accepted": len(verdict.ranks),
            "dendro.tokens": len(verdict.tokens),
            "dendro.draft_us": tree.draft_us,
            "dendro.verify_us": verdict.verify_us,
            "dendro.queue_us": verdict.queue_us,
            "dendro.late": tree.missed,
        }
        self._span.add_event("round", facts)

    def end(self, facts: Facts, failed: bool) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(dict(facts))
        if failed:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class _OpenedText:
    """The span of a text that is open at a replica (`dendro.serving.PeerSpan`)."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def answered(self, outcome: object) -> None:
        match outcome:
            case Opened():
                self._span.add_event("opened", {"dendro.restored": outcome.restored})
            case DraftTree():
                facts = {"dendro.guesses": outcome.guesses, "dendro.draft_us": outcome.draft_us}
                self._span.add_event("draft", facts)
            case Verdict():
                facts = {"dendro.tokens": len(outcome.tokens), "dendro.queue_us": outcome.queue_us}
                self._span.add_event("verdict", facts | {"dendro.verify_us": outcome.verify_us})

    def end(self) -> None:
        self._span.end()


class OpenTelemetryTracer:
    """Sends spans in batches, in a thread of its own. A span that the collector does not take is dropped."""

    def __init__(self, section: TraceExport, exporter: SpanExporter | None = None, role: str = "router") -> None:
        """exporter: None: OTLP over HTTP to `section.endpoint`. Raises BadRequest where its package is missing."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(section.share)),
            resource=Resource({"service.name": SERVICE.format(role)}),
            span_limits=SpanLimits(max_events=MOST_EVENTS),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter_to(section.endpoint)))
        self._tracer = self._provider.get_tracer("dendro")
        self._propagator = TraceContextTextMapPropagator()
        self._role = role

    def begin(self, parent: str, model: str) -> AnswerSpan | None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        above = self._propagator.extract({TRACEPARENT: parent}, Context()) if parent else Context()
        facts = {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": model}
        span = self._tracer.start_span("generate", above, SpanKind.SERVER, facts)
        if not span.is_recording():
            return None
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return _Answer(span, carrier[TRACEPARENT])

    def begin_opening(self, parent: str, model: str) -> _OpenedText | None:
        """The span of a text that a router opens at this replica; None where it is not sampled."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        above = self._propagator.extract({TRACEPARENT: parent}, Context())
        span = self._tracer.start_span(self._role, above, SpanKind.SERVER, {"gen_ai.request.model": model})
        return _OpenedText(span) if span.is_recording() else None

    def close(self) -> None:
        self._provider.shutdown()


def _exporter_to(endpoint: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise BadRequest("trace", INSTALL) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
    return exporter


def tracer_of(section: TraceExport | None, role: str = "router") -> OpenTelemetryTracer | None:
    """The tracer of a configuration; None without one. Raises BadRequest where a package is missing."""
    return OpenTelemetryTracer(section, role=role) if section is not None else None


async def close_within(tracer: Tracer, limit_s: float) -> None:
    """Close a tracer. Waits `limit_s` at most; spans that are not sent by then may be lost."""
    loop, closed = asyncio.get_running_loop(), asyncio.Event()

    def close() -> None:
        tracer.close()
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(closed.set)

    # A thread of its own: a process that ends waits for the threads of the loop's executor.
    Thread(target=close, name="close-tracer", daemon=True).start()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(closed.wait(), limit_s)
