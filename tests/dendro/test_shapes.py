import pytest
from dendro import wire
from dendro.errors import BadRequest
from dendro.internal.v1 import tree_pb2
from dendro.shapes import MAX_ROWS, OFF, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape
from hypothesis import given
from hypothesis import strategies as st

SHAPES = [OFF, LevelShape((3, 2, 1)), NodeShape((2, 0, 1, 3)), BeamShape(8, 3), DynamicShape(6, 5, 40)]


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
    + ["dynamic(8,8,64)", "tree(1)", "(63,1)", "3,,2", "(4,4,4)"],
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
    ],
    ids=["two kinds", "three kinds", "no beams", "huge beam", "huge dynamic", "long", "wide"],
)
def test_a_wrong_shape_on_the_wire_is_refused_by_name(message):
    with pytest.raises(BadRequest, match="^shape"):
        wire.shape_from(message)
