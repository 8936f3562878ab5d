"""The drafter's engine against an oracle without memory, which prefills the whole path of every node.

After any history, a draft equals that of a fresh drafter for the same text.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dendro.calls import CloseCall, Closed, DraftCall, OpenCall, Opened, RequestParameters, TextUpdate, new_opening
from dendro.errors import BadRequest, EngineFailed, NotFound, Overloaded, PeerLost
from dendro.shapes import OFF, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape, UntilShape
from dendro.state import MemoryStates, NoStates
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from tree_kernels.noise import gumbel_noise
from tree_kernels.warp import Warp, drafter_order

from drafter_service.confidence import CANDIDATES, Calibration
from drafter_service.engine import DrafterEngine
from drafter_service.models import DrafterModel, load_model
from drafter_service.options import DrafterOptions
from drafter_service.plan import Chains
from drafter_service.texts import DraftRound
from tests.support.opened_texts import OpenedText, drafter_of
from tests.support.tiny_drafters import PADDED, VOCABULARY

CPU = torch.device("cpu")
CHAIN, TREE, WIDE = LevelShape((1, 1, 1, 1)), LevelShape((3, 2, 2, 1, 1)), LevelShape((12, 2))
NODES, BEAM, DYNAMIC = NodeShape((3, 2, 0, 1, 0, 2, 1)), BeamShape(4, 5), DynamicShape(5, 4, 18)
UNTIL = UntilShape(DynamicShape(3, 5, 12), 0.9, 0.02)  # stops after one, two or three levels
FEW_OF_MANY = DynamicShape(12, 3, 5)  # drops most of the rows that it processes
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, seed=99, sample_index=1)
MASKED = Sampling(temperature=1.0, top_k=3, top_p=0.9, seed=5)


@pytest.fixture(autouse=True)
def fixed_calibrations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the initial calibrations, so that trees are predictable, except in tests that request `learning`."""
    if "learning" not in request.fixturenames:
        monkeypatch.setattr(Calibration, "learn", lambda self, scores, rank: self)


@pytest.fixture
def learning() -> None:
    """Calibrations are fitted while the test runs."""


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(load_model(path, torch.float32, CPU)[0])


@dataclass(frozen=True)
class Offer:
    token: int
    chance: float  # logarithm


@dataclass(frozen=True)
class Guess:
    token: int
    parent: int
    value: float
    depth: int


