"""A checkpoint's tokenizer, and the text of an answer as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dendro.errors import BadRequest
from tree_layers.tokens import TOKENIZER, TOKENIZER_CONFIG

WINDOW_TOKENS = 64
CONTEXT_TOKENS = 8
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What we need of a tokenizer. `fingerprint` differs where the meaning of token ids may differ."""

    fingerprint: str

    def encode(self, text: str, begins: bool) -> list[int]:
        """Token ids; where a text begins, with the special tokens that the checkpoint wants there."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...


class CheckpointTokenizer:
    """The tokenizer of a Hugging Face checkpoint folder, through transformers and never with code from the folder."""

    def __init__(self, checkpoint: Path, fingerprint: str) -> None:
        """fingerprint: of its token table (`Facts.tokenizer`). That says what ids mean, which is all that a text of
        ids depends on; how the same tokenizer cuts new text may change under a session."""
        self.fingerprint = fingerprint
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if (checkpoint / TOKENIZER_CONFIG).exists() or not (checkpoint / TOKENIZER).exists():
                self._tokenizer = AutoTokenizer.from_pretrained(
                    checkpoint, local_files_only=True, trust_remote_code=False
                )
            else:
                self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / TOKENIZER))
        except Exception as error:  # the tokenizers library raises nothing narrower for a file that is none
            raise BadRequest("checkpoint", f"{checkpoint}: its tokenizer cannot be loaded: {error}") from error

    def encode(self, text: str, begins: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=begins))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """The text of an answer, handed out as its tokens come; all of it together is the decoding of all tokens.

    What has been handed out depends on the tokens alone and not on how they were cut into rounds, so a resumed answer
    goes on at the right character. A character whose bytes are not all there waits.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last tokens: decoding looks no further back
        self._given = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        """What these tokens add."""
        self._window += ids
        whole = self._tokenizer.decode(self._window)
        stable = whole.rstrip(INCOMPLETE)
        text = stable[self._given :]
        self._given = max(self._given, len(stable))
        if stable == whole and len(self._window) > WINDOW_TOKENS:
            # Some tokens stay: a decoder may treat the first token it sees in its own way.
            self._window = self._window[-CONTEXT_TOKENS:]
            self._given = len(self._tokenizer.decode(self._window))
        return text

    def flush(self) -> str:
        """What was held back, when no token comes any more."""
        whole = self._tokenizer.decode(self._window)
        text, self._given = whole[self._given :], len(whole)
        return text
