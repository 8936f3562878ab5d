"""Verification modes of a request: each answers end to end, is refused by name where it cannot be had, and a drafter
that lies about its laws costs speculation alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from dendro.answer import build_request
from dendro.drawn_form import has_drawn_form
from dendro.errors import BadRequest
from dendro.modes import LISTED_MODES, VerificationMode, draft_seed
from dendro.options import Options
from dendro.speculation import Speculation
from dendro.text import Sampling
from dendro.v1 import generation_pb2 as pb

from cluster.api.local import LocalClient
from cluster.config import Config
from cluster.peers import drafter
from cluster.policies import ConservativeUCB, Experience, Experiences
from cluster.policies.prior import PriorKey
from cluster.router.speculation import TargetArms, plan_speculation
from cluster.running import local_ingress
from drafter_service.sampled import DrawnGrowth, GuessDraws
from tests.support import tiny_models
from tests.support.edge import EdgePeers, config, ingress

pytestmark = pytest.mark.usefixtures("opened_drafters")

PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(40)]
TOKENS = 24
SHAPES = {"naive": "(2,2,1)", "multi-step": "(2,2,1)", "block": "(1,1,1)", "lenient": "(2,1)"}
DRAWN_IN: dict[str, tuple[str, ...]] = {
    "naive": ("(2,1)", "dynamic(3,2,5)", "(1,1,1)"),
    "multi-step": ("(2,1)", "dynamic(3,2,5)", "(1,1,1)"),
    "block": ("(1,1,1)",),
    "lenient": ("(2,1)", "dynamic(3,2,5)", "(1,1,1)"),
}
SAMPLED: Options = {"temperature": 0.8, "seed": 5, "max_new_tokens": TOKENS, "ignore_end": True}


@asynccontextmanager
async def serving(
    folder: Path, drafter_seed: int = 0, modes=LISTED_MODES, arms=("(2,1)",)
) -> AsyncIterator[LocalClient]:
    """A target, and a drafter of the same weights (seed 0) or of others."""
    (folder / "target").mkdir()
    (folder / "drafter").mkdir()
    tiny_models.make_checkpoint(folder / "target")
    tiny_models.make_checkpoint(folder / "drafter", seed=drafter_seed)
    models = {
        name: {"checkpoint": str(folder / name), "dtype": "float32", "max_sessions": 4}
        for name in ("target", "drafter")
    }
    config = Config.of(
        {
            "targets": {"target": models["target"] | {"max_length": 256}},
            "drafters": {"drafter": models["drafter"]},
            "verification_modes": list(modes),
            "speculation": {"arms": list(arms)},
        },
        folder,
    )
    async with local_ingress(config) as router:
        yield LocalClient(router)


def options(mode: str, **others: Any) -> Options:
    lenience = {"lenience": 0.3} if mode == "lenient" else {}
    return cast(Options, {**SAMPLED, "mode": mode, "speculation": SHAPES[mode], **lenience, **others})


@pytest.mark.slow
async def test_each_mode_answers_with_full_trees_and_the_same_again_for_the_same_seed(tmp_path: Path):
    async with serving(tmp_path, drafter_seed=1) as client:
        for mode in LISTED_MODES:
            one, two = [await client.generate_text(PROMPT, **options(mode)) for _ in range(2)]
            stats = one.complete.speculation
            assert one.token_ids == two.token_ids and len(one.token_ids) == TOKENS
            assert not stats.contradictions and not stats.trimmed_tokens
            rows = {"naive": 10, "multi-step": 10, "block": 3, "lenient": 4}[mode]
            assert stats.drafted_tokens == rows * (stats.rounds - stats.late_drafts) > 0
            assert (one.started.mode, one.started.lossy) == (mode, mode == "lenient")


@pytest.mark.slow
async def test_a_policy_picks_trees_in_each_mode(tmp_path: Path):
    """The answer has the tokens of plain decoding in mode naive, and its full length in all. A policy may find that no
    tree pays; `paper_ucb` plays every arm."""
    async with serving(tmp_path, drafter_seed=1, arms=["(2,1)", "dynamic(3,2,5)", "(1,1,1)"]) as client:
        plain = await client.generate_text(PROMPT, **SAMPLED, speculation="off")
        for mode in LISTED_MODES:
            drafted = 0
            for policy in ("conservative_ucb", "paper_ucb"):
                way = Speculation(policy=policy)
                done = await client.generate_text(PROMPT, **options(mode, speculation=way, max_new_tokens=48))
                stats = done.complete.speculation
                assert len(done.token_ids) == 48 and not stats.contradictions and not stats.trimmed_tokens
                assert set(stats.rounds_by_shape) <= {"off", *DRAWN_IN[mode]}
                drafted += stats.drafted_tokens
                assert mode != "naive" or done.token_ids[:TOKENS] == plain.token_ids
            assert drafted


@pytest.mark.slow
async def test_a_dynamic_tree_is_drawn_by_its_form_and_its_answer_is_the_same_again(tmp_path: Path, monkeypatch):
    checked = []

    def has_form(tree, shape):
        checked.append((has_drawn_form(tree, shape), tuple(tree.parents.tolist())))
        return checked[-1][0]

    monkeypatch.setattr(drafter, "has_drawn_form", has_form)
    async with serving(tmp_path, drafter_seed=1) as client:
        for mode in ("multi-step", "lenient"):
            given = options(mode, speculation="dynamic(3,3,8)")
            one, two = [await client.generate_text(PROMPT, **given) for _ in range(2)]
            stats = one.complete.speculation
            assert one.token_ids == two.token_ids and len(one.token_ids) == TOKENS
            assert not stats.contradictions and not stats.trimmed_tokens and stats.drafted_tokens
    assert all(good for good, _ in checked) and len({form for _, form in checked}) > 1


@pytest.mark.slow
async def test_a_drafter_that_leaves_drawn_guesses_out_changes_no_token(tmp_path: Path, monkeypatch):
    """What it sends are first draws of the laws that it reports, so that the verifier cannot know."""

    def failing(self, growth, candidates, scores):
        raise RuntimeError("no tree")

    def fewer(self, reached):
        return [max(1, width - 1) for width in self._widths]

    given = options("multi-step", speculation="dynamic(3,3,8)")
    async with serving(tmp_path, drafter_seed=1) as client:
        with monkeypatch.context() as broken:
            broken.setattr(GuessDraws, "drawn", failing)
            plain = await client.generate_text(PROMPT, **given)
        monkeypatch.setattr(DrawnGrowth, "_counts", fewer)
        monkeypatch.setattr(DrawnGrowth, "_next", lambda self, first: [])
        done = await client.generate_text(PROMPT, **given)
    assert done.token_ids == plain.token_ids and not done.complete.speculation.accepted_tokens


@pytest.mark.slow
async def test_a_drafter_of_the_targets_law_has_every_first_guess_accepted(tmp_path: Path):
    """With top-k 8 the drafter's law of 32 tokens is the target's, but for a probability of 1e-6 each."""
    async with serving(tmp_path) as client:
        for mode in ("multi-step", "block", "lenient"):
            done = await client.generate_text(PROMPT, **options(mode, speculation="(1,1,1)", top_k=8))
            stats = done.complete.speculation
            assert stats.drafted_tokens and stats.discarded_tokens <= max(stats.cut_tokens, 0) + 3 * stats.late_drafts


@pytest.mark.slow
async def test_naive_sampling_has_the_tokens_of_plain_decoding(tmp_path: Path):
    async with serving(tmp_path, drafter_seed=1) as client:
        for more in ({}, {"top_p": 0.9, "repetition_penalty": 1.3, "banned_ids": range(40)}, {"temperature": 0.3}):
            plain = await client.generate_text(PROMPT, **{**SAMPLED, **more}, speculation="off")
            for shape in ("(2,2,1)", "dynamic(3,3,8)", "beam(3,2)", "until(0.6,4)"):
                done = await client.generate_text(PROMPT, **options("naive", **more, speculation=shape))
                assert done.token_ids == plain.token_ids
                assert done.complete.speculation.drafted_tokens


@pytest.mark.slow
async def test_greedy_and_a_lenience_near_1_have_the_greedy_tokens(tmp_path: Path):
    greedy = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_end": True}
    async with serving(tmp_path, drafter_seed=1) as client:
        plain = await client.generate_text(PROMPT, **greedy, speculation="off")
        same = await client.generate_text(PROMPT, **greedy, mode="greedy", speculation="(2,2,1)")
        near = await client.generate_text(PROMPT, **greedy, mode="lenient", lenience=0.999999, speculation="(2,2,1)")
        far = await client.generate_text(PROMPT, **greedy, mode="lenient", lenience=1e-9, speculation="(2,2,1)")
    assert plain.token_ids == same.token_ids == near.token_ids != far.token_ids
    assert not same.started.lossy and near.started.lossy
    assert far.complete.speculation.accepted_tokens > near.complete.speculation.accepted_tokens


def without_laws(draws: GuessDraws, drawn):
    draws.laws.clear()
    return drawn


def of_other_probabilities(draws: GuessDraws, drawn):
    """The probabilities in reverse: the children were drawn from others."""
    draws.laws[:] = [replace(law, probabilities=law.probabilities[::-1].copy()) for law in draws.laws]
    return drawn


def of_best_children(draws: GuessDraws, drawn):
    """The likeliest tokens as if they had been drawn."""
    tokens, scores, chances = drawn
    order = [np.argsort(-np.array(each), kind="stable") for each in scores]
    return [[row[at] for at in best] for row, best in zip(tokens, order, strict=True)], scores, chances


def of_improbable_children(draws: GuessDraws, drawn):
    draws.laws[:] = [replace(law, probabilities=np.eye(1, len(law.ids), 0)[0]) for law in draws.laws]
    return drawn


LIES = [without_laws, of_other_probabilities, of_best_children, of_improbable_children]


@pytest.mark.slow
async def test_trees_that_contradict_their_laws_cost_speculation_and_change_no_token(tmp_path: Path, monkeypatch):
    """After three of them no more are asked for. The oracle is a drafter that makes no tree at all."""
    honest = GuessDraws.drawn

    def failing(self, growth, candidates, scores):
        raise RuntimeError("no tree")

    async with serving(tmp_path, drafter_seed=1) as client:
        monkeypatch.setattr(GuessDraws, "drawn", failing)
        plain = await client.generate_text(PROMPT, **options("multi-step"))
        assert not plain.complete.speculation.accepted_tokens
        for lie in LIES:

            def lying(self, growth, candidates, scores, lie=lie):
                return lie(self, honest(self, growth, candidates, scores))

            monkeypatch.setattr(GuessDraws, "drawn", lying)
            done = await client.generate_text(PROMPT, **options("multi-step"))
            assert done.token_ids == plain.token_ids, lie.__name__
            assert not done.complete.speculation.accepted_tokens


@pytest.mark.parametrize(
    "field, reason, given",
    [
        ("mode", "not among the configuration's verification_modes", options("multi-step")),
        ("mode", "'quick' is not one of coupled", {**SAMPLED, "mode": "quick"}),
        ("mode", "greedy needs 0", {**SAMPLED, "mode": "greedy"}),
        ("mode", "at temperature 0 use greedy", options("multi-step", temperature=0.0)),
        ("mode", "at temperature 0 use greedy", options("naive", temperature=0.0)),
        ("lenience", "in mode lenient", {**options("lenient"), "lenience": None}),
        ("lenience", "in mode lenient", options("lenient", lenience=0.0)),
        ("lenience", "in mode lenient", options("lenient", lenience=float("nan"))),
        ("lenience", "belongs to lenient", {**SAMPLED, "lenience": 0.5}),
    ],
)
async def test_a_mode_that_a_request_cannot_have_is_refused_by_its_field(field: str, reason: str, given):
    with pytest.raises(BadRequest, match=f"^{field}: .*{reason}"):
        await refused(given)


LISTED = {"verification_modes": list(LISTED_MODES)}


@pytest.mark.parametrize(
    "field, given",
    [
        ("mode", options("multi-step", speculation="off")),
        ("speculation.shape", options("block", speculation="dynamic(3,3,8)")),
        ("speculation.shape", options("multi-step", speculation="until(0.5,4)")),
        ("speculation.shape", options("lenient", speculation="until(auto,4)")),
        ("speculation.shape", options("block", speculation="beam(3,2)")),
        ("speculation.shape", options("multi-step", speculation="proposed(3)")),
        ("speculation.shape", options("block", speculation="(2,1)")),
        ("speculation.shape", options("multi-step", speculation="(40)")),
    ],
)
async def test_a_shape_that_a_mode_cannot_have_is_refused_by_its_field(field: str, given):
    with pytest.raises(BadRequest, match=f"^{field}: .*{given['mode'] if field == 'mode' else ''}"):
        await refused(given, **LISTED)


@pytest.mark.parametrize("mode", ["multi-step", "lenient"])
async def test_auto_is_refused_where_no_arm_can_be_drawn(mode: str):
    arms = {"speculation": {"arms": ["off", "until(0.6,4)", "proposed(3)"]}}
    with pytest.raises(BadRequest, match=f"^speculation.mode: is AUTO, but no arm has trees of mode {mode}"):
        await refused(options(mode, speculation="auto"), **LISTED, **arms)


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("naive", ["off", "(1,1)", "(2,1)", "dynamic(2,2,3)", "beam(2,2)", "proposed(3)"]),
        ("multi-step", ["off", "(1,1)", "(2,1)", "dynamic(2,2,3)"]),
        ("block", ["off", "(1,1)"]),
    ],
)
def test_a_policy_chooses_among_the_arms_that_its_mode_can_have(mode: str, expected: list[str]):
    """Nothing is proposed where guesses are drawn, and the request does not take part in speculation trials."""
    settings = config(speculation={"arms": ["(2,1)", "dynamic(2,2,3)", "beam(2,2)", "proposed(3)"]}, **LISTED)
    sampling = Sampling(1.0, mode=VerificationMode(mode))
    plan = plan_speculation(pb.Speculation(), TargetArms.of(settings, "demo"), Experience(), sampling)
    assert isinstance(plan.policy, ConservativeUCB) and not plan.free
    assert [str(arm.shape) for arm in plan.policy.arms] == expected
    assert (plan.proposed_rows == 1) == sampling.draws_guesses


def test_what_is_learned_in_a_listed_mode_is_not_used_in_another():
    experiences = Experiences()
    modes = list(VerificationMode)
    kept = [experiences.of("acme", mode) for mode in modes]
    assert kept[0] is experiences.of("acme") and kept[0] is kept[modes.index(VerificationMode.GREEDY)]
    assert len({id(each) for each in kept}) == len(modes) - 1
    names = {PriorKey.of("demo", ("mamba",), 1.0, "acme", mode).name for mode in modes}
    assert PriorKey.of("demo", ("mamba",), 1.0, "acme").name in names and len(names) == len(modes) - 1


async def test_a_deadline_is_refused_where_the_router_waits_for_every_tree():
    request = build_request([1, 2, 3], **options("multi-step", max_new_tokens=8))
    request.speculation.deadline_ms = 5
    with pytest.raises(BadRequest, match=r"^speculation.deadline_ms: has no use in mode multi-step"):
        _ = [event async for event in ingress(EdgePeers(), **LISTED).generate(request)]


async def refused(given, **sections):
    request = build_request([1, 2, 3], **{**given, "max_new_tokens": 8})
    return [event async for event in ingress(EdgePeers(), **sections).generate(request)]


@pytest.mark.parametrize("modes", [["coupled"], ["naive", "naive"], ["quick"]])
def test_the_configuration_refuses_a_mode_that_cannot_be_listed(tmp_path: Path, modes):
    with pytest.raises(BadRequest, match="^verification_modes"):
        Config.of({"targets": {"t": {"checkpoint": "x"}}, "verification_modes": modes}, tmp_path)


def test_a_drafters_seed_is_not_the_requests():
    seeds = [draft_seed(seed) for seed in (0, 1, 2**64 - 1)]
    assert len({0, 1, 2**64 - 1, *seeds}) == 6 and all(0 <= seed < 2**64 for seed in seeds)
