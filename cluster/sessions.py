"""Session records: the text of a conversation, and what any replica needs to continue it.

The record alone defines a session; saved states only save time. Of two writers that read the same version one gets
Conflict. A session's token is made here: 128 random bits and a tag that binds them to the tenant. A token that is
unknown, of another tenant, forged or expired always gets the same error.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import redis.exceptions
from dendro.clock import Clock
from dendro.errors import Conflict, NotFound, PeerLost
from dendro.modes import VerificationMode
from dendro.tasks import off_loop
from dendro.text import packed_ids

from cluster.redis_client import REDIS_FAULTS, connect, eviction_warning, reason_of, transaction
from cluster.state_store import CallTurns, CircuitBreaker, CircuitOpen, StoreBusy, within_two_attempts

PREFIX = "dendro:session:"
SECRET_KEY = "dendro:session-secret"
ID_BYTES = 16
TAG_BYTES = 16
SECRET_BYTES = 32
MAX_TOKEN = 64
"""Characters; our tokens have 45."""
CALL_BUDGET_S = 1.0
"""Seconds for both attempts of a call."""
TURN_S = 5.0
"""Seconds that a call waits for its turn. Where the server fails, the circuit opens and ends the wait earlier."""
WRITES = 3
"""Number of times that a write, interrupted by another one or a broken connection, looks whether it may be made."""
CHECKSUM = "checksum"
"""Field of a stored record: over the others and the session's id, so that no session gets another's text. Records of
releases without it are read too."""
TOKEN_BYTES = 6
"""Approximate bytes of a stored token: base64 of 4 bytes."""
MAX_RECORD_BYTES = 64 << 20
"""Bytes of a record that are read, enough for ten million tokens. A longer one is not ours, and counts as missing."""
RECORD_FORMAT = 3
"""Format of records that are written. Readers ignore fields that they do not know, so a new field needs no new format.
A release with a new format reads the one before for as long as records last (`redis.record_ttl_s`)."""
READ_FORMATS = frozenset({3})
KEPT_TURNS = 8
"""Last turns of a record whose requests, if retried, are answered from it. An attempt that its client left ends within
`router.request_timeout_s`; this bounds the turns that may be written between it and the next attempt."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session: the request that wrote it, and which part of the text is its prompt and its answer."""

    request: str
    start: int  # length of the text before the turn
    prompt: int  # length including the turn's prompt
    end: int  # length including its answer
    seed: int
    finish: str  # why the answer ended
    target: str  # digest of what the answer's tokens depend on besides the text (`Hello.target`)
    mode: str = VerificationMode.COUPLED.value  # the verification mode
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A session as it is stored. `version` counts its turns; 0 is a session that was never written."""

    tokens: tuple[int, ...]  # the whole text: prompts and answers
    seed: int
    sample_index: int
    marks: tuple[int, ...]  # lengths at which turns ended, in order
    version: int
    model: str  # the target's name
    tokenizer: str  # the fingerprint of its tokenizer, which decides what the tokens mean
    turns: tuple[Turn, ...]  # the last KEPT_TURNS, in order
    tools: str | None = None  # digest of the tools that the text describes, empty without any; None: not known

    def turn_of(self, request: str) -> Turn | None:
        """The turn that a request wrote; None where it is not among those kept."""
        return next((turn for turn in self.turns if turn.request == request), None)


class Sessions(Protocol):
    """Stores records by token."""

    async def new_token(self, tenant: str) -> str:
        """A token for a session that does not exist yet."""
        ...

    async def read(self, token: str, tenant: str) -> Record:
        """The record of a token. Raises NotFound for one that is expired or another tenant's, PeerLost where the store
        does not answer."""
        ...

    async def write(self, token: str, tenant: str, record: Record) -> None:
        """Replace the version before `record.version`, or write where none is stored: a record has the whole text.
        Raises Conflict where another version is stored, NotFound for a token that is not this tenant's, PeerLost where
        the store does not answer: then it is not known whether the record was written."""
        ...


def unknown_session() -> NotFound:
    """The error for a token without a session, always the same."""
    return NotFound("session: there is no such session, or it has expired; begin another with the whole conversation")


def _written_first() -> Conflict:
    return Conflict("session: another request wrote it first; read it again")


def make_token(tenant: str, secret: bytes) -> str:
    """128 random bits and their tag, in base64url."""
    name = secrets.token_bytes(ID_BYTES)
    return _spell(name, _tag(tenant, name, secret))


def check_token(token: str, tenant: str, secret: bytes) -> str:
    """The session's id in hex. Raises NotFound for a token that we did not make for this tenant."""
    if len(token) > MAX_TOKEN:  # refused before any work is done
        raise unknown_session()
    try:
        name, _ = (base64.urlsafe_b64decode(part + "==") for part in token.split("."))
    except ValueError:
        raise unknown_session() from None
    # Compared as text, so that a session has one token: base64 has several encodings of the same bytes.
    if len(name) != ID_BYTES or not hmac.compare_digest(token, _spell(name, _tag(tenant, name, secret))):
        raise unknown_session()
    return name.hex()


