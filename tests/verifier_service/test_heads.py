"""Mixers dealt out to workers by heads: the library's logits, the bits of one degree, and refusals with the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from tree_kernels.tree_attention import PAGE
from tree_layers.errors import CheckpointError
from tree_layers.library_mixers import GroupedNorm, is_mixer

from tests.support.cases import few_of
from tests.support.engines import engine_of
from tests.support.exactness import announces_what_it_must
from tests.support.made_once import made_once
from tests.support.routers import LAWS, RoundByRound, arrive_at_random, guessing, watch_logits
from tests.support.tiny_hybrids import FAMILIES, VOCABULARY, make_checkpoint, oracle, paths_below, tree_below
from verifier_service.models.heads import SpreadNorm, plan_shards
from verifier_service.models.mamba_in_llama import library_config

EXPERTS = {
    "layers_block_type": ["mamba", "moe", "attention", "mamba"],
    "n_routed_experts": 4,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
}
FEW = [  # (family, changed settings, workers)
    ("mamba2", {}, 2),
    ("bamba", {}, 2),
    ("nemotron_h", EXPERTS, 2),
]
MORE = [
    *((family, {}, 2) for family in FAMILIES if family not in ("mamba2", "bamba")),
    ("mamba", {}, 4),
    ("mamba2", {}, 4),  # two workers to a group
    ("mamba_in_llama", {}, 4),  # two workers to an x and a B
    ("mamba_in_llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, 2),  # two x and two B to a worker
    ("mamba_in_llama", {"attn_layers": (), "tie_word_embeddings": True}, 2),
    ("bamba", {}, 4),
    ("mamba2", {"n_groups": 1}, 2),
    ("mamba2", {"n_groups": 4, "use_bias": False}, 2),  # two groups to a worker
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, 2),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1}, 2),
    ("zamba2", {"use_shared_attention_adapter": True}, 2),
]
CASES = [*FEW, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE)]
BITWISE = [
    ("mamba2", torch.bfloat16, 2),
    *(
        pytest.param(family, dtype, degree, marks=pytest.mark.long)
        for family, dtype, degree in (
            ("mamba", torch.float32, 2),
            ("mamba", torch.bfloat16, 2),
            ("bamba", torch.float32, 2),
            ("mamba2", torch.float32, 2),
            ("mamba2", torch.bfloat16, 4),
            ("bamba", torch.bfloat16, 2),
            ("mamba_in_llama", torch.float32, 4),
            ("mamba_in_llama", torch.bfloat16, 2),
        )
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return made_once(tmp_path_factory, make_checkpoint)


def name_of(case):
    family, changes, degree = case
    label = "experts" if changes is EXPERTS else ", ".join(f"{key}={value}" for key, value in changes.items())
    return f"{family}, {label}, {degree}" if label else f"{family}, {degree}"


@pytest.mark.parametrize(
    ("family", "changes", "degree"), CASES, ids=[name_of(getattr(case, "values", case)) for case in CASES]
)
def test_trees_of_several_workers_have_the_librarys_logits(models, family, changes, degree):
    folder, model = models(family, **changes)
    engine = engine_of(folder, tensor_parallel=degree)
    try:
        announces_what_it_must(engine)
        rng = np.random.default_rng(0)
        for length in (1, 17, 60, 190):
            ids = rng.integers(0, VOCABULARY, length).tolist()
            found = engine.logits_of(ids, tree_below(ids[-1]))
            truth = torch.stack([oracle(model, path) for path in paths_below(ids)])
            assert (found - truth).abs().max() < 1e-4, length
        # Every worker has all of the norms, and Zamba2's fused MLP.
        held = sum(parameter.numel() for parameter in engine.runner.target.model.parameters())
        assert changes or degree > 2 or held < 0.58 * sum(parameter.numel() for parameter in model.parameters())
    finally:
        engine.runner.crew.stop()


@pytest.mark.parametrize("family", few_of(["mamba", "mamba2", "bamba"], "mamba2"))
def test_two_workers_round_in_bfloat16_about_as_one_does(models, family):
    """Parts of sums are rounded once more: their error from the float32 logits is less than 1.5 times that of one
    worker. A greedy token can differ from the library's only where its lead is less than twice that error."""
    folder, model = models(family)
    engines = [engine_of(folder, dtype=torch.bfloat16, tensor_parallel=degree) for degree in (1, 2)]
    try:
        rng = np.random.default_rng(1)
        errors = [0.0, 0.0]
        for length in (5, 40, 150):
            ids = rng.integers(0, VOCABULARY, length).tolist()
            truth = torch.stack([oracle(model, path) for path in paths_below(ids)])
            for place, engine in enumerate(engines):
                found = engine.logits_of(ids, tree_below(ids[-1]))
                errors[place] = max(errors[place], float((found - truth).abs().max()))
        assert 0 < errors[1] < 1.5 * errors[0]
    finally:
        engines[1].runner.crew.stop()


