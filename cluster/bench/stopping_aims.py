"""The aims of `dendro bench stopping`."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.measure.report import Row, aim_row

FRONT_BAR, MARGINAL_BAR = 1.0, 0.99


def aims_of(compared: Iterable[Row]) -> list[Row]:
    """The aims, computed from the rows of comparison."""
    aims = []
    closest = "verifications of the closest fixed length over the sweep's"
    for row in compared:
        at = f"{row['form']}, {row['kind']}, temperature {row['temperature']:g}"
        front = row["front_over_closest"]
        why = f"closest is length {row['closest_length']}; {row['lengths_compared']} lengths were compared"
        aims.append(_aim(f"{closest}, {at}", FRONT_BAR, front, front > FRONT_BAR, why))
        found = row["marginal_over_best_h"]
        why = f"the best h is {row['best_h']:g}"
        aims.append(_aim(f"marginal rule over the best h, {at}", MARGINAL_BAR, found, found >= MARGINAL_BAR, why))
    return aims


def _aim(aim: str, bar: float, value: float, met: bool, why: str) -> Row:
    """An aim for a ratio over all recorded answers, which has no interval."""
    return {**aim_row(aim, bar, met, None, why), "value": value}
