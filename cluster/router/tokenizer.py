"""A checkpoint's tokenizer, and the text of an answer as it grows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from dendro.errors import BadRequest
from tree_layers.token_bytes import BYTE_TOKEN, falls_back_to_bytes

from cluster.checkpoint_tokenizer import backend_of, decoder_of, load_tokenizer, token_bytes_of

WINDOW_TOKENS = 64
CONTEXT_TOKENS = 8
START_TRIES = 4
"""Start positions tried for a shorter window: a character has at most four bytes, each at most one token."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MAX_HELD = 3
"""Trailing replacement characters that may be the bytes of one incomplete character; those before them are final."""


class Tokenizer(Protocol):
    """The part of a tokenizer that the router uses. `fingerprint` differs where the meaning of token ids may differ."""

    fingerprint: str

    def encode(self, text: str, begins: bool) -> list[int]:
        """Token ids; with the checkpoint's special tokens where a text `begins`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...

    def visible(self, ids: Sequence[int]) -> list[int]:
        """The ids without special tokens: those that `decode` turns into text."""
        ...


class CheckpointTokenizer:
    """The tokenizer of a Hugging Face checkpoint folder, through transformers and never with code from the folder."""

    def __init__(self, checkpoint: Path, fingerprint: str) -> None:
        """fingerprint: of its token table (`Facts.tokenizer`), which fixes what ids mean. How the tokenizer splits new
        text may change during a session."""
        self.fingerprint = fingerprint
        self._tokenizer = load_tokenizer(checkpoint)
        added = self._tokenizer.added_tokens_decoder
        self._special = {token for token, what in added.items() if what.special} | set(self._tokenizer.all_special_ids)
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)  # None: a tokenizer in Python
        self._decoder = decoder_of(self._tokenizer)
        self._bytes = _byte_tokens(self._backend)

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` inside. Raises BadRequest where the tokenizer is written in Python."""
        return backend_of(self._tokenizer)

    def token_bytes(self) -> dict[int, bytes]:
        """The bytes of each id that stands for text. Raises BadRequest where ids do not stand for bytes."""
        return token_bytes_of(self._tokenizer)

    def encode(self, text: str, begins: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=begins))

    def chat(self, messages: Sequence[Mapping[str, Any]], opens_answer: bool) -> str:
        """The text of a conversation by the checkpoint's chat template; `opens_answer` adds what an answer begins with.
        Its special tokens are in it. Raises BadRequest where there is no template, or it refuses the messages."""
        if not self._tokenizer.chat_template:
            raise BadRequest("checkpoint", "its tokenizer has no chat template")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=opens_answer
            )
        except Exception as error:  # templates raise errors of jinja, and any others for what they index
            raise BadRequest("messages", f"the chat template refuses them: {error}") from error
        return str(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out.

        Where the decoder falls back to bytes, a run of byte tokens is decoded as UTF-8, and only its invalid bytes
        become replacement characters. (The library's decoder replaces every byte of a run that is not valid UTF-8 as a
        whole, so that a later byte would change characters that were sent already.)
        """
        if not self._bytes:
            if self._decoder is not None:  # what the library calls, in half to a third of its time
                return str(self._decoder.decode(list(ids), skip_special_tokens=True))
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        tokens: list[str] = []
        for is_byte, run in groupby(self.visible(ids), self._bytes.__contains__):
            if is_byte:  # one token per character: text that spells a byte token is not one
                tokens += bytes(map(self._bytes.__getitem__, run)).decode(errors="replace")
            else:
                tokens += filter(None, map(self._backend.id_to_token, run))
        return str(self._backend.decoder.decode(tokens))

    def visible(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token not in self._special]


def _byte_tokens(backend: Any) -> dict[int, int]:
    """The byte that each byte token stands for, by id; empty where the decoder does not fall back to bytes."""
    if backend is None or not falls_back_to_bytes(json.loads(backend.to_str())["decoder"]):
        return {}
    found = ((token, BYTE_TOKEN.fullmatch(word)) for word, token in backend.get_vocab().items())
    return {token: int(match[1], 16) for token, match in found if match}


class TextStream:
    """Decodes an answer incrementally; its parts together are the decoding of all tokens.

    What has been returned depends on the tokens alone and not on how they were cut into rounds, so a resumed answer
    continues at the right character. An incomplete character is held back.

    (`tokenizers.decoders.DecodeStream` raises an error for a byte run that is valid UTF-8 first and then not, cannot
    flush what it held back, and does not accept a tokenizer in Python.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last tokens, special ones left out: decoding needs none before
        self._given = 0  # characters of the window's text that were returned

    def copy(self) -> TextStream:
        """A stream that continues from the same tokens, by itself."""
        other = TextStream(self._tokenizer)
        other._window, other._given = self._window.copy(), self._given
        return other

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens add."""
        self._window += self._tokenizer.visible(ids)
        whole = self._tokenizer.decode(self._window)
        stable = len(whole) - min(len(whole) - len(whole.rstrip(INCOMPLETE)), MAX_HELD)
        text = whole[self._given : stable]
        self._given = max(self._given, stable)
        if len(self._window) > WINDOW_TOKENS:
            self._shorten(whole)
        return text

    def _shorten(self, whole: str) -> None:
        """Start the window at a later token, from which on it decodes to a suffix of `whole` that is not empty. This
        excludes starts inside a character, and at a token that decodes differently, or to nothing, as the first."""
        last = len(self._window) - CONTEXT_TOKENS
        for start in range(last, last - START_TRIES, -1):
            rest = self._tokenizer.decode(self._window[start:])
            dropped = len(whole) - len(rest)
            if rest and whole.endswith(rest) and self._given >= dropped:
                self._window, self._given = self._window[start:], self._given - dropped
                return

    def flush(self) -> str:
        """The text that was held back; for use after the last token."""
        whole = self._tokenizer.decode(self._window)
        text, self._given = whole[self._given :], len(whole)
        return text
