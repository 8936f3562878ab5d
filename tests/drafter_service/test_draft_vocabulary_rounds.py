"""Drawn guesses and structures with drafters whose head has some of the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from dendro.calls import CloseCall, DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.modes import VerificationMode
from dendro.shapes import DynamicShape, LevelShape, TreeShape
from dendro.structure import Structure
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from tree_kernels.sampled_walk import SparseLaw, drawn_order, multi_step

from drafter_service.confidence import CANDIDATES
from drafter_service.engine import DrafterEngine
from drafter_service.models.backbone import Ends
from tests.support import tiny_mamba
from tests.support.cut_heads import cut_head
from tests.support.enumeration import LOSSLESS, Laws, Text, distance, law_of, trees
from tests.support.opened_texts import drafter_of
from tests.support.tiny_drafters import VOCABULARY, make_drafter

pytestmark = pytest.mark.usefixtures("first_calibrations")

FORMS = pytest.mark.parametrize("form", ["eager", "fused"])
FEW, FEW_GUESSED = 5, (0, 2, 3)
"""A target's tokens, and those that a drafter guesses, for enumeration."""
GUESSED = tuple(range(1, VOCABULARY, 2))
BYTES = {token: bytes([31 + token]) for token in range(1, VOCABULARY)}  # 0 is the end of text
serving = partial(drafter_of, token_bytes=lambda: BYTES, closed=False)
PROMPT = (5, 6, 7)


async def drafted(
    engine: DrafterEngine,
    ids: Sequence[int],
    shape: TreeShape,
    sampling: Sampling,
    vocabulary: int = 0,
    structure: Structure | None = None,
    prompt_length: int = 0,
) -> DraftTree:
    """The tree of a text just opened."""
    opening = new_opening()
    given = RequestParameters(
        sampling.of_drafters,
        Limits(10_000),
        "",
        (),
        vocabulary,
        prompt_length=prompt_length,
        structure=structure,
    )
    await engine.open(OpenCall(TextUpdate.of(opening, Tokens(ids), 0), given))
    tree = await engine.draft(DraftCall(TextUpdate.of(opening, Tokens(ids), len(ids)), shape))
    await engine.close(CloseCall(TextUpdate.of(opening, Tokens(ids), len(ids))))
    return tree


# --- drawn guesses ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = tmp_path_factory.mktemp("few")
    tiny_mamba.make_checkpoint(whole, "mamba2", config=tiny_mamba.tiny_config("mamba2", FEW))
    return cut_head(whole, tmp_path_factory.mktemp("cut"), FEW_GUESSED, FEW)


@FORMS
async def test_rounds_of_its_drawn_guesses_have_the_targets_law(few: Path, form: str):
    """By enumeration of all drafts and all coins, with the laws that the engine sends. Texts begin with tokens that
    are never guessed."""
    sampling = Sampling(temperature=1.3, seed=8, mode=VerificationMode.MULTI_STEP)
    prompt, laws = [4, 0, 1], Laws(3, FEW, 3)
    laws.draft = {}
    async with serving(few, form=form) as engine:
        for text in [(), *((token,) for token in FEW_GUESSED)]:
            tree = await drafted(engine, [*prompt, *text], LevelShape((2,)), sampling, FEW)
            (law,) = tree.laws
            assert set(law.ids.tolist()) == {*FEW_GUESSED}
            order = drawn_order(
                SparseLaw(law.ids, law.probabilities), sampling.of_drafters.seed, len(prompt) + len(text), 0
            )
            assert tree.tokens[1:].tolist() == law.ids[order[:2]].tolist()
            laws.draft[text] = SparseLaw(law.ids, law.probabilities / law.probabilities.sum())  # they are of float32
    assert len({tuple(law.probabilities.tolist()) for law in laws.draft.values()}) == len(laws.draft)
    assert distance(law_of(laws, trees(laws, (2, 1)), multi_step), laws.joint()) < LOSSLESS


