"""API keys at a router's gRPC port: who is let in, whose tenant a call has, and what each limit refuses."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import random
import stat
import threading
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from dendro.answer import REASON_KEY, RETRY_AFTER_KEY
from dendro.client import AsyncClient, Client
from dendro.errors import BadRequest, LimitReached, NotFound, Unauthenticated
from dendro.tasks import AT_ONCE, LONG
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc
from typer.testing import CliRunner

from cluster import cli
from cluster.api.callers import Callers, KeyRing
from cluster.api.grpc import serve_router
from cluster.api.keys import ApiKeys, new_key, read_keys, write_keys
from cluster.config import Config
from cluster.router.allowance import WINDOW_S, Allowance, KeyLimits, MinuteCount
from tests.support.edge import ByteTokenizer, EdgePeers, config, ingress
from tests.support.http_api import http_at, raw
from tests.support.sockets import until

PROMPT = "walk the "
ALPHABET = set("the snake walks the tree; σ τ € 𝛼 ".encode())
"""All tokens of the fake target."""
TARGETS = {"demo": {"checkpoint": "target"}}


class KeysOnDisk:
    """A file of keys, and the text of each by its name."""

    def __init__(self, path):
        self.path = path
        self.texts: dict[str, str] = {}
        write_keys(path, ApiKeys())

    def add(self, name, tenant=None, **limits):
        self.texts[name], key = new_key(name, name if tenant is None else tenant, KeyLimits(**limits))
        write_keys(self.path, read_keys(self.path).with_key(key))
        return self.texts[name]

    def remove(self, name):
        write_keys(self.path, read_keys(self.path).without(name))


@pytest.fixture
def keys(tmp_path):
    return KeysOnDisk(tmp_path / "keys.json")


@asynccontextmanager
async def serving(keys, peers=None, **sections):
    """A router that needs keys. Yields its address and who may call, which follows the file once a test asks."""
    callers = Callers(config(auth={"keys": keys.path}, **sections))
    server = await serve_router(ingress(peers or EdgePeers(), auth={"keys": keys.path}, **sections), callers=callers)
    try:
        yield server.address
    finally:
        await server.stop()


async def refused_with(address, key, **request):
    """The error of a call that does not repeat."""
    async with AsyncClient(address, key=key, timeout_s=20.0) as client:
        with pytest.raises(Exception) as raised:
            await client.generate_text(PROMPT, **{"max_new_tokens": 2, **request})
    return raised.value


def test_a_file_has_hashes_alone_and_its_owner_alone_can_read_it(keys):
    text = keys.add("alice", requests_per_minute=3)
    stored = keys.path.read_text()
    assert text not in stored and text[24:] not in stored
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert read_keys(keys.path).keys[0].limits == KeyLimits(requests_per_minute=3)


@pytest.mark.parametrize(
    "text, line, key",
    [
        ('{"keys": [],\n "keys": []}', 2, "keys"),
        (
            '{"keys": [\n {"name": "a", "tenant": "a"},\n {"name": "b",\n  "tenant": "b", "na\\u006de": "c"}]}',
            4,
            "name",
        ),
    ],
)
def test_a_key_of_json_that_occurs_twice_in_the_file_is_refused_with_its_line(tmp_path, text, line, key):
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(BadRequest, match=rf"^auth\.keys: .*keys\.json: line {line}: the key '{key}' occurs twice"):
        read_keys(tmp_path / "keys.json")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tenant": "é"}, "keys.0.tenant"),
        ({"requests_per_minute": 0}, "keys.0.requests_per_minute"),
        ({"tokens": 3}, "keys.0.tokens"),
        ({"sha256": "AB"}, "keys.0.sha256"),
        ({"name": "a b"}, "keys.0.name"),
    ],
)
def test_a_key_with_a_bad_field_is_refused_by_the_fields_name(keys, change, field):
    keys.add("alice")
    entry = json.loads(keys.path.read_text())["keys"][0] | change
    keys.path.write_text(json.dumps({"keys": [entry]}))
    with pytest.raises(BadRequest, match=rf"auth\.keys: .*: {field}: "):
        read_keys(keys.path)


async def test_calls_without_a_valid_key_are_refused_alike_and_none_of_their_request_is_read(keys):
    known = keys.add("alice")
    wrong = known[:-1] + ("a" if known[-1] != "a" else "b")
    unknown = "dendro-" + "0" * 16 + known[23:]
    seen = set()
    async with serving(keys) as address, grpc.aio.insecure_channel(address) as channel:
        stream: Any = channel.stream_stream
        for value in (None, f"Bearer {wrong}", f"Bearer {unknown}", "Bearer x", f"Basic {known}", known):
            metadata = () if value is None else (("authorization", value),)
            # A stream for the client too, so that it can call without sending its request.
            call = stream("/dendro.v1.GenerationService/Generate")(metadata=metadata)
            async with asyncio.timeout(10):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            seen.add((await call.details(), dict(await call.trailing_metadata())[REASON_KEY]))
            with pytest.raises(grpc.aio.AioRpcError) as info:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata)
            assert info.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert seen == {("authorization: must be `Bearer` and a valid key", "Unauthenticated")}
        async with AsyncClient(address, key=known) as client:
            assert await client.models() and (await client.generate_text(PROMPT, max_new_tokens=2)).token_ids
        assert isinstance(await refused_with(address, wrong), Unauthenticated)


def test_each_key_is_compared_in_constant_time_also_one_whose_id_is_unknown(keys, monkeypatch):
    known, compared = keys.add("alice"), []

    def compare(one, other):
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring = KeyRing(keys.path)
    assert ring.caller_of(known) is not None
    assert ring.caller_of("dendro-" + "0" * 16 + known[23:]) is None is ring.caller_of("nothing")
    assert compared == [(64, 64)] * 3


async def test_a_session_belongs_to_the_tenant_of_its_key_and_looks_unknown_to_another(keys):
    one, two, three = keys.add("one", "team"), keys.add("two", "team"), keys.add("three")
    async with serving(keys) as address, AsyncClient(address, key=one) as client:
        session = (await client.generate_text(PROMPT, keep_session=True, max_new_tokens=2)).complete.session
        async with AsyncClient(address, key=two) as same:
            assert (await same.generate_text("on", session=session, max_new_tokens=1)).token_ids
        foreign = await refused_with(address, three, session=session)
        unknown = await refused_with(address, three, session=session[:-1] + "_")
        assert isinstance(foreign, NotFound) and str(foreign) == str(unknown)


async def test_however_many_long_prompts_one_tenant_sends_anothers_is_read(keys, monkeypatch):
    one, two = keys.add("one"), keys.add("two")
    go, begun = threading.Event(), []

    def encode(_: ByteTokenizer, text: str, begins: bool) -> list[int]:
        if text.startswith("many"):
            begun.append(text)
            go.wait()
        return [*text.encode()]

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    async with serving(keys) as address, AsyncClient(address, key=one) as many, AsyncClient(address, key=two) as other:
        asked = [asyncio.create_task(many.tokenize("many" * LONG)) for _ in range(40)]
        try:
            await until(lambda: len(begun) >= AT_ONCE)
            async with asyncio.timeout(30):
                assert len(await other.tokenize("a" * 2 * LONG)) == 2 * LONG
        finally:
            go.set()
        await asyncio.gather(*asked)
        assert len(begun) == 40


async def test_a_caller_with_a_key_cannot_name_another_tenant(keys):
    key = keys.add("alice")
    async with serving(keys) as address:
        async with AsyncClient(address, key=key, tenant="bob") as client:
            with pytest.raises(BadRequest, match="dendro-tenant"):
                await client.models()
        async with AsyncClient(address, key=key, tenant="alice") as client:
            assert await client.models()


def test_without_keys_a_tenant_is_believed_on_the_loopback_alone():
    near = Callers(config())
    assert near.caller([("dendro-tenant", "a")]).tenant == "a"
    assert near.caller([("authorization", "Bearer whatever")]).tenant == ""
    far = Callers(config(grpc={"host": "0.0.0.0"}, auth="none"))
    assert far.caller([]).tenant == ""
    with pytest.raises(BadRequest, match="dendro-tenant"):
        far.caller([("dendro-tenant", "a")])


async def test_a_tenant_or_a_key_that_is_given_twice_is_refused_by_both_doors(keys):
    """A gateway that adds its header leaves its client's in place, and the doors would go by different ones."""
    twice = ("dendro-tenant", "a"), ("dendro-tenant", "b")
    key = ("authorization", f"Bearer {keys.add('alice')}")
    with_keys = {"auth": {"keys": keys.path}}
    for headers, sections, code, status in (
        (twice, {}, grpc.StatusCode.INVALID_ARGUMENT, 400),
        ((key, key), with_keys, grpc.StatusCode.UNAUTHENTICATED, 401),
        ((key, *twice), with_keys, grpc.StatusCode.INVALID_ARGUMENT, 400),
    ):
        router = await serve_router(ingress(EdgePeers(), **sections))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        request = f"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}\r\n"
        try:
            async with grpc.aio.insecure_channel(router.address) as channel, http_at(**sections) as (server, _):
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=headers)
                assert refused.value.code() is code
                assert (await raw(server, request.encode(), more=True))[0] == status
        finally:
            await router.stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.1.2.3", "router.example"])
