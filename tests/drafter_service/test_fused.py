"""The fused form of drafters against the eager one, on random models of awkward sizes."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from tree_kernels.mamba_level.cpu import LINE, Scratch
from tree_kernels.ranking import Orders
from tree_layers.states import as_tensor

from drafter_service.models import DrafterModel, load_model
from drafter_service.models.memory import DrafterMemory, FusedMemory
from drafter_service.plan import EMPTY_TEXT, Chains, Level, Nodes, TextFold
from tests.support.text_cases import TextCase, chains_of, ints, level_of
from tests.support.tiny_drafters import make_drafter
from tests.support.tiny_mamba import Family, make_checkpoint, tiny_config

TEXTS, NODES = 4, 64
CPU = torch.device("cpu")
GUARD = 4096
FOREIGN = 5
"""Ids past the embedding, which are fed as token 0."""


@dataclass(frozen=True)
class SmallModel:
    """A small random model."""

    family: Family
    settings: dict[str, object]
    vocabulary: int = 101


MAMBA2 = {
    "narrow": {"hidden_size": 20, "num_heads": 5, "head_dim": 8, "n_groups": 1, "state_size": 6},
    "groups": {"hidden_size": 24, "num_heads": 6, "head_dim": 8, "n_groups": 3, "state_size": 5},
    "wide": {"hidden_size": 72, "num_heads": 4, "head_dim": 36, "n_groups": 2, "state_size": 19},
    "tiles": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 7},
    "taps": {"hidden_size": 16, "num_heads": 2, "head_dim": 16, "n_groups": 1, "conv_kernel": 3},
    "one-tap": {"hidden_size": 16, "num_heads": 2, "head_dim": 16, "n_groups": 1, "conv_kernel": 1},
    "plain": {"use_bias": False, "use_conv_bias": False, "time_step_limit": (0.0, float("inf"))},
    "unlimited": {"time_step_limit": (0.0, float("inf")), "num_hidden_layers": 3},
    "one-head": {"hidden_size": 9, "num_heads": 1, "head_dim": 18, "n_groups": 1, "state_size": 1},
}
KINDS = {f"mamba2-{name}": SmallModel("mamba2", settings) for name, settings in MAMBA2.items()}

MAMBA1 = {
    "narrow": {"hidden_size": 20, "intermediate_size": 39, "state_size": 6, "time_step_rank": 3},
    "wide": {"hidden_size": 72, "intermediate_size": 147, "state_size": 19},
    "tiles": {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 7},
    "taps": {"hidden_size": 16, "conv_kernel": 3, "use_bias": True},
    "plain": {"use_conv_bias": False, "num_hidden_layers": 3},
    "small": {"hidden_size": 9, "intermediate_size": 5, "state_size": 1, "time_step_rank": 1},
}
KINDS |= {f"mamba-{name}": SmallModel("mamba", settings) for name, settings in MAMBA1.items()}


def make(folder: Path, kind: SmallModel) -> Path:
    make_checkpoint(folder, kind.family, config=tiny_config(kind.family, kind.vocabulary, **kind.settings))
    return folder


def both(path: Path, dtype: torch.dtype = torch.float32) -> tuple[DrafterModel, DrafterModel]:
    """The eager and the fused form."""
    return tuple(load_model(path, dtype, CPU, form=form)[0] for form in ("eager", "fused"))  # type: ignore[return-value]


class RandomRounds:
    """Random chains, levels and folds of several texts, run on several memories alike."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.vocabulary = vocabulary
        self.cases = [TextCase(slot, self.tokens(self.rng.integers(1, 20))) for slot in range(1, TEXTS)]

    def tokens(self, count: int) -> list[int]:
        found: list[int] = self.rng.integers(0, self.vocabulary + FOREIGN, count).tolist()
        return found

    def round(self, run) -> None:
        """A round of drafting. run(method, plan, rows): calls a memory's method; `rows` of its result count"""
        rng, free, cases = self.rng, list(range(1, NODES)), self.cases
        for case in cases:
            case.ids += self.tokens(3 if case.covers == len(case.ids) else 1)
            case.tokens, case.slots, case.parents, case.level = [], [], [], []
        late = [case for case in cases if len(case.ids) - case.covers > 1]
        if late:
            rooted = bool(rng.random() < 0.7)
            lengths = [len(case.ids) - case.covers - (not rooted) for case in late]
            roots = [free.pop(int(rng.integers(0, len(free)))) for _ in late] if rooted else []
            plan = chains_of(late, lengths, roots)
            time = plan.tokens.shape[1]
            run("chain", plan, [row * time + t for row, length in enumerate(lengths) for t in range(length)])
            for number, (case, length) in enumerate(zip(late, lengths, strict=True)):
                case.covers += length - rooted
                if rooted:
                    case.tokens, case.slots, case.parents, case.level = [case.ids[-1]], [roots[number]], [-1], [0]
        for _ in range(rng.integers(1, 6)):
            growing = [case for case in cases if rng.random() < 0.8] or cases
            for case in growing:
                case.grow(rng, free, self.vocabulary + FOREIGN)
            plan = level_of(growing)
            run("level", plan, list(range(len(plan.tokens))))
        folds = []
        for case in cases:
            if case.slots and rng.random() < 0.8:
                path = case.path(int(rng.integers(0, len(case.slots))))
                source = case.slot if case.covers else EMPTY_TEXT
                folds.append(TextFold(case.covers, source, case.slot, tuple(case.slots[node] for node in path)))
                case.ids[case.covers :] = [case.tokens[node] for node in path]
                case.covers = len(case.ids)
        if folds:
            run("fold", folds, [])


