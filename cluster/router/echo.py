"""Events of a prompt that its client asked to get back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from dendro.logprobs import NOT_ECHOED, EchoedLogprobs, fill_echoed
from dendro.tasks import off_loop
from dendro.v1 import generation_pb2 as pb

from cluster.router.admission import Job
from cluster.router.tokenizer import TextStream

ECHO_PART = 512
"""Prompt tokens of one message, which has some 100 kB with the most log-probabilities that a request may ask for."""


async def echo_of(job: Job, logprobs: EchoedLogprobs = NOT_ECHOED) -> AsyncIterator[pb.GenerateResponse]:
    """Yield the request's own prompt, in parts. Called if the request asked for it. Each part is made when the consumer
    asks for it, so that other requests' rounds come between.
    logprobs: log-probabilities of the tokens from position `job.echo_from` on"""
    assert job.echo_start is not None
    stream = TextStream(job.decoder, job.prompt[: job.echo_start])
    for offset in range(job.echo_start, len(job.prompt), ECHO_PART):
        yield await off_loop(ECHO_PART * (1 + logprobs.top), partial(_part, job, offset, stream, logprobs))


def _part(job: Job, offset: int, stream: TextStream, logprobs: EchoedLogprobs) -> pb.GenerateResponse:
    tokens = job.prompt[offset : offset + ECHO_PART]
    text = stream.append(tokens)
    if offset + len(tokens) == len(job.prompt):
        text += stream.finish()
    part = pb.GeneratePrompt(offset=offset, token_ids=tokens, text=text)
    if (first := job.echo_from) is not None:
        fill_echoed(part.logprobs, logprobs[max(offset, 1) - first : offset + len(tokens) - first])
    return pb.GenerateResponse(prompt=part)
