"""Trees of drawn guesses at the engine: the law of whole rounds, full trees under load, and trees that are refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from dendro.engine import started
from dendro.errors import BadRequest
from dendro.modes import VerificationMode, draft_seed
from dendro.shapes import LevelShape, TreeShape
from dendro.text import Sampling
from dendro.tree import ChildLaw, DraftTree
from scipy.stats import chisquare
from tree_kernels.sampled_walk import drawn_order, law_of_scores
from tree_kernels.warp import Warp

from tests.support import tiny_models
from tests.support.routers import RoundByRound
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions
from verifier_service.walk import Draw, Walker, check_laws

PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(40)]
MULTI_STEP = Sampling(temperature=0.8, seed=3, mode=VerificationMode.MULTI_STEP)
BLOCK = replace(MULTI_STEP, mode=VerificationMode.BLOCK)


def drawn_tree(shape: LevelShape, root: int, base: int, sampling: Sampling, scores_of) -> DraftTree:
    """A tree as a drafter draws it. scores_of: tokens below the root -> ids and scores of the drafter's law"""
    tokens, parents, laws, frontier, paths = [root], [-1], [], [0], {0: ()}
    for width in shape.widths:
        below = []
        for row in frontier:
            law = law_of_scores(*scores_of(paths[row]))
            laws.append(ChildLaw(row, law.ids, law.probabilities))
            order = drawn_order(law, draft_seed(sampling.seed), base, row, sampling.sample_index)
            for token in law.ids[order[:width]].tolist():
                paths[len(tokens)] = (*paths[row], token)
                below.append(len(tokens))
                tokens.append(token)
                parents.append(row)
        frontier = below
    return replace(DraftTree.of(tokens, parents), laws=tuple(laws))


# --- the law of rounds, with the served noise ------------------------------------------------------------------------

SMALL = 6
RUNS = 2000


def small_logits(text: tuple[int, ...], model: int) -> np.ndarray:
    return np.random.default_rng([model, *text]).normal(0, 1.2, SMALL)


def first_tokens(sampling: Sampling, shape: LevelShape, count: int) -> tuple[int, ...]:
    """The first tokens of an answer of several rounds."""
    walker, text = Walker(SMALL), ()
    while len(text) < count:
        base = 1 + len(text)

        def drafted(path, text=text):
            return np.arange(SMALL), small_logits((*text, *path), 1)

        tree = drawn_tree(shape, 0, base, sampling, drafted)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
            paths.append((*paths[parent], token))

        def logits(row, text=text, paths=paths):
            return torch.tensor(small_logits((*text, *paths[row]), 0), dtype=torch.float32)[None]

        draw = Draw(0, 0, base, tree, Warp(sampling.temperature), sampling)
        text += walker.walk(draw, logits).tokens
    return text[:count]


def chance_of(sampling: Sampling, shape: LevelShape, runs: int) -> float:
    """p of the chi-square of two tokens against the target's law; cells of fewer than 5 expected are one."""

    def law(text: tuple[int, ...]) -> np.ndarray:
        weights = np.exp(small_logits(text, 0) / sampling.temperature)
        return weights / weights.sum()

    joint = {(a, b): runs * p * q for a, p in enumerate(law(())) for b, q in enumerate(law((a,)))}
    seen = Counter(first_tokens(replace(sampling, seed=seed), shape, 2) for seed in range(runs))
    rare = {pair for pair, expected in joint.items() if expected < 5}
    cells = [(seen[pair], expected) for pair, expected in joint.items() if pair not in rare]
    cells.append((sum(seen[pair] for pair in rare), sum(joint[pair] for pair in rare)))
    observed, expected = zip(*(cell for cell in cells if cell[1]), strict=True)
    return float(chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue)


