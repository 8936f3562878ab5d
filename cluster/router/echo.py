"""The events of a prompt that its client asked to get back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dendro.logprobs import TokenLogprobs, fill_logprobs
from dendro.long_work import off_loop
from dendro.v1 import generation_pb2 as pb

from cluster.router.admission import Job
from cluster.router.tokenizer import TextStream

ECHO_PART = 512
"""Tokens of a message: with the most log-probabilities it has some 100 kB."""


async def echo_of(job: Job, logprobs: Sequence[TokenLogprobs]) -> list[pb.GenerateResponse]:
    """The request's own prompt, in parts; none where it did not ask. logprobs: of its tokens from `job.echo_from` on"""
    if job.echo_start is None:
        return []
    start = job.echo_start
    return await off_loop(len(job.prompt) - start + len(logprobs), lambda: list(_parts(job, start, logprobs)))


def _parts(job: Job, start: int, logprobs: Sequence[TokenLogprobs]) -> Iterator[pb.GenerateResponse]:
    stream, waiting = TextStream(job.decoder, job.prompt[:start]), iter(logprobs)
    for offset in range(start, len(job.prompt), ECHO_PART):
        tokens = job.prompt[offset : offset + ECHO_PART]
        text = stream.push(tokens)
        if offset + len(tokens) == len(job.prompt):
            text += stream.flush()
        part = pb.GeneratePrompt(offset=offset, token_ids=tokens, text=text)
        for _, each in zip(range(max(offset, 1), offset + len(tokens)), waiting, strict=False):
            fill_logprobs(part.logprobs.add(), each)
        yield pb.GenerateResponse(prompt=part)
