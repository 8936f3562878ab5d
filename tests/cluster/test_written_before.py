"""Records and states that an earlier commit wrote (tests/written, made by its make.py) are read and continued."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dendro.answer import Completion
from dendro.errors import PeerLost
from dendro.state import MemoryStates, StateHeader, unpack_state

from cluster.api.local import LocalClient
from cluster.config import DEMO_MODELS, Config
from cluster.peers.pools import LocalPeers
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions, check_token, pack_record, unpack_record

WRITTEN = Path(__file__).parents[1] / "written"
COMMITS = sorted(path.name for path in WRITTEN.iterdir() if path.is_dir())
TARGETS = ("target", "mamba2")


@dataclass
class Before:
    """What a commit stored of a session with one target."""

    folder: Path
    target: str

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / "session.json").read_text())[self.target]
        return facts

    @property
    def record(self) -> bytes:
        return (self.folder / f"{self.target}.record").read_bytes()

    @property
    def session(self) -> str:
        """The session's id; empty where the record is of a release that did not bind records to sessions."""
        name: str = self.facts.get("session", "")
        return name

    def record_of(self, name: str) -> bytes:
        """The record, as that of another session."""
        return pack_record(unpack_record(self.record, self.session), name) if self.session else self.record

    @property
    def states(self) -> dict[str, bytes]:
        return {name: (self.folder / file).read_bytes() for name, file in self.facts["states"].items()}


@pytest.fixture(params=[(commit, target) for commit in COMMITS for target in TARGETS], ids="-".join)
def before(request: pytest.FixtureRequest) -> Before:
    commit, target = request.param
    return Before(WRITTEN / commit, target)


def header_of(state: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(state[10 : 10 + int.from_bytes(state[6:10], "little")])
    return header


@asynccontextmanager
async def present(before: Before) -> AsyncIterator[tuple[LocalClient, MemorySessions, str]]:
    """The present code with what was stored, and the token of the session."""
    shared = {"dtype": "float32", "threads": 1}
    config = Config.of(
        {
            "targets": {"t": {"checkpoint": DEMO_MODELS / before.target, "max_length": 256, **shared}},
            "drafters": {"d": {"checkpoint": DEMO_MODELS / before.facts["drafter"], **shared}},
        },
        Path.cwd(),
    )
    states, sessions = MemoryStates(), MemorySessions()
    states.blobs |= before.states
    token = await sessions.new_token("")
    name = check_token(token, "", sessions._secret)
    sessions._records[name] = (before.record_of(name), float("inf"))
    peers = LocalPeers.load(config, states)
    await peers.start()
    yield LocalClient(Ingress(config, peers, sessions)), sessions, token
    await peers.close()


async def ask(client: LocalClient, prompt: str | list[int], **options: Any) -> Completion:
    return await client.generate_text(prompt, max_new_tokens=8, speculation="(2,1)", **options)


def test_every_stored_field_of_a_record_is_read(before: Before):
    record, facts = unpack_record(before.record, before.session), before.facts
    assert list(record.tokens) == facts["tokens"] and record.version == len(record.turns) == len(facts["turns"])
    for number, (turn, written) in enumerate(zip(record.turns, facts["turns"], strict=True)):
        assert (turn.request, turn.seed, turn.target) == (f"turn-{number}", written["seed"], written["target"])
        assert (turn.prompt, list(record.tokens[turn.prompt : turn.end])) == (
            written["prompt_tokens"],
            written["tokens"],
        )
    assert unpack_record(pack_record(record, "a"), "a") == record


@pytest.mark.slow
async def test_a_session_that_was_written_before_is_continued_from_its_record_and_states(before: Before):
    """The next turn has the tokens of a request with the whole text, and begins from the drafter's saved states, not
    from the target's: they have no version of the arithmetic in their names. A turn that was written before is answered
    from the record."""
    async with present(before) as (client, sessions, token):
        written = before.facts["turns"][1]
        again = await ask(client, written["prompt"], session=token, request_id="turn-1")
        assert list(again.token_ids) == written["tokens"] and again.started.target == written["target"]
        name = check_token(token, "", sessions._secret)
        assert sessions._records[name][0] == before.record_of(name), "nothing is written"
        following = await ask(client, [5, 6, 7], session=token)
        whole = await ask(client, [*before.facts["tokens"], 5, 6, 7])
        assert following.token_ids == whole.token_ids
        saved = {header_of(state)["tokens"] for state in before.states.values()}
        (drafter,) = following.complete.drafters
        assert drafter.opening is not None and drafter.opening.restored_tokens in saved
        if before.target == "mamba2":
            assert following.complete.target is not None and following.complete.target.restored_tokens == 0


def test_fields_that_a_reader_does_not_know_are_ignored(before: Before):
    stored = json.loads(before.record)
    stored.pop("checksum", None)
    stored["later"] = {"a": [1]}
    for turn in stored["turns"]:
        turn["later"] = "b"
    assert unpack_record(json.dumps(stored).encode(), "") == unpack_record(before.record, before.session)


def test_a_record_of_a_later_format_is_left_to_routers_that_read_it(before: Before):
    stored = json.loads(before.record) | {"format": 1000}
    with pytest.raises(PeerLost, match="format 1000"):
        unpack_record(json.dumps(stored).encode(), "")


def test_fields_of_a_states_header_that_a_reader_does_not_know_are_ignored(before: Before):
    for state in before.states.values():
        header = header_of(state)
        head = json.dumps(header | {"later": 1}, sort_keys=True).encode()
        old = int.from_bytes(state[6:10], "little")
        body = state[:6] + struct.pack("<I", len(head)) + head + state[10 + old : -32]
        expected = StateHeader(**{name: value for name, value in header.items() if name != "tensors"})
        tensors = unpack_state(body + hashlib.blake2b(body, digest_size=32).digest(), expected)
        assert list(tensors) == [name for name, *_ in header["tensors"]]
