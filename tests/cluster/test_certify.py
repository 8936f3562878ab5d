import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dendro.answer import SpeculationStats
from dendro.errors import BadRequest, DendroError, EngineFailed
from dendro.grammars import INSTALL
from dendro.shapes import OFF, LevelShape
from dendro.speculation import Mode, Speculation
from dendro.text import Sampling

from cluster.api.local import LocalClient
from cluster.certify import command
from cluster.certify.asking import SamplingLaw, answers
from cluster.certify.checks import identity_under_sampling, lossy_rule_is_noticed, planted_faults_are_noticed
from cluster.certify.guesses import GuessCount
from cluster.certify.law import LARGEST_DRAWS, draws_to_notice, expected_law, fit, fit_counts
from cluster.certify.parameters import SAMPLES, identity_under_parameters
from cluster.certify.promises import Promise, failed, first_difference, report, tables
from cluster.certify.stop_strings import stop_strings_end_answers
from cluster.certify.twin import (
    KeyedByRow,
    OneTooMany,
    TwinVerifier,
    answer_of,
    float32_noise_is_infinite,
    top_k_as_if_sampled,
)
from cluster.config import Config
from cluster.router.stop_strings import StoppedText, StopSearch
from cluster.running import running
from tests.parameters import PARAMETERS
from tests.support import edge, tiny_models

SMALL = command.CertifySize(
    greedy_prompts=1, greedy_tokens=16, prompts=1, tokens=12, draws=2_000, far_draws=60, own_prompts=1, own_tokens=12,
    stop_draws=2, combinations=3,
)  # fmt: skip
VOCABULARY = 16
TABLE = torch.from_numpy(np.random.default_rng(5).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)) * 1.5


def toy_logits(ids, tree):
    """A target whose logits depend on the last token alone."""
    return TABLE[torch.from_numpy(tree.tokens)]


async def answer_by(rule, shape, drafter_seed):
    return await answer_of([1, 2, 3], 96, shape, rule(toy_logits, Sampling(temperature=1.0, seed=3)), drafter_seed)


async def test_the_twin_without_a_fault_emits_the_plain_tokens():
    plain = await answer_by(TwinVerifier, OFF, 3)
    assert await answer_by(TwinVerifier, LevelShape((3, 2, 1)), 3) == plain
    assert await answer_by(TwinVerifier, LevelShape((3, 2, 1)), 4) == plain


@pytest.mark.parametrize("rule, drafter_seed", [(KeyedByRow, 3), (OneTooMany, 4)])
async def test_a_planted_fault_changes_tokens(rule, drafter_seed):
    assert await answer_by(rule, LevelShape((2, 2, 1)), drafter_seed) != await answer_by(TwinVerifier, OFF, 3)


def test_the_law_check_passes_true_draws_and_fails_a_lossy_rule():
    law = expected_law(TABLE[0], 1.0)
    rng = np.random.default_rng(0)
    assert fit(rng.choice(VOCABULARY, size=4000, p=law).tolist(), law).good
    assert not fit(rng.choice(VOCABULARY, size=4000, p=top_k_as_if_sampled(law, 3)).tolist(), law).good


PEAKED = np.array([0.999, *[0.001 / 5000] * 5000])
HALVES = np.array([0.5, 0.4, *[0.1 / 5000] * 5000])
FLAT = np.full(5000, 1 / 5000)


@pytest.mark.parametrize("law, draws", [(PEAKED, 200), (PEAKED, 4000), (HALVES, 200), (FLAT, 200)])
def test_right_draws_are_rejected_no_more_often_than_the_p_value(law, draws):
    """400 seeded samples. On average 4 have p <= 0.01; 14 or more have it with probability 1e-4."""
    rng = np.random.default_rng(11)
    found = [fit_counts(rng.multinomial(draws, law), law) for _ in range(400)]
    assert sum(each.p <= 0.01 for each in found) <= 13
    assert all(each.good for each in found)  # the probability that one is not is 400 * ALPHA = 0.01