@dataclass
class Oracle:
    """Drafts without a memory: prefills the text and the whole path of each node."""

    model: DrafterModel
    vocabulary: int = VOCABULARY  # guesses are below it

    @torch.inference_mode()
    def logits(self, texts: list[list[int]]) -> torch.Tensor:
        """[texts, V] next-token logits of texts of one length. Ids past the model's embedding are fed as 0."""
        texts = [[token if token < PADDED else 0 for token in text] for text in texts]
        zeros, own = np.zeros(len(texts), np.int64), np.arange(1, 1 + len(texts))
        rows = Chains(np.array(texts), np.full(len(texts), len(texts[0])), zeros, zeros, own, zeros[:0])
        return self.model.logits(self.model.memory(1 + len(texts), 1).chain(rows)[:, -1])[:, : self.vocabulary]

    def offers(self, texts: list[list[int]], sampling: Sampling, calibration: Calibration) -> list[list[Offer]]:
        """The 16 ordered candidates of each text. The texts have the same length, and so the same noise."""
        warp = Warp.of(sampling)
        logits = self.logits(texts)
        noise, scores = None, logits
        if not warp.greedy:
            noise = gumbel_noise(sampling.seed, [len(texts[0])], logits.shape[1], sampling.sample_index)
            noise = noise.expand(len(texts), -1)
            scores = logits / warp.temperature + noise
        order = drafter_order(logits, warp, noise, 16)
        offers = []
        for ids, row in zip(order.tolist(), scores.gather(1, order).tolist(), strict=True):
            row[0] = max(row)
            weights = [exp((score - row[CANDIDATES - 1]) * calibration.sharpness) for score in row]
            total = sum(weights[:CANDIDATES]) + exp(calibration.unseen)
            offers.append([Offer(token, log(weight / total)) for token, weight in zip(ids, weights, strict=True)])
        return offers

    def draft(
        self, ids: list[int], shape: TreeShape, sampling: Sampling, calibration: Calibration
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and values, by sorting all candidates of each level."""
        rows, texts, frontier = [Guess(ids[-1], -1, 0.0, 0)], [list(ids)], [0]
        for depth in range(shape.depth):
            offers = self.offers([texts[row] for row in frontier], sampling, calibration)
            below = [
                [Guess(offer.token, row, rows[row].value + offer.chance, depth + 1) for offer in each]
                for row, each in zip(frontier, offers, strict=True)
            ]
            match shape:
                case LevelShape():
                    taken = [guess for each in below for guess in each[: shape.widths[depth]]]
                case UntilShape():
                    taken = [guess for each in below for guess in each[: shape.tree.k]]
                    taken = [guess for guess in taken if exp(guess.value) > shape.least]
                case NodeShape():
                    taken = [g for row, each in zip(frontier, below, strict=True) for g in each[: shape.children[row]]]
                case BeamShape():
                    offered = [guess for each in below for guess in each[: shape.beams]]
                    best = sorted(range(len(offered)), key=lambda i, of=offered: (-of[i].value, i))[: shape.beams]
                    taken = [offered[i] for i in sorted(best)]
                case DynamicShape():
                    taken = [guess for each in below for guess in each[: shape.k]]
            frontier = list(range(len(rows), len(rows) + len(taken)))
            rows += taken
            texts += [texts[guess.parent] + [guess.token] for guess in taken]
            if isinstance(shape, NodeShape):
                frontier = [row for row in frontier if row < len(shape.children) and shape.children[row]]
            if isinstance(shape, DynamicShape):
                frontier = sorted(sorted(frontier, key=lambda row: (-rows[row].value, row))[: shape.k])
            if isinstance(shape, UntilShape):
                ranked = sorted((guess.value for guess in rows[1:]), reverse=True)
                bound = ranked[shape.tree.total - 1] if len(ranked) >= shape.tree.total else -inf
                frontier = sorted(sorted(frontier, key=lambda row: (-rows[row].value, row))[: shape.tree.k])
                frontier = [row for row in frontier if rows[row].value > bound]
                if 1 - sum(exp(rows[row].value) for row in frontier) >= shape.h:
                    break
        kept = list(range(len(rows)))
        if isinstance(shape, UntilShape):
            kept = sorted(sorted(kept, key=lambda row: (-rows[row].value, rows[row].depth, row))[: shape.rows])
        if isinstance(shape, DynamicShape):
            kept = sorted(sorted(kept, key=lambda row: (-rows[row].value, rows[row].depth, row))[: 1 + shape.total])
        parents = [-1, *(kept.index(rows[row].parent) for row in kept[1:])]
        return [rows[row].token for row in kept], parents, [rows[row].value for row in kept]

    def check(
        self,
        tree: DraftTree,
        ids: list[int],
        shape: TreeShape,
        sampling: Sampling,
        calibration: Calibration = Calibration(),  # noqa: B008 - a value
    ) -> None:
        tokens, parents, values = self.draft(ids, shape, sampling, calibration)
        assert tree.tokens.tolist() == tokens
        assert tree.parents.tolist() == parents
        np.testing.assert_allclose(tree.values, values, atol=1e-4)
        assert (tree.values[1:] <= tree.values[tree.parents[1:]]).all()


@dataclass
class DraftClient:
    """Calls the engine as a router's handle does: keeps the text and the length of it that was sent."""

    engine: DrafterEngine
    sampling: Sampling = GREEDY
    tenant: str = ""
    marks: tuple[int, ...] = ()
    vocabulary: int = 0  # of the target
    opening: bytes = field(default_factory=new_opening)
    text: Tokens = field(default_factory=Tokens)
    held: int = 0

    @property
    def ids(self) -> list[int]:
        return self.text.ids

    def update(self) -> TextUpdate:
        start = min(self.held, len(self.text))
        self.held = len(self.text)
        return TextUpdate.of(self.opening, self.text, start)

    async def open(self, prompt: list[int]) -> Opened:
        self.text.extend(prompt)
        parameters = RequestParameters(self.sampling, Limits(10_000), self.tenant, self.marks, self.vocabulary)
        return await self.engine.open(OpenCall(self.update(), parameters))

    async def draft(self, shape: TreeShape) -> DraftTree:
        return await self.engine.draft(DraftCall(self.update(), shape))

    async def close(self) -> Closed:
        return await self.engine.close(CloseCall(self.update()))

    @property
    def kept(self) -> DraftRound:
        """The engine's kept round of the last tree."""
        return self.engine._scheduler._sessions[self.opening].kept

    def cut(self, length: int) -> None:
        self.text.cut(length)
        self.held = min(self.held, length)


def prompt_of(length: int, seed: float = 3) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


async def until_a_session_opens(engine: DrafterEngine) -> None:
    """Wait until the engine's thread has opened a text."""
    while not engine.sessions:  # noqa: ASYNC110 - changed by another thread, without an event
        await asyncio.sleep(0)


@dataclass
class AllGuesses:
    """All rows that the last tree grew, including those dropped at the end; may exceed the rows of a DraftTree."""

    tokens: list[int]
    parents: list[int]

    def children(self, row: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == row]


def grown(client: DraftClient) -> AllGuesses:
    return AllGuesses(client.kept.growth.tokens, client.kept.growth.parents)


def walk(tree: DraftTree | AllGuesses, accepted: int, rng: random.Random) -> list[int]:
    """The tokens of a random path of the tree, at most `accepted`, and one token that the tree did not guess next."""
    row, tokens = 0, []
    while len(tokens) < accepted and tree.children(row):
        row = rng.choice(tree.children(row))
        tokens.append(int(tree.tokens[row]))
    guessed = {int(tree.tokens[child]) for child in tree.children(row)}
    return [*tokens, rng.choice([token for token in range(VOCABULARY) if token not in guessed])]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, MASKED], ids=["greedy", "sampled", "masked"])
