"""Predicted outputs: aligned with the answer, merged into trees, and without effect on any token."""

from __future__ import annotations

import random
from typing import Any

import pytest
from dendro.client import Round
from dendro.errors import BadRequest
from dendro.text import Limits, Sampling, Text, Verdict

from cluster.api.local import LocalClient
from cluster.proposers.prediction import SLICE, Alignment, PredictedOutput, PredictedText, predicted_tokens
from cluster.proposers.proposals import ProposalLibrary
from tests.support.edge import END, EdgePeers, ingress, plain_answer
from tests.support.fakes import new_text
from tests.support.http_api import HELLO, client_of, http_at

OLD = [*range(100, 160)]
EDITS = {
    "none": OLD,
    "one replaced": [*OLD[:20], 7, *OLD[21:]],
    "one inserted": [*OLD[:20], 7, *OLD[20:]],
    "one left out": [*OLD[:20], *OLD[21:]],
    "a line replaced": [*OLD[:20], 7, 8, 9, 7, *OLD[27:]],
    "renamed everywhere": [7 if token % 10 == 3 else token for token in OLD],
    "a part left out": [*OLD[:20], *OLD[40:]],
}


def guessed(predicted, answer):
    """How many tokens of an answer are among the first guesses of the round before them, each round being one token."""
    alignment, right = Alignment(PredictedText.of(predicted)), 0
    for token in answer:
        right += any(predicted[place.next : place.next + 1] == [token] for place in alignment.places)
        alignment.append([token])
    return right


@pytest.mark.parametrize(
    "edit, missed",
    [
        ("none", 0), ("one replaced", 1), ("one inserted", 1), ("one left out", 1),
        ("a line replaced", 6), ("renamed everywhere", 6), ("a part left out", 1),
    ],
)  # fmt: skip
def test_after_each_difference_the_prediction_is_aligned_again(edit, missed):
    answer = EDITS[edit]
    assert guessed(OLD, answer) >= len(answer) - missed


def test_of_equally_long_matches_the_nearest_is_followed_first():
    alignment = Alignment(PredictedText.of([1, 2, 5, 3, 9, 9, 9, 9, 5, 3, 9, 9, 5, 4]))
    alignment.append([5])  # where 1 is expected
    assert [place.next for place in alignment.places] == [3, 9, 13]


def test_a_long_resumed_answer_is_followed_a_part_a_round_and_proposed_for_when_it_has_caught_up():
    given, answer = PredictedText.of(OLD * 4), (OLD * 4)[: 3 * SLICE]
    proposer, text = PredictedOutput([given], 1), new_text([1, *answer])
    for _ in range(2):
        proposer.grow(text)
        assert not proposer.propose(text, 8, 8).guesses
    proposer.grow(text)
    assert proposer.propose(text, 8, 8).tokens[1:] == (OLD * 4)[3 * SLICE :][:7]


def test_rounds_of_any_length_align_as_tokens_one_by_one_do():
    random_ = random.Random(3)
    for answer in EDITS.values():
        parts, whole, at = Alignment(PredictedText.of(OLD)), Alignment(PredictedText.of(OLD)), 0
        whole.append(answer)
        while at < len(answer):
            size = random_.randint(1, 9)
            parts.append(answer[at : at + size])
            at += size
        assert (parts.places, parts.accepted) == (whole.places, whole.accepted)


def test_the_work_per_token_is_bounded_whatever_the_prediction_repeats():
    alignment = Alignment(PredictedText.of([5] * 10_000 + [6] * 10_000))
    for token in (5, 9, 6, 9, 5, 9, 6):
        alignment.append([token])
        assert len(alignment.places) <= 3


def test_the_tokens_of_the_best_alternative_are_counted():
    answer = EDITS["one replaced"]
    other, old = PredictedText.of([1, 2, 3]), PredictedText.of(OLD)
    assert predicted_tokens([other, old], answer) == (59, 1)
    assert predicted_tokens([other], answer) == (0, 3)
    assert predicted_tokens([old], []) == (0, 60)


async def test_all_answers_of_a_request_read_one_index_of_its_prediction(monkeypatch):
    made = []
    of = PredictedText.of
    monkeypatch.setattr(PredictedText, "of", lambda tokens: made.append(len(tokens)) or of(tokens))
    client = LocalClient(ingress(EdgePeers()))
    answers = await client.generate_samples([97, 98], n=3, max_new_tokens=4, prediction=["abcdef"], speculation="auto")
    assert len(answers) == 3 and made == [6]


