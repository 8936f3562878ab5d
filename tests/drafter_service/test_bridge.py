"""Bridges between tokenizers: bytes round trip, texts and trees are translated, whatever the texts are cut into."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dendro.shapes import TreeShape
from dendro.tree import DraftTree
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tree_layers.errors import CheckpointError
from tree_layers.token_bytes import token_bytes

from drafter_service.bridge.branches import complete, target_tree
from drafter_service.bridge.byte_codec import ByteCodec
from drafter_service.bridge.kinds import KINDS, BridgeKind, IntersectionBridge, StringBridge
from drafter_service.bridge.translation import LONGEST_SEGMENT, Translation, closed_segments
from drafter_service.bridge.vocabularies import NO_TOKEN, VocabularyMap
from drafter_service.mapped_noise import MappedNoise
from tests.support import other_tokenizers, tiny_models

CODE = inspect.getsource(json.decoder) + inspect.getsource(textwrap)
PROSE = "The quick brown fox — “jumps” over 12,345 lazy dogs; déjà vu, naïve café.\n"
CJK = "速い茶色の狐は怠け者の犬を飛び越える。敏捷的棕色狐狸跳过了懒狗。빠른 갈색 여우\n"
EMOJI = "👩🏽‍🚀 launched 🚀🚀 at 🇯🇵 🏳️‍🌈!\n"
SAMPLES = {"code": CODE[:3000], "prose": PROSE, "cjk": CJK, "emoji": EMOJI, "mixed": EMOJI + CODE[:200] + CJK + PROSE}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    """Byte-level: of one token a byte, and trained on code, on its second half, and on prose; metaspace: on code."""
    return {
        "bytes": tiny_models.byte_tokenizer(),
        "code": other_tokenizers.byte_level([CODE], 700),
        "half": other_tokenizers.byte_level([CODE[len(CODE) // 2 :]], 500),
        "prose": other_tokenizers.byte_level([PROSE, CJK, EMOJI], 400),
        "metaspace": other_tokenizers.metaspace([CODE, PROSE], 700),
    }


@pytest.fixture(scope="module")
def coded(tokenizers) -> dict[str, ByteCodec]:
    return {name: of(tokenizer) for name, tokenizer in tokenizers.items()}


def of(tokenizer: Tokenizer) -> ByteCodec:
    return ByteCodec(tokenizer, tokenizer.get_vocab_size())


NAMES = ("bytes", "code", "half", "prose", "metaspace")
PAIRS = [("code", "half"), ("bytes", "metaspace"), ("metaspace", "code"), ("prose", "metaspace"), ("code", "code")]


# ---- bytes ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sample", SAMPLES)
def test_bytes_round_trip_and_no_character_is_replaced(coded, name: str, sample: str):
    data = SAMPLES[sample].encode()
    assert coded[name].decode(coded[name].encode(data)) == data


ANY_TEXT = st.one_of(st.binary(max_size=8), st.sampled_from([*SAMPLES.values()]).map(str.encode))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.lists(ANY_TEXT, max_size=4), st.integers(0, 40), st.integers(0, 40))
def test_any_bytes_round_trip_also_where_a_character_is_split(coded, name, parts, start, stop):
    """SentencePiece's sign for a space is text that its tokenizers cannot tell from a space."""
    data = b"".join(parts)
    data = data[start : len(data) - stop].replace("▁".encode(), b"")
    assert coded[name].decode(coded[name].encode(data)) == data


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_tokens_are_those_that_the_library_decodes(coded, tokenizers, name: str):
    for sample in SAMPLES.values():
        ids = tokenizers[name].encode(sample, add_special_tokens=False).ids
        assert tokenizers[name].decode(ids, skip_special_tokens=False) == sample
        assert coded[name].decode(ids) == (b" " if coded[name].prefixes else b"") + sample.encode()


def test_a_split_character_becomes_tokens_of_its_bytes(coded):
    rocket = "🚀".encode()
    for name in NAMES:
        part = coded[name].encode(b"x" + rocket[:3])
        assert coded[name].decode(part) == b"x" + rocket[:3] and len(part) == 4
    assert [complete(b"x" + rocket[:count]) for count in range(5)] == [1, 1, 1, 1, 5]
    assert complete(b"") == 0 and complete("é".encode()) == 2 and complete(b"a\xc3") == 1


