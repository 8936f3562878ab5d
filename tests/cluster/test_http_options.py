"""OpenAI's HTTP API: each parameter has the effect of the option that it is, through OpenAI's own client."""

from __future__ import annotations

import json
import math
import secrets
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import openai
import pytest
from dendro.errors import BadRequest
from dendro.text import Sampling, StopStrings
from dendro.v1 import generation_pb2 as pb

from cluster.api.local import LocalClient
from cluster.api.openai.answers import ChatForm, Choice, CompletionForm, ObjectWriter
from cluster.config import DEMO_MODELS, Config
from cluster.router.stop_strings import StoppedText
from cluster.router.token_texts import VocabularyTexts
from cluster.running import local_ingress
from tests.support.edge import END, ByteTokenizer, EdgePeers, ingress, plain_answer, plain_logprobs
from tests.support.http_api import HELLO, client_of, http_at

PROMPT = [*b"[user]hello", END, *b"[assistant]"]
CODE = "def area(radius):"


def text_of(tokens):
    return bytes(tokens).decode(errors="replace")


@asynccontextmanager
async def calling():
    async with http_at() as (server, _), client_of(server) as client:
        yield client


async def test_several_answers_are_those_of_the_sample_indices_whole_and_streamed():
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": HELLO,
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": 5,
        "n": 3,
    }
    expected = [text_of(plain_answer(PROMPT, Sampling(0.9, seed=5, sample_index=index), 12)) for index in range(3)]
    async with calling() as client:
        whole = await client.chat.completions.create(**asked)
        streamed, ends = ["", "", ""], 0
        async for part in await client.chat.completions.create(**asked, stream=True):
            (choice,) = part.choices
            streamed[choice.index] += choice.delta.content or ""
            ends += choice.finish_reason is not None
    assert [choice.message.content for choice in whole.choices] == streamed == expected and len(set(expected)) == 3
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and ends == 3
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 36)


@pytest.mark.parametrize("seed", [-1, -(1 << 63)])
async def test_a_negative_seed_counts_from_the_end_of_64_bits(seed):
    async with calling() as client:
        create = client.chat.completions.create
        answer = await create(model="demo", messages=HELLO, max_tokens=12, seed=seed, extra_body={"top_k": 0})
    assert answer.model_extra["dendro"]["seed"] == seed + (1 << 64)
    assert answer.choices[0].message.content == text_of(plain_answer(PROMPT, Sampling(1.0, seed=seed + (1 << 64)), 12))


async def test_a_client_that_reads_numbers_as_float64_can_repeat_an_answer_by_its_drawn_seed(monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: (1 << bits) - 1)
    async with calling() as client:
        create = client.chat.completions.create
        drawn = await create(model="demo", messages=HELLO, max_tokens=12)
        seed = int(float(drawn.model_extra["dendro"]["seed"]))
        again = await create(model="demo", messages=HELLO, max_tokens=12, seed=seed)
    assert seed == drawn.model_extra["dendro"]["seed"]
    assert again.choices[0].message.content == drawn.choices[0].message.content


@pytest.mark.parametrize("included", [False, True])
async def test_a_stop_string_ends_the_text_before_or_after_it(included):
    whole = text_of(plain_answer(PROMPT, Sampling(), 60))
    stop = whole[20:23]
    async with calling() as client:
        answer = await client.chat.completions.create(
            model="demo",
            messages=HELLO,
            max_tokens=60,
            temperature=0,
            stop=["\N{SNOWMAN}", stop],
            extra_body={"include_stop": included},
        )
    end = whole.index(stop) + (len(stop) if included else 0)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (whole[:end], "stop")
    assert answer.model_extra["dendro"]["choices"][0]["stop_string"] == stop


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chats_log_probabilities_have_text_and_bytes_of_each_token(stream):
    tokens = plain_answer(PROMPT, Sampling(), 20)
    expected = plain_logprobs(PROMPT, tokens, 3)
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    async with calling() as client:
        answer = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=stream)
        parts = [part async for part in answer] if stream else [answer]
    content = [each for part in parts if part.choices[0].logprobs for each in part.choices[0].logprobs.content]
    assert [bytes(each.bytes) for each in content] == [bytes([token]) for token in tokens]
    assert [each.token for each in content] == [text_of([token]) for token in tokens]
    assert [each.logprob for each in content] == [each.logprob for each in expected]
    tops = [[(tuple(top.bytes), top.logprob) for top in each.top_logprobs] for each in content]
    assert tops == [[((token,), value) for token, value in each.top] for each in expected]