@pytest.mark.parametrize(("family", "dtype", "degree"), BITWISE, ids=lambda each: str(each).removeprefix("torch."))
async def test_random_arrivals_at_one_degree_change_no_token(models, family, dtype, degree):
    """With trees, chunks, other texts, waiting and preemption: each text's tokens are those it has alone."""
    rng = np.random.default_rng(2)
    engine = engine_of(models(family)[0], dtype=dtype, tensor_parallel=degree, pool_tokens=7 * PAGE)
    await engine.start()
    try:
        lengths = [PAGE * int(rng.integers(1, 3)) - int(rng.integers(9, 30)) for _ in range(8)]
        prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
        laws = [LAWS[place % len(LAWS)] for place in range(len(prompts))]
        await arrive_at_random(engine, prompts, laws, 40, rng, VOCABULARY)
        stats = engine.stats()
        assert stats["guesses"] > 0 and stats["preempted"] > 0
        assert stats["pages_held"] == stats["sessions"] == 0
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("family", "degree"),
    [
        ("mamba2", 2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("mamba", 2), ("mamba2", 4), ("bamba", 2), ("mamba_in_llama", 2), ("mamba_in_llama", 4))
        ),
    ],
)
async def test_random_rounds_leave_the_logits_of_straight_decoding(models, family, degree):
    """Rounds with and without a tree, some verdicts dropped: the logits of every visited row are bitwise those of
    decoding one token after another."""
    rng = np.random.default_rng(3)
    engine = engine_of(models(family)[0], tensor_parallel=degree, max_sessions=2)
    seen = watch_logits(engine)
    await engine.start()
    try:
        prompt = rng.integers(0, VOCABULARY, 20).tolist()
        straight = RoundByRound(engine, prompt, LAWS[1], 150)
        await straight.open()
        while len(straight.text) < straight.end - 1:
            await straight.round()
        router = RoundByRound(engine, prompt, LAWS[1], 150)
        await router.open()
        trees = guessing(rng, straight.answer, VOCABULARY)
        accepted = 0
        while len(router.text) < straight.end - 8:
            before = len(router.text)
            verdict = await router.round(trees(router) if rng.random() < 0.9 else None)
            accepted += len(verdict.path) - 1
            if rng.random() < 0.1:
                router.back_to(before)
        assert accepted > 20
        assert straight.answer[: len(router.answer)] == router.answer
        first, second = (session.number for session in engine.scheduler.sessions.values())
        assert len(seen[second]) > 100
        for position, logits in seen[second].items():
            if position in seen[first]:
                assert torch.equal(seen[first][position], logits), position
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("family", "degree"),
    [
        *(("mamba2", 2), ("mamba2", 4), ("jamba", 2), ("nemotron_h", 4)),
        *(("mamba_in_llama", 2), ("mamba_in_llama", 4)),
    ],
)
def test_workers_read_only_their_parts_of_mixers(models, family, degree):
    """All workers' parts together are the checkpoint's rows: each once, and those of B and C, or x and B, once for each
    worker that shares them."""
    folder, model = models(family)
    config = library_config(folder)
    mixer = next(module for module in model.modules() if is_mixer(module))
    name = next(name for name, module in model.named_modules() if module is mixer)
    read = []
    for rank in range(degree):
        with plan_shards(folder, config, rank, degree).tensors(folder) as tensors:
            found = {each.rpartition(f"{name.partition('layers.')[2]}.")[2]: each for each in tensors}
            weight = next(each for key, each in found.items() if key == "in_proj.weight")
            read.append(tensors[weight][...])
    whole = mixer.in_proj.weight
    rows = {tuple(row.tolist()) for part in read for row in part}
    assert rows == {tuple(row.tolist()) for row in whole}
    groups = {"jamba": 0, "mamba_in_llama": 2}.get(family) if not hasattr(mixer, "n_groups") else mixer.n_groups
    shared = 2 * groups * 8 * (max(degree // groups, 1) - 1) if groups else 0
    assert sum(len(part) for part in read) == len(whole) + shared


def test_a_worker_keeps_the_states_of_its_own_heads(models):
    folder, _ = models("mamba2")
    one, two = engine_of(folder, tensor_parallel=1), engine_of(folder, tensor_parallel=2)
    two.runner.crew.stop()
    whole, half = (engine.runner.target.mixers[0] for engine in (one, two))
    assert (half.heads, half.groups, half.channels) == (whole.heads // 2, whole.groups // 2, whole.channels // 2)
    assert 2 * two.runner.target.recurrent_bytes(100, 4) == one.runner.target.recurrent_bytes(100, 4)


class Summed:
    """A group in one process: a first pass collects the workers' parts, and a second one gets their sum."""

    def __init__(self):
        self.given = []
        self.total = None

    def sum(self, part):
        if self.total is None:
            self.given.append(part)
            return part
        return self.total


@pytest.mark.parametrize("workers", [2, 6])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["after the gate", "before the gate", "mamba2"])
def test_a_norm_spread_over_workers_is_the_whole_norm(kind, groups, workers):
    torch.manual_seed(0)
    channels = 48
    if kind == "mamba2":
        norm = GroupedNorm(torch.nn.Parameter(torch.ones(channels)), channels // groups, 1e-6)
    else:
        norm = FalconH1RMSNormGated(channels, n_groups=groups, norm_before_gate=kind == "before the gate")
    norm.weight.data.normal_()
    y, gate = torch.randn(1, 7, channels), torch.randn(1, 7, channels)
    group = Summed()

    def parts():
        each = channels // workers
        found = []
        for rank in range(workers):
            spread = SpreadNorm(norm, channels // groups, groups, rank * groups // workers)
            mine = slice(rank * each, (rank + 1) * each)
            spread.weight, spread.group = torch.nn.Parameter(norm.weight[mine]), group
            found.append(spread(y[..., mine], gate[..., mine]))
        return torch.cat(found, -1)

    with torch.no_grad():
        parts()
        group.total = sum(group.given)
        assert (parts() - norm(y, gate)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "changes", "degree", "message"),
    [
        ("mamba2", {}, 3, "its 4 heads of a mixer cannot be dealt out to 3 workers evenly"),
        ("mamba", {}, 3, "its 64 channels of a mixer cannot be dealt out to 3 workers evenly"),
        ("mamba2", {"n_groups": 3, "num_heads": 6, "head_dim": 16, "hidden_size": 48}, 2, "its 3 groups of heads"),
        ("mamba_in_llama", {}, 3, "its 4 heads of a mixer cannot be dealt out to 3 workers evenly"),
        (
            "mamba_in_llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            2,
            "its 3 groups of heads of a mixer cannot be dealt out to 2 workers evenly",
        ),
    ],
)
def test_mixers_that_cannot_be_dealt_out_are_refused_with_the_numbers(models, family, changes, degree, message):
    folder, _ = models(family, **changes)
    with pytest.raises(CheckpointError, match=message):
        plan_shards(folder, library_config(folder), 0, degree)


@pytest.mark.long
def test_an_engine_refuses_mixers_that_cannot_be_dealt_out(models):
    with pytest.raises(BadRequest, match="its 4 heads of a mixer cannot be dealt out to 3 workers evenly"):
        engine_of(models("mamba2")[0], tensor_parallel=3)