def test_special_tokens_a_template_and_a_space_before_the_text_are_left_out(tokenizers):
    tokenizer = Tokenizer.from_str(tokenizers["metaspace"].to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made = of(tokenizer)
    assert made.head == (1,) and made.prefixes
    assert made.control == {0: "<unk>", 1: "<s>", 2: "</s>"} and not made.control.keys() & made.bytes_of.keys()
    assert made.decode(made.encode(b"<s>def")) == b"<s>def" and 1 not in made.encode(b"<s>def")
    assert made.encode(b"") == []


def test_an_added_token_that_is_not_special_stands_for_its_text(tokenizers):
    tokenizer = Tokenizer.from_str(tokenizers["code"].to_str())
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    made = of(tokenizer)
    assert made.bytes_of[700] == b"<tool>" and made.encode(b"a<tool>")[-1] == 700


def test_special_tokens_that_are_not_read_move_no_ids_and_are_no_pieces(tokenizers):
    """Added tokens after special ones, both past the vocabulary; and a Unigram vocabulary that has the special one."""
    tokenizer = Tokenizer.from_str(tokenizers["code"].to_str())
    tokenizer.add_special_tokens(["<a>", "<b>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    made = of(tokenizer)
    assert made.bytes_of[702] == b"<tool>" and made.encode(b"a<tool>")[-1] == 702
    assert made.decode(made.encode(b"x<a>y")) == b"x<a>y" and not {700, 701} & {*made.encode(b"x<a>y")}
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    unigram = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], 0, byte_fallback=True))
    unigram.decoder = decoders.ByteFallback()
    unigram.add_special_tokens(["<unk>", "</s>"])
    made = of(unigram)
    assert made.decode(made.encode(b"a</s>a")) == b"a</s>a" and 1 not in made.encode(b"a</s>a")


def test_a_tokenizer_of_words_has_no_bytes():
    with pytest.raises(CheckpointError, match="neither byte-level nor of SentencePiece's kind"):
        token_bytes({"model": {"type": "WordLevel", "vocab": {"a": 0}}, "decoder": None}, {0: "a"}.get)


def test_ids_past_the_models_rows_are_not_used(tokenizers):
    made = ByteCodec(tokenizers["code"], 400)
    assert max(made.encode(CODE.encode())) < 400 and max(made.bytes_of) < 400


# ---- the text ----


def test_spaces_survive_where_words_are_split_off_at_them_and_each_is_marked():
    """As T5's, which has no tokens of single bytes and takes several spaces for one."""
    made = other_tokenizers.unigram("always")
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    codec = of(made)
    for text in ("the cat sat", " cat", "son sat on", "the  mat ", ""):
        assert codec.decode(codec.encode(text.encode())) == text.encode()
    parts = [b"the ca", b"t", b" sat"]
    assert b"".join(map(codec.decode, codec.encode_all(parts))) == b"".join(parts)


def translated(target: ByteCodec, drafter: ByteCodec, ids: list[int]) -> list[int]:
    """The drafter's ids of a text that is translated at once."""
    made = Translation(target, drafter, VocabularyMap.of(target, drafter).controls)
    made.follow(ids, 0)
    return made.tokens.ids


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(pair))
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_translated_text_has_the_same_bytes(coded, pair, sample: str):
    target, drafter = (coded[name] for name in pair)
    data = SAMPLES[sample].encode()
    found = drafter.decode(translated(target, drafter, target.encode(data)))
    assert found == (b" " if drafter.prefixes else b"") + data.removeprefix(b" " if target.prefixes else b"")


@settings(deadline=None, max_examples=25)
@given(pair=st.sampled_from(PAIRS), data=st.data())
def test_however_a_text_grows_and_is_cut_its_translation_is_that_of_the_whole(coded, pair, data):
    """Any ids, so also bytes that are no UTF-8, in any steps, with any cuts."""
    target, drafter = (coded[name] for name in pair)
    sample = target.encode(data.draw(st.sampled_from([*SAMPLES.values()])).encode()[:600])
    made = Translation(target, drafter, VocabularyMap.of(target, drafter).controls)
    ids: list[int] = []
    sent: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        common = data.draw(st.integers(max(0, len(ids) - 90), len(ids)))
        at = data.draw(st.integers(0, len(sample)))
        more = sample[at : at + data.draw(st.integers(0, 90))]
        more += data.draw(st.lists(st.integers(0, target.vocabulary - 1), max_size=3))
        ids = ids[:common] + more
        made.follow(ids, common)
        assert made.tokens.ids == translated(target, drafter, ids)
        sent = sent[: made.unchanged] + made.tokens.ids[made.unchanged :]
        assert sent == made.tokens.ids  # what a drafter holds that was sent the tokens from `unchanged` on
        made.unchanged = len(sent)


