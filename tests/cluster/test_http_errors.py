"""OpenAI's HTTP API: what its errors say. Over real sockets."""

from __future__ import annotations

import pytest
from dendro.errors import BadRequest, LimitReached

from cluster.api.openai.completions import read_completion
from cluster.api.openai.errors import failure_of
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions
from tests.support.edge import MAX_LENGTH, SERVED, ByteTokenizer, EdgePeers, config
from tests.support.http_api import HELLO, http_at, post, raw

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def error_of(path, body, **headers):
    async with http_at() as (server, _):
        status, _, answer = await post(server, path, body, **headers)
    return status, answer["error"]


@pytest.mark.parametrize(
    "path, body, param",
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        (COMPLETIONS, {"prompt": "a" * MAX_LENGTH}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * MAX_LENGTH}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 600}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 500, "max_tokens": 20}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 500}, "max_completion_tokens"),
    ],
)
async def test_a_text_that_the_target_cannot_hold_has_openais_code_for_it(path, body, param):
    status, error = await error_of(path, body)
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert error["message"].startswith(f"{param}: ") and str(MAX_LENGTH) in error["message"]


@pytest.mark.parametrize("model", [None, "demo"])
@pytest.mark.parametrize("names", [("demo",), ("demo", "other")], ids=["one target", "two targets"])
async def test_an_unknown_session_is_named_by_its_field_with_what_to_do(model, names):
    served = config(targets={name: {"checkpoint": name} for name in names})
    asked = {"model": model, "messages": HELLO, "dendro": {"session": "none"}}
    made = Ingress(served, EdgePeers(), MemorySessions(), dict.fromkeys(names, SERVED["demo"]))
    async with http_at(served_ingress=made) as (server, _):
        status, _, answer = await post(server, CHAT, asked)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (404, "dendro.session", "session-unknown")
    assert error["message"] == (
        "dendro.session: there is no such session, or it has expired; begin another with the whole conversation"
    )


@pytest.mark.parametrize("given", [{"type": "json_schema"}, {"type": "json_schema", "json_schema": None}])
async def test_a_response_format_without_its_schema_is_refused_by_name(given):
    status, error = await error_of(CHAT, {"messages": HELLO, "response_format": given})
    assert (status, error["param"]) == (400, "response_format.json_schema")
    assert error["message"] == "response_format.json_schema: is missing"


def test_ignore_eos_is_another_name_of_ignore_end():
    both = {"ignore_eos": True, "ignore_end": True}
    for fields, expected in (({}, False), ({"ignore_eos": True}, True), (both, True)):
        asked, _ = read_completion({"prompt": "a"} | fields, "id", lambda _: ByteTokenizer())
        assert asked.message.ignore_end == expected
    with pytest.raises(BadRequest, match=r"^ignore_eos: is true, and ignore_end is not"):
        read_completion({"prompt": "a", "ignore_eos": True, "ignore_end": False}, "id", lambda _: ByteTokenizer())


@pytest.mark.parametrize(("wait_s", "header"), [(0.2, "1"), (59.5, "60"), (61.0, "60")])
def test_retry_after_is_at_most_the_60_s_beyond_which_openais_clients_ignore_it(wait_s, header):
    assert failure_of(LimitReached("tokens_per_minute: used up", wait_s), "a").headers["retry-after"] == header


@pytest.mark.parametrize(("target", "expected"), [("/v1/models", 200), ("/none?/v1/models", 404), ("", 200)])
@pytest.mark.parametrize("scheme", ["http", "HTTP", "https"])
async def test_a_request_whose_target_is_a_whole_address_is_answered_as_that_of_its_path(scheme, target, expected):
    async with http_at() as (server, _):
        asked = f"GET {scheme}://{server.address}{target} HTTP/1.1\r\nHost: {server.address}\r\n\r\n"
        assert (await raw(server, asked.encode(), more=True))[0] == expected


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_token": 5}, "max_token: is not supported by this server; the nearest name is max_tokens"),
        ({"top_kk": 5}, "top_kk: is not supported by this server; the nearest name is top_k"),
        ({"reasoning_effort": "low"}, "reasoning_effort: is not supported by this server"),
        (
            {"dendro": {"sesion": "a"}},
            "dendro.sesion: is not supported by this server; the nearest name is dendro.session",
        ),
        ({"m" * 100_000: 1}, f"{'m' * 58}: is not supported by this server"),
        ({"temperature": True}, "temperature: must be a number; got true"),
        ({"store": True}, "store: is true; only false is accepted, and has no effect"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_refused_field_is_shown_as_json_with_the_nearest_name_of_one_that_is_read(fields, message):
    _, error = await error_of(CHAT, {"messages": HELLO} | fields)
    assert error["message"] == message


async def test_a_wrong_path_is_answered_with_openais_paths_and_a_wrong_method_with_its_own_code():
    _, error = await error_of("/chat/completions", {})
    assert error["code"] == "NotFound" and "/v1/chat/completions" in error["message"]
    status, error = await error_of("/v1/models", {})
    assert (status, error["code"]) == (405, "MethodNotAllowed")


async def test_a_body_may_begin_with_a_byte_order_mark():
    async with http_at() as (server, _):
        status, _, _ = await post(server, COMPLETIONS, b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}')
    assert status == 200


async def test_a_stop_that_is_one_empty_text_is_refused_by_the_name_that_was_sent():
    _, error = await error_of(CHAT, {"messages": HELLO, "stop": ""})
    assert (error["param"], error["message"]) == ("stop", "stop: is empty; a stop string has at least one character")
