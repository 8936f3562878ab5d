"""A server of OpenAI's completions and chats around a tiny model, with faults planted on demand."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from cluster.certify.law import expected_law
from cluster.certify.outward.reference import Reference
from tests.support.tiny_models import make_model

LETTERS = (
    *map(chr, range(33, 127)),
    "\u0120",
    "\u010a",
)  # printable ASCII, space and line feed, as byte-level writes them
END = len(LETTERS)
TOWN = {"name": "Oslo", "people": 700_000, "size": "large"}


def make_checkpoint(folder: Path) -> Path:
    """A tiny Llama whose tokens are single characters, with likeliest tokens of all chances."""
    folder.mkdir(exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    model = make_model("llama", 1, vocab_size=END + 1, num_key_value_heads=2, **sizes, **ends)
    with torch.no_grad():
        model.lm_head.weight *= 1.5
        model.lm_head.weight[END] = 0
    model.save_pretrained(folder)
    tokenizer = Tokenizer(BPE({letter: token for token, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True)
class Faults:
    """What is wrong with the server, or not offered by it."""

    bias: float = 1.0  # of the likeliest token, at each place where its chance is below 0.9
    biased_from: int = 0  # the first token of an answer with the bias
    own_temperature: float | None = None  # in place of the request's
    ignores: frozenset[str] = frozenset()  # fields
    refuses: frozenset[str] = frozenset()  # fields, answered with 400
    wrong_token: bool = False  # the third best in place of the best, once in a greedy answer
    tie: bool = False  # the second best in place of the best where both are close
    rounded: bool = False  # log-probabilities in bfloat16
    lost_space: bool = False  # of an answer's text
    invalid: str = ""  # an answer in JSON, and the arguments of a call
    names_stop: bool = False  # a stop string is part of the text
    extra_usage: int = 0
    names_tokens: bool = True
    full: int = 0  # requests that are answered 429 first


class StubServer:
    """Answers requests as `faults` say."""

    def __init__(self, reference: Reference, faults: Faults) -> None:
        self.reference, self.faults = reference, faults
        self.bodies: list[dict[str, Any]] = []
        self.address = ""
        self.keys: set[str | None] = set()
        self._rng = np.random.default_rng(5)
        self._laws: dict[tuple[int, ...], torch.Tensor] = {}
        self._added: dict[tuple[Any, ...], np.ndarray] = {}  # the laws of draws, as running sums
        self._full = faults.full

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization"))
        if self._full:
            self._full -= 1
            return web.json_response({}, status=429, headers={"retry-after": "0"})
        if refused := self.faults.refuses & body.keys():
            return web.json_response({"error": {"message": f"{min(refused)} is not supported"}}, status=400)
        body = {name: value for name, value in body.items() if name not in self.faults.ignores}
        prompt = body["prompt"]
        if isinstance(prompt, list) and "ids" in self.faults.refuses:
            return web.json_response({"error": {"message": "a prompt is a text"}}, status=422)
        ids = prompt if isinstance(prompt, list) else self.reference.tokenizer.encode(prompt, begins=True)
        rng = np.random.default_rng(body["seed"]) if "seed" in body else self._rng
        choices = [self._choice(ids, body, rng) for _ in range(body.get("n", 1))]
        made = sum(choice.pop("made") for choice in choices)
        usage = {"prompt_tokens": len(ids), "completion_tokens": made + self.faults.extra_usage}
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return web.json_response({"choices": choices, "usage": usage})

    def _after(self, ids: tuple[int, ...]) -> torch.Tensor:
        if ids not in self._laws:
            self._laws[ids] = self.reference.logprobs(ids, len(ids))[0]
        return self._laws[ids]

    def _choice(self, ids: list[int], body: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        answer: list[int] = []
        finish = "length"
        for place in range(body["max_tokens"]):
            logprobs = self._after((*ids, *answer))
            token = self._token((*ids, *answer), logprobs, body, rng, place)
            if token == END:
                finish = "stop"
                break
            answer.append(token)
            text = self.reference.tokenizer.decode(answer)
            if found := [(text.index(stop), stop) for stop in body.get("stop", ()) if stop in text]:
                place, stop = min(found)
                text, finish = text[: place + len(stop) * self.faults.names_stop], "stop"
                break
        else:
            text = self.reference.tokenizer.decode(answer)
        if finish == "stop" and not body.get("stop"):
            text = self.reference.tokenizer.decode(answer)
        if self.faults.lost_space:
            text = re.sub(" ", "", text, count=1)
        given = None
        if "logprobs" in body and self.faults.names_tokens:
            given = self._logprobs(ids, answer)
        made = {"text": text, "finish_reason": finish, "logprobs": given, "made": len(answer)}
        return made | ({"token_ids": answer} if "return_token_ids" in body else {})

    def _token(
        self, ids: tuple[int, ...], logprobs: torch.Tensor, body: dict[str, Any], rng: np.random.Generator, place: int
    ) -> int:
        temperature = body.get("temperature", 1.0)
        if not temperature:
            best = logprobs.topk(3)
            if self.faults.wrong_token and place == 3:
                return int(best.indices[2])
            close = self.faults.tie and float(best.values[0] - best.values[1]) < 0.05
            return int(best.indices[int(close)])
        temperature = self.faults.own_temperature or temperature
        asked = temperature, body.get("top_k", 0), body.get("top_p", 1.0)
        if (key := (ids, place, *asked)) not in self._added:
            self._added[key] = np.cumsum(self._law(logprobs, place, *asked))
        added = self._added[key]
        return min(int(np.searchsorted(added, rng.random() * added[-1], side="right")), len(added) - 1)

    def _law(self, logprobs: torch.Tensor, place: int, *asked: Any) -> np.ndarray:
        law = expected_law(logprobs, *asked)
        if self.faults.bias != 1 and place >= self.faults.biased_from and law.max() < 0.9:
            top = int(law.argmax())
            more = law[top] * self.faults.bias
            law = law * (1 - more) / (1 - law[top])
            law[top] = more
        return law

    def _logprobs(self, ids: list[int], answer: list[int]) -> dict[str, Any]:
        texts = [self.reference.token_text(token) for token in answer]
        values, tops = [], []
        for place, token in enumerate(answer):
            logprobs = self._after((*ids, *answer[:place]))
            if self.faults.rounded:
                logprobs = logprobs.bfloat16().double()
            best = logprobs.topk(5).indices.tolist()
            values.append(float(logprobs[token]))
            tops.append({self.reference.token_text(each): float(logprobs[each]) for each in {*best, token}})
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops}

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization"))
        if refused := self.faults.refuses & {*body, "chat"}:
            return web.json_response({"error": {"message": f"{min(refused)} is not supported"}}, status=400)
        text = self.faults.invalid or json.dumps(TOWN)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if "tools" in body:
            name = {"name": "describe_town", "arguments": text}
            message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": name}]}
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


@asynccontextmanager
async def stub_at(reference: Reference, faults: Faults) -> AsyncIterator[StubServer]:
    """The server, at `address`."""
    stub = StubServer(reference, faults)
    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", stub.models),
            web.post("/v1/completions", stub.complete),
            web.post("/v1/chat/completions", stub.chat),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    stub.address = f"http://{host}:{port}"
    try:
        yield stub
    finally:
        await runner.cleanup()
