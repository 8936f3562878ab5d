"""A drafter fits by the texts of its ids, not by sizes or bytes of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tree_layers.checkpoint import Facts
from tree_layers.draft_vocabulary import DraftVocabularySizes
from tree_layers.tokens import TokenTable

from cluster.pairing import Difference, fit_of


def facts(
    texts: dict[int, str] | None, added: set[int] | None = None, rows: int = 0, unpadded: int | None = None
) -> Facts:
    table = None if texts is None else TokenTable(texts, frozenset(added or ()))
    fields: dict[str, Any] = {"layout": "transformers", "config": {}, "positions": None, "named_end_ids": frozenset()}
    return Facts(folder=Path("x"), rows=rows or len(texts or ()), tokens=table, unpadded=unpadded, digest="", **fields)


def words(count: int, **changed: str) -> dict[int, str]:
    """Ids from 0; `changed` names some of them as _7="seven"."""
    return {token: f"w{token}" for token in range(count)} | {int(name[1:]): text for name, text in changed.items()}


def renamed(count: int, different: int) -> dict[int, str]:
    return {token: f"other{token}" if token < different else f"w{token}" for token in range(count)}


@pytest.mark.parametrize("target, drafter", [(50304, 50280), (50432, 50280), (50688, 50288), (152064, 151936)])
def test_padding_is_not_a_difference(target: int, drafter: int):
    fit = fit_of(facts(words(300), rows=target), facts(words(300), rows=drafter))
    assert fit.fits and not fit.warning and not fit.note and (fit.shared, fit.different) == (300, 0)


@pytest.mark.parametrize(
    "count, different, fits",
    [(100, 1, True), (200, 2, True), (199, 2, False), (200, 3, False), (99, 1, False), (1000, 10, True)],
)
def test_a_drafter_is_refused_above_1_percent_of_different_ids_and_warned_about_below(
    count: int, different: int, fits: bool
):
    fit = fit_of(facts(words(count)), facts(renamed(count, different)))
    assert fit.fits == fits and bool(fit.warning) == fits
    assert (fit.shared, fit.different) == (count, different)


def test_a_refusal_names_the_count_and_the_first_three_with_both_texts():
    fit = fit_of(facts(words(50)), facts(renamed(50, 5)))
    assert fit.first == tuple(Difference(token, f"w{token}", f"other{token}") for token in range(3))
    assert "5 of 50 ordinary tokens" in fit.refusal
    assert "0 is 'w0' to the target and 'other0' to the drafter" in fit.refusal and "3 is" not in fit.refusal


def test_added_tokens_of_either_side_are_not_compared_and_are_noted():
    """Llama 3 to 3.1 renamed two added tokens; OLMo 2 and phi-4 differ in about ninety."""
    target = facts(words(100, _98="<|a|>"), added={98})
    drafter = facts(words(100, _98="<|b|>", _99="<|c|>"), added={98, 99})
    fit = fit_of(target, drafter)
    assert fit.fits and not fit.warning and fit.shared == 98
    assert fit.note == "2 added tokens differ"


def test_a_longer_tail_of_ids_is_noted_and_not_a_difference():
    fit = fit_of(facts(words(120)), facts(words(100)))
    assert fit.fits and not fit.warning and fit.note == "the target alone has 20 ids"


def test_tokenizers_without_a_common_id_do_not_fit():
    fit = fit_of(facts(words(10), added=set(range(10))), facts(words(10)))
    assert not fit.fits and "no ordinary token id in common" in fit.refusal


def test_without_a_tokenizer_an_equal_number_of_tokens_fits():
    target = facts(words(277), rows=304)
    fit = fit_of(target, facts(None, rows=280, unpadded=277))
    assert fit.fits and "taken to be the target's" in fit.note


@pytest.mark.parametrize("unpadded", [276, 278, 280])
def test_without_a_tokenizer_another_number_of_tokens_is_refused_with_a_request_for_one(unpadded: int):
    fit = fit_of(facts(words(277), rows=304), facts(None, rows=280, unpadded=unpadded))
    assert (
        not fit.fits and f"{unpadded} tokens where the target has 277" in fit.refusal and "`tokenizer`" in fit.refusal
    )


def test_a_draft_vocabulary_is_noted_and_is_no_difference():
    drafter = replace(facts(words(100)), draft=DraftVocabularySizes(30, 70, 8, 16))
    fit = fit_of(facts(words(101)), drafter)
    assert fit.fits and fit.note == "guesses 30 of 100 tokens, the target alone has 1 ids" and not fit.warning
