"""Progress of a request over all of its streams: what was received, and how to resume it after a stream broke."""

from __future__ import annotations

import grpc

from dendro.answer import (
    EchoedPrompt,
    Event,
    Round,
    Started,
    complete_from,
    count_of_answers,
    fields_of,
    request_of_sample,
    tree_from,
)
from dendro.attempts import Attempts
from dendro.errors import Conflict, EngineFailed
from dendro.logprobs import TokenLogprobs, logprobs_from
from dendro.rotation import Rotation
from dendro.v1 import generation_pb2 as pb


class AnswerProgress:
    """The state of one answer over all of its streams. Does no I/O."""

    def __init__(self, request: pb.GenerateRequest, sample: int = 0) -> None:
        """sample: the number of the answer, of a request for several"""
        self.request = request
        self.sample = sample
        self.token_ids = list(request.resume.token_ids)
        self.started: Started | None = None
        self.finished = False
        self._echoed = 0  # tokens of the text up to the end of the echoed prompt, as far as it was received

    def next_request(self) -> pb.GenerateRequest:
        """The request of the next call. Once a stream has started, it resumes after the received tokens."""
        if self.request.n > 1:
            request = request_of_sample(self.request, self.sample)
        elif self.started is None:
            return self.request
        else:
            request = pb.GenerateRequest()
            request.CopyFrom(self.request)
        if self.started is None:
            return request
        request.resume.Clear()
        request.resume.SetInParent()
        request.resume.token_ids.extend(self.token_ids)
        request.resume.seed = self.started.seed
        request.resume.prompt_tokens = self.started.prompt_tokens
        request.resume.prompt_digest = self.started.prompt_digest
        request.resume.target = self.started.target
        if request.keep_session and not request.session:
            request.session = self.started.session  # an earlier attempt may have written the turn there
        return request

    def take(self, response: pb.GenerateResponse) -> Event | None:
        """Check a message and return its event; None for `started` and an echo that a resumed stream repeats. Raises
        EngineFailed for a message that does not follow from the ones before, Conflict for a stream that resumes another
        answer."""
        kind = response.WhichOneof("event")
        if self.finished:
            raise EngineFailed(f"stream has {kind} after complete")
        if kind == "started":
            first, message = self.started, response.started
            if message.offset != len(self.token_ids):
                raise EngineFailed(f"stream resumes at {message.offset}, not at {len(self.token_ids)}")
            started = Started(**fields_of(Started, message), sample=self.sample)
            if first is not None:
                self._check_resumed(first, started)
            self.started = started
            return started if first is None else None
        if self.started is None:
            raise EngineFailed(f"stream has {kind} before started")
        if kind == "prompt":
            return self._take_prompt(response.prompt)
        if kind == "chunk":
            chunk = response.chunk
            if chunk.offset != len(self.token_ids):
                raise EngineFailed(f"chunk at offset {chunk.offset}, expected {len(self.token_ids)}")
            self.token_ids.extend(chunk.token_ids)
            tree = tree_from(chunk.tree) if chunk.HasField("tree") else None
            asked = self.request.HasField("logprobs")
            logprobs = self._logprobs_of(chunk) if asked or chunk.logprobs else ()
            ids = tuple(chunk.token_ids)
            return Round(chunk.offset, ids, chunk.text, chunk.shape, logprobs, self.sample, tree)
        if kind == "complete":
            complete = complete_from(response.complete, self.sample)
            if complete.completion_tokens != len(self.token_ids):
                raise EngineFailed(f"complete after {complete.completion_tokens} tokens, not {len(self.token_ids)}")
            self.finished = True
            return complete
        raise EngineFailed("stream contains an unknown event")

    def _take_prompt(self, part: pb.GeneratePrompt) -> EchoedPrompt | None:
        if (
            not self.request.echo
            or self.sample
            or self.token_ids
            or not part.token_ids
            or part.offset > self._echoed > 0
        ):
            raise EngineFailed(f"prompt at offset {part.offset} of {len(part.token_ids)} tokens was not expected")
        if part.offset < self._echoed:
            return None
        self._echoed = part.offset + len(part.token_ids)
        logprobs: tuple[TokenLogprobs | None, ...] = self._logprobs_of(part, first=not part.offset)
        if self.request.HasField("logprobs") and not part.offset:
            logprobs = (None, *logprobs)
        return EchoedPrompt(part.offset, tuple(part.token_ids), part.text, logprobs, self.sample)

    def _logprobs_of(
        self, chunk: pb.GenerateChunk | pb.GeneratePrompt, first: bool = False
    ) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities in a message. Raises EngineFailed if they are malformed, missing or not asked for.

        first: True if the first token has none, since no token is before it
        """
        expected = len(chunk.token_ids) - first if self.request.HasField("logprobs") else 0
        try:
            logprobs = logprobs_from(chunk.logprobs[: expected + 1])
        except ValueError as error:
            raise EngineFailed(f"chunk: {error}") from None
        if len(logprobs) != expected:
            raise EngineFailed(f"chunk: log-probabilities of {len(chunk.logprobs)} tokens, expected {expected}")
        return logprobs

    def _check_resumed(self, first: Started, started: Started) -> None:
        """Raise Conflict if a resumed stream starts with other facts than the first one: its tokens would continue
        another text, or be another target's."""
        names = ["model", "seed", "prompt_tokens", "prompt_digest", *(["target"] if self.token_ids else [])]
        differ = [name for name in names if getattr(started, name) != getattr(first, name)]
        if differ:
            raise Conflict(f"resume: the answer began with another {', '.join(differ)}; begin the turn again")


class RequestProgress:
    """The state of a request, with all of its answers. Does no I/O.

    A stream of several answers that broke is not repeated: each answer that lacks its end is resumed by itself.
    """

    def __init__(self, request: pb.GenerateRequest, timeout_s: float) -> None:
        self.request = request
        self.attempts = Attempts(timeout_s)
        self.answers = [AnswerProgress(request, sample) for sample in range(count_of_answers(request))]
        self._resumed: int | None = None  # the answer that the stream resumes; None: the stream has all answers

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    @property
    def stream_complete(self) -> bool:
        """True if all answers of the current stream are complete."""
        return self.finished if self._resumed is None else self.answers[self._resumed].finished

    def next_request(self) -> pb.GenerateRequest:
        """The request of the next call."""
        seed = next((answer.started.seed for answer in self.answers if answer.started is not None), None)
        if seed is None:  # no answer has begun
            return self.request
        self._resumed = next(sample for sample, answer in enumerate(self.answers) if not answer.finished)
        request = self.answers[self._resumed].next_request()
        if not request.HasField("resume"):
            request.sampling.seed = seed  # the server may have drawn this seed for all answers
        return request

    def take(self, response: pb.GenerateResponse) -> Event | None:
        """Check a message and return its event, for the answer to which the message belongs (`AnswerProgress.take`)."""
        sample = response.sample if self._resumed is None else self._resumed
        if sample >= len(self.answers) or (self._resumed is not None and response.sample):
            raise EngineFailed(f"stream has an event of sample {response.sample}, which was not asked for")
        event = self.answers[sample].take(response)
        if isinstance(event, Round):
            self.attempts.progressed()
        return event

    def pause_after(self, error: grpc.RpcError | None, address: str, rotation: Rotation) -> float:
        """Seconds to wait before the next call after one that ended (`Attempts.pause_after`); 0 if the call completed
        its answers."""
        if self.stream_complete:
            return 0.0
        begun = any(answer.token_ids for answer in self.answers)
        return self.attempts.pause_after(error, address, rotation, begun)