def test_guesses_of_alternatives_are_merged_into_one_tree_within_its_limits():
    text = Text([1, 2], Sampling(), Limits(500))
    prediction = PredictedOutput(list(map(PredictedText.of, ([10, 11, 12, 13], [10, 11, 22, 23]))), begins=2)
    proposals = ProposalLibrary((), 64, 16).of("", 64, 0.0, prediction)
    tree = proposals.offer(text)
    assert sorted(tree.tokens[1:].tolist()) == [10, 11, 12, 13, 22, 23]
    text.commit(Verdict((10, 11, 22), (0, 1, 2), (0, 0), None, 3))
    assert proposals.offer(text).tokens.tolist()[:2] == [22, 23], "the one that goes on as predicted is the likeliest"
    small = PredictedOutput([PredictedText.of(OLD)], begins=2)
    small.grow(text)
    assert 1 <= small.propose(text, 5, 3).guesses <= 4
    assert ProposalLibrary((), 64, 16).of("", 1, 0.0, prediction) is None, "a request without guesses"


def edited(tokens):
    """An answer's text with a few changes, as its prediction."""
    changed = [*tokens[:20], *b"zz", *tokens[21:40], *tokens[44:]]
    return bytes(token for token in changed if token < 128).decode()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculation", ["off", "proposed(15)", "(2,1)", "auto"])
async def test_no_prediction_changes_a_token_and_a_good_one_saves_rounds(temperature, speculation):
    sampling = Sampling(temperature, seed=4 if temperature else 0)
    truth = plain_answer(list(b"walk the "), sampling, 80)
    asked: dict[str, Any] = {"max_new_tokens": 80, "temperature": temperature, "seed": 4, "speculation": speculation}
    peers = EdgePeers()
    peers.drafter_lost = True  # else its guesses are all right
    arms = {"arms": ["off", "proposed(15)", "(1,1,1)", "(2,1)"], "proposers": ["lookup"]}
    client = LocalClient(ingress(peers, speculation=arms))
    rounds = {}
    for name, prediction in (("none", []), ("edited", edited(truth)), ("wrong", ["x" * 300, "\N{SNOWMAN}", ""])):
        answer = await client.generate_text("walk the ", **asked, prediction=prediction)
        assert list(answer.token_ids) == truth, name
        rounds[name] = len([each for each in answer.rounds if isinstance(each, Round)])
        complete = answer.complete
        if name == "edited":
            assert complete.accepted_prediction_tokens > 40, "the same with every tree, and without"
        if name == "none":
            assert complete.accepted_prediction_tokens == complete.rejected_prediction_tokens == 0
    if speculation == "proposed(15)":
        assert rounds["edited"] < rounds["none"] / 2


@pytest.mark.parametrize(
    "prediction, reason",
    [
        (["a"] * 5, "has 5 entries; at most 4"),
        (["a" * 60, "b" * 60], "has 120 bytes; at most 100"),
        (["a\ud800"], "surrogate"),
    ],
)
async def test_a_prediction_past_its_bounds_is_refused_by_name(prediction, reason):
    client = LocalClient(ingress(EdgePeers(), router={"max_prompt_bytes": 100}))
    with pytest.raises(BadRequest, match=rf"prediction.*{reason}"):
        await client.generate_text("walk", prediction=prediction)


@pytest.mark.parametrize("several", [False, True])
async def test_openais_predicted_outputs_are_counted_in_the_usage(several):
    prompt = [*b"[user]hello", END, *b"[assistant]"]
    truth = plain_answer(prompt, Sampling(), 60)
    prediction: Any = {"type": "content", "content": edited(truth)}
    if several:
        parts = [{"type": "text", "text": edited(truth)[:30]}, {"type": "text", "text": edited(truth)[30:]}]
        prediction = [{"type": "content", "content": "another"}, {"type": "content", "content": parts}]
    async with http_at() as (server, _), client_of(server) as client:
        answer = await client.chat.completions.create(
            model="demo", messages=HELLO, max_tokens=60, temperature=0, extra_body={"prediction": prediction}
        )
    assert answer.choices[0].message.content == bytes(truth).decode(errors="replace")
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 30 and details.rejected_prediction_tokens >= 1
