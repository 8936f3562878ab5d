"""Stop strings in a growing text: what may be sent, and which token ends the answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest
from dendro.errors import BadRequest
from dendro.options import MAX_STOP_BYTES, MAX_STOP_STRINGS
from dendro.text import Finish, StopStrings, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.router.stop_strings import PART_TOKENS, StopAutomaton, StoppedText, StopSearch
from tests.support.edge import ByteTokenizer
from tests.support.stop_oracle import ended, first_stop, sendable

LETTERS = "ab"


def words(longest: int) -> list[str]:
    return ["".join(letters) for length in range(1, longest + 1) for letters in product(LETTERS, repeat=length)]


def splits(length: int) -> Iterator[list[int]]:
    """Every way to divide so many things into consecutive parts, as the parts' ends."""
    for cuts in product((False, True), repeat=length - 1):
        yield [place for place, cut in enumerate(cuts, 1) if cut] + [length]


@pytest.mark.parametrize("included", [False, True], ids=["before", "included"])
@pytest.mark.parametrize("most, length", [(2, 6), pytest.param(3, 8, marks=pytest.mark.long)])
def test_after_every_character_all_is_sent_but_what_could_begin_a_stop_string(included: bool, most: int, length: int):
    """All sets of up to `most` strings of up to three letters, in all texts of `length`."""
    for size in range(1, most + 1):
        for stops in combinations(words(3), size):
            automaton = StopAutomaton(stops)
            for letters in product(LETTERS, repeat=length):
                text, search, sent = "".join(letters), StopSearch(automaton, included), ""
                for end in range(1, len(text) + 1):
                    sent += search.push(text[end - 1])
                    assert sent == sendable(text[:end], stops, included, False), (stops, text[:end])
                    if search.found:
                        break
                found = first_stop(text, stops)
                assert search.found == (found[1] if found else "")
                assert sent + search.flush() == sendable(text, stops, included, True), (stops, text)


def test_what_is_sent_does_not_depend_on_how_the_text_is_divided():
    for stops in [*combinations(words(3), 1), ("aab", "b"), ("ab", "aaba"), ("bb", "abab", "aaa"), ("abba", "bab")]:
        automaton = StopAutomaton(stops)
        for letters in product(LETTERS, repeat=6):
            text = "".join(letters)
            for ends in splits(6):
                search, sent, start = StopSearch(automaton, False), "", 0
                for end in ends:
                    sent += search.push(text[start:end])
                    assert sent == sendable(text[:end], stops, False, False), (stops, text, ends)
                    start = end


class PieceTokenizer:
    """Tokens of several letters, so that stop strings begin and end inside of tokens."""

    fingerprint = "pieces"
    rewrites = False
    pieces = ("a", "b", "ab", "bba", "")

    def encode(self, text: str, begins: bool) -> list[int]:
        raise NotImplementedError

    encode_literally = encode

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in ids)

    def visible(self, ids: Sequence[int]) -> list[int]:
        return list(ids)

    def showing(self, shown=None) -> PieceTokenizer:
        return self


def verdict(tokens: Sequence[int], finish: Finish | None = None) -> Verdict:
    """A round without guesses would emit one token; here the guesses before the last were accepted."""
    return Verdict(tuple(tokens), tuple(range(len(tokens))), (0,) * (len(tokens) - 1), finish, len(tokens))


def run(answer: StoppedText, ids: Sequence[int], ends: Sequence[int]) -> tuple[int, str, Verdict]:
    """Commit an answer's rounds until one is finished. Returns the tokens kept, the text and the last verdict."""
    start, kept, text = 0, 0, ""
    for end in ends:
        done = answer.cut(verdict(ids[start:end], Finish.LENGTH if end == len(ids) else None))
        text += answer.text_of(done)
        kept += len(done.tokens)
        start = end
        if done.finished:
            break
    return kept, text, done


@pytest.mark.parametrize("included", [False, True], ids=["before", "included"])
@pytest.mark.parametrize("length", [3, pytest.param(4, marks=pytest.mark.long)])
def test_the_answer_ends_with_the_token_that_completes_a_stop_string_however_tokens_are_divided_into_rounds(
    included: bool, length: int
):
    """All answers of so many tokens, all divisions."""
    tokenizer = PieceTokenizer()
    for stops in [*combinations(words(3), 1), ("abb", "bb"), ("aab", "ba"), ("baba", "b"), ("abbaa", "aa", "bbb")]:
        for ids in product(range(len(tokenizer.pieces)), repeat=length):
            count, text, stop = ended(tokenizer, ids, stops, included)
            for ends in splits(length):
                answer = StoppedText(tokenizer, StopStrings.of(stops, included))
                kept, sent, last = run(answer, ids, ends)
                assert (kept, sent, answer.found) == (count, text, stop), (stops, ids, ends)
                assert answer.length == count
                assert last.finish is (Finish.STOP_STRING if stop else Finish.LENGTH)
                assert len(last.path) == len(last.tokens) and len(last.ranks) == min(len(last.tokens), last.length - 1)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_stop_strings_of_any_characters_end_the_answer_at_the_token_with_their_last_byte(data: st.DataObject):
    """Characters of one to four bytes, and bytes that are no character; substrings of the text among the strings."""
    tokenizer = ByteTokenizer()
    raw = data.draw(st.one_of(st.text("a€𝛼é \n", max_size=40).map(str.encode), st.binary(max_size=20)))
    ids = [*raw, *data.draw(st.sampled_from([[], [256]]))]
    if not ids:
        return
    text = tokenizer.decode(ids)
    places = st.integers(0, max(len(text) - 1, 0))
    inside = st.builds(lambda start, length: text[start : start + length], places, st.integers(1, 5)).filter(bool)
    any_text = st.text("a€𝛼é \n\N{REPLACEMENT CHARACTER}", min_size=1, max_size=4)
    stops = data.draw(st.lists(st.one_of(inside, any_text) if text else any_text, min_size=1, max_size=3))
    ends = sorted({*data.draw(st.lists(st.integers(1, len(ids)))), len(ids)})
    included = data.draw(st.booleans())
    answer = StoppedText(tokenizer, StopStrings.of(stops, included))
    kept, sent, _ = run(answer, ids, ends)
    assert (kept, sent, answer.found) == ended(tokenizer, ids, stops, included)


