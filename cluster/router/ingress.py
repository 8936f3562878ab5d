"""The edge of the cluster: admit a request, run the loop, stream its verdicts, write its session's record.

A plain object without Ray or sockets: `Ingress.generate` takes a message and yields messages. Its gRPC shells are the
servicer in `cluster/api/grpc.py` and the Serve deployment in `cluster/app.py`; both map errors to statuses with
`logged_status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from dendro.answer import FINISHES, count_of_answers
from dendro.clock import Clock
from dendro.errors import BadRequest, DendroError, OutOfTime
from dendro.logprobs import NOT_ECHOED, fill_logprobs
from dendro.tasks import BackgroundTasks, off_loop
from dendro.text import Finish, Text, Verdict, finish_at
from dendro.v1 import generation_pb2 as pb

from cluster.checkpoints import check_pairs, read_cluster
from cluster.config import Config
from cluster.drafter_figures import DrafterFigures, figures_of_drafters
from cluster.policies import Experiences, RunningRequest
from cluster.policies.prior import PriorStore
from cluster.proposers.prediction import PredictedOutput, predicted_tokens
from cluster.proposers.proposals import ProposalLibrary
from cluster.router.account import LEFT, AcceptanceWatch, AnswerAccount, RouterTotals
from cluster.router.admission import Admission, Job, check_target, check_written_tokens
from cluster.router.allowance import Allowance, RequestShare
from cluster.router.echo import echo_of
from cluster.router.explained import ExplainedRequests
from cluster.router.ports import HandlePort, PeersPort, VerifierPort
from cluster.router.priors import Priors
from cluster.router.prompts import checked_ids, ids_of_prompt
from cluster.router.request_speculation import RequestSpeculation
from cluster.router.round_trees import TreeRecorder
from cluster.router.rounds import rounds
from cluster.router.samples import SharedPrompt, merged
from cluster.router.served import Served
from cluster.router.stop_strings import AnswerText, StoppedText
from cluster.router.token_texts import VocabularyTexts
from cluster.router.tokenizer import TextStream, Tokenizer
from cluster.router.traces import LAST_SPANS_S, Tracer, close_within, tracer_of
from cluster.router.turns import TurnWriter
from cluster.sessions import Sessions, Turn

log = logging.getLogger("dendro.router")

CLOSE_BUDGET_S = 1.0
"""Seconds that `complete` waits for the peers to save their last states."""
AHEAD = 4
"""Finished rounds that may wait to be sent: sending does not delay the next round, and decoding stops for a client that
does not read."""

ALIGNING_WORK = 4
"""Cost of aligning a token with a prediction, in tokens of other work (`off_loop`)."""
SEARCH_WORK = 64
"""Cost of searching a token's text for stop strings, or of preparing the search for one of their characters, in tokens
of other work (`off_loop`)."""

FINISH_REASONS = {finish: reason for reason, finish in FINISHES.items()}

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
        tracer: Tracer | None = None,
    ) -> None:
        """`served` has the tokenizers and limits of the targets. Without it they are read from the checkpoints, and
        replicas loaded from other checkpoints are not used. Without `priors`, priors are kept in this process only."""
        import scipy.optimize  # noqa: F401  # so that no round waits for it: the first fit of costs would import it

        self.config = config
        self._clock = clock
        self._peers = peers
        self.turns = TurnWriter(sessions)
        self.totals = RouterTotals(config)
        cards: Mapping[str, DrafterFigures] = {}
        if served is None:
            facts = read_cluster(config)
            check_pairs(config, facts)
            peers.expect(facts)
            served = {
                name: Served.of(name, target, facts.targets[name], config.structures)
                for name, target in config.targets.items()
            }
            cards = figures_of_drafters(config)
        self._served = served
        self._token_texts: dict[str, VocabularyTexts] = {}  # texts of each target's vocabulary, made when first needed
        self._libraries = {
            name: ProposalLibrary(config.speculation.proposers, target.max_rows, target.max_depth)
            for name, target in config.targets.items()
        }
        self._priors = Priors(priors, cards)
        self.experience = {name: Experiences() for name in config.targets}
        self._admission = Admission(config, served, sessions, self._priors, self.experience)
        self._acceptance = AcceptanceWatch()
        self._explained = ExplainedRequests(config.router.explained_share, config.router.explained_requests)
        self._tracer = tracer or tracer_of(config.trace)
        self._closing = BackgroundTasks()

    async def close(self) -> None:
        """Send the last spans, once no request runs. Takes LAST_SPANS_S at most: later spans are lost."""
        if self._tracer is not None:
            await close_within(self._tracer, LAST_SPANS_S)

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

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """The tokens of a prompt that begins a text. Raises BadRequest naming the field."""
        served = self._served[self.config.target_named(request.model)]
        ids = await ids_of_prompt(request, served, self.config.router.max_prompt_bytes)
        return pb.TokenizeResponse(token_ids=ids, max_length=served.max_length)

    async def token_texts(self, model: str) -> VocabularyTexts:
        """The texts of a target's tokens, one by one. Raises BadRequest for an unknown target."""
        name = self.config.target_named(model)
        if name not in self._token_texts:
            made = await asyncio.to_thread(VocabularyTexts, self._served[name].tokenizer)
            self._token_texts.setdefault(name, made)
        return self._token_texts[name]

    async def target_of(self, session: str, tenant: str) -> str:
        """Name of the target that a session continues with. Raises NotFound for an unknown session, and PeerLost where
        the store does not answer."""
        return await self._admission.target_of(session, tenant)

    def tokenizer(self, model: str) -> Tokenizer:
        """The tokenizer of a target. Raises BadRequest for an unknown one."""
        return self._served[self.config.target_named(model)].tokenizer

    def explain(self, request: pb.ExplainRequest, tenant: str) -> pb.ExplainResponse:
        """The rounds of a request. Raises NotFound where they are not kept."""
        return self._explained.find(tenant, request.request_id)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """The text of tokens. Raises BadRequest naming the field."""
        served = self._served[self.config.target_named(request.model)]
        ids = await checked_ids("token_ids", request.token_ids, served)
        tokenizer = served.tokenizer.showing() if request.show_special_tokens else served.tokenizer
        return pb.DetokenizeResponse(text=await off_loop(len(ids), lambda: tokenizer.decode(ids)))

    async def generate(
        self, request: pb.GenerateRequest, tenant: str = "", allowance: Allowance | None = None, traceparent: str = ""
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream the answer, or as many as the request asks for: started, a chunk per round, complete. Raises the
        family in dendro.errors.

        allowance: what the caller's key has left; answers and tokens are taken from it, the request was counted before.
            None: the call has no key
        traceparent: the caller's span (W3C Trace Context); empty: none
        Leaving the iteration, or cancelling the task, ends the work within a round and releases the leases.
        """
        request_id = request.request_id or secrets.token_hex(16)
        began_s = self._clock()
        limited: AbstractContextManager[RequestShare | None]
        limited = allowance.request() if allowance is not None else nullcontext()
        with limited as share:
            try:
                if share is not None:
                    share.take_answers(count_of_answers(request))
                job = await self._admission.admit(request, request_id, tenant, began_s, allowance)
                answer = await off_loop(_work_of_held(job), lambda: _text_of_held(job))
                if share is not None:
                    share.take_tokens(len(job.prompt), job.answers * (job.answer_length - len(job.held)))
            except BaseException as error:
                account = AnswerAccount()
                if isinstance(error, DendroError):
                    account.ended(type(error).__name__)
                self._log_end(request_id, tenant, began_s, account)
                self.totals.failed(error)
                raise
            del request  # frees the request's memory: it may be large, and an answer may take long
            explained = None
            trees = job.trees
            if self.config.router.explained_share:
                explained = self._explained.begin(tenant, request_id, job.sampling.sample_index)
                job = replace(job, trees=trees or explained is not None)
            given = job, answer, traceparent
            responses = self._answer(*given) if job.answers == 1 else self._several(*given)
            try:
                async with aclosing(responses):
                    async for response in responses:
                        if share is not None:
                            share.use(len(response.chunk.token_ids))
                        yield response if explained is None else explained.take(response, trees)
            except BaseException as error:
                self.totals.failed(error)
                raise

    def _several(self, job: Job, answer: AnswerText, traceparent: str) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream all answers of a request for more than one. answer: the text of the tokens that the client has"""
        prompt = SharedPrompt()
        rest = [
            self._answer_beside(job.of_sample(sample), answer, traceparent, prompt) for sample in range(1, job.answers)
        ]
        return merged([self._answer(job, answer.copy(), traceparent, prompt), *rest])

    async def _answer_beside(
        self, job: Job, answer: AnswerText, traceparent: str, prompt: SharedPrompt
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream a further answer to a prompt, once the first answer's text is being opened."""
        await prompt.wait()
        async with aclosing(self._answer(job, answer.copy(), traceparent, prompt)) as responses:
            async for response in responses:
                yield response

    async def _answer(
        self, job: Job, answer: AnswerText, traceparent: str, prompt: SharedPrompt | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream one answer. answer: the text of the tokens that the client has   prompt: None for a request of one
        answer"""
        span = self._tracer.begin(traceparent, job.served.name) if self._tracer is not None else None
        account = AnswerAccount(job.plan.name, job.plan.names_drafters, span)
        try:
            text = _text_of(job, answer)
            if span is not None:
                text.traceparent = span.traceparent
            await off_loop(len(text), lambda: text.digest(len(text)))  # later digests begin from this one
            account.ended(LEFT)
            finish = self._finish_of_held(job, answer) if job.held else None
            if job.written is not None and not job.computed_again:
                responses = self._written_answer(job, job.written, text, answer, account)
            elif finish is not None:
                responses = self._held_answer(job, text, answer, finish, account)
            else:
                responses = self._computed_answer(job, text, answer, prompt, account)
            async with aclosing(responses):
                async for response in responses:
                    yield response
        except DendroError as error:
            account.ended(type(error).__name__)
            raise
        finally:
            self._log_end(job.request_id, job.tenant, job.began_s, account, job.served.name)

    async def _written_answer(
        self, job: Job, turn: Turn, text: Text, answer: AnswerText, account: AnswerAccount
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """An answer that is in the session's record already: an earlier attempt of the request wrote it."""
        rest = await self._rest_of_written(job, turn, answer)
        yield _started(job, text, turn.target)
        if job.echo_start is not None:
            async for part in echo_of(job):
                yield part
        for event in rest:
            yield event
        account.ended("written")

    async def _held_answer(
        self, job: Job, text: Text, answer: AnswerText, finish: Finish, account: AnswerAccount
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """An answer of which the client has all tokens, and which it resumes for `complete`."""
        assert job.resume is not None
        yield _started(job, text, job.resume.target)
        yield await self._completed(job, text, answer, finish, job.resume.target, pb.GenerateComplete(), account)

    async def _computed_answer(
        self, job: Job, text: Text, answer: AnswerText, prompt: SharedPrompt | None, account: AnswerAccount
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """An answer that the target computes, beginning after the tokens that the client has."""
        complete, plan, concurrency = pb.GenerateComplete(), job.plan, job.experience.concurrency
        with concurrency.running(fixed=not plan.free and not plan.off, off=plan.off) as running:
            beside = prompt.first if prompt is not None else None
            verifier = self._peers.verifier(job.served.name, text, beside, plan.plain_first and not job.scores)
            totals = self.totals.targets[job.served.name]
            account.begin(totals, job.began_s, len(job.prompt), job.resume is not None)
            speculation = self._speculation(job, text, running, account)
            if prompt is not None:
                prompt.share(text)
            try:
                run = self._run(job, text, verifier, speculation, complete)
                left_s = job.began_s + self.config.router.request_timeout_s - self._clock()
                async with aclosing(_ahead(run, left_s)) as done:
                    async for each in done:
                        yield each if isinstance(each, pb.GenerateResponse) else each.message(answer)
            finally:
                totals.left(speculation.fallbacks, verifier.moves, verifier.reopened)
                if plan.learns:
                    self._priors.learn(job.kind, speculation.notes, job.experience)
        finish = text.finish if job.answer_length else Finish.LENGTH
        assert finish is not None
        completed = await self._completed(job, text, answer, finish, verifier.hello.target, complete, account)
        totals.answer_s.observe(self._clock() - job.began_s)
        yield completed

    def _speculation(self, job: Job, text: Text, running: RunningRequest, account: AnswerAccount) -> RequestSpeculation:
        """Make the text's speculation. The verifier's handle must exist."""
        name, plan = job.served.name, job.plan
        drafters = self._peers.drafters(name, text, running, plan.deadline_s, plan.adaptive)
        predicted = PredictedOutput(job.prediction, len(job.prompt)) if job.prediction else None
        proposals = self._libraries[name].of(job.tenant, plan.proposed_rows, job.sampling.temperature, predicted)
        return RequestSpeculation(plan, job.experience, running, text, drafters, proposals, self._clock, account)

    async def _completed(
        self,
        job: Job,
        text: Text,
        answer: AnswerText,
        finish: Finish,
        target: str,
        complete: pb.GenerateComplete,
        account: AnswerAccount,
    ) -> pb.GenerateResponse:
        """The last response, once the session's record is written. target: as in `Started`"""
        complete.finish_reason, complete.stop_string = FINISH_REASONS[finish], answer.found
        await _count_tokens(complete.usage, job, text.answer)
        if job.written is not None:
            complete.session = job.session
        elif job.session:
            complete.session = await self.turns.keep(job, text, finish, target)
        account.ended(str(finish))
        return pb.GenerateResponse(complete=complete)

    def _log_end(self, request_id: str, tenant: str, began_s: float, account: AnswerAccount, target: str = "") -> None:
        self.totals.outcomes[target, account.outcome] += 1
        account.log(request_id, tenant, target, self._clock() - began_s)

    async def _run(
        self,
        job: Job,
        text: Text,
        verifier: VerifierPort,
        speculation: RequestSpeculation,
        complete: pb.GenerateComplete,
    ) -> AsyncGenerator[pb.GenerateResponse | _FinishedRound, None]:
        """Yield `started` once a verifier is leased, then each round; release the leases at the end. Sets the
        statistics of `complete`."""
        before = len(job.prompt)
        try:
            hello = await verifier.first_hello()
            speculation.learn_hello(hello)
            self._admission.learn_target(job.served.name, hello.target)
            if job.begun_before:
                check_target(job, hello.target)
            yield _started(job, text, hello.target)
            if job.echo_start is not None:
                wanted = job.echo_from is not None
                async for part in echo_of(job, await verifier.prompt_logprobs() if wanted else NOT_ECHOED):
                    yield part
            if job.scores:
                return
            recorder = await self._tree_recorder(job, speculation) if job.trees else None
            speculation.prepare()
            async with aclosing(rounds(text, speculation, verifier, recorder or speculation)) as verdicts:
                async for verdict in verdicts:
                    if job.written is not None:
                        check_written_tokens(job, text)
                    speculation.learn_hello(verifier.hello)
                    offset, tree = len(text) - len(verdict.tokens) - before, recorder.tree if recorder else None
                    yield _FinishedRound(offset, verdict, speculation.arm_name, tree)
        finally:
            await self._close(text, speculation, verifier)
        speculation.fill(complete, verifier.opened, verifier.moves)
        self._acceptance.learn(job.served.name, complete.drafters)

    async def _tree_recorder(self, job: Job, speculation: RequestSpeculation) -> TreeRecorder:
        texts = await self.token_texts(job.served.name)
        return TreeRecorder(speculation, job.plan.policy, texts, job.plan.names_drafters)

    async def _close(self, text: Text, *handles: HandlePort) -> None:
        """Close the handles in tasks of their own, so that neither a cancelled request nor a hung peer keeps a lease.
        Waits CLOSE_BUDGET_S at most."""
        tasks = [self._closing.start(handle.close(text)) for handle in handles]
        await asyncio.wait(tasks, timeout=CLOSE_BUDGET_S)

    def _finish_of_held(self, job: Job, answer: AnswerText) -> Finish | None:
        """Reason why the answer that the client holds (`Job.held`, not empty) ended; None if it is incomplete."""
        ended = finish_at(job.held[-1], job.served.end_ids, job.limits)
        if not (answer.found or ended or job.complete or len(job.held) >= job.answer_length):
            return None
        answer.finish()  # a stop string may end in it
        if answer.found:
            return Finish.STOP_STRING
        return ended or (Finish.STRUCTURE if job.complete else Finish.LENGTH)

    async def _rest_of_written(self, job: Job, turn: Turn, answer: AnswerText) -> list[pb.GenerateResponse]:
        """The events that a client lacks of an answer that is already in the session's record: its `complete` was lost,
        or its client disconnected. Raises BadRequest where the request's stop strings would have ended it elsewhere."""
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
            session=job.session,
            stop_string=answer.found,
        )
        await _count_tokens(complete.usage, job, tokens)
        return [*events, pb.GenerateResponse(complete=complete)]


@dataclass(frozen=True, slots=True)
class _FinishedRound:
    """A round whose chunk is not made yet: if the request has no stop strings, the round's text is decoded after the
    next round's call was sent."""

    offset: int  # tokens of the answer before this round
    verdict: Verdict
    arm: str  # name of the arm
    tree: pb.RoundTree | None  # None: the client did not ask for trees

    def message(self, answer: AnswerText) -> pb.GenerateResponse:
        tokens, text = self.verdict.tokens, answer.text_of(self.verdict)
        chunk = pb.GenerateChunk(offset=self.offset, token_ids=tokens, text=text, shape=self.arm, tree=self.tree)
        for each in self.verdict.logprobs:
            fill_logprobs(chunk.logprobs.add(), each)
        return pb.GenerateResponse(chunk=chunk)


async def _ahead(chunks: AsyncGenerator[T, None], limit_s: float) -> AsyncGenerator[T, None]:
    """Pass chunks on. A task makes them and runs up to AHEAD chunks ahead of the consumer.

    After `limit_s` seconds `chunks` is closed, even without a consumer that reads, and OutOfTime is raised after the
    chunks that were ready. (A timeout has no effect in a generator that is not resumed, hence the task.)
    """
    queue: asyncio.Queue[T | None] = asyncio.Queue(AHEAD)

    async def drive() -> None:
        limit = asyncio.timeout(limit_s)
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
            with contextlib.suppress(asyncio.QueueFull):  # a reader of a full queue finds the task done
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


async def _count_tokens(usage: pb.Usage, job: Job, tokens: Sequence[int]) -> None:
    """Set the usage of an answer. tokens: all tokens of the answer, also those that a resuming client holds"""
    usage.prompt_tokens, usage.completion_tokens = len(job.prompt), len(tokens)
    if job.prediction:
        work = ALIGNING_WORK * (len(tokens) + sum(len(each.tokens) for each in job.prediction))
        accepted, rejected = await off_loop(work, lambda: predicted_tokens(job.prediction, tokens))
        usage.accepted_prediction_tokens, usage.rejected_prediction_tokens = accepted, rejected


def _work_of_held(job: Job) -> int:
    """Cost of `_text_of_held` in tokens of other work (`off_loop`)."""
    return SEARCH_WORK * (len(job.held) + job.stops.characters) if job.stops.strings else len(job.held)


def _text_of_held(job: Job) -> AnswerText:
    """The text of the tokens that the client has. Raises BadRequest where they go on after a stop string."""
    before = job.prompt if job.structure is None else job.before_answer()
    answer: AnswerText
    answer = StoppedText(job.decoder, job.stops, before) if job.stops.strings else TextStream(job.decoder, before)
    answer.append(job.held)
    if answer.length < len(job.held):
        raise BadRequest("resume.token_ids", f"go on after the stop string that their token {answer.length} completes")
    return answer


def _text_of(job: Job, answer: AnswerText) -> Text:
    """The text of an answer, which is not sent to any peer yet."""
    return Text(
        job.prompt + job.held,
        job.sampling,
        # Text needs room for one more token, for which a complete held answer leaves none; `generate` ends it later.
        replace(job.limits, max_length=max(job.limits.max_length, len(job.prompt) + len(job.held) + 1)),
        tenant=job.tenant,
        marks=job.marks,
        stopping=answer if isinstance(answer, StoppedText) else None,
        held=len(job.held),
        logprobs=job.logprobs,
        echo_from=job.echo_from,
        structure=job.structure,
    )


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