def test_code_is_translated_as_the_drafters_tokenizer_encodes_it(coded):
    for pair in (("bytes", "code"), ("half", "metaspace"), ("metaspace", "half")):
        target, drafter = (coded[name] for name in pair)
        first = b" " if drafter.prefixes else b""
        assert translated(target, drafter, target.encode(CODE.encode())) == drafter.encode(first + CODE.encode())


@pytest.mark.parametrize("text", [CODE * 3, "x" * 30_000, CJK * 200], ids=["code", "one-word", "cjk"])
def test_a_token_encodes_a_bounded_part_of_the_text_however_long_it_is(tokenizers, coded, text: str):
    """So the time of a text is linear in its length: ten times the length, ten times the bytes."""
    target, drafter = coded["bytes"], of(tokenizers["half"])
    encoded: list[int] = []
    encode_all = drafter.encode_all
    drafter.encode_all = lambda parts: encoded.append(sum(map(len, parts))) or encode_all(parts)
    ids = target.encode(text.encode()[:30_000])
    bytes_of = {}
    for length in (3_000, 30_000):
        made = Translation(target, drafter, {})
        made.follow(ids[:length], 0)
        encoded.clear()
        at = length
        made.follow(ids[: at - 3], at - 3)
        for count in range(at - 2, at + 1):
            made.follow(ids[:count], count - 1)
        bytes_of[length] = sum(encoded)
    assert max(bytes_of.values()) <= 10 * LONGEST_SEGMENT


def test_a_segment_ends_where_a_space_follows_a_word_or_after_256_bytes_between_two_characters():
    assert closed_segments(b"def area(r):\n  return r") == ([b"def", b" area(r):\n  return"], b" r")
    long = "é".encode() * 200 + b"x"
    closed, rest = closed_segments(long)
    assert b"".join([*closed, rest]) == long and [len(part) for part in closed] == [256]
    odd = b"x" + "é".encode() * 200
    assert [len(part) for part in closed_segments(odd)[0]] == [255]
    assert closed_segments(b"\x80" * 600)[0][0] == b"\x80" * 253  # no character at all


def test_control_tokens_are_mapped_where_both_have_them_and_left_out_elsewhere(tokenizers):
    ours, theirs = (Tokenizer.from_str(tokenizers[name].to_str()) for name in ("code", "half"))
    ours.add_special_tokens(["<turn>", "<mine>"])
    theirs.add_special_tokens(["<turn>"])
    target, drafter = of(ours), of(theirs)
    ids = [*target.encode(b"one"), 700, *target.encode(b"two"), 701, *target.encode(b"three")]
    assert translated(target, drafter, ids) == [
        *drafter.encode(b"one"), 500, *drafter.encode(b"two"), *drafter.encode(b"three")
    ]  # fmt: skip


def test_a_beginning_of_text_is_that_of_the_drafter_alone(tokenizers):
    """Llama's BOS at the target, none at the drafter; and the other way round; and both."""
    plain, bos = tokenizers["code"], Tokenizer.from_str(tokenizers["metaspace"].to_str())
    bos.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ours, theirs = of(bos), of(plain)
    text = CODE[:300].encode()
    assert translated(ours, theirs, bos.encode(text.decode()).ids) == theirs.encode(text)
    assert translated(theirs, ours, theirs.encode(text)) == bos.encode(text.decode()).ids
    assert translated(ours, ours, bos.encode(text.decode()).ids) == bos.encode(text.decode()).ids


def test_a_text_without_bytes_has_a_root(tokenizers):
    target = of(tokenizers["code"])
    assert translated(target, of(tokenizers["bytes"]), [0]) == [0]  # the target's end of text, which the other lacks


# ---- vocabularies ----


