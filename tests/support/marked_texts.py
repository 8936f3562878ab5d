"""Requests over each API whose texts have a mark, and where the mark was found: it must be in answers alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable
from typing import Any

import grpc.aio
from dendro.chat import Chat
from dendro.client import AsyncClient, Client
from dendro.errors import BadRequest, DendroError
from dendro.structure import Structure
from dendro.v1 import generation_pb2 as pb
from dendro.v1.generation_pb2_grpc import GenerationServiceStub

MARK = "quivering zebrafinch"
MESSAGES = [{"role": "user", "content": MARK}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FUNCTION = {"name": "zebrafinch", "description": MARK, "parameters": {"type": "object", "properties": {MARK: {}}}}
OVER_HTTP: tuple[tuple[str, Any], ...] = (
    (CHAT, {"messages": MESSAGES, "max_tokens": 12}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 12, "stream": True, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 12, "prediction": {"type": "content", "content": MARK}}),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    (CHAT, {"messages": [{"role": MARK, "content": MARK}]}),
    (CHAT, {"messages": [{"role": "assistant", "content": MARK}], "max_tokens": 2}),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"fail": MARK}}),
    (CHAT, {"messages": MESSAGES, MARK: MARK}),
    (CHAT, {"messages": MESSAGES, "model": MARK}),
    (CHAT, {"messages": MESSAGES, "logit_bias": {MARK: 1}}),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": MARK}}),
    (
        COMPLETIONS,
        {"prompt": MARK, "max_tokens": 40, "stop": [MARK, "finch"], "structure": {"regex": MARK + "[0-9]{8}"}},
    ),
    (COMPLETIONS, {"prompt": MARK, "echo": True, "logprobs": 1, "max_tokens": 3}),
    (COMPLETIONS, {"prompt": MARK * 100_000}),
    (COMPLETIONS, {"prompt": MARK, "structure": {"regex": MARK + "("}}),
    (COMPLETIONS, {"prompt": MARK, "structure": {"grammar": f"start: {MARK}"}}),
    (COMPLETIONS, {"prompt": MARK, "structure": {"json_schema": {"type": MARK}}}),
    (COMPLETIONS, {"prompt": MARK, "dendro": {"session": MARK}}),
    (COMPLETIONS, {"prompt": MARK, "dendro": {"speculation": MARK}}),
    (COMPLETIONS, f'{{"prompt": "{MARK}'.encode()),
    (COMPLETIONS, b"\xff" + MARK.encode()),
    ("/tokenize", {"prompt": MARK}),
    ("/tokenize", {"prompt": MARK, "model": MARK}),
    ("/detokenize", {"tokens": list(MARK.encode())}),
    ("/abort", {"request_id": MARK}),
    ("/v1/" + MARK.replace(" ", "%20") + "?q=" + MARK.replace(" ", "+"), {"prompt": MARK}),
)
"""Requests that are answered, and some that are refused for each reason that quotes a value."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {"stop": [MARK], "temperature": 1.0, "seed": 1},
    {"structure": Structure.regex(MARK + "[0-9]{8}"), "keep_session": True},
    {"structure": Structure.choices([MARK, MARK + "es"])},
    {"structure": Structure.regex(MARK + "(")},
    {"prediction": MARK * 2},
    {"bad_words": [MARK, " " + MARK]},
    {"model": MARK},
    {"session": MARK},
    {"speculation": MARK},
    {"n": 2, "temperature": 1.0},
    {"temperature": -1.0},
)
"""Options of the Python client beside a prompt with the mark."""


async def ask_in_every_way(grpc_address: str, http_address: str, key: str) -> list[str]:
    """Send all requests, leave some before they end. Returns the texts of the answers."""
    answers = await _by_client(grpc_address, key) + await _by_bytes(grpc_address, key)
    answers += await asyncio.to_thread(_by_blocking_client, grpc_address, key)
    for path, body in OVER_HTTP:
        answers += await _over_http(http_address, path, body, key)
    await _over_http(http_address, COMPLETIONS, {"prompt": MARK, "max_tokens": 100, "stream": True}, key, leaves=True)
    await _over_http(http_address, COMPLETIONS, {"prompt": MARK}, MARK.replace(" ", "-"))
    return [each for each in answers if len(each) >= 8]


async def _by_client(address: str, key: str) -> list[str]:
    texts: list[str] = []
    async with AsyncClient(address, key=key, proxy=False, timeout_s=60.0) as client:
        for options in OPTIONS:
            with contextlib.suppress(DendroError):
                for done in await client.generate_samples(f"a {MARK}", **{"max_new_tokens": 40, **options}):
                    texts.append(done.text)
        with contextlib.suppress(BadRequest):
            texts.append((await client.generate_text(Chat(MESSAGES), max_new_tokens=12)).text)
        events = client.generate(f"left {MARK}", max_new_tokens=120)
        async for _ in events:
            break
        await events.aclose()
    async with AsyncClient(address, key=MARK.replace(" ", "-"), proxy=False) as stranger:
        with contextlib.suppress(DendroError):
            await stranger.generate_text(MARK)
    return texts


def _by_blocking_client(address: str, key: str) -> list[str]:
    with Client(address, key=key, proxy=False, timeout_s=60.0) as client:
        return [client.generate_text(MARK, max_new_tokens=20).text]


async def _by_bytes(address: str, key: str) -> list[str]:
    """Messages that the client does not send."""
    headers = (("authorization", f"Bearer {key}"), ("dendro-tenant", MARK.replace(" ", "-")))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = GenerationServiceStub(channel)
        calls = [
            stub.Generate(pb.GenerateRequest(text=MARK), metadata=headers),
            stub.Generate(pb.GenerateRequest(text=MARK, stop=[""], model=MARK), metadata=headers[:1]),
            channel.unary_stream("/dendro.v1.GenerationService/Generate", None, None)(
                MARK.encode(), metadata=headers[:1]
            ),
            channel.unary_unary("/dendro.v1.GenerationService/Tokenize", None, None)(
                MARK.encode(), metadata=headers[:1]
            ),
        ]
        for call in calls:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if hasattr(call, "__aiter__"):
                    async for _ in call:
                        pass
                else:
                    await call
        tokens = await stub.Tokenize(pb.TokenizeRequest(text=MARK), metadata=headers[:1])
        shown = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids), metadata=headers[:1])
        return [shown.text]


async def _over_http(address: str, path: str, body: Any, key: str, leaves: bool = False) -> list[str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    head += f"authorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head.encode() + data)
        async with asyncio.timeout(60):
            answer = await (reader.readuntil(b"data: ") if leaves else reader.read())
    finally:
        writer.close()
    status, _, rest = answer.partition(b"\r\n\r\n")
    found = json.loads(rest) if status.startswith(b"HTTP/1.1 200") and b"application/json" in status else {}
    return [each.get("text") or str(each.get("message", {}).get("content")) for each in found.get("choices", [])]


def leaks(written: str, texts: Iterable[str]) -> list[str]:
    """Lines that have the mark or one of the texts: as it is, as a literal, or as the ids of its bytes."""
    wanted: set[str] = set()
    for text in {MARK, *texts}:
        begin = text[:16]
        ids = ", ".join(map(str, begin.encode()))
        wanted |= {begin, ascii(begin)[1:-1], json.dumps(begin)[1:-1], ids, ids.replace(" ", "")}
    wanted |= {MARK.replace(" ", joint) for joint in ("+", "%20", "-")}
    return [line for line in written.splitlines() if any(each in line for each in wanted)]
