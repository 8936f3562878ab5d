"""Places of a verifier by tenant: which waiting text gets the next, and which leaves where a new text finds none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from verifier_service.requests import VerifierText


def texts_by_tenant(sessions: Sequence[VerifierText]) -> Counter[str]:
    return Counter(session.parameters.tenant for session in sessions)


def next_in_turn(waiting: Sequence[VerifierText], admitted: Mapping[str, int]) -> VerifierText:
    """The text that is admitted next: the oldest of the tenant with the fewest admitted texts. waiting: the oldest
    first, at least one   admitted: texts by tenant"""
    return min(waiting, key=lambda session: admitted[session.parameters.tenant])  # of equal ones the first


def displaced_by(tenant: str, sessions: Mapping[bytes, VerifierText]) -> bytes | None:
    """The opening that leaves where all places are taken and `tenant` opens one more text: the youngest waiting text of
    the tenant with the most texts; None where that would not make the shares more equal. sessions: the oldest first"""
    texts = texts_by_tenant(tuple(sessions.values()))
    waiting = [
        (texts[session.parameters.tenant], session.number, opening)
        for opening, session in sessions.items()
        if not session.admitted
    ]
    most, _, opening = max(waiting, default=(0, 0, b""))
    return opening if most > texts[tenant] + 1 else None