def test_tokens_that_are_half_as_likely_again_are_noticed_with_the_computed_number_of_draws():
    """Seeded: with the number of draws of `draws_to_notice` each of 3 samples is rejected, with a twentieth of it at
    most half of 20."""
    off = PEAKED.copy()
    off[0], off[1:] = 0.9985, 0.0015 / 5000
    needed = draws_to_notice(off, PEAKED)
    rng = np.random.default_rng(3)
    assert 20_000 < needed < 1_000_000
    assert not any(fit_counts(rng.multinomial(needed, off), PEAKED).good for _ in range(3))
    assert sum(fit_counts(rng.multinomial(needed // 20, off), PEAKED).good for _ in range(20)) >= 10


def test_one_draw_of_a_rare_token_fits_the_law_and_five_do_not():
    law = np.array([0.9999, 0.0001])
    assert fit([0] * 99 + [1], law).good  # probability 0.01
    assert not fit([0] * 95 + [1] * 5, law).good


def test_a_flat_law_with_few_draws_reports_that_it_would_not_show_a_fault():
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 1e-3
    law = expected_law(flat, 1.0)
    needed = draws_to_notice(top_k_as_if_sampled(law, 3), law)
    promise = Promise("p")
    lossy_rule_is_noticed(promise, flat, most_draws=needed // 2)
    assert promise.kept is None and not promise.broken
    assert "not shown: would need" in promise.found[0]
    lossy_rule_is_noticed(promise, flat)
    assert promise.kept is True


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0])
def test_a_lossy_rule_is_noticed_on_flat_and_on_peaked_laws(scale):
    """At scale 30 the likeliest token has probability 1 at temperature 1, and a higher temperature is chosen."""
    promise = Promise("p")
    lossy_rule_is_noticed(promise, torch.randn(5000, generator=torch.Generator().manual_seed(0)) * scale)
    assert promise.kept is True, promise


def test_a_law_of_one_certain_token_shows_no_fault_and_breaks_no_promise():
    logits = torch.full((64,), -1e9)
    logits[5] = 0.0
    promise = Promise("p")
    lossy_rule_is_noticed(promise, logits)
    assert promise.kept is None and f"more than {LARGEST_DRAWS:,}" in promise.found[0]


@pytest.mark.parametrize("scale", [1.0, 12.0, 1e6], ids=["spread", "peaked", "certain"])
async def test_planted_faults_are_shown_or_reported_as_not_shown(scale):
    """On the peaked target no planted fault changes a token at temperature 1; on the certain one, at no temperature."""

    def logits_of(ids, tree):
        return toy_logits(ids, tree) * scale

    promise = await planted_faults_are_noticed(logits_of, (1, 2, 3), 48, lambda: None)
    assert promise.kept is True, promise.broken
    assert sum("not shown" in line for line in promise.found) == (3 if scale == 1e6 else 0), promise.found


def test_the_law_of_the_lossy_rule_is_what_its_steps_give():
    """Computed by hand: law (0.5, 0.3, 0.2); the draft is the likeliest token at 1.5 times the temperature."""
    law = np.array([0.5, 0.3, 0.2])
    draft = law ** (1 / 1.5) / (law ** (1 / 1.5)).sum()
    assert law[0] > draft[0]  # so the likeliest is always accepted
    assert top_k_as_if_sampled(law, 1).tolist() == [1.0, 0.0, 0.0]


def test_a_draw_of_probability_0_fails_whatever_the_others():
    assert fit([0] * 999 + [1], np.array([1.0, 0.0])).p == 0.0


@pytest.mark.parametrize("top_k, top_p, kept", [(0, 1.0, 4), (2, 1.0, 2), (0, 0.6, 2), (3, 0.5, 1)])
def test_the_expected_law_keeps_the_head_of_top_k_and_top_p(top_k, top_p, kept):
    law = expected_law(torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])), 1.0, top_k, top_p)
    assert np.count_nonzero(law) == kept and law.sum() == pytest.approx(1.0)


def test_float32_noise_of_the_largest_word_is_infinite():
    assert float32_noise_is_infinite()


