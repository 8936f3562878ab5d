"""Looks up the addresses behind the names of a client's routers, again and again while the client lives.

A channel of gRPC looks its name up again only when a connection breaks, so that routers which are added behind a name
would never be called by clients that live on.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from dendro.clock import Clock
from dendro.errors import PeerLost
from dendro.rotation import Rotation

log = logging.getLogger("dendro.client")

LOOK_UP_S = 5.0
"""Age in seconds from which on the addresses of a name are looked up again, while calls go on with the old ones, and
the longest wait for the first look-up."""
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")
"""gRPC takes the first of each that is set; the latter list ends of names that need no proxy."""

C = TypeVar("C")

LookUp = Callable[[str, int], Collection[str]]
"""The IP addresses of a host. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Destination of a channel."""

    target: str  # target of the channel, as gRPC names it
    authority: str  # `host:port`
    proxied: bool  # True if gRPC may use the environment's proxy
    addresses: frozenset[str] = frozenset()  # IP addresses of the name; empty: unknown


def look_up(host: str, port: int) -> Collection[str]:
    return {str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}


def in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()  # a look-up may hang, which must not delay the process's end


class Destinations:
    """The current destination of each `host:port`. Thread-safe."""

    def __init__(self, proxy: bool, secure: bool, look_up: LookUp = look_up, clock: Clock = time.monotonic) -> None:
        """proxy: whether the environment's proxy is used for hosts other than this machine; secure: whether channels
        check the host's certificate, for which gRPC needs its name"""
        self._proxy = proxy
        self._secure = secure
        self._look_up = look_up
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[str, frozenset[str]] = {}
        self._asked_s: dict[str, float] = {}  # time at which a look-up began

    def unknown(self, address: str) -> bool:
        """True if `destination` has to wait for a look-up."""
        return address not in self._found and self._is_looked_up(address)

    def destination(self, address: str, most_s: float = LOOK_UP_S) -> Destination:
        """Current destination of calls to an address. Looks a name up in a thread, and waits for the first look-up, at
        most `most_s` and LOOK_UP_S. A name whose first look-up takes longer is looked up by gRPC until it ends."""
        host = host_of(address)
        proxied = self._proxy and not is_loopback(host) and uses_proxy(host)
        if not self._is_looked_up(address):
            return Destination(address, address, proxied)
        first = address not in self._found
        if first or self._clock() - self._asked_s[address] > LOOK_UP_S:
            self._asked_s[address] = self._clock()
            ended = threading.Event()
            in_background(lambda: self._ask(address, ended))
            if first:
                ended.wait(min(most_s, LOOK_UP_S))
                with self._lock:
                    self._found.setdefault(address, frozenset())
        found = self._found[address]
        families = {ipaddress.ip_address(each).version for each in found}
        if self._secure or len(families) != 1:  # gRPC looks the name up again, for a new channel
            return Destination(address, address, proxied, found)
        port = address.rpartition(":")[2]
        ends = (f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in sorted(found))
        return Destination(f"ipv{families.pop()}:{','.join(ends)}", address, proxied, found)

    def _is_looked_up(self, address: str) -> bool:
        """True if the address is of a name that is looked up here: gRPC does it for a proxy, which may know other names
        than this machine."""
        host = host_of(address)
        if not host or is_loopback(host) or is_ip(host):
            return False
        return not (self._proxy and uses_proxy(host))

    def _ask(self, address: str, ended: threading.Event) -> None:
        host, _, port = address.rpartition(":")
        try:
            found = frozenset(self._look_up(host, int(port)))
        except (OSError, UnicodeError) as error:  # the last addresses are kept
            log.info("%s: cannot be looked up: %s", address, error)
            found = frozenset()
        with self._lock:
            self._found[address] = found or self._found.get(address, frozenset())
        ended.set()


def host_of(address: str) -> str:
    """The host of `host:port`; empty for an address in another form, such as `unix:PATH`, which is gRPC's alone."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or host.startswith("unix:") or "/" in host:
        return ""
    host = host.removeprefix("[").removesuffix("]")
    return host if ":" not in host or is_ip(host) else ""


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def address_of(host: str, port: int) -> str:
    """`host:port`; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """True if a host is this machine by its name."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    return is_ip(host) and ipaddress.ip_address(host).is_loopback


def uses_proxy(host: str) -> bool:
    """True if gRPC would use a proxy of the environment for a host. (Of networks, as `10.0.0.0/8`, only gRPC knows.)"""
    if not any(map(os.environ.get, PROXY_VARIABLES)):
        return False
    without = next(filter(None, map(os.environ.get, NO_PROXY_VARIABLES)), "")
    return not any(host.lower().endswith(each.strip().lower()) for each in without.split(",") if each.strip())


class Channels(Generic[C]):
    """The channels of a client: one for each current destination, and those of former ones until their calls have
    ended. Thread-safe."""

    def __init__(self, make: Callable[[Destination], C], destinations: Destinations, rotation: Rotation) -> None:
        """rotation: learns how many routers are behind its addresses"""
        self._make = make
        self._destinations = destinations
        self._rotation = rotation
        self._lock = threading.Lock()
        self._open: dict[Destination, C] = {}
        self._calls: Counter[Destination] = Counter()
        self._current: dict[str, Destination] = {}  # key: `host:port`
        self.closed = False

    def take(self, address: str, most_s: float) -> tuple[Destination, C]:
        """Destination and channel of a call to an address. The caller must `release` it after the call. Raises PeerLost
        once the client is closed. most_s: longest wait for the address's name"""
        destination = self._destinations.destination(address, most_s)
        self._rotation.count(address, len(destination.addresses))
        with self._lock:
            if self.closed:
                raise PeerLost("client: is closed")
            self._current[destination.authority] = destination
            self._calls[destination] += 1
            if destination not in self._open:
                self._open[destination] = self._make(destination)
            return destination, self._open[destination]

    def release(self, destination: Destination) -> list[C]:
        """Record that a call has ended. Returns channels that the caller must close: those of former destinations
        without calls."""
        with self._lock:
            self._calls[destination] -= 1
            if not self._calls[destination]:
                del self._calls[destination]
            over = [each for each in self._open if each != self._current[each.authority] and not self._calls[each]]
            return [self._open.pop(each) for each in over]

    def drain(self) -> list[C]:
        """Refuse further calls; remove all channels and return them. The caller must close them."""
        with self._lock:
            self.closed = True
            channels = [*self._open.values()]
            self._open.clear()
            return channels
