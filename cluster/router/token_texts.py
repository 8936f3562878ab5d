"""The text and the bytes of single tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from dendro.errors import BadRequest

from cluster.router.tokenizer import ANCHORS, Tokenizer

MOST_LOOKED_AT = 256
"""Most characters, or tokens, of a prompt in which text is looked for."""


class VocabularyTexts:
    """Text and bytes of a target's tokens, special ones too. Making it reads the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._hiding, self._tokenizer = tokenizer, tokenizer.showing()
        try:
            self._bytes = tokenizer.token_bytes()
        except BadRequest:  # the tokenizer's ids do not stand for bytes
            self._bytes = {}
        ids = [] if self._bytes else [tokenizer.visible(tokenizer.encode(text, begins=False)) for text in ANCHORS]
        self._before: Sequence[int] = next(filter(tokenizer.decode, ids), ())

    def text(self, token: int) -> str:
        """The token's text; bytes that are no whole character are replacement characters."""
        found = self._bytes.get(token)
        return self._added(token) if found is None else found.decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token stands for; those of its text if the tokenizer's ids do not stand for bytes."""
        found = self._bytes.get(token)
        return self._added(token).encode() if found is None else found

    def _added(self, token: int) -> str:
        """The text that a token adds to a text: tokens that do not stand for bytes may have another after others, as
        WordPiece's `##s`, or `snake` with a space before it."""
        alone, whole = (self._tokenizer.decode([*self._before, *ids]) for ids in ((), (token,)))
        return whole.removeprefix(alone) if whole.startswith(alone) else self._tokenizer.decode([token])

    def special(self, token: int) -> bool:
        """True if texts have the token only where they show special tokens."""
        return not self._hiding.visible([token])

    def give_text(self, prompt: str | Sequence[int], shows_special: bool) -> bool:
        """Whether a prompt's tokens give text, where special ones do if `shows_special`. True for any prompt of more
        than MOST_LOOKED_AT characters or tokens: one without text is a few special tokens."""
        tokenizer = self._tokenizer if shows_special else self._hiding
        if len(prompt) > MOST_LOOKED_AT:
            return True
        ids = tokenizer.encode(prompt, begins=True) if isinstance(prompt, str) else prompt
        return bool(tokenizer.decode(list(ids)))

    def left_out(self, token: int) -> int:
        """Number of leading characters that the token's text loses at the beginning of a text: a space, in some
        tokenizers."""
        begun, text = self._tokenizer.decode([token]), self.text(token)
        return len(text) - len(begun) if text.endswith(begun) else 0


class TokenOffsets:
    """Counts the characters of a text before each of its tokens. The counts depend on the tokens alone, not on how they
    come in parts. A token that continues a character begins where the character does."""

    def __init__(self, texts: VocabularyTexts, shows_special: bool, begins: bool) -> None:
        """shows_special: whether the text has special tokens   begins: False if it continues another"""
        self._texts = texts
        self._shows_special = shows_special
        self._begins = begins  # False after the first token that gives text
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        return [self._next(token) for token in tokens]

    def _next(self, token: int) -> int:
        before = self._characters
        if self._shows_special or not self._texts.special(token):
            self._characters += len(self._decoder.decode(self._texts.bytes_of(token)))
            if self._begins:
                self._characters -= self._texts.left_out(token)
                self._begins = False
        return before
