"""Makes other forms of a tokenizer of the `tokenizers` library, from its JSON form, with the same ids: one for text
that continues another text, and one that reads no special token in a text. Imports only the standard library."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from typing import Any

MARKING = "Prepend", "Strip"
"""Types of normalisers that add or remove characters at a text's ends."""
BARE: dict[str, Any] = {"post_processor": None, "truncation": None, "padding": None}
"""Entries of a tokenizer's form without a template of special tokens around a text."""


def continuing(form: dict[str, Any]) -> dict[str, Any]:
    """The form that changes nothing at a text's ends: it marks no beginning, by a space or otherwise."""
    return form | {part: _unmarked(form.get(part)) for part in ("normalizer", "pre_tokenizer")}


def splits_words(form: dict[str, Any]) -> bool:
    """True if the spaces of a text only divide its words, as T5's tokenizer does, which marks each word again."""
    return "WhitespaceSplit" in json.dumps(form["pre_tokenizer"])


def _unmarked(component: Any) -> Any:
    """A normaliser or pre-tokeniser that changes nothing at a text's ends; None where nothing of it is left."""
    if component is None or component["type"] in MARKING:
        return None
    if component["type"] == "Sequence":
        key = "normalizers" if "normalizers" in component else "pretokenizers"
        parts = [part for part in map(_unmarked, component[key]) if part is not None]
        return component | {key: parts} if parts else None
    if component["type"] == "Metaspace":
        kept = {key: value for key, value in component.items() if key != "add_prefix_space"}
        return kept | {"prepend_scheme": "never"}
    return component | {"add_prefix_space": False} if component["type"] == "ByteLevel" else component


def literal(form: dict[str, Any], special: Collection[str]) -> dict[str, Any]:
    """The form that reads none of the tokens with the texts `special`, wherever they stand in a text.

    These tokens keep their ids, since the ids of added tokens depend on the number of added tokens before them, but get
    texts that nobody can guess. A token of a single character that the vocabulary has, such as a padding token `!`, is
    read as ordinary text.
    """
    hidden = {text: f"<{secrets.token_hex(16)}>" for text in special}
    unread = {text: other for text, other in hidden.items() if len(text) > 1}
    model, vocabulary = dict(form["model"]), form["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram's pairs of text and score
        texts = {text for text, _ in vocabulary}
        model["vocab"] = [[unread.get(text, text), score] for text, score in vocabulary]
    else:
        texts = set(vocabulary)
        model["vocab"] = {unread.get(text, text): token for text, token in vocabulary.items()}
    if model.get("unk_token") in unread:
        model["unk_token"] = unread[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if unread.keys().isdisjoint([*pair, "".join(pair)])]
    added = [
        each | {"content": hidden.get(each["content"], each["content"])}
        for each in form.get("added_tokens") or ()
        if each["content"] not in special or each["content"] not in texts
    ]
    return form | {"model": model, "added_tokens": added}
