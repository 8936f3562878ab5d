"""Parameters of a request: speculation changes no token, a resume goes on, bad input is refused by its field."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from dendro.answer import build_request
from dendro.errors import BadRequest
from dendro.options import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED_IDS, MAX_LISTED_IDS, MAX_STOP_IDS, Options
from dendro.text import Finish
from dendro.v1 import generation_pb2 as pb

from cluster.api.local import LocalClient
from cluster.certify.parameters import random_options
from tests.parameters import EACH, PAGE, PARAMETERS, written
from tests.support.edge import END, VOCABULARY, EdgePeers, ingress, resume_of
from tests.support.self_drafting import self_drafting

PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(40)]
TOKENS = 24
WAYS = ("auto", "(2,2,1)", "dynamic(3,3,8)", "proposed(7)")
HUGE = 100_000


async def check_identity(client: LocalClient, options: Options, ways=WAYS) -> tuple[int, ...]:
    """Assert that every way to speculate gives the answer of speculation off."""
    given: Options = {"max_new_tokens": TOKENS, "ignore_end": True, "seed": 5, **options}
    plain = await client.generate_text(PROMPT, speculation="off", **given)
    for way in ways:
        done = await client.generate_text(PROMPT, speculation=way, **given)
        assert (done.token_ids, done.complete.finish) == (plain.token_ids, plain.complete.finish), (way, options)
        assert (done.prompt, done.logprobs) == (plain.prompt, plain.logprobs), (way, options)
        assert not done.complete.speculation.contradictions
    return plain.token_ids


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["llama", pytest.param("mamba2", marks=pytest.mark.long)])
async def test_speculation_changes_no_token_under_any_parameter(tmp_path: Path, family: str):
    """Each alone and 20 random combinations; a Mamba-2 drafter ranks in compiled kernels where there are any."""
    rng = np.random.default_rng(1)
    async with self_drafting(tmp_path, family) as router:
        for options in EACH.values():
            await check_identity(LocalClient(router), options, ("(2,2,1)",))
        for number in range(20):
            options = random_options(rng, TOKENS, 256)
            await check_identity(LocalClient(router), options, (WAYS[number % len(WAYS)],))


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_speculation_changes_no_token_under_200_random_combinations(tmp_path: Path):
    rng = np.random.default_rng(2)
    async with self_drafting(tmp_path) as router:
        for _ in range(200):
            await check_identity(LocalClient(router), random_options(rng, TOKENS, 256))


@pytest.mark.slow
async def test_a_drafter_that_knows_bias_banned_and_allowed_ids_guesses_the_targets_tokens(tmp_path: Path):
    """The target drafts for itself: with these parameters, and noise or none, every first guess is its next token."""
    known = {name: EACH[name] for name in ("logit_bias", "banned_ids", "allowed_ids")}
    async with self_drafting(tmp_path) as router:
        client = LocalClient(router)
        for options in (*known.values(), known["logit_bias"] | known["allowed_ids"]):
            for temperature in (0.0, 0.7):
                done = await client.generate_text(
                    PROMPT, max_new_tokens=TOKENS, ignore_end=True, temperature=temperature, speculation="(1,1,1)",
                    seed=5, **options,
                )  # fmt: skip
                stats = done.complete.speculation
                assert stats.drafted_tokens and (not stats.discarded_tokens or stats.late_drafts), options


@pytest.mark.slow
async def test_a_resumed_answer_and_a_later_turn_count_the_right_tokens(tmp_path: Path):
    """A resume goes on with the same tokens; a turn's answer before it is part of the prompt of the next."""
    options: Options = {
        "frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.1, "temperature": 0.8, "seed": 9,
        "min_new_tokens": TOKENS - 2, "stop_ids": tuple(range(128)), "max_new_tokens": TOKENS, "ignore_end": True,
    }  # fmt: skip
    async with self_drafting(tmp_path) as router:
        client = LocalClient(router)
        whole = await client.generate_text(PROMPT, speculation="(2,1)", **options)
        started = whole.started
        for held in (1, 9, TOKENS - 3, len(whole.token_ids)):
            request = build_request(PROMPT, speculation="auto", **options)
            request.resume.CopyFrom(resume_of(PROMPT, whole.token_ids[:held], started.seed, started.target))
            events = [each async for each in router.generate(request)]
            rest = [token for each in events for token in each.chunk.token_ids]
            assert (*whole.token_ids[:held], *rest) == whole.token_ids
            assert events[-1].complete.finish_reason == (
                pb.FINISH_REASON_STOP_TOKEN if whole.complete.finish is Finish.STOP_TOKEN else pb.FINISH_REASON_LENGTH
            )
        first = await client.generate_text(PROMPT, keep_session=True, **options)
        later = await client.generate_text([1, 2], session=first.complete.session, speculation="(2,1)", **options)
        fresh = await client.generate_text([*PROMPT, *first.token_ids, 1, 2], speculation="off", **options)
        assert later.token_ids == fresh.token_ids


async def responses(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in ingress(EdgePeers()).generate(request)]


def plain_request(**options) -> pb.GenerateRequest:
    return build_request([1, 2, 3], speculation="off", **{"max_new_tokens": 8} | options)


