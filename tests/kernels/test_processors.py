"""Parameters that change logits before the temperature: transformers' classes are the oracle where there is one."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from tree_kernels.warp import History, Processors, processed

VOCABULARY = 23
END = (3, 4)


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def random_text(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, VOCABULARY, length).tolist()


def random_processors(rng: np.random.Generator, prompt: int, chance: float = 0.5) -> Processors:
    """Each parameter is set with this chance. Tokens 0 and 1 are never removed."""

    def maybe(value, default):
        return value if rng.random() < chance else default

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.choice(np.arange(2, VOCABULARY), rng.integers(1, most), replace=False).tolist())

    words = tuple((*random_text(rng, int(rng.integers(0, 3))), *ids(2)) for _ in range(12))
    return Processors(
        repetition_penalty=maybe(float(rng.choice([0.6, 1.3, 2.7])), 1.0),
        presence_penalty=maybe(float(rng.normal()), 0.0),
        frequency_penalty=maybe(float(rng.normal()), 0.0),
        logit_bias=maybe(tuple((token, float(rng.normal(scale=3))) for token in ids(6)), ()),
        banned=maybe(ids(5), ()),
        allowed=maybe((0, 1, *ids(14)), ()),
        bad_words=maybe(words, ()),
        ending=END,
        min_length=maybe(prompt + int(rng.integers(1, 8)), 0),
    )


def by_transformers(its: Processors, prompt: int) -> LogitsProcessorList:
    """The library's processors in the order of its `generate`, without those that are off."""
    made = LogitsProcessorList()
    if its.logit_bias:
        made.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in its.logit_bias}))
    if its.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(its.repetition_penalty))
    if its.bad_words:
        made.append(NoBadWordsLogitsProcessor([list(word) for word in its.bad_words]))
    if its.min_length:
        made.append(MinNewTokensLengthLogitsProcessor(prompt, its.min_length - prompt, list(its.ending)))
    if its.banned:
        made.append(SuppressTokensLogitsProcessor(list(its.banned)))
    if its.allowed:
        made.append(SuppressTokensLogitsProcessor(sorted(set(range(VOCABULARY)) - set(its.allowed))))
    return made


EACH = {
    "repetition_penalty": Processors(repetition_penalty=1.3),
    "repetition_penalty below 1": Processors(repetition_penalty=0.7),
    "logit_bias": Processors(logit_bias=((5, 2.5), (0, -90.0), (22, 100.0))),
    "banned": Processors(banned=(5, 0, 22)),
    "allowed": Processors(allowed=(5, 0, 22)),
    "bad_words": Processors(bad_words=((7,), (2, 9), (1, 2, 9), (2, 2, 2, 2, 2, 2, 5))),
    "min_length": Processors(ending=END, min_length=9),
}


@pytest.mark.parametrize("length", [1, 6, 8, 9, 60])
@pytest.mark.parametrize("name", EACH)
def test_each_parameter_is_transformers_own(name: str, length: int):
    """On texts that end with the start of the bad words, and on random ones."""
    its, rng = EACH[name], np.random.default_rng(length)
    for seed in range(20):
        text = random_text(rng, length) if seed % 2 else [2] * length
        logits = random_logits(seed)
        expected = by_transformers(its, 6)(torch.tensor([text]), logits.clone())[0]
        assert torch.equal(processed(logits[0], its, text, 6), expected)


def test_random_combinations_of_parameters_are_transformers_own_in_its_order():
    rng = np.random.default_rng(0)
    for seed in range(200):
        prompt = int(rng.integers(1, 9))
        text = random_text(rng, prompt + int(rng.integers(0, 9)))
        its = random_processors(rng, prompt)
        both = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        library = Processors(**{name: getattr(its, name) for name in its.__slots__} | both)
        logits = random_logits(seed)
        expected = by_transformers(library, prompt)(torch.tensor([text]), logits.clone())[0]
        for token, times in Counter(text[prompt:]).items():
            expected[token] -= torch.tensor(float(times)) * its.frequency_penalty
            expected[token] -= its.presence_penalty
        assert torch.equal(processed(logits[0], its, text, prompt), expected)


