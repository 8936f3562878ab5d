"""A router whose targets answer with given texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dendro.text import Text, Verdict, cut_verdict
from dendro.tree import DraftTree

from cluster.api.openai.server import HttpServer
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.sessions import MemorySessions
from tests.support.edge import END, HELLO, VOCABULARY, EdgePeers, EdgeVerifier, config, token_logprobs
from tests.support.http_api import client_of, http_at
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
        self.hello = replace(HELLO, max_length=MAX_LENGTH)
        self._tokenizer = tokenizer
        self._script: list[int] = []

    def will_say(self, text: str) -> None:
        """Set the text of answers, which has texts of special tokens."""
        self._script = self._tokenizer.encode(text + END_TEXT, begins=False)

    def verifier(self, target: str, text: Text, beside: Text | None = None, plain_first: bool = False) -> EdgeVerifier:
        super().verifier(target, text, beside, plain_first)
        return ScriptedVerifier(self, text, self._script)


@asynccontextmanager
async def scripted(tokenizer: CheckpointTokenizer) -> AsyncIterator[tuple[ScriptedPeers, HttpServer, Any]]:
    """Yields the peers of a served target, the server and OpenAI's client of it."""
    peers = ScriptedPeers(tokenizer)
    served = Served("demo", tokenizer, VOCABULARY, MAX_LENGTH, frozenset({END}), "float32")
    target = {"checkpoint": "target", "max_length": MAX_LENGTH, "max_depth": 8}
    router = {"default_new_tokens": 4096, "max_new_tokens": 4096}
    made = Ingress(config(targets={"demo": target}, router=router), peers, MemorySessions(), {"demo": served})
    async with http_at(served_ingress=made) as (server, _), client_of(server) as client:
        yield peers, server, client
