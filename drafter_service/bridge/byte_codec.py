"""A tokenizer on bytes: the bytes of each token id, and token ids for any bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer
from tree_layers.token_bytes import control_tokens, token_bytes
from tree_layers.tokenizer_forms import BARE, continuing, literal, splits_words

PROBE = "a"
WORD = re.compile(r" ?\S+|\s")
"""A word with the space before it, or another space."""


class ByteCodec:
    """Encodes bytes to ids and back, without special tokens and without the space that some tokenizers put first.

    So any part of a text can be encoded: the ids stand for exactly the part's bytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        """vocabulary: only ids below it are used. Raises CheckpointError for a tokenizer without a table of bytes."""
        form = json.loads(tokenizer.to_str())
        self.vocabulary = vocabulary
        of_all = token_bytes(form, tokenizer.id_to_token)
        self.bytes_of = {token: found for token, found in of_all.items() if token < vocabulary and found}
        """Bytes by id; ids without bytes are missing."""
        self.control = {token: text for token, text in control_tokens(form).items() if token < vocabulary}
        self.head = _head(tokenizer)
        """Special tokens that the tokenizer puts before a text, such as BOS."""
        special = {each["content"] for each in form.get("added_tokens") or () if each.get("special")}
        plain = literal(form, special) | BARE
        self._plain = Tokenizer.from_str(json.dumps(continuing(plain)))
        by_words = splits_words(form)
        self._marked = Tokenizer.from_str(json.dumps(plain)) if by_words else None
        """Encodes a word with the space before it, for tokenizers that split off words and so lose a text's spaces."""
        first = tokenizer.encode(PROBE, add_special_tokens=False).ids
        self.prefixes = self.decode(first) == b" " + PROBE.encode()
        """True if the tokenizer puts a space before a text."""
        # The last of several ids with equal bytes: in SentencePiece's vocabularies byte tokens come first.
        self.id_of = {found: token for token, found in sorted(self.bytes_of.items())}

    def decode(self, ids: Iterable[int]) -> bytes:
        """Bytes of these ids together; control tokens have none."""
        return b"".join(self.bytes_of.get(token, b"") for token in ids)

    def encode(self, data: bytes) -> list[int]:
        """Encode bytes. Bytes that are not UTF-8 become tokens of single bytes, if the vocabulary has them."""
        return self.encode_all([data])[0]

    def encode_all(self, parts: Sequence[bytes]) -> list[list[int]]:
        """Encode each part separately."""
        if self._marked is not None:
            return [self._by_words(part, self._marked) for part in parts]
        pieces: list[tuple[int, bytes | str]] = []
        for number, part in enumerate(parts):
            pieces += [(number, piece) for piece in _pieces(part)]
        texts = [piece for _, piece in pieces if isinstance(piece, str)]
        encoded = iter(self._plain.encode_batch(texts, add_special_tokens=False)) if texts else iter(())
        found: list[list[int]] = [[] for _ in parts]
        for number, piece in pieces:
            if isinstance(piece, str):
                found[number] += [token for token in next(encoded).ids if token < self.vocabulary]
            else:
                found[number] += [self.id_of[bytes([byte])] for byte in piece if bytes([byte]) in self.id_of]
        return found

    def _by_words(self, data: bytes, marked: Tokenizer) -> list[int]:
        """Encode bytes word by word; bytes without tokens, such as line breaks, are dropped."""
        found: list[int] = []
        for piece in _pieces(data):
            for word in WORD.findall(piece) if isinstance(piece, str) else ():
                if word.isspace():
                    found += [self.id_of[word.encode()]] if word.encode() in self.id_of else []
                else:
                    encoder = marked if word.startswith(" ") else self._plain
                    found += encoder.encode(word.removeprefix(" "), add_special_tokens=False).ids
        return [token for token in found if token < self.vocabulary]


def _pieces(data: bytes) -> list[bytes | str]:
    """The data's runs of UTF-8 as strings, and what lies between them as bytes."""
    pieces: list[bytes | str] = []
    while data:
        try:
            pieces.append(data.decode())
            break
        except UnicodeDecodeError as error:
            if error.start:
                pieces.append(data[: error.start].decode())
            pieces.append(data[error.start : error.end])
            data = data[error.end :]
    return pieces


def _head(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that the tokenizer puts before a text."""
    whole = tokenizer.encode(PROBE).ids
    first = tokenizer.encode(PROBE, add_special_tokens=False).ids[0]
    return tuple(whole[: whole.index(first)])
