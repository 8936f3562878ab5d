"""Traces: a span an answer with its rounds, below the caller's, without texts; nothing where they are off."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import grpc.aio
import pytest
from dendro.calls import DraftCall, VerifyCall
from dendro.client import AsyncClient
from dendro.errors import BadRequest
from dendro.shapes import TreeShape
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb
from dendro.v1.generation_pb2_grpc import GenerationServiceStub

from cluster.api.grpc import serve_router
from cluster.api.local import LocalClient
from cluster.peers.opening import Opening
from cluster.router.ingress import Ingress
from cluster.router.traces import MOST_EVENTS, OpenTelemetryTracer
from cluster.sections import TraceExport
from cluster.sessions import MemorySessions
from tests.support.deployed import use_deployed
from tests.support.edge import SERVED, EdgePeers, config
from tests.support.fakes import FakeDrafter, FakeVerifier, new_text
from tests.support.http_api import HELLO, HELLO_TEXT, http_at, post
from tests.support.sockets import drafter_at, verifier_at
from tests.support.toy_cluster import LOADERS, toy_config, toy_ingress

trace_sdk = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"
TRACE_ID = int(PARENT.split("-")[1], 16)


@pytest.fixture
def traced():
    """An ingress whose answers are all sampled, and what is exported once all is sent."""
    exporter = trace_sdk.InMemorySpanExporter()
    tracer = OpenTelemetryTracer(TraceExport(endpoint="http://127.0.0.1:1", share=1.0), exporter)
    made = Ingress(config(), EdgePeers(), MemorySessions(), SERVED, tracer=tracer)

    def spans():
        tracer.close()
        return exporter.get_finished_spans()

    return made, spans


async def test_a_sampled_answer_is_a_span_whose_events_are_its_rounds_and_which_has_no_text(traced):
    made, spans = traced
    done = await LocalClient(made, "acme").generate_text("a secret prompt", max_new_tokens=30, speculation="(1,1,1)")
    (span,) = spans()
    stats = done.complete.speculation
    assert len(span.events) == stats.rounds and sum(each.attributes["dendro.tokens"] for each in span.events) == 30
    assert sum(each.attributes["dendro.accepted"] for each in span.events) == stats.accepted_tokens
    facts = span.attributes
    assert facts["dendro.request_id"] == done.started.request_id and facts["dendro.outcome"] == "length"
    assert (facts["gen_ai.request.model"], facts["gen_ai.usage.output_tokens"]) == ("demo", 30)
    assert not any(word in span.to_json() for word in ("secret", "acme", done.text[:12]))


async def test_an_answer_that_fails_is_a_span_with_its_error(traced):
    made, spans = traced
    with pytest.raises(BadRequest):
        await LocalClient(made).generate_text("a", temperature=-1.0)
    made._peers.dead = True
    with pytest.raises(Exception, match="there is none"):
        await LocalClient(made).generate_text("a")
    (span,) = spans()
    assert not span.status.is_ok and span.attributes["dendro.outcome"] == "PeerLost"


async def test_a_callers_span_is_above_over_grpc_and_http_and_decides_whether_the_answer_is_sampled(traced):
    made, spans = traced
    server = await serve_router(made)
    async with grpc.aio.insecure_channel(server.address) as channel, http_at(served_ingress=made) as (http, _):
        for parent in (PARENT, UNSAMPLED, "no-span"):
            request = pb.GenerateRequest(text=HELLO_TEXT, max_new_tokens=2)
            async for _ in GenerationServiceStub(channel).Generate(request, metadata=(("traceparent", parent),)):
                pass
            status, _, _ = await post(
                http, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}, traceparent=parent
            )
            assert status == 200
    await server.stop()
    found = spans()
    below = [each for each in found if each.context.trace_id == TRACE_ID]
    assert len(found) == 4 and len(below) == 2, "two of the sampled caller, and two that begin traces of their own"
    assert {each.parent.span_id for each in below} == {0xB7AD6B7169203331}


async def test_an_answer_of_many_rounds_has_a_bounded_span(traced):
    made, spans = traced
    for _ in range(2):
        await LocalClient(made).generate_text("a", max_new_tokens=400, speculation="off")
    assert all(len(each.events) == 400 <= MOST_EVENTS for each in spans())


async def opened_and_closed(opening, text, *calls):
    """One text at one peer, and the answers to calls of it."""
    await opening.open(text)
    for call in calls:
        await call(opening, text)
    await opening.close(text)


async def draft(opening, text):
    await opening.peer.draft(DraftCall(opening.update(text), TreeShape.parse("(1,1)")))


async def verify(opening, text):
    await opening.peer.verify(VerifyCall(opening.update(text), DraftTree.root_only(text.root)))


async def test_texts_of_a_sampled_answer_are_spans_at_its_peers_below_it_and_those_of_others_are_none(traced):
    made, spans = traced
    exporter, peers = trace_sdk.InMemorySpanExporter(), {}
    for role in ("drafter", "verifier"):
        section = TraceExport(endpoint="http://127.0.0.1:1", share=1e-9)  # a router decides
        peers[role] = OpenTelemetryTracer(section, exporter, role)
    begin = {role: partial(tracer.begin_opening, model="demo") for role, tracer in peers.items()}
    answer = made._tracer.begin(PARENT, "demo")
    names = []
    async with (
        drafter_at(FakeDrafter(), begin_span=begin["drafter"]) as (_, drafters),
        verifier_at(FakeVerifier(), begin_span=begin["verifier"]) as (replica, verifiers),
    ):
        for traceparent in (answer.traceparent, "", "no-span", "x" * 100):
            text = new_text()
            text.traceparent = traceparent
            await opened_and_closed(Opening(await drafters.lease(), text), text, draft)
            await opened_and_closed(Opening(await verifiers.lease(), text), text, verify, verify)
            names.append(len(exporter.get_finished_spans()))
            for tracer in peers.values():
                tracer._provider.force_flush()
        assert replica.stats()["open_openings"] == 0
    answer.end({}, False)
    (above,), found = spans(), exporter.get_finished_spans()
    assert {each.name for each in found} == {"drafter", "verifier"} and len(found) == 2
    assert {each.parent.span_id for each in found} == {above.context.span_id}
    assert {each.context.trace_id for each in found} == {TRACE_ID}
    events = {each.name: [event.name for event in each.events] for each in found}
    assert events == {"drafter": ["opened", "draft"], "verifier": ["opened", "verdict", "verdict"]}
    assert {each.resource.attributes["service.name"] for each in found} == {"dendro-drafter", "dendro-verifier"}


async def test_the_text_of_a_sampled_answer_has_its_span_and_that_of_another_none(traced, monkeypatch):
    made, spans = traced
    texts, verifier = [], made._peers.verifier

    def kept(name, text, *rest):
        texts.append(text)
        return verifier(name, text, *rest)

    monkeypatch.setattr(made._peers, "verifier", kept)
    for parent in (PARENT, UNSAMPLED):
        async for _ in made.generate(pb.GenerateRequest(text="a", max_new_tokens=2), traceparent=parent):
            pass
    (span,) = spans()
    assert [each.traceparent for each in texts] == [f"00-{TRACE_ID:032x}-{span.context.span_id:016x}-01", ""]


class SlowTracer(OpenTelemetryTracer):
    """Its collector does not answer before `answered`."""

    def __init__(self):
        super().__init__(TraceExport(endpoint="http://127.0.0.1:1"), trace_sdk.InMemorySpanExporter())
        self.answered = Event()

    def close(self):
        self.answered.wait()
        super().close()


async def test_an_ingress_that_closes_sends_its_last_spans_and_waits_a_bounded_time(traced, monkeypatch):
    made, spans = traced
    await LocalClient(made).generate_text("a", max_new_tokens=2)
    await made.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made._tracer, "close", lambda: None)
        assert len(spans()) == 1, "they were sent before"
    await Ingress(config(), EdgePeers(), MemorySessions(), SERVED).close()
    monkeypatch.setattr("cluster.router.ingress.LAST_SPANS_S", 0.05)
    slow = SlowTracer()
    await asyncio.wait_for(Ingress(config(), EdgePeers(), MemorySessions(), SERVED, tracer=slow).close(), 60)
    assert not slow.answered.is_set()
    slow.answered.set()


class WrittenTracer:
    """Keeps the spans that ended, and writes their number to a file when it is closed."""

    def __init__(self, path: str) -> None:
        self._path, self._ended = path, 0
        self.traceparent = ""

    def begin(self, parent, model):
        return self

    def round(self, arm, tree, verdict):
        pass

    def end(self, facts, failed):
        self._ended += 1

    def close(self):
        Path(self._path).write_text(str(self._ended))


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_router_on_serve_that_stops_sends_its_last_spans(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    async def ask(address: str) -> None:
        async with AsyncClient(address) as client:
            for first in range(3):
                await client.generate_text([first, 6, 7], max_new_tokens=4)

    ingress = partial(toy_ingress, tracer=WrittenTracer(str(tmp_path / "spans")))
    use_deployed(toy_config(), ask, **LOADERS | {"ingress": ingress})
    assert (tmp_path / "spans").read_text() == "3"


def test_without_traces_the_router_imports_nothing_of_opentelemetry():
    script = "import cluster.router.traces, sys; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("section", [{"endpoint": "collector:4318"}, {"endpoint": "http://c", "share": 0.0}, {}])
def test_a_section_that_cannot_be_used_is_refused_by_its_field(section, tmp_path):
    with pytest.raises(BadRequest, match=r"^trace\."):
        type(config()).of({"targets": {"demo": {"checkpoint": "x"}}, "trace": section}, tmp_path)


def test_spans_are_sent_to_a_collector_by_otlp_over_http():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        tracer = OpenTelemetryTracer(
            TraceExport(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces", share=1.0)
        )
        span = tracer.begin("", "demo")
        span.end({"dendro.outcome": "length"}, False)
        tracer.close()
        server.shutdown()
    import gzip

    (body,) = bodies
    message = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    (found,) = message.resource_spans[0].scope_spans[0].spans
    assert found.name == "generate"
