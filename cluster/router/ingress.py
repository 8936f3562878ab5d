"""The edge of the cluster: admit a request, run the loop, stream its verdicts, write its session's record.

A plain object without Ray or sockets: `Ingress.generate` takes a message and yields messages. Its gRPC shells are the
servicer in `cluster/api/grpc.py` and the Serve deployment in `cluster/app.py`; both map errors to statuses with
`logged_status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from dendro.clock import Clock
from dendro.errors import BadRequest, Conflict, DendroError, NotFound, OutOfTime, PeerLost, one_line
from dendro.logprobs import NOT_ECHOED, fill_logprobs
from dendro.long_work import off_loop
from dendro.tasks import BackgroundTasks
from dendro.text import Finish, Text, Verdict, finish_at
from dendro.v1 import generation_pb2 as pb

from cluster.checkpoints import check_pairs, read_cluster
from cluster.config import Config
from cluster.policies import Experiences
from cluster.policies.prior import NoPriors, PriorStore
from cluster.proposers.proposals import ProposalLibrary
from cluster.router.acceptance_watch import AcceptanceWatch
from cluster.router.account import RoundAccount
from cluster.router.admission import (
    MAX_REQUEST_ID,
    Admission,
    Job,
    Served,
    check_resumed_structure,
    check_target_of_resume,
    check_written_target,
    check_written_tokens,
)
from cluster.router.echo import echo_of
from cluster.router.ports import DrafterPort, HandlePort, PeersPort
from cluster.router.priors import Priors
from cluster.router.rounds import rounds
from cluster.router.samples import SharedPrompt, merged
from cluster.router.stop_strings import AnswerText
from cluster.router.stopping import StoppingDrafter
from cluster.sessions import KEPT_TURNS, Record, Sessions, Turn

log = logging.getLogger("dendro.router")

CLOSE_BUDGET_S = 1.0
"""How long `complete` waits for the peers to save their last states."""
AHEAD = 4
"""Finished rounds that may wait to be sent: sending does not delay the next round, and decoding stops for a client that
does not read."""

SEARCH_WORK = 64
"""Tokens of other work that cost about as much as searching a token's text for stop strings, or as preparing the search
for a character of one."""

FINISH_REASONS = {
    Finish.END_OF_TEXT: pb.FINISH_REASON_END_OF_TEXT,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    Finish.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    Finish.STRUCTURE: pb.FINISH_REASON_STRUCTURE,
}

T = TypeVar("T")


class Ingress:
    """Serves requests for all targets of a configuration. Not thread-safe: bound to one event loop."""

    def __init__(
        self,
        config: Config,
        peers: PeersPort,
        sessions: Sessions,
        served: Mapping[str, Served] | None = None,
        priors: PriorStore | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`served` has the tokenizers and limits of the targets. Without it they are read from the checkpoints, and
        replicas loaded from other checkpoints are not used. Without `priors`, priors are kept in this process only."""
        import scipy.optimize  # noqa: F401  # so that no round waits for it: the first fit of costs would import it

        self.config = config
        self._clock = clock
        self._peers = peers
        self._sessions = sessions
        if served is None:
            facts = read_cluster(config)
            check_pairs(config, facts)
            peers.expect(facts)
            served = {
                name: Served.of(name, target, facts.targets[name], config.structures)
                for name, target in config.targets.items()
            }
        self._served = served
        self._libraries = {
            name: ProposalLibrary(config.speculation.proposers, target.max_rows, target.max_depth)
            for name, target in config.targets.items()
        }
        self._priors = Priors(priors or NoPriors())
        self.experience = {name: Experiences() for name in config.targets}
        self._admission = Admission(config, served, sessions, self._priors, self.experience, clock)
        self._acceptance = AcceptanceWatch()
        self._closing = BackgroundTasks()

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text of all targets."""
        return max(served.max_length for served in self._served.values())

    def info(self) -> pb.GetServerInfoResponse:
        """The served models, the default target first."""
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
        """Stream the answer, or as many as the request asks for: started, a chunk per round, complete. Raises the
        family in dendro.errors.

        Leaving the iteration, or cancelling the task, ends the work within a round and releases the leases.
        """
        request_id = request.request_id or secrets.token_hex(16)
        began_s = self._clock()
        try:
            job = await self._admission.admit(request, request_id, tenant)
            answer = await off_loop(_work_of_held(job), lambda: _held_answer(job))
        except BaseException as error:
            outcome = type(error).__name__ if isinstance(error, DendroError) else "refused"
            self._log_end(request_id, tenant, None, began_s, outcome)
            raise
        del request  # it may be large, and an answer may take long
        if job.answers == 1:
            answers = self._answer(job, answer)
        else:
            prompt = SharedPrompt()
            rest = [self._answer_beside(job.of_sample(sample), answer, prompt) for sample in range(1, job.answers)]
            answers = merged([self._answer(job, answer.copy(), prompt), *rest])
        async with aclosing(answers):
            async for response in answers:
                yield response

    async def _answer_beside(
        self, job: Job, answer: AnswerText, prompt: SharedPrompt
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """A further answer to a prompt, once the first one's text is being opened."""
        await prompt.wait()
        async with aclosing(self._answer(job, answer.copy(), prompt)) as responses:
            async for response in responses:
                yield response

    async def _answer(
        self, job: Job, answer: AnswerText, prompt: SharedPrompt | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream one answer. answer: of the tokens that the client has   prompt: of a request for several"""
        outcome, account = "refused", None
        try:
            text = Text(
                job.prompt + job.held,
                job.sampling,
                # Text needs room for a token, which a complete answer in `held` does not leave; it is ended below.
                replace(job.limits, max_length=max(job.limits.max_length, len(job.prompt) + len(job.held) + 1)),
                job.tenant,
                job.marks,
                answer if job.stops.strings else None,
                len(job.held),
                job.logprobs,
                job.echo_from,
                job.structure,
            )
            await off_loop(len(text), lambda: text.digest(len(text)))  # later digests begin from this one
            outcome = "left"
            if job.written is not None and not job.computed_again:
                rest = self._rest_of_written(job, job.written, answer)
                yield _started(job, text, job.written.target)
                async for part in echo_of(job):
                    yield part
                for event in rest:
                    yield event
                outcome = "written"
                return
            finish = self._finish_of_held(job, answer) if job.held else None
            complete = pb.GenerateComplete()
            if finish is None:
                experience = job.experience
                with experience.concurrency.running(fixed=not job.plan.free) as running:
                    account = RoundAccount(job.plan, experience, running, self._clock)
                    try:
                        run = self._run(job, text, account, complete, prompt)
                        async with aclosing(_ahead(run, self._left_s(job))) as done:
                            async for each in done:
                                yield each if isinstance(each, pb.GenerateResponse) else each.message(answer)
                    finally:
                        if job.plan.learns:
                            self._priors.learn(job.kind, account.notes, experience)
                finish = text.finish if job.answer_length else Finish.LENGTH
                assert finish is not None
            else:  # the client has the whole answer
                assert job.resume is not None
                job.target = job.resume.target
                yield _started(job, text, job.target)
            complete.finish_reason, complete.stop_string = FINISH_REASONS[finish], answer.found
            complete.usage.prompt_tokens = len(job.prompt)
            complete.usage.completion_tokens = len(text) - len(job.prompt)
            if job.written is not None:
                complete.session = job.session
            elif job.session:
                complete.session = await self._keep(job, text, finish)
            outcome = str(finish)
            yield pb.GenerateResponse(complete=complete)
        except DendroError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._log_end(job.request_id, job.tenant, account, job.began_s, outcome)

    def _log_end(
        self, request_id: str, tenant: str, account: RoundAccount | None, began_s: float, outcome: str
    ) -> None:
        log.info(
            "request %s tenant %s tokens %d rounds %d accepted %d seconds %.3f outcome %s",
            one_line(request_id, MAX_REQUEST_ID),
            hashlib.sha256(tenant.encode()).hexdigest()[:8],
            account.stats.emitted_tokens if account else 0,
            account.stats.rounds if account else 0,
            account.stats.accepted_tokens if account else 0,
            self._clock() - began_s,
            outcome,
        )

    async def _run(
        self,
        job: Job,
        text: Text,
        account: RoundAccount,
        complete: pb.GenerateComplete,
        prompt: SharedPrompt | None,
    ) -> AsyncGenerator[pb.GenerateResponse | _FinishedRound, None]:
        """Yield `started` once a verifier is leased, then each round; release the leases at the end. Sets the
        statistics of `complete`."""
        before = len(job.prompt)
        name, plan, scores = job.served.name, job.plan, not job.answer_length  # its prompt alone, without a round
        beside = prompt.first if prompt is not None else None
        verifier = self._peers.verifier(name, text, beside, plan.plain_first and not scores)
        if prompt is not None:
            prompt.share(text)
        verifier.stays_off = account.stays_off
        drafter: DrafterPort = self._peers.drafters(name, text, account.running, plan.deadline_s, plan.adaptive)
        if account.stopping is not None:
            drafter = StoppingDrafter(drafter, account.stopping)
        shared = job.experience.concurrency
        proposals = self._libraries[name].around(
            drafter, job.tenant, plan.proposed_rows, job.sampling.temperature, lambda: shared.sizes
        )
        if proposals is not None:
            drafter, account.offer = proposals, partial(proposals.offer, text)
        try:
            hello = await verifier.first_hello()
            account.learn_hello(hello)
            target = hello.target
            self._admission.learn_target(name, target)
            check_target_of_resume(job.resume, job.held, target)
            check_resumed_structure(job)
            check_written_target(job, target)
            job.target = target
            yield _started(job, text, target)
            wanted = job.echo_from is not None
            async for part in echo_of(job, await verifier.prompt_logprobs() if wanted else NOT_ECHOED):
                yield part
            if scores:
                return
            if plan.plain_first:
                await drafter.prepare(text, account.foresee())
            async with aclosing(rounds(text, drafter, verifier, account)) as verdicts:
                async for verdict in verdicts:
                    check_written_tokens(job, text)
                    account.learn_hello(verifier.hello)
                    yield _FinishedRound(len(text) - len(verdict.tokens) - before, verdict, account.arm_name)
        finally:
            await self._close(text, drafter, verifier)
        account.fill(complete, drafter.openings, verifier.opened)
        self._acceptance.learn(name, complete.drafters)
        complete.speculation.verifier_moves = verifier.moves

    def _left_s(self, job: Job) -> float:
        return self.config.router.request_timeout_s - (self._clock() - job.began_s)

    async def _close(self, text: Text, *handles: HandlePort) -> None:
        """Close the handles in tasks of their own, so that neither a cancelled request nor a hung peer keeps a lease.
        Waits CLOSE_BUDGET_S at most."""
        tasks = [self._closing.start(handle.close(text)) for handle in handles]
        await asyncio.wait(tasks, timeout=CLOSE_BUDGET_S)

    def _finish_of_held(self, job: Job, answer: AnswerText) -> Finish | None:
        """Why the answer in `held`, which is not empty, ended; None where it is incomplete."""
        ended = finish_at(job.held[-1], job.served.end_ids, job.limits)
        if not (answer.found or ended or job.complete or len(job.held) >= job.answer_length):
            return None
        answer.finish()  # a stop string may end in it
        if answer.found:
            return Finish.STOP_STRING
        return ended or (Finish.STRUCTURE if job.complete else Finish.LENGTH)

    def _rest_of_written(self, job: Job, turn: Turn, answer: AnswerText) -> list[pb.GenerateResponse]:
        """The rest of an answer that is already in the record: its `complete` was lost, or its client disconnected.
        Raises BadRequest where the request's stop strings would have ended it elsewhere."""
        assert job.record is not None
        tokens, finish, events = job.record.tokens[turn.prompt : turn.end], Finish(turn.finish), []
        rest = tokens[len(job.held) :]
        text = answer.append(rest) + answer.finish()
        if answer.length != len(tokens) or bool(answer.found) != (finish is Finish.STOP_STRING):
            raise BadRequest("stop", "would have ended the written turn of this request_id elsewhere; use a new id")
        if rest:
            chunk = pb.GenerateChunk(offset=len(job.held), token_ids=rest, text=text)
            events.append(pb.GenerateResponse(chunk=chunk))
        complete = pb.GenerateComplete(
            finish_reason=FINISH_REASONS[finish],
            usage=pb.Usage(prompt_tokens=turn.prompt, completion_tokens=len(tokens)),
            session=job.session,
            stop_string=answer.found,
        )
        return [*events, pb.GenerateResponse(complete=complete)]

    async def _keep(self, job: Job, text: Text, finish: Finish) -> str:
        """Write the session's record. Returns its token. Raises PeerLost where it is not known whether the store has
        it: the client repeats the request, whose id shows whether its turn was written."""
        earlier = job.record
        turn = Turn(
            request=job.request_id,
            start=len(earlier.tokens) if earlier else 0,
            prompt=len(job.prompt),
            end=len(text),
            seed=job.sampling.seed,
            finish=finish.value,
            target=job.target,
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
        )
        try:
            return await self._write(job, record)
        except PeerLost as error:
            log.warning("request %s: its turn may not be kept: %s", one_line(job.request_id, MAX_REQUEST_ID), error)
            raise

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
            # Another attempt of this request may have written its turn meanwhile, and other turns may have followed. Or
            # this write was made, and its answer was lost. Or nothing was written. What is stored shows which: a write
            # that is still on its way fails once another one was made.
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


@dataclass(frozen=True, slots=True)
class _FinishedRound:
    """A round whose chunk is not made yet: without stop strings, its text is decoded after the next round's call was
    sent."""

    offset: int  # tokens of the answer before it
    verdict: Verdict
    arm: str  # its name

    def message(self, answer: AnswerText) -> pb.GenerateResponse:
        tokens, text = self.verdict.tokens, answer.text_of(self.verdict)
        chunk = pb.GenerateChunk(offset=self.offset, token_ids=tokens, text=text, shape=self.arm)
        for each in self.verdict.logprobs:
            fill_logprobs(chunk.logprobs.add(), each)
        return pb.GenerateResponse(chunk=chunk)


async def _ahead(chunks: AsyncGenerator[T, None], limit_s: float = math.inf) -> AsyncGenerator[T, None]:
    """The same chunks, made by a task that runs up to AHEAD chunks ahead of the consumer.

    After `limit_s` seconds `chunks` is closed, even without a consumer that reads, and Overloaded is raised after the
    chunks that were ready. (A timeout has no effect in a generator that is not resumed, hence the task.)
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
            raise OutOfTime(
                "request: not done within the server's time limit; ask for fewer tokens, or try again later"
            ) from None
        finally:
            with contextlib.suppress(asyncio.QueueFull):  # then the reader finds the task done after the queued chunks
                queue.put_nowait(None)

    driver = asyncio.create_task(drive())
    try:
        while not (driver.done() and queue.empty()):
            chunk = await queue.get()
            if chunk is None:
                break
            await asyncio.sleep(0)  # lets the next round's call be sent first
            yield chunk
        await driver
    finally:
        driver.cancel()
        await asyncio.wait({driver})


def _work_of_held(job: Job) -> int:
    """What `_held_answer` costs, in tokens of other work (`off_loop`)."""
    return SEARCH_WORK * (len(job.held) + job.stops.characters) if job.stops.strings else len(job.held)


def _held_answer(job: Job) -> AnswerText:
    """The text of the tokens that the client has. Raises BadRequest where they go on after a stop string."""
    answer = AnswerText(job.decoder, job.stops, job.before_answer())
    answer.append(job.held)
    if answer.length < len(job.held):
        raise BadRequest("resume.token_ids", f"go on after the stop string that their token {answer.length} completes")
    return answer


def _started(job: Job, text: Text, target: str) -> pb.GenerateResponse:
    """The first event: what a resume of this answer must repeat."""
    return pb.GenerateResponse(
        started=pb.GenerateStarted(
            request_id=job.request_id,
            model=job.served.name,
            seed=job.sampling.seed,
            prompt_tokens=len(job.prompt),
            offset=len(job.held),
            prompt_digest=text.digest(len(job.prompt)),
            target=target,
            mode=job.sampling.mode,
            lossy=job.sampling.mode.lossy,
            session=job.session,
        )
    )