async def test_log_probabilities_without_likeliest_tokens_have_an_empty_list():
    async with calling() as client:
        answer = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=3, logprobs=True)
    assert [each.top_logprobs for each in answer.choices[0].logprobs.content] == [[], [], []]


@pytest.mark.parametrize("form", [ChatForm(), CompletionForm()], ids=["chat", "completion"])
def test_log_probabilities_of_minus_infinity_are_numbers_of_json(form):
    never = pb.TokenLogprobs(logprob=-math.inf, top_ids=[97, 98], top_logprobs=[-0.5, -math.inf])
    found = form.logprobs(Choice(0), [99], [never], VocabularyTexts(ByteTokenizer()))
    assert json.dumps(found, allow_nan=False).count("-9999.0") == 2


def test_of_likeliest_tokens_with_one_text_a_completion_has_the_likeliest_ones_log_probability():
    given = pb.TokenLogprobs(logprob=-1.0, top_ids=[200, 97, 201], top_logprobs=[-0.5, -1.0, -2.0])
    found = CompletionForm().logprobs(Choice(0), [97], [given], VocabularyTexts(ByteTokenizer()))
    assert found["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}], "two bytes that are no character alone"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_only_token_of_an_echoed_prompt_is_among_those_with_log_probabilities_and_has_none(stream):
    async with http_at() as (server, _), client_of(server) as client:
        made = await client.completions.create(
            model="demo", prompt="a", max_tokens=2, temperature=0, logprobs=1, echo=True, stream=stream
        )
        parts = [part async for part in made] if stream else [made]
        found = [each.logprobs for part in parts for each in part.choices if each.logprobs is not None]
        assert [token for each in found for token in each.tokens][0] == "a"
        assert [value is None for each in found for value in each.token_logprobs] == [True, False, False]
        assert [offset for each in found for offset in each.text_offset] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_echoes_its_prompt_with_log_probabilities_from_the_second_token_on(stream):
    prompt = list(b"walk the ")
    tokens = plain_answer(prompt, Sampling(), 6)
    async with calling() as client:
        answer = await client.completions.create(
            model="demo", prompt="walk the ", max_tokens=6, temperature=0, logprobs=2, echo=True, stream=stream
        )
        parts = [part async for part in answer] if stream else [answer]
    choices = [part.choices[0] for part in parts]
    assert "".join(choice.text for choice in choices) == "walk the " + text_of(tokens)
    given = [choice.logprobs for choice in choices if choice.logprobs]
    values = [value for each in given for value in each.token_logprobs]
    assert values[0] is None and [top for each in given for top in each.top_logprobs][0] is None
    expected = plain_logprobs(prompt[:1], [*prompt[1:], *tokens], 2)
    assert values[1:] == [each.logprob for each in expected]
    assert "".join(token for each in given for token in each.tokens) == "".join(
        text_of([t]) for t in [*prompt, *tokens]
    )
    offsets = [offset for each in given for offset in each.text_offset]
    assert offsets[: len(prompt)] == list(range(len(prompt)))


OFFSET_TEXT = "aé🎉 END of ENDS \ufffd."


@pytest.mark.parametrize("cuts", [[], range(1, 40), [2, 6, 9], [10, 11, 21]], ids=["one", "each", "few", "held"])
def test_a_tokens_offset_is_its_place_in_the_whole_text_however_rounds_and_stop_strings_divide_it(cuts):
    """Rounds are divided by what was guessed, and text that could begin a stop string comes later than its tokens."""
    tokens = [*OFFSET_TEXT.encode()[:-1], END, *b"."]
    texts, answer = VocabularyTexts(ByteTokenizer()), StoppedText(ByteTokenizer(), StopStrings(("END!", "ENDS!")))
    writer, found, text = ObjectWriter(CompletionForm(), texts, False, True), [], ""
    for start, end in pairwise([0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)]):
        part = tokens[start:end]
        given = answer.append(part) + (answer.finish() if end == len(tokens) else "")
        chunk = pb.GenerateChunk(token_ids=part, text=given, logprobs=[pb.TokenLogprobs(logprob=-1.0) for _ in part])
        (piece,) = writer.take(pb.GenerateResponse(chunk=chunk))
        found += piece["choices"][0]["logprobs"]["text_offset"]
        text += piece["choices"][0]["text"]
    assert text == OFFSET_TEXT
    before = [bytes(tokens[:place]).decode(errors="ignore") for place in range(len(tokens) - 2)]
    assert found == [*map(len, before), len(OFFSET_TEXT) - 1, len(OFFSET_TEXT) - 1]