class ToyService:
    """Answers with the tokens 1, 2, 3, ...; with speculation, the fourth is another one where `wrong` is set."""

    def __init__(self, wrong: bool) -> None:
        self.wrong, self.asked = wrong, []

    async def generate_text(self, prompt, *, speculation, max_new_tokens, **options):
        self.asked.append((speculation.mode, speculation.shape, options))
        ids = list(range(1, max_new_tokens + 1))
        if self.wrong and speculation.mode != Mode.OFF:
            ids[3] = 0
        guesses = int(speculation.mode == Mode.FIXED)
        complete = SimpleNamespace(speculation=SpeculationStats(drafted_tokens=guesses, discarded_tokens=guesses))
        return SimpleNamespace(token_ids=tuple(ids), logprobs=(), prompt=(), complete=complete)

    async def generate_samples(self, prompt, *, n, **options):
        self.asked.append((options["speculation"].mode, options["speculation"].shape, {"n": n}))
        return [await self.generate_text(prompt, **options) for _ in range(n)]


@pytest.mark.parametrize("margin, kept", [(None, False), (1.0, False), (1e-6, True)], ids=["bitwise", "wide", "close"])
async def test_an_answer_that_speculation_changes_breaks_the_promise_of_parameters_unless_its_margin_is_small(
    margin, kept
):
    margins = []

    def margin_of(ids, scores_of):
        margins.append((len(ids), int(scores_of(torch.zeros(VOCABULARY)).isneginf().sum())))
        return margin

    given = [(5, 6)], 12, 20, ["(2,1)", "(1,1)"], VOCABULARY, None if margin is None else margin_of, 1e-4
    right = await identity_under_parameters(ToyService(wrong=False), *given, lambda: None)
    assert right.kept is True and right.answers == (40 if margin is not None else 40 + SAMPLES) and not margins
    service = ToyService(wrong=True)
    promise = await identity_under_parameters(service, *given, lambda: None)
    assert promise.kept is kept and promise.excused == (40 if kept else 0)
    assert {shape for _, shape, _ in service.asked} == {"", "(2,1)", "(1,1)"}
    asked = {name for _, _, options in service.asked for name in options}
    # Of a mode only the law is promised, not the tokens.
    unset = {"max_new_tokens", "mode", "lenience", *(["structure", "n"] if margin is not None else [])}
    # Texts become the ids of other parameters, or those of the prompt, before any model sees them.
    unset |= {"bad_word_texts", "logit_bias_texts", "show_special_tokens", "literal_prompt"}
    assert asked | unset == {each.name for each in PARAMETERS}, "a parameter is never set"
    if margin is not None:
        assert {length for length, _ in margins} == {5} and any(removed for _, removed in margins)


async def test_a_cluster_without_structures_is_asked_for_one_once_and_the_promise_of_parameters_names_the_reason():
    class Unstructured(ToyService):
        async def generate_text(self, prompt, **options):
            done = await super().generate_text(prompt, **options)
            if "structure" in options:
                raise BadRequest("structure.json_schema", reason)
            return done

    service, reason = Unstructured(wrong=False), INSTALL
    given = [(5, 6)], 12, 20, ["(2,1)"], VOCABULARY, None, 1e-4
    promise = await identity_under_parameters(service, *given, lambda: None)
    assert promise.kept is True and sum("structure" in options for _, _, options in service.asked) == 1
    assert any(line.startswith("no structure was tried: structure.json_schema: needs") for line in promise.found)
    reason = "was not compiled within 0.5 s"
    promise = await identity_under_parameters(service, *given, lambda: None)
    assert promise.kept is None and reason in promise.why


def test_a_missing_token_is_a_difference():
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_one_broken_finding_breaks_the_promise_whatever_follows():
    promise = Promise("p")
    for holds in (True, False, True):
        promise.check(holds, "line")
    assert promise.kept is False
    (found,) = json.loads(json.dumps(report([promise], 0.0, 1, "s")["promises"]))
    assert found["broken"] == ["line"]


DRAFTER = {"checkpoint": "target", "dtype": "float32"}


def test_the_arms_of_each_drafter_are_fixed_and_named_where_there_are_several():
    sections = {"targets": {"t": {"checkpoint": "x", "max_rows": 8}}, "drafters": {"d": DRAFTER, "e": DRAFTER}}
    arms = ["off", "(1,1)", "e:(2,1)", "proposed(7)", "(3,2,1)"]  # the last has 16 rows
    config = Config.model_validate(sections | {"speculation": {"arms": arms}})
    one = command.fixed_arms(config, "t", ("e",))
    assert one == ["(1,1)", "(2,1)", "proposed(7)", *map(str, command.OF_EACH_KIND)]
    both = command.fixed_arms(config, "t", ("d", "e"))
    assert both[:4] == ["d:(1,1)", "e:(1,1)", "e:(2,1)", "proposed(7)"]
    assert both[4:] == [f"{name}:{shape}" for shape in command.OF_EACH_KIND for name in ("d", "e")]