def test_a_host_beyond_the_loopback_needs_keys_or_auth_none(host, tmp_path):
    def loaded(**auth):
        return Config.of({"targets": TARGETS, "grpc": {"host": host}, **auth}, tmp_path)

    with pytest.raises(BadRequest, match=r"^grpc\.host: "):
        loaded()
    assert loaded(auth="none").auth.open
    assert loaded(auth={"keys": "keys.json"}).auth.keys == tmp_path / "keys.json"
    again = loaded(auth="none").model_dump(mode="json", exclude_unset=True)
    assert Config.of(again, tmp_path).auth.open, "a configuration for Serve says the same"
    assert not loaded(auth="none").private().reachable


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_the_loopback_needs_no_keys(host, tmp_path):
    assert Config.of({"targets": TARGETS, "grpc": {"host": host}}, tmp_path).auth.keys is None


LIMITS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"answers": 2}, {"n": 3}, BadRequest, "n: is 3; this key's limit `answers` is 2 at this router"),
    ({"prompt_tokens": 5}, {}, BadRequest, "prompt: .* limit `prompt_tokens` is 5"),
    ({"new_tokens": 4}, {"max_new_tokens": 5}, BadRequest, "max_new_tokens: .* 1 to 4; .* limit `new_tokens` is 4"),
    ({"structures": False}, {"json": True}, BadRequest, "structure: .* limit `structures` is off"),
    ({"tokens_per_minute": 10}, {}, BadRequest, "max_new_tokens: makes 11 tokens .* `tokens_per_minute` is 10"),
    ({"tokens_per_minute": 9}, {}, BadRequest, "prompt: makes a text of 9 tokens; .* `tokens_per_minute` is 9"),
]


