"""`dendro bench drafter`: its drafter, its forms and aims, and a small complete run."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest
import torch
from dendro.engine import started
from dendro.errors import BadRequest
from dendro.shapes import TreeShape
from dendro.state import NoStates
from dendro.text import Sampling
from dendro.tree import DraftTree
from torch.profiler import ProfilerActivity, profile
from tree_kernels.noise import rows as noise_rows

from cluster.bench import drafter
from cluster.bench.drafter import (
    DRAFT_BARS,
    DRAFTER,
    EAGER,
    FORMS,
    FUSED,
    LEVEL_BARS,
    LEVEL_ROWS,
    SHAPES,
    DraftCase,
    DrafterBenchOptions,
    DrafterForms,
    InlineDrafter,
    accepted_path,
    load_forms,
    measure_drafters,
    measure_in_turns,
    with_positions,
)
from cluster.demo.prompts import Prompt
from cluster.measure.bench import draw
from cluster.measure.in_process import EngineText
from drafter_service.engine import DrafterEngine
from drafter_service.models import load_model
from drafter_service.options import DrafterOptions
from drafter_service.plan import Level
from tests.support import tiny_drafters, tiny_mamba
from tests.support.tiny_drafters import FAMILIES, VOCABULARY

CPU = torch.device("cpu")


def ids_of(count, seed=0):
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def prompts_of(count, length=20):
    return [Prompt(f"p{seed}", "", tuple(ids_of(length, seed)), tuple(ids_of(9, 100 + seed))) for seed in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / request.param
    tiny_drafters.make_drafter(folder, request.param)
    return folder


def model_at(folder):
    return load_model(folder, torch.float32, CPU)[0]


def two_forms(folder, other=None):
    """The same model as both forms, or another one as FUSED."""
    return DrafterForms(folder.name, {EAGER: model_at(folder), FUSED: model_at(other or folder)})


@pytest.mark.parametrize("shape", ["(3,2,1)", "beam(5,3)", "dynamic(4,5,15)"])
async def test_a_measured_draft_is_the_engines(checkpoint, shape):
    sampling = Sampling(temperature=1.0, seed=5)
    engine = DrafterEngine.load(checkpoint, DrafterOptions(name="d"), states=NoStates())
    inline = InlineDrafter(model_at(checkpoint), 1)
    text = EngineText(ids_of(20), sampling)
    async with started(engine):
        inline.open(text)
        await text.open(engine, 100)
        for following in ids_of(3, seed=1):
            theirs = await text.draft(engine, TreeShape.parse(shape))
            (ours,) = inline.draft([text], TreeShape.parse(shape)).trees
            assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.parents.tolist() == theirs.parents.tolist()
            assert ours.trace.tolist() == theirs.trace.tolist()
            text.grow([*accepted_path(ours), following])


def test_accepted_nodes_are_folded(checkpoint):
    inline, text, shape = (
        InlineDrafter(model_at(checkpoint), 1, by_level=True),
        EngineText(ids_of(20), Sampling()),
        TreeShape.parse("3,2,1"),
    )
    inline.open(text)
    first = inline.draft([text], shape)
    assert [plan.rows.count for plan in first.plans] == [1, 3, 6]
    text.grow([*accepted_path(first.trees[0]), 1])
    second = inline.draft([text], shape)
    assert all(isinstance(plan.rows, Level) for plan in second.plans), "the accepted nodes are folded, not read again"


def test_noise_is_ready_before_a_draft_is_timed(checkpoint, monkeypatch):
    inline, text = InlineDrafter(model_at(checkpoint), 1), EngineText(ids_of(20), Sampling(temperature=1.0))
    inline.open(text)
    run, compute, running, computed = inline.runner.run, noise_rows.gumbel_noise, [], []

    def watched_run(plan):
        running.append(plan)
        outcome = run(plan)
        running.clear()
        return outcome

    def watched_noise(*of):
        computed.append(bool(running))
        return compute(*of)

    monkeypatch.setattr(inline.runner, "run", watched_run)
    monkeypatch.setattr(noise_rows, "gumbel_noise", watched_noise)
    for _ in range(3):
        (tree,) = inline.draft([text], TreeShape.parse("1,1,1,1")).trees
        text.grow([*accepted_path(tree), 1])
    assert computed and not any(computed)


def test_a_copy_with_a_greater_last_position_leaves_the_checkpoint_as_it_is(tmp_path):
    source, copies = tmp_path / "llama", tmp_path / "copies"
    for folder in (source, copies):
        folder.mkdir()
    (source / "config.json").write_text('{"max_position_embeddings": 64}')
    (source / "model.safetensors").write_bytes(b"weights")
    copy = with_positions(source, 300, copies)
    assert json.loads((copy / "config.json").read_text()) == {"max_position_embeddings": 300}
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert (source / "config.json").read_text() == '{"max_position_embeddings": 64}'


def test_trees_that_differ_between_forms_are_counted(tmp_path):
    one, other = tmp_path / "mamba2", tmp_path / "other"
    tiny_mamba.make_checkpoint(one, "mamba2", seed=0)
    tiny_mamba.make_checkpoint(other, "mamba2", seed=1)
    same, different = (DraftCase(two_forms(one, each), "(3,2,1)", prompts_of(2)) for each in (one, other))
    measure_in_turns([same, different], 2, lambda: None)
    assert (same.trees, same.equal) == (6, 6)
    assert (different.trees, different.equal) == (6, 0)
    assert {len(values) for values in same.times.values()} == {2}, "a warm-up's times are not kept"


def test_the_path_of_best_guesses_ends_at_a_leaf():
    assert accepted_path(DraftTree.of([9, 1, 2, 3, 4], [-1, 0, 0, 1, 3])) == [1, 3]
    assert accepted_path(DraftTree.of([9, 1, 2, 3], [-1, 0, 0, 2])) == [1]
    assert accepted_path(DraftTree.root_only(9)) == []


def allocated_bytes(run):
    """Bytes of torch's tensors that a call allocates and does not release, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    found = sum(event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    del kept
    return found


