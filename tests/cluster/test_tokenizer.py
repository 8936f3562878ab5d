"""The text of an answer does not depend on how its tokens were cut into rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dendro.errors import BadRequest
from edge import ByteTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cluster.router.tokenizer import WINDOW_TOKENS, CheckpointTokenizer, TextStream

TOKENS = st.one_of(
    st.lists(st.integers(0, 256), max_size=200),  # bytes that are no text, and the token that ends one
    st.text(max_size=120).map(lambda text: list(text.encode())),
)


@settings(deadline=None)
@given(TOKENS, st.lists(st.integers(1, 9)))
def test_all_that_is_handed_out_is_the_decoding_of_all_tokens(ids: list[int], cuts: list[int]):
    stream, parts, rest = TextStream(ByteTokenizer()), [], ids
    for cut in cuts:
        parts.append(stream.push(rest[:cut]))
        rest = rest[cut:]
    parts += [stream.push(rest), stream.flush()]
    assert "".join(parts) == ByteTokenizer().decode(ids)


@settings(deadline=None)
@given(TOKENS, st.integers(0, 200))
def test_what_is_out_depends_on_the_tokens_alone(ids: list[int], cut: int):
    """So a resumed answer, whose first tokens come at once, goes on at the same character."""
    one, many = TextStream(ByteTokenizer()), TextStream(ByteTokenizer())
    assert one.push(ids[:cut]) == "".join(many.push([token]) for token in ids[:cut])
    assert one.push(ids[cut:]) + one.flush() == many.push(ids[cut:]) + many.flush()


def test_a_character_waits_for_its_other_bytes():
    stream = TextStream(ByteTokenizer())
    euro = list("€".encode())
    assert [stream.push([byte]) for byte in euro] == ["", "", "€"]
    assert stream.push(euro[:2]) == "" and stream.flush() == "\N{REPLACEMENT CHARACTER}"


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
def test_a_checkpoints_tokenizer_streams_back_what_it_was_given(loaded: CheckpointTokenizer, text: str):
    ids = loaded.encode(text, begins=True)
    stream = TextStream(loaded)
    assert "".join([*(stream.push([token]) for token in ids), stream.flush()]) == loaded.decode(ids) == text


def test_special_tokens_make_no_text(loaded: CheckpointTokenizer):
    assert loaded.decode([0]) == ""


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(BadRequest, match="cannot be loaded"):
        CheckpointTokenizer(tmp_path, "")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadRequest, match="cannot be loaded"):
        CheckpointTokenizer(tmp_path, "")


# Texts of every kind of decoder, whatever the tokens and the cuts

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
    """As Llama 2 and Mistral, which strip the first space, or Gemma, which does not: bytes for unknown words."""
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
    """The first GPT's: a word's last token says that it ends."""
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
    "in Python": None,  # ByT5's, which has no file at all
}


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    folder, make = tmp_path_factory.mktemp("style"), STYLES[request.param]
    if make is None:
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    else:
        make().save(str(folder / "tokenizer.json"))
    return CheckpointTokenizer(folder, request.param)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_the_decoder_the_pieces_are_the_decoding_of_all_tokens(
    style: CheckpointTokenizer, data: st.DataObject
):
    """Also of bytes that are no text, and of ten windows' length. Pieces do not depend on the cuts, as a resumed
    answer's first tokens come at once."""
    size = len(style._tokenizer)
    ids = data.draw(
        st.one_of(
            SAMPLES.map(lambda text: style.encode(text, begins=False)),
            SAMPLES.map(lambda text: (style.encode(text, begins=False) * 700)[: 10 * WINDOW_TOKENS]),
            st.lists(st.integers(0, size - 1), max_size=10 * WINDOW_TOKENS),
            st.lists(st.integers(0, min(size, 260) - 1), min_size=200, max_size=10 * WINDOW_TOKENS),
        )
    )
    one, many, parts, place = TextStream(style), TextStream(style), [], 0
    for cut in data.draw(st.lists(st.integers(1, 40), max_size=100)):
        parts.append(many.push(ids[place : place + cut]))
        place += cut
        if len(parts) == 5:
            assert one.push(ids[:place]) == "".join(parts)
    parts += [many.push(ids[place:]), many.flush()]
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
def test_a_character_is_out_with_its_last_byte_however_long_the_run_of_bytes_is(style: CheckpointTokenizer):
    text = "漢語的文字👩‍👩‍👧‍👦ไทย" * 20
    ids, stream, out = style.encode(text, begins=False), TextStream(style), ""
    assert len(ids) > 10 * WINDOW_TOKENS or not style._bytes
    for length, token in enumerate(ids, 1):
        out += stream.push([token])
        assert out == style.decode(ids[:length]).rstrip("\N{REPLACEMENT CHARACTER}"), length
    assert (out + stream.flush()).strip() == text


@pytest.mark.parametrize("style", ["llama", "gemma", "unigram"], indirect=True)
def test_a_byte_that_is_no_text_changes_no_other_character(style: CheckpointTokenizer):
    """The library's decoder would make replacement characters of all bytes of the run, those that are out too."""
    vocabulary = style._tokenizer.get_vocab()
    run = [vocabulary[f"<0x{byte:02X}>"] for byte in "中".encode() + b"\xff" + b"A" + "文".encode()]
    assert style.decode(run) == "中\N{REPLACEMENT CHARACTER}A文"