@pytest.mark.parametrize(("limits", "request_", "kind", "words"), LIMITS, ids=lambda each: str(each)[:24])
async def test_a_request_that_a_key_never_may_send_is_refused_by_its_field(keys, limits, request_, kind, words):
    key = keys.add("alice", **limits)
    message = pb.GenerateRequest(text=PROMPT, max_new_tokens=request_.get("max_new_tokens", 2), n=request_.get("n", 1))
    if "json" in request_:
        message.structure.json_schema = "{}"
    async with serving(keys) as address, AsyncClient(address, key=key) as client:
        with pytest.raises(kind, match=words):
            async for _ in client.send(message):
                pass


@pytest.mark.parametrize("limit", [{"new_tokens": 4}, {"tokens_per_minute": len(PROMPT) + 4}])
async def test_a_default_length_is_cut_to_the_keys(keys, limit):
    key = keys.add("alice", **limit)
    async with serving(keys) as address, AsyncClient(address, key=key) as client:
        assert len((await client.generate_text(PROMPT, ignore_end=True)).token_ids) == 4


async def test_a_default_length_is_cut_so_that_all_answers_of_a_request_fit_in_the_keys_minute(keys):
    key = keys.add("alice", tokens_per_minute=len(PROMPT) + 9)
    async with serving(keys) as address, AsyncClient(address, key=key) as client:
        answers = await client.generate_samples(PROMPT, n=2, ignore_end=True)
    assert [len(each.token_ids) for each in answers] == [4, 4]