def test_presence_and_frequency_penalties_count_the_answer_alone():
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence of the OpenAI API, by hand."""
    logits, prompt, answer = torch.zeros(5), [0, 0, 1], [1, 2, 2]
    its = Processors(presence_penalty=0.5, frequency_penalty=0.25)
    assert processed(logits, its, prompt + answer, 3).tolist() == [0.0, -0.75, -1.0, 0.0, 0.0]


def test_a_repetition_penalty_counts_the_prompt_and_the_answer_and_no_token_twice():
    logits = torch.tensor([1.0, -1.0, 1.0, 1.0])
    assert processed(logits, Processors(repetition_penalty=2.0), [0, 0, 1, 2], 3).tolist() == [0.5, -2.0, 0.5, 1.0]


def test_penalties_come_after_the_bias_and_the_repetition_penalty_before_the_others():
    logits = torch.tensor([1.0, 0.0])
    its = Processors(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=3.0, logit_bias=((0, -3.0),))
    assert processed(logits, its, [0], 0).tolist() == [(1.0 - 3.0) * 2.0 - 3.0 - 1.0, 0.0]


def random_paths(rng: np.random.Generator, rows: int = 12) -> list[list[int]]:
    """Of the rows of a random tree, deep enough for repeated tokens."""
    paths = [[]]
    while len(paths) < rows:
        paths.append([*paths[int(rng.integers(max(len(paths) - 4, 0), len(paths)))], int(rng.integers(0, 6))])
    return paths


def test_each_row_of_a_tree_equals_the_row_alone_with_its_own_path_as_text():
    rng = np.random.default_rng(1)
    for seed in range(150):
        prompt = int(rng.integers(1, 9))
        text, paths = random_text(rng, prompt + int(rng.integers(0, 30))), random_paths(rng)
        its = random_processors(rng, prompt)
        logits = random_logits(seed, len(paths))
        before = logits.clone()
        history = History(its, VOCABULARY, prompt)
        history.follow(text, 0)
        found = history.scores(logits, paths)
        assert torch.equal(logits, before)
        for row, path in enumerate(paths):
            assert torch.equal(found[row], processed(logits[row], its, [*text, *path], prompt))
            assert torch.equal(history.scores(logits[row : row + 1], [path])[0], found[row])


def test_a_text_that_grew_and_was_cut_has_the_counts_of_a_new_one():
    rng = np.random.default_rng(2)
    for seed in range(60):
        prompt = int(rng.integers(1, 9))
        its = random_processors(rng, prompt)
        text, history = random_text(rng, prompt), History(its, VOCABULARY, prompt)
        history.follow(text, 0)
        for _ in range(12):
            common = int(rng.integers(0, len(text) + 1)) if rng.random() < 0.5 else len(text)
            text = text[:common] + random_text(rng, int(rng.integers(0 if common else 1, 6)))
            history.follow(text, common)
        new = History(its, VOCABULARY, prompt)
        new.follow(text, 0)
        logits, paths = random_logits(seed, 12), random_paths(rng)
        assert torch.equal(history.scores(logits, paths), new.scores(logits, paths))


class CountedReads(list):
    """Counts the tokens that are read of it."""

    read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        raise AssertionError("the whole text is read")


@pytest.mark.parametrize("length", [100, 1000, 10_000])
def test_a_round_reads_the_tokens_that_it_added_and_no_others(length: int):
    its = Processors(repetition_penalty=1.2, bad_words=((1, 2),))
    history, text = History(its, VOCABULARY, length), CountedReads([7] * length)
    history.follow(text, 0)
    assert text.read == length
    for _ in range(10):
        known = len(text)
        text += [1, 2, 3]
        history.follow(text, known)
        history.scores(random_logits(0), [[1]])
    assert text.read == length + 30


@pytest.mark.parametrize(
    "field, values",
    [
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": math.nan}),
        ("presence_penalty", {"presence_penalty": math.inf}),
        ("frequency_penalty", {"frequency_penalty": math.nan}),
        (r"logit_bias\[3\]", {"logit_bias": ((3, math.nan),)}),
        ("bad_words", {"bad_words": ((1,), ())}),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field: str, values):
    with pytest.raises(ValueError, match=f"^{field}:"):
        Processors(**values)


def test_the_defaults_change_nothing():
    text, logits = [1, 2, 2, 2, 2, 7], random_logits(0)[0]
    for its in (Processors(), Processors(ending=END)):
        assert torch.equal(processed(logits, its, text, 3), logits)
    assert not any(torch.equal(processed(logits, its, text, 3), logits) for its in EACH.values())
