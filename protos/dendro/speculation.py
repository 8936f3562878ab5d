"""A request's wish for draft trees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Whether and how an answer is speculated on."""

    AUTO = "auto"  # a policy picks a shape for every round
    OFF = "off"
    FIXED = "fixed"  # every round has the request's shape


@dataclass(frozen=True, slots=True)
class Speculation:
    """Settings of an answer's speculation, which do not change its tokens. The server refuses contradictory fields by
    name.

    >>> Speculation.parse("auto", max_nodes=8) == Speculation(max_nodes=8)
    True
    >>> Speculation.parse("3,2,1") == Speculation(Mode.FIXED, "3,2,1")
    True
    """

    mode: Mode = Mode.AUTO
    shape: str = ""  # FIXED alone: "(3,2,1)", "small:(3,2,1)", "dynamic(6,5,24)", "until(0.6,8)", "proposed(7)", ...
    policy: str = ""  # AUTO alone: the policy that picks the shapes; empty: the server's
    max_nodes: int | None = None  # the most guesses in a round; None: the target's limit
    deadline_ms: int | None = None  # the longest that a round waits for its draft; None: the server's limit

    @classmethod
    def parse(
        cls, text: str, policy: str = "", max_nodes: int | None = None, deadline_ms: int | None = None
    ) -> Speculation:
        """Read `auto` (or an empty text), `off` or a shape. Does not check the shape: the server refuses bad ones."""
        word = text.strip()
        if word in ("", Mode.AUTO, Mode.OFF):
            return cls(Mode(word or Mode.AUTO), "", policy, max_nodes, deadline_ms)
        return cls(Mode.FIXED, text, policy, max_nodes, deadline_ms)