def test_a_resumed_answer_continues_at_the_character_after_the_sent_ones():
    tokenizer, ids = ByteTokenizer(), list("a snake €𝛼 stops at the end".encode())
    for stops in (["stop!", "snap"], ["€𝛼 st"], ["the tree"], ["en", "end"]):
        whole = StoppedText(tokenizer, StopStrings.of(stops, False))
        texts = [whole.append([token]) for token in ids]
        rest = "".join(texts) + whole.finish()
        for held in range(whole.length + 1):
            again = StoppedText(tokenizer, StopStrings.of(stops, False))
            again.append(ids[:held])
            assert again.length == held
            assert "".join(texts[:held]) + again.append(ids[held:]) + again.finish() == rest
            assert (again.length, again.found) == (whole.length, whole.found)


@pytest.mark.parametrize("place", [0, 1, PART_TOKENS - 1, PART_TOKENS, 5 * PART_TOKENS + 3])
def test_a_stop_string_is_found_at_its_token_in_a_long_resumed_answer(place: int):
    ids = [*b"x" * place, *b"!", *b"x" * 200]
    answer = StoppedText(ByteTokenizer(), StopStrings.of(["!"], False))
    assert answer.append(ids) == "x" * place
    assert (answer.length, answer.found) == (place + 1, "!")


@pytest.mark.parametrize("stops", [["a" * 1024], ["a" * 1023 + "b"], ["ab" * 512, "a" * 1000], ["b" + "a" * 1023]])
@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_the_work_is_linear_in_the_text_for_stop_strings_that_nearly_repeat(stops: list[str], piece: int):
    """In Python lines, so ten times the text takes ten times as many; a first character that does not occur in the
    text keeps those that could match from being found."""

    def lines(length: int) -> int:
        text, search, count = ("a" * 900 + "x") * (length // 901), StopSearch(StopAutomaton(stops), False), 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for start in range(0, len(text), piece):
                search.push(text[start : start + piece])
        finally:
            sys.settrace(before)
        assert not search.found
        return count

    short, long = lines(9_010), lines(90_100)
    assert long <= 10.5 * short
    assert short <= 20 * 9_010


@pytest.mark.parametrize(
    "field, stops, included",
    [
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1), False),
        ("stop[1]", ["x", ""], False),
        ("stop[0]", ["x" * (MAX_STOP_BYTES + 1)], False),
        ("stop[0]", ["€" * (MAX_STOP_BYTES // 3 + 1)], False),
        ("stop[2]", ["x", "y", "\ud800"], False),
        ("include_stop", [], True),
    ],
)
def test_bad_stop_strings_are_refused_by_their_place(field: str, stops: list[str], included: bool):
    with pytest.raises(BadRequest) as refused:
        StopStrings.of(stops, included)
    assert refused.value.field == field and len(str(refused.value)) < 120


def test_the_longest_and_most_stop_strings_are_accepted():
    stops = [chr(97 + number) * MAX_STOP_BYTES for number in range(MAX_STOP_STRINGS)]
    found = StopSearch(StopAutomaton(StopStrings.of(stops, False).strings), False)
    assert found.push("b" + "a" * (MAX_STOP_BYTES - 1)) == "b" and not found.found
    assert found.push("a") == "" and found.found == stops[0]


@pytest.mark.parametrize(
    "text, stops, found, before",
    [
        ("aaab", ["aab"], "aab", "a"),  # overlaps itself
        ("ababac", ["abac"], "abac", "ab"),
        ("xaby", ["xabz", "ab"], "ab", "x"),  # the shorter ends first, inside of what could be the longer
        ("xab", ["b", "ab", "xab"], "xab", ""),  # all end at once
        ("stop", ["stop", "top"], "stop", ""),
        ("stop", ["stops", "to"], "to", "s"),
    ],
)
def test_the_string_that_ends_first_counts_and_of_several_the_longest(text, stops, found, before):
    for order in (stops, stops[::-1]):
        search = StopSearch(StopAutomaton(order), False)
        assert (search.push(text), search.found) == (before, found)
