"""The text of an answer does not depend on how its tokens were cut into rounds."""

from __future__ import annotations

import pytest
from dendro.errors import BadRequest
from edge import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.tokenizer import CheckpointTokenizer, TextStream

TOKENS = st.one_of(
    st.lists(st.integers(0, 256), max_size=200),  # bytes that are no text, and the token that ends one
    st.text(max_size=120).map(lambda text: list(text.encode())),
)


@given(TOKENS, st.lists(st.integers(1, 9)))
def test_all_that_is_handed_out_is_the_decoding_of_all_tokens(ids: list[int], cuts: list[int]):
    stream, parts, rest = TextStream(ByteTokenizer()), [], ids
    for cut in cuts:
        parts.append(stream.push(rest[:cut]))
        rest = rest[cut:]
    parts += [stream.push(rest), stream.flush()]
    assert "".join(parts) == ByteTokenizer().decode(ids)


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
