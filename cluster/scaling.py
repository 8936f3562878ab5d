"""How many replicas a pool needs for what it carries. Serve calls `by_load` or `by_answers` in its controller, as a
custom policy.

Serve's own policy counts the calls that pass through it; a router's clients do not, and a lease may be for several
answers. What replicas report by `record_autoscaling_stats` under LOAD decides instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOAD = "load"
"""The name of a replica's load among its reported figures, each the mean over Serve's look-back period."""


def replicas_for(loads: Iterable[float], target: float) -> float:
    """The number of replicas, a fraction, at which each of them carries `target`.

    >>> replicas_for([6.0, 2.0], 4.0)
    2.0
    """
    return sum(loads) / target


def by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's custom policy: `replicas_for` the reported loads. Serve rounds the number up, and applies the bounds and
    delays of the configuration."""
    config: Any = context.config
    return replicas_for(_loads(context), config.target_ongoing_requests), {}


def by_answers(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Number of replicas of drafters and verifiers, whose LOAD is their open texts. Serve counts leases, which are
    fewer: a request for several answers takes one, and a text for each answer. A lease that no replica has room for
    waits in Serve's queue."""
    config: Any = context.config
    waiting, leases = float(context.total_queued_requests or 0), float(context.total_num_requests)
    carried = max(sum(_loads(context)) + waiting, leases)
    return replicas_for([carried], config.target_ongoing_requests), {}


def _loads(context: AutoscalingContext) -> Collection[float]:
    reported: dict[str, dict[Any, float]] = context.aggregated_metrics or {}
    return reported.get(LOAD, {}).values()
