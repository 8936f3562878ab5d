"""Who calls: finds the tenant and the limits of a call by its headers. Shared by all doors of a router."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from dendro.client import KEY_HEADER, TENANT_KEY
from dendro.clock import Clock
from dendro.destinations import is_loopback
from dendro.errors import BadRequest, Unauthenticated
from dendro.tasks import TenantTurns

from cluster.api.keys import KEY, ApiKey, digest_of, read_keys
from cluster.config import Config
from cluster.router.allowance import Allowance
from cluster.router.traces import TRACEPARENT

log = logging.getLogger("dendro.keys")

RELOAD_S = 1.0
"""Seconds between looks at the file of keys."""
NO_DIGEST = "-" * 64
"""Compared with where there is no such key, so that this takes as long."""
BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """A call's tenant, and what it may use."""

    tenant: str = ""
    allowance: Allowance | None = None  # None: the call has no key
    traceparent: str = ""  # the caller's span, as the call names it


@dataclass(frozen=True, slots=True)
class _HeldKey:
    entry: ApiKey
    allowance: Allowance  # what its callers may use


class KeyRing:
    """The keys of a file, and what each has left here. Not thread-safe: bound to one event loop."""

    def __init__(self, path: Path, routers: int = 1, clock: Clock = time.monotonic) -> None:
        """routers: number of routers that share a key's limits. Raises BadRequest for an invalid file."""
        self._path = path
        self._routers = routers
        self._clock = clock
        self._held: dict[str, _HeldKey] = {}  # key: id
        self._seen = self._stamp()
        self._hold(read_keys(path).keys)

    def caller_of(self, text: str) -> CallerIdentity | None:
        """The caller whose key has this text; None for any other text. The time does not tell how alike keys are."""
        found = KEY.fullmatch(text)
        held = self._held.get(found[1]) if found is not None else None
        same = hmac.compare_digest(digest_of(text), held.entry.sha256 if held is not None else NO_DIGEST)
        return CallerIdentity(held.entry.tenant, held.allowance) if held is not None and same else None

    async def watch(self) -> None:
        """Read the file again whenever it has changed. One that is missing or invalid is logged, and the last keys
        stay."""
        while True:
            await asyncio.sleep(RELOAD_S)
            await self.reload()

    async def reload(self) -> None:
        """Read the file again if it has changed. A key that stays keeps what it has used; the answers of one that is
        gone run on."""
        stamp = await asyncio.to_thread(self._stamp)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            keys = (await asyncio.to_thread(read_keys, self._path)).keys
        except BadRequest as error:
            log.error("the last %d keys stay: %s", len(self._held), error)
            return
        self._hold(keys)
        log.info("%d keys were read", len(keys))

    def _hold(self, keys: tuple[ApiKey, ...]) -> None:
        before = self._held
        self._held = {}
        for key in keys:
            limits = key.limits.share_of(self._routers)
            allowance = Allowance(limits, self._clock)
            if key.id in before:
                allowance = before[key.id].allowance
                allowance.limits = limits
            self._held[key.id] = _HeldKey(key, allowance)

    def _stamp(self) -> tuple[int, int, int] | None:
        """A value that changes when the file changes; None if there is no file."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class Callers:
    """Finds who calls, by the configuration's rules: its keys; gateways, whose certificate TLS has checked; else
    whoever reaches the router."""

    def __init__(self, config: Config, clock: Clock = time.monotonic) -> None:
        """Raises BadRequest for an invalid file of keys."""
        keys = config.auth.keys
        self._ring = KeyRing(keys, config.router.most_replicas, clock) if keys is not None else None
        self.anyone_near = keys is None and not config.has_gateways and is_loopback(config.http.host)
        """Whether each process of this machine may call over HTTP, and nobody else, whoever may call over gRPC."""
        self._believes = config.has_gateways or not config.reachable
        self._turns = TenantTurns()

    def caller(self, headers: Collection[tuple[str, str | bytes]]) -> CallerIdentity:
        """The caller of a request, which counts as one of its key's minute. The long work of the current task is its
        tenant's from now on. headers: with names in lower case

        Raises Unauthenticated without one valid key where keys are needed, LimitReached past the key's requests a
        minute, and BadRequest for a tenant that the caller may not name.
        """
        caller = self._identity(headers)
        self._turns.enter(caller.tenant)
        return caller

    def _identity(self, headers: Collection[tuple[str, str | bytes]]) -> CallerIdentity:
        tenants, keys, traces = (_values(headers, name) for name in (TENANT_KEY, KEY_HEADER, TRACEPARENT))
        tenant, traceparent = tenants[0] if tenants else "", traces[0] if len(traces) == 1 else ""
        if self._ring is None:
            if tenant and not self._believes:
                raise BadRequest(TENANT_KEY, "is refused: a server that other machines reach takes tenants from keys")
            if len(tenants) > 1:  # a gateway may have added its tenant to the metadata that its client sent
                raise BadRequest(TENANT_KEY, "is given more than once")
            return CallerIdentity(tenant, traceparent=traceparent)
        given = keys[0] if len(keys) == 1 else ""
        key = given[len(BEARER) :].strip() if given.lower().startswith(BEARER) else ""
        caller = self._ring.caller_of(key)
        if caller is None:
            raise Unauthenticated("authorization: must be `Bearer` and a valid key")
        if any(each and each != caller.tenant for each in tenants):
            raise BadRequest(TENANT_KEY, "is refused: the key decides the tenant")
        if caller.allowance is not None:
            caller.allowance.take_request()
        return replace(caller, traceparent=traceparent) if traceparent else caller

    async def watch(self) -> None:
        """Follow the changes of the file of keys, until cancelled."""
        if self._ring is not None:
            await self._ring.watch()


def _values(headers: Collection[tuple[str, str | bytes]], name: str) -> list[str]:
    return [_text(value) for each, value in headers if each == name]


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
