"""`dendro bench kernels`: its aims, and a small complete run."""

from __future__ import annotations

import pytest
import torch
from tree_kernels.matmul import why_not_packed
from tree_kernels.matmul.quantised_shapes import QuantisedForm

from cluster.bench import kernels
from cluster.bench.kernels import (
    KERNELS,
    MULTIPLY,
    OURS,
    PLAIN,
    READ,
    SQUARE,
    KernelsOptions,
    Multiplying,
    ProductDtype,
    Products,
    measure_products,
    ratios_of,
)
from cluster.measure.bench import draw


def silent(title, steps):
    return lambda: None


def around(value):
    return {"median": value, "low": 0.9 * value, "high": 1.1 * value, "coverage": 0.9}


def judged(few, some, many):
    rows = [
        {"inputs": 4, "outputs": 6, "rows": count, "over_reading": around(reading), "over_library": around(library)}
        for count, reading, library in ((8, few, 9.0), (16, some, 9.0), (32, 9.0, many))
    ]
    return [row["met"] for aim in KERNELS.aims for row in aim.judged({"rows": rows})]


def test_aims_are_judged_at_the_upper_end_of_the_worst_row():
    assert judged(1.1, 1.7, 0.9) == [True, True, True]
    assert judged(1.2, 1.9, 1.05) == [False, False, False]


def test_ratios_pair_the_repetitions_and_take_the_librarys_faster_way():
    times = {
        OURS: [2.0, 4.0, 6.0],
        READ: [1.0, 2.0, 3.0],
        MULTIPLY: [2.0, 1.0, 6.0],
        PLAIN: [8.0, 16.0, 24.0],
        kernels.PACKED: [4.0, 8.0, 12.0],
    }
    found = ratios_of(times)
    assert found["over_reading"]["median"] == 2.0 and found["over_library"]["median"] == 0.5
    assert found["over_bound"]["median"] == 1.0, "of 2/2, 4/2 and 6/6"
    del times[OURS]
    assert not any(ratios_of(times).values())


def test_multiplying_takes_the_rate_of_a_product_in_a_cache_for_each_multiply_add(monkeypatch):
    monkeypatch.setattr(kernels.Products, "seconds", lambda self, x: 0.5)
    assert Multiplying(SQUARE, 2 * SQUARE).seconds(torch.zeros(SQUARE, 1)) == 1.0
    assert Multiplying(SQUARE, SQUARE).seconds(torch.zeros(3, 1)) == pytest.approx(0.5 * 3 / SQUARE)


def test_every_way_is_measured_in_each_repetition_and_copies_take_turns(monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_SECONDS", 0.0)
    calls = []
    ways = [Products(name, tuple(lambda x, at=(name, n): calls.append(at) for n in range(2))) for name in (PLAIN, READ)]
    (row,) = measure_products(ways, (3,), 2, torch.zeros(4, 5), lambda: None)
    assert row["rows"] == 3 and set(row["ms"]) == {PLAIN, READ}
    assert calls == [(PLAIN, 0), (PLAIN, 1), (READ, 0), (READ, 1)] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_run_reports_every_way_and_draws(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(kernels, "COLD_BYTES", 1 << 12)
    monkeypatch.setattr(kernels, "SHAPES", ((32, 40), (64, 16)))
    before = torch.get_num_threads()
    options = KernelsOptions(rows=(1, 8, 32), repetitions=2, dtype=ProductDtype(dtype), threads=1)
    try:
        report = KERNELS.report(options, silent)
    finally:
        torch.set_num_threads(before)
    assert [(row["inputs"], row["rows"]) for row in report["rows"]] == [(at, n) for at in (32, 64) for n in (1, 8, 32)]
    forms = {form.name for form in QuantisedForm} if dtype == "bfloat16" and not why_not_packed() else set()
    for row in report["rows"]:
        assert row["bits"] == ("not compared" if why_not_packed() else "the same")
        assert set(row["over_ours"]) == forms == set(row["ms"]) & forms
    titles = [title for title, *_ in KERNELS.all_tables(report)]
    assert titles[0].startswith("32 x 40") and titles[-1] == "Aims"
    assert any("Load average" in fact for fact in KERNELS.all_facts(report))
    draw(KERNELS.plots, report, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 10_000
