"""The token ids of a prompt: of one that begins a text, and of one that continues it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from typing import Any

from dendro.errors import BadRequest
from tree_layers.tokenizer_forms import BARE, continuing, literal, splits_words

PROBE = "a"
ANCHORS = ".", "a", "\n"
"""Texts before a continuation, of which the first is used whose tokens do not change by what follows."""

Encode = Callable[[str], list[int]]
"""Ids of a text without a template of special tokens around it."""


class PromptEncoder:
    """Encodes through transformers' tokenizer, and other forms of its backend.

    A tokenizer in Python has no other forms: a continuation is encoded after another text, and cut.
    """

    def __init__(self, tokenizer: Any, special: frozenset[int]) -> None:
        """special: ids of special tokens"""
        self._tokenizer = tokenizer
        self._special = special
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._form: dict[str, Any] | None = None if backend is None else json.loads(backend.to_str())
        self.head = _head(tokenizer, self._form)
        """The special tokens that the tokenizer puts before a text; those after it are left out."""
        self._parts = frozenset(_unnormalized(self._form)) if self._form is not None else frozenset()
        self._continued = self._anchored(self._whole) if self._form is None else _continued(self._form)

    def encode(self, text: str, begins: bool) -> list[int]:
        """Encode a text: with special tokens at the start if it `begins`; else without them, and without a mark of a
        beginning: `son` is one token after `per`."""
        if begins:
            return [*self.head, *self._whole(text)]
        return self._whole(text) if self._continued is None else self._joined(text, self._whole, self._continued)

    def encode_literally(self, text: str, begins: bool) -> list[int]:
        """Encode a text in which texts of special tokens are ordinary text."""
        whole, continued = self._literal
        if begins:
            return [*self.head, *whole(text)]
        return self._joined(text, whole, continued)

    def _whole(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _joined(self, text: str, whole: Encode, continued: Encode) -> list[int]:
        """Text after an added token is encoded as after one in the middle of a text, where many tokenizers mark a
        beginning again; only what is before the first of them continues."""
        first, all_ids = continued(text), whole(text)
        places = [next((at for at, token in enumerate(ids) if token in self._parts), -1) for ids in (first, all_ids)]
        return first if -1 in places else first[: places[0]] + all_ids[places[1] :]

    @cached_property
    def _literal(self) -> tuple[Encode, Encode]:
        """Two literal encoders: for text that begins, and for text that continues another."""
        if self._form is None:
            return self._split_in_python, self._anchored(self._split_in_python)
        added = {each["id"]: each["content"] for each in self._form.get("added_tokens") or ()}
        texts = self._tokenizer.convert_ids_to_tokens(sorted(self._special))
        form = literal(self._form, {*texts, *(added[token] for token in self._special & added.keys())})
        whole = _encoder(form)
        return whole, _continued(form) or whole

    def _anchored(self, whole: Encode) -> Encode:
        """What follows another text; the text itself where its tokens run on into every anchor's."""
        anchors = [(anchor, whole(anchor)) for anchor in ANCHORS]

        def encode(text: str) -> list[int]:
            for anchor, before in anchors:
                ids = whole(anchor + text)
                if before and ids[: len(before)] == before:
                    return ids[len(before) :]
            return whole(text)

        return encode

    def _split_in_python(self, text: str) -> list[int]:
        ids = list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        if not self._special.isdisjoint(ids):
            raise BadRequest("literal_prompt", "is not possible: the tokenizer reads special tokens in the prompt")
        return ids


def _first_word_alone(first: Encode, others: Encode) -> Encode:
    """Where each word is split off and marked, only the first can continue a text."""

    def encode(text: str) -> list[int]:
        end = next((at for at, character in enumerate(text) if character.isspace()), len(text))
        return (first(text[:end]) if end else []) + others(text[end:])

    return encode


def _encoder(form: dict[str, Any]) -> Encode:
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(json.dumps(form | BARE))
    return lambda text: list(made.encode(text, add_special_tokens=False).ids)


def _continued(form: dict[str, Any]) -> Encode | None:
    """None where the tokenizer marks no beginning."""
    other = continuing(form)
    if other == form:
        return None
    if splits_words(form):
        return _first_word_alone(_encoder(other), _encoder(form))
    return _encoder(other)


def _head(tokenizer: Any, form: dict[str, Any] | None) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before a text."""
    texts = [PROBE] if form is None else [PROBE, *_some_texts(form)]
    for text in texts:
        plain, whole = (list(tokenizer.encode(text, add_special_tokens=special)) for special in (False, True))
        for start in range(len(whole) - len(plain) + 1):
            if plain and whole[start : start + len(plain)] == plain:
                return tuple(whole[:start])
    return ()


def _some_texts(form: dict[str, Any]) -> list[str]:
    """Texts of tokens, for a vocabulary that lacks the probe."""
    vocabulary = form["model"]["vocab"]
    return [each if isinstance(each, str) else each[0] for each in list(vocabulary)[:64]]


def _unnormalized(form: dict[str, Any]) -> set[int]:
    """Added tokens that are found before the text is normalised, so that they divide it; no text without them has
    their ids."""
    model = form["model"]
    unknown = model.get("unk_token")
    if model.get("unk_id") is not None:  # Unigram's
        unknown = model["vocab"][model["unk_id"]][0]
    return {
        each["id"]
        for each in form.get("added_tokens") or ()
        if not each.get("normalized") and each["content"] != unknown
    }
