"""Recorded levels of a drafter: few sizes, no waiting for the device, the guesses of levels that are not recorded. That
each node is computed right is tested in `test_memory.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dendro.text import Sampling

from drafter_service.models import load_model
from drafter_service.plan import EMPTY_TEXT, Chains, DraftPlan, TextFold
from drafter_service.recorded_levels import LevelSize, RecordedFolds, RecordedLevels
from drafter_service.runner import DraftRunner
from tests.support.launches import launches
from tests.support.recordings import RunAgain
from tests.support.text_cases import TextCase, ints, level_of
from tests.support.tiny_drafters import VOCABULARY, make_drafter

CPU = torch.device("cpu")
TEXTS, NODES = 4, 64


@pytest.fixture(scope="module", params=["mamba", "mamba2"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_drafter(folder, request.param)
    return load_model(folder, torch.float32, CPU, form="eager")[0]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def case_of(rng, slot, levels):
    """A text of three tokens that a chain has read, and its tree with so many levels after the root."""
    case = TextCase(slot, rng.integers(0, VOCABULARY, 4).tolist(), covers=3)
    free = list(range(1 + 16 * (slot - 1), 1 + 16 * slot))
    for _ in range(1 + levels):
        case.grow(rng, free, VOCABULARY)
    return case


def read(memory, cases):
    tokens = np.array([case.ids[:3] for case in cases])
    count = len(cases)
    lengths, starts, source = ints(*[3] * count), ints(*[0] * count), ints(*[EMPTY_TEXT] * count)
    memory.chain(Chains(tokens, lengths, starts, source, ints(*(case.slot for case in cases)), ints()))


def recorded(model, cases, graphs):
    memory = model.memory(TEXTS, NODES + 1)
    read(memory, cases)
    return RecordedLevels(memory, NODES, CPU, graphs)


def test_no_level_waits_for_the_device_and_two_of_one_size_launch_the_same(model, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    rng, graphs = np.random.default_rng(0), RunAgain()
    first = [case_of(rng, 1, 0), case_of(rng, 2, 0)]
    second = [case_of(rng, 3, 0), case_of(rng, 1, 0)]
    levels = recorded(model, [*first, second[0]], graphs)
    found = []
    for cases in (first, second):
        levels.level(level_of(cases))
        with launches(monkeypatch) as launched:
            graphs.steps[0]()
        found.append(launched)
    assert found[0] == found[1] and graphs.recordings == 1 and graphs.replays == 2


def test_a_text_that_is_alone_and_one_among_others_have_the_same_level(model):
    rng = np.random.default_rng(3)
    cases = [case_of(rng, slot, 0) for slot in (1, 2, 3)]
    together, alone = (recorded(model, cases, RunAgain()) for _ in range(2))
    hidden = together.level(level_of(cases))
    for row, case in zip(hidden, cases, strict=True):
        torch.testing.assert_close(alone.level(level_of([case]))[0], row, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "new, before, expected",
    [
        ([1], [0], (1, 1, 8)),
        ([3], [1], (1, 4, 8)),
        ([1, 5], [7, 2], (2, 8, 16)),
        ([4, 4, 4], [9, 1, 30], (4, 4, 64)),
    ],
)
def test_a_level_is_padded_to_powers_of_two(new, before, expected):
    cases = [
        TextCase(1, [1], tokens=[0] * len(nodes), slots=nodes, parents=[-1] * len(nodes), level=nodes[had:])
        for had, nodes in ((had, list(range(had + count))) for had, count in zip(before, new, strict=True))
    ]
    size = LevelSize.of(level_of(cases))
    assert (size.trees, size.new, size.nodes) == expected and size.rows == size.trees * size.new
    assert LevelSize.of_rows(level_of(cases)).rows >= sum(new)


def test_a_level_that_cannot_be_recorded_is_run_and_others_keep_their_recording(model, caplog):
    rng, graphs = np.random.default_rng(0), RunAgain(fails={0, 1})
    case = case_of(rng, 1, 0)
    levels = recorded(model, [case], graphs)
    truth = recorded(model, [case], RunAgain()).level(level_of([case]))
    for _ in range(2):
        assert torch.equal(levels.level(level_of([case])), truth)
    assert graphs.attempts == 2 and caplog.text.count("were not recorded") == 2
    case.grow(rng, [40, 41, 42], VOCABULARY)
    while len(case.level) == 1:
        case.grow(rng, [43, 44, 45, 46], VOCABULARY)
    levels.level(level_of([case]))
    assert graphs.recordings == 1


def test_a_runner_with_recorded_levels_guesses_what_one_without_does(model):
    rng = np.random.default_rng(5)
    cases = [case_of(rng, slot, 0) for slot in (1, 2)]
    found = []
    for graphs in (None, RunAgain()):
        runner = DraftRunner(model, TEXTS, NODES, CPU, graphs=graphs)
        for session, temperature in enumerate((0.0, 1.0)):
            runner.admit(session, Sampling(temperature=temperature, seed=4), runner.vocabulary)
        read(runner.memory, cases)
        outcome = runner.run(DraftPlan(level_of(cases), None, (1, 1), (0, 1), (4, 4), 5))
        found.append(outcome)
        assert graphs is None or graphs.recordings == 1
    assert (found[0].candidates == found[1].candidates).all()
    assert np.allclose(found[0].scores, found[1].scores, atol=1e-4)


def folded(model, fold, cases):
    """What the texts of some cases hold after a level of nodes and two folds: of all paths, then of the first again,
    which starts from the empty text."""
    memory = model.memory(TEXTS, NODES + 1)
    read(memory, cases)
    for upto in range(1, 4):
        parts = [TextCase(c.slot, c.ids, c.covers, c.tokens[:upto], c.slots[:upto], c.parents[:upto]) for c in cases]
        for part in parts:
            part.level = [upto - 1]
        memory.level(level_of(parts))
    folding = fold(memory)
    folding([TextFold(3, case.slot, case.slot, tuple(case.slots[:count])) for count, case in enumerate(cases, 1)])
    folding([TextFold(0, EMPTY_TEXT, cases[0].slot, (cases[0].slots[0],))])
    return [memory.save(slot, 6) for slot in (EMPTY_TEXT, *(case.slot for case in cases))]


@pytest.mark.parametrize("fails", [(), range(99)], ids=["recorded", "not recorded"])
def test_recorded_folds_leave_the_texts_as_folds_that_are_not_recorded(model, fails):
    """Three texts and one more that stands for padding; recording runs a fold several times."""
    slots = [range(1, 4), range(11, 14), range(21, 24)]
    cases = [TextCase(at + 1, [3, 1, 4, 1], 3, [5, 9, 2], list(its), [-1, 0, 1]) for at, its in enumerate(slots)]
    graphs = RunAgain(fails)
    found = folded(model, lambda memory: RecordedFolds(memory, CPU, graphs).fold, cases)
    expected = folded(model, lambda memory: memory.fold, cases)
    assert graphs.recordings == (0 if fails else 2)
    for mine, theirs in zip(found, expected, strict=True):
        for name in theirs:
            assert np.allclose(mine[name], theirs[name], atol=1e-6), name
    assert not any(array.any() for array in found[0].values()), "the empty text stays empty"


def test_folds_of_one_size_launch_the_same_without_waiting_for_the_device(model, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    rng, graphs = np.random.default_rng(0), RunAgain()
    cases = [case_of(rng, 1, 1), case_of(rng, 2, 1)]
    memory = model.memory(TEXTS, NODES + 1)
    read(memory, cases)
    folds, found = RecordedFolds(memory, CPU, graphs), []
    for case in cases:
        folds.fold([TextFold(3, case.slot, case.slot, tuple(case.slots[: case.slot]))])
        with launches(monkeypatch) as launched:
            graphs.steps[0]()
        found.append(launched)
    assert found[0] == found[1] and graphs.recordings == 1
