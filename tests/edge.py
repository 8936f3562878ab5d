"""Stand-ins for the edge's tests: a byte tokenizer, and places whose target is a hash of the text before each token."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from dendro.calls import Hello, Opened
from dendro.errors import PeerLost
from dendro.shapes import LevelShape, TreeShape
from dendro.text import Sampling, Text, Tokens, Verdict, cut_verdict
from dendro.tree import DraftTree, full_tree
from dendro.v1 import generation_pb2 as pb

from cluster.config import Config
from cluster.policies import RunningRequest
from cluster.policies.prior import PriorStore
from cluster.router.admission import Served
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions, Sessions

VOCABULARY = 300
END = 256
MAX_LENGTH = 512


class ByteTokenizer:
    """One token a byte, and one more that ends a text."""

    fingerprint = "bytes"
    size = 257

    def encode(self, text: str, begins: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(self.visible(ids)).decode(errors="replace")

    def visible(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token < 256]


def next_token(ids: Sequence[int], sampling: Sampling) -> int:
    """What the fake target says after `ids`: a function of text and seed, in bytes that are text of any kind."""
    seed = sampling.seed if sampling.temperature else 0
    digest = hashlib.sha256(f"{seed}:{sampling.sample_index}:{list(ids)}".encode()).digest()
    spoken = "the snake walks the tree; σ τ € 𝛼 ".encode()
    return spoken[digest[0] % len(spoken)]


def plain_answer(prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """What every stream must give, whatever happens on the way."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, sampling))
    return ids[len(prompt) :]


HELLO = Hello(3, "demo", "weights", "bytes", VOCABULARY, MAX_LENGTH, 64, 16, "float32", "bitwise", 1, (END,))
"""The hello of verifiers where a test sets no other."""


def resume_of(prompt: Sequence[int], held: Sequence[int] = (), seed: int = 0, target: str = HELLO.target) -> pb.Resume:
    """What a client sends that has these tokens of an answer to a prompt."""
    text = Tokens()
    text.extend(prompt)
    return pb.Resume(
        token_ids=held, seed=seed, prompt_tokens=len(prompt), prompt_digest=text.digests[-1], target=target
    )


class EdgeVerifier:
    """Walks the tree with the hash for a target."""

    def __init__(self, places: EdgePeers, text: Text) -> None:
        self.places = places
        self.moves = 0
        self.hello = places.hello
        self.opened = Opened(0, len(text) - 1, 10)

    async def meet(self) -> Hello:
        return self.places.hello or HELLO

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        self.places.rounds += 1
        await asyncio.sleep(self.places.pause_s)
        if self.places.dead:
            raise PeerLost("verifier: there is none")
        if self.places.broken:
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
        verdict = Verdict(tuple(emitted), tuple(path), tuple(ranks), None, len(emitted), verify_us=5)
        return cut_verdict(verdict, frozenset({END}), len(text), text.limits)

    async def close(self, text: Text) -> None:
        self.places.note_closed("verifier", text)


class EdgeDrafter:
    """Knows the hash too: its first guess is right."""

    def __init__(self, places: EdgePeers, text: Text) -> None:
        self.places = places
        self.opened: Opened | None = None

    async def draft(self, text: Text, shape: TreeShape) -> DraftTree:
        if shape.off or self.places.drafter_lost:
            return replace(DraftTree.root_only(text.root), missed=not shape.off)
        self.opened = self.opened or Opened(0, len(text) - 1, 10)
        if not isinstance(shape, LevelShape):  # the first guesses of each, one below the other
            shape = LevelShape((1,) * shape.depth)
        ids, levels = list(text.ids), []
        for count, width in zip(shape.levels, shape.widths, strict=True):
            right = next_token(ids, text.sampling)
            ids.append(right)
            siblings = [right, *(token for token in range(width) if token != right)][:width]
            levels.append(siblings * (count // width))
        return full_tree(text.root, shape, levels)

    async def close(self, text: Text) -> None:
        self.places.note_closed("drafter", text)


class EdgePeers:
    """Hands out the fakes, and breaks them where a test says so."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self.dead = self.broken = self.drafter_lost = False
        self.rounds = 0
        self.hello: Hello | None = None  # what verifiers say of themselves
        self.texts: list[Text] = []
        self.deadlines_s: list[float] = []
        self.adaptive: list[bool] = []  # of each drafter that was asked for: whether its rounds cut a wait short
        self.closed: list[tuple[str, tuple[int, ...]]] = []
        self.all_closed = asyncio.Event()  # both handles of a request

    def note_closed(self, who: str, text: Text) -> None:
        self.closed.append((who, tuple(text.ids)))
        if len(self.closed) % 2 == 0:
            self.all_closed.set()

    def drafter(
        self, target: str, text: Text, company: RunningRequest, deadline_s: float = math.inf, adaptive: bool = True
    ) -> EdgeDrafter:
        self.deadlines_s.append(deadline_s)
        self.adaptive.append(adaptive)
        return EdgeDrafter(self, text)

    def verifier(self, target: str, text: Text) -> EdgeVerifier:
        self.texts.append(text)
        return EdgeVerifier(self, text)


def config(**sections: object) -> Config:
    """One target with one drafter, whose checkpoints nobody opens."""
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
    places: EdgePeers, sessions: Sessions | None = None, priors: PriorStore | None = None, **sections: object
) -> Ingress:
    return Ingress(config(**sections), places, sessions or MemorySessions(), SERVED, priors)
