"""Fakes for the ingress's tests: a byte tokenizer, and peers whose target is a hash of the text before each token."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from dendro.calls import Hello, Opened
from dendro.errors import PeerLost
from dendro.logprobs import EchoedLogprobs, TokenLogprobs
from dendro.shapes import LevelShape
from dendro.text import Sampling, Text, Tokens, Verdict, cut_verdict
from dendro.tree import DraftTree, full_tree
from dendro.v1 import generation_pb2 as pb

from cluster.arms import Arm
from cluster.config import Config
from cluster.policies import RunningRequest
from cluster.policies.prior import PriorStore
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.sessions import MemorySessions, Sessions

VOCABULARY = 300
END = 256
MAX_LENGTH = 512


class ByteTokenizer:
    """One token a byte, and one more that ends a text."""

    fingerprint = "bytes"
    rewrites = False
    size = 257

    def encode(self, text: str, begins: bool) -> list[int]:
        return list(text.encode())

    encode_literally = encode

    def knows(self, text: str) -> bool:
        return True

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(self.visible(ids)).decode(errors="replace")

    def visible(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token < 256]

    def showing(self, shown: Collection[int] | None = None) -> ByteTokenizer:
        return self if shown is not None and END not in shown else ShowingByteTokenizer()

    def token_bytes(self) -> dict[int, bytes]:
        return {token: bytes([token]) for token in range(256)}

    def chat(self, messages, opens_answer: bool, names=None, tools=()) -> str:
        turns = [f"[{each['role']}]{each['content']}<end>" for each in messages]
        return "".join(turns) + "[assistant]" * opens_answer

    def encode_chat(self, conversation: str) -> list[int]:
        parts = [list(part.encode()) for part in conversation.split("<end>")]
        return [token for part in parts for token in [*part, END]][:-1]


class ShowingByteTokenizer(ByteTokenizer):
    """The same, with a text for the end."""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(bytes([token]) if token < END else b"<end>" for token in ids).decode(errors="replace")

    def visible(self, ids: Sequence[int]) -> list[int]:
        return list(ids)


def next_token(ids: Sequence[int], sampling: Sampling) -> int:
    """The fake target's token after `ids`: a function of text and seed; a byte of a one-byte or longer character."""
    seed = sampling.seed if sampling.temperature else 0
    digest = hashlib.sha256(f"{seed}:{sampling.sample_index}:{list(ids)}".encode()).digest()
    alphabet = "the snake walks the tree; σ τ € 𝛼 ".encode()
    return alphabet[digest[0] % len(alphabet)]


