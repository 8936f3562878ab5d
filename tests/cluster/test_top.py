"""`dendro top`: the tables of a cluster, of the pages of its status ports."""

from __future__ import annotations

import asyncio
import doctest
import json
import re
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from dendro.client import AsyncClient
from dendro.errors import BadRequest
from typer.testing import CliRunner

from cluster import cli, top
from cluster.api.collectors import RouterMetrics
from cluster.api.grpc import serve_router
from cluster.api.health import HealthReport
from cluster.api.status import serve_status
from cluster.top import Scrape, checked_addresses, tables_of, view_of
from tests.support.edge import EdgePeers, ingress
from tests.support.scraped import series_of

BEGAN = "process_start_time_seconds 1000\n"


def scrape(text: str, at_s: float = 1100.0, address: str = "a:1") -> Scrape:
    return Scrape(address, at_s, series_of(BEGAN + text))


def router(requests: int, tokens: int, rounds: int, guesses: int = 0, accepted: int = 0) -> str:
    labels = 'target="t",drafter="d",arm="(2,1)"'
    parts = {"draft": 0.25, "verify": 0.5, "queue": 0, "hop": 0.25, "opening": 0}
    return "".join(
        f"{line}\n"
        for line in (
            "dendro_router_serving 1",
            f"dendro_router_requests_total {requests}",
            "dendro_router_running 3",
            "dendro_router_places 8",
            f"dendro_router_tokens_total{{{labels}}} {tokens}",
            f"dendro_router_rounds_total{{{labels}}} {rounds}",
            f"dendro_router_guesses_total{{{labels}}} {guesses}",
            f"dendro_router_accepted_total{{{labels}}} {accepted}",
            *(
                f'dendro_router_round_seconds_total{{target="t",part="{part}"}} {share * rounds / 100}'
                for part, share in parts.items()
            ),
        )
    )


VERIFIER = """dendro_verifier_places{model="t"} 16
dendro_verifier_sessions{model="t"} 4
dendro_verifier_waiting{model="t"} 1
dendro_verifier_pages{model="t"} 100
dendro_verifier_pages_held{model="t"} 25
dendro_verifier_states{model="t"} 10
dendro_verifier_states_held{model="t"} 5
dendro_verifier_rows_total{model="t"} 400
dendro_verifier_steps_total{model="t",rows="8"} 50
dendro_verifier_steps_total{model="t",rows="16"} 50
dendro_verifier_step_seconds_total{model="t",rows="8"} 1
dendro_verifier_step_seconds_total{model="t",rows="16"} 1
"""


def test_rates_are_those_since_the_start_and_then_those_between_two_looks():
    first, second = scrape(router(100, 400, 200, 600, 200)), scrape(router(120, 460, 220, 660, 240), 1110.0)
    (since,), (between,) = view_of([first]).routers, view_of([second], [first]).routers
    assert (since.requests_per_s, since.tokens_per_s, since.running, since.places) == (1.0, 4.0, 3, 8)
    assert (between.requests_per_s, between.tokens_per_s) == (2.0, 6.0) and between.serving
    (target,) = view_of([second], [first]).targets
    assert (target.tokens_per_round, target.acceptance, target.first_token_s) == (3.0, 40 / 60, None)
    assert target.round_ms == pytest.approx({"draft": 2.5, "verify": 5.0, "queue": 0, "hop": 2.5, "opening": 0})


def test_a_process_that_began_again_counts_from_its_start():
    before = scrape(router(100, 400, 200))
    again = Scrape("a:1", 1110.0, series_of("process_start_time_seconds 1105\n" + router(10, 40, 20)))
    (row,) = view_of([again], [before]).routers
    assert row.requests_per_s == 2.0


def test_routers_are_added_and_a_port_that_fails_is_listed():
    down = Scrape("c:3", 1100.0, {}, "cannot be reached: ConnectError")
    view = view_of([scrape(router(100, 400, 200)), scrape(router(100, 200, 100), address="b:2"), down])
    (target,), (arm,) = view.targets, view.arms
    assert len(view.routers) == 2 and target.tokens_per_s == 6.0 and arm.rounds_per_s == 3.0 and arm.share == 1
    assert view.unreachable == {"c:3": "cannot be reached: ConnectError"}
    titles = [str(table.title) for table in tables_of(view)]
    assert titles == ["Routers, since the start", "Targets", "Arms", "Not reached"]


def test_a_replica_has_its_texts_its_memory_and_its_steps():
    (row,) = view_of([scrape(VERIFIER)]).pools
    assert (row.role, row.model, row.texts, row.places, row.waiting, row.memory) == ("verifier", "t", 4, 16, 1, 0.5)
    assert (row.steps_per_s, row.rows_per_step, row.step_ms) == (1.0, 4.0, 20.0)


@pytest.mark.parametrize("address", ["", "host", "ftp://host:1", "http://user@host:1", "host:1?x", "host:x", "h:99999"])
def test_what_is_no_address_is_refused(address: str):
    with pytest.raises(BadRequest, match="^ADDRESS: "):
        checked_addresses([address])


def test_the_examples_hold():
    assert doctest.testmod(top).failed == 0


@asynccontextmanager
async def status_port():
    """Yields the status port of a router that has answered one request."""
    made = ingress(EdgePeers())
    server = await serve_router(made)
    health = HealthReport(True, {})
    runner, port = await serve_status(
        [RouterMetrics(made, server.stats, lambda: health)], lambda: health, "127.0.0.1", (0,), "grpc.status_port"
    )
    try:
        async with AsyncClient(server.address) as client:
            await client.generate_text("walk the ", max_new_tokens=24, speculation="(2,1)")
        yield f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()
        await server.stop()


async def run(*words: str):
    return await asyncio.to_thread(CliRunner().invoke, cli.app, ["top", *words], env={"COLUMNS": "200"})


async def test_the_command_shows_a_router_once_as_tables_and_as_json():
    async with status_port() as address:
        text, data = await run(address, "--once"), await run(address, "127.0.0.1:1", "--once", "--json")
    assert text.exit_code == data.exit_code == 0
    assert re.search(r"\(2,1\) +│ +[\d.]+ +│ +100 %", text.stdout) and "serving" in text.stdout
    found = json.loads(data.stdout)
    assert found["arms"][0]["arm"] == "(2,1)" and found["targets"][0]["tokens_per_round"] > 1
    assert found["targets"][0]["round_ms"]["verify"] > 0 and list(found["unreachable"]) == ["127.0.0.1:1"]


async def test_where_no_port_answers_the_exit_status_is_1():
    done = await run("127.0.0.1:1", "--once")
    assert done.exit_code == 1 and "cannot be reached" in done.stdout
    refused = await run("127.0.0.1:1", "--json")
    assert isinstance(refused.exception, BadRequest)


async def test_an_answer_that_is_no_page_of_metrics_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    bodies = iter([("text", 200), ("x", 500), ("other_total 1\n", 200), ("a" * 100 + " 1\n", 200)])

    async def answer(_: web.Request) -> web.Response:
        body, status = next(bodies)
        return web.Response(text=body, status=status)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    monkeypatch.setattr(top, "MOST_BYTES", 50)
    found = [next(iter((await top.view_once([address])).unreachable.values())) for _ in range(4)]
    await runner.cleanup()
    assert found[:3] == ["answers no metrics", "answers 500", "has no metrics of a cluster"]
    assert found[3] == "answers no metrics"  # cut at the bound
