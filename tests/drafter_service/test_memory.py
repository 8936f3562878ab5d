"""The memories of texts and trees against one chain over each path, for every kind of memory.

Several texts share every forward, at different depths. Trees are random. A text goes through its tree in full, in part,
by the root alone or not at all, and continues in chains.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_service.models import HYBRIDS, DrafterModel, load_model
from drafter_service.models.memory import DrafterMemory
from drafter_service.plan import EMPTY_TEXT, Chains, Level, TextFold
from drafter_service.recorded_levels import RecordableMemory, RecordedLevels
from tests.support import tiny_hybrids
from tests.support.recordings import RunAgain
from tests.support.text_cases import TextCase, chains_of, ints, level_of
from tests.support.tiny_drafters import FAMILIES, VOCABULARY, Family, make_drafter

TEXTS, NODES = 4, 64


FORMS = [*((family, "eager") for family in FAMILIES), ("mamba", "fused"), ("mamba2", "fused")]


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DrafterModel:
    family, form = request.param
    return load_model(checkpoint_of(family, tmp_path_factory), torch.float32, torch.device("cpu"), form=form)[0]


def checkpoint_of(family: Family, folders: pytest.TempPathFactory) -> Path:
    folder = folders.mktemp(family)
    make_drafter(folder, family)
    return folder


def read(model: DrafterModel, text: list[int]) -> tuple[torch.Tensor, DrafterMemory]:
    """Logits after a text run as one chain in a new memory, and that memory, with the text in slot 1."""
    memory = model.memory(texts=2, nodes=1)
    rows = Chains(np.array([text]), ints(len(text)), ints(0), ints(EMPTY_TEXT), ints(1), ints())
    return model.logits(memory.chain(rows)[0, -1:])[0], memory


def compare_text(model: DrafterModel, memory: DrafterMemory, case: TextCase) -> None:
    saved = memory.save(case.slot, case.covers)
    straight = read(model, case.ids[: case.covers])[1].save(1, case.covers)
    assert saved.keys() == straight.keys()
    for name in saved:
        error = np.linalg.norm(saved[name] - straight[name])
        assert error <= 1e-5 * np.linalg.norm(straight[name]), (name, case.covers)


@pytest.mark.parametrize("seed", range(4))
def test_every_node_and_every_fold_equals_one_chain_over_its_text(model, seed):
    """A text may discard its tree instead of folding it. A chain may end in a root."""
    compare_rounds(model, seed, 12)


@pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.long)])
def test_every_node_and_every_fold_of_a_hybrid_equals_one_chain_over_its_text(tmp_path, rounds):
    make_drafter(tmp_path, "granitemoehybrid")
    compare_rounds(load_model(tmp_path, torch.float32, torch.device("cpu"))[0], 0, rounds)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(tiny_hybrids.SETTINGS.keys() & {*HYBRIDS}))
def test_every_node_and_every_fold_of_each_hybrid_family_equals_one_chain_over_its_text(tmp_path, family):
    tiny_hybrids.make_checkpoint(tmp_path, family)
    compare_rounds(load_model(tmp_path, torch.float32, torch.device("cpu"))[0], 1, 8)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_every_node_of_recorded_levels_equals_one_chain_over_its_text(family, tmp_path_factory):
    model, _ = load_model(checkpoint_of(family, tmp_path_factory), torch.float32, torch.device("cpu"), form="eager")
    graphs = RunAgain()

    def levels_of(memory: DrafterMemory, nodes: int) -> Callable[[Level], torch.Tensor]:
        assert isinstance(memory, RecordableMemory)
        return RecordedLevels(memory, nodes, torch.device("cpu"), graphs).level

    compare_rounds(model, 0, 12, levels_of)
    assert graphs.replays > 2 * graphs.recordings > 0


@torch.inference_mode()
def compare_rounds(
    model: DrafterModel,
    seed: int,
    rounds: int,
    levels_of: Callable[[DrafterMemory, int], Callable[[Level], torch.Tensor]] | None = None,
) -> None:
    """levels_of: makes what runs the levels, with the number of a node slot that no tree has; None: the memory does"""
    rng = np.random.default_rng(seed)
    memory = model.memory(TEXTS, NODES if levels_of is None else NODES + 1)
    level = memory.level if levels_of is None else levels_of(memory, NODES)
    cases = [TextCase(slot, rng.integers(0, VOCABULARY, rng.integers(1, 20)).tolist()) for slot in range(1, TEXTS)]
    for _ in range(rounds):
        free = list(range(1, NODES))
        for case in cases:
            case.ids += rng.integers(0, VOCABULARY, 3 if case.covers == len(case.ids) else 1).tolist()
            case.tokens, case.slots, case.parents, case.level = [], [], [], []
        late = [case for case in cases if len(case.ids) - case.covers > 1]
        if late:
            rooted = bool(rng.random() < 0.7)
            lengths = [len(case.ids) - case.covers - (not rooted) for case in late]
            hidden = memory.chain(chains_of(late, lengths, [free.pop() for _ in late] if rooted else []))
            for case, length, row in zip(late, lengths, hidden, strict=True):
                torch.testing.assert_close(
                    model.logits(row[length - 1 : length])[0], read(model, case.ids[: case.covers + length])[0],
                    atol=1e-4, rtol=0,
                )  # fmt: skip
                case.covers += length - rooted
                compare_text(model, memory, case)
        for _ in range(rng.integers(1, 6)):  # not every text in every level, so that their depths differ
            growing = [case for case in cases if rng.random() < 0.8] or cases
            for case in growing:
                case.grow(rng, free, VOCABULARY)
            logits = model.logits(level(level_of(growing)))
            nodes = [(case, node) for case in growing for node in case.level]
            for (case, node), found in zip(nodes, logits, strict=True):
                torch.testing.assert_close(found, read(model, case.text(node))[0], atol=1e-4, rtol=0)
        folds = []
        for case in cases:
            if not case.slots or rng.random() < 0.2:
                continue
            path = case.path(int(rng.integers(0, len(case.slots))))
            source = case.slot if case.covers else EMPTY_TEXT
            folds.append(TextFold(case.covers, source, case.slot, tuple(case.slots[node] for node in path)))
            case.ids[case.covers :] = [case.tokens[node] for node in path]
            case.covers = len(case.ids)
        if folds:
            memory.fold(folds)
        for case in cases:
            if case.covers:
                compare_text(model, memory, case)


@pytest.mark.parametrize("form", ["eager", "fused"])
def test_a_mamba2_node_holds_inputs_and_no_state(tmp_path_factory, form):
    """Per layer, a node holds the convolution's inputs, x, B and dt, in float32. Four nodes are smaller than a text."""
    model, _ = load_model(checkpoint_of("mamba2", tmp_path_factory), torch.float32, torch.device("cpu"), form=form)
    heads, width, size, groups, layers, taps = 4, 16, 8, 2, 2, 4
    x, B = heads * width, groups * size
    few, many = model.memory(texts=3, nodes=1), model.memory(texts=3, nodes=1 + 64)
    assert many.node_bytes == layers * 4 * ((x + 2 * B) + x + B + heads)
    assert many.text_bytes(10) == layers * 4 * (x * size + (taps - 1) * (x + 2 * B))
    assert few.text_bytes(10_000) == many.text_bytes(10)
    assert held(many) - held(few) == 64 * many.node_bytes
    assert many.node_bytes * 4 < many.text_bytes(10)


def held(memory: DrafterMemory) -> int:
    """Bytes of all tensors of a memory, at any depth of attributes, each storage counted once."""
    found: dict[int, int] = {}
    seen: set[int] = set()

    def walk(thing: object) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, list | tuple):
            for each in thing:
                walk(each)
        elif type(thing).__name__ in ("InputMemory", "NodeStates", "States", "FusedInputMemory"):
            for name, each in vars(thing).items():
                if name != "_model":
                    walk(each)

    walk(memory)
    return sum(found.values())
