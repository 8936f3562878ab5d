"""Promises with the findings of their checks, and the report of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.text import Text as RichText

from cluster.tables import folding_table

VERDICTS = {True: "kept", False: "BROKEN", None: "not checked"}
COLOURS = {True: "green", False: "red", None: "yellow"}


@dataclass(slots=True)
class Promise:
    """One promise and its check's findings. `kept` is None if it could not be checked; `why` is then the reason.

    A promise that the server does not make is not `offered`: it is neither kept nor broken.
    """

    promise: str
    kept: bool | None = None
    answers: int = 0
    tokens_compared: int = 0
    excused: int = 0
    found: list[str] = field(default_factory=list)  # one line per finding that holds, and notes
    broken: list[str] = field(default_factory=list)  # one line per finding that does not hold
    why: str = ""
    offered: bool = True

    @property
    def verdict(self) -> str:
        """The outcome, for people."""
        return VERDICTS[self.kept] if self.offered else "not offered"

    def check(self, holds: bool, line: str) -> None:
        """Add one finding; the promise is kept as long as every finding holds."""
        (self.found if holds else self.broken).append(line)
        self.kept = holds and self.kept is not False


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None. A missing token is a difference."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def report(promises: Sequence[Promise], machine: dict[str, object], subject: str) -> dict[str, object]:
    """The report as JSON values: the form of a bench's, with `promises` instead of `aims`."""
    return {
        "bench": "certify",
        "subject": subject,
        "machine": machine,
        "promises": [asdict(promise) for promise in promises],
    }


def show(console: Console, promises: Sequence[Promise], subject: str) -> None:
    """Print the report as a table; of the broken findings, the first 8."""
    rows = [
        (
            promise.promise,
            RichText(promise.verdict, COLOURS[promise.kept]),
            f"{promise.answers:,}",
            f"{promise.tokens_compared:,}",
            f"{promise.excused:,}",
            "\n".join(promise.broken[:8] + promise.found + ([promise.why] if promise.why else [])),
        )
        for promise in promises
    ]
    columns = ("promise", "kept", "answers", "tokens compared", "excused", "found")
    console.print(folding_table(f"dendro certify: {subject}", columns, rows, right=[2, 3, 4], lines=True))