async def test_requests_over_a_minutes_limit_are_refused_by_its_name_with_a_time_and_others_are_served(keys):
    key, other = keys.add("alice", requests_per_minute=3), keys.add("bob")
    async with serving(keys) as address:
        async with AsyncClient(address, key=key) as client:
            for _ in range(3):
                await client.generate_text(PROMPT, max_new_tokens=1)
            with pytest.raises(LimitReached, match="requests_per_minute: this key's limit here is 3") as limited:
                await client.generate_text(PROMPT, max_new_tokens=1)
            assert 0 < limited.value.retry_after_s <= WINDOW_S + 1
        with Client(address, key=other) as blocking:
            assert (await asyncio.to_thread(blocking.generate_text, PROMPT, max_new_tokens=1)).token_ids
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                pb.GenerateRequest(text=PROMPT), metadata=(("authorization", f"Bearer {key}"),)
            )
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert 0 < int(dict(await call.trailing_metadata())[RETRY_AFTER_KEY]) <= WINDOW_S + 1


async def test_answers_at_once_are_limited_and_one_whose_client_leaves_makes_room(keys):
    key, peers = keys.add("alice", answers=1), EdgePeers()
    peers.pause_s = 0.01
    async with serving(keys, peers) as address, AsyncClient(address, key=key) as client:
        running = client.generate(PROMPT, max_new_tokens=400, ignore_end=True)
        await anext(running)
        with pytest.raises(LimitReached, match="answers: this key's limit here is 1; try again in 1 s"):
            await client.generate_text(PROMPT, max_new_tokens=1)
        await running.aclose()
        await until(lambda: peers.closed)
        async with asyncio.timeout(10):
            while True:
                try:
                    await client.generate_text(PROMPT, max_new_tokens=1)
                    break
                except LimitReached:  # the router has not seen that the client left
                    await asyncio.sleep(0.01)


async def test_tokens_that_an_answer_did_not_use_are_given_back(keys):
    """Each request takes 9 + 40 tokens of 60; the first stops after one token, so the second has room."""
    key = keys.add("alice", tokens_per_minute=60)
    async with serving(keys) as address, AsyncClient(address, key=key) as client:
        first = await client.generate_text(PROMPT, max_new_tokens=40, stop_ids=sorted(ALPHABET))
        assert len(first.token_ids) == 1
        await client.generate_text(PROMPT, max_new_tokens=30, ignore_end=True)
        with pytest.raises(LimitReached, match="tokens_per_minute: this key's limit here is 60"):
            await client.generate_text(PROMPT, max_new_tokens=30)


async def test_keys_follow_their_file_and_one_that_stays_keeps_what_it_used(keys, caplog):
    alice = keys.add("alice", requests_per_minute=2)
    ring = KeyRing(keys.path)
    held = ring.caller_of(alice)
    assert held is not None
    held.allowance.take_request()
    bob = keys.add("bob")
    assert ring.caller_of(bob) is None
    await ring.reload()
    again, other = ring.caller_of(alice), ring.caller_of(bob)
    assert again is not None and other is not None and other.tenant == "bob"
    again.allowance.take_request()
    with pytest.raises(LimitReached):
        again.allowance.take_request()
    keys.remove("alice")
    await ring.reload()
    assert ring.caller_of(alice) is None and ring.caller_of(bob) is not None
    for broken in ("{", '{"keys": 3}'):
        keys.path.write_text(broken)
        await ring.reload()
        assert ring.caller_of(bob) is not None and "the last 1 keys stay" in caplog.text
    keys.path.unlink()
    await ring.reload()
    assert ring.caller_of(bob) is not None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
async def test_what_is_no_file_is_not_waited_for_and_the_keys_stay_until_there_is_one(keys, caplog, make):
    alice = keys.add("alice")
    ring = KeyRing(keys.path)
    keys.path.rename(kept := keys.path.with_suffix(".kept"))
    make(keys.path)
    with pytest.raises(BadRequest, match=r"auth\.keys: .*cannot be read"):
        read_keys(keys.path)
    await ring.reload()
    assert ring.caller_of(alice) is not None and "the last 1 keys stay" in caplog.text
    (keys.path.rmdir if make is os.mkdir else keys.path.unlink)()
    kept.rename(keys.path)
    bob = keys.add("bob")
    await ring.reload()
    assert ring.caller_of(bob) is not None


