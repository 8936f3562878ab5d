"""The edge of the cluster: check a request, open its session, run the loop, stream what it gives.

A plain object without Ray or sockets: `Ingress.generate` takes and gives messages. Its gRPC shells are the servicer
below and the Serve deployment in app.py; both say an error in the words of `status_of`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import grpc
import grpc.aio
import numpy as np
from dendro.calls import Hello, Opened
from dendro.client import CHANNEL_OPTIONS, REASON_KEY, TENANT_KEY, Answer, Asking, Event
from dendro.errors import BadRequest, Conflict, DendroError, EngineFailed, NotFound, Overloaded, PeerLost, one_line
from dendro.shapes import OFF, TreeShape
from dendro.text import SEED_BITS, Finish, Limits, Sampling, Text, Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc
from tree_layers.checkpoint import Facts

from cluster.asked import Asked, what_is_asked
from cluster.checkpoints import ClusterFacts, check_pairs, read_cluster
from cluster.config import Config, Target
from cluster.hub import fetched_model
from cluster.policies import Experience, Experiences, Offer, Place
from cluster.policies.prior import NoPriors, Prior, PriorKey, PriorStore
from cluster.priors import Priors
from cluster.proposers.proposals import Library
from cluster.rounds import Drafter, Verifier, rounds
from cluster.sessions import KEPT_TURNS, Record, Sessions, Turn
from cluster.tokenizer import CheckpointTokenizer, TextStream, Tokenizer

log = logging.getLogger("dendro.ingress")

CLOSE_BUDGET_S = 1.0
"""How long `complete` waits for the peers to put their last states by."""
AHEAD = 4
"""Rounds that an answer may be ahead of what was sent of it: sending costs no round its time, and a client that does
not read stops the work."""
READ_GRACE_S = 5.0
"""How long after its limit a request's call stays open for a client that does not read: its peers are free by then."""
ABORT_S = 1.0
"""How long sending the status of a call may take whose client does not read."""
MAX_REQUEST_ID = 128
_REQUEST_ID = re.compile(f"[!-~]{{1,{MAX_REQUEST_ID}}}")  # what a log line, a key and a header may hold
_TARGET = re.compile("[0-9a-f]{32}")  # `Hello.target`, which a record keeps
LONG_PROMPT_BYTES = 1 << 14

BEGIN_AGAIN = "begin the turn again, with the same request_id"

FINISH_REASONS = {
    Finish.END_OF_TEXT: pb.FINISH_REASON_END_OF_TEXT,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
}

T = TypeVar("T")


class Handle(Protocol):
    """What both handles have besides their work."""

    @property
    def opened(self) -> Opened | None:
        """What opening took; None as long as the peer has not said."""
        ...

    async def close(self, text: Text) -> None:
        """Give the lease back, with the text so that the last state can be saved. Never raises."""
        ...


class DrafterHandle(Drafter, Handle, Protocol):
    """A drafter, leased for one request when it first wants a tree."""


class VerifierHandle(Verifier, Handle, Protocol):
    """A verifier, leased for one request; `moves` counts how often it had to be another one, `hello` is what it said
    of itself when it was leased."""

    moves: int
    hello: Hello | None

    async def meet(self) -> Hello:
        """The hello of the first verifier that is leased. Raises PeerLost or Overloaded where there is none."""
        ...


class Places(Protocol):
    """Where texts can be opened. Taking a handle waits for nothing; a verifier's sends the text at once, a drafter's
    when a tree is wanted. `deadline_s` is the request's own bound on the wait for a draft; the shorter one holds.
    `adaptive` rounds wait no longer than a late draft may cost, others up to the bound."""

    def drafter(
        self, target: str, text: Text, company: Place, deadline_s: float = math.inf, adaptive: bool = True
    ) -> DrafterHandle: ...
    def verifier(self, target: str, text: Text) -> VerifierHandle: ...

    def expect(self, facts: ClusterFacts) -> None:
        """From now on, use replicas of these checkpoints alone."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """What the edge must know of a target: enough to refuse what it cannot do."""

    name: str
    tokenizer: Tokenizer
    vocabulary: int
    max_length: int
    end_ids: frozenset[int]
    dtype: str

    @classmethod
    def of(cls, name: str, target: Target, facts: Facts) -> Served:
        """Load a target's tokenizer; raises BadRequest naming what is missing."""
        target = fetched_model(f"targets.{name}", target, weights=False)
        try:
            tokenizer = CheckpointTokenizer(target.tokenizer_folder, facts.tokenizer)
        except BadRequest as error:
            raise BadRequest(f"targets.{name}.{target.tokenizer_field}", error.reason) from error
        return cls(
            name=name,
            tokenizer=tokenizer,
            vocabulary=facts.vocabulary,
            max_length=min(target.max_length, facts.positions or target.max_length),
            end_ids=facts.end_ids,
            dtype=target.dtype,
        )