def held_by_text(model, saved):
    """Bytes of the tensors that a memory holds for each text of this saved state."""

    copies = 2

    def memory_of(texts):
        memory = model.memory(1 + texts, 2)
        for slot in range(1, 1 + texts):
            memory.load(slot, saved)
        return memory

    with torch.inference_mode():
        many, one = (allocated_bytes(partial(memory_of, count)) for count in (1 + copies, 1))
        return (many - one) // copies


def test_the_measured_memory_of_a_text_is_what_a_drafter_states(checkpoint):
    model = model_at(checkpoint)
    inline, text = InlineDrafter(model, 1), EngineText(ids_of(100), Sampling())
    session, memory = inline.open(text), inline.runner.memory
    assert session.covers == 99
    assert held_by_text(model, memory.save(session.slot, session.covers)) == memory.text_bytes(100)


# Forms
def test_a_form_that_cannot_be_had_is_missing_with_its_reason(checkpoint, monkeypatch):
    def load(path, dtype, device, form="auto"):
        if form in refused:
            raise BadRequest("form", f"{form} needs a compiler")
        return f"{form} model", "checkpoint"

    monkeypatch.setattr(drafter, "load_model", load)
    refused: tuple[str, ...] = (FUSED,)
    forms = load_forms("d", checkpoint)
    assert forms.models == {EAGER: "eager model"} and "needs a compiler" in forms.missing
    refused = ()
    assert load_forms("d", checkpoint).models == {EAGER: "eager model", FUSED: "fused model"}
    refused = (EAGER,)
    with pytest.raises(BadRequest, match="compiler"):
        load_forms("d", checkpoint)


def test_every_form_that_can_be_had_drafts_the_same_trees(checkpoint):
    case = DraftCase(load_forms(checkpoint.name, checkpoint), "(3,2,1)", prompts_of(3))
    measure_in_turns([case], 3, lambda: None)
    assert case.trees == case.equal == 12


# The report
def judged(level, draft):
    def rows(key, bars, times):
        return [
            {"drafter": name, key: each, "bar": bar, "eager_over_fused": times and around(9, times * bar)}
            for name, own in bars.items()
            for each, bar in own.items()
        ]

    unjudged = {"drafter": "llama", "rows": 1, "bar": None, "eager_over_fused": around(1, 1)}
    report = {"levels": [*rows("rows", LEVEL_BARS, level), unjudged], "drafts": rows("shape", DRAFT_BARS, draft)}
    return [row for aim in DRAFTER.aims for row in aim.judged(report)]


def around(ratio, low):
    return {"median": ratio, "low": low, "high": 2 * ratio, "coverage": 0.92}


def test_aims_are_judged_by_the_lower_end_of_the_interval():
    aims = judged(level=1.0, draft=0.99)
    assert [aim["met"] for aim in aims] == [True] * 6 + [False] * 4
    assert [aim["bar"] for aim in aims] == [7.0, 6.0, 3.3, 4.5, 3.8, 2.2, 6.0, 6.0, 5.0, 5.0]
    assert aims[0]["value"] == 7.0 and aims[0]["interval"] == [7.0, 18]


def test_without_a_fused_form_no_aim_is_judged():
    assert {aim["met"] for aim in judged(None, None)} == {None}


@pytest.mark.parametrize("forms", [(EAGER,), FORMS], ids=["eager alone", "both forms"])
def test_a_small_run_measures_every_part(tmp_path, forms):
    drafters = []
    for name in FAMILIES:
        tiny_drafters.make_drafter(tmp_path / name, name)
        models = {form: model_at(tmp_path / name) for form in forms}
        drafters.append(DrafterForms(name, models, "" if FUSED in forms else "is not there"))
    steps = []

    def begin(title, count):
        steps.append(-count)
        return lambda: steps.append(1)

    options = DrafterBenchOptions(repetitions=2, sessions=(1, 2), contexts=(70, 150))
    found = measure_drafters(drafters, prompts_of(2), ids_of(150), options, begin)
    assert sum(steps) == 0
    assert [(row["drafter"], row["rows"]) for row in found["levels"]] == [(n, r) for n in FAMILIES for r in LEVEL_ROWS]
    assert [row["shape"] for row in found["drafts"]] == [shape for shape in SHAPES for _ in FAMILIES]
    assert [(row["sessions"], row["trees"]) for row in found["sessions"]] == [(1, 3)] * 3 + [(2, 6)] * 3
    assert {row["context"] for row in found["lengths"]} == {70, 150}
    for row in (row for rows in found.values() for row in rows):
        assert tuple(row["ms"]) == forms and (row["eager_over_fused"] is None) is (FUSED not in forms)
        assert all(each["median"] > 0 for each in row["ms"].values())
    memory = {(row["drafter"], row["context"]): row["text_kib"][EAGER] for row in found["lengths"]}
    assert memory["llama", 150] > memory["llama", 70] and memory["mamba", 150] == memory["mamba", 70] > 0
    assert len(list(DRAFTER.all_tables({**found, "aims": []}))) == 4
    draw(DRAFTER.plots, found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
