"""The pictures of the front page: drawn by docs/pictures/draw.py from committed data."""

from __future__ import annotations

import importlib.util
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def loaded():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs/pictures/draw.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


draw = loaded()


def test_the_committed_pictures_are_drawn_from_the_committed_data():
    """Thereby gains.svg has the figures of the pages that it is drawn from."""
    assert draw.TREE.read_text() == draw.tree_svg(draw.DrawnRound.read(draw.ROUND)), "run python docs/pictures/draw.py"
    assert draw.GAINS.read_text() == draw.gains_svg(), "run python docs/pictures/draw.py"


def test_the_round_is_one_that_a_verifier_could_have_answered():
    its = draw.DrawnRound.read(draw.ROUND)
    assert its.parents[0] == -1 and all(parent < row for row, parent in enumerate(its.parents))
    assert [its.parents[row] for row in its.path] == [-1, *its.path[:-1]]
    assert its.emitted[:-1] == tuple(its.tokens[row] for row in its.path[1:])
    assert len(its.emitted) == len(its.path)


def test_a_tree_is_drawn_with_a_box_for_each_row_and_its_accepted_path_in_another_colour():
    its = draw.DrawnRound("a", ("b", "c", "d <"), (-1, 0, 0), (0, 2), ("d <", "e"), "")
    boxes = xml.etree.ElementTree.fromstring(draw.tree_svg(its)).findall(f"{SVG}rect")
    assert [box.get("stroke") for box in boxes] == [draw.GREEN, draw.GREY, draw.GREEN]


def test_no_two_boxes_of_a_tree_overlap():
    for parents in ((-1,), (-1, 0, 1, 2), (-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2, 2, 4)):
        assert len(set(draw.places(parents))) == len(parents)


@pytest.mark.parametrize("picture", ["tree.svg", "gains.svg"])
def test_a_picture_loads_nothing_and_has_no_background(picture):
    drawn = xml.etree.ElementTree.fromstring((ROOT / "docs/pictures" / picture).read_text())
    assert not [each for each in drawn.iter() if {"href", "src", "style", "class"} & set(each.attrib)]
    assert not [each for each in drawn.iter() if each.get("fill") in ("white", "#ffffff", "black", "#000000")]
