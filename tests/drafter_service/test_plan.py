"""What a level's plan says of its trees."""

from __future__ import annotations

import numpy as np

from drafter_service.plan import NO_NODE, Level, Nodes


def test_nodes_and_lines_are_padded_at_the_front_and_lines_lead_from_a_node_to_its_root():
    """Two trees: a fork below a chain of two, whose forks are new, and a root alone."""
    trees = [Nodes([7, 3, 9, 4], [-1, 0, 1, 1]), Nodes([5], [-1])]
    level = Level(np.array([1, 2, 8]), [2, 1], [6, 2], [10, 3], [2, 0], trees)
    assert level.slots.tolist() == [9, 4, 5] and level.parents.tolist() == [3, 3, NO_NODE]
    assert level.positions.tolist() == [12, 12, 3] and level.text_of_rows.tolist() == [6, 6, 2]
    assert level.nodes.tolist() == [[7, 3, 9, 4], [NO_NODE, NO_NODE, NO_NODE, 5]]
    assert level.lines[0].tolist() == np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]], bool).tolist()
    assert level.lines[1].tolist() == np.diag([False, False, False, True]).tolist()
