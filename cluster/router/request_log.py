"""Logs a line at the end of each answer: one JSON object, without prompt, answer or the tenant's name."""

from __future__ import annotations

import hashlib
import json
import logging

from dendro.errors import one_line
from dendro.v1 import generation_pb2 as pb

from cluster.router.account import RoundAccount
from cluster.router.admission import MAX_REQUEST_ID
from cluster.router.totals import AnswerMeter
from cluster.router.traces import AnswerSpan

log = logging.getLogger("dendro.requests")

REFUSED, LEFT = "refused", "left"
"""Outcomes in the log for an answer that did not begin, and for one whose client went away."""
TENANT_CHARACTERS = 8
"""Length of a tenant's mark: the beginning of its name's SHA-256."""


class Ending:
    """The end of an answer, as the log has it: the outcome, and the statistics of the rounds."""

    def __init__(self, outcome: str = REFUSED, span: AnswerSpan | None = None) -> None:
        self.outcome = outcome
        self.span = span  # None: the answer has no span
        self.account: RoundAccount | None = None  # None: the answer was not computed
        self.meter: AnswerMeter | None = None  # None: the answer was not computed

    def counted_by(self, account: RoundAccount, meter: AnswerMeter) -> None:
        """Take the statistics from the account and the meter of a computed answer."""
        self.account, self.meter = account, meter

    def ended(self, outcome: str) -> None:
        self.outcome = outcome


def log_request(ending: Ending, request_id: str, tenant: str, target: str, seconds: float) -> None:
    """Log the end of an answer. request_id: as the client sees it   target: empty if the request named none"""
    meter = ending.meter
    stats = ending.account.stats if ending.account is not None else pb.SpeculationStats()
    prompt_tokens = meter.prompt_tokens if meter is not None else 0
    line: dict[str, str | int | float | bool | None] = {
        "request_id": one_line(request_id, MAX_REQUEST_ID),
        "tenant": hashlib.sha256(tenant.encode()).hexdigest()[:TENANT_CHARACTERS],
        "target": target,
        "outcome": ending.outcome,
        "prompt_tokens": prompt_tokens,
        "tokens": stats.emitted_tokens,
        "rounds": stats.rounds,
        "guesses": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
        "late_drafts": stats.late_drafts,
        "resumed": meter is not None and meter.resumed,
        "first_token_s": meter.first_token_s if meter is not None else None,
        "seconds": round(seconds, 4),
    }
    log.info("%s", json.dumps(line))
    if ending.span is not None:
        facts: dict[str, str | int | float | bool] = {
            f"dendro.{name}": value for name, value in line.items() if value is not None and name != "tenant"
        }
        facts |= {"gen_ai.usage.input_tokens": prompt_tokens, "gen_ai.usage.output_tokens": stats.emitted_tokens}
        ending.span.end(facts, ending.outcome[:1].isupper())
