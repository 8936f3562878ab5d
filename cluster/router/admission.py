"""Checks every field of a request before a model sees it, and makes a `Job` of it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event

from dendro.answer import count_of_answers
from dendro.calls import TARGET_BYTES
from dendro.daemon_threads import in_thread
from dendro.errors import BadRequest, Conflict, NotFound, PeerLost
from dendro.grammars import Grammar, GrammarText
from dendro.logprobs import check_echo, check_logprobs
from dendro.modes import VerificationMode
from dendro.options import MAX_REQUEST_ID
from dendro.structure import Structure, structure_from
from dendro.tasks import PART, in_turn, off_loop
from dendro.text import Limits, Sampling, StopStrings, Text, Tokens, check_choice, stop_ids_from
from dendro.v1 import generation_pb2 as pb

from cluster.config import Config
from cluster.policies import Experience, Experiences
from cluster.policies.prior import PriorKey
from cluster.proposers.prediction import PredictedText
from cluster.router.allowance import Allowance
from cluster.router.priors import Priors
from cluster.router.prompts import checked_ids, ids_of_prompt, predicted_texts, special_tokens_of, tools_digest
from cluster.router.served import Served
from cluster.router.speculation import SpeculationPlan, TargetArms, plan_speculation
from cluster.router.tokenizer import Tokenizer
from cluster.router.words import with_words
from cluster.sessions import Record, Sessions, Turn, unknown_session

_REQUEST_ID = re.compile(f"[!-~]{{1,{MAX_REQUEST_ID}}}")  # safe in a log line, a key and a header
_TARGET = re.compile(f"[0-9a-f]{{{2 * TARGET_BYTES}}}")  # `Hello.target`, as stored in records
FOLLOWING = "structure-of-resume"
"""Name of the threads that check a resumed answer's tokens against its structure, and of their queue (`in_turn`)."""
FOLLOWED = 64
"""Tokens of a resumed structured answer that are checked before its thread looks whether the request still runs."""
DRAWN_SEED_BITS = 53
"""Bits of a seed that is drawn here. JavaScript reads a number of JSON as a float64, which rounds whole numbers of more
bits, so that its clients could not repeat the answer. A request's own seed may have 64."""
ANCHOR = "a"
"""A text before an answer that begins a text, so that decoders do not change its first bytes."""
BEGIN_AGAIN = "begin the turn again, with the same request_id"


@dataclass(frozen=True, slots=True)
class Job:
    """One answer of an admitted request."""

    request_id: str
    tenant: str
    answers: int  # number of answers of the request; `of_sample` makes the jobs of the others
    served: Served
    sampling: Sampling
    prompt: list[int]  # the text before the answer, a session's earlier turns included
    held: list[int]  # the answer's tokens that the client has
    limits: Limits
    stops: StopStrings
    structure: Structure | None
    complete: bool | None  # True: `held` is a whole structured answer; None: not read, as the target may have changed
    logprobs: int | None  # number of likeliest tokens with log-probabilities beside each token's; None: none
    echo_start: int | None  # index of the request's own prompt in `prompt`; None: the client does not get it
    shown: frozenset[int] | None  # special tokens that texts have; None: all
    trees: bool  # True if the client gets each round's draft tree
    plan: SpeculationPlan
    kind: PriorKey
    experience: Experience  # costs of the tenant
    session: str  # the session's token; empty: no session
    resume: pb.Resume | None  # the request's resume, its tokens removed
    record: Record | None  # record of the session so far; None: the session begins with this request
    began_s: float  # time of the request's arrival on the router's clock
    prediction: list[PredictedText] = field(default_factory=list)
    written: Turn | None = None  # the record's turn of this request, which an earlier attempt completed
    tools: str | None = None  # `Record.tools` of the session after this turn

    def of_sample(self, sample: int) -> Job:
        """Job of another answer of this request, with another sample index and no echo. Nothing is checked again."""
        index = self.sampling.sample_index + sample
        return replace(self, sampling=self.sampling.of_sample(index), echo_start=None)

    @property
    def marks(self) -> tuple[int, ...]:
        """Lengths at which earlier turns ended. Turns after a written turn that is computed again are left out."""
        marks = self.record.marks if self.record is not None else ()
        return tuple(mark for mark in marks if mark <= len(self.prompt))

    @property
    def answer_length(self) -> int:
        return self.limits.max_length - len(self.prompt)

    @property
    def scores(self) -> bool:
        """True if the request asks for the prompt's log-probabilities alone, without a token of an answer."""
        return not self.answer_length

    @property
    def decoder(self) -> Tokenizer:
        """Tokenizer that decodes the answer."""
        return self.served.tokenizer if self.shown == frozenset() else self.served.tokenizer.showing(self.shown)

    def before_answer(self) -> Sequence[int]:
        """The tokens that a structured answer's text continues: the prompt. If the prompt has no text, the tokens of
        ANCHOR: decoders change the first bytes of a text, and a structure must hold for the bytes of the tokens."""
        parts = (self.prompt[start : start + PART] for start in range(0, len(self.prompt), PART))
        if any(map(self.decoder.visible, parts)):
            return self.prompt
        return self.served.tokenizer.encode(ANCHOR, begins=False)

    @property
    def echo_from(self) -> int | None:
        """Position of the first token whose log-probability the opening reports; None: none. The first token of a text
        has none."""
        return max(self.echo_start, 1) if self.echo_start is not None and self.logprobs is not None else None

    @property
    def begun_before(self) -> bool:
        """True if an earlier attempt of the request began its answer: the client resumes it, or its turn is written."""
        return self.resume is not None or self.written is not None

    @property
    def computed_again(self) -> bool:
        """True if the rest of a written turn is computed again, because a record has no log-probabilities."""
        return self.written is not None and self.logprobs is not None and len(self.held) < self.answer_length