@pytest.mark.parametrize(
    "shape", [CHAIN, TREE, WIDE, LevelShape((5,)), NODES, BEAM, DYNAMIC, FEW_OF_MANY, UNTIL], ids=str
)
async def test_drafting_by_levels_equals_a_fresh_prefill_of_every_path(path, oracle, shape, sampling):
    async with drafter_of(path) as engine:
        for length in (1, 2, 30):
            client = DraftClient(engine, sampling)
            opened = await client.open(prompt_of(length))
            assert (opened.restored, opened.processed) == (0, length - 1)
            oracle.check(await client.draft(shape), client.ids, shape, sampling)
            assert await client.close() == Closed(0)  # no state store


FEWER, MORE = 70, 500
"""Vocabularies of two targets: smaller than the drafter's, and larger than its embedding."""


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, MASKED], ids=["greedy", "sampled", "masked"])
@pytest.mark.parametrize("shape", [CHAIN, TREE, NODES, BEAM, DYNAMIC, UNTIL], ids=str)
async def test_texts_of_targets_with_different_vocabularies_share_levels_and_get_the_drafts_they_get_alone(
    path, oracle, shape, sampling
):
    """Guesses are ids below the smaller vocabulary, and their chances sum to one over these. Ids of the text past the
    drafter's embedding are fed as one fixed id; ids in its padding are fed unchanged."""
    texts = {
        FEWER: [token % FEWER for token in prompt_of(12)],
        0: prompt_of(12),
        MORE: [3, VOCABULARY, PADDED - 1, PADDED, 7, MORE - 1, 200, 1, 2, VOCABULARY - 1, 9, PADDED + 1],
    }
    async with drafter_of(path) as engine:
        clients = [DraftClient(engine, sampling, vocabulary=vocabulary) for vocabulary in texts]
        await asyncio.gather(*(client.open(text) for client, text in zip(clients, texts.values(), strict=True)))
        rounds = most_texts = 0
        while rounds < 2 or most_texts < len(texts):
            rounds += 1
            assert rounds < 20, f"no level has all texts; one has {most_texts}"
            trees = await asyncio.gather(*(client.draft(shape) for client in clients))
            most_texts = max(most_texts, *(tree.texts for tree in trees))
            for client, tree in zip(clients, trees, strict=True):
                limit = min(client.vocabulary or VOCABULARY, VOCABULARY)
                Oracle(oracle.model, limit).check(tree, client.ids, shape, sampling)
                client.text.extend([int(tree.tokens[1]), (client.vocabulary or VOCABULARY) - 1])
        for client in clients:
            await client.close()


async def test_the_first_id_past_the_targets_vocabulary_is_never_guessed(path, oracle):
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        await client.open([1, 2, 3])
        best = int(max((await client.draft(TREE)).tokens[1:]))
        await client.close()
        assert best >= 64
        cut = DraftClient(engine, vocabulary=best)
        await cut.open([1, 2, 3])
        tree = await cut.draft(TREE)
        assert best not in tree.tokens and tree.tokens.max() < best
        Oracle(oracle.model, best).check(tree, cut.ids, TREE, GREEDY)
        await cut.close()


