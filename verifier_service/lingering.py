"""Delays a step for rounds that are expected soon, so that it has the rows of more texts."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from dendro.calls import VerifyCall
from dendro.clock import Clock

from verifier_service.budget import StepCosts
from verifier_service.requests import VerifierText

LINGER = 0.75
"""Longest wait for rounds expected soon, as a share of the time that one common step saves over two separate ones."""


def worth_waiting(
    sessions: Collection[VerifierText], costs: StepCosts, size: int, ended_s: float, clock: Clock
) -> float:
    """Seconds to delay the next step for rounds that are expected soon; mostly 0.

    size: padded rows of the last step   ended_s: time at which the last step's answers were sent

    One text waits since 1.000 s, another was answered then and usually returns after 2 ms. Each step alone takes 10 ms,
    both texts in one step 11 ms: waiting pays for up to 0.75 * (10 + 10 - 11) = 6.75 ms.
    """
    if not costs.known or len(sessions) < 2:
        return 0.0
    now = clock()
    usual_s = costs.us(np.array([size]))[0] / 1e6
    waiting_since, next_return, rows, others = math.inf, math.inf, 0, 0
    for session in sessions:
        if session.opening is not None:
            if session.admitted:
                return 0.0
        elif session.asks:
            call = session.asks[0].call
            assert isinstance(call, VerifyCall)
            # Time under a running step does not count as waiting: else two halves would alternate for ever.
            waiting_since = min(waiting_since, max(session.asks[0].ticket.arrived_s, ended_s))
            rows += call.tree.rows
        elif session.answered is not None and max(session.away_s, now - session.answered) < usual_s:
            next_return = min(next_return, session.answered + session.away_s)
            others += session.rows
    if not rows or not others:
        return 0.0
    rows_us, others_us, together_us = costs.us(np.array([rows, others, rows + others]))
    until = waiting_since + LINGER * (rows_us + others_us - together_us) / 1e6
    return max(until - now, 0.0) if next_return <= until else 0.0