def one_token_more(self, verdict):
    """The text ends at the stop string, but the tokens of its round are kept."""
    done = plain_cut(self, verdict)
    return replace(verdict, finish=done.finish)


def stop_string_sent(self, text):
    """As if `include_stop` were set."""
    self._included = True
    return plain_push(self, text)


plain_cut, plain_push = StoppedText.cut, StopSearch.push


@pytest.mark.parametrize("fault", [None, "tokens", "text"])
async def test_a_router_that_cuts_at_another_place_breaks_the_promise_of_stop_strings(monkeypatch, fault):
    if fault == "tokens":
        monkeypatch.setattr(StoppedText, "cut", one_token_more)
    if fault == "text":
        monkeypatch.setattr(StopSearch, "push", stop_string_sent)
    client, ways = LocalClient(edge.ingress(edge.EdgePeers())), ["off", "(1,1,1)", "(2,1)"]
    prompts = [tuple(b"walk"), tuple(b"the")]
    promise = await stop_strings_end_answers(client, prompts, 24, 4, ways, None, 0.0, lambda: None)
    assert promise.kept is (fault is None), promise
    assert promise.answers == 2 * 2 * 4 * len(ways)


@pytest.mark.parametrize("lost", [False, True])
async def test_promises_are_not_kept_by_answers_without_one_verified_guess(lost):
    peers, arms = edge.EdgePeers(), ["(1,1,1)", "(2,1)"]
    peers.drafter_lost = lost
    client, prompts = LocalClient(edge.ingress(peers)), [tuple(b"walk")]
    exact = None, 0.0, lambda: None
    sampled = await identity_under_sampling(client, prompts, 12, arms, *exact)
    parameters = await identity_under_parameters(client, prompts, 12, 8, arms, edge.END, lambda *_: 1.0, *exact[1:])
    stopped = await stop_strings_end_answers(client, prompts, 12, 2, ["off", "auto", *arms], *exact)
    for promise in (sampled, parameters, stopped):
        assert promise.kept is (None if lost else True), promise
        assert not promise.broken and (lost or promise.guesses)
        assert failed(report([promise], 0.0, 1, "s")) is lost
        for arm in arms:
            assert lost is bool(re.search(rf"{re.escape(arm)}: [1-9]\d* drafts were late", promise.why))
    (_, columns, (row,)), _ = tables(report([sampled], 0.0, 1, "s"))
    assert row[columns.index("guesses verified")] == f"{sampled.guesses:,}"


async def test_one_arm_without_a_verified_guess_leaves_the_promise_of_sampled_answers_unchecked():
    """The other arm has guesses. An arm that may guess nothing is left out, unless its drafts were late."""
    for arm, late, kept in (("(1)", 0, None), ("(1)", 3, None), ("proposed(3)", 0, True), ("until(auto,8)", 2, None)):
        promise = Promise("p", kept=True)
        counted = GuessCount(promise, ["(2,1)", arm])
        counted.add("(2,1)", SpeculationStats(drafted_tokens=4, trimmed_tokens=1))
        counted.add(arm, SpeculationStats(late_drafts=late))
        counted.add("", SpeculationStats(drafted_tokens=2))
        counted.judge(each_arm=True)
        assert (promise.kept, promise.guesses) == (kept, 5) and (f"{arm}: {late} drafts" in promise.why) is not kept
    broken = Promise("p", kept=False)
    GuessCount(broken, ["(2,1)"]).judge(each_arm=True)
    assert broken.kept is False and broken.why


@pytest.mark.parametrize("answered", [0, 5])
async def test_an_error_of_the_server_ends_one_check_and_breaks_its_promise_if_something_was_compared(answered):
    class ToyOfErrors(ToyService):
        async def generate_text(self, prompt, **options):
            if len(self.asked) >= answered:
                raise EngineFailed("the verifier refuses the tree")
            return await super().generate_text(prompt, **options)

    given = [(5, 6)], 12, 20, ["(2,1)"], VOCABULARY, lambda *_: 1.0, 0.0, lambda: None
    promise = await identity_under_parameters(ToyOfErrors(wrong=False), *given)
    assert promise.kept is (False if answered else None) and promise.tokens_compared == (36 if answered else 0)
    assert [*promise.broken, promise.why] != [""] and "ended by an error: EngineFailed: the verifier" in str(promise)
    assert failed(report([promise], 0.0, 1, "s"))


