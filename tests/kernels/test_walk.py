"""The walk, and small-scale speculative decoding: a toy language model with the real noise, warp, order and walk."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_kernels.noise import NoiseRows
from tree_kernels.tree_walk import Walk, walk
from tree_kernels.warp import Warp, drafter_order, tokens_of

#         0
#       / | \
#      1  2  3      tokens 11, 12, 13
#     /|     |
#    4 5     6      tokens 21, 22, 21
#      |
#      7            token 31
TOKENS = [10, 11, 12, 13, 21, 22, 21, 31]
PARENTS = [-1, 0, 0, 0, 1, 1, 3, 5]


@pytest.mark.parametrize(
    "picks, expected",
    [
        ({0: 99}, Walk((0,), (99,), ())),
        ({0: 12, 2: 50}, Walk((0, 2), (12, 50), (1,))),
        ({0: 13, 3: 22}, Walk((0, 3), (13, 22), (2,))),
        ({0: 13, 3: 21, 6: 31}, Walk((0, 3, 6), (13, 21, 31), (2, 0))),
        ({0: 11, 1: 22, 5: 31, 7: 1}, Walk((0, 1, 5, 7), (11, 22, 31, 1), (0, 1, 0))),
    ],
    ids=["no child", "a leaf", "a cousin's token", "to the end", "the deepest"],
)
def test_walk_goes_to_the_child_with_the_targets_token_and_picks_only_at_visited_rows(picks, expected):
    asked: list[int] = []

    def pick(row: int) -> int:
        asked.append(row)
        return picks[row]

    assert walk(TOKENS, PARENTS, pick) == expected
    assert tuple(asked) == expected.path


def test_an_empty_tree_is_plain_decoding():
    assert walk([5], [-1], lambda row: 5) == Walk((0,), (5,), ())


def test_walk_accepts_arrays():
    tree = walk(np.array(TOKENS), np.array(PARENTS), lambda row: [11, 21, 0, 0, 9][row])
    assert tree == Walk((0, 1, 4), (11, 21, 9), (0, 0))


@pytest.mark.parametrize("parents", [[-1, 0], [-1, 0, 2], [-1, 2, 0], [-1, -1, 0]])
def test_parents_that_are_no_tree_are_refused(parents):
    with pytest.raises(ValueError, match="^parents:"):
        walk([1, 2, 3], parents, lambda row: 2)


# --- small-scale speculative decoding --------------------------------------------------------------------------------

VOCABULARY = 16
LENGTH = 256
PROMPT = [3, 1, 4]
Tree = tuple[list[int], list[int]]  # tokens, parents
Build = Callable[[list[int]], Tree]  # the committed text -> a tree whose row 0 is its last token

WARPS = [
    Warp(0.0),
    Warp(0.7),
    Warp(1.0),
    Warp(0.7, top_k=5, top_p=0.9),
    Warp(1.0, top_p=0.8),
    Warp(1.0, top_k=6, min_p=0.1),
]
SHAPES = [(), (1, 1, 1, 1), (2,), (4, 4), (3, 2, 2, 1, 1), (16,)]


def table(seed: int, near: torch.Tensor | None = None, distance: float = 0.0) -> torch.Tensor:
    """Logits by the last two tokens [V, V, V]; a drafter's are the target's with noise added."""
    noise = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return 2 * noise if near is None else near + distance * noise


TARGET = table(0)
DRAFTERS = {"itself": TARGET, "close": table(1, TARGET, 0.7), "weak": table(2, TARGET, 3.0), "foreign": table(3)}


def logits_after(model: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
    return model[text[-2], text[-1]][None]


def plain(seed: int, warp: Warp) -> list[int]:
    noise, text = NoiseRows(seed, VOCABULARY), list(PROMPT)
    while len(text) < LENGTH + len(PROMPT):
        row = None if warp.greedy else noise.rows([len(text)])
        text.append(int(tokens_of(logits_after(TARGET, text), warp, row)))
    return text[len(PROMPT) :]


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """The rows from the first guess down to this one: none for the root."""
    path = []
    while row > 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def grown(model: torch.Tensor, shape: Sequence[int], seed: int, warp: Warp, text: list[int]) -> Tree:
    """A tree of this shape, level by level, in the drafter's order."""
    noise = NoiseRows(seed, VOCABULARY)
    tokens, parents, level = [text[-1]], [-1], [0]
    for depth, width in enumerate(shape):
        following = []
        for row in level:
            context = text + [tokens[above] for above in path_to(parents, row)]
            drawn = None if warp.greedy else noise.rows([len(text) + depth])
            for token in drafter_order(logits_after(model, context), warp, drawn, width)[0].tolist():
                following.append(len(tokens))
                tokens.append(token)
                parents.append(row)
        level = following
    return tokens, parents


