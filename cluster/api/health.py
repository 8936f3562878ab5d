"""Checks of what a router depends on, and whether the router still serves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

log = logging.getLogger("dendro.health")

PERIOD_S = 2.0
"""Seconds between two checks."""

WITHOUT_STORE = "requests with a session fail; others are served"
"""Consequence of the loss of Redis, added to the reason of that fault."""

Probe = Callable[[], Awaitable[str]]
"""Returns why a part does not answer; empty where it does. Never raises, and answers within seconds."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Whether a process serves, and its parts that do not work."""

    serving: bool
    faults: Mapping[str, str] = field(default_factory=dict)  # reason by part

    def __str__(self) -> str:
        """The report as a line of JSON."""
        return json.dumps({"serving": self.serving, "faults": dict(self.faults)})


STARTING = HealthReport(False, {"targets": "were not checked yet"})


class HealthWatch:
    """Checks a router's targets and its store again and again. The router serves while one of its targets does."""

    def __init__(
        self,
        targets: Mapping[str, Probe],
        store: Probe,
        changed: Callable[[HealthReport], Awaitable[None]],
        period_s: float = PERIOD_S,
    ) -> None:
        """targets: a probe of each target's verifiers   changed: called with each report that differs from the last"""
        self._targets = targets
        self._store = store
        self._changed = changed
        self._period_s = period_s
        self.report = STARTING

    async def run(self) -> None:
        """Check until the task is cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(self._period_s)

    def drain(self) -> None:
        """Report that the router ends, without calling `changed`. No check may follow."""
        faults = {**self.report.faults, "new requests": "none is taken: the router drains"}
        self.report = HealthReport(False, faults)

    async def check(self) -> None:
        """Check all parts, at once."""
        store, *targets = await asyncio.gather(self._store(), *(probe() for probe in self._targets.values()))
        faults = {f"target {name}": why for name, why in zip(self._targets, targets, strict=True) if why}
        serving = len(faults) < len(self._targets)
        if store:
            faults["redis"] = f"{store}; {WITHOUT_STORE}"
        report = HealthReport(serving, faults)
        if report != self.report:
            log.log(logging.WARNING if faults else logging.INFO, "health: %s", report)
            self.report = report
            await self._changed(report)