async def test_a_saved_state_of_a_text_with_ids_past_the_embedding_is_restored_and_drafts_the_same(path, oracle):
    prompt = [3, MORE - 1, PADDED, 7, PADDED + 5, 2, 1, MORE - 2]
    async with drafter_of(path, MemoryStates()) as engine:
        first = DraftClient(engine, vocabulary=MORE)
        await first.open(prompt)
        assert await first.close() == Closed(len(prompt) - 1)
        again = DraftClient(engine, vocabulary=MORE)
        assert (await again.open(prompt)).restored == len(prompt) - 1
        oracle.check(await again.draft(TREE), prompt, TREE, GREEDY)
        await again.close()


@pytest.mark.parametrize("seed", range(6))
async def test_after_any_history_a_draft_equals_that_of_a_fresh_drafter(path, oracle, seed, learning):
    """25 rounds of: shapes of all kinds; full, partial and no acceptance; continuation by guesses that the tree
    dropped; off rounds; repeated calls; cuts of any depth, with other text after them. The fresh drafter has the same
    calibration, the only state that may matter."""
    rng = random.Random(seed)
    sampling = rng.choice([GREEDY, SAMPLED])
    async with drafter_of(path) as engine:
        client = DraftClient(engine, sampling)
        prompt = prompt_of(rng.randint(1, 20), seed)
        await client.open(prompt)
        for _ in range(25):
            shape = rng.choice([CHAIN, TREE, LevelShape((2, 1)), NODES, BEAM, DYNAMIC, FEW_OF_MANY, OFF, OFF])
            tree = await client.draft(shape)
            if shape.off:
                assert tree.tokens.tolist() == client.ids[-1:]
            else:
                oracle.check(tree, client.ids, shape, sampling, client.kept.calibration)
                if rng.random() < 0.5:  # all rows that were grown, not only the kept ones
                    tree = grown(client)
            event = rng.random()
            if event < 0.1:  # the round was lost: repeat the call
                continue
            client.text.extend(walk(tree, rng.randint(0, shape.depth), rng))
            if event < 0.4:
                client.cut(max(1, rng.choice([len(client.ids) - rng.choice([1, 2, 3, 8, 40]), len(prompt)])))
                client.text.extend(prompt_of(rng.choice([0, 0, 3, 30]), rng.random()))
        await client.close()


@pytest.mark.parametrize("accepted, forwarded", [(0, 3), (2, 3), (3, 3), (4, 4)], ids=lambda value: str(value))
async def test_states_of_accepted_nodes_are_reused(path, accepted, forwarded):
    """A round of depth 4 forwards its root and three levels; an accepted leaf is forwarded in the next round."""
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(9))
        tree = await client.draft(CHAIN)
        client.text.extend(walk(tree, accepted, random.Random(0)))
        before = engine.counters.rows
        await client.draft(CHAIN)
        assert engine.counters.rows - before == forwarded + 1
        await client.close()


@pytest.mark.parametrize("shape", [NODES, BEAM, DYNAMIC, UNTIL, FEW_OF_MANY], ids=str)
async def test_a_processed_rows_state_is_reused_whether_or_not_the_tree_keeps_the_row(path, oracle, shape):
    """The text continues through each processed row in turn; the next round then forwards no row of the text again."""
    async with drafter_of(path) as engine:
        client = DraftClient(engine, SAMPLED)
        await client.open(prompt_of(9))
        await client.draft(shape)
        prompt, growth = list(client.ids), client.kept.growth
        paths = {0: []}
        for row in range(1, len(growth.tokens)):
            paths[row] = [*paths[growth.parents[row]], growth.tokens[row]]
        for row in growth.place:
            client.cut(len(prompt))
            await client.draft(shape)
            guessed = {growth.tokens[child] for child, parent in enumerate(growth.parents) if parent == row}
            other = next(token for token in range(VOCABULARY) if token not in guessed)
            client.text.extend([*paths[row], other])
            before = engine.counters.rows
            tree = await client.draft(shape)
            assert engine.counters.rows - before == client.kept.growth.processed
            oracle.check(tree, client.ids, shape, SAMPLED)
        await client.close()


async def test_learning_changes_values_and_never_which_guess_comes_first(path, oracle, learning):
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(9))
        first = await client.draft(TREE)
        for seed in range(4):
            client.text.extend(prompt_of(20, seed))
            await client.draft(TREE)
        client.cut(9)
        again = await client.draft(TREE)
        assert again.tokens.tolist() == first.tokens.tolist()
        assert again.values[1] < first.values[1] - 1  # guesses missed this text, so confidence drops
        assert engine._scheduler.calibrations["noise"] == Calibration()  # greedy texts do not change it
        await client.close()


