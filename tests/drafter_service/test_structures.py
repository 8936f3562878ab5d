"""Drafts of structured answers: a row's guesses are the best of the tokens that the structure allows after its path."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dendro.daemon_threads import MaskThreads
from dendro.errors import BadRequest
from dendro.grammars import Grammars
from dendro.modes import VerificationMode
from dendro.shapes import BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape, UntilShape
from dendro.state import MemoryStates, NoStates, StateStore
from dendro.structure import Structure
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.noise import gumbel_noise

from drafter_service import structures, texts
from drafter_service.engine import DrafterEngine
from drafter_service.models import DrafterModel, load_model
from drafter_service.options import DrafterOptions
from drafter_service.plan import Chains
from drafter_service.structures import DraftStructure, keep_allowed
from tests.support.faults import Panic
from tests.support.opened_texts import OpenedText, drafter_of
from tests.support.tiny_drafters import VOCABULARY, Family, make_drafter

pytestmark = pytest.mark.usefixtures("first_calibrations")

END = 0  # of no text
BYTES = {token: bytes([31 + token]) for token in range(1, VOCABULARY)}
PROMPT = [5, 6, 7]
TREE, CHAIN = LevelShape((3, 2, 1)), LevelShape((1, 1, 1, 1))
SHAPES: tuple[TreeShape, ...] = (
    TREE,
    CHAIN,
    NodeShape((3, 2, 0, 1, 0, 2, 1)),
    BeamShape(4, 5),
    DynamicShape(5, 4, 18),
    UntilShape(DynamicShape(3, 5, 12), 0.9, 0.02),
)
STRUCTURES = (
    Structure.regex("[a-h]{2,9}(x|yz)?"),
    Structure.choices(["yes", "no", "never mind", "north by northwest"]),
    Structure.json_schema(
        {
            "type": "object",
            "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 999}, "name": {"enum": ["ab", "cd"]}},
            "required": ["size", "name"],
            "additionalProperties": False,
        }
    ),
)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.9, seed=11, sample_index=2)
FILTERED = Sampling(temperature=1.0, top_k=3, top_p=0.9, seed=5)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
SESSIONS = 6


@pytest.fixture(scope="module", params=["mamba2", "llama", pytest.param("mamba", marks=pytest.mark.long)])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mambas are fused where kernels can be compiled."""
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family)
    make_drafter(folder, family)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {END}}}')
    return folder


@asynccontextmanager
async def following(
    path: Path, states: StateStore | None = None, token_bytes: dict[int, bytes] | None = BYTES, **options: Any
) -> AsyncIterator[DrafterEngine]:
    """A running engine of a tokenizer with these bytes."""
    reads = None if token_bytes is None else lambda: token_bytes
    async with drafter_of(path, states, reads, max_sessions=SESSIONS, **options) as engine:
        yield engine


def structured_text(
    engine: DrafterEngine, ids: list[int], structure: Structure | None, sampling: Sampling = GREEDY, **more: Any
) -> OpenedText:
    return OpenedText(engine, ids, sampling, structure=structure, **{"prompt_length": len(PROMPT)} | more)


async def drafted(engine: DrafterEngine, ids: list[int], structure: Structure | None, shape: TreeShape, **more: Any):
    """The tree of a text just opened."""
    text = structured_text(engine, ids, structure, **more)
    await text.open()
    tree = await text.draft(shape)
    await text.close()
    return tree


def same(one: DraftTree, other: DraftTree) -> bool:
    return (
        one.tokens.tolist() == other.tokens.tolist()
        and one.parents.tolist() == other.parents.tolist()
        and np.allclose(one.values, other.values, atol=1e-4)
    )


class Permitted:
    """What a structure allows after an answer, by a parser of its own."""

    def __init__(self, grammars: Grammars, structure: Structure, ends: tuple[int, ...] = (END,)) -> None:
        self.grammars, self.structure, self.ends = grammars, structure, ends

    async def after(self, answer: list[int]) -> set[int]:
        if answer and answer[-1] in self.ends:
            return set()
        text = (await self.grammars.compiled(self.structure)).text(0, self.ends)
        try:
            text.follow(answer)
        except BadRequest:
            return set()
        found = text.masks(DraftTree.root_only(0)).allowed(0)
        return set() if found is None else set(np.flatnonzero(found).tolist())

    async def answer(self, length: int, seed: int) -> list[int]:
        """Tokens that it allows, drawn evenly; fewer where it is complete."""
        rng, found = np.random.default_rng(seed), list[int]()
        while len(found) < length and (tokens := sorted(await self.after(found) - {END})):
            found.append(int(rng.choice(tokens)))
        return found


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: BYTES, VOCABULARY)


