"""A checkpoint's tokenizer, and the text of an answer as it grows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dendro.errors import BadRequest

WINDOW_TOKENS = 64
CONTEXT_TOKENS = 8
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What we need of a tokenizer. `fingerprint` differs where the meaning of token ids may differ."""

    fingerprint: str
    size: int  # token ids that it may give: all are below

    def encode(self, text: str, begins: bool) -> list[int]:
        """Token ids; where a text begins, with the special tokens that the checkpoint wants there."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...


class CheckpointTokenizer:
    """The tokenizer of a Hugging Face checkpoint folder, through transformers and never with code from the folder."""

    def __init__(self, checkpoint: Path) -> None:
        files = sorted(checkpoint.glob("tokenizer*")) + sorted(checkpoint.glob("special_tokens_map.json"))
        if not files:
            raise BadRequest("checkpoint", f"{checkpoint} has no tokenizer.json")
        digest = hashlib.sha256()
        for file in files:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        self.fingerprint = digest.hexdigest()
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if (checkpoint / "tokenizer_config.json").exists():
                self._tokenizer = AutoTokenizer.from_pretrained(
                    checkpoint, local_files_only=True, trust_remote_code=False
                )
            else:
                self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
        except Exception as error:  # the tokenizers library raises nothing narrower for a file that is none
            raise BadRequest("checkpoint", f"{checkpoint}: its tokenizer cannot be loaded: {error}") from error
        self.size = len(self._tokenizer)

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
