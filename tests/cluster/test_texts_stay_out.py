"""No prompt, answer or secret is in a log, on a status port, or in what a machine shows of its processes."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import os
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import redis
from dendro import failures
from dendro.errors import BadRequest, EngineFailed

from cluster.api.callers import Callers
from cluster.api.collectors import RouterMetrics
from cluster.api.grpc import serve_router
from cluster.api.health import HealthReport
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.api.openai.server import serve_http
from cluster.config import Config
from cluster.redis_server import RedisServer
from cluster.router.allowance import KeyLimits
from cluster.running import local_ingress, running_cluster
from tests.random_requests import settings
from tests.support.edge import EdgePeers, ingress
from tests.support.http_api import http_at, post
from tests.support.marked_texts import CHAT, MARK, MESSAGES, ask_in_every_way, leaks
from tests.support.scraped import scrape

ROOT = Path(__file__).parents[2]
SERVICES = ("protos/dendro", "drafter_service", "verifier_service", "cluster/api", "cluster/router", "cluster/peers")
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception(messages[0].content) }}{% endif %}"
    "{% if fail %}{{ fail.no_such.field }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)


def configured(folder: Path, **redis_section) -> tuple[Config, str]:
    """A target with two drafters, keys and a chat template; and a key."""
    (folder / "template.jinja").write_text(TEMPLATE)
    text, key = new_key("alice", "alice", KeyLimits())
    write_keys(folder / "keys.json", ApiKeys(keys=(key,)))
    fields = settings(folder).model_dump(mode="json", exclude_unset=True)
    fields["targets"]["target"]["chat_template"] = str(folder / "template.jinja")
    auth = {"keys": str(folder / "keys.json")}
    return Config.of(fields | {"auth": auth, "redis": redis_section}, folder), text


@pytest.mark.slow
async def test_no_text_of_a_request_is_in_a_log_at_any_level_nor_on_a_status_page(tmp_path, caplog, capfd):
    """Requests over gRPC, the Python client and HTTP: answered, refused for each reason, left before they end. All
    loggers of the process log all that they have."""
    caplog.set_level(logging.DEBUG)
    config, key = configured(tmp_path)
    async with local_ingress(config) as made, contextlib.AsyncExitStack() as stack:
        callers = Callers(config)
        server = await serve_router(made, callers=callers)
        stack.push_async_callback(server.stop)
        http = await serve_http(made, server.requests, callers)
        stack.push_async_callback(http.stop)
        answers = await ask_in_every_way(server.address, http.address, key)
        page = scrape(RouterMetrics(made, server.stats, lambda: HealthReport(True, {})))
    assert len(answers) >= 8 and any(MARK in each for each in answers)
    lines = [record for record in caplog.records if record.name == "dendro.requests"]
    assert len(lines) >= 20, "requests are logged"
    assert "dendro_router_tokens_total" in page
    out, err = capfd.readouterr()
    assert not leaks(caplog.text + out + err + page, [*answers, key])


class UnreadableKey(BaseException):
    """Quotes what it was given, as a panic of a native library does; no Exception, as one is."""


@pytest.mark.parametrize("kind", [KeyError, ValueError, UnreadableKey, BadRequest], ids=lambda kind: kind.__name__)
async def test_an_internal_error_that_quotes_a_text_is_logged_by_its_class_and_stack(kind, caplog):
    """Raised by the tokenizer, by the verifier, and as the cause of another error."""
    caplog.set_level(logging.DEBUG)

    def fail(*_):
        raise kind(MARK) if kind is not BadRequest else EngineFailed("of the server") from BadRequest("prompt", MARK)

    async def verify(*_):
        fail()

    for broken in ("encode_chat", "verify"):
        made, peers = ingress(EdgePeers()), EdgePeers()
        if broken == "verify":
            made = ingress(peers)
            peers.verifier = partial(_verifier_with, peers.verifier, verify)
        async with http_at(served_ingress=made) as (server, _):
            with pytest.MonkeyPatch.context() as patch:
                if broken == "encode_chat":
                    patch.setattr(made.tokenizer("demo"), "encode_chat", fail, raising=False)
                status, _, answer = await post(server, CHAT, {"messages": MESSAGES})
        assert status == 500 and MARK not in str(answer)
    assert not leaks(caplog.text, [])
    assert kind.__name__ in caplog.text and "in fail" in caplog.text, "the class and the stack are there"


def _verifier_with(make, verify, *given):
    handle = make(*given)
    handle.verify = verify
    return handle


def test_all_failures_of_the_services_are_logged_without_what_errors_quote():
    """`exc_info` and `log.exception` would log the messages of all errors."""
    found = []
    for folder in SERVICES:
        for path in (ROOT / folder).rglob("*.py"):
            for call in (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)):
                quotes = ast.unparse(call.func) == "log.exception" or any(
                    each.arg == "exc_info" for each in call.keywords
                )
                found += [f"{path}: {call.lineno}"] * quotes
    assert not found, f"use {failures.log_failure.__name__}"


def _shown_of(process: psutil.Process) -> str:
    """The command line and the environment of a process, which others on its machine may read."""
    with contextlib.suppress(psutil.Error):
        return "\n".join([*process.cmdline(), *(f"{name}={value}" for name, value in process.environ().items())])
    return ""


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_cluster_writes_no_text_and_no_secret_and_shows_none_of_its_processes(tmp_path, monkeypatch):
    """The files of all processes' logs, all status ports, and command line and environment of every child process,
    after the same requests: no text, API key, or password of Redis."""
    from cluster.deploy import router_addresses

    password = "wombat-of-redis"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("SECRET_OF_REDIS", password)
    with RedisServer() as store:
        redis.Redis.from_url(store.url).config_set("requirepass", password)
        config, key = configured(tmp_path, url=store.url, password_variable="SECRET_OF_REDIS")
        async with running_cluster(config) as address:
            (router,) = await asyncio.to_thread(router_addresses)
            answers = await ask_in_every_way(address, router["http"], key)
            pages = "\n".join([await page_of(each) for each in await asyncio.to_thread(_status_ports)])
            logs = _logs_of_ray()
            shown = "\n".join(map(_shown_of, psutil.Process().children(recursive=True)))
    written = {path: path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()}
    assert any('"request_id"' in text for text in written.values()), "the router's log is among them"
    assert "dendro_verifier_steps_total" in pages and "dendro_drafter_trees_total" in pages
    for where, text in {**written, "status": pages, "processes": shown}.items():
        assert not leaks(text, [*answers, key]), where
        assert password not in text, where


def _logs_of_ray() -> Path:
    """The logs of this process's Ray; `session_latest` may be that of another process's."""
    import ray

    return Path(ray._private.worker._global_node.get_logs_dir_path())


def _status_ports() -> list[str]:
    from ray import serve

    from cluster.serve_config import APPLICATION

    names = ("router", "verifier-target", "drafter-same", "drafter-other")
    handles = [serve.get_deployment_handle(name, APPLICATION) for name in names]
    return [each["status"] for handle in handles for each in handle.broadcast("addresses").results(timeout_s=30)]


async def page_of(address: str) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()