def plain_answer(prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """The answer that every stream must have, whatever fails on the way."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, sampling))
    return ids[len(prompt) :]


def token_logprobs(ids: Sequence[int], token: int, top: int) -> TokenLogprobs:
    """The fake target's log-probabilities after `ids`: numbers that float32 holds, a function of the text."""
    digest = hashlib.sha256(f"{token}:{list(ids)}".encode()).digest()
    return TokenLogprobs(-digest[0] / 8, tuple((digest[at], -digest[at] / 4 - at) for at in range(top)))


def plain_logprobs(prompt: Sequence[int], answer: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Those of an answer, whatever fails on the way."""
    return [token_logprobs([*prompt, *answer[:at]], token, top) for at, token in enumerate(answer)]


HELLO = Hello(3, "demo", "weights", "bytes", VOCABULARY, MAX_LENGTH, 64, 16, "float32", "bitwise", 1, (END,))
"""The hello of verifiers unless a test sets another."""


def resume_of(prompt: Sequence[int], held: Sequence[int] = (), seed: int = 0, target: str = HELLO.target) -> pb.Resume:
    """The resume of a client that has the tokens `held` of an answer to a prompt."""
    text = Tokens()
    text.extend(prompt)
    return pb.Resume(token_ids=held, seed=seed, prompt_tokens=len(prompt), prompt_digest=text.digest(), target=target)


class EdgeVerifier:
    """Verifies trees with the hash as its target."""

    def __init__(self, peers: EdgePeers, text: Text) -> None:
        self.peers = peers
        self.text = text
        self.moves = self.reopened = 0
        self.hello = peers.hello or HELLO
        self.opened = Opened(0, len(text) - 1, 10)

    async def prompt_logprobs(self) -> EchoedLogprobs:
        assert (first := self.text.echo_from) is not None
        self.peers.echoed.append(first)
        ids = self.text.ids
        return EchoedLogprobs.of(plain_logprobs(ids[:first], ids[first:], self.text.logprobs or 0))

    async def first_hello(self) -> Hello:
        return self.peers.hello or HELLO

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        self.peers.rounds += 1
        await self.peers.before_round()
        if self.peers.dead:
            raise PeerLost("verifier: there is none")
        if self.peers.broken:
            raise RuntimeError("secret of the inside")
        ids, row, emitted, path, ranks = list(text.ids), 0, [], [], []
        while True:
            token = next_token(ids, text.sampling)
            emitted.append(token)
            ids.append(token)
            path.append(row)
            children = tree.children(row)
            rank = next((rank for rank, child in enumerate(children) if tree.tokens[child] == token), None)
            if rank is None:
                break
            ranks.append(rank)
            row = children[rank]
        logprobs = () if text.logprobs is None else tuple(plain_logprobs(text.ids, emitted, text.logprobs))
        verdict = Verdict(tuple(emitted), tuple(path), tuple(ranks), None, len(emitted), verify_us=5, logprobs=logprobs)
        return cut_verdict(verdict, frozenset({END}), len(text), text.limits)

    async def close(self, text: Text) -> None:
        self.peers.note_closed("verifier", text)


class EdgeDrafter:
    """Drafts with the same hash: its first-ranked guesses are right."""

    def __init__(self, peers: EdgePeers, text: Text) -> None:
        self.peers = peers
        self.openings: dict[str, Opened] = {}
        self.lost: Counter[tuple[str, str]] = Counter()

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return self.lost

    def prepare(self, text: Text, arm: Arm) -> None:
        self.peers.prepared.append(arm)

    def order(self, text: Text, arm: Arm) -> str:
        return "a fake drafter is asked by the router alone"

    def ordered(self, text: Text, arm: Arm, verdict: Verdict) -> None:
        raise AssertionError("nothing was ordered")

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        if arm.off or self.peers.drafter_lost:
            self.lost.update([(arm.maker, "lost")] if arm.drafted else [])
            return replace(DraftTree.root_only(text.root), missed=not arm.off)
        shape = arm.shape
        self.openings.setdefault(arm.maker, Opened(0, len(text) - 1, 10))
        if not isinstance(shape, LevelShape):  # other shapes: a chain of first guesses
            shape = LevelShape((1,) * shape.depth)
        ids, levels = list(text.ids), []
        for count, width in zip(shape.levels, shape.widths, strict=True):
            right = next_token(ids, text.sampling)
            ids.append(right)
            siblings = [right, *(token for token in range(width) if token != right)][:width]
            levels.append(siblings * (count // width))
        return full_tree(text.root, shape, levels)

    async def close(self, text: Text) -> None:
        self.peers.note_closed("drafter", text)


class EdgePeers:
    """Makes the fakes; a test sets how they fail."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.dead = self.broken = self.drafter_lost = False
        self.rounds = 0
        self.hello: Hello | None = None  # of verifiers; None: HELLO
        self.texts: list[Text] = []
        self.beside: list[Text | None] = []  # the argument, of each verifier made
        self.echoed: list[int] = []  # the first position, of each prompt whose log-probabilities were asked for
        self.deadlines_s: list[float] = []
        self.adaptive: list[bool] = []  # the argument, of each drafter made
        self.plain_first: list[bool] = []  # the argument, of each verifier made
        self.prepared: list[Arm] = []  # the argument, of each drafter that was prepared
        self.closed: list[tuple[str, tuple[int, ...]]] = []
        self.all_closed = asyncio.Event()  # set when both handles of a request are closed

    async def before_round(self) -> None:
        """Awaited by every round; a test may set another."""
        await asyncio.sleep(self.pause_s)

    def note_closed(self, kind: str, text: Text) -> None:
        self.closed.append((kind, tuple(text.ids)))
        if len(self.closed) % 2 == 0:
            self.all_closed.set()

    def drafters(
        self, target: str, text: Text, gate: RunningRequest, deadline_s: float = math.inf, adaptive: bool = True
    ) -> EdgeDrafter:
        self.deadlines_s.append(deadline_s)
        self.adaptive.append(adaptive)
        return EdgeDrafter(self, text)

    def verifier(self, target: str, text: Text, beside: Text | None = None, plain_first: bool = False) -> EdgeVerifier:
        self.texts.append(text)
        self.beside.append(beside)
        self.plain_first.append(plain_first)
        return EdgeVerifier(self, text)


def config(**sections: object) -> Config:
    """One target with one drafter, whose checkpoints are never opened."""
    return Config.model_validate(
        {
            "targets": {"demo": {"checkpoint": "target", "max_length": MAX_LENGTH, "max_depth": 8}},
            "drafters": {"mamba": {"checkpoint": "mamba"}},
            "speculation": {"arms": ["off", "(1,1,1)", "(2,1)"]},
            **sections,
        }
    )


SERVED = {"demo": Served("demo", ByteTokenizer(), VOCABULARY, MAX_LENGTH, frozenset({END}), "float32")}


def ingress(
    peers: EdgePeers, sessions: Sessions | None = None, priors: PriorStore | None = None, **sections: object
) -> Ingress:
    return Ingress(config(**sections), peers, sessions or MemorySessions(), SERVED, priors)