@pytest.mark.parametrize(
    "sampling, shape",
    [(MULTI_STEP, LevelShape((2, 1))), (BLOCK, LevelShape((1, 1)))],
    ids=["multi-step", "block"],
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("runs", [pytest.param(RUNS // 2, id="few"), pytest.param(20_000, marks=pytest.mark.long)])
def test_rounds_with_the_served_noise_have_the_targets_law(sampling, shape, runs):
    """Correct rounds fail this once in 1,000 choices of the seeds."""
    assert chance_of(sampling, shape, runs) > 1e-3


@pytest.mark.slow
def test_lenience_is_seen_by_the_same_measure():
    lenient = replace(MULTI_STEP, mode=VerificationMode.LENIENT, lenience=0.2)
    assert chance_of(lenient, LevelShape((1, 1)), RUNS) < 1e-12


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    tiny_models.make_checkpoint(path)
    return path


def trees(rng: np.random.Generator, shape: TreeShape):
    """Makes a full tree of random laws for a round."""

    def tree(router: RoundByRound) -> DraftTree:
        base, sampling = len(router.text), router.parameters.sampling

        def laws(path):
            return rng.permutation(256)[:16], rng.normal(0, 2, 16)

        return drawn_tree(shape, router.text.ids[-1], base, sampling, laws)

    return tree


async def test_drawn_trees_are_never_trimmed_and_do_not_wait_for_ever(folder):
    """Eight texts with trees of 63 rows, of which two fit into a step, beside two texts of coupled sampling."""
    options = VerifierOptions(name="tiny", max_length=256, max_sessions=10, prefill_chunk=128)
    async with started(VerifierEngine.load(folder, options)) as engine:
        shape, verdicts = LevelShape((2, 2, 2, 2, 2)), []

        async def drawn(number: int) -> list[int]:
            router = RoundByRound(engine, PROMPT[number:], replace(MULTI_STEP, seed=number), 6)
            make = trees(np.random.default_rng(number), shape)
            await router.open()
            while len(router.text) < router.end:
                verdicts.append(await router.round(make(router)))
            await router.close()
            return router.answer[:6]

        coupled = [RoundByRound(engine, PROMPT, Sampling(temperature=1.0, seed=seed), 6) for seed in (8, 9)]
        answers, *_ = await asyncio.gather(
            asyncio.gather(*map(drawn, range(8))), *(router.finish() for router in coupled)
        )
        assert not any(verdict.trimmed for verdict in verdicts)
        assert engine.scheduler.counters.trimmed == 0
        # Alone at the engine each has the same answer: steps change nothing.
        assert [await drawn(number) for number in range(8)] == answers


async def test_a_tree_with_laws_is_refused_in_a_mode_that_draws_no_guesses(folder):
    options = VerifierOptions(name="tiny", max_length=256, max_sessions=2)
    async with started(VerifierEngine.load(folder, options)) as engine:
        router = RoundByRound(engine, PROMPT, Sampling(temperature=0.8, seed=3), 8)
        await router.open()
        with pytest.raises(BadRequest, match=r"^tree\.laws: have no use in mode coupled"):
            await router.round(trees(np.random.default_rng(0), LevelShape((2,)))(router))
        await router.close()


def good_tree(shape=(2, 1)) -> DraftTree:
    rng = np.random.default_rng(0)
    return drawn_tree(LevelShape(shape), 5, 9, MULTI_STEP, lambda path: (rng.permutation(50)[:8], rng.normal(0, 2, 8)))


def changed(tree: DraftTree, which: int, **fields) -> DraftTree:
    laws = [replace(law, **fields) if law.row == which else law for law in tree.laws]
    return replace(tree, laws=tuple(laws))


def test_an_honest_tree_is_accepted_and_one_of_another_round_or_seed_is_not():
    check_laws(good_tree(), MULTI_STEP, 9, 50)
    for sampling, base in ((MULTI_STEP, 10), (replace(MULTI_STEP, seed=4), 9)):
        with pytest.raises(BadRequest, match=r"^tree\.laws\[\d\]: the row's children are not the first draws"):
            check_laws(good_tree(), sampling, base, 50)


def test_a_tree_that_its_mode_cannot_verify_is_refused_by_the_field():
    tree = good_tree()
    with pytest.raises(BadRequest, match=r"^tree\.laws: are missing"):
        check_laws(replace(tree, laws=()), MULTI_STEP, 9, 50)
    with pytest.raises(BadRequest, match=r"^tree\.laws\[0\]\.ids: a token lies outside the vocabulary of 20"):
        check_laws(tree, MULTI_STEP, 9, 20)
    with pytest.raises(BadRequest, match=r"^tree\.parents: .* mode block needs a chain"):
        check_laws(tree, BLOCK, 9, 50)
    certain = np.eye(1, 8, 0)[0]  # its second child has the probability 0
    with pytest.raises(BadRequest, match=r"^tree\.laws\[0\]: the row's children"):
        check_laws(changed(tree, 0, probabilities=certain), MULTI_STEP, 9, 50)
    check_laws(good_tree((1, 1)), BLOCK, 9, 50)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"probabilities": np.full(8, -0.125)}, "probabilities: must lie in"),
        ({"probabilities": np.full(8, np.nan)}, "probabilities: must lie in"),
        ({"probabilities": np.full(8, 0.5)}, "probabilities: their sum is 4"),
        ({"probabilities": np.full(7, 1 / 7)}, "has 8 ids and 7 probabilities"),
        ({"ids": np.zeros(8, np.int64)}, "ids: are negative or not unique"),
        ({"ids": np.arange(40), "probabilities": np.full(40, 1 / 40)}, "1 to 32"),
        ({"row": 1}, "are of rows"),
    ],
)
def test_a_malformed_law_is_refused_by_its_field(fields, reason):
    with pytest.raises(ValueError, match=rf"^tree\.laws.*{reason}"):
        changed(good_tree(), 0, **fields)