async def test_a_completion_of_no_token_scores_its_prompt():
    async with calling() as client:
        answer = await client.completions.create(
            model="demo", prompt=list(b"walk"), max_tokens=0, logprobs=0, echo=True, temperature=0
        )
    (choice,) = answer.choices
    assert choice.text == "walk" and answer.usage.completion_tokens == 0
    assert choice.logprobs.token_logprobs[1:] == [each.logprob for each in plain_logprobs([*b"w"], [*b"alk"], 0)]


def test_a_tokenizer_whose_ids_do_not_stand_for_bytes_gives_those_of_their_texts():
    class WordTokenizer(ByteTokenizer):
        def token_bytes(self):
            raise BadRequest("structure", "its ids do not stand for bytes")

    texts = VocabularyTexts(WordTokenizer())
    assert texts.bytes_of(65) == b"A" and texts.text(65) == "A" and texts.text(END) == "<end>"


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "penalties": ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, {}),
    "repetition": ({"repetition_penalty": 1.3}, {}),
    "filters": ({"top_p": 0.8, "top_k": 20, "min_p": 0.02}, {}),
    "bias": ({"logit_bias": {"317": 8, "50": -100}}, {"logit_bias": {317: 8.0, 50: -100.0}}),
    "bans": ({"banned_ids": [317], "bad_words": [" radius", [9]], "min_new_tokens": 8}, {}),
    "speculation": ({"dendro": {"speculation": "(2,1)"}}, {"speculation": "(2,1)"}),
}
"""Fields of a request over HTTP, and the options of the Python client where they differ."""


@pytest.mark.slow
async def test_every_parameter_gives_the_answer_that_the_python_client_gets_for_it():
    target = {"checkpoint": str(DEMO_MODELS / "target")}
    config = Config.of(
        {"targets": {"demo": target}, "drafters": {"m": {"checkpoint": str(DEMO_MODELS / "mamba2")}}}, DEMO_MODELS
    )
    async with (
        local_ingress(config) as made,
        http_at(served_ingress=made) as (server, _),
        client_of(server) as client,
    ):
        answers = set()
        for fields, options in OPTIONS.values():
            create = client.completions.create
            theirs = await create(model="demo", prompt=CODE, max_tokens=16, temperature=0.9, seed=3, extra_body=fields)
            ours = await LocalClient(made).generate_text(
                CODE, max_new_tokens=16, temperature=0.9, seed=3, **(options or fields)
            )
            assert theirs.choices[0].text == ours.text, fields
            answers.add(ours.text)
        assert len(answers) >= 4, "the parameters have an effect"
        await structured(client)


async def structured(client):
    """Each form of a structure is enforced."""

    async def text(**fields: Any) -> str:
        found = await client.completions.create(
            model="demo", prompt=CODE, max_tokens=48, temperature=0.8, seed=1, **fields
        )
        assert found.choices[0].finish_reason == "stop", found
        return found.choices[0].text

    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    described = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    found = json.loads(await text(extra_body={"response_format": described}))
    assert list(found) == ["a"] and isinstance(found["a"], bool)
    assert await text(extra_body={"structure": {"choices": ["yes", "no"]}}) in ("yes", "no")
    assert (await text(extra_body={"structure": {"regex": "[0-9]{3}"}})).isdecimal()
    loose = await client.completions.create(
        model="demo", prompt=CODE, max_tokens=24, temperature=0, extra_body={"response_format": {"type": "json_object"}}
    )
    assert loose.choices[0].text.startswith("{")
    plain = await client.completions.create(
        model="demo", prompt=CODE, max_tokens=4, extra_body={"response_format": {"type": "text"}}
    )
    assert plain.usage.completion_tokens == 4


async def test_a_structure_that_cannot_be_enforced_is_refused_by_its_http_name():
    made = ingress(EdgePeers())
    async with http_at(served_ingress=made) as (server, _), client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="demo", messages=HELLO, response_format={"type": "json_object"})
        assert refused.value.param == "response_format"
