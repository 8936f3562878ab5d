"""Writes an answered turn to its session's record."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any
from weakref import WeakSet

from dendro.errors import Conflict, DendroError, NotFound, PeerLost, one_line
from dendro.options import MAX_REQUEST_ID
from dendro.text import Finish, Text

from cluster.router.admission import Job
from cluster.sessions import KEPT_TURNS, Record, Sessions, Turn

log = logging.getLogger("dendro.router")

WRITE_ERRORS = tuple(kind.__name__ for kind in (Conflict, NotFound, PeerLost))
"""Names of the errors that a store raises where a record was not written, or may not have been written."""


class TurnWriter:
    """Writes turns to the records of sessions."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.kept = 0  # turns that were written
        self.not_kept: Counter[str] = Counter()  # turns whose write failed or was not confirmed, by error
        self.writing: WeakSet[asyncio.Task[Any]] = WeakSet()  # tasks of requests whose write has begun

    async def keep(self, job: Job, text: Text, finish: Finish, target: str) -> str:
        """Write the session's record. Returns the session's token. Raises PeerLost where the write was not confirmed:
        the client then repeats the request, and its id shows whether the turn was written."""
        task = asyncio.current_task()
        assert task is not None
        self.writing.add(task)
        earlier = job.record
        turn = Turn(
            request=job.request_id,
            start=len(earlier.tokens) if earlier else 0,
            prompt=len(job.prompt),
            end=len(text),
            seed=job.sampling.seed,
            finish=finish.value,
            target=target,
            mode=job.sampling.mode.value,
            sample_index=job.sampling.sample_index,
        )
        record = Record(
            tokens=tuple(text.ids),
            seed=job.sampling.seed,
            sample_index=job.sampling.sample_index,
            marks=(*(earlier.marks if earlier else ()), len(text)),
            version=earlier.version + 1 if earlier else 1,
            model=job.served.name,
            tokenizer=job.served.tokenizer.fingerprint,
            turns=(*(earlier.turns if earlier else ()), turn)[-KEPT_TURNS:],
            tools=job.tools,
        )
        try:
            session = await self._write(job, record)
        except DendroError as error:
            self.not_kept[type(error).__name__] += 1
            if isinstance(error, PeerLost):
                log.warning("request %s: its turn may not be kept: %s", one_line(job.request_id, MAX_REQUEST_ID), error)
            raise
        self.kept += 1
        return session

    async def _write(self, job: Job, record: Record, again: bool = True) -> str:
        """Write a record; returns the token that it is stored under. Raises PeerLost where it stays unknown whether the
        record was written, and Conflict where another request wrote the session first. again: whether a write that the
        store did not confirm may be retried once."""
        try:
            await self._sessions.write(job.session, job.tenant, record)
        except NotFound:  # the store lost the secret that made the token: a record is whole, so store it under another
            session = await self._sessions.new_token(job.tenant)
            await self._sessions.write(session, job.tenant, record)
            return session
        except (Conflict, PeerLost):
            # Three cases: another attempt of this request has written the turn, and later turns may have followed; this
            # write was made, but its answer was lost; or nothing was written. The stored record shows which. A delayed
            # first write cannot follow a second one, since the store compares the record's version.
            try:
                found = await self._sessions.read(job.session, job.tenant)
            except NotFound:
                found = None
            turn = found.turn_of(job.request_id) if found is not None else None
            if found is not None and turn is not None and found.tokens[: turn.end] == record.tokens:
                return job.session
            if not again or (found is not None and found.version >= record.version):
                raise
            return await self._write(job, record, again=False)
        return job.session