async def test_a_drafter_that_is_never_idle_keeps_noise_of_few_positions(path, monkeypatch):
    monkeypatch.setattr(DrafterEngine, "_prepare_noise", lambda engine: False)
    shape = LevelShape((2, 1, 1))
    async with drafter_of(path, closed=False) as engine:
        text = OpenedText(engine, prompt_of(10), SAMPLED)
        await text.open()
        for _ in range(20):
            tree = await text.draft(shape)
            text.ids += [int(tree.tokens[1]), 7]
        (law,) = engine._runner._laws.values()
    assert 0 < len(law.noise) <= shape.depth


async def test_a_tree_that_may_process_more_rows_than_eight_full_trees_is_grown(path, oracle):
    """dynamic(16,5,7) keeps 8 rows and may process 65, one more than eight trees of 8 rows."""
    shape = DynamicShape(16, 5, 7)
    async with drafter_of(path, max_rows=8) as engine:
        clients = [DraftClient(engine, SAMPLED) for _ in range(3)]
        await asyncio.gather(*(client.open(prompt_of(6, i)) for i, client in enumerate(clients)))
        for _ in range(2):
            trees = await asyncio.wait_for(asyncio.gather(*(client.draft(shape) for client in clients)), 30)
            for client, tree in zip(clients, trees, strict=True):
                oracle.check(tree, client.ids, shape, SAMPLED)
                client.text.extend(walk(tree, 2, random.Random(0)))
        await asyncio.gather(*(client.close() for client in clients))


async def test_sessions_that_share_forwards_get_the_drafts_they_get_alone(path, oracle):
    shapes = [CHAIN, TREE, WIDE, OFF, LevelShape((2, 2, 2)), NODES, BEAM, DYNAMIC, FEW_OF_MANY]
    laws = [GREEDY, SAMPLED, MASKED, GREEDY, SAMPLED, Sampling(temperature=0.8, seed=100), SAMPLED, GREEDY, MASKED]
    async with drafter_of(path) as engine:
        clients = [DraftClient(engine, law) for law in laws]
        await asyncio.gather(*(client.open(prompt_of(5 + 9 * i, i)) for i, client in enumerate(clients)))
        for turn in range(5):
            trees = await asyncio.gather(*(c.draft(shape) for c, shape in zip(clients, shapes, strict=True)))
            for client, shape, tree in zip(clients, shapes, trees, strict=True):
                if not shape.off:
                    oracle.check(tree, client.ids, shape, client.sampling)
                client.text.extend(walk(tree, turn, random.Random(turn)))
        together = max(tree.texts for tree in trees)
        forwards = engine.counters.forwards
        assert (await clients[0].draft(CHAIN)).texts == 1
        await asyncio.gather(*(client.close() for client in clients))
    assert forwards < 8 * 5 * 4 / 2  # they shared forwards
    assert 1 < together <= 8


async def test_when_node_slots_run_out_idle_trees_are_evicted_and_drafts_stay_correct(path, oracle):
    async with drafter_of(path, max_rows=8, max_sessions=24) as engine:
        clients = [DraftClient(engine) for _ in range(24)]
        await asyncio.gather(*(client.open(prompt_of(6, i)) for i, client in enumerate(clients)))
        shape = LevelShape((1, 1, 1, 1, 1, 1, 1))
        for _ in range(3):
            trees = await asyncio.gather(*(client.draft(shape) for client in clients))
            for client, tree in zip(clients, trees, strict=True):
                oracle.check(tree, client.ids, shape, GREEDY)
                client.text.extend(walk(tree, 4, random.Random(0)))
        await asyncio.gather(*(client.close() for client in clients))


async def test_a_draft_sent_during_prefill_waits_for_it(path, oracle):
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        opening = asyncio.create_task(client.open(prompt_of(150)))
        await until_a_session_opens(engine)
        tree = await client.draft(TREE)
        oracle.check(tree, client.ids, TREE, GREEDY)
        assert (await opening).processed == 149
        await client.close()


async def test_only_the_first_guess_obeys_top_k(path):
    """With top-k 1 the first child is the likeliest token, whatever the noise; the rest are ordered by the noise."""
    greedy, sampled = DraftClient, Sampling(temperature=1.0, top_k=1, seed=8)
    async with drafter_of(path) as engine:
        plain, masked = greedy(engine), DraftClient(engine, sampled)
        free = DraftClient(engine, Sampling(temperature=1.0, seed=8))
        for client in (plain, masked, free):
            await client.open(prompt_of(12))
        best, tree, unmasked = [await client.draft(LevelShape((8,))) for client in (plain, masked, free)]
        assert tree.tokens[1] == best.tokens[1]
        rest = [token for token in unmasked.tokens[1:].tolist() if token != tree.tokens[1]]
        assert tree.tokens[2:].tolist() == rest[:7]
        for client in (plain, masked, free):
            await client.close()


