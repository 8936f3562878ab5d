"""An answer's text continues its prompt's: where tokenizers mark the beginning of a text, and within a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from dendro.errors import BadRequest
from dendro.grammars import Grammars
from dendro.structure import Structure, StructureForm
from dendro.text import Finish, StopStrings
from dendro.v1 import generation_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cluster.api.local import LocalClient
from cluster.router.ingress import Ingress
from cluster.router.served import Served
from cluster.router.stop_strings import StoppedText
from cluster.router.token_texts import TokenOffsets, VocabularyTexts
from cluster.router.tokenizer import CheckpointTokenizer, TextStream
from cluster.sessions import MemorySessions
from cluster.training.data import DataFolder, DataSource
from tests.support import edge
from tests.support.edge import EdgePeers, resume_of
from tests.support.http_api import http_at, post
from tests.support.layouts import sentencepiece
from tests.support.other_tokenizers import BYTES, SENTENCE, STYLES, llama, loaded, spaced_byte_level, templated


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    return loaded(tmp_path_factory.mktemp("style"), templated(STYLES[request.param]()))


def answer_text(tokenizer: CheckpointTokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    stream = TextStream(tokenizer, prompt)
    return "".join([*(stream.append([token]) for token in answer), stream.finish()])


# Decoding


def test_an_answers_first_space_is_kept(style: CheckpointTokenizer):
    prompt, answer = style.encode("the cat", begins=True), style.encode(" sat", begins=False)
    assert answer_text(style, prompt, answer) == " sat"
    assert style.decode(prompt + answer).strip() == "the cat sat"


@pytest.mark.parametrize("begins", [True, False])
def test_each_token_is_at_its_offset_of_the_text_that_begins_and_of_one_that_continues(
    style: CheckpointTokenizer, begins: bool
):
    ids = style.encode("the cat sat" if begins else " sat on the cat", begins)
    text = style.decode(ids) if begins else answer_text(style, style.encode("the dog", begins=True), ids)
    texts = VocabularyTexts(style)
    for token, offset in zip(ids, TokenOffsets(texts, False, begins).of(ids), strict=True):
        if not texts.special(token):
            assert text[offset:].startswith(texts.text(token)[texts.left_out(token) if not offset and begins else 0 :])


@pytest.mark.parametrize("before", [[], [2, 4]], ids=["begins", "continues"])
@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None], ids=["wordpiece", "words"])
def test_tokens_that_are_no_bytes_are_the_text_that_they_add_at_its_offset(tmp_path: Path, decoder, before):
    words = ["[UNK]", "[SEP]", "the", "snake", "##s", "walk", "."]
    made = Tokenizer(models.WordPiece({word: token for token, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer, ids = loaded(tmp_path, made), [2, 3, 4, 1, 5, 4, 6, 2]
    text, texts = answer_text(tokenizer, before, ids), VocabularyTexts(tokenizer)
    offsets = TokenOffsets(texts, False, not before).of(ids)
    visible = [token for token in ids if token > 1]
    assert "".join(map(texts.text, visible))[texts.left_out(visible[0]) * (not before) :] == text
    assert b"".join(map(texts.bytes_of, visible)).decode().endswith(text)
    for token, offset in zip(ids, offsets, strict=True):
        assert token == 1 or text[offset:].startswith(
            texts.text(token)[texts.left_out(token) * (not offset and not before) :]
        )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_text_of_prompt_and_answer_is_the_prompts_and_then_the_answers(
    style: CheckpointTokenizer, data: st.DataObject
):
    """Any ids and cuts. Of a character that both share, the answer has the whole."""
    random = Random(data.draw(st.integers(0, 1 << 32)))
    size, few = len(style._tokenizer), data.draw(st.booleans())
    ids = [random.randrange(min(size, 262) if few else size) for _ in range(random.randrange(200))]
    if data.draw(st.booleans()):
        ids = style.encode("".join(random.choices(SENTENCE, k=60)), begins=True)
    cut = random.randint(0, len(ids))
    before, whole = style.decode(ids[:cut]), style.decode(ids)
    stream, parts, place = TextStream(style, ids[:cut]), [], cut
    while place < len(ids):
        end = place + random.randint(1, 9)
        parts.append(stream.append(ids[place:end]))
        resumed = TextStream(style, ids[:cut])
        assert resumed.append(ids[cut:end]) == "".join(parts), "does not depend on how tokens are divided"
        place = end
    text = "".join([*parts, stream.finish()])
    kept = len(whole) - len(text)
    assert whole.endswith(text) and whole[:kept] == before[:kept]
    assert len(before) - kept <= 3 and set(before[kept:]) <= {"\N{REPLACEMENT CHARACTER}"}
    if whole.startswith(before):
        assert text == whole[len(before) :]


def test_a_character_that_the_prompts_ids_begin_is_the_answers(style: CheckpointTokenizer):
    ids = style.encode("the\N{ROCKET}", begins=True)
    assert style.decode(ids).endswith("the\N{ROCKET}") and len(ids) >= 5
    for count in (1, 2, 3):
        assert answer_text(style, ids[:-count], ids[-count:]) == "\N{ROCKET}"
        letter = style.encode("a", begins=False)
        assert answer_text(style, ids[:-count], letter) == "a", "it is not completed"


def test_each_tokens_bytes_are_its_text(style: CheckpointTokenizer):
    """So a structure, which reads bytes, and a stop string, which reads text, agree."""
    prompt = style.encode("the cat", begins=True)
    for token, found in style.token_bytes().items():
        assert answer_text(style, prompt, [token]) == found.decode(errors="replace"), style.backend.id_to_token(token)


def test_a_stop_string_that_begins_with_a_space_ends_the_answer_at_its_own_token(style: CheckpointTokenizer):
    prompt, answer = style.encode("the cat", begins=True), style.encode(" sat on the mat", begins=False)
    first = len(style.encode(" sat", begins=False))
    text = StoppedText(style, StopStrings.of([" sat"], True), prompt)
    assert text.append(answer) == " sat" and (text.found, text.length) == (" sat", first)


async def test_a_choice_is_returned_as_it_was_given(style: CheckpointTokenizer):
    prompt, grammars = style.encode("the cat", begins=True), Grammars(style.token_bytes, len(style._tokenizer))
    for choice in (" sat", "sat"):
        grammar = (await grammars.compiled(Structure(StructureForm.CHOICES, (choice,)))).text(0)
        ids = style.encode(choice, begins=False)
        grammar.follow(ids)
        assert grammar.complete and answer_text(style, prompt, ids) == choice


# Encoding


def test_a_continuation_is_encoded_as_in_the_middle_of_a_text(style: CheckpointTokenizer):
    random = Random(1)
    for _ in range(40):
        words = random.choices(SENTENCE.split(), k=8)
        for cut in range(1, 8):
            first, rest = " ".join(words[:cut]), "".join(f" {word}" for word in words[cut:])
            whole = style.encode(first + rest, begins=True)
            assert style.encode(first, begins=True) + style.encode(rest, begins=False) == whole


def test_a_continuation_marks_no_beginning(style: CheckpointTokenizer):
    before = style.encode("per", begins=True)
    for text in ("son", "s", " son", "  ", "\n", "漢", " 漢 "):
        assert answer_text(style, before, style.encode(text, begins=False)) == text


def test_after_a_special_token_a_continuation_is_encoded_as_a_whole_text_is(style: CheckpointTokenizer):
    whole = style.encode("per</s>son cat", begins=True)
    for text in ("</s>son cat", "</s> son", "a</s>b", "</s></s>b"):
        given = style.encode("per", begins=True) + style.encode(text, begins=False)
        assert given == style.encode("per" + text, begins=True)
    assert whole.count(style.backend.token_to_id("</s>")) == 1


def test_only_the_first_word_continues_a_text_where_each_word_is_marked(tmp_path: Path):
    """As T5's: words are split off at spaces, which are lost, and each gets a mark."""
    made = STYLES["unigram, always"]()
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer = loaded(tmp_path, made)
    before = tokenizer.encode("per", begins=True)
    for text in ("son", " son", "son sat on", " the mat", ""):
        ids = tokenizer.encode(text, begins=False)
        assert (
            answer_text(tokenizer, before, ids)
            == text
            == answer_text(tokenizer, before, tokenizer.encode_literally(text, begins=False))
        )