class Tally:
    """Wraps a policy, keeps the account of its rounds, and times them for its tenant's experience."""

    def __init__(
        self,
        asked: Asked,
        experience: Experience,
        place: Place,
        temperature: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notes = Prior()
        self._temperature = temperature
        self._policy = asked.policy
        self._chosen = asked.adaptive  # shapes are a policy's choice, of arms that the configuration bounds
        self._experience = experience
        self.place = place
        self._clock = clock  # seconds
        self._began_s = self._first_s = 0.0
        self._disturbed = False
        self.shape: TreeShape = OFF  # of the round that runs
        self.offer: Offer | None = None  # of the next one
        self.account = pb.SpeculationStats(policy=asked.name)

    def choose(self) -> TreeShape:
        self._began_s = self._clock()
        self.shape = self._policy.choose(self.offer)
        self._disturbed = self._experience.shared.opening > 0
        return self.shape

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        now_s = self._clock()
        first = self.account.rounds == 0
        self._policy.learn(shape, tree, verdict)
        worth = self._experience.worth(shape, tree, verdict, self._temperature) if self._chosen else None
        self.notes.learn(shape, tree, verdict, worth)
        self.place.begun()
        took_us = 1e6 * (now_s - self._began_s)
        if not first:  # which waits for its text to be opened
            disturbed = self._disturbed or self._experience.shared.opening > 0
            self._experience.learn_time(shape, tree, verdict, took_us, disturbed)
        self._count(shape, tree, verdict)
        self._time(tree, verdict, int(took_us), now_s, first)

    def meet(self, hello: Hello | None) -> None:
        """What the verifier says of itself: how its target's steps grow with their rows."""
        if hello is not None:
            self._experience.shared.attends = hello.attends

    def _count(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        account, tokens, accepted = self.account, len(verdict.tokens), len(verdict.ranks)
        account.rounds += 1
        account.pulls[str(shape)] += 1
        account.emitted[tokens] += 1
        account.emitted_tokens += tokens
        account.cut_tokens += verdict.length - tokens
        account.drafted_tokens += tree.guesses
        account.accepted_tokens += accepted
        account.discarded_tokens += tree.guesses - accepted
        account.trimmed_tokens += verdict.trimmed
        account.late_drafts += tree.missed

    def _time(self, tree: DraftTree, verdict: Verdict, took_us: int, now_s: float, first: bool) -> None:
        account, tokens = self.account, len(verdict.tokens)
        busy_us = tree.draft_us + verdict.verify_us + verdict.queue_us
        rest_us = max(took_us - busy_us, 0)  # peers round by themselves, and the last word on a round is theirs
        account.rounds_us += busy_us + rest_us
        account.draft_us += tree.draft_us
        account.verify_us += verdict.verify_us
        account.queue_us += verdict.queue_us
        if first:
            account.opening_us = rest_us
            self._first_s = now_s
        else:
            account.hop_us += rest_us
            account.decode_tokens += tokens
            account.decode_us = int(1e6 * (now_s - self._first_s))


@dataclass(slots=True)
class Job:
    """A request that was found good."""

    request_id: str
    tenant: str
    served: Served
    sampling: Sampling
    prompt: list[int]  # the text before the answer, a session's earlier turns included
    held: list[int]  # the answer's tokens that the client has
    limits: Limits
    asked: Asked
    kind: PriorKey
    experience: Experience  # its tenant's
    session: str  # its token; empty: no session
    resume: pb.Resume | None
    record: Record | None  # of the session so far; None: it begins with this request
    told: Turn | None = None  # the turn of the record that is this request's own: it was answered before
    target: str = ""  # what its tokens depend on beside the text (`Hello.target`); empty until a verifier is leased
    began_s: float = field(default_factory=time.monotonic)

    @property
    def answer_length(self) -> int:
        return self.limits.max_length - len(self.prompt)


class Ingress:
    """Takes requests for all targets of a configuration. Of one event loop."""

    def __init__(
        self,
        config: Config,
        places: Places,
        sessions: Sessions,
        served: Mapping[str, Served] | None = None,
        priors: PriorStore | None = None,
    ) -> None:
        """`served` is what the checkpoints say. Where it is not given it is read from them, and replicas loaded from
        other checkpoints are not used. Without a store of priors, this router knows what it learns itself."""
        self.config = config
        self._places = places
        self._sessions = sessions
        if served is None:
            facts = read_cluster(config)
            check_pairs(config, facts)
            places.expect(facts)
            served = {name: Served.of(name, target, facts.targets[name]) for name, target in config.targets.items()}
        self._served = served
        self._experience = {name: Experiences() for name in config.targets}
        self._libraries = {
            name: Library(config.speculation.proposers, target.max_rows, target.max_depth)
            for name, target in config.targets.items()
        }
        self._priors = Priors(priors or NoPriors())
        self._closing: set[asyncio.Task[None]] = set()

    def info(self) -> pb.GetServerInfoResponse:
        """What is served, the default target first."""
        return pb.GetServerInfoResponse(
            models=[
                pb.ModelInfo(
                    name=name,
                    vocabulary=served.vocabulary,
                    max_length=served.max_length,
                    dtype=served.dtype,
                    drafters=self.config.drafters_of(name),
                )
                for name, served in self._served.items()
            ]
        )

    async def generate(
        self, request: pb.GenerateRequest, tenant: str = ""
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream the answer: started, a chunk per round, complete. Raises the family in dendro.errors.

        Leaving the iteration, or cancelling the task, ends the work within a round and gives the leases back.
        """
        outcome, tally = "refused", None
        request_id = request.request_id or secrets.token_hex(16)
        began_s = time.monotonic()
        try:
            job = await self._admit(request, request_id, tenant)
            text = Text(
                job.prompt + job.held,
                job.sampling,
                # An answer that the client has whole leaves no room; it is ended below, without a round.
                Limits(max(job.limits.max_length, len(job.prompt) + len(job.held) + 1), job.limits.ignore_end),
                job.tenant,
                job.record.marks if job.record else (),
            )
            _check_text_of_resume(job, text)
            outcome = "left"
            stream = TextStream(job.served.tokenizer)
            stream.push(job.held)
            if job.told is not None:
                yield _started(job, text, job.told.target)
                for event in self._tell(job, job.told, stream):
                    yield event
                outcome = "told"
                return
            finish = self._finish_of_held(job)
            complete = pb.GenerateComplete()
            if finish is None:
                experience = job.experience
                with experience.shared.running(fixed=not job.asked.free) as place:
                    tally = Tally(job.asked, experience, place, job.sampling.temperature)
                    try:
                        run = self._run(job, text, tally, stream, complete)
                        async with aclosing(_ahead(run, self._left_s(job))) as events:
                            async for event in events:
                                yield event
                    finally:
                        self._priors.learn(job.kind, tally.notes, experience)
                finish = text.finish
                assert finish is not None
            else:  # nothing is left to be made
                assert job.resume is not None
                job.target = job.resume.target
                yield _started(job, text, job.target)
            complete.finish_reason = FINISH_REASONS[finish]
            complete.usage.prompt_tokens = len(job.prompt)
            complete.usage.completion_tokens = len(text) - len(job.prompt)
            complete.session = await self._keep(job, text, finish)
            outcome = str(finish)
            yield pb.GenerateResponse(complete=complete)
        except DendroError as error:
            outcome = type(error).__name__
            raise
        finally:
            log.info(
                "request %s tenant %s tokens %d rounds %d accepted %d seconds %.3f outcome %s",
                one_line(request_id, MAX_REQUEST_ID),
                hashlib.sha256(tenant.encode()).hexdigest()[:8],
                tally.account.emitted_tokens if tally else 0,
                tally.account.rounds if tally else 0,
                tally.account.accepted_tokens if tally else 0,
                time.monotonic() - began_s,
                outcome,
            )

    async def _run(
        self, job: Job, text: Text, tally: Tally, stream: TextStream, complete: pb.GenerateComplete
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """`started`, once a verifier is leased, and the chunks of the loop, between taking and giving back the leases.
        Fills in what `complete` says of it."""
        before = len(job.prompt)
        verifier = self._places.verifier(job.served.name, text)
        drafter = self._places.drafter(job.served.name, text, tally.place, job.asked.deadline_s, job.asked.adaptive)
        proposals = self._libraries[job.served.name].around(
            drafter, job.tenant, job.asked.proposed_rows, job.sampling.temperature
        )
        if proposals is not None:
            drafter, tally.offer = proposals, partial(proposals.offer, text)
        try:
            target = (await verifier.meet()).target
            _check_target_of_resume(job.resume, job.held, target)
            job.target = target
            yield _started(job, text, target)
            loop = cast(AsyncGenerator[Verdict, None], rounds(text, drafter, verifier, tally))
            async with aclosing(loop) as verdicts:
                async for verdict in verdicts:
                    tally.meet(verifier.hello)
                    added = stream.push(verdict.tokens)
                    chunk = pb.GenerateChunk(
                        offset=len(text) - len(verdict.tokens) - before,
                        token_ids=verdict.tokens,
                        text=added + stream.flush() if verdict.finished else added,
                        shape=str(tally.shape),
                    )
                    yield pb.GenerateResponse(chunk=chunk)
        finally:
            await self._close(text, drafter, verifier)
        complete.speculation.CopyFrom(tally.account)
        complete.speculation.verifier_moves = verifier.moves
        for said, opened in ((complete.drafter, drafter.opened), (complete.target, verifier.opened)):
            if opened is not None:
                said.CopyFrom(
                    pb.Opening(
                        restored_tokens=opened.restored, processed_tokens=opened.processed, open_us=opened.open_us
                    )
                )

    def _left_s(self, job: Job) -> float:
        return self.config.router.request_timeout_s - (time.monotonic() - job.began_s)

    async def _close(self, text: Text, *handles: Handle) -> None:
        """Close both, in tasks of their own: neither a cancelled request nor a peer that hangs holds a lease."""
        tasks = [asyncio.ensure_future(handle.close(text)) for handle in handles]
        self._closing.update(tasks)
        for task in tasks:
            task.add_done_callback(self._closing.discard)
        await asyncio.wait(tasks, timeout=CLOSE_BUDGET_S)

    def _finish_of_held(self, job: Job) -> Finish | None:
        """Why an answer that the client has whole ended; None where it goes on."""
        if not job.held:
            return None
        if job.held[-1] in job.served.end_ids and not job.limits.ignore_end:
            return Finish.END_OF_TEXT
        return Finish.LENGTH if len(job.held) >= job.answer_length else None

    def _tell(self, job: Job, turn: Turn, stream: TextStream) -> list[pb.GenerateResponse]:
        """The rest of an answer that was finished and written before: its `complete` was lost, or its client left."""
        assert job.record is not None
        answer, events = job.record.tokens[turn.prompt : turn.end], []
        rest = answer[len(job.held) :]
        if rest:
            chunk = pb.GenerateChunk(offset=len(job.held), token_ids=rest, text=stream.push(rest) + stream.flush())
            events.append(pb.GenerateResponse(chunk=chunk))
        complete = pb.GenerateComplete(
            finish_reason=FINISH_REASONS[Finish(turn.finish)],
            usage=pb.Usage(prompt_tokens=turn.prompt, completion_tokens=len(answer)),
            session=job.session,
        )
        return [*events, pb.GenerateResponse(complete=complete)]

    async def _keep(self, job: Job, text: Text, finish: Finish) -> str:
        """Write the session's record; its token, or nothing where there is none or the store does not answer."""
        if not job.session:
            return ""
        earlier = job.record
        turn = Turn(
            request=job.request_id,
            start=len(earlier.tokens) if earlier else 0,
            prompt=len(job.prompt),
            end=len(text),
            seed=job.sampling.seed,
            finish=finish.value,
            target=job.target,
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
        )
        try:
            return await self._write(job, record)
        except PeerLost as error:
            log.warning("request %s: its session was not kept: %s", job.request_id, error)
            return ""

    async def _write(self, job: Job, record: Record, again: bool = True) -> str:
        """Write a record; the token under which it is kept. Raises Conflict where another request wrote the session
        first, and PeerLost. again: whether a write that the store did not confirm may be made once more."""
        try:
            await self._sessions.write(job.session, job.tenant, record)
        except NotFound:  # the store lost what made the token: the record is whole, and is kept under another
            session = await self._sessions.new_token(job.tenant)
            await self._sessions.write(session, job.tenant, record)
            return session
        except Conflict:
            # Another attempt of this request may have written its turn meanwhile, and other turns may have followed. Or
            # nobody wrote: a connection that breaks between WATCH and EXEC is a conflict too.
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

    async def _admit(self, request: pb.GenerateRequest, request_id: str, tenant: str) -> Job:
        """Check a request whole, before any model sees it."""
        if not _REQUEST_ID.fullmatch(request_id):
            raise BadRequest("request_id", f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters without a space")
        record = await self._sessions.read(request.session, tenant) if request.session else None
        served = self._served_for(request, record)
        resume = request.resume if request.HasField("resume") else None
        held = _checked_ids("resume.token_ids", resume.token_ids, served) if resume else []
        if resume is not None and not resume.prompt_tokens:
            raise BadRequest("resume.prompt_tokens", "is missing: a resume names what `started` reported")
        if resume is not None and not _TARGET.fullmatch(resume.target):
            raise BadRequest("resume.target", "must be what `started` reported, 32 hexadecimal digits")
        sampling = _sampling(request, record)
        experience = self._experience[served.name].of(tenant)
        kind = PriorKey.of(served.name, self.config.drafters_of(served.name), sampling.temperature, tenant)
        prior = await self._priors.of(kind, experience)
        asked = what_is_asked(request.speculation, served.name, self.config, experience, sampling, prior)
        told = record.turn_of(request_id) if record is not None else None
        earlier = record.tokens if record is not None else ()
        prompt = await self._prompt(request, served, list(earlier[: told.start] if told is not None else earlier))
        if told is not None:
            _check_target_of_resume(resume, held, told.target)
            _check_told(told, earlier, prompt, held)
            sampling, end = replace(sampling, seed=told.seed), told.end
        else:
            end = len(prompt) + self._new_tokens(request, served, prompt, held)
        session = request.session
        if request.keep_session and not session:
            try:
                session = await self._sessions.new_token(tenant)
            except PeerLost as error:
                log.warning("request %s: no session can be kept: %s", request_id, error)
        return Job(
            request_id=request_id,
            tenant=tenant,
            served=served,
            sampling=sampling,
            prompt=prompt,
            held=held,
            limits=Limits(end, request.ignore_end),
            asked=asked,
            kind=kind,
            experience=experience,
            session=session,
            resume=resume,
            record=record,
            told=told,
        )

    def _served_for(self, request: pb.GenerateRequest, record: Record | None) -> Served:
        if record is None:
            return self._served[self.config.target_named(request.model)]
        if request.model and request.model != record.model:
            raise BadRequest("model", f"is {request.model!r}, but the session is of {record.model!r}")
        served = self._served[self.config.target_named(record.model)]
        if served.tokenizer.fingerprint != record.tokenizer:
            raise BadRequest("session", f"was written with another tokenizer than {served.name!r} has now")
        return served

    async def _prompt(self, request: pb.GenerateRequest, served: Served, earlier: list[int]) -> list[int]:
        """The text before the answer: the session's `earlier` one, and what this request adds."""
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            ids = _checked_ids("prompt.token_ids", request.token_ids.ids, served)
        elif kind == "text" and request.text:
            size = len(request.text.encode())
            limit = self.config.router.max_prompt_bytes
            if size > limit:
                raise BadRequest("prompt", f"has {size} bytes; at most {limit}")
            if size > LONG_PROMPT_BYTES:  # milliseconds, which other requests' rounds would wait
                ids = await asyncio.to_thread(served.tokenizer.encode, request.text, not earlier)
            else:
                ids = served.tokenizer.encode(request.text, not earlier)
            if max(ids, default=0) >= served.vocabulary:
                raise BadRequest("prompt.text", f"has the token {max(ids)}; the model has {served.vocabulary}")
        else:
            ids = []
        if not ids:
            raise BadRequest("prompt", "is empty: there is nothing to go on from")
        return earlier + ids

    def _new_tokens(self, request: pb.GenerateRequest, served: Served, prompt: list[int], held: list[int]) -> int:
        """The answer's greatest length. A default fits itself into the room; a number that was asked for must fit."""
        room = served.max_length - len(prompt)
        if room < 1:
            raise BadRequest("prompt", f"makes a text of {len(prompt)} tokens; at most {served.max_length - 1}")
        count, limit = min(self.config.router.default_new_tokens, room), self.config.router.max_new_tokens
        if request.HasField("max_new_tokens"):
            count = request.max_new_tokens
            if not 1 <= count <= limit:
                raise BadRequest("max_new_tokens", f"must lie in 1 to {limit}; got {count}")
            if count > room:
                raise BadRequest("max_new_tokens", f"is {count}, but the model's text has room for {room} more")
        if len(held) > count:
            raise BadRequest("resume.token_ids", f"are {len(held)} of an answer of at most {count}")
        return count


async def _ahead(chunks: AsyncGenerator[T, None], limit_s: float = math.inf) -> AsyncGenerator[T, None]:
    """The same chunks; the next rounds run while one is sent, AHEAD of them at most.

    After `limit_s` seconds `chunks` is closed, whether or not anybody reads, and Overloaded is raised after those that
    were ready. (A generator notices no timeout while nobody resumes it, so a task drives `chunks`.)
    """
    queue: asyncio.Queue[T | None] = asyncio.Queue(AHEAD)

    async def drive() -> None:
        limit = asyncio.timeout(limit_s if math.isfinite(limit_s) else None)
        try:
            async with limit, aclosing(chunks):
                async for chunk in chunks:
                    await queue.put(chunk)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Overloaded(
                "request: not done within the server's limit of time; ask for fewer tokens, or try again later"
            ) from None
        finally:
            with contextlib.suppress(asyncio.QueueFull):  # then the reader sees the task's end when it has read on
                queue.put_nowait(None)

    driver = asyncio.create_task(drive())
    try:
        while not (driver.done() and queue.empty()):
            chunk = await queue.get()
            if chunk is None:
                break
            await asyncio.sleep(0)  # the next round's call leaves first
            yield chunk
        await driver
    finally:
        driver.cancel()
        await asyncio.wait({driver})


def _started(job: Job, text: Text, target: str) -> pb.GenerateResponse:
    """The first event: what a resume of this answer has to name."""
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id=job.request_id,
            model=job.served.name,
            seed=job.sampling.seed,
            prompt_tokens=len(job.prompt),
            offset=len(job.held),
            prompt_digest=text.digest(len(job.prompt)),
            target=target,
        )
    )


def _check_told(turn: Turn, tokens: Sequence[int], prompt: list[int], held: list[int]) -> None:
    """Raise BadRequest where a request that names a written turn's request id is another one. tokens: the session's."""
    if prompt != list(tokens[: turn.prompt]):
        raise BadRequest("request_id", "wrote a turn of this session after another prompt; a new turn needs a new id")
    if held != list(tokens[turn.prompt : turn.end][: len(held)]):
        raise BadRequest("resume.token_ids", "are not how this request's answer began")


def _check_target_of_resume(resume: pb.Resume | None, held: list[int], target: str) -> None:
    """Raise Conflict where the client's tokens are of another target than `target`, whose tokens would follow them."""
    if resume is not None and held and resume.target != target:
        raise Conflict(f"resume.target: the target was changed since the answer began; {BEGIN_AGAIN}")


def _check_text_of_resume(job: Job, text: Text) -> None:
    """Raise Conflict where the text before the answer is another than the one that the answer began after."""
    resume, length = job.resume, len(job.prompt)
    if resume is not None and (resume.prompt_tokens, resume.prompt_digest) != (length, text.digest(length)):
        raise Conflict(
            f"resume: the answer began after {resume.prompt_tokens} tokens, the text has {length} now or others; "
            f"{BEGIN_AGAIN}"
        )


def _checked_ids(name: str, said: Sequence[int], served: Served) -> list[int]:
    """The ids as a list. More than a text may have are refused before the list is made."""
    if len(said) > served.max_length:
        raise BadRequest(name, f"has {len(said)} ids; a text has at most {served.max_length}")
    ids = np.fromiter(said, np.int64, len(said))
    outside = np.flatnonzero(ids >= served.vocabulary)
    if len(outside):
        first = int(outside[0])
        raise BadRequest(f"{name}[{first}]", f"{ids[first]} is outside the vocabulary of {served.vocabulary}")
    return ids.tolist()


def _sampling(request: pb.GenerateRequest, record: Record | None) -> Sampling:
    """What the request says, else what the session says, else greedy with a seed drawn here."""
    said = request.sampling
    if request.HasField("resume"):
        seed = request.resume.seed
    elif said.HasField("seed"):
        seed = said.seed
    else:
        seed = record.seed if record else secrets.randbits(SEED_BITS)
    index = said.sample_index if said.HasField("sample_index") else (record.sample_index if record else 0)
    return Sampling(
        temperature=said.temperature,
        top_k=said.top_k,
        top_p=said.top_p if said.HasField("top_p") else 1.0,
        min_p=said.min_p,
        seed=seed,
        sample_index=index,
    )


class LocalClient(Asking):
    """A client of an ingress in this process: the same events without a socket. A broken stream is an error here."""

    def __init__(self, ingress: Ingress, tenant: str = "") -> None:
        self._ingress = ingress
        self._tenant = tenant

    async def send(self, request: pb.GenerateRequest) -> AsyncGenerator[Event, None]:
        answer = Answer(request, timeout_s=self._ingress.config.router.request_timeout_s, attempts=1)
        async with aclosing(self._ingress.generate(request, self._tenant)) as responses:
            async for response in responses:
                event = answer.take(response)
                if event is not None:
                    yield event


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, str]:
    """Code, details and reason (the value of `dendro-reason`) of an error; of our own faults no detail is told."""
    if isinstance(error, DendroError) and not isinstance(error, EngineFailed):
        reason = "session-unknown" if isinstance(error, NotFound) else type(error).__name__
        return error.code, one_line(str(error)), reason
    return grpc.StatusCode.INTERNAL, "internal error; the server's log has the request's id", "EngineFailed"


def tenant_of(metadata: Mapping[str, str | bytes]) -> str:
    """The tenant that the gateway wrote into the metadata; empty where there is no gateway."""
    said = metadata.get(TENANT_KEY, "")
    return said.decode(errors="replace") if isinstance(said, bytes) else said


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The gRPC shell of a server without Serve."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def Generate(  # type: ignore[override]  # the generated base allows blocking servers too
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> None:
        """Write the events as the client takes them, for READ_GRACE_S longer than a request may last at most."""
        tenant = tenant_of(dict(context.invocation_metadata() or ()))
        unread = asyncio.timeout(self._ingress.config.router.request_timeout_s + READ_GRACE_S)
        try:
            async with unread, aclosing(self._ingress.generate(request, tenant)) as events:
                async for event in events:
                    await context.write(event)
        except Exception as raised:  # the border: nothing of the inside passes it
            error = Overloaded("request: its answer was not read in time") if unread.expired() else raised
            code, details, reason = status_of(error)
            if code is grpc.StatusCode.INTERNAL:
                log.exception("request %s failed", one_line(request.request_id, MAX_REQUEST_ID))
            abort = context.abort(code, details, ((REASON_KEY, reason),))
            if not unread.expired():
                await abort
            with contextlib.suppress(TimeoutError):  # the status is sent after the events that the client does not read
                async with asyncio.timeout(ABORT_S):
                    await abort
            raise asyncio.CancelledError from None  # which ends the call without a status

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        return self._ingress.info()


async def serve_plain(ingress: Ingress, host: str = "127.0.0.1", port: int = 0) -> tuple[grpc.aio.Server, str]:
    """Serve an ingress without Ray: the server, for the caller to stop, and its address. Port 0 takes a free one."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(ingress), server)
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, f"{host}:{bound}"