def test_equal_bytes_are_the_same_token_whatever_their_ids(coded, tokenizers, tmp_path: Path):
    same = VocabularyMap.of(coded["code"], coded["half"])
    for token, other in enumerate(same.same.tolist()):
        if other != NO_TOKEN and token in coded["half"].bytes_of:
            assert coded["half"].bytes_of[token] == coded["code"].bytes_of[other]
    assert 256 < same.common < 500
    assert same.same[0] == 0  # the end of text has the same name
    mixed = VocabularyMap.of(coded["metaspace"], coded["code"])
    known = [token for token, other in enumerate(mixed.same.tolist()) if other != NO_TOKEN]
    assert len(set(mixed.same[known].tolist())) == len(known)  # one drafter token for each
    a = tokenizers["code"].token_to_id("a")
    assert mixed.same[a] == tokenizers["metaspace"].token_to_id("a") != tokenizers["metaspace"].token_to_id("<0x61>")


def test_noise_of_a_longer_token_is_that_of_the_first_target_token_in_it(coded):
    target, drafter = coded["bytes"], coded["code"]
    made = StringBridge(target, drafter, "")
    for token, data in drafter.bytes_of.items():
        assert target.bytes_of[made.noise_ids[token]] == data[:1]
    only = IntersectionBridge(target, drafter, "").noise_ids
    assert {token for token in range(700) if only[token] == NO_TOKEN} == {0} | {
        token for token, data in drafter.bytes_of.items() if len(data) > 1
    }


def test_a_bridge_without_a_common_token_is_refused(coded):
    class Letters:
        vocabulary, bytes_of, id_of, control, prefixes, head = 1, {0: b"zzzzzz"}, {b"zzzzzz": 0}, {}, False, ()

    with pytest.raises(CheckpointError, match="no tokens are common"):
        IntersectionBridge(coded["bytes"], Letters(), "")


def test_mapped_noise_is_the_rows_own_and_masks_what_is_not_guessed():
    class PositionNoise:
        def row(self, position: int) -> Any:
            import torch

            return torch.arange(5.0) + 10 * position

        def forget_before(self, position: int) -> None: ...

    made = MappedNoise(PositionNoise(), np.array([4, -1, 0, 4]))
    assert made.row(3).tolist() == [34.0, -np.inf, 30.0, 34.0]
    assert MappedNoise(None, np.array([4, -1, 0])).row(3).tolist() == [0.0, -np.inf, 0.0]
    made.prepare([4, 5])
    made.forget_before(5)
    assert len(made) == 1
    with pytest.raises(ValueError, match="no token"):
        MappedNoise(None, np.array([-1, -1]))


# ---- trees ----


def chain(tokens: list[int], values: list[float] | None = None) -> DraftTree:
    return DraftTree.of([0, *tokens], range(-1, len(tokens)), None if values is None else [0.0, *values])


def through(
    kind: BridgeKind, target: ByteCodec, drafter: ByteCodec, tree: DraftTree, text: bytes, shape: str
) -> DraftTree:
    return KINDS[kind](target, drafter, "").tree(tree, target.encode(text), TreeShape.parse(shape))


def texts_of(tree: DraftTree, target: ByteCodec) -> list[bytes]:
    """The text of each path of a target's tree."""
    return [target.decode(int(tree.tokens[row]) for row in tree.path_to(leaf)[1:]) for leaf in range(tree.rows)]


def test_a_drafted_chain_is_encoded_together_with_the_texts_end(coded):
    """The text ends inside a word, whose next token depends on what precedes it."""
    target, drafter = coded["code"], coded["half"]
    text = b"    return self.decode"
    drafted = drafter.encode(b"(s, **kw)\n")
    made = through("string", target, drafter, chain(drafted), text, "(" + "1," * 30 + ")")
    whole = target.encode(text + b"(s, **kw)\n")
    assert whole[: len(target.encode(text))] == target.encode(text)
    assert made.tokens.tolist() == [target.encode(text)[-1], *whole[len(target.encode(text)) :]]  # both have `\n`