async def test_the_trace_ranks_each_token_of_the_text_since_the_last_tree(path, oracle):
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(10))
        assert len((await client.draft(TREE)).trace) == 0
        for accepted, shape in ((5, TREE), (2, TREE), (0, TREE), (3, NODES), (4, BEAM), (3, DYNAMIC), (2, FEW_OF_MANY)):
            tree = await client.draft(shape)
            before = len(client.ids)
            client.text.extend(walk(tree, accepted, random.Random(accepted)))
            trace = (await client.draft(TREE)).trace.tolist()
            assert len(trace) == len(client.ids) - before
            for index, rank in enumerate(trace):
                scores = oracle.logits([client.ids[: before + index]])
                order = drafter_order(scores, Warp(), None, CANDIDATES)[0].tolist()
                token = client.ids[before + index]
                assert rank == (order.index(token) if token in order else CANDIDATES)
        tree = await client.draft(WIDE)  # with twelve candidates per row
        client.text.extend([int(tree.tokens[10]), 0])
        assert (await client.draft(TREE)).trace[0] == CANDIDATES
        await client.close()


# -- saved states ----------------------------------------------------------------------------------------------------


async def one_turn(engine: DrafterEngine, prompt: list[int], **options: Any) -> tuple[DraftClient, Closed]:
    client = DraftClient(engine, **options)
    await client.open(prompt)
    tree = await client.draft(TREE)
    client.text.extend(walk(tree, 3, random.Random(1)))
    return client, await client.close()


@pytest.mark.parametrize("mark", [0, -1], ids=["mark-at-the-end-of-the-turn", "mark-at-the-states-length"])
async def test_a_saved_state_drafts_bit_for_bit_like_the_session_it_came_from(path, oracle, mark):
    states = MemoryStates()
    async with drafter_of(path, states) as engine:
        first, closed = await one_turn(engine, prompt_of(40))
        assert closed == Closed(len(first.ids) - 1)
    async with drafter_of(path, states) as elsewhere:
        turn = len(first.ids)
        same, longer = DraftClient(elsewhere), DraftClient(elsewhere, marks=(7, turn + mark))
        assert (await same.open(first.ids)).restored == turn - 1
        more = [*first.ids, *prompt_of(21, 4)]
        opened = await longer.open(more)
        assert (opened.restored, opened.processed) == (turn - 1, len(more) - turn)
        tree, again = await same.draft(TREE), await same.draft(TREE)
        assert tree.values.tobytes() == again.values.tobytes()
        oracle.check(tree, first.ids, TREE, GREEDY)
        oracle.check(await longer.draft(TREE), more, TREE, GREEDY)
        await same.close()
        await longer.close()
        assert elsewhere.stats()["states_restored"] == 2


def flip(blob: bytes) -> bytes:
    return blob[:-100] + bytes([blob[-100] ^ 1]) + blob[-99:]


@pytest.mark.parametrize(
    "corrupt",
    [flip, lambda blob: blob[:-1], lambda blob: b"", lambda blob: blob[:4] + b"\x09\x00" + blob[6:]],
    ids=["bit", "cut", "empty", "format"],
)
async def test_a_corrupt_state_counts_as_refused_and_the_draft_is_correct(path, oracle, corrupt):
    states = MemoryStates()
    async with drafter_of(path, states) as engine:
        first, _ = await one_turn(engine, prompt_of(20))
        (name,) = states.blobs
        states.blobs[name] = corrupt(states.blobs[name])
        client = DraftClient(engine)
        opened = await client.open(first.ids)
        assert (opened.restored, engine.stats()["states_refused"]) == (0, 1)
        oracle.check(await client.draft(TREE), client.ids, TREE, GREEDY)
        await client.close()


async def test_a_text_whose_saved_state_cannot_be_loaded_is_prefilled_and_drafts_the_same(path, oracle, monkeypatch):
    async with drafter_of(path, MemoryStates()) as engine:
        first, _ = await one_turn(engine, prompt_of(20))

        def broken(slot, arrays):
            raise RuntimeError("no such slot")

        monkeypatch.setattr(engine._runner.memory, "load", broken)
        client = DraftClient(engine)
        opened = await client.open(first.ids)
        assert (opened.restored, opened.processed) == (0, len(first.ids) - 1)
        oracle.check(await client.draft(TREE), client.ids, TREE, GREEDY)
        await client.close()


