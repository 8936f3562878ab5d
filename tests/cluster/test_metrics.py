"""Metrics: what is exported is declared and documented, counts what happened, and names no tenant."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from dendro import errors
from dendro.calls import DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.errors import BadRequest, Conflict, DendroError, PeerLost
from dendro.measured import Histogram
from dendro.shapes import LevelShape
from dendro.state import NoStates
from dendro.text import Limits, Sampling, Tokens
from dendro.v1 import generation_pb2 as pb

from cluster.api import metrics
from cluster.api.collectors import RedisMetrics, ReplicaMetrics, RouterMetrics
from cluster.api.health import HealthReport
from cluster.api.local import LocalClient
from cluster.arms import OFF_ARM, Arm
from cluster.redis_server import RedisServer
from cluster.router.account import ArmTotals, TargetTotals
from cluster.sessions import MemorySessions, RedisSessions
from cluster.state_store import CircuitBreaker, RedisStates
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests import metrics_page
from tests.support.edge import EdgePeers, config, ingress
from tests.support.fakes import FakeVerifier
from tests.support.routers import RoundByRound
from tests.support.scraped import declared, exported, labels_of, scrape, total
from tests.support.tiny_drafters import make_drafter
from tests.support.tiny_models import make_checkpoint
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

ROOT = Path(__file__).parents[2]
STATS = {"requests": 3, "refused": 1, "running": 2, "places": 16}
CALLS = {"openings": 1, "calls": 5, "refused": 1, "streams": 1, "open_leases": 1}
PROMPT = "walk the "


def router_page(router) -> str:
    return scrape(RouterMetrics(router, lambda: STATS, lambda: HealthReport(False, {"redis": "is gone"})))


def test_the_page_has_each_metric_with_its_query():
    text = metrics_page.PAGE.read_text()
    assert metrics_page.page(text) == text, "run python -m tests.metrics_page"
    every = [family for families in metrics_page.SECTIONS.values() for family in families]
    rows = set(re.findall(r"^\| `(dendro_\w+)`", text, re.MULTILINE))
    assert rows == declared(every) and len(every) == len(rows)
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdendro_\w+\b", text)}
    assert named == rows, "queries name no other metric"


def test_processes_export_what_is_declared():
    verifier = ReplicaMetrics("a", metrics.VERIFIER_NUMBERS, metrics.VERIFIER_STEPS, FakeVerifier(), lambda: CALLS)
    drafter = ReplicaMetrics("a", metrics.DRAFTER_NUMBERS, metrics.DRAFTER_STEPS, FakeVerifier(), lambda: CALLS)
    assert exported(router_page(ingress(EdgePeers()))) == declared(metrics.ROUTER)
    assert exported(scrape(verifier)) == declared(metrics.VERIFIER)
    assert exported(scrape(drafter)) == declared(metrics.DRAFTER)
    assert exported(scrape(RedisMetrics({"states": CircuitBreaker()}))) == declared(metrics.REDIS)


def test_only_the_status_port_and_what_reads_it_import_prometheus():
    named = {
        str(path.relative_to(ROOT))
        for folder in ("protos", "drafter_service", "verifier_service", "cluster")
        for path in (ROOT / folder).rglob("*.py")
        if "prometheus_client" in path.read_text()
    }
    assert named == {"cluster/top.py", *(f"cluster/api/{name}.py" for name in ("collectors", "metrics", "status"))}


async def test_a_router_counts_the_rounds_tokens_and_guesses_that_its_clients_see():
    router = ingress(EdgePeers())
    client = LocalClient(router, tenant="acme-of-town")
    done = [await client.generate_text(PROMPT, max_new_tokens=30, speculation=each) for each in ("(1,1,1)", "(2,1)")]
    done.append(await client.generate_text(PROMPT, max_new_tokens=9, speculation="off"))
    page, stats = router_page(router), [each.complete.speculation for each in done]
    for name, of in {
        "rounds": lambda each: each.rounds,
        "tokens": lambda each: each.emitted_tokens,
        "guesses": lambda each: each.drafted_tokens,
        "accepted": lambda each: each.accepted_tokens,
    }.items():
        assert total(page, f"dendro_router_{name}_total") == sum(map(of, stats)), name
        assert total(page, f"dendro_router_{name}_total", drafter="mamba", arm="(1,1,1)") == of(stats[0]), name
        assert total(page, f"dendro_router_{name}_total", drafter="", arm="off") == of(stats[2]), name
    assert stats[0].accepted_tokens > 0
    assert total(page, "dendro_router_first_token_seconds_count", target="demo") == 3
    assert total(page, "dendro_router_answer_seconds_count", target="demo") == 3
    emitted, first = sum(each.emitted_tokens for each in stats), sum(len(each.rounds[0].token_ids) for each in done)
    assert total(page, "dendro_router_between_tokens_seconds_count") == emitted - first
    assert total(page, "dendro_router_prompt_tokens_total") == 3 * len(PROMPT)
    assert total(page, "dendro_router_answers_total", target="demo", outcome="length") == 3
    assert total(page, "dendro_router_running") == 2 and total(page, "dendro_router_places") == 16
    assert "acme" not in page and "walk" not in page


async def test_shapes_that_requests_name_share_one_label():
    router = ingress(EdgePeers())
    for width in range(2, 9):
        await LocalClient(router).generate_text(PROMPT, max_new_tokens=4, speculation=f"({width},1)")
    arms = labels_of(router_page(router), "dendro_router_rounds_total", "arm")
    assert arms == {"off", "(1,1,1)", "(2,1)", "other"}
    assert total(router_page(router), "dendro_router_rounds_total", arm="other", drafter="mamba") > 0


def test_a_maker_that_is_not_configured_is_counted_as_other():
    totals = TargetTotals.of(config(), "demo")
    assert totals.arm(Arm.parse("nobody:(1,1,1)")) is totals.others["other"]
    assert totals.arm(OFF_ARM) is totals.arms[OFF_ARM] is not totals.arm(Arm.parse("mamba:(1,1,1)"))
    assert isinstance(totals.arm(Arm.parse("mamba:(7,7)")), ArmTotals)


async def test_a_router_counts_why_rounds_had_no_tree():
    peers = EdgePeers()
    peers.drafter_lost = True
    router = ingress(peers)
    done = await LocalClient(router).generate_text(PROMPT, max_new_tokens=12, speculation="(1,1,1)")
    page = router_page(router)
    assert total(page, "dendro_router_rounds_without_tree_total", drafter="mamba", reason="lost") == len(done.rounds)
    await LocalClient(router).generate_text(PROMPT, max_new_tokens=5, speculation="off")
    reasons = {
        reason: total(router_page(router), "dendro_router_rounds_without_tree_total", drafter="", reason=reason)
        for reason in ("first", "chosen")
    }
    assert sum(reasons.values()) == 5 and reasons["chosen"] >= 4


@pytest.mark.parametrize(
    "fault, code, outcome",
    [("field", "INVALID_ARGUMENT", "BadRequest"), ("dead", "UNAVAILABLE", "PeerLost"), ("broken", "INTERNAL", "left")],
)
async def test_a_router_counts_errors_by_their_code(fault, code, outcome):
    peers = EdgePeers()
    router = ingress(peers)
    if fault != "field":
        setattr(peers, fault, True)
    with pytest.raises((BadRequest, PeerLost, RuntimeError)):
        await LocalClient(router).generate_text(PROMPT, temperature=-1.0 if fault == "field" else 0.0)
    page = router_page(router)
    assert total(page, "dendro_router_errors_total") == total(page, "dendro_router_errors_total", code=code) == 1
    assert total(page, "dendro_router_answers_total", outcome=outcome) == 1


def test_a_router_counts_every_error_from_zero_so_that_the_first_one_is_an_increase():
    page = router_page(ingress(EdgePeers()))
    codes = {each.code.name for each in kinds(DendroError) if each.__module__ == errors.__name__}
    assert labels_of(page, "dendro_router_errors_total", "code") == codes >= {"INVALID_ARGUMENT", "INTERNAL"}
    assert labels_of(page, "dendro_router_turns_not_kept_total", "error") == {"Conflict", "NotFound", "PeerLost"}
    for name in ("errors", "turns_not_kept"):
        assert total(page, f"dendro_router_{name}_total") == 0


def kinds(base):
    """All subclasses of a class, at any depth."""
    return {below for each in base.__subclasses__() for below in (each, *kinds(each))}


async def test_a_client_that_leaves_is_no_error():
    router = ingress(EdgePeers())
    answer = router.generate(pb.GenerateRequest(text=PROMPT, max_new_tokens=40))
    await anext(answer)
    await answer.aclose()
    page = router_page(router)
    assert total(page, "dendro_router_errors_total") == 0
    assert total(page, "dendro_router_answers_total", outcome="left") == 1
    assert total(page, "dendro_router_answer_seconds_count") == 0


class UnwrittenSessions(MemorySessions):
    error: Exception = Conflict("session: another request wrote it first")

    async def write(self, token, tenant, record):
        raise self.error


async def test_a_router_counts_turns_that_are_not_kept():
    router = ingress(EdgePeers(), UnwrittenSessions())
    with pytest.raises(Conflict):
        await LocalClient(router).generate_text(PROMPT, max_new_tokens=3, keep_session=True)
    kept = ingress(EdgePeers())
    await LocalClient(kept).generate_text(PROMPT, max_new_tokens=3, keep_session=True)
    pages = router_page(router), router_page(kept)
    assert [total(page, "dendro_router_turns_not_kept_total", error="Conflict") for page in pages] == [1, 0]
    assert [total(page, "dendro_router_turns_kept_total") for page in pages] == [0, 1]


async def test_a_verifier_counts_its_steps_by_rows_and_the_pages_it_holds(tmp_path):
    make_checkpoint(tmp_path)
    options = VerifierOptions(name="tiny", dtype=torch.float32, max_length=256, max_sessions=4, prefill_chunk=128)
    engine = VerifierEngine.load(tmp_path, options)
    collector = ReplicaMetrics("big", metrics.VERIFIER_NUMBERS, metrics.VERIFIER_STEPS, engine, lambda: CALLS)
    await engine.start()
    try:
        router = RoundByRound(engine, np.arange(70).tolist(), count=8)
        await router.open()
        page = scrape(collector)
        assert total(page, "dendro_verifier_pages_held", model="big") >= 2
        assert total(page, "dendro_verifier_sessions", model="big") == 1
        await router.go_on()  # closes the text
        page, stats = scrape(collector), engine.stats()
        assert total(page, "dendro_verifier_steps_total", model="big") == stats["steps"] >= 9
        assert total(page, "dendro_verifier_step_seconds_total") == pytest.approx(stats["step_us"] / 1e6)
        assert labels_of(page, "dendro_verifier_steps_total", "rows") <= set(map(str, engine.scheduler.capacity.sizes))
        assert total(page, "dendro_verifier_pages_held") == total(page, "dendro_verifier_sessions") == 0
        assert total(page, "dendro_verifier_places") == 4 and total(page, "dendro_verifier_call_errors_total") == 1
    finally:
        await engine.stop()


async def test_a_drafter_counts_its_forwards_by_rows_and_the_slots_it_has_left(tmp_path):
    make_drafter(tmp_path, "mamba2")
    engine = DrafterEngine.load(tmp_path, DrafterOptions(name="tiny", max_sessions=4), states=NoStates())
    collector = ReplicaMetrics("small", metrics.DRAFTER_NUMBERS, metrics.DRAFTER_STEPS, engine, lambda: CALLS)
    await engine.start()
    try:
        tokens = Tokens()
        tokens.extend(range(20))
        update = TextUpdate.of(new_opening(), tokens, 0)
        await engine.open(OpenCall(update, RequestParameters(Sampling(), Limits(200), "", ())))
        await engine.draft(DraftCall(TextUpdate.of(update.opening, tokens, 20), LevelShape((2, 1))))
        page = scrape(collector)
        assert total(page, "dendro_drafter_steps_total", model="small") == engine.counters.forwards > 0
        assert total(page, "dendro_drafter_step_seconds_total") == pytest.approx(engine.counters.forward_us / 1e6)
        assert total(page, "dendro_drafter_trees_total") == total(page, "dendro_drafter_sessions") == 1
        assert 0 < total(page, "dendro_drafter_slots_free") < total(page, "dendro_drafter_slots") == 8
    finally:
        await engine.stop()


async def test_calls_to_redis_are_counted_by_what_came_of_them(tmp_path):
    with RedisServer(memory_mb=16) as server:
        states, sessions = RedisStates(server.url, 60, budget_s=5.0), RedisSessions(server.url, 60, budget_s=5.0)
        collector = RedisMetrics({"states": states.breaker, "sessions": sessions.breaker})
        assert await states.save("a", b"x") and await states.load("a", 10) == b"x"
        await sessions.new_token("")
        page = scrape(collector)
        assert total(page, "dendro_redis_calls_total", store="states", outcome="answered") == 2
        assert total(page, "dendro_redis_calls_total", store="sessions", outcome="answered") >= 1
        assert total(page, "dendro_redis_breaker_open") == 0 < total(page, "dendro_redis_call_seconds_total")
    for _ in range(5):  # the server is gone
        assert await states.load("a", 10) is None
    page = scrape(collector)
    assert total(page, "dendro_redis_calls_total", store="states", outcome="failed") == 3
    assert total(page, "dendro_redis_calls_total", store="states", outcome="skipped") == 2
    assert total(page, "dendro_redis_breaker_open", store="states") == 1
    assert total(page, "dendro_redis_breaker_opened_total", store="states") == 1
    await states.close()
    await sessions.close()


def test_a_histogram_is_exported_with_cumulative_buckets():
    histogram = Histogram((0.5, 1.0))
    for value in (0.1, 0.5, 0.7, 3.0):
        histogram.observe(value)

    class Waits:
        def collect(self):
            yield metrics.FIRST_TOKEN.of([(("demo",), histogram)])

    page, name = scrape(Waits()), "dendro_router_first_token_seconds"
    assert [total(page, f"{name}_bucket", le=bound) for bound in ("0.5", "1.0", "+Inf")] == [2, 3, 4]
    assert (total(page, f"{name}_count"), total(page, f"{name}_sum")) == (4, pytest.approx(4.3))