async def test_no_request_of_a_check_is_sent_after_the_error_of_another():
    class ToyOfLostRequests(ToyService):
        async def generate_text(self, prompt, **options):
            await super().generate_text(prompt, **options)
            await asyncio.sleep(0)
            raise EngineFailed("lost")

    service = ToyOfLostRequests(wrong=False)
    with pytest.raises(DendroError, match="lost"):
        await answers(service, [(5, 6)] * 9, range(9), SamplingLaw(1.0), Speculation(), 4, lambda: None, at_once=2)
    asked = len(service.asked)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(service.asked) == asked < 9


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("drafters", [{}, {"d": DRAFTER}, {"d": DRAFTER, "e": DRAFTER}], ids=["none", "one", "two"])
async def test_a_running_cluster_of_other_models_than_the_demo_is_certified(monkeypatch, tmp_path, drafters):
    """Its tokenizer is not the demo's, so no drafter of the demo fits it."""
    tiny_models.make_checkpoint(tmp_path / "target")
    target = {"checkpoint": "target", "dtype": "float32", "max_length": 512}
    config = Config.of({"targets": {"t": target}, "drafters": drafters}, tmp_path)
    monkeypatch.setattr(command, "QUICK", SMALL)
    report_file = tmp_path / "report.json"
    async with running(config, local=True) as address:
        await asyncio.to_thread(command.certify, None, address, tmp_path / "target", False, True, report_file)
    found = json.loads(report_file.read_text())["promises"]
    assert all(promise["kept"] for promise in found) and len(found) == 7
    assert any("in float32" in line for promise in found for line in promise["found"])


def test_a_relative_target_of_a_running_cluster_is_a_folder_and_no_name_on_a_hub(monkeypatch, tmp_path):
    seen = []

    async def run_certify(config, far, *_):
        seen.extend(config.targets.values())
        async with far() as client:
            assert client is not None
        return []

    monkeypatch.setattr(command, "run_certify", run_certify)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "big").mkdir(parents=True)
    command.certify(address="127.0.0.1:1", target=Path("models/big"), markdown=tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text().startswith("# dendro certify\n\n- Command: ")
    (target,) = seen
    assert target.checkpoint == tmp_path / "models" / "big" and not target.checkpoint_name


def test_a_certification_that_is_ended_leaves_the_promises_that_it_checked(monkeypatch, tmp_path):
    async def run_certify(*given):
        on_checked = given[-1]
        on_checked(Promise("(a) first", kept=True))
        on_checked(Promise("(b) second", kept=False))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_certify", run_certify)
    report_file = tmp_path / "a new folder" / "report.json"
    with pytest.raises(KeyboardInterrupt):
        command.certify(json_file=report_file)
    written = json.loads(report_file.read_text())
    assert [promise["promise"] for promise in written["promises"]] == ["(a) first", "(b) second"]
    assert written["complete"] is False


async def test_log_probabilities_that_speculation_changes_break_the_promise_of_parameters():
    class OtherLogprobs(ToyService):
        async def generate_text(self, prompt, *, speculation, **options):
            done = await super().generate_text(prompt, speculation=speculation, **options)
            done.logprobs = (speculation.mode == Mode.OFF,)
            return done

    given = [(5, 6)], 12, 4, ["(2,1)"], VOCABULARY, None, 1e-4
    promise = await identity_under_parameters(OtherLogprobs(wrong=False), *given, lambda: None)
    assert promise.kept is False and any("has other log-probabilities" in line for line in promise.broken)
    assert any(f"0 of {SAMPLES} samples" in line for line in promise.broken)


def test_a_key_and_an_authority_belong_to_a_running_cluster(tmp_path):
    for option, given in (("--key-file", {"key_file": tmp_path}), ("--ca", {"ca": tmp_path})):
        with pytest.raises(BadRequest, match=f"{option}: belongs to --address"):
            command.certify(**given)