def _check_written(
    turn: Turn, tokens: Sequence[int], prompt: list[int], held: list[int], mode: VerificationMode
) -> None:
    """Raise BadRequest where a request has a written turn's request id but other tokens or another mode. tokens: all
    tokens of the session"""
    if mode != turn.mode:
        raise BadRequest("request_id", f"is that of a written turn in mode {turn.mode}; mode {mode} needs a new id")
    if prompt != list(tokens[: turn.prompt]):
        raise BadRequest("request_id", "is that of a written turn with another prompt; a new turn needs a new id")
    if held != list(tokens[turn.prompt : turn.end][: len(held)]):
        raise BadRequest("resume.token_ids", "are not the first tokens of this request's answer")


async def _held_by_client(resume: pb.Resume, served: Served) -> list[int]:
    """The answer's tokens that the client has. Raises BadRequest for a resume without what `started` reported."""
    held = await checked_ids("resume.token_ids", resume.token_ids, served)
    if not resume.prompt_tokens:
        raise BadRequest("resume.prompt_tokens", "is missing: it must be what `started` reported")
    if not _TARGET.fullmatch(resume.target):
        raise BadRequest("resume.target", f"must be what `started` reported, {2 * TARGET_BYTES} hexadecimal digits")
    return held


def check_text_of_resume(resume: pb.Resume, prompt: Sequence[int]) -> None:
    """Raise Conflict where the text before the answer differs from the one that the answer was begun with."""
    text = Tokens()
    text.extend(prompt)
    if (resume.prompt_tokens, resume.prompt_digest) != (len(prompt), text.digest()):
        differs = f"it had {resume.prompt_tokens} tokens, and has {len(prompt)}"
        if resume.prompt_tokens == len(prompt):
            differs = "prompt_digest differs; it has 64 bits, and JavaScript's numbers would round it"
        raise Conflict(f"resume: the text before the answer has changed: {differs}; {BEGIN_AGAIN}")


async def _check_resumed(resume: pb.Resume, prompt: Sequence[int], in_session: bool) -> None:
    """Check the text before a resumed answer (`check_text_of_resume`). in_session: the request names a session that has
    no record; if the text differs, the session had earlier turns when the answer began, and NotFound is raised."""
    try:
        await off_loop(len(prompt), lambda: check_text_of_resume(resume, prompt))
    except Conflict:
        if in_session:
            raise unknown_session() from None
        raise