@FORMS
@pytest.mark.parametrize("shape", [LevelShape((3, 2, 1)), DynamicShape(4, 3, 9)], ids=str)
async def test_drawn_trees_have_the_targets_ids_in_tokens_and_laws(cut: Path, form: str, shape: TreeShape):
    sampling = Sampling(temperature=0.9, seed=3, mode=VerificationMode.MULTI_STEP)
    async with serving(cut, form=form) as engine:
        tree = await drafted(engine, [4, 9, 50, 8], shape, sampling)
    rows = {law.row: law for law in tree.laws}
    assert {*tree.parents[1:].tolist()} == {*rows} and {*tree.tokens[1:].tolist()} <= {*GUESSED}
    for row, law in rows.items():
        children = tree.tokens[tree.children(row)].tolist()
        order = drawn_order(SparseLaw(law.ids, law.probabilities), sampling.of_drafters.seed, 4, row)
        assert children == law.ids[order[: len(children)]].tolist()


# --- structures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_drafter(folder, "mamba2")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    return folder


@pytest.fixture(scope="module")
def cut(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_head(whole, tmp_path_factory.mktemp("cut-whole"), GUESSED, VOCABULARY)


def by_path(tree: DraftTree) -> dict[Text, list[int]]:
    """The guesses below each path of guesses."""
    paths: list[Text] = [()]
    for row in range(1, tree.rows):
        paths.append((*paths[int(tree.parents[row])], int(tree.tokens[row])))
    return {path: tree.tokens[tree.children(row)].tolist() for row, path in enumerate(paths)}


@FORMS
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=11)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [LevelShape((3, 2, 1)), DynamicShape(3, 3, 9)], ids=str)
async def test_guesses_are_those_tokens_of_the_head_that_the_structure_allows(
    whole: Path, cut: Path, monkeypatch: pytest.MonkeyPatch, form: str, sampling: Sampling, shape: TreeShape
):
    """In the order of the whole drafter, whose other tokens come last. Where the head has none of them, the row has no
    children."""
    logits = Ends.logits

    def less(self: Ends, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(self, hidden)
        if self.draft_ids is None:
            found[:, [token for token in range(found.shape[1]) if token not in GUESSED]] = -1e4
        return found

    monkeypatch.setattr(Ends, "logits", less)
    letters = "[a-h]{2,9}(x|yz)?"  # ids 66 to 73: half of them are in the head
    prompt_length, seen = len(PROMPT), 0
    async with (
        serving(whole, form="eager") as one,
        serving(cut, form=form) as other,
    ):
        for structure in (Structure.regex(letters), Structure.choices(["bab", "ba", "aab"])):
            for answer in ((), (66,), (67, 66)):
                given = [*PROMPT, *answer], shape, sampling, 0, structure, prompt_length
                expected, found = by_path(await drafted(one, *given)), by_path(await drafted(other, *given))
                for path, children in found.items():
                    assert children == [token for token in expected[path] if token in GUESSED]
                    seen += not children and len(path) < shape.depth and bool(expected[path])
    assert seen


@FORMS
async def test_where_the_head_has_no_token_that_a_structure_allows_the_tree_is_its_root(cut: Path, form: str):
    async with serving(cut, form=form) as engine:
        opening, ids = new_opening(), [*PROMPT]
        choice = "".join(chr(31 + token) for token in (66, 68, 70, 71, 72))
        given = RequestParameters(
            Sampling(), Limits(10_000), "", (), prompt_length=3, structure=Structure.choices([choice])
        )
        await engine.open(OpenCall(TextUpdate.of(opening, Tokens(ids), 0), given))
        held, guesses = len(ids), []
        for token in (66, 68, 70, 71, 72):
            tree = await engine.draft(DraftCall(TextUpdate.of(opening, Tokens(ids), held), LevelShape((2, 1))))
            guesses.append(tree.tokens[1:].tolist())
            assert all(rank in (0, CANDIDATES) for rank in tree.trace.tolist())
            held, ids = len(ids), [*ids, token]
    assert guesses == [[], [], [], [71], []]