@torch.inference_mode()
def scores_after(model: DrafterModel, ids: list[int], sampling: Sampling) -> np.ndarray:
    """[V] logits / T plus noise of the next token, by a prefill of the whole text."""
    zeros = np.zeros(1, np.int64)
    rows = Chains(np.array([ids]), np.array([len(ids)]), zeros, zeros, np.ones(1, np.int64), zeros[:0])
    logits = model.logits(model.memory(2, 1).chain(rows)[:, -1])[0].double().numpy()
    if sampling.temperature == 0:
        return logits
    noise = gumbel_noise(sampling.seed, [len(ids)], len(logits), sampling.sample_index)[0].double().numpy()
    return logits / sampling.temperature + noise


def paths_of(tree: DraftTree) -> list[list[int]]:
    """Of each row, the guesses above it and its own."""
    paths: list[list[int]] = [[]]
    for row in range(1, tree.rows):
        paths.append([*paths[int(tree.parents[row])], int(tree.tokens[row])])
    return paths


async def check_guesses(
    tree: DraftTree, ids: list[int], permitted: Permitted, model: DrafterModel, sampling: Sampling, shape: TreeShape
) -> None:
    """Each row's guesses are the best of those that may follow it, in their order; of a `LevelShape`, as many as there
    are, up to its width. The first is drawn from a filtered law, which is not computed here."""
    for row, path in enumerate(paths_of(tree)):
        after = await permitted.after([*ids[len(PROMPT) :], *path])
        children = tree.tokens[tree.children(row)].tolist()
        assert set(children) <= after, path
        if isinstance(shape, LevelShape) and len(path) < shape.depth:
            assert len(children) == min(shape.widths[len(path)], len(after)), path
        scores = scores_after(model, [*ids, *path], sampling)
        ranked = children[1:] if sampling is FILTERED else children
        left = sorted(scores[token] for token in after - set(children))
        order = [scores[token] for token in ranked]
        assert all(better > worse - 1e-3 for better, worse in zip(order, order[1:], strict=False)), path
        assert not order or not left or order[-1] > left[-1] - 1e-3, path


