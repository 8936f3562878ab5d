"""A drafter's figures in its checkpoint: written by its training, read within bounds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from dendro.errors import BadRequest
from dendro.shapes import LevelShape, TreeShape
from dendro.tree import RANKED

from cluster.drafter_figures import FIGURES, MOST_BYTES, RankFigures, figures_of, read_figures, write_figures
from cluster.policies.replay import round_lengths

TRACES = {0.0: [[0, 0, 1, 0, 99] * 40], 1.0: [[1, 5, 0] * 40]}


def test_figures_are_read_as_they_were_written(tmp_path: Path):
    assert read_figures(tmp_path) is None
    figures = figures_of("big", TRACES)
    write_figures(tmp_path, figures)
    assert read_figures(tmp_path) == figures
    greedy = figures.at(0.2)
    assert greedy.temperature == 0 and greedy.ranks == (120, 40, *[0] * (RANKED - 2), 40)
    assert greedy.first == 120 / 200 and figures.at(5).temperature == 1


def test_tokens_a_round_follow_for_trees_of_fixed_form_alone():
    """Of independent ranks; the tolerance is 4 standard errors of 8000 rounds' mean."""
    ranks = np.random.default_rng(3).choice([0, 1, 2, 99], 20_000, p=[0.5, 0.2, 0.1, 0.2]).tolist()
    greedy = figures_of("big", {0.0: [ranks]}).at(0)
    for shape in (LevelShape((1, 1)), TreeShape.parse("nodes(2,1,1)")):
        lengths = round_lengths(shape, ranks)
        assert greedy.emitted(shape) == pytest.approx(sum(lengths) / len(lengths), abs=0.04)
    assert greedy.emitted(TreeShape.parse("dynamic(4,5,15)")) is None
    assert greedy.emitted(LevelShape((RANKED + 1,))) is None


def test_a_drafter_whose_candidates_always_hold_the_token_has_figures_of_every_shape():
    chances = np.random.default_rng(5).dirichlet([0.5] * RANKED, 40)
    draws = np.random.default_rng(6)
    traces = [draws.choice(RANKED, 200, p=each).tolist() for each in chances]
    for trace in ([0, 0, 0, 0, 1, 2] * 10, [0, 1, 2, 3, 4, 5] * 10, *traces):
        figures = figures_of("big", {0.0: [trace]}).at(0)
        assert 1 <= (figures.emitted(LevelShape((1, 1, 1, 1))) or 0) <= 5
    row = (0.5, 0.5 + 5e-7, *[0.0] * (RANKED - 2))
    written = figures.model_copy(update={"accepted": (row,)})
    assert RankFigures.model_validate(written.model_dump()).emitted(LevelShape((2,))) == pytest.approx(2), (
        "a card that was written with rounded chances"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"by_temperature": []}, "by_temperature"),
        ({"target": 5}, "target"),
        ({"ranks": [1] * RANKED}, "by_temperature.0.ranks"),
        ({"ranks": [-1] * (RANKED + 1)}, "by_temperature.0.ranks.0"),
        ({"accepted": [[0.5] * RANKED]}, "by_temperature.0: .*together at most 1"),
        ({"accepted": [[0.1]]}, "by_temperature.0: .*each depth has"),
        ({"accepted": [[float("nan")] * RANKED]}, "by_temperature.0.accepted.0.0"),
        ({"temperature": -1}, "by_temperature.0.temperature"),
    ],
    ids=str,
)
def test_figures_out_of_bounds_are_refused_by_their_field(tmp_path: Path, change: dict, reason: str):
    entry = json.loads(figures_of("big", TRACES).model_dump_json())
    if change.keys() & entry.keys():
        entry |= change
    else:
        entry["by_temperature"][0] |= change
    (tmp_path / FIGURES).write_text(json.dumps(entry))
    with pytest.raises(BadRequest, match=f"^{FIGURES}: {reason}"):
        read_figures(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[" * 10_000, b" " * (MOST_BYTES + 1)], ids=["cut", "deep", "long"])
def test_a_file_that_holds_no_figures_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / FIGURES).write_bytes(content)
    with pytest.raises(BadRequest, match=f"^{FIGURES}: "):
        read_figures(tmp_path)
