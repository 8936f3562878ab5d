"""The rounds of a request. Each router may keep a part, since answers are resumed at other routers. Does no I/O."""

from __future__ import annotations

from dendro.arguments import ascii_of
from dendro.asked_addresses import AskedAddresses
from dendro.errors import NotFound
from dendro.v1 import generation_pb2 as pb


class Explanation(AskedAddresses):
    """The calls for the rounds of one request, and the parts that came."""

    def __init__(self, request_id: str, timeout_s: float, addresses: tuple[str, ...]) -> None:
        super().__init__(timeout_s, addresses)
        self.request = pb.ExplainRequest(request_id=ascii_of("request_id", request_id))
        self._parts: list[pb.ExplainResponse] = []

    def answered(self, response: pb.ExplainResponse) -> None:
        """Record a router's answer."""
        self._parts.append(response)

    @property
    def joined(self) -> pb.ExplainResponse:
        """The request's events. Where no router has any, raises the first error of one that may have them, or else
        NotFound."""
        if not self._parts:
            raise next((each for each in self.failures if not isinstance(each, NotFound)), self.failures[0])
        if len(self._parts) == 1:
            return self._parts[0]
        joined = pb.ExplainResponse(cut=any(part.cut for part in self._parts))
        events = [event for part in self._parts for event in part.events]
        for sample in sorted({event.sample for event in events}):
            joined.events.extend(_joined_answer([event for event in events if event.sample == sample]))
        return joined


def _joined_answer(events: list[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    """One answer's events of several routers: one `started`, the chunks in order, and `complete`. A run of chunks that
    goes further than others replaces theirs from its first token on, where the client had resumed the answer."""
    runs: list[list[pb.GenerateResponse]] = []
    for event in events:
        if event.HasField("chunk"):
            if not runs or event.chunk.offset != _end_of(runs[-1][-1]):
                runs.append([])
            runs[-1].append(event)
    chunks: list[pb.GenerateResponse] = []
    for run in sorted(runs, key=lambda run: (run[0].chunk.offset, _end_of(run[-1]))):
        if not chunks or _end_of(run[-1]) > _end_of(chunks[-1]):
            chunks = [each for each in chunks if each.chunk.offset < run[0].chunk.offset] + run
    started = [event for event in events if event.HasField("started")]
    complete = [event for event in events if event.HasField("complete")]
    return [*started[:1], *chunks, *complete[-1:]]


def _end_of(event: pb.GenerateResponse) -> int:
    return event.chunk.offset + len(event.chunk.token_ids)
