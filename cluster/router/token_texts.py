"""The text and the bytes of single tokens."""

from __future__ import annotations

from dendro.errors import BadRequest

from cluster.router.tokenizer import Tokenizer


class VocabularyTexts:
    """Text and bytes of a target's tokens, special ones too. Making it reads the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer.showing()
        try:
            self._bytes = tokenizer.token_bytes()
        except BadRequest:  # the tokenizer's ids do not stand for bytes
            self._bytes = {}

    def text(self, token: int) -> str:
        """The token's text; bytes that are no whole character are replacement characters."""
        found = self._bytes.get(token)
        return self._tokenizer.decode([token]) if found is None else found.decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token stands for: those of its text where the tokenizer gives no others."""
        found = self._bytes.get(token)
        return self._tokenizer.decode([token]).encode() if found is None else found
