"""The rounds of a request, which any router may keep. Does no I/O."""

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
        return self._parts[0]
