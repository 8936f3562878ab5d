import numpy as np
import pytest
from dendro.calls import PeerText, TextUpdate, new_opening
from dendro.errors import BadRequest, NotFound
from dendro.state import BadState, StateHeader, pack_state, unpack_state
from dendro.text import Finish, Limits, Sampling, Text, Tokens, Verdict, cut_verdict, state_name


def verdict(*tokens: int) -> Verdict:
    return Verdict(tokens, tuple(range(len(tokens))), (0,) * (len(tokens) - 1), None, len(tokens))


def update(tokens: list[int], start: int) -> TextUpdate:
    return TextUpdate.of(new_opening(), Tokens(tokens), start)


def test_a_verdict_is_cut_after_the_first_end_of_text_token():
    cut = cut_verdict(verdict(5, 0, 7), frozenset({0}), 10, Limits(100))
    assert (cut.tokens, cut.path, cut.finish, cut.length) == ((5, 0), (0, 1), Finish.END_OF_TEXT, 3)


def test_ignore_end_does_not_cut_at_end_of_text():
    assert cut_verdict(verdict(5, 0, 7), frozenset({0}), 10, Limits(100, ignore_end=True)).finish is None


@pytest.mark.parametrize("room, kept", [(1, 1), (2, 2), (3, 3)])
def test_a_verdict_is_cut_at_the_token_limit(room, kept):
    cut = cut_verdict(verdict(5, 6, 7), frozenset({0}), 10, Limits(10 + room))
    assert (len(cut.tokens), cut.finish) == (kept, Finish.LENGTH)


def test_end_of_text_on_the_last_allowed_token_is_end_of_text():
    assert cut_verdict(verdict(5, 0), frozenset({0}), 10, Limits(12)).finish is Finish.END_OF_TEXT


def test_a_text_refuses_more_than_its_limit_and_anything_after_its_end():
    text = Text([1, 2], Sampling(), Limits(4))
    with pytest.raises(ValueError, match="room"):
        text.commit(verdict(3, 4, 5))
    text.commit(cut_verdict(verdict(3, 4, 5), frozenset(), 2, Limits(4)))
    assert text.answer == [3, 4] and text.finish is Finish.LENGTH
    with pytest.raises(ValueError, match="end"):
        text.commit(verdict(5))


@pytest.mark.parametrize(
    "field, value",
    [("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5),
     ("min_p", 1.0), ("seed", -1), ("seed", 1 << 64), ("sample_index", -1)],
)  # fmt: skip
def test_bad_sampling_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(BadRequest, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    "field, value",
    [
        ("repetition_penalty", 1.1),
        ("presence_penalty", -0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", ((7, 0.0),)),
        ("banned_ids", (7,)),
        ("allowed_ids", (7,)),
        ("bad_words", ((7, 8),)),
    ],
)
def test_parameters_that_change_logits_before_the_temperature_are_told_from_those_that_do_not(field, value):
    assert not Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3).changes_logits
    assert Sampling(**{field: value}).changes_logits


def test_a_peer_follows_a_cut_and_a_continuation():
    peer = PeerText()
    assert peer.follow(update([1, 2, 3], 0)) == 0
    assert peer.follow(update([1, 2, 3, 4, 5], 3)) == 3
    assert peer.follow(update([1, 2, 3, 4, 9], 3)) == 4  # the router cut after 4
    assert peer.ids == [1, 2, 3, 4, 9]


@pytest.mark.parametrize("start, tokens", [(4, [9]), (2, [8])], ids=["a gap", "another text"])
def test_a_peer_that_lacks_text_raises_not_found_and_keeps_its_copy(start, tokens):
    peer = PeerText()
    peer.follow(update([1, 2, 3], 0))
    whole = [1, 7, 3, 5][:start] + tokens
    with pytest.raises(NotFound):
        peer.follow(update(whole, start))
    assert peer.ids == [1, 2, 3]


def test_state_names_differ_by_tenant_model_layout_and_text():
    names = {
        state_name(*parts)
        for parts in [
            ("a", "m", "l", [1, 2]), ("b", "m", "l", [1, 2]), ("a", "n", "l", [1, 2]), ("a", "m", "k", [1, 2]),
            ("a", "m", "l", [1]), ("a", "m", "l", [2, 1]),
        ]
    }  # fmt: skip
    assert len(names) == 6


HEADER = StateHeader("model", "tokenizer", "layout", 7, 99)
TENSORS: dict[str, np.ndarray] = {
    "ssm": np.arange(12, dtype=np.float32).reshape(3, 4),
    "conv": np.arange(6, dtype=np.uint16),
}


def test_an_unpacked_state_equals_the_packed_one():
    back = unpack_state(pack_state(HEADER, TENSORS), HEADER)
    assert all((back[name] == tensor).all() and back[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_a_state_with_any_bit_flipped_is_refused():
    blob = bytearray(pack_state(HEADER, TENSORS))
    for place in range(len(blob)):
        blob[place] ^= 1 << place % 8
        with pytest.raises(BadState):
            unpack_state(bytes(blob), HEADER)
        blob[place] ^= 1 << place % 8


@pytest.mark.parametrize("other", [("x", "tokenizer", "layout", 7, 99), ("model", "tokenizer", "layout", 8, 99)])
def test_another_state_than_the_expected_one_is_refused(other):
    with pytest.raises(BadState, match="another state"):
        unpack_state(pack_state(StateHeader(*other), TENSORS), HEADER)


def test_a_truncated_or_lengthened_state_is_refused():
    blob = pack_state(HEADER, TENSORS)
    for bad in (blob[:-1], blob + b"\0", b"", b"DNDR"):
        with pytest.raises(BadState):
            unpack_state(bad, HEADER)
