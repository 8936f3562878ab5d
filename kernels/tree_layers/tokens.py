"""Reads the text of each token id from a tokenizer's files.

Imports only the standard library. The first of these files that exists is read:

  tokenizer.json              model.vocab (a map, or Unigram's list of pairs), overlaid with added_tokens
  tokenizer.model             the pieces of a SentencePiece model
  vocab.json with merges.txt  a map

As in transformers, added_tokens.json and the added_tokens_decoder of tokenizer_config.json then add or replace tokens
for the last two. Tokens that tokenizer.json lacks are added from them too, and from the special tokens that
tokenizer_config.json and special_tokens_map.json name: as in transformers, each gets the next id, not the id in a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tree_layers.errors import CheckpointError
from tree_layers.headers import refuse_pointer
from tree_layers.token_bytes import TokenForm, form_of

TOKENIZER, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
VOCAB, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"
TOKENIZER_CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
TOKENIZER_FILES = (TOKENIZER, SENTENCEPIECE, VOCAB, MERGES, ADDED, TOKENIZER_CONFIG, SPECIAL)
"""All files that this module reads."""

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens with names, in the order in which transformers adds them."""

MAX_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The text of every token id. Tokenizers whose files differ only in formatting have equal tables."""

    texts: Mapping[int, str]  # key: id; added tokens included
    added: frozenset[int]  # ids of control tokens, and of tokens added after the tokenizer's training
    form: TokenForm = field(default="", compare=False)  # how the texts spell bytes; empty where they do not
    size: int = field(init=False)  # the greatest id plus one

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", 1 + max(self.texts, default=-1))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the whole table."""
        digest = hashlib.sha256()
        for token in sorted(self.texts):
            text = self.texts[token].encode(errors="surrogatepass")
            digest.update(f"{token} {len(text)} ".encode() + text)
        return digest.hexdigest()

    def id_of(self, text: str) -> int | None:
        """The id of the token with this text; None if there is none."""
        return next((token for token, found in self.texts.items() if found == text), None)


