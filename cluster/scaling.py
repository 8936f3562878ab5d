"""How many replicas a pool needs for what it carries. Serve calls `by_load` in its controller, as a custom policy.

Serve's own policy counts the calls that pass through it; a router's clients do not. What replicas report by
`record_autoscaling_stats` under LOAD decides instead.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    config: Any = context.config
    return replicas_for(loads.values(), config.target_ongoing_requests), {}
