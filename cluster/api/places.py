"""Places at a router, and which tenant, or which address, may take them."""

from __future__ import annotations

import ipaddress
from collections import Counter

from dendro.errors import Overloaded

KEPT_SHARE = 8
"""One in this number of places is kept for tenants that have less than an equal share."""


class Places:
    """A router has at most `most` of something at once, such as running answers, whoever asks.

    One tenant cannot keep all others out: the last `most / KEPT_SHARE` places are given only to tenants that then have
    at most an equal share of all, one more tenant counted. A cluster without tenants, whose tenant is the empty one,
    uses all of them.
    """

    def __init__(self, most: int, taken_are: str = "answers run here") -> None:
        """taken_are: what taken places are, in the words of a refusal that follow their number"""
        self.most = most
        self._taken_are = taken_are
        self._taken: Counter[str] = Counter()  # places by tenant; no entry is 0

    @property
    def taken(self) -> int:
        return self._taken.total()

    def take(self, tenant: str, count: int) -> None:
        """Take `count` places. Raises Overloaded, at once, where there is no room for all of them."""
        taken, own = self.taken + count, self._taken[tenant] + count
        if taken > self.most:
            raise Overloaded(f"router: {self.taken} {self._taken_are}, of {self.most} at most; try again later")
        kept = self.most // KEPT_SHARE if tenant else 0
        share = self.most // (1 + len({*self._taken, tenant}))
        if taken > self.most - kept and own > share:
            raise Overloaded(
                f"router: {self.taken} {self._taken_are}, {own - count} of them yours, and the last {kept} places of "
                f"{self.most} are kept for other tenants; try again later"
            )
        self._taken[tenant] = own

    def leave(self, tenant: str, count: int) -> None:
        """Give back places that were taken."""
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]


def network_of(host: str) -> str:
    """What one client may have of the network: an address of IPv4, or all of IPv6 with the same first 64 bits."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