def read_tokens(folder: Path) -> TokenTable | None:
    """The table of a folder's tokenizer; None if it has none of the files. Raises CheckpointError for files that cannot
    be read."""
    if (folder / TOKENIZER).is_file():
        return _from_tokenizer_json(folder)
    form: TokenForm = "byte-level"
    if (folder / SENTENCEPIECE).is_file():
        (texts, added), form = _from_sentencepiece(folder), "metaspace"
    elif (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        texts, added = _by_id(folder, VOCAB, read_object(folder, VOCAB)), set()
    else:
        return None
    for found in _more_tokens(folder):
        texts |= found
        added |= found.keys()
    return _checked(folder, texts, added, form)


def _from_tokenizer_json(folder: Path) -> TokenTable:
    parsed = read_object(folder, TOKENIZER)
    model = parsed.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram's pairs of text and score
        texts = {token: _text(folder, TOKENIZER, pair) for token, pair in enumerate(vocabulary)}
    else:
        texts = _by_id(folder, TOKENIZER, vocabulary)
    try:
        added = _checked_ids(
            folder, TOKENIZER, [(each["content"], each["id"]) for each in parsed.get("added_tokens") or ()]
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {TOKENIZER} is unreadable: added_tokens: {error!r}") from error
    texts |= added
    size = len(vocabulary or ())
    given = {text: token for token, text in texts.items()}
    try:
        declared = _declared_texts(folder, parsed, added)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder}: the special tokens beside {TOKENIZER} are unreadable: {error!r}") from error
    for text in filter(None, declared):
        if text not in given:  # the id that the tokenizers library gives an added token
            given[text] = max(size, 1 + max(added, default=-1))
            texts[given[text]] = text
        added[given[text]] = text
    return _checked(folder, texts, set(added), form_of(parsed.get("decoder")))


def _declared_texts(folder: Path, parsed: Mapping[str, Any], added: Mapping[int, str]) -> list[str]:
    """Texts of the tokens that transformers adds where tokenizer.json lacks them, in its order.

    added: tokenizer.json's own added tokens
    """
    settings = read_object(folder, TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    others = {key: each for key, each in settings.items() if key.endswith("_token") and key not in NAMED}
    marked = {key: each for key, each in others.items() if isinstance(each, dict)}
    plain = {key: each for key, each in others.items() if isinstance(each, str)}
    plain |= extra if isinstance(extra, dict) else {}
    if "added_tokens_decoder" in settings:
        declared = _decoder_tokens(folder, settings)
    else:  # older files, which transformers reads in this case alone
        declared = _by_id(folder, ADDED, read_object(folder, ADDED)) if (folder / ADDED).is_file() else {}
        declared |= added
        older = read_object(folder, SPECIAL) if (folder / SPECIAL).is_file() else {}
        settings |= older
        extra = [*extra, *(older.get("extra_special_tokens") or ())] if isinstance(extra, list) else []
        extra = extra or older.get("additional_special_tokens") or []
        marked |= {key: each for key, each in older.items() if key.endswith("_token") and key not in NAMED}
    padding = (parsed.get("padding") or {}).get("pad_token")
    named = {key: settings.get(key, padding if key == "pad_token" else None) for key in NAMED} | marked | plain
    special = [*named.values(), *(extra if isinstance(extra, list) else ())]
    texts = [each.get("content") if isinstance(each, dict) else each for each in special]
    return [*(declared[token] for token in sorted(declared)), *(text for text in texts if isinstance(text, str))]


def _from_sentencepiece(folder: Path) -> tuple[dict[int, str], set[int]]:
    """Pieces of a ModelProto: its repeated field 1. In a piece, field 1 is the text and field 3 the type."""
    normal_kinds = {1, 5, 6}  # NORMAL, UNUSED, BYTE; not UNKNOWN, CONTROL, USER_DEFINED
    texts: dict[int, str] = {}
    added: set[int] = set()
    try:
        content = (folder / SENTENCEPIECE).read_bytes()
        refuse_pointer(folder / SENTENCEPIECE, content)
        for number, piece in _fields(content):
            if number != 1 or not isinstance(piece, bytes):
                continue
            parts = dict(_fields(piece))
            token, text = len(texts), parts.get(1, b"")
            if not isinstance(text, bytes):
                raise ValueError("a piece has no text")
            texts[token] = text.decode()
            if parts.get(3, 1) not in normal_kinds:
                added.add(token)
    except CheckpointError:
        raise
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{folder}: {SENTENCEPIECE} is unreadable: {error!r}") from error
    return texts, added


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of a protobuf message. Raises ValueError or IndexError."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: 0, 5: 4}.get(kind)
        if size is None:
            raise ValueError(f"a field of wire type {kind}")
        size = varint() if kind == 2 else size
        if at + size > len(message):
            raise ValueError("a field is cut off")
        yield key >> 3, message[at : at + size]
        at += size


def _more_tokens(folder: Path) -> Iterator[dict[int, str]]:
    """The tokens that added_tokens.json and tokenizer_config.json add or replace."""
    if (folder / ADDED).is_file():
        yield _by_id(folder, ADDED, read_object(folder, ADDED))
    if (folder / TOKENIZER_CONFIG).is_file():
        yield _decoder_tokens(folder, read_object(folder, TOKENIZER_CONFIG))


def _decoder_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[int, str]:
    """The tokens of the added_tokens_decoder in tokenizer_config.json."""
    decoder = settings.get("added_tokens_decoder") or {}
    try:
        found = [(entry["content"], int(token)) for token, entry in decoder.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: {TOKENIZER_CONFIG}: added_tokens_decoder: {error!r}") from error
    return _checked_ids(folder, TOKENIZER_CONFIG, found)


def _by_id(folder: Path, name: str, vocabulary: Any) -> dict[int, str]:
    """Texts by id, from a map from text to id."""
    if not isinstance(vocabulary, dict):
        raise CheckpointError(f"{folder}: {name} is unreadable: it has no map of tokens")
    return _checked_ids(folder, name, vocabulary.items())


def _checked_ids(folder: Path, name: str, tokens: Iterable[tuple[Any, Any]]) -> dict[int, str]:
    """Texts by id, from pairs of text and id."""
    found = {}
    for text, token in tokens:
        if not isinstance(text, str) or type(token) is not int or not 0 <= token <= MAX_ID:
            raise CheckpointError(f"{folder}: {name} is unreadable: token {text!r:.100} has the id {token!r:.100}")
        found[token] = text
    return found


def _text(folder: Path, name: str, pair: Any) -> str:
    if not isinstance(pair, list) or not pair or not isinstance(pair[0], str):
        raise CheckpointError(f"{folder}: {name} is unreadable: a token is {pair!r:.100}")
    return pair[0]


def _checked(folder: Path, texts: dict[int, str], added: set[int], form: TokenForm) -> TokenTable:
    if not texts:
        raise CheckpointError(f"{folder}: its tokenizer is unreadable: it has no tokens")
    return TokenTable(texts, frozenset(added), form)


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder. Raises CheckpointError."""
    try:
        content = (folder / name).read_bytes()
        refuse_pointer(folder / name, content)
        value = json.loads(content.decode())
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {name} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: {name} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder}: {name} holds no object")
    return value