def test_a_tokenizer_in_python_continues_a_text(tmp_path: Path):
    """SentencePiece's own, as GPT-SW3's."""
    joined = ["at", "on", "he", "▁t", "▁c", "▁s", "▁the", "▁cat", "▁sat", "son"]
    pieces = [*((byte, 6) for byte in BYTES), *((each, 1) for each in [*joined, "▁", *"abcdefghijklmnopqrstuvwxyz."])]
    trained = sentencepiece([("<unk>", 2), ("<s>", 3), ("</s>", 3), *pieces])
    (tmp_path / "spiece.model").write_bytes(trained)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTSw3Tokenizer"}')
    tokenizer = CheckpointTokenizer(tmp_path, "")
    with pytest.raises(BadRequest):
        assert tokenizer.backend
    before = tokenizer.encode("per", begins=True)
    for text in ("son", " sat", "s", " the cat"):
        for ids in (tokenizer.encode(text, begins=False), tokenizer.encode_literally(text, begins=False)):
            assert answer_text(tokenizer, before, ids) == text
    assert tokenizer.encode("the cat", begins=True) + tokenizer.encode(" sat", begins=False) == tokenizer.encode(
        "the cat sat", begins=True
    )


def test_special_tokens_are_put_at_the_start_alone(style: CheckpointTokenizer):
    """The template puts one at the end, too."""
    start, end = (style.backend.token_to_id(text) for text in ("<s>", "</s>"))
    ids = style.encode("the cat", begins=True)
    assert ids[0] == start and end not in ids and style.head == (start,)
    assert not {start, end} & set(style.encode("the cat", begins=False))
    assert style.encode("a</s>", begins=True)[-1] == end, "the text's own is kept"