def scattered(rng: np.random.Generator, truth: list[int], text: list[int]) -> Tree:
    """A random tree, about half of it along the target's next tokens, so that walks go deep."""
    following = truth[len(text) - len(PROMPT) :]
    tokens, parents, spine = [text[-1]], [-1], [0]
    for row in range(1, int(rng.integers(1, 30))):
        on_spine = rng.random() < 0.5 and len(spine) <= len(following)
        parent = spine[-1] if on_spine else int(rng.integers(0, row))
        token = following[len(spine) - 1] if on_spine else int(rng.integers(0, VOCABULARY))
        twins = [i for i in range(1, row) if parents[i] == parent and tokens[i] == token]
        if twins:  # siblings must differ: use a token outside the vocabulary, which is never picked
            token = 100 + row
        if on_spine:
            spine.append(twins[0] if twins else row)
        tokens.append(token)
        parents.append(parent)
    return tokens, parents


def speculative(
    seed: int,
    warp: Warp,
    build: Build,
    noise_position: Callable[[int, int, int], int] = lambda base, depth, row: base + depth,
    extra: int = 0,
) -> tuple[list[int], list[int]]:
    """The answer and the N of each round. noise_position, extra: to plant bugs"""
    noise, text, counts = NoiseRows(seed, VOCABULARY), list(PROMPT), list[int]()
    while len(text) < LENGTH + len(PROMPT):
        tokens, parents = build(text)

        def pick(row: int, before=tuple(text), tokens=tokens, parents=parents) -> int:
            path = path_to(parents, row)
            context = [*before, *(tokens[above] for above in path)]
            drawn = None if warp.greedy else noise.rows([noise_position(len(before), len(path), row)])
            return int(tokens_of(logits_after(TARGET, context), warp, drawn))

        verdict = walk(tokens, parents, pick)
        text += verdict.tokens
        if extra and len(verdict.path) < len(tokens):
            text += tokens[verdict.path[-1] + 1 :][:extra]
        counts.append(len(verdict.tokens))
        noise.forget_before(len(text))
    return text[len(PROMPT) :][:LENGTH], counts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize(
    "drafter", ["close", *(pytest.param(name, marks=pytest.mark.long) for name in ("weak", "foreign"))]
)
def test_speculative_decoding_equals_plain_decoding_token_for_token(drafter, warp, shape):
    answer, counts = speculative(7, warp, lambda text: grown(DRAFTERS[drafter], shape, 7, warp, text))
    assert answer == plain(7, warp)
    if shape and drafter == "close":
        assert sum(counts) / len(counts) > 1.3  # guesses were accepted


@given(seed=st.integers(0, 2**64 - 1), trees=st.integers(0, 2**32), warp=st.sampled_from(WARPS))
@settings(max_examples=25, deadline=None)
def test_random_trees_do_not_change_the_answer(seed, trees, warp):
    rng, truth = np.random.default_rng(trees), plain(seed, warp)
    answer, counts = speculative(seed, warp, lambda text: scattered(rng, truth, text))
    assert answer == truth
    assert max(counts) > 3


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 2, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_every_guess_of_a_drafter_equal_to_the_target_is_accepted(warp, shape):
    _, counts = speculative(11, warp, lambda text: grown(TARGET, shape, 11, warp, text))
    assert set(counts) == {len(shape) + 1}


def test_a_drafter_with_other_noise_is_lossless_but_accepted_less():
    warp, shape = Warp(1.0), (1, 1, 1, 1)
    _, shared = speculative(5, warp, lambda text: grown(DRAFTERS["close"], shape, 5, warp, text))
    answer, own = speculative(5, warp, lambda text: grown(DRAFTERS["close"], shape, 6, warp, text))
    assert answer == plain(5, warp)
    assert sum(own) / len(own) < 0.8 * sum(shared) / len(shared)


def test_noise_keyed_by_the_row_instead_of_the_position_is_detected():
    warp, shape = Warp(1.0), (3, 2)
    answer, _ = speculative(
        7, warp, lambda text: grown(DRAFTERS["close"], shape, 7, warp, text), lambda base, depth, row: base + row
    )
    assert answer != plain(7, warp)


def test_an_extra_committed_token_is_detected():
    warp = Warp(0.0)
    answer, _ = speculative(7, warp, lambda text: grown(DRAFTERS["weak"], (1, 1, 1), 7, warp, text), extra=1)
    assert answer != plain(7, warp)