@pytest.mark.parametrize(
    "field, reason, options",
    [
        ("repetition_penalty", "must lie in", {"repetition_penalty": math.nan}),
        ("repetition_penalty", "must lie in", {"repetition_penalty": 0.0}),
        ("repetition_penalty", "must lie in", {"repetition_penalty": 1e9}),
        ("presence_penalty", "must lie in", {"presence_penalty": math.nan}),
        ("presence_penalty", "must lie in", {"presence_penalty": -101.0}),
        ("frequency_penalty", "must lie in", {"frequency_penalty": math.inf}),
        (r"logit_bias\[7\]", "must lie in", {"logit_bias": {7: -math.inf}}),
        (r"logit_bias\[7\]", "must lie in", {"logit_bias": {7: math.nan}}),
        ("logit_bias", "is outside the vocabulary", {"logit_bias": {VOCABULARY: 1.0}}),
        ("logit_bias", f"has {MAX_BIASED_IDS + 1} entries", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("banned_ids", "is outside the vocabulary", {"banned_ids": [0, VOCABULARY]}),
        ("banned_ids", f"at most {MAX_LISTED_IDS}", {"banned_ids": [5] * HUGE}),
        ("banned_ids", "may leave no token", {"banned_ids": range(VOCABULARY)}),
        ("allowed_ids", "is outside the vocabulary", {"allowed_ids": [2**32 - 1]}),
        ("allowed_ids", f"at most {MAX_LISTED_IDS}", {"allowed_ids": [5] * HUGE}),
        ("allowed_ids", "may leave no token", {"allowed_ids": [5, 6], "banned_ids": [6, 5, 4]}),
        ("allowed_ids", "may leave no token", {"allowed_ids": [END], "min_new_tokens": 1}),
        ("allowed_ids", "may leave no token", {"allowed_ids": [5], "bad_words": [[5, 5]]}),
        ("bad_words", f"at most {MAX_BAD_WORDS}", {"bad_words": [[5]] * (MAX_BAD_WORDS + 1)}),
        (r"bad_words\[1\]", f"at most {MAX_BAD_WORD_TOKENS}", {"bad_words": [[5], [5] * HUGE]}),
        (r"bad_words\[1\]", "is empty", {"bad_words": [[5], []]}),
        (r"bad_words\[0\]", "is outside the vocabulary", {"bad_words": [[5, VOCABULARY]]}),
        ("min_new_tokens", "is 9, but the answer has at most 8 tokens", {"min_new_tokens": 9}),
        ("min_new_tokens", "but the answer has at most 8 tokens", {"min_new_tokens": 2**32 - 1}),
        ("stop_ids", "is outside the vocabulary", {"stop_ids": [VOCABULARY]}),
        ("stop_ids", f"at most {MAX_STOP_IDS}", {"stop_ids": [5] * HUGE}),
        ("logprobs", "must lie in 0 to 20; got 21", {"logprobs": 21}),
        ("logprobs", "must lie in 0 to 20", {"logprobs": 2**32 - 1}),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_by_the_name_of_its_field_and_the_reason(field: str, reason: str, options):
    with pytest.raises(BadRequest, match=f"^{field}: .*{reason}"):
        await responses(plain_request(**options))


@pytest.mark.parametrize(
    "field, options",
    [
        (r"banned_ids\[1\]", {"banned_ids": [1, -1]}),
        (r"stop_ids\[0\]", {"stop_ids": [2**32]}),
        (r"bad_words\[0\]\[0\]", {"bad_words": [[-5]]}),
        (r"logit_bias\[-1\]", {"logit_bias": {-1: 1.0}}),
        (r"logit_bias\[1\]", {"logit_bias": {1: "much"}}),
        ("min_new_tokens", {"min_new_tokens": -1}),
        ("logprobs", {"logprobs": -1}),
        ("presence_penalty", {"presence_penalty": "much"}),
    ],
)
def test_a_number_that_its_field_cannot_hold_is_refused_by_the_client(field: str, options):
    with pytest.raises(BadRequest, match=f"^{field}:"):
        plain_request(**options)


async def test_the_first_stop_token_ends_the_answer_and_is_its_last():
    plain = await responses(plain_request())
    tokens = [token for each in plain for token in each.chunk.token_ids]
    stop = tokens[4]
    ended = await responses(plain_request(stop_ids=[299, stop]))
    assert [token for each in ended for token in each.chunk.token_ids] == tokens[: tokens.index(stop) + 1]
    assert ended[-1].complete.finish_reason == pb.FINISH_REASON_STOP_TOKEN


async def test_a_stop_token_that_the_client_has_ends_a_resumed_answer():
    peers = EdgePeers()
    request = plain_request(stop_ids=[77])
    request.resume.CopyFrom(resume_of([1, 2, 3], [5, 77]))
    events = [event async for event in ingress(peers).generate(request)]
    assert events[-1].complete.finish_reason == pb.FINISH_REASON_STOP_TOKEN and peers.rounds == 0


def test_the_page_of_parameters_is_up_to_date():
    assert PAGE.read_text() == written(), "run python -m tests.parameters"


def test_the_page_has_every_sampling_field_of_the_public_api_and_each_of_our_tests_parameters():
    listed = [each.name for each in PARAMETERS]
    fields = {field.name for field in pb.Sampling.DESCRIPTOR.fields} | {
        "max_new_tokens", "min_new_tokens", "stop_ids", "ignore_end", "logprobs", "n", "echo", "structure",
        "bad_word_texts", "logit_bias_texts", "literal_prompt", "show_special_tokens",
    }  # fmt: skip
    assert set(listed) == fields and len(listed) == len(fields)
    assert set(EACH) <= fields
