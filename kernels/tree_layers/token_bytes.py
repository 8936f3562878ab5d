"""The bytes of each token id, from the JSON form of a tokenizer of the `tokenizers` library.

Two kinds of tokenizers are read. Byte-level: each character of a token's text stands for one byte (GPT-2's alphabet).
Metaspace, as SentencePiece's: `▁` stands for a space, and `<0xE2>` for one byte where the decoder falls back to bytes.
A table of bytes has no U+FFFD: a token may hold a part of a UTF-8 character. Imports only the standard library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal

from tree_layers.errors import CheckpointError

TokenForm = Literal["byte-level", "metaspace", ""]
NO_FORM = "its tokenizer is neither byte-level nor of SentencePiece's kind"

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The text of a token that stands for one byte."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in the texts of a metaspace tokenizer."""


def _byte_level_alphabet() -> dict[str, int]:
    """The byte of each character: printable bytes stand for themselves, the other 68 are characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


ALPHABET = _byte_level_alphabet()


def falls_back_to_bytes(decoder: Any) -> bool:
    """True if a decoder turns tokens such as `<0xE2>` into bytes."""
    return _mentions(decoder, "ByteFallback")


def form_of(decoder: Any) -> TokenForm:
    """Spelling of bytes by a tokenizer with this decoder; empty if its tokens do not stand for bytes, another character
    than `▁` stands for a space, the decoder replaces anything else, or it strips every token."""
    steps = list(_steps(decoder))
    kinds = [step.get("type") for step in steps]
    joined = next((at for at, kind in enumerate(kinds) if kind in ("Fuse", "ByteLevel")), len(kinds))
    spaces = [step.get("replacement", SPACE) for step in steps if step.get("type") == "Metaspace"]
    replaced = [(step.get("pattern"), step.get("content")) for step in steps if step.get("type") == "Replace"]
    strange = any(each != ({"String": SPACE}, " ") for each in replaced) or any(space != SPACE for space in spaces)
    if "Strip" in kinds[:joined] or strange:
        return ""
    if _mentions(decoder, "ByteLevel"):
        return "byte-level"
    return "metaspace" if falls_back_to_bytes(decoder) or _mentions(decoder, "Metaspace") else ""


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The decoder's parts in the order in which they are applied."""
    if isinstance(decoder, dict):
        if decoder.get("type") == "Sequence":
            yield from chain.from_iterable(map(_steps, decoder.get("decoders") or ()))
        else:
            yield decoder


def control_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Texts of the tokens that stand for no bytes, by id: special added tokens and the unknown token."""
    added = {each["id"]: each["content"] for each in tokenizer.get("added_tokens") or () if each.get("special")}
    unknown = unknown_token(tokenizer)
    return added | {token: text for token, text in _texts(tokenizer).items() if text == unknown}


def unknown_token(tokenizer: Mapping[str, Any]) -> str | None:
    """The text of the token that stands for characters without tokens; None where there is none."""
    model = tokenizer["model"]
    unknown = model.get("unk_id") if model.get("type") == "Unigram" else None
    text: str | None = model.get("unk_token") if unknown is None else _texts(tokenizer)[unknown]
    return text


def token_bytes(tokenizer: Mapping[str, Any], decoded: Callable[[int], str | None]) -> dict[int, bytes]:
    """The bytes of every token id but `control_tokens`.

    decoded: `id_to_token` of the library's tokenizer of this form: an added token that is `normalized` is decoded as
    the normalizer's text of its content, such as `▁plain` for `plain`
    Raises CheckpointError for a tokenizer of neither kind: its ids do not stand for the bytes of a text.
    """
    form = form_of(tokenizer.get("decoder"))
    if not form:
        raise CheckpointError(NO_FORM)
    bytewise = falls_back_to_bytes(tokenizer["decoder"])
    found = {token: bytes_of_text(text, form, bytewise) for token, text in _texts(tokenizer).items()}
    for token, text in added_texts(tokenizer, decoded).items():
        found[token] = bytes_of_added(text, form, bytewise)
    for token in control_tokens(tokenizer):
        found.pop(token, None)
    return found


def added_texts(tokenizer: Mapping[str, Any], decoded: Callable[[int], str | None]) -> dict[int, str]:
    """The texts of added tokens as they are decoded, by id. decoded: see `token_bytes`"""
    found = {each["id"]: each["content"] for each in tokenizer.get("added_tokens") or ()}
    return found | {token: text for token in found if (text := decoded(token)) is not None}


def _texts(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Texts of the model's vocabulary, by id."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram's pairs of text and score
        return {token: pair[0] for token, pair in enumerate(vocabulary)}
    return {token: text for text, token in vocabulary.items()}


def _mentions(component: Any, kind: str) -> bool:
    """True if a component of the tokenizer, or a part of it, is of this type."""
    return f'"type": "{kind}"' in json.dumps(component)


def bytes_of_added(text: str, form: TokenForm, bytewise: bool) -> bytes:
    """The bytes that an added token's text stands for: those of its characters, also where these are in the byte
    alphabet. A decoder of the form `metaspace` reads it as any other token."""
    return bytes_of_text(text, "metaspace" if form == "metaspace" else "", bytewise)


def bytes_of_text(text: str, form: TokenForm, bytewise: bool = True) -> bytes:
    """The bytes that a token's text stands for. bytewise: whether `<0xE2>` is a byte in the form `metaspace`"""
    if form == "byte-level" and all(character in ALPHABET for character in text):
        return bytes(map(ALPHABET.__getitem__, text))
    if form == "metaspace":
        if bytewise and (match := BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        text = text.replace(SPACE, " ")
    return text.encode(errors="surrogatepass")
