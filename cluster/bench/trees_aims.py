"""The aims of `dendro bench trees`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.bench.trees import ALL, CONFIGURED, FULL, best_policy
from cluster.bench.trees_causes import three_causes
from cluster.measure.report import Row, aim_row
from cluster.measure.statistics import Estimate

DYNAMIC_BAR, BEST_ARM_BAR, OFF_BAR = 1.1, 0.97, 0.98


def _aim(aim: str, bar: float, found: Mapping[str, float], why: str = "") -> Row:
    """An aim for the median; `why` it was missed."""
    estimate = Estimate.of(found)
    met = estimate.median >= bar
    return aim_row(aim, bar, met, estimate, "" if met else why)


def aims_of(ablation: Sequence[Row], causes: Sequence[Row], policies: Sequence[Row]) -> list[Row]:
    """The aims, computed from the rows."""
    why = {(row["temperature"], row["tree_rows"]): three_causes(row) for row in causes}
    aims = [
        _aim(
            f"dynamic tree over the best static one, emitted per round, {row['tree_rows']} rows, "
            f"temperature {row['temperature']:g}",
            DYNAMIC_BAR,
            row["over_best_static"],
            why[row["temperature"], row["tree_rows"]],
        )
        for row in ablation
        if row["way"] == FULL
    ]
    for temperature in dict.fromkeys(row["temperature"] for row in policies):
        name = best_policy(policies, temperature)
        for row in policies:
            if (row["temperature"], row["policy"], row["arms"]) != (temperature, name, CONFIGURED) or row[
                "kind"
            ] == ALL:
                continue
            at = f"{row['kind']}, temperature {temperature:g}"
            found = f"it chose {row['best_arm']} in {row['best_arm_share']:.0%} of rounds"
            aims.append(_aim(f"{name} over the best fixed arm, {at}", BEST_ARM_BAR, row["over_best"], found))
            aims.append(_aim(f"{name} over off, {at}", OFF_BAR, row["over_off"]))
    return aims
