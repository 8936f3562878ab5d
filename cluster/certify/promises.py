"""Promises with the findings of their checks, and their report, whether of this system or of another server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from dendro.errors import DendroError

from cluster.measure.machine import report_head
from cluster.measure.report import Cells

VERDICTS = {True: "kept", False: "BROKEN", None: "not checked"}
MOST_BROKEN = 8
"""Broken findings of a promise that are shown."""


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
    guesses: int | None = None  # guesses of the answers that the target verified; None: the check counts none

    @property
    def verdict(self) -> str:
        """The outcome, for people."""
        return VERDICTS[self.kept] if self.offered else "not offered"

    def check(self, holds: bool, line: str) -> None:
        """Add one finding; the promise is kept as long as every finding holds."""
        (self.found if holds else self.broken).append(line)
        self.kept = holds and self.kept is not False

    def leave_unchecked(self, why: str) -> None:
        """Record why the promise could not be checked; a broken one stays broken. Called after all findings."""
        self.kept, self.why = None if self.kept is not False else False, why


Given = ParamSpec("Given")
Filling = Callable[Concatenate[Promise, Given], Awaitable[None]]
Returning = Callable[Given, Awaitable[Promise]]


def check_of(name: str) -> Callable[[Filling[Given]], Returning[Given]]:
    """Decorator: the check fills in a promise of this name, which is returned. A DendroError ends this check alone, and
    breaks its promise; where no token was compared, the promise is left unchecked."""

    def returning(check: Filling[Given]) -> Returning[Given]:
        @wraps(check)
        async def checked(*args: Given.args, **options: Given.kwargs) -> Promise:
            promise = Promise(name)
            try:
                await check(promise, *args, **options)
            except DendroError as error:
                line = f"ended by an error: {type(error).__name__}: {error}"
                if promise.tokens_compared:
                    promise.check(False, line)
                else:
                    promise.leave_unchecked(line)
            return promise

        return checked

    return returning


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None. A missing token is a difference."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def report(
    promises: Sequence[Promise], started: float, threads: int, subject: str, complete: bool = True
) -> dict[str, Any]:
    """The report as JSON values: the form of a bench's, with `promises` instead of `aims`.

    started: a time of the monotonic clock
    complete: False while promises are still to be checked
    """
    head = report_head("certify", started, False, 0, threads)
    settings = {name: value for name, value in head["settings"].items() if name not in ("local", "seed")}
    found = [asdict(promise) for promise in promises]
    return {**head, "settings": settings, "subject": subject, "complete": complete, "promises": found}


def failed(report: Mapping[str, Any]) -> bool:
    """True if a promise is broken or could not be checked; what is not offered is neither."""
    return any(each["kept"] is not True and each["offered"] for each in report["promises"])


def machine_and_libraries(report: Mapping[str, Any]) -> str:
    """Where a report was made, as part of a line."""
    machine = report["machine"]
    libraries = ", ".join(f"{name} {machine['libraries'][name]}" for name in ("torch", "transformers"))
    return f"Python {machine['python']}, {libraries}, on {machine['processor']}, {machine['cores']} cores"


def run_facts(report: Mapping[str, Any]) -> list[str]:
    """Lines about the command and when it ran."""
    settings = report["settings"]
    return [
        f"Command: `{settings['command']}`",
        f"Date: {settings['date']}; commit {settings['commit']}; took {settings['seconds']:.0f} s",
    ]


def tables(report: Mapping[str, Any]) -> list[Cells]:
    """The promises, and each finding of their checks."""
    promises = [Promise(**fields) for fields in report["promises"]]
    rows: list[tuple[str, ...]] = [
        (
            each.promise,
            each.verdict,
            f"{each.answers:,}",
            f"{each.tokens_compared:,}",
            "" if each.guesses is None else f"{each.guesses:,}",
            f"{each.excused:,}",
        )
        for each in promises
    ]
    findings: list[tuple[str, ...]] = [
        (each.promise[:3], word, line)
        for each in promises
        for word, lines in (
            ("BROKEN", each.broken[:MOST_BROKEN]),
            ("", each.found),
            (each.verdict, [each.why] if each.why else []),
        )
        for line in lines
    ]
    columns = ("promise", "kept", "answers", "tokens compared", "guesses verified", "excused")
    return [("Promises", columns, rows), ("Findings", ("", "kept", "found"), findings)]
