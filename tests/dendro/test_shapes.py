import math

import pytest
from dendro import wire
from dendro.errors import BadRequest
from dendro.internal.v1 import tree_pb2
from dendro.shapes import (
    MAX_ROWS,
    OFF,
    BeamShape,
    DynamicShape,
    LevelShape,
    MarginalShape,
    NodeShape,
    TreeShape,
    UntilShape,
)
from hypothesis import given
from hypothesis import strategies as st

CHAIN, TREE = DynamicShape(1, 8, 8), DynamicShape(4, 5, 15)
SHAPES = [
    OFF,
    LevelShape((3, 2, 1)),
    NodeShape((2, 0, 1, 3)),
    BeamShape(8, 3),
    DynamicShape(6, 5, 40),
    UntilShape(CHAIN, 0.6),
    UntilShape(CHAIN, 0.0001, 0.9999),
    UntilShape(TREE, 0.25, 0.05),
]


@st.composite
def node_shapes(draw: st.DrawFn) -> NodeShape:
    children = [draw(st.integers(1, 4))]
    rows = 1 + children[0]
    for _ in range(draw(st.integers(0, 12))):
        count = draw(st.integers(0, 3))
        if len(children) < rows and rows + count <= MAX_ROWS:
            children.append(count)
            rows += count
    while children[-1] == 0:
        children.pop()
    return NodeShape(tuple(children))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_shape_is_read_back_from_its_text_and_from_the_wire(shape):
    assert TreeShape.parse(str(shape)) == shape
    assert wire.shape_from(wire.shape_message(shape)) == shape


@given(node_shapes())
def test_levels_and_depth_of_a_static_tree_equal_those_of_its_parents(shape):
    parents = [-1] + [row for row, count in enumerate(shape.children) for _ in range(count)]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    assert depths == sorted(depths)  # level by level
    assert shape.rows == len(parents)
    assert shape.depth == max(depths)
    assert shape.levels == tuple(depths.count(level + 1) for level in range(shape.depth))
    assert TreeShape.parse(str(shape)) == shape


def test_shapes_of_equal_trees_have_equal_levels():
    levels = LevelShape((3, 2, 1))
    nodes = NodeShape((3, 2, 2, 2, 1, 1, 1, 1, 1, 1))
    assert (nodes.levels, nodes.rows, nodes.depth, nodes.width) == (levels.levels, levels.rows, 3, 3)


@pytest.mark.parametrize(
    "text",
    ["", "on", "(", "(3,2", "3)", "(3,-1)", "(0)", "nodes(0,1)", "nodes(1,0)", "nodes(1,0,1)", "nodes()", "beam(4)"]
    + ["beam(0,3)", "beam(32,2)", "dynamic(4,3)", "dynamic(17,3,20)", "dynamic(2,3,2)", "dynamic(2,2,7)"]
    + ["dynamic(8,8,64)", "tree(1)", "(63,1)", "3,,2", "(4,4,4)"]
    + ["until(0,8)", "until(1,8)", "until(0.00001,8)", "until(0.12345,8)", "until(2.5,8)", "until(-0.5,8)"]
    + ["until(nan,8)", "until(1e-3,8)", "until(.,8)", "until(0.6)", "until(auto)", "until(8)", "until(0.6,0)"]
    + ["until(0.6,64)", "until(0.6,4,5)", "until(0.6,17,3,20)", "until(0.6,2,3,2)", "until(0.6,8.0)"]
    + ["until(0.6,8,least=1)", "until(0.6,8,least=0.12345)", "until(auto,8,least=0.1)", "until(0.6,8,least=)"]
    + [f"until(0.{'1' * 400},8)", f"until(0.6,{'9' * 400})", f"until({'9' * 400},8)"],
)
def test_a_text_that_is_no_shape_is_refused_by_name(text):
    with pytest.raises(ValueError, match="^shape: "):
        TreeShape.parse(text)