def test_a_checkpoint_that_adds_an_end_to_texts_adds_none_to_prompts(tmp_path: Path):
    for name, config in (("fast", "PreTrainedTokenizerFast"), ("llama", "LlamaTokenizer")):
        tokenizer = loaded(
            tmp_path / name,
            llama(),
            tokenizer_class=config, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
            add_bos_token=True, add_eos_token=True,
        )  # fmt: skip
        made = tokenizer._tokenizer.encode("the cat")
        ids = tokenizer.encode("the cat", begins=True)
        assert 2 not in ids and (made == [*ids, 2] or made == ids), name


# Added tokens of byte-level tokenizers


@pytest.fixture(scope="module")
def accented(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    """With added tokens whose characters are in GPT-2's byte alphabet."""
    made = spaced_byte_level(False)
    made.add_tokens([AddedToken(text, normalized=False) for text in ("é", "đem", "čas", "Ġx", "<tool>")])
    made.add_special_tokens(["<ł>"])
    return loaded(tmp_path_factory.mktemp("accented"), made)


def test_an_added_token_of_a_byte_level_tokenizer_is_its_text(accented: CheckpointTokenizer):
    for text in ("é", "đem", "čas", "Ġx", "<tool>"):
        token = accented.backend.token_to_id(text)
        assert accented.encode(f"a{text}b", begins=False)[1] == token
        assert accented.decode([token]) == text and accented.token_bytes()[token] == text.encode()
        assert answer_text(accented, accented.encode("a", begins=True), [token]) == text
    special = accented.backend.token_to_id("<ł>")
    assert accented.decode([special]) == "" and special not in accented.token_bytes()
    assert accented.showing().decode([special]) == "<ł>"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_ids_of_it_are_the_bytes_that_a_structure_reads(accented: CheckpointTokenizer, seed: int):
    random, found = Random(seed), accented.token_bytes()
    ids = random.choices([*found, *range(len(accented._tokenizer) - 6, len(accented._tokenizer) - 1)], k=40)
    data = b"".join(found[token] for token in ids)
    try:
        text = data.decode()
    except UnicodeDecodeError:  # an added token ends an incomplete character, which costs no other character
        text = ""
    assert not text or accented.decode(ids) == text
    assert answer_text(accented, (), ids) == accented.decode(ids)


@pytest.mark.parametrize("lowers", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_normalized_added_token_is_the_bytes_of_its_text_in_an_answer(tmp_path: Path, style: str, lowers: bool):
    """The library decodes it as the normalizer's text of its content: `▁plain` for `plain`, where spaces are `▁`. With
    other bytes, an answer's text would not be what its structure admits."""
    made, texts = STYLES[style](), ("plain", "ÉA", "two words")
    if lowers:
        steps = [normalizers.Lowercase(), *([made.normalizer] if made.normalizer is not None else [])]
        made.normalizer = normalizers.Sequence(steps)
    made.add_tokens([AddedToken(text, normalized=True) for text in texts])
    tokenizer = loaded(tmp_path, made)
    prompt, found = tokenizer.encode("the cat", begins=True), tokenizer.token_bytes()
    ids = {each.content: token for token, each in made.get_added_tokens_decoder().items()}
    for text in texts:
        assert answer_text(tokenizer, prompt, [ids[text]]).encode() == found[ids[text]]


def test_a_stop_string_is_found_in_an_added_token(accented: CheckpointTokenizer):
    text = StoppedText(accented, StopStrings.of(["ča"], False))
    assert text.append(accented.encode("a časb", begins=False)) == "a " and text.found == "ča"


# Requests: a session, its echo, resumes and written turns


@pytest.fixture
def cat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """An ingress whose target answers " sat on the mat" to anything."""
    tokenizer = loaded(tmp_path, llama(), tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>")
    answer = [tokenizer.backend.token_to_id(piece) for piece in ("▁sat", "▁on", "▁the", "▁mat")]
    prompts: set[int] = set()

    def next_token(ids: Sequence[int], sampling: object) -> int:
        start = max(length for length in prompts if length <= len(ids))
        return answer[(len(ids) - start) % len(answer)]

    class FixedPeers(EdgePeers):
        def verifier(self, target, text, beside=None, plain_first=False):
            prompts.add(text.prompt_length)
            return super().verifier(target, text, beside, plain_first)

    monkeypatch.setattr(edge, "next_token", next_token)
    size = len(tokenizer._tokenizer)
    grammars = Grammars(tokenizer.token_bytes, size)
    served = {"demo": Served("demo", tokenizer, size, 512, frozenset({2}), "float32", grammars)}
    peers = FixedPeers()
    return tokenizer, answer, peers, Ingress(edge.config(), peers, MemorySessions(), served)


async def test_a_requests_text_begins_with_its_space(cat):
    tokenizer, answer, peers, router = cat
    client = LocalClient(router)
    for way in ("off", "(1,1,1)"):
        done = await client.generate_text("the cat", max_new_tokens=len(answer), speculation=way, echo=True)
        assert done.text == " sat on the mat" and done.token_ids == tuple(answer)
        assert "".join(part.text for part in done.prompt) == "the cat"
        stopped = await client.generate_text("the cat", max_new_tokens=len(answer), speculation=way, stop=" sat")
        assert (stopped.text, stopped.complete.finish) == ("", Finish.STOP_STRING)
        assert stopped.token_ids == tuple(answer[: len(tokenizer.encode(" sat", False))])
    samples = await client.generate_samples("the cat", n=2, max_new_tokens=len(answer))
    assert [each.text for each in samples] == [" sat on the mat"] * 2


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", [[1], [1] * 70, "<s>", [300], "the cat"])
async def test_each_token_is_at_its_offset_where_the_prompt_gives_no_text(cat, prompt, echo: bool, shown: bool):
    """A prompt of the beginning-of-text token alone: the answer's first token then loses its space."""
    *_, ingress = cat
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1, "echo": echo}
    async with http_at(served_ingress=ingress) as (server, _):
        _, _, answer = await post(server, "/v1/completions", body | {"show_special_tokens": shown, "n": 2})
    for choice in answer["choices"]:
        text, found = choice["text"], choice["logprobs"]
        for token, offset in [*zip(found["tokens"], found["text_offset"], strict=True)][-4:]:
            assert text[offset:].startswith(token) or (not offset and text.startswith(token.lstrip(" ")))
        assert text.endswith("sat on the mat") and len(text) - found["text_offset"][-1] == len(" mat")


async def test_a_choice_is_returned_as_it_was_given_where_nothing_is_before_it(cat):
    """But special tokens. Without a structure such an answer begins the text, whose mark is not part of it."""
    tokenizer, answer, peers, router = cat
    client, choices = LocalClient(router), Structure(StructureForm.CHOICES, (" sat on",))
    assert (await client.generate_text([1], max_new_tokens=2, structure=choices)).text == " sat on"
    assert (await client.generate_text([1], max_new_tokens=2)).text == "sat on" == tokenizer.decode([1, *answer[:2]])


async def test_a_later_turn_continues_the_text_and_is_read_again_as_it_was_written(cat):
    tokenizer, answer, peers, router = cat
    client = LocalClient(router)
    first = await client.generate_text("the cat", max_new_tokens=len(answer), keep_session=True, request_id="one")
    turn = {"session": first.complete.session, "max_new_tokens": len(answer), "request_id": "two", "echo": True}
    second = await client.generate_text("s and a person", **turn)
    prompt = [*tokenizer.encode("the cat", True), *answer, *tokenizer.encode("s and a person", False)]
    assert list(peers.texts[-1].ids[: len(prompt)]) == prompt
    assert tokenizer.decode(prompt) == "the cat sat on the mats and a person"
    assert second.text == " sat on the mat"
    assert "".join(part.text for part in second.prompt) == "s and a person"
    again = await client.generate_text("s and a person", **turn)
    assert (again.text, again.token_ids, again.complete.speculation.rounds) == (second.text, second.token_ids, 0)


async def test_a_resumed_answer_continues_at_the_same_character(cat):
    tokenizer, answer, peers, router = cat
    prompt = tokenizer.encode("the cat", begins=True)
    for held in range(len(answer) + 1):
        request = pb.GenerateRequest(
            text="the cat", max_new_tokens=len(answer), resume=resume_of(prompt, answer[:held])
        )
        events = [event async for event in router.generate(request)]
        rest = "".join(event.chunk.text for event in events)
        assert TextStream(tokenizer, prompt).append(answer[:held]) + rest == " sat on the mat"


# Training data


def test_training_data_has_no_mark_of_a_beginning_within_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pieces of a file, and the answers of conversations, are what a served text would be."""
    monkeypatch.setattr("cluster.training.data.PIECE_CHARACTERS", 8)
    tokenizer = loaded(
        tmp_path / "model", llama(), tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>",
        chat_template="{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
    )  # fmt: skip
    (tmp_path / "text.txt").write_text("the cat\n sat on\n the mat\n")
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " sat"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}))
    for name, text in (("text.txt", "the cat\n sat on\n the mat\n"), ("talk.jsonl", "user:the catassistant: sat")):
        folder = DataFolder(tmp_path / name.partition(".")[0], 1000)
        written = folder.write(DataSource((tmp_path / name,)), tokenizer, None, 1, lambda written: None)
        ids = [*folder.read("train").tokens.tolist(), *folder.read("held_out").tokens.tolist()]
        assert ids == tokenizer.encode(text, begins=True) and tokenizer.decode(ids) == text, written