async def test_a_state_of_another_model_tenant_or_text_is_not_restored(paths, oracle):
    states = MemoryStates()
    async with drafter_of(paths["mamba"], states) as engine:
        first, _ = await one_turn(engine, prompt_of(20), tenant="a")
        ((name, blob),) = states.blobs.items()
        other = DraftClient(engine, tenant="b")
        assert (await other.open(first.ids)).restored == 0
        await other.close()
    async with drafter_of(paths["mamba2"], states) as engine:
        client = DraftClient(engine, tenant="a")
        assert (await client.open(first.ids)).restored == 0
        await client.close()
        for other_name in set(states.blobs) - {name}:
            states.blobs[other_name] = blob  # a valid blob under the name of another state
        client = DraftClient(engine, tenant="a")
        assert (await client.open(first.ids)).restored == 0
        assert engine.stats()["states_refused"] == 1
        await client.close()


# -- other ends of calls -----------------------------------------------------------------------------------------------


async def test_a_newer_call_replaces_older_ones(path, oracle):
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(10))
        calls = [asyncio.create_task(client.draft(TREE)) for _ in range(3)]
        trees = await asyncio.gather(*calls)
        assert all(tree.rows in (1, TREE.rows) for tree in trees)
        oracle.check(trees[-1], client.ids, TREE, GREEDY)
        await client.close()


async def test_after_cancelled_drafts_the_engine_drafts_correctly(path, oracle):
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(10))
        for _ in range(5):
            before = engine.counters.forwards
            call = asyncio.create_task(client.draft(TREE))
            while engine.counters.forwards == before:  # noqa: ASYNC110 - changed by another thread, without an event
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        oracle.check(await client.draft(TREE), client.ids, TREE, GREEDY)
        await client.close()


async def test_a_cancelled_open_leaves_nothing_behind(path, monkeypatch):
    """The first forward ends only when the call is cancelled, however fast the processor is."""
    async with drafter_of(path, max_sessions=1) as engine:
        run, left = engine._runner.run, threading.Event()
        monkeypatch.setattr(engine._runner, "run", lambda plan: left.wait() and run(plan))
        call = asyncio.create_task(DraftClient(engine).open(prompt_of(2000)))
        await until_a_session_opens(engine)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        left.set()
        client = DraftClient(engine)
        await client.open(prompt_of(3))
        await client.close()


async def test_a_close_during_prefill_ends_the_open(path, monkeypatch):
    """The first forward ends only when the close is queued, however fast the processor is."""
    async with drafter_of(path) as engine:
        client, queued = DraftClient(engine), threading.Event()
        run = engine._runner.run
        monkeypatch.setattr(engine._runner, "run", lambda plan: queued.wait() and run(plan))
        opening = asyncio.create_task(client.open(prompt_of(1000)))
        await until_a_session_opens(engine)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)  # the call is in the engine's inbox
        queued.set()
        await closing
        with pytest.raises(NotFound):
            await opening


async def test_an_unknown_opening_or_another_text_is_not_found(path):
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(10))
        with pytest.raises(NotFound, match="is not open here"):
            await DraftClient(engine, text=client.text).draft(CHAIN)
        with pytest.raises(NotFound, match="digest"):
            await engine.draft(DraftCall(TextUpdate(client.opening, 11, 1, 10, (5,)), CHAIN))
        with pytest.raises(NotFound, match="holds 10 tokens"):
            await engine.draft(DraftCall(TextUpdate(client.opening, 13, 1, 12, (5,)), CHAIN))
        assert (await client.draft(CHAIN)).rows == 5  # the text is unchanged
        await client.close()
        with pytest.raises(NotFound, match="is not open here"):
            await client.draft(CHAIN)


@pytest.mark.parametrize(
    "field, call",
    [
        ("shape", lambda c: c.draft(LevelShape((1,) * 17))),
        ("shape", lambda c: c.draft(LevelShape((3, 3, 3)))),
        ("update.tokens", lambda c: c.engine.draft(DraftCall(TextUpdate(c.opening, 11, 0, 10, (VOCABULARY,)), CHAIN))),
        ("update.base", lambda c: c.engine.draft(DraftCall(TextUpdate(c.opening, 0, 0, 0, ()), CHAIN))),
    ],
    ids=["deep", "rows", "token", "empty"],
)
async def test_a_call_past_the_limits_is_refused_with_the_fields_name(path, field: str, call: Callable):
    async with drafter_of(path, max_rows=32) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(10))
        with pytest.raises(BadRequest) as refused:
            await call(client)
        assert refused.value.field == field
        await client.close()


