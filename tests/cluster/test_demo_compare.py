"""Drafters compared on the demo's held-out prompts, and the demo's text as files to train them on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import DEMO_MODELS
from cluster.demo import compare, texts
from cluster.demo.corpus import HELD_OUT
from cluster.training.acceptance import Acceptance


def test_a_drafter_is_measured_like_the_bundled_ones_and_as_it_was_before_its_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "PROMPTS", 2)
    monkeypatch.setattr(compare, "ANSWER_TOKENS", 24)
    monkeypatch.setattr(compare, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(compare, "DRAFTERS", ("mamba2",))
    found = compare.compare("target", [DEMO_MODELS / "mamba2"])
    assert list(found) == ["mamba2", "mamba2, before", "mamba2, after"]
    assert found["mamba2, after"] == found["mamba2"]
    assert found["mamba2, before"].first_rank["0"] < 0.1 < found["mamba2"].first_rank["0"]


def test_a_share_is_the_smallest_over_temperatures_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "SHAPES", ((1, 1), (2, 1)))
    one, other = (
        Acceptance({}, {"0": {"(1,1)": first, "(2,1)": 2.0}, "1": {"(1,1)": 1.5, "(2,1)": second}})
        for first, second in ((2.0, 1.6), (1.8, 1.2))
    )
    assert compare.shares({"a": one, "b": other}, "a") == pytest.approx({"a": 1.0, "b": 0.75})


def test_the_demos_text_is_written_under_its_names_without_the_held_out_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    (library / "json").mkdir(parents=True)
    for name, text in (("json/decoder.py", "x = 'é'\n"), (HELD_OUT[0], "y = 1\n"), ("abc.py", "z = 2\n")):
        (library / name).write_text(text)
    monkeypatch.setattr("cluster.demo.corpus.library_root", lambda: library)
    assert texts.write_texts(tmp_path / "texts") == (2, 15)
    written = [file.relative_to(tmp_path / "texts").as_posix() for file in (tmp_path / "texts").rglob("*.py")]
    assert sorted(written) == ["abc.py", "json/decoder.py"]
    assert (tmp_path / "texts" / "json" / "decoder.py").read_text() == "x = 'é'\n"