def results(model: DrafterModel, memory: DrafterMemory, method: str, plan, rows: list[int]) -> torch.Tensor | None:
    if method == "fold":
        memory.fold(plan)
        return None
    hidden = getattr(memory, method)(plan)
    return model.logits(hidden.reshape(-1, hidden.shape[-1])[rows])


def assert_same_texts(one: DrafterMemory, other: DrafterMemory, cases: list[TextCase], within: float) -> None:
    for case in cases:
        if case.covers:
            left, right = one.save(case.slot, case.covers), other.save(case.slot, case.covers)
            assert left.keys() == right.keys()
            for name in left:
                assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape
                error = np.linalg.norm(left[name].astype(np.float64) - right[name].astype(np.float64))
                assert error <= within * np.linalg.norm(left[name].astype(np.float64)), (name, error)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@torch.inference_mode()
def test_logits_and_states_equal_the_eager_forms_within_1e_4_and_1e_5(tmp_path, kind):
    models = both(make(tmp_path, kind))
    memories = [model.memory(TEXTS, NODES) for model in models]
    assert [model.form for model in models] == ["eager", "fused"]
    assert memories[0].layout == memories[1].layout
    assert memories[0].node_bytes == memories[1].node_bytes and memories[0].text_bytes(9) == memories[1].text_bytes(9)
    rounds = RandomRounds(kind.vocabulary, seed=3)

    def run(method: str, plan, rows: list[int]) -> None:
        eager, fused = (
            results(model, memory, method, plan, rows) for model, memory in zip(models, memories, strict=True)
        )
        if eager is not None:
            torch.testing.assert_close(fused, eager, atol=1e-4, rtol=0)

    for _ in range(12):
        rounds.round(run)
        assert_same_texts(memories[0], memories[1], rounds.cases, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@torch.inference_mode()
def test_a_state_that_one_form_saves_continues_in_the_other(tmp_path, family, dtype):
    """In float32, alike within 1e-4. In 16 bits the eager form rounds activations, so the states are only near."""
    models = both(make(tmp_path, SmallModel(family, {})), dtype)
    text = np.random.default_rng(0).integers(0, 101, 40)
    within = 1e-4 if dtype == torch.float32 else 0.15
    for writer, reader in (models, models[::-1]):
        one, other = writer.memory(3, 9), reader.memory(3, 9)
        one.chain(chain_of(text[:30], 0, EMPTY_TEXT, 2))
        arrays = one.save(2, 30)
        other.check(arrays, 30)
        other.load(1, arrays)
        for name, array in other.save(1, 30).items():
            assert array.dtype == arrays[name].dtype and np.array_equal(array, arrays[name]), name
        expected = writer.logits(one.chain(chain_of(text[30:], 30, 2, 1))[0])
        found = reader.logits(other.chain(chain_of(text[30:], 30, 1, 1))[0])
        torch.testing.assert_close(found, expected, atol=within, rtol=within)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@torch.inference_mode()
def test_sixteen_bit_chains_in_scattered_slots_equal_single_steps_and_are_near_the_eager_form(tmp_path, family, dtype):
    """The steps are roots that are folded into their text. Slots are in no order and not adjacent."""
    models = both(make(tmp_path, SmallModel(family, {})), dtype)
    eager, fused, stepped = models[0].memory(9, 9), models[1].memory(9, 9), models[1].memory(9, 9)
    rng = np.random.default_rng(1)
    target, lengths = ints(7, 2, 5), ints(6, 3, 9)
    tokens = rng.integers(0, 101, (3, 9))
    none = np.zeros(3, np.int64)
    plan = Chains(tokens, lengths, none, none, target, ints(8, 3, 6))
    hidden, expected = fused.chain(plan), eager.chain(plan)
    for row, length in enumerate(lengths):
        logits = models[1].logits(hidden[row, :length])
        torch.testing.assert_close(logits, models[0].logits(expected[row, :length]), atol=0.15, rtol=0.15)
        for t in range(length):
            last, slot = t == length - 1, int(target[row])
            start, node = slot if t else EMPTY_TEXT, int(plan.roots[row])
            level = Level(tokens[row, t : t + 1], [1], [start], [t], [0], [Nodes([node], [-1])])
            torch.testing.assert_close(models[1].logits(stepped.level(level))[0], logits[t], atol=1e-2, rtol=1e-2)
            if not last:
                stepped.fold([TextFold(t, start, slot, (node,))])
        for name, array in fused.save(int(target[row]), int(length)).items():
            single = stepped.save(int(target[row]), int(length))[name]
            one, other = (
                as_tensor(each, dtype if name.startswith("conv") else torch.float32).float() for each in (array, single)
            )
            torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
    level = Level(ints(5, 6), [1, 1], [2, 5], [2, 8], [1, 1], [Nodes([3, 1], [-1, 0]), Nodes([6, 4], [-1, 0])])
    found, wanted = (model.logits(memory.level(level)) for model, memory in zip(models, (eager, fused), strict=True))
    assert level.slots.tolist() == [1, 4] and level.parents.tolist() == [3, 6]
    torch.testing.assert_close(wanted, found, atol=0.15, rtol=0.15)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@torch.inference_mode()
def test_the_state_after_a_prompt_in_bfloat16_does_not_depend_on_other_prompts_and_is_near_the_eager_forms(
    tmp_path, family
):
    """Products of prompts may be dot products of bfloat16, also those of a single token, and in chunks of any size."""
    eager, fused = both(make(tmp_path, SmallModel(family, {})), torch.bfloat16)
    rng = np.random.default_rng(4)
    tokens, lengths, target = rng.integers(0, 101, (3, 33)), ints(33, 1, 17), ints(3, 1, 2)
    together, expected = fused.memory(4, 9), eager.memory(4, 9)
    none = np.zeros(3, np.int64)
    for memory in (together, expected):
        memory.chain(Chains(tokens, lengths, none, none, target, none[:0]))
    for row, length in enumerate(lengths.tolist()):
        alone, slot = fused.memory(4, 9), int(target[row])
        for first in range(0, length, 7):
            alone.chain(
                chain_of(tokens[row, first : min(first + 7, length)], first, slot if first else EMPTY_TEXT, slot)
            )
        near = expected.save(slot, length)
        for name, array in together.save(slot, length).items():
            assert np.array_equal(array, alone.save(slot, length)[name]), name
            kind = torch.bfloat16 if name.startswith("conv") else torch.float32
            one, other = (as_tensor(each, kind).float() for each in (array, near[name]))
            torch.testing.assert_close(one, other, atol=0.15, rtol=0.15)


class GuardedScratch(Scratch):
    """Scratch memory with bytes after each part that no kernel may write."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: list[np.ndarray] = []

    def parts(self, sizes: tuple[int, ...], rows: int) -> list[int]:
        places = super().parts(tuple(-(-size // LINE) * LINE + GUARD for size in sizes), rows)
        self.guards = []
        for place, size in zip(places, sizes, strict=True):
            guard = np.ctypeslib.as_array((ctypes.c_uint8 * GUARD).from_address(place + -(-size // LINE) * LINE))
            guard[:] = 0xA5
            self.guards.append(guard)
        return places

    def intact(self) -> bool:
        """True if no guarded byte of the last call was written."""
        return bool(self.guards) and all((guard == 0xA5).all() for guard in self.guards)


def guarded(fused: DrafterModel, monkeypatch) -> GuardedScratch:
    """The scratch memory that the model has from now on."""
    scratch = GuardedScratch()
    monkeypatch.setattr(fused, "scratch", scratch)
    return scratch


@torch.inference_mode()
def test_no_row_leaves_its_scratch_memory_in_a_model_much_wider_than_its_channels(tmp_path, monkeypatch):
    kind = SmallModel("mamba", {"hidden_size": 512, "intermediate_size": 4})
    fused = both(make(tmp_path, kind), torch.bfloat16)[1]
    scratch = guarded(fused, monkeypatch)
    memory, none = fused.memory(3, 9), np.zeros(1, np.int64)
    for tokens in (np.arange(20)[None], np.arange(1)[None]):
        memory.chain(Chains(tokens, ints(tokens.size), none, none, ints(1), none[:0]))
        assert scratch.intact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@torch.inference_mode()
def test_chains_levels_folds_and_guesses_stay_in_their_scratch_memory(tmp_path, monkeypatch, kind, dtype):
    fused = both(make(tmp_path, kind), dtype)[1]
    scratch = guarded(fused, monkeypatch)
    memory, rounds = fused.memory(TEXTS, NODES), RandomRounds(kind.vocabulary, seed=3)
    assert isinstance(memory, FusedMemory)

    def run(method: str, plan, rows: list[int]) -> None:
        made = results(fused, memory, method, plan, rows)
        assert scratch.intact()
        if method == "level":
            orders = Orders([0.0], [None], [fused.vocabulary])
            ids, _, _ = memory.guesses(plan, [plan.count], [0], orders, 20)
            assert scratch.intact() and made is not None
            assert np.array_equal(ids[:, 0], made.argmax(1))

    for _ in range(3):
        rounds.round(run)


@torch.inference_mode()
def test_tokens_that_the_head_lacks_are_not_ranked(tmp_path):
    fused = both(make(tmp_path, SmallModel("mamba", {})))[1]
    memory, level = fused.memory(2, 9), Level(ints(7), [1], [0], [0], [0], [Nodes([3], [-1])])
    assert isinstance(memory, FusedMemory)
    with pytest.raises(AssertionError, match="the head has fewer tokens"):
        memory.guesses(level, [1], [0], Orders([0.0], [None], [fused.vocabulary + 1]), 5)


@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_the_other_texts_of_its_level(tmp_path):
    for family in ("mamba", "mamba2"):
        model = both(make(tmp_path / family, SmallModel(family, {})))[1]
        found = []
        for texts in ([1], [3, 1, 2]):
            memory = model.memory(4, 9)
            none, trees = [0] * len(texts), [Nodes([text], [-1]) for text in texts]
            hidden = memory.level(
                Level(np.array([10 + text for text in texts]), [1] * len(texts), none, none, none, trees)
            )
            found.append(model.logits(hidden)[texts.index(1)])
        assert torch.equal(*found)


@pytest.mark.parametrize("raises", [False, True], ids=["guessed", "raised"])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@torch.inference_mode()
def test_folds_in_the_call_of_the_next_level_and_after_one_that_raised_have_the_bits_of_folds_before(
    tmp_path, family, raises
):
    model = both(make(tmp_path, SmallModel(family, {})))[1]
    text, found = np.random.default_rng(0).integers(0, 101, 30), []
    for first in (False, True):
        memory = model.memory(3, 9)
        assert isinstance(memory, FusedMemory)
        memory.chain(Chains(text[None], ints(30), ints(0), ints(EMPTY_TEXT), ints(2), ints(4)))
        memory.level(Level(ints(7), [1], [2], [29], [1], [Nodes([4, 6], [-1, 0])]))
        folds = [TextFold(29, 2, 2, (4, 6))]
        (memory.fold_first if first else memory.fold)(folds)
        level = Level(ints(9), [1], [2], [31], [0], [Nodes([5], [-1])])
        if not raises:
            ids, scores, _ = memory.guesses(level, [1], [0], Orders([0.0], [None], [model.vocabulary]), 5)
            found.append((ids.tolist(), scores.tolist()))
        memory.fold_rest()
        found.append({name: array.tobytes() for name, array in memory.save(2, 31).items()})
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.parametrize("missing", ["numba", "llvmlite"])
def test_without_the_compiler_auto_is_eager_and_fused_is_refused_with_the_reason(tmp_path, missing):
    """In a process of its own, whose metadata lack the package, as if it were not installed."""
    make(tmp_path, SmallModel("mamba", {}))
    done = run_python(
        f"""
        import importlib.metadata, sys
        real = importlib.metadata.version
        def version(name):
            if name == {missing!r}:
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)
        importlib.metadata.version = version
        sys.modules[{missing!r}] = None
        import torch
        from dendro.errors import BadRequest
        from drafter_service.models import load_model
        model, _ = load_model({str(tmp_path)!r}, torch.float32, torch.device("cpu"))
        print(model.form, tuple(model.memory(2, 2).layout.split("/")[:2]))
        try:
            load_model({str(tmp_path)!r}, torch.float32, torch.device("cpu"), form="fused")
        except BadRequest as error:
            print(error)
        """
    )
    assert done[0] == "eager ('recurrent-v1', '2')"
    assert done[1].startswith("form:") and missing in done[1]


def test_a_form_that_does_not_exist_and_a_fused_llama_are_refused(tmp_path):
    make_drafter(tmp_path, "llama")
    assert load_model(tmp_path, torch.float32, CPU)[0].form == "eager"
    with pytest.raises(BadRequest, match="no fused form of a llama drafter") as refused:
        load_model(tmp_path, torch.float32, CPU, form="fused")
    assert refused.value.field == "form"
    with pytest.raises(BadRequest, match="must be one of auto, eager, fused"):
        load_model(tmp_path, torch.float32, CPU, form="quick")


def chain_of(tokens: np.ndarray, start: int, source: int, target: int) -> Chains:
    return Chains(tokens[None], ints(len(tokens)), ints(start), ints(source), ints(target), ints())


def run_python(source: str) -> list[str]:
    """The lines that a new process prints."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