@settings(deadline=None, max_examples=25)
@given(pair=st.sampled_from(PAIRS), kind=st.sampled_from(["string", "intersection"]), data=st.data())
def test_a_tree_keeps_the_shapes_limits_and_every_path_is_a_drafted_text(coded, pair, kind, data):
    target, drafter = (coded[name] for name in pair)
    shape = TreeShape.parse(data.draw(st.sampled_from(["(1,1,1,1)", "(3,2,1)", "(2,2,2,1,1)", "dynamic(4,5,15)"])))
    parents, tokens, taken = [-1], [0], set()
    for row in range(1, data.draw(st.integers(1, shape.rows - 1)) + 1):
        parent, token = data.draw(st.integers(0, row - 1)), data.draw(st.integers(0, drafter.vocabulary - 1))
        while (parent, token) in taken:
            token = (token + 1) % drafter.vocabulary
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    values = [0.0]
    for row in range(1, len(parents)):
        values.append(values[parents[row]] - data.draw(st.floats(0, 3)))
    drafted = DraftTree.of(tokens, parents, values)
    ids = target.encode(CODE.encode()[: data.draw(st.integers(1, 200))])
    made = KINDS[kind](target, drafter, "").tree(drafted, ids, shape)
    assert made.rows <= shape.rows and (made.depth <= shape.depth or kind == "intersection")
    assert made.tokens[0] == ids[-1] and made.tokens.max() < target.vocabulary
    assert (made.values[1:] <= made.values[made.parents[1:]]).all()
    for row in range(1, made.rows):
        below = made.values[made.children(row)]
        assert (np.diff(below) <= 0).all() or kind == "intersection"
    paths = [
        drafter.decode(int(drafted.tokens[row]) for row in drafted.path_to(leaf)[1:]) for leaf in range(len(tokens))
    ]
    for text in texts_of(made, target):
        assert any(path.startswith(text) for path in paths)


def test_branches_with_one_beginning_share_its_rows_and_their_chances_add_up(coded):
    """`ab` as one token with chance 1/2, and as two tokens with chances 1/4 and 1/8, then `c`."""
    target, drafter = coded["bytes"], of(other_tokenizers.byte_level(["ab ab ab"], 260))
    a, b, c, ab = (drafter.id_of[data] for data in (b"a", b"b", b"c", b"ab"))
    drafted = DraftTree.of(
        [0, ab, a, c, b, c], [-1, 0, 0, 1, 2, 4], np.log([1, 1 / 2, 1 / 4, 1 / 3, 1 / 8, 1 / 16]).tolist()
    )
    made = target_tree(
        drafted, target.encode(b"x"), TreeShape.parse("(3,3,3)"), target, drafter, VocabularyMap.of(target, drafter)
    )
    assert texts_of(made, target) == [b"", b"a", b"ab", b"abc"]
    assert np.exp(made.values).tolist() == pytest.approx([1, 1 / 2 + 1 / 4, 1 / 2 + 1 / 8, 1 / 3 + 1 / 16])


def test_the_last_token_of_a_branch_is_kept_where_it_is_one_drafted_token_or_a_control_token_follows(coded):
    """The drafter chose `a` though it has longer tokens. Of `ab` the target's last token `b` may go on, as in `bc`."""
    target, drafter = coded["bytes"], of(other_tokenizers.byte_level(["ab ab ab"], 260))
    a, b, ab = (drafter.id_of[data] for data in (b"a", b"b", b"ab"))
    for tokens, wanted in (([a], b"a"), ([a, b], b"ab"), ([ab], b"a"), ([a, ab], b"aa"), ([ab, 0], b"a")):
        made = through("string", target, drafter, chain(tokens), b"x", "(1,1,1,1,1)")
        assert texts_of(made, target)[-1] == wanted
    mapped = of(other_tokenizers.byte_level(["x"], 257))  # it has the end of text too
    made = through("string", mapped, drafter, chain([ab, 0]), b"x", "(1,1,1,1,1)")
    assert [mapped.decode([token]) for token in made.tokens[1:].tolist()] == [b"a", b"b", b""]


def test_a_control_token_that_the_target_lacks_ends_a_branch(coded):
    target, drafter = coded["bytes"], coded["half"]
    a, b = drafter.id_of[b"a"], drafter.id_of[b"b"]
    for kind in KINDS:
        made = through(kind, target, drafter, chain([a, 0, b]), b"x", "(1,1,1)")
        assert texts_of(made, target)[-1] == b"a" and made.rows == 2


def test_the_intersection_keeps_the_trees_form_and_values(coded):
    target, drafter = coded["code"], coded["half"]
    both = [token for token in range(500) if VocabularyMap.of(target, drafter).same[token] != NO_TOKEN][10:16]
    drafted = DraftTree.of([0, *both], [-1, 0, 0, 1, 1, 2, 3], [0, -1, -2, -1.5, -3, -4, -2])
    made = through("intersection", target, drafter, drafted, b"x", "(2,2,2)")
    assert made.parents.tolist() == drafted.parents.tolist() and made.values.tolist() == drafted.values.tolist()
    assert [target.bytes_of[token] for token in made.tokens[1:].tolist()] == [drafter.bytes_of[token] for token in both]
