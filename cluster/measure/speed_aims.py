"""The aims of `dendro bench speed`, computed from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.measure.measurement import AUTO, BASELINES, GENERATE, LLAMA_CPP, OFF
from cluster.measure.report import Row, aim_row
from cluster.measure.statistics import Estimate
from cluster.measure.targets import COSTLY

AIM_THREADS = 2
POLICY_BARS = {0.0: 3.0, 1.0: 2.2}  # policy over ours-off, by temperature
OFF_BAR = 0.95  # ours-off over generate
ABOVE_BAR = 1.0  # policy over the best transformers row: the lower end of its interval
BEST_ARM_BARS = {0.0: 1.0, 1.0: 0.97}  # policy over the fixed arm that was best on the other half, by temperature
KEPT_BAR = 0.9  # the policy's rate over what its drafts and steps alone would give
HOP_BAR = 0.05  # hops as a share of a round
LLAMA_BARS = {"policy": (AUTO, 1.25), "off": (OFF, 0.6)}  # least ratio to llama.cpp's plain decoding, at temperature 0

NEVER_SLOWER, LEAST_BELOW = 0.98, 0.96  # policy over ours-off: the median, and its lower 90 % bound
FIXED_ARM_BAR = 0.97  # policy over the fixed arm that was best on the other half


def never_slower_aims(rows: Sequence[Row]) -> Iterator[Row]:
    """The promise of the policy, for each target and temperature that has its row."""
    for row in rows:
        if row["name"] != AUTO:
            continue
        at = f"{row['target']} target, temperature {row['temperature']:g}"
        over = Estimate.of(row["over_off_at_least"])
        yield aim_row(f"policy over off, {at}", NEVER_SLOWER, over.median >= NEVER_SLOWER, over)
        yield aim_row(f"its lower 90 % bound, {at}", LEAST_BELOW, over.low >= LEAST_BELOW, over, judged="low")
        aim, best = f"policy over the best fixed arm, {at}", row.get("over_best_arm")
        if best is None:
            missing = "no fixed arm was measured, or a single prompt of each category, which has no halves"
            yield aim_row(aim, FIXED_ARM_BAR, None, None, missing)
            continue
        found = Estimate.of(best)
        why = f"the best on the other half of the prompts: {' and '.join(dict.fromkeys(best['arms']))}"
        yield aim_row(aim, FIXED_ARM_BAR, found.median >= FIXED_ARM_BAR, found, why)


def _aim(aim: str, bar: float, unmeasured: str, found: Estimate | None = None, judged: str = "median") -> Row:
    """One aim. `judged`: `median` or `low` must be at least the bar; `ceiling`: the median must be at most the bar."""
    if unmeasured or found is None:
        return aim_row(aim, bar, None, None, unmeasured)
    met = found.median <= bar if judged == "ceiling" else getattr(found, judged) >= bar
    return aim_row(aim, bar, met, found, judged="low" if judged == "low" else "median")


def aims_of(
    rows: Sequence[Row], threads: int, accelerator: object, dropped: str = "", without_llama: str = ""
) -> list[Row]:
    """The aims of the bench, computed from its rows. None is judged if `dropped` has a reason. `without_llama`: the
    reason for which llama.cpp was not measured."""
    unmeasured = dropped
    if accelerator is not None:
        unmeasured = unmeasured or f"the bars are for a processor; this ran on {accelerator}"
    if threads != AIM_THREADS:
        unmeasured = unmeasured or f"the bars are for {AIM_THREADS} threads; this ran with {threads}"
    found = {(row["name"], row["temperature"]): row for row in rows if row["target"] == COSTLY}
    aims = []
    for temperature, bar in POLICY_BARS.items():
        at = f"costly target, temperature {temperature:g}"
        auto, off = found.get((AUTO, temperature)), found.get((OFF, temperature))
        missing = unmeasured or ("" if auto and off else f"the costly target was not measured at {temperature:g}")
        auto_over = auto["ratio_over"] if auto else {}
        library = {name: Estimate.of(auto_over[name]) for name in BASELINES if name in auto_over}
        aims.append(
            _aim(f"policy over off, {at}", bar, missing, Estimate.of(auto_over[OFF]) if OFF in auto_over else None)
        )
        if library and not missing:
            strongest = min(library, key=lambda name: library[name].low)
            above = _aim(f"policy over every transformers row, {at}", ABOVE_BAR, "", library[strongest], "low")
            above["why"] = "; ".join(filter(None, (f"the closest is {strongest}", above.get("why", ""))))
            aims.append(above)
        else:
            aims.append(
                _aim(f"policy over every transformers row, {at}", ABOVE_BAR, missing or "no such row was measured")
            )
        over_generate = off["ratio_over"].get(GENERATE) if off else None
        aims.append(
            _aim(
                f"off over generate, {at}",
                OFF_BAR,
                missing or ("" if over_generate else "generate was not measured"),
                Estimate.of(over_generate) if over_generate else None,
            )
        )
        best = auto.get("over_best_arm") if auto else None
        fixed = _aim(
            f"policy over the best fixed arm, {at}",
            BEST_ARM_BARS[temperature],
            missing or ("" if best else "one prompt has no halves"),
            Estimate.of(best) if best else None,
        )
        if best:
            chosen = " and ".join(dict.fromkeys(best["arms"]))
            why = f"the best on the other half of the prompts: {chosen}"
            fixed["why"] = "; ".join(filter(None, (why, fixed.get("why", ""))))
        aims.append(fixed)
        kept = auto.get("kept") if auto else None
        aims.append(
            _aim(
                f"policy's rate over its tokens a round / (draft + verify), {at}",
                KEPT_BAR,
                missing or ("" if kept else "the policy's rounds were not reported"),
                Estimate.of(kept) if kept else None,
            )
        )
        share = auto.get("hop_share") if auto else None
        aims.append(
            _aim(
                f"hops as a share of the policy's rounds, {at}",
                HOP_BAR,
                missing or ("" if share else "the policy's rounds were not reported"),
                Estimate.of(share) if share else None,
                "ceiling",
            )
        )
    for name, (row, bar) in LLAMA_BARS.items():
        ours, plain = found.get((row, 0.0)), found.get((LLAMA_CPP, 0.0))
        missing = unmeasured or ("" if ours else "the costly target was not measured at 0")
        missing = missing or ("" if plain else without_llama or "llama.cpp was not measured")
        over = Estimate.of(ours["ratio_over"][LLAMA_CPP]) if ours and plain else None
        aims.append(_aim(f"{name} over llama.cpp, by the median, costly target, temperature 0", bar, missing, over))
    return aims
