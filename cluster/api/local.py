"""A client of a router in this process: no sockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dendro.answer import Event, count_of_answers
from dendro.client import Asking
from dendro.progress import AnswerProgress
from dendro.v1 import generation_pb2 as pb

from cluster.router.ingress import Ingress


class LocalClient(Asking):
    """A client of an ingress in this process: the same events without a socket. A broken stream is an error, not
    resumed."""

    def __init__(self, ingress: Ingress, tenant: str = "") -> None:
        self._ingress = ingress
        self._tenant = tenant

    async def send(self, request: pb.GenerateRequest) -> AsyncGenerator[Event, None]:
        answers = [AnswerProgress(request, sample) for sample in range(count_of_answers(request))]
        async with aclosing(self._ingress.generate(request, self._tenant)) as responses:
            async for response in responses:
                if (event := answers[response.sample].take(response)) is not None:
                    yield event
