"""Hands out the addresses of a cluster's routers in turn."""

from __future__ import annotations

import math
import re
import time

from dendro.arguments import ascii_of
from dendro.clock import Clock
from dendro.errors import BadRequest

SHUNNED_S = 5.0
"""Seconds for which an address at which a call broke is passed over while there are others."""
FULL_S = 1.0
"""Seconds for which an address that is full is passed over while there are others."""
HOST_PORT = re.compile(r"(\[[^][/]+\]|[^][:/\s]+):\d{1,5}")
GRPC_FORMS = ("dns:", "unix:", "unix-abstract:", "vsock:", "ipv4:", "ipv6:", "xds:")
"""Beginnings of addresses that gRPC reads itself, such as `dns:///HOST:PORT` and `unix:PATH`."""


class Rotation:
    """Hands out addresses in turn, without those at which a call broke less than SHUNNED_S ago or was refused less than
    FULL_S ago. If no address is left, it hands out the one that would be available again first."""

    def __init__(self, addresses: str, clock: Clock = time.monotonic) -> None:
        """addresses: `host:port`, several separated by commas. Raises BadRequest where there is none, and for one in
        another form that is not gRPC's own: gRPC would call port 443."""
        given = ascii_of("address", addresses).split(",")
        self.addresses = tuple(dict.fromkeys(each.strip() for each in given if each.strip()))
        if not self.addresses:
            raise BadRequest("address", f"{addresses!r} names no host:port")
        self._clock = clock
        for each in self.addresses:
            if not each.startswith(GRPC_FORMS) and not HOST_PORT.fullmatch(each):
                raise BadRequest(
                    "address", f"{each!r} is no host:port, such as 127.0.0.1:9000; leave out a scheme, such as http://"
                )
            port = each.rpartition(":")[2]
            if port.isdecimal() and not 0 < int(port) < 1 << 16:
                raise BadRequest("address", f"{each} has no port from 1 to 65535")
        self._counts = dict.fromkeys(self.addresses, 1)
        self._until_s = dict.fromkeys(self.addresses, -math.inf)  # time from which an address is used again
        self._next = 0

    def take(self) -> str:
        """The address of the next call."""
        ordered = self.addresses[self._next :] + self.addresses[: self._next]
        now_s = self._clock()
        well = (each for each in ordered if self._until_s[each] <= now_s)
        chosen = next(well, None) or min(ordered, key=self._until_s.__getitem__)
        self._next = (self.addresses.index(chosen) + 1) % len(self.addresses)
        return chosen

    def count(self, address: str, behind: int) -> None:
        """Record the number of routers behind an address; 0: unknown."""
        self._counts[address] = max(behind, 1)

    @property
    def routers(self) -> int:
        """The number of routers behind all addresses, as far as it is known."""
        return sum(self._counts.values())

    def calls_to(self, address: str) -> int:
        """Number of refused calls after which all routers behind an address count as full: two for each of several
        routers, since chance and other requests decide which router gets a call."""
        routers = self._counts[address]
        return 2 * routers if routers > 1 else 1

    def broke(self, address: str) -> None:
        """Record that a call at this address broke."""
        self._until_s[address] = self._clock() + SHUNNED_S

    def refused(self, address: str) -> None:
        """Record that a call was refused at this address, which is full."""
        self._until_s[address] = self._clock() + FULL_S
