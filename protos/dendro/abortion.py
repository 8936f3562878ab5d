"""An abort, which goes to each address, since any router may run the request. Does no I/O."""

from __future__ import annotations

from dendro.arguments import ascii_of
from dendro.asked_addresses import AskedAddresses
from dendro.v1 import generation_pb2 as pb


class Abortion(AskedAddresses):
    """The calls of one abort, and what came of them."""

    def __init__(self, request_id: str, timeout_s: float, addresses: tuple[str, ...]) -> None:
        super().__init__(timeout_s, addresses)
        self.request = pb.AbortRequest(request_id=ascii_of("request_id", request_id))
        self._ended = 0

    def answered(self, response: pb.AbortResponse) -> None:
        """Record a router's answer."""
        self._ended += response.aborted

    @property
    def ended(self) -> int:
        """The number of requests that were ended. Where there is none, raises the first error of a router that refused
        or did not answer, since the request may run there."""
        if self.failures and not self._ended:
            raise self.failures[0]
        return self._ended