async def test_a_temperature_too_small_to_divide_by_is_refused(path):
    async with drafter_of(path) as engine:
        with pytest.raises(BadRequest) as refused:
            await DraftClient(engine, Sampling(temperature=1e-9)).open(prompt_of(3))
        assert refused.value.field == "temperature"


async def test_texts_past_max_sessions_are_refused(path):
    async with drafter_of(path, max_sessions=1) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(3))
        with pytest.raises(Overloaded):
            await DraftClient(engine).open(prompt_of(3))
        await client.close()


async def test_a_failed_forward_ends_only_its_own_sessions(path, oracle, monkeypatch):
    async with drafter_of(path) as engine:
        client, other = DraftClient(engine), DraftClient(engine)
        await client.open(prompt_of(3))
        await other.open(prompt_of(4))
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run", lambda plan: 1 / 0)
            with pytest.raises(EngineFailed):
                await client.draft(CHAIN)
        with pytest.raises(NotFound):
            await client.draft(CHAIN)
        oracle.check(await other.draft(TREE), other.ids, TREE, GREEDY)
        await other.close()


async def test_a_failed_scheduler_closes_all_texts_and_serves_new_ones(path, oracle, monkeypatch):
    async with drafter_of(path) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(3))
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "next", lambda: 1 / 0)
            with pytest.raises(EngineFailed):
                await client.draft(CHAIN)
        again = DraftClient(engine)
        await again.open(prompt_of(4))
        oracle.check(await again.draft(TREE), again.ids, TREE, GREEDY)
        await again.close()


async def test_a_close_whose_memory_cannot_be_copied_fails_and_new_texts_are_served(path, monkeypatch):
    async with drafter_of(path, MemoryStates()) as engine:
        client = DraftClient(engine)
        await client.open(prompt_of(3))
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner.memory, "save", lambda slot, tokens: 1 / 0)
            async with asyncio.timeout(10):
                with pytest.raises(EngineFailed):
                    await client.close()
        again = DraftClient(engine)
        await again.open(prompt_of(4))
        assert await again.close() == Closed(3)


async def test_a_stopped_engine_raises_peer_lost(path):
    engine = DrafterEngine.load(path, DrafterOptions(name="tiny"), states=NoStates())
    await engine.start()
    client = DraftClient(engine)
    await client.open(prompt_of(3))
    await engine.stop()
    await engine.stop()
    with pytest.raises(PeerLost):
        await client.draft(CHAIN)


async def test_hello_describes_the_model(path):
    async with drafter_of(path) as engine:
        hello = await engine.hello()
        assert (hello.model, hello.vocabulary, hello.exactness, hello.dtype) == ("tiny", VOCABULARY, "", "float32")
        assert len(hello.fingerprint) == len(hello.tokenizer) == 64


@pytest.mark.parametrize(
    "field, options",
    [
        ("dtype", {"dtype": torch.int8}),
        ("device", {"device": "abacus"}),
        ("max_rows", {"max_rows": 65}),
        ("threads", {"threads": 0}),
    ],
)
def test_an_invalid_option_is_refused_with_its_name(field, options):
    with pytest.raises(BadRequest) as refused:
        DrafterOptions(name="tiny", **options)
    assert refused.value.field == field


async def test_texts_in_bfloat16_share_forwards(path):
    """The node slots of the texts' trees are not adjacent."""
    async with drafter_of(path, dtype=torch.bfloat16) as engine:
        clients = [DraftClient(engine) for _ in range(3)]
        await asyncio.gather(*(client.open(prompt_of(20, i)) for i, client in enumerate(clients)))
        for shape in (TREE, DYNAMIC):
            trees = await asyncio.gather(*(client.draft(shape) for client in clients))
            assert [tree.rows for tree in trees] == [shape.rows] * 3
            for client, tree in zip(clients, trees, strict=True):
                client.text.extend(walk(tree, 2, random.Random(0)))
        await asyncio.gather(*(client.close() for client in clients))


async def test_a_bfloat16_drafter_restores_its_saved_states(path):
    states = MemoryStates()
    async with drafter_of(path, states, dtype=torch.bfloat16) as engine:
        first, closed = await one_turn(engine, prompt_of(20))
        client = DraftClient(engine)
        assert (await client.open(first.ids)).restored == closed.saved
        assert (await client.draft(TREE)).rows == TREE.rows
        await client.close()
