"""The fused form of drafters against the eager one, on random models of awkward sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from text_cases import TextCase, chains_of, level_of
from tiny_mamba import Family, make_checkpoint, tiny_config

from drafter_service.models import DrafterModel, load_model
from drafter_service.models.memory import DrafterMemory
from drafter_service.plan import EMPTY_TEXT, TextFold

TEXTS, NODES = 4, 64
CPU = torch.device("cpu")
FOREIGN = 5
"""Ids past the embedding, which are fed as token 0."""


@dataclass(frozen=True)
class Kind:
    """A small random model."""

    family: Family
    settings: dict[str, object]
    vocabulary: int = 101


MAMBA2 = {
    "narrow": {"hidden_size": 20, "num_heads": 5, "head_dim": 8, "n_groups": 1, "state_size": 6},
    "groups": {"hidden_size": 24, "num_heads": 6, "head_dim": 8, "n_groups": 3, "state_size": 5},
    "wide": {"hidden_size": 72, "num_heads": 4, "head_dim": 36, "n_groups": 2, "state_size": 19},
    "taps": {"hidden_size": 16, "num_heads": 2, "head_dim": 16, "n_groups": 1, "conv_kernel": 3},
    "plain": {"use_bias": False, "use_conv_bias": False, "time_step_limit": (0.0, float("inf"))},
    "unlimited": {"time_step_limit": (0.0, float("inf")), "num_hidden_layers": 3},
    "one-head": {"hidden_size": 9, "num_heads": 1, "head_dim": 18, "n_groups": 1, "state_size": 1},
}
KINDS = {f"mamba2-{name}": Kind("mamba2", settings) for name, settings in MAMBA2.items()}

MAMBA1 = {
    "narrow": {"hidden_size": 20, "intermediate_size": 39, "state_size": 6, "time_step_rank": 3},
    "wide": {"hidden_size": 72, "intermediate_size": 147, "state_size": 19},
    "taps": {"hidden_size": 16, "conv_kernel": 3, "use_bias": True},
    "plain": {"use_conv_bias": False, "num_hidden_layers": 3},
    "small": {"hidden_size": 9, "intermediate_size": 5, "state_size": 1, "time_step_rank": 1},
}
KINDS |= {f"mamba-{name}": Kind("mamba", settings) for name, settings in MAMBA1.items()}


def make(folder: Path, kind: Kind) -> Path:
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