def _tag(tenant: str, name: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, hashlib.sha256(tenant.encode()).digest() + name, hashlib.sha256).digest()[:TAG_BYTES]


def _spell(name: bytes, tag: bytes) -> str:
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (name, tag))


def pack_record(record: Record, name: str) -> bytes:
    """The record of the session with this id, as JSON; the tokens are base64 of little-endian uint32. A turn's mode is
    left out where it is the default, and its sample index where it is the record's, so that routers of releases without
    them can read it."""
    stored = asdict(replace(record, tokens=()))  # asdict would copy each token by itself
    for turn in stored["turns"]:
        if turn["mode"] == VerificationMode.COUPLED:
            del turn["mode"]
        if turn["sample_index"] == record.sample_index:
            del turn["sample_index"]
    stored["tokens"] = base64.b64encode(packed_ids(record.tokens)).decode()
    stored["format"] = RECORD_FORMAT
    return _json_of(stored | {CHECKSUM: _checksum(stored, name)})


def _json_of(stored: dict[str, Any]) -> bytes:
    return json.dumps(stored, sort_keys=True).encode()


def _checksum(stored: dict[str, Any], name: str) -> str:
    """The checksum of all other fields, those of a later release included."""
    return hashlib.blake2b(_json_of(stored), digest_size=16, key=name.encode()).hexdigest()


def unpack_record(blob: bytes, name: str) -> Record:
    """The record of the session with this id, without fields that this release does not know. Raises NotFound for one
    that is damaged or another session's, as for one that does not exist, and PeerLost for a format of a later release,
    whose routers read it."""
    try:
        stored = json.loads(blob)
        if (written := stored["format"]) not in READ_FORMATS:
            if written > max(READ_FORMATS):
                raise PeerLost(f"session: its record has format {written}, which routers of a later release read")
            raise unknown_session()
        if CHECKSUM in stored and stored.pop(CHECKSUM) != _checksum(stored, name):
            raise unknown_session()
        tokens = np.frombuffer(base64.b64decode(stored["tokens"], validate=True), "<u4")
        marks = tuple(int(mark) for mark in stored["marks"])
        index = stored["sample_index"]
        turns = tuple(Turn(**_known(Turn, {"sample_index": index, **turn})) for turn in stored["turns"])
        whole = stored | {"tokens": tuple(tokens.tolist()), "marks": marks, "turns": turns}
        return Record(**_known(Record, whole))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise unknown_session() from None


def _known(kind: type[Record | Turn], stored: dict[str, Any]) -> dict[str, Any]:
    """The stored values of a dataclass's fields."""
    return {each.name: stored[each.name] for each in fields(kind) if each.name in stored}