def _sampling_of_written(sampling: Sampling, request: pb.GenerateRequest, turn: Turn) -> Sampling:
    """The sampling of a request whose turn is written: with the turn's seed and, unless the request has one, the turn's
    sample index."""
    index = sampling.sample_index if request.sampling.HasField("sample_index") else turn.sample_index
    return replace(sampling, seed=turn.seed, sample_index=index)


def _check_target_of_resume(resume: pb.Resume | None, held: list[int], target: str) -> None:
    """Raise Conflict where the client's tokens come from another target than `target`, which would continue them."""
    if resume is not None and held and resume.target != target:
        raise Conflict(f"resume.target: the target has changed since the answer began; {BEGIN_AGAIN}")


def check_target(job: Job, target: str) -> None:
    """Check a request that an earlier attempt began (`Job.begun_before`) against the target that will answer it.

    Raises Conflict where the earlier attempt had another target. Raises PeerLost where admission did not check the
    client's tokens against the structure, because they seemed to come from another target; the next resume checks them.
    """
    _check_target_of_resume(job.resume, job.held, target)
    if job.complete is None:
        raise PeerLost("router: the target has changed meanwhile; resume the answer again")
    if job.written is not None and job.written.target != target:
        raise Conflict(
            "logprobs: the target has changed since this answer was written, and its record has none; ask without them"
        )


def check_written_tokens(job: Job, text: Text) -> None:
    """Raise BadRequest where a written turn that is computed again gets other tokens. text: what is computed so far"""
    assert job.written is not None and job.record is not None
    if text.answer != list(job.record.tokens[len(job.prompt) : len(text)]) or (
        text.finish is not None and (len(text), text.finish) != (job.written.end, job.written.finish)
    ):
        raise BadRequest(
            "request_id", "is that of a written turn, but the parameters are others; a new turn needs a new id"
        )


