"""Shares a verifier's places among tenants: chooses the waiting text that is admitted next, and the text that leaves
when a new one finds no place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from verifier_service.requests import VerifierText


def texts_by_tenant(sessions: Sequence[VerifierText]) -> Counter[str]:
    return Counter(session.parameters.tenant for session in sessions)


def next_in_turn(waiting: Sequence[VerifierText], admitted: Mapping[str, int]) -> VerifierText:
    """The text that is admitted next: the oldest of the tenant with the fewest admitted texts.

    waiting: at least one text, oldest first   admitted: number of admitted texts by tenant
    """
    return min(waiting, key=lambda session: admitted[session.parameters.tenant])  # min takes the first of equal ones


def displaced_by(tenant: str, sessions: Mapping[bytes, VerifierText]) -> bytes | None:
    """The opening that leaves if all places are taken and `tenant` opens one more text: the youngest waiting text of
    the tenant with the most texts. None if that would not make the shares more equal. sessions: oldest first"""
    texts = texts_by_tenant(tuple(sessions.values()))
    waiting = [
        (texts[session.parameters.tenant], session.number, opening)
        for opening, session in sessions.items()
        if not session.admitted
    ]
    most, _, opening = max(waiting, default=(0, 0, b""))
    return opening if most > texts[tenant] + 1 else None