class MemorySessions:
    """Records in this process, for one-process runs and tests. `clock` is in seconds."""

    def __init__(self, ttl_s: float = float("inf"), clock: Clock = time.monotonic) -> None:
        self.ttl_s = ttl_s
        self.clock = clock
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._records: dict[str, tuple[bytes, float]] = {}

    async def new_token(self, tenant: str) -> str:
        return make_token(tenant, self._secret)

    async def read(self, token: str, tenant: str) -> Record:
        name = check_token(token, tenant, self._secret)
        blob, until = self._records.get(name, (b"", 0.0))
        if until <= self.clock():
            raise unknown_session()
        return await off_loop(len(blob) // TOKEN_BYTES, lambda: unpack_record(blob, name))

    async def write(self, token: str, tenant: str, record: Record) -> None:
        name = check_token(token, tenant, self._secret)
        blob, until = self._records.get(name, (b"", 0.0))
        check_version(blob if until > self.clock() else b"", record.version, name)
        self._records[name] = (pack_record(record, name), self.clock() + self.ttl_s)


class RedisSessions:
    """Records in Redis, each with a time to live that every write renews. A frozen server costs a call `budget_s` at
    most, with all its round trips, beside the wait for a turn of TURN_S at most. Not thread-safe: bound to one event
    loop."""

    def __init__(self, url: str, ttl_s: int, budget_s: float = CALL_BUDGET_S) -> None:
        self._redis = connect(url, budget_s)
        self.ttl_s = ttl_s
        self.budget_s = budget_s
        self.breaker = CircuitBreaker()
        self._turns = CallTurns()
        self._known_secret: bytes | None = None

    async def new_token(self, tenant: str) -> str:
        return make_token(tenant, await self._in_time(self._secret))

    async def read(self, token: str, tenant: str) -> Record:
        name, found = await self._in_time(lambda: self._find(token, tenant))
        return await off_loop(len(found) // TOKEN_BYTES, lambda: unpack_record(found, name))

    async def write(self, token: str, tenant: str, record: Record) -> None:
        """See `Sessions.write`. The stored record is parsed between two transactions, and the later one compares bytes:
        long records wait for their tenant's turn, which would count as a server that does not answer."""
        name = check_token(token, tenant, await self._in_time(self._secret))
        blob = await off_loop(len(record.tokens), lambda: pack_record(record, name))
        key, checked, sent = self._key(tenant, name), b"", asyncio.Event()
        for _ in range(WRITES):
            call = partial(self._compare_and_set, key, checked, blob, sent)
            found = await self._in_time(partial(self._ask, call))
            if found is None:
                return
            await off_loop(len(found) // TOKEN_BYTES, partial(check_version, found, record.version, name))
            checked = found
        raise _written_first()

    async def fault(self) -> str:
        """Reason why the store does not answer now; empty where it does."""
        try:
            await self._in_time(lambda: self._ask(lambda: self._redis.execute_command("PING")))
        except PeerLost as error:
            return str(error).removeprefix("session: ")
        return ""

    async def warning(self) -> str:
        """What the store is set up to lose that it should not; empty where nothing, or where that is not known."""
        try:
            return await self._in_time(lambda: self._ask(lambda: eviction_warning(self._redis)))
        except PeerLost as error:
            return str(error)

    async def _in_time(self, work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        try:
            async with self._turns.take(TURN_S):
                return await within_two_attempts(self.budget_s, self._redis, work)
        except StoreBusy:
            raise PeerLost("session: the store is busy: too many calls wait for it") from None
        except TimeoutError:
            self.breaker.note("no answer in time")
            self.breaker.failed()
            raise PeerLost(f"session: the store does not answer within {self.budget_s:g} s") from None

    async def _find(self, token: str, tenant: str) -> tuple[str, bytes]:
        """The session's id and its stored record."""
        name = check_token(token, tenant, await self._secret())
        key = self._key(tenant, name)
        blob = _bytes(await self._ask(lambda: self._redis.getrange(key, 0, MAX_RECORD_BYTES)))
        if not 0 < len(blob) <= MAX_RECORD_BYTES:
            raise unknown_session()
        return name, blob

    async def close(self) -> None:
        await self._redis.aclose()

    async def _compare_and_set(self, key: str, checked: bytes, blob: bytes, sent: asyncio.Event) -> bytes | None:
        """WATCH, compare, MULTI: prevents two turns that read the same version from both being written. (Without EVAL,
        which the Redis user may not be allowed to call.) Writes where `checked` or nothing is stored; returns what else
        is stored, and None once `blob` is.

        A connection that breaks before the answer of EXEC arrives is reported as a change of the key too, and an
        attempt that took too long may have written. So what is stored decides: this record, if it was `sent`; the
        version before it; or another. Raises Conflict where another change came first each time, and what broke the
        last connection where that did.
        """
        broken: BaseException | None = None
        for _ in range(WRITES):
            try:
                async with transaction(self._redis, key) as pipe:
                    await pipe.watch(key)
                    found = _bytes(await pipe.getrange(key, 0, MAX_RECORD_BYTES))
                    if sent.is_set() and found == blob:
                        return None
                    if found and found != checked:
                        return found
                    pipe.multi()
                    pipe.set(key, blob, ex=self.ttl_s)
                    sent.set()
                    await pipe.execute()
                    return None
            except redis.exceptions.WatchError as error:
                broken = error.__context__  # None: the key has changed
        if isinstance(broken, REDIS_FAULTS):
            raise broken
        raise _written_first()

    async def _secret(self) -> bytes:
        """The cluster's secret: the first router makes it, all others read it from Redis. It is read at every call:
        after a loss of data the first router to call writes the one that it knew, or a new one, and all use that."""
        secret = await self._ask(lambda: self._redis.get(SECRET_KEY))
        if secret is None:
            known = self._known_secret or secrets.token_bytes(SECRET_BYTES)
            await self._ask(lambda: self._redis.set(SECRET_KEY, known, nx=True))
            secret = await self._ask(lambda: self._redis.get(SECRET_KEY))
        if secret is None:
            raise PeerLost("session: the store lost its secret")
        if len(found := _bytes(secret)) != SECRET_BYTES:  # anybody could make the tokens of an empty secret
            raise PeerLost(f"session: the store's {SECRET_KEY} has {len(found)} bytes, not {SECRET_BYTES}")
        self._known_secret = found
        return found

    def _key(self, tenant: str, name: str) -> str:
        return f"{PREFIX}{hashlib.sha256(tenant.encode()).hexdigest()[:16]}:{name}"

    async def _ask(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            return await self.breaker.ask(call)
        except CircuitOpen:
            raise PeerLost("session: the store does not answer; it is called again in a moment") from None
        except REDIS_FAULTS as error:
            raise PeerLost(f"session: the store fails: {reason_of(error)}") from error


def _bytes(answer: object) -> bytes:
    """A stored value: the client does not decode. Raises PeerLost for an answer that is none."""
    if not isinstance(answer, bytes):
        raise PeerLost(f"session: the store answers with {type(answer).__name__}, which is not a stored value")
    return answer


def check_version(blob: bytes, version: int, name: str) -> None:
    """Raise Conflict where `blob`, the session's record in the store, is not the one before `version`. Without a blob
    there is no conflict: the record has expired or was lost."""
    if not blob:
        return
    found = unpack_record(blob, name).version
    if found != version - 1:
        raise Conflict(f"session: it is at version {found}, this turn began at {version - 1}")
