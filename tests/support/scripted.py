"""A router whose targets answer with given texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dendro.grammars import Grammars
from dendro.text import Text, Verdict, cut_verdict
from dendro.tree import DraftTree
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cluster.api.openai.server import HttpServer
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.sessions import MemorySessions
from tests.support import edge
from tests.support.edge import END, VOCABULARY, EdgePeers, EdgeVerifier, config, token_logprobs
from tests.support.http_api import HELLO, client_of, http_at
from tests.support.tiny_models import byte_tokenizer

END_TEXT = "<|end|>"
MAX_LENGTH = 8192


def scripted_tokenizer(folder: Path, template: str, special: Sequence[str] = ()) -> CheckpointTokenizer:
    """One token a byte, the end of text, other special tokens, and a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([END_TEXT, *special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "own.jinja").write_text(template)
    return CheckpointTokenizer(folder, "bytes", folder / "own.jinja")


class ScriptedVerifier(EdgeVerifier):
    """Its target says a script, and then ends the text."""

    def __init__(self, peers: EdgePeers, text: Text, script: Sequence[int]) -> None:
        super().__init__(peers, text)
        self._script = script

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        token = self._script[len(text.answer)]
        logprobs = () if text.logprobs is None else (token_logprobs(text.ids, token, text.logprobs),)
        verdict = Verdict((token,), (0,), (), None, 1, verify_us=5, logprobs=logprobs)
        return cut_verdict(verdict, frozenset({END}), len(text), text.limits)


class ScriptedPeers(EdgePeers):
    """Peers whose targets answer with what a test sets."""

    def __init__(self, tokenizer: CheckpointTokenizer) -> None:
        super().__init__()
        self.hello = replace(edge.HELLO, max_length=MAX_LENGTH)
        self.tokenizer = tokenizer
        self._script: list[int] = []

    def will_say(self, text: str) -> None:
        """Set the text of answers, which has texts of special tokens."""
        self._script = self.tokenizer.encode(text + END_TEXT, begins=False)

    def verifier(self, target: str, text: Text, beside: Text | None = None, plain_first: bool = False) -> EdgeVerifier:
        super().verifier(target, text, beside, plain_first)
        return ScriptedVerifier(self, text, self._script)


@dataclass(frozen=True, slots=True)
class ScriptedTarget:
    """A served target, and OpenAI's client of it."""

    peers: ScriptedPeers
    server: HttpServer
    client: Any

    async def ask(self, text: str, **fields: Any) -> Any:
        """The first choice of an answer with this text, after a check that its JSON is OpenAI's in strict mode, and
        that a stream has the same parts."""
        self.peers.will_say(text)
        asked = {"model": "demo", "messages": HELLO} | fields
        create = partial(self.client.chat.completions.create, **asked, extra_headers={"Idempotency-Key": "one"})
        answer = await create()
        ChatCompletion.model_validate(answer.model_dump(exclude_unset=True), strict=True)
        stream = await create(stream=True, stream_options={"include_usage": True})
        parts = [part async for part in stream]
        for part in parts:
            ChatCompletionChunk.model_validate(part.model_dump(exclude_unset=True), strict=True)
        assert parts[-1].usage == answer.usage
        assert joined(parts) == [(*parts_of(each.message), each.finish_reason) for each in answer.choices]
        return answer.choices[0]

    def prompt(self) -> str:
        """The last request's prompt, special tokens in it."""
        text = self.peers.texts[-1]
        return self.peers.tokenizer.showing().decode(text.ids[: text.prompt_length])


def parts_of(message: Any) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Reasoning, content and calls of a message."""
    calls = [(each.id, each.function.name, each.function.arguments) for each in message.tool_calls or []]
    return getattr(message, "reasoning_content", ""), message.content or "", calls


def joined(parts: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Those of each choice of a stream, and how it finished."""
    found: dict[int, tuple[Any, ...]] = {}
    for part in parts:
        for each in part.choices:
            reasoning, content, calls, finish = found.get(each.index, ("", "", [], None))
            assert finish is None, "nothing comes after the end"
            added = parts_of(each.delta)
            numbers = [call.index for call in each.delta.tool_calls or []]
            assert numbers == [*range(len(calls), len(calls) + len(numbers))]
            found[each.index] = (reasoning + added[0], content + added[1], calls + added[2], each.finish_reason)
    return [found[index] for index in sorted(found)]


@asynccontextmanager
async def scripted(tokenizer: CheckpointTokenizer) -> AsyncIterator[ScriptedTarget]:
    """Yields a target that is served at a router."""
    peers, grammars = ScriptedPeers(tokenizer), Grammars(tokenizer.token_bytes, VOCABULARY)
    served = Served("demo", tokenizer, VOCABULARY, MAX_LENGTH, frozenset({END}), "float32", grammars=grammars)
    target = {"checkpoint": "target", "max_length": MAX_LENGTH, "max_depth": 8}
    router = {"default_new_tokens": 4096, "max_new_tokens": 4096}
    made = Ingress(config(targets={"demo": target}, router=router), peers, MemorySessions(), {"demo": served})
    async with http_at(served_ingress=made) as (server, _), client_of(server) as client:
        yield ScriptedTarget(peers, server, client)
