"""The text of an answer does not depend on how its tokens are divided into rounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Event, Thread

import pytest
from dendro.errors import BadRequest, EngineFailed
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from tree_layers.tokens import read_tokens

from cluster.checkpoint_tokenizer import decoder_of
from cluster.router.tokenizer import WINDOW_TOKENS, CheckpointTokenizer, TextStream
from tests.support.edge import ByteTokenizer

TOKENS = st.one_of(
    st.lists(st.integers(0, 256), max_size=200),  # any bytes, and the end token
    st.text(max_size=120).map(lambda text: list(text.encode())),
)


@settings(deadline=None)
@given(TOKENS, st.lists(st.integers(1, 9)))
def test_the_pieces_together_are_the_decoding_of_all_tokens(ids: list[int], cuts: list[int]):
    stream, parts, rest = TextStream(ByteTokenizer()), [], ids
    for cut in cuts:
        parts.append(stream.append(rest[:cut]))
        rest = rest[cut:]
    parts += [stream.append(rest), stream.finish()]
    assert "".join(parts) == ByteTokenizer().decode(ids)


@settings(deadline=None)
@given(TOKENS, st.integers(0, 200))
def test_the_text_so_far_depends_only_on_the_tokens_so_far(ids: list[int], cut: int):
    """So a resumed answer, whose first tokens are pushed at once, continues at the same character."""
    one, many = TextStream(ByteTokenizer()), TextStream(ByteTokenizer())
    assert one.append(ids[:cut]) == "".join(many.append([token]) for token in ids[:cut])
    assert one.append(ids[cut:]) + one.finish() == many.append(ids[cut:]) + many.finish()


@pytest.mark.parametrize("replaced", ["ab", Regex("a ?b")], ids=["text", "pattern"])
def test_the_text_of_a_decoder_that_changes_earlier_characters_does_not_depend_on_the_rounds(tmp_path, replaced):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="c"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(replaced, "xyz")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids, texts = [0, 1, 2, 0, 1], set()
    for cut in range(len(ids)):
        stream = TextStream(CheckpointTokenizer(tmp_path, ""))
        texts.add(stream.append(ids[:cut]) + stream.append(ids[cut:]) + stream.finish())
    assert len(texts) == 1


def test_a_character_is_returned_with_its_last_byte():
    stream = TextStream(ByteTokenizer())
    euro = list("€".encode())
    assert [stream.append([byte]) for byte in euro] == ["", "", "€"]
    assert stream.append(euro[:2]) == "" and stream.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the snake walks the tree " * 9],
        trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|end|>"]),
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(str(folder / "tokenizer.json"))
    return CheckpointTokenizer(folder, "")


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_a_checkpoints_tokenizer_streams_back_the_encoded_text(loaded: CheckpointTokenizer, text: str):
    ids = loaded.encode(text, begins=True)
    stream = TextStream(loaded)
    assert "".join([*(stream.append([token]) for token in ids), stream.finish()]) == loaded.decode(ids) == text


def test_other_threads_run_while_a_long_literal_prompt_is_encoded(loaded: CheckpointTokenizer):
    """No thread is made to hand over the interpreter's lock here within 600 s, so another runs only where the library
    releases it. The prompt is repeated, as the system may take longer than one to run the other thread."""
    loaded.encode_literally("", begins=True)  # makes the encoder
    started, ran = Event(), []
    other = Thread(target=lambda: ran.append(started.wait()))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        other.start()
        started.set()
        for _ in range(50):
            loaded.encode_literally("the snake walks the tree " * 2000, begins=True)
            if ran:
                break
        else:
            pytest.fail("no other thread ran")
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_special_tokens_give_no_text(loaded: CheckpointTokenizer):
    assert loaded.decode([0]) == ""


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="cannot be loaded"):
        CheckpointTokenizer(tmp_path, "")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadRequest, match="cannot be loaded"):
        CheckpointTokenizer(tmp_path, "")


MARKED = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
DECODER = {"added_tokens_decoder": {"4": {"content": "<|end|>", "special": True} | MARKED}}
HOLE = {"added_tokens_decoder": {"9": {"content": "<late>"} | MARKED, "6": {"content": "<soon>"} | MARKED}}
TYPED = {"__type": "AddedToken", "content": "<typed>", "special": True} | MARKED


@pytest.mark.parametrize(
    ("config", "added", "named"),
    [
        (DECODER, {}, {}),
        (HOLE, {}, {}),
        ({}, {"<x>": 4, "<y>": 12}, {}),
        ({"eos_token": "<e>", "pad_token": TYPED, "image_token": "<i>"}, {}, {}),
        ({"extra_special_tokens": ["<x>", TYPED, "b"]}, {}, {}),
        ({"extra_special_tokens": {"image_token": "<i>"}, "mask_token": "<m>"}, {}, {}),
        ({"additional_special_tokens": ["<x>", "<e>"], "eos_token": "<e>"}, {}, {}),
        ({}, {}, {"eos_token": "<e>", "pad_token": {"content": "<p>"} | MARKED, "sound_token": "<s>"}),
        (DECODER | {"eos_token": "<|end|>", "pad_token": "<p>", "image_token": TYPED}, {"<ignored>": 5}, {}),
        (DECODER | {"unk_token": "a", "bos_token": None}, {}, {"cls_token": "<ignored>"}),
        (HOLE | {"mask_token": "<m>", "bos_token": "<b>"}, {}, {}),
        ({"eos_token": "<x>", "bos_token": "<b>"}, {"<x>": 4, "a": 0, "<own>": 7}, {"eos_token": "<e>"}),
        ({"added_tokens_decoder": {"0": {"content": "b"} | MARKED, "3": {"content": "<own>"} | MARKED}}, {}, {}),
        ({"extra_special_tokens": ["<x>"]}, {"<y>": 4}, {"extra_special_tokens": ["<x>", "<z>"]}),
    ],
)
def test_the_token_table_is_that_of_the_tokenizer_as_transformers_loads_it(tmp_path: Path, config, added, named):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    tokenizer.add_special_tokens(["<own>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    for name, value in (("tokenizer_config", config), ("added_tokens", added), ("special_tokens_map", named)):
        if value:
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
    theirs = {token: text for text, token in AutoTokenizer.from_pretrained(tmp_path).get_vocab().items()}
    ours = read_tokens(tmp_path)
    assert ours is not None and ours.texts == theirs
    assert CheckpointTokenizer(tmp_path, "").size == ours.size


def test_tokens_that_are_only_in_added_tokens_json_need_no_tokenizer_config(tmp_path: Path):
    Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 3}))
    ours = read_tokens(tmp_path)
    assert ours is not None and ours.size == CheckpointTokenizer(tmp_path, "").size == 4


@pytest.mark.parametrize(
    ("decoder", "space"),
    [
        (decoders.Metaspace(replacement="▁", prepend_scheme="never"), "▁"),
        (decoders.Metaspace(replacement="_", prepend_scheme="never"), "_"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(replacement="_")]), "_"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]), "_"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), "▁"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.ByteFallback()]), "▁"),
        (decoders.Sequence([decoders.Strip("s", 1, 0), decoders.ByteLevel()]), "Ġ"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "Ġ"),
    ],
    ids=str,
)
def test_the_bytes_of_tokens_are_those_of_the_streamed_text_or_refused_by_name(tmp_path: Path, decoder, space):
    words = [f"{space}snake", "snake", space, "a", "_", f"a{space}s"]
    tokenizer = Tokenizer(models.BPE({word: token for token, word in enumerate(dict.fromkeys(words))}, []))
    tokenizer.decoder = decoder
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = CheckpointTokenizer(tmp_path, "")
    ours = read_tokens(tmp_path)
    assert ours is not None
    try:
        found = loaded.token_bytes()
    except BadRequest as error:
        assert "neither byte-level nor of SentencePiece's kind" in error.reason and ours.form == ""
        return
    assert ours.form
    stream = TextStream(loaded, [3])
    ids = [0, 1, 2, 3, 0, *found]
    text = "".join([*(stream.append([token]) for token in ids), stream.finish()])
    assert text.encode() == b"".join(map(found.__getitem__, ids))


def test_a_panic_of_the_librarys_decoder_is_an_error_of_the_answer(tmp_path: Path):
    tokenizer = Tokenizer(models.BPE({"a": 0, "": 1}, []))
    tokenizer.decoder = decoders.Strip(" ", 0, 1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = CheckpointTokenizer(tmp_path, "")
    for broken in (lambda: TextStream(loaded, [0, 1]), lambda: TextStream(loaded).append([1])):
        with pytest.raises(EngineFailed, match="decoder cannot decode the text: index out of bounds"):
            broken()
    assert TextStream(loaded).append([0]) == "a"


# Every kind of decoder, with any tokens and cuts

WORDS = ["▁the", "▁snake", "▁", "▁▁", "s", "a", "e", "▁中", "é", "walks", "\n"]
SAMPLES = st.lists(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("the snake walks 中文漢字かなカナ한국어ไทย é e\u0301 a\u0323\u0307 "),
        st.sampled_from(["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "\u200d", "\N{REPLACEMENT CHARACTER}"]),
    ),
    max_size=60,
).map("".join)


def llama_style(strip: bool) -> Tokenizer:
    """Bytes for unknown words. strip: the first space, as Llama 2 and Mistral do and Gemma does not"""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.BPE({word: token for token, word in enumerate(vocabulary)}, [], unk_token="<unk>")
    model.byte_fallback = True
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def unigram_style() -> Tokenizer:
    """SentencePiece's Unigram with bytes."""
    vocabulary = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.Unigram([(word, -float(place)) for place, word in enumerate(vocabulary)], 0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def metaspace_style() -> Tokenizer:
    model = models.Unigram([(word, -float(place)) for place, word in enumerate(["<unk>", "</s>", *WORDS])], 0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def wordpiece_style() -> Tokenizer:
    words = ["[UNK]", "[SEP]", "the", "snake", "##s", "##nake", "中", "##文", ".", ",", "'", "n't", "##👍", "do", "not"]
    tokenizer = Tokenizer(models.WordPiece({word: token for token, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def suffix_style() -> Tokenizer:
    """GPT-1's: a word's last token marks its end."""
    words = ["<unk>", "the</w>", "s", "nake</w>", "nake", "中</w>", "中"]
    tokenizer = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def byte_level_style() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    tokenizer.train_from_iterator(["the snake walks 中文漢字 👩‍👩‍👧‍👦 👍🏽 " * 9], trainer)
    return tokenizer


STYLES: dict[str, Callable[[], Tokenizer] | None] = {
    "byte-level": byte_level_style,
    "llama": lambda: llama_style(strip=True),
    "gemma": lambda: llama_style(strip=False),
    "unigram": unigram_style,
    "metaspace": metaspace_style,
    "wordpiece": wordpiece_style,
    "suffix": suffix_style,
    "in Python": None,  # ByT5's, without a file
}


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    folder, make = tmp_path_factory.mktemp("style"), STYLES[request.param]
    if make is None:
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    else:
        make().save(str(folder / "tokenizer.json"))
    return CheckpointTokenizer(folder, request.param)


def random_ids(size: int) -> st.SearchStrategy[list[int]]:
    """Up to ten windows of ids below `size`. Drawn from a seed: a list drawn number by number takes seconds."""
    lengths = st.integers(0, 10 * WINDOW_TOKENS)
    return st.builds(lambda seed, length: Random(seed).choices(range(size), k=length), st.integers(0, 1 << 32), lengths)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_pieces_of_every_decoder_together_are_the_decoding_of_all_tokens(
    style: CheckpointTokenizer, data: st.DataObject
):
    """Also for invalid bytes, and for ten windows of tokens. The text so far does not depend on the cuts, because a
    resumed answer's first tokens are pushed at once."""
    size = len(style._tokenizer)
    ids = data.draw(
        st.one_of(
            SAMPLES.map(lambda text: style.encode(text, begins=False)),
            SAMPLES.map(lambda text: (style.encode(text, begins=False) * 700)[: 10 * WINDOW_TOKENS]),
            random_ids(size),
            random_ids(min(size, 260)),
        )
    )
    one, many, parts, place = TextStream(style), TextStream(style), [], 0
    for cut in data.draw(st.lists(st.integers(1, 40), max_size=100)):
        parts.append(many.append(ids[place : place + cut]))
        place += cut
        if len(parts) == 5:
            assert one.append(ids[:place]) == "".join(parts)
    parts += [many.append(ids[place:]), many.finish()]
    assert "".join(parts) == style.decode(ids)
    assert len(many._window) <= WINDOW_TOKENS + 40 or len(parts) < 5


@settings(max_examples=30, deadline=None)
@given(text=SAMPLES)
def test_a_valid_text_is_decoded_as_the_library_decodes_it(style: CheckpointTokenizer, text: str):
    ids = style.encode(text, begins=True)
    assert style.decode(ids) == style._tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("style", ["byte-level", "llama", "gemma", "unigram", "in Python"], indirect=True)
def test_a_character_in_a_long_run_of_bytes_is_returned_with_its_last_byte(style: CheckpointTokenizer):
    text = "漢語的文字👩‍👩‍👧‍👦ไทย" * 20
    ids, stream, out = style.encode(text, begins=False), TextStream(style), ""
    assert len(ids) > 10 * WINDOW_TOKENS or not style._bytes
    for length, token in enumerate(ids, 1):
        out += stream.append([token])
        assert out == style.decode(ids[:length]).rstrip("\N{REPLACEMENT CHARACTER}"), length
    assert (out + stream.finish()).strip() == text


@pytest.mark.parametrize("style", ["llama", "gemma", "unigram"], indirect=True)
def test_an_invalid_byte_changes_no_other_character(style: CheckpointTokenizer):
    """The library's decoder would replace all bytes of the run, those already returned too."""
    vocabulary = style._tokenizer.get_vocab()
    run = [vocabulary[f"<0x{byte:02X}>"] for byte in "中".encode() + b"\xff" + b"A" + "文".encode()]
    assert style.decode(run) == "中\N{REPLACEMENT CHARACTER}A文"


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 279), max_size=40))
def test_a_text_is_what_the_library_decodes(loaded: CheckpointTokenizer, ids: list[int]):
    assert loaded._decoder is not None
    library = loaded._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert loaded.decode(ids) == library


def test_a_tokenizer_whose_class_decodes_otherwise_decodes_by_its_class(loaded: CheckpointTokenizer):
    class Shouting(type(loaded._tokenizer)):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    assert decoder_of(loaded._tokenizer) is loaded.backend
    assert decoder_of(Shouting(tokenizer_object=loaded.backend)) is None