async def test_a_running_router_takes_a_key_that_is_added(keys, monkeypatch):
    monkeypatch.setattr("cluster.api.callers.RELOAD_S", 0.01)
    async with serving(keys) as address:
        key = keys.add("alice")
        async with asyncio.timeout(10), AsyncClient(address, key=key) as client:
            while True:
                try:
                    assert await client.models()
                    break
                except Unauthenticated:
                    await asyncio.sleep(0.01)


def test_in_any_minute_at_most_the_limit_is_taken_and_the_time_to_try_again_is_enough():
    """Random amounts at random times, some given back, against a list of all that was taken."""
    rng, now, limit = random.Random(0), [0.0], 50
    count = MinuteCount("tokens_per_minute", lambda: now[0])
    taken: list[tuple[float, int]] = []
    for _ in range(4000):
        now[0] += rng.expovariate(1.0)
        amount = rng.randint(1, 20)
        try:
            second = count.take(amount, limit)
        except LimitReached as error:
            assert error.retry_after_s <= WINDOW_S + 2
            if rng.random() < 0.3:
                now[0] += error.retry_after_s
                count.take(amount, limit)
                taken.append((now[0], amount))
        else:
            unused = rng.randint(0, amount) if rng.random() < 0.3 else 0
            count.give_back(unused, second)
            taken.append((now[0], amount - unused))
        assert sum(amount for at, amount in taken if at > now[0] - WINDOW_S) <= limit
        assert len(count._taken) <= WINDOW_S + 1


def test_routers_share_the_limits_of_a_key():
    whole = KeyLimits(300, 1000, 3, prompt_tokens=100, new_tokens=50, structures=False)
    assert whole.share_of(2) == KeyLimits(150, 500, 1, 100, 50, False)
    assert whole.share_of(1) == whole
    assert KeyLimits(answers=1).share_of(4).answers == 1


def test_a_key_without_limits_is_never_refused():
    allowance = Allowance(KeyLimits(), lambda: 0.0)
    for _ in range(1000):
        allowance.take_request()
        allowance.take_answers(1)
        allowance.take_tokens(1000, 1000)
    allowance.check_prompt(1 << 20)
    allowance.check_structure()


def test_a_key_is_shown_once_by_the_command_that_makes_it(tmp_path):
    file, runner = tmp_path / "keys.json", CliRunner()

    def run(*words):
        return runner.invoke(cli.app, ["keys", *words], env={"COLUMNS": "200"})

    made = run("add", str(file), "alice", "--tenant", "team", "--requests-per-minute", "300", "--no-structures")
    (key,) = made.stdout.split()
    ring = KeyRing(file)
    assert made.exit_code == 0 and ring.caller_of(key) is not None
    shown = run("list", str(file)).stdout
    assert "alice" in shown and "team" in shown and "requests_per_minute 300, structures off" in shown
    assert key not in shown and key[24:] not in shown
    twice = run("add", str(file), "alice")
    assert isinstance(twice.exception, BadRequest) and "already" in str(twice.exception)
    assert run("remove", str(file), "alice").exit_code == 0 and not read_keys(file).keys
    assert isinstance(run("remove", str(file), "alice").exception, BadRequest)


async def test_generate_takes_its_key_from_the_environment_or_a_file_and_has_no_option_for_it(keys, tmp_path):
    key = keys.add("alice")
    (tmp_path / "key").write_text(key + "\n")

    async def run(*words, **environment):
        words = ("generate", PROMPT, "--max-new-tokens", "2", "--json", *words)
        return await asyncio.to_thread(CliRunner().invoke, cli.app, list(words), env={"COLUMNS": "200", **environment})

    async with serving(keys) as address:
        assert (await run("--address", address, DENDRO_API_KEY=key)).exit_code == 0
        assert (await run("--address", address, "--key-file", str(tmp_path / "key"), DENDRO_API_KEY="")).exit_code == 0
        refused = await run("--address", address, DENDRO_API_KEY="")
        assert isinstance(refused.exception, Unauthenticated)
        secret = await run("--address", address, DENDRO_API_KEY="a secret with spaces")
        assert isinstance(secret.exception, BadRequest) and "a secret" not in str(secret.exception)
        assert (await run("--address", address, "--key", key)).exit_code == 2, "there is no such option"