@pytest.mark.parametrize("widths, rows", [((), 1), ((3, 2, 2, 1), 34), ((3, 3, 2, 1), 49), ((2, 2, 2, 1, 1, 1), 39)])
def test_a_shape_counts_its_rows(widths, rows):
    assert LevelShape(widths).rows == rows


def test_a_dynamic_tree_keeps_at_most_its_candidates():
    assert DynamicShape(2, 2, 6).candidates == 6  # 2 below the root, 2 below each of these
    assert (DynamicShape(2, 2, 6).rows, DynamicShape(1, 5, 5).depth) == (7, 5)


def test_numbers_of_an_until_shape_are_counted_as_in_its_text():
    with pytest.raises(ValueError, match="number 4 must lie in 1 to 63"):
        TreeShape.parse("until(0.6,4,5,64)")


def test_an_until_shape_has_the_limits_of_its_largest_tree():
    for shape in (UntilShape(TREE, 0.5), MarginalShape(TREE)):
        assert (shape.rows, shape.depth, shape.width) == (TREE.rows, TREE.depth, TREE.width)
        assert shape.forwarded == TREE.forwarded and shape.drafted and shape.stops and not shape.off
    assert not TREE.stops


@pytest.mark.parametrize("text", ["until(auto,8)", "until(auto,4,5,15)"])
def test_a_shape_whose_h_is_not_computed_yet_has_a_text_but_no_message(text):
    shape = TreeShape.parse(text)
    assert isinstance(shape, MarginalShape) and str(shape) == text
    with pytest.raises(TypeError, match="has no message"):
        wire.shape_message(shape)


def test_computed_numbers_are_rounded_and_kept_in_their_ranges():
    shape = MarginalShape(CHAIN)
    assert shape.at(0.62349, 0.02312) == UntilShape(CHAIN, 0.6235, 0.0231)
    assert shape.at(-3.0, -1.0) == UntilShape(CHAIN, 0.0001, 0.0)
    assert shape.at(7.0, 1e300) == UntilShape(CHAIN, 0.9999, 0.9999)


def until_message(h: float, least: float = 0.0, steps: int = 8) -> tree_pb2.TreeShape:
    tree = tree_pb2.DynamicShape(k=1, steps=steps, total=steps)
    return tree_pb2.TreeShape(until=tree_pb2.UntilShape(h=h, tree=tree, least=least))


@pytest.mark.parametrize(
    "message",
    [
        tree_pb2.TreeShape(widths=[2], children=[1]),
        tree_pb2.TreeShape(children=[1], beam=tree_pb2.BeamShape(steps=1, beams=1)),
        tree_pb2.TreeShape(beam=tree_pb2.BeamShape()),
        tree_pb2.TreeShape(beam=tree_pb2.BeamShape(steps=2**32 - 1, beams=2**32 - 1)),
        tree_pb2.TreeShape(dynamic=tree_pb2.DynamicShape(k=2**32 - 1, steps=2**32 - 1, total=2**32 - 1)),
        tree_pb2.TreeShape(children=[1] * 4000),
        tree_pb2.TreeShape(children=[2**32 - 1]),
        tree_pb2.TreeShape(until=tree_pb2.UntilShape(h=0.5)),
        tree_pb2.TreeShape(widths=[2], until=until_message(0.5).until),
        *(until_message(h) for h in (0.0, 1.0, -0.5, math.nan, math.inf, 0.123456)),
        *(until_message(0.5, least) for least in (-0.1, 1.0, math.nan, 0.00001)),
        until_message(0.5, steps=2**32 - 1),
    ],
    ids=["two kinds", "three kinds", "no beams", "huge beam", "huge dynamic", "long", "wide", "until without a tree"]
    + ["until and widths", "h 0", "h 1", "h below 0", "h nan", "h infinite", "h of six digits", "least below 0"]
    + ["least 1", "least nan", "least of five digits", "huge until"],
)
def test_a_wrong_shape_on_the_wire_is_refused_by_name(message):
    with pytest.raises(BadRequest, match="^shape"):
        wire.shape_from(message)