class Admission:
    """Checks requests for all targets of a configuration."""

    def __init__(
        self,
        config: Config,
        served: Mapping[str, Served],
        sessions: Sessions,
        priors: Priors,
        experience: Mapping[str, Experiences],
    ) -> None:
        """served, experience: mappings by the target's name"""
        self._config = config
        self._served = served
        self._sessions = sessions
        self._priors = priors
        self._experience = experience
        self._arms = {name: TargetArms.of(config, name) for name in config.targets}
        self._targets: dict[str, str] = {}  # `Hello.target` of the last verifier, by the target's name

    def learn_target(self, name: str, target: str) -> None:
        """Note the `Hello.target` of a verifier, so that a resume of another target's answer is refused early."""
        self._targets[name] = target

    async def admit(
        self, request: pb.GenerateRequest, request_id: str, tenant: str, began_s: float, allowance: Allowance | None
    ) -> Job:
        """Check a request, once for all of its answers. Returns the job of the first answer. Raises BadRequest naming
        the field, NotFound for an unknown session, Conflict for a resume of another target's answer, and PeerLost where
        the session cannot be read, or none can be begun. began_s: see `Job.began_s`"""
        if not _REQUEST_ID.fullmatch(request_id):
            raise BadRequest("request_id", f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters without a space")
        answers = count_of_answers(request)
        record = await self._record(request, tenant) if request.session else None
        served = self._served_for(request, record)
        resume = request.resume if request.HasField("resume") else None
        held = await _held_by_client(resume, served) if resume is not None else []
        sampling = _sampling(request, record)
        if request.bad_word_texts or request.logit_bias_texts:
            sampling = await with_words(sampling, request, served.tokenizer)
        stops = StopStrings()
        if request.stop or request.include_stop:
            stops = StopStrings.of(request.stop, request.include_stop)
        structure = structure_from(request.structure) if request.HasField("structure") else None
        if structure is not None and allowance is not None:
            allowance.check_structure()
        logprobs = request.logprobs if request.HasField("logprobs") else None
        if logprobs is not None:
            check_logprobs(logprobs)
        experience = self._experience[served.name].of(tenant, sampling.mode)
        arms = self._arms[served.name]
        kind = PriorKey.of(served.name, arms.drafters, sampling.temperature, tenant, sampling.mode)
        prior = await self._priors.of(kind, experience)
        plan = plan_speculation(request.speculation, arms, experience, sampling, prior)
        written = record.turn_of(request_id) if record is not None else None
        earlier = record.tokens if record is not None else ()
        before = list(earlier[: written.start] if written is not None else earlier)
        described = record.tools if record is not None else ""
        most_bytes = self._config.router.max_prompt_bytes
        ids = await ids_of_prompt(request, served, most_bytes, before, described)
        prompt = before + ids if before else ids
        if allowance is not None:
            allowance.check_prompt(len(prompt))
        if request.echo:
            check_echo("echo", len(prompt) - len(before), logprobs)
        least = request.min_new_tokens
        if written is not None:
            _check_target_of_resume(resume, held, written.target)
            _check_written(written, earlier, prompt, held, sampling.mode)
            sampling, end = _sampling_of_written(sampling, request, written), written.end
            least = min(least, end - len(prompt))  # a stop string or the structure may have ended the turn before
        else:
            end = len(prompt) + self._new_tokens(request, served, prompt, held, allowance)
        limits = _limits(request, len(prompt), end, least)
        check_choice(sampling, limits, served.vocabulary, served.end_ids, structure)
        if resume is not None:
            await _check_resumed(resume, prompt, in_session=record is None and bool(request.session))
        complete: bool | None = False
        if structure is not None:
            grammar = await _grammar_of(structure, tenant, served)
            moved = resume is not None and self._targets.get(served.name, resume.target) != resume.target
            # An answer that goes on is checked against its verifier's target later, in `check_target`.
            goes_on = bool(held) and len(prompt) + len(held) < limits.max_length
            complete = None if moved and goes_on else await _completes(grammar, held, limits, served)
        shown: frozenset[int] | None = None if request.show_special_tokens else frozenset()
        if shown is not None and request.chat.shown_tokens:
            shown = special_tokens_of(request.chat, served.tokenizer)
        session = request.session
        if request.keep_session and not session:
            session = await self._sessions.new_token(tenant)
        return Job(
            request_id=request_id,
            tenant=tenant,
            answers=answers,
            served=served,
            sampling=sampling,
            prompt=prompt,
            held=held,
            limits=limits,
            stops=stops,
            structure=structure,
            complete=complete,
            logprobs=logprobs,
            echo_start=len(before) if request.echo and not held else None,
            shown=shown,
            trees=request.trees,
            plan=plan,
            kind=kind,
            experience=experience,
            session=session,
            resume=_without_tokens(resume) if resume is not None else None,
            record=record,
            began_s=began_s,
            prediction=await predicted_texts(request.prediction, served, most_bytes) if request.prediction else [],
            written=written,
            tools=tools_digest(request.chat.tools) or described,
        )

    async def target_of(self, session: str, tenant: str) -> str:
        """Name of the target that a session continues with. Raises NotFound for an unknown session, and PeerLost where
        the store does not answer."""
        if len(self._served) == 1:
            return next(iter(self._served))
        return (await self._sessions.read(session, tenant)).model

    async def _record(self, request: pb.GenerateRequest, tenant: str) -> Record | None:
        """Record of the session that a request names. None for a resume of the request that began it: `started`
        reported the session, which has a record only if an earlier attempt completed the turn."""
        try:
            return await self._sessions.read(request.session, tenant)
        except NotFound:
            if request.keep_session and request.HasField("resume"):
                return None
            raise

    def _served_for(self, request: pb.GenerateRequest, record: Record | None) -> Served:
        if record is None:
            return self._served[self._config.target_named(request.model)]
        if request.model and request.model != record.model:
            raise BadRequest("model", f"is {request.model!r}, but the session is of {record.model!r}")
        served = self._served[self._config.target_named(record.model)]
        if served.tokenizer.fingerprint != record.tokenizer:
            raise BadRequest(
                "session", f"was written with another tokenizer than {served.name!r} has now; begin a new session"
            )
        return served

    def _new_tokens(
        self,
        request: pb.GenerateRequest,
        served: Served,
        prompt: list[int],
        held: list[int],
        allowance: Allowance | None,
    ) -> int:
        """The answer's maximum length. The default is cut to the limits and to the room left; a requested number that
        exceeds them is refused."""
        room = served.max_length - len(prompt)
        context = f", as this model's maximum context length is {served.max_length}"  # words that clients look for
        if room < 1:
            fault = f"makes a text of {len(prompt)} tokens; at most {served.max_length - 1}{context}"
            raise BadRequest("prompt", fault, too_long=True)
        most = self._config.router.max_new_tokens
        limit = most if allowance is None else allowance.most_new_tokens(most)
        count = min(self._config.router.default_new_tokens, limit, room)
        if allowance is not None:
            count = allowance.within_minute(count, len(prompt), count_of_answers(request))
        if request.HasField("max_new_tokens"):
            count = request.max_new_tokens
            scores = request.echo and not request.session and not request.keep_session
            if not count and not scores:
                raise BadRequest("max_new_tokens", "is 0; only a request with `echo` and no session has no answer")
            if count > limit:
                named = f"; this key's limit `new_tokens` is {limit}" if limit < most else ""
                raise BadRequest("max_new_tokens", f"must lie in {0 if scores else 1} to {limit}; got {count}{named}")
            if count > room:
                fault = f"is {count}, but the text has room for {room} more{context}"
                raise BadRequest("max_new_tokens", fault, too_long=True)
        if len(held) > count:
            raise BadRequest("resume.token_ids", f"has {len(held)} ids; the answer has at most {count}")
        return count


def _without_tokens(resume: pb.Resume) -> pb.Resume:
    """Copy a resume without its tokens: a part of a message would keep all of it."""
    return pb.Resume(
        seed=resume.seed,
        prompt_tokens=resume.prompt_tokens,
        prompt_digest=resume.prompt_digest,
        target=resume.target,
    )


async def _grammar_of(structure: Structure, tenant: str, served: Served) -> Grammar:
    """Compile a structure. Raises BadRequest if it does not compile, and Overloaded if too many wait to be compiled."""
    if served.grammars is None:
        raise BadRequest("structure", f"cannot be enforced for the target {served.name!r}")
    return await served.grammars.compiled(structure, tenant)


async def _completes(grammar: Grammar, held: list[int], limits: Limits, served: Served) -> bool:
    """True if the client has the whole of a structured answer. Raises BadRequest for tokens that are not allowed."""
    text = grammar.text(0, () if limits.ignore_end else served.end_ids, limits.stop_ids)
    if held:
        left = Event()
        try:
            await in_turn(FOLLOWING, lambda: in_thread(FOLLOWING, lambda: _follow(text, held, left)))
        except BadRequest as error:
            raise BadRequest("resume.token_ids", f"cannot begin an answer: the structure {error.reason}") from None
        finally:
            left.set()
    return text.complete


def _follow(text: GrammarText, held: list[int], left: Event) -> None:
    """Check the tokens against the structure, and stop early once `left` is set: the request has ended, but not its
    thread, and a resumed answer may have many tokens."""
    for end in range(FOLLOWED, len(held) + FOLLOWED, FOLLOWED):
        if left.is_set():
            return
        text.follow(held[:end])


def _sampling(request: pb.GenerateRequest, record: Record | None) -> Sampling:
    """The request's sampling, greedy by default. A missing seed or sample index is the session's; without a session the
    seed is drawn here and the index is 0. A resume's seed takes precedence over all others."""
    fields = request.sampling
    if request.HasField("resume"):
        seed = request.resume.seed
    elif fields.HasField("seed"):
        seed = fields.seed
    else:
        seed = record.seed if record else secrets.randbits(DRAWN_SEED_BITS)
    index = fields.sample_index if fields.HasField("sample_index") else (record.sample_index if record else 0)
    return Sampling.read(fields, seed=seed, sample_index=index)


def _limits(request: pb.GenerateRequest, prompt: int, end: int, least: int) -> Limits:
    """The request's limits. prompt: length of the text before the answer   end: its greatest length with the answer
    least: number of the answer's first tokens of which none may be an end-of-text or stop token"""
    if prompt + least > end:
        raise BadRequest("min_new_tokens", f"is {least}, but the answer has at most {end - prompt} tokens")
    return Limits(end, request.ignore_end, prompt + least if least else 0, stop_ids_from(request))
