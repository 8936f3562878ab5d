"""An abort, which goes to each router, since any of them may run the request. Does no I/O."""

from __future__ import annotations

import grpc

from dendro.arguments import ascii_of
from dendro.attempts import Attempts
from dendro.errors import PeerLost
from dendro.rotation import Rotation
from dendro.v1 import generation_pb2 as pb


class Abortion:
    """The calls of one abort, one for each address, and what came of them."""

    def __init__(self, request_id: str, timeout_s: float, rotation: Rotation) -> None:
        self.request = pb.AbortRequest(request_id=ascii_of("request_id", request_id))
        self.attempts = Attempts(timeout_s)
        self.addresses = rotation.addresses
        self._rotation = rotation
        self._answered = self._ended = 0

    def answered(self, response: pb.AbortResponse) -> None:
        """A router has answered."""
        self._answered += 1
        self._ended += response.aborted

    def failed(self, error: grpc.RpcError, address: str) -> None:
        """A router cannot be reached: the requests that it ran have ended. Raises other errors."""
        self.attempts.pause_after(error, address, self._rotation)

    @property
    def ended(self) -> int:
        """The number of requests that were ended. Raises PeerLost where no router answered."""
        if not self._answered:
            raise PeerLost(f"{', '.join(self.addresses)}: no router can be reached")
        return self._ended