@SAMPLINGS
async def test_guesses_are_the_best_of_the_tokens_that_the_structure_allows_after_their_paths(
    drafter: Path, grammars: Grammars, sampling: Sampling
):
    """At the beginning of an answer, inside it and near its end; a chain of the text's tokens before the root, or the
    root alone, is the first forward."""
    model = load_model(drafter, torch.float32, torch.device("cpu"), form="eager")[0]
    async with following(drafter) as engine:
        for number, structure in enumerate(STRUCTURES):
            permitted = Permitted(grammars, structure)
            whole = await permitted.answer(14, number)
            for place, shape in enumerate(SHAPES):
                ids = [*PROMPT, *whole[: place * len(whole) // (len(SHAPES) - 1)]]
                text = structured_text(engine, ids[: max(len(PROMPT), len(ids) - 1 - place % 3)], structure, sampling)
                await text.open()
                text.ids = ids
                await check_guesses(await text.draft(shape), ids, permitted, model, sampling, shape)
                await text.close()


@SAMPLINGS
async def test_after_any_history_a_tree_is_that_of_a_structured_text_just_opened(
    drafter: Path, grammars: Grammars, sampling: Sampling
):
    """Tokens in and outside the last tree, cuts, and repeated calls."""
    rng = np.random.default_rng(3)
    async with following(drafter) as engine:
        permitted = Permitted(grammars, STRUCTURES[2])
        text = structured_text(engine, [*PROMPT], STRUCTURES[2], sampling)
        await text.open()
        for step in range(14):
            shape = SHAPES[step % len(SHAPES)]
            tree = await text.draft(shape)
            assert same(tree, await drafted(engine, list(text.ids), STRUCTURES[2], shape, sampling=sampling))
            if step % 5 == 4:
                text.ids = text.ids[: max(len(PROMPT), len(text.ids) - 4)]
                text.held = min(text.held, len(text.ids))
                continue
            if step % 5 == 3:
                continue
            paths = paths_of(tree)
            text.ids = [*text.ids, *paths[int(rng.integers(tree.rows))]]
            after = sorted(await permitted.after(text.ids[len(PROMPT) :]) - {END})
            if not after:  # complete, or ended
                text.ids = [*PROMPT]
                text.held = len(PROMPT)
                continue
            text.ids.append(int(rng.choice(after)))
        await text.close()


async def test_texts_that_draft_together_have_the_trees_that_they_have_alone(drafter: Path):
    kinds = [*STRUCTURES, None, STRUCTURES[0]]
    samplings = [GREEDY, SAMPLED, FILTERED, SAMPLED, SAMPLED]
    async with following(drafter) as engine:
        texts = [
            structured_text(engine, [*PROMPT], kind, sampling) for kind, sampling in zip(kinds, samplings, strict=True)
        ]
        for text in texts:
            await text.open()
        for shape in SHAPES:
            trees = await asyncio.gather(*(text.draft(shape) for text in texts))
            for text, tree in zip(texts, trees, strict=True):
                alone = await drafted(engine, text.ids, text.structure, shape, sampling=text.sampling)
                assert same(tree, alone)
        for text in texts:
            await text.close()


async def test_a_structured_text_restored_from_its_own_or_a_plain_texts_state_has_the_same_trees(
    drafter: Path, grammars: Grammars
):
    permitted, states, plain = Permitted(grammars, STRUCTURES[2]), MemoryStates(), MemoryStates()
    ids = [*PROMPT, *await permitted.answer(9, 4)]
    for store, structure in ((states, STRUCTURES[2]), (plain, None)):
        async with following(drafter, store) as engine:
            text = structured_text(engine, ids[:5], structure)
            await text.open()
            await text.draft(TREE)
            text.ids = ids
            tree = await text.draft(TREE)
            assert (await text.close()).saved == len(ids) - 1
            wanted = await drafted(engine, ids, STRUCTURES[2], TREE)
            assert structure is None or same(tree, wanted)
    assert states.blobs.keys() == plain.blobs.keys()
    for store in (states, plain):
        async with following(drafter, store) as elsewhere:
            text = structured_text(elsewhere, ids, STRUCTURES[2])
            assert (await text.open()).restored == len(ids) - 1
            assert same(await text.draft(TREE), wanted)
            await text.close()


async def test_a_forced_text_is_guessed_with_certainty_and_nothing_is_guessed_past_its_end(drafter: Path):
    only = Structure.choices(["abcdef"])
    async with following(drafter) as engine:
        for taken in range(6):
            answer = [ord(letter) - 31 for letter in "abcdef"]
            tree = await drafted(engine, [*PROMPT, *answer[:taken]], only, TREE)
            assert tree.tokens[1:].tolist() == answer[taken : taken + 3] and tree.depth == tree.rows - 1
            assert (tree.values > math.log(0.999)).all()
        assert (await drafted(engine, [*PROMPT, *answer], only, TREE)).rows == 1


async def test_the_end_of_text_is_guessed_only_where_the_answer_may_end_and_is_not_ignored(drafter: Path):
    short, wide = Structure.regex("a{2,3}"), LevelShape((3, 3, 3))
    letter = ord("a") - 31
    async with following(drafter) as engine:
        found = [
            set((await drafted(engine, [*PROMPT, *[letter] * count], short, wide, ignore_end=ignored)).tokens[1:])
            for count, ignored in ((0, False), (2, False), (2, True))
        ]
        assert [END in tokens for tokens in found] == [True, True, False] and found[2] == {letter}
        first = (await drafted(engine, PROMPT, short, LevelShape((3,)))).tokens[1:].tolist()
        assert first == [letter]


async def test_a_text_tokens_rank_is_that_among_the_allowed_tokens(drafter: Path, grammars: Grammars):
    """Of a greedy answer all ranks are 0: of the tokens in the last tree, and of those after it."""
    model = load_model(drafter, torch.float32, torch.device("cpu"), form="eager")[0]
    letters = Structure.regex("[a-h]{30}")
    permitted = Permitted(grammars, letters)
    async with following(drafter) as engine:
        text = structured_text(engine, [*PROMPT], letters)
        await text.open()
        traces = []
        for more in (3, 2, 3):
            traces.append((await text.draft(LevelShape((1, 1)))).trace.tolist())
            for _ in range(more):
                scores = scores_after(model, text.ids, GREEDY)
                text.ids = [*text.ids, max(await permitted.after(text.ids[len(PROMPT) :]) - {END}, key=scores.item)]
        await text.close()
    assert traces == [[], [0, 0, 0], [0, 0]]


# -- what a drafter cannot follow ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "structure, answer, reason",
    [
        (Structure.regex("a["), [], "its regex cannot be followed"),
        (Structure.json_schema("{"), [], "its json_schema cannot be followed"),
        (Structure.regex("~{3}z"), [], "its regex cannot be followed"),
        (Structure.regex("ab"), [40, 41], "it does not allow the answer so far"),
        (Structure.regex("a"), [END], "it does not allow the answer so far"),
    ],
)
async def test_a_structure_that_cannot_be_followed_is_named_in_the_log_and_guesses_are_of_any_tokens(
    drafter: Path, caplog: pytest.LogCaptureFixture, structure: Structure, answer: list[int], reason: str
):
    """As those that a router with other rules, or a lying one, sends: the drafter lacks the token `~`."""
    known = {token: text for token, text in BYTES.items() if text != b"~"}
    async with following(drafter, token_bytes=known) as engine:
        with caplog.at_level(logging.WARNING, "dendro.drafter"):
            found = [await drafted(engine, [*PROMPT, *answer], structure, shape) for shape in SHAPES]
        assert all(
            line.startswith(f"drafter tiny: guesses without the structure of an answer: {reason}")
            for line in caplog.messages
        ) and len(caplog.messages) == len(SHAPES)
        for tree, shape in zip(found, SHAPES, strict=True):
            assert same(tree, await drafted(engine, [*PROMPT, *answer], None, shape))


async def test_an_answer_that_leaves_its_structure_is_drafted_on_without_it(drafter: Path, caplog):
    async with following(drafter) as engine:
        text = structured_text(engine, [*PROMPT], STRUCTURES[1])
        await text.open()
        await text.draft(TREE)
        text.ids = [*PROMPT, 40, 41]
        for _ in range(3):
            assert same(await text.draft(TREE), await drafted(engine, text.ids, None, TREE))
            text.ids = [*text.ids, 42]
        await text.close()
        assert len(caplog.messages) == 1 and "it does not allow the answer so far" in caplog.text


@pytest.mark.parametrize("rows", [0, 1, 3])
async def test_a_structure_whose_masks_take_long_is_given_up_in_any_row(drafter: Path, caplog, monkeypatch, rows: int):
    """So that it delays the other texts of a drafter no more; the tree it grows goes on with any tokens."""
    monkeypatch.setattr(structures, "SLOW_ROW_S", -1.0)
    monkeypatch.setattr(structures, "PATIENCE_S", rows + 0.9)
    async with following(drafter) as engine:
        text = structured_text(engine, [*PROMPT], STRUCTURES[1])  # it allows fewer guesses than the first tree has
        await text.open()
        for shape in SHAPES:
            assert (await text.draft(shape)).rows > 1
        assert same(await text.draft(TREE), await drafted(engine, PROMPT, None, TREE))
        await text.close()
    assert len(caplog.messages) == 1 and "guesses without the structure of an answer: its masks take" in caplog.text


async def test_a_drafter_without_the_bytes_of_tokens_or_without_llguidance_drafts_all_the_same(
    drafter: Path, caplog, monkeypatch
):
    async with following(drafter, token_bytes=None) as engine:
        wanted = await drafted(engine, PROMPT, None, TREE)
        assert same(await drafted(engine, PROMPT, STRUCTURES[0], TREE), wanted) and not caplog.messages
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with following(drafter) as engine:
        assert same(await drafted(engine, PROMPT, STRUCTURES[0], TREE), wanted)
        assert "cannot be followed" in caplog.text


async def test_drawn_guesses_keep_the_form_of_their_tree(drafter: Path):
    """In those modes a structure is refused before a drafter sees it."""
    drawn = Sampling(temperature=1.0, seed=3, mode=VerificationMode.MULTI_STEP)
    async with following(drafter) as engine:
        tree = await drafted(engine, PROMPT, Structure.choices(["a"]), TREE, sampling=drawn)
        assert tree.rows == TREE.rows and tree.laws


def test_candidates_that_a_mask_lacks_are_removed_with_their_scores():
    mask = np.packbits([1, 0, 0, 1, 0, 0, 0, 0], bitorder="little")
    candidates, scores = [[3, 1, 0, 200], [3, 1], [2]], [[4.0, 3.0, 2.0, 1.0], [4.0, 3.0], [4.0]]
    keep_allowed([mask, None, mask], candidates, scores)
    assert candidates == [[3, 0], [3, 1], []] and scores == [[4.0, 2.0], [4.0, 3.0], []]


class HeldWork:
    """Holds one text's work on a part of its structure, in whatever thread, until it is `free`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: str, seconds: float = 10.0) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        inner = getattr(DraftStructure, part)

        def held(*given: Any) -> Any:
            self.begun.set()
            self.free.wait(seconds)
            return inner(*given)

        monkeypatch.setattr(DraftStructure, part, held)


@pytest.mark.parametrize("part", ["after_text", "of_level"])
async def test_no_other_text_waits_for_masks_and_their_own_has_the_same_tree(drafter: Path, monkeypatch, part: str):
    async with following(drafter) as engine:
        wanted = [await drafted(engine, PROMPT, structure, TREE) for structure in (STRUCTURES[0], None)]
        held = HeldWork(monkeypatch, part)
        structured, plain = (structured_text(engine, [*PROMPT], structure) for structure in (STRUCTURES[0], None))
        await structured.open()
        await plain.open()
        waiting = asyncio.ensure_future(structured.draft(TREE))
        await asyncio.to_thread(held.begun.wait, 10)
        for _ in range(3):
            assert same(await plain.draft(TREE), wanted[1])
        assert not waiting.done()
        held.free.set()
        assert same(await waiting, wanted[0])
        await structured.close()
        await plain.close()


@pytest.mark.parametrize("part", ["after_text", "of_level"])
async def test_a_text_whose_masks_do_not_come_is_drafted_without_its_structure(
    drafter: Path, monkeypatch, caplog, part: str
):
    monkeypatch.setattr(texts, "LATE_S", 0.02)
    async with following(drafter) as engine:
        wanted = await drafted(engine, PROMPT, None, TREE)
        held = HeldWork(monkeypatch, part)
        text = structured_text(engine, [*PROMPT], STRUCTURES[0])
        await text.open()
        assert (await text.draft(TREE)).guesses
        assert not held.free.is_set() and "drafted without its structure, whose masks take more" in caplog.text
        assert same(await text.draft(TREE), wanted)
        held.free.set()
        await text.close()


async def test_a_text_whose_masks_took_long_is_not_waited_for_and_its_masks_are_used(drafter: Path, monkeypatch):
    waits, wait = list[int](), MaskThreads.wait

    def counting(threads: MaskThreads, works: Collection[Any]) -> None:
        waits.append(len(works))
        wait(threads, works)

    async with following(drafter) as engine:
        wanted = await drafted(engine, PROMPT, STRUCTURES[0], TREE)
        monkeypatch.setattr(MaskThreads, "wait", counting)
        assert same(await drafted(engine, PROMPT, STRUCTURES[0], TREE), wanted)
        assert sum(waits) == TREE.depth
        waits.clear()
        monkeypatch.setattr(structures, "WAIT_S", 0.0)  # all masks after the first take longer than that
        assert same(await drafted(engine, PROMPT, STRUCTURES[0], TREE), wanted)
        assert sum(waits) == 1


@pytest.mark.parametrize("kind", [RuntimeError, Panic], ids=["exception", "panic"])
async def test_a_structure_that_raises_inside_a_tree_leaves_the_rest_of_it_without_masks(
    drafter: Path, monkeypatch, kind: type[BaseException]
):
    """Alone, where a compiled drafter could run all other levels at once, had the tree its whole shape so far."""
    one = Structure.regex("(a|bcdef)x{9}")

    def raising(*given: Any) -> None:
        raise kind("planted")

    async with following(drafter) as engine:
        monkeypatch.setattr(DraftStructure, "of_level", raising)
        tree = await drafted(engine, PROMPT, one, TREE)
    counts = np.bincount(tree.depths)
    assert counts.tolist() == [1, 2, 4, 4] and {BYTES[token] for token in tree.tokens[1:3].tolist()} == {b"a", b"b"}


@pytest.mark.parametrize("part", ["after_text", "of_level"])
@pytest.mark.parametrize("kind", [RuntimeError, Panic], ids=["exception", "panic"])
async def test_a_structure_that_raises_leaves_its_text_without_masks_and_changes_no_other(
    tmp_path, monkeypatch, kind, part
):
    make_drafter(tmp_path, "mamba2")
    options = DrafterOptions(name="tiny", max_sessions=6)
    engine = DrafterEngine.load(tmp_path, options, states=NoStates(), token_bytes=lambda: BYTES)
    await engine.start()
    shape = LevelShape((3, 2, 1))
    plain = structured_text(engine, list(PROMPT), None)
    await plain.open()
    alone = await plain.draft(shape)
    structured = structured_text(engine, list(PROMPT), STRUCTURES[0])
    await structured.open()

    def raising(self, *given):
        raise kind("planted")

    monkeypatch.setattr(f"drafter_service.structures.DraftStructure.{part}", raising)
    found, other = await asyncio.gather(plain.draft(shape), structured.draft(shape))
    assert same(found, alone) and other.guesses
    await engine.stop()
