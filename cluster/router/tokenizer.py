"""A checkpoint's tokenizer, the token ids of prompts, and the text of an answer as it grows."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from dendro.errors import NO_FAULTS, BadRequest, EngineFailed
from dendro.text import Verdict
from tree_layers.token_bytes import (
    BYTE_TOKEN,
    added_texts,
    bytes_of_text,
    falls_back_to_bytes,
    form_of,
    unknown_token,
)
from tree_layers.tokenizer_forms import BARE, continuing, literal, splits_words

from cluster.checkpoint_tokenizer import (
    RESERVED,
    backend_of,
    decoder_of,
    load_tokenizer,
    special_ids,
    token_bytes_of,
)

PROBE = "a"
ANCHORS = ".", "a", "\n"
"""Texts put before a continuation to encode it; the first is used whose own tokens the continuation does not change."""

Encode = Callable[[str], list[int]]
"""Ids of a text without a template of special tokens around it."""

WINDOW_TOKENS = 16
CONTEXT_TOKENS = 8
START_TRIES = 4
"""Start positions tried for a shorter window: a character has at most four bytes, each at most one token."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
DEVELOPER = "developer"
"""A role that newer templates know, in place of `system`."""
MAX_HELD = 3
"""Trailing replacement characters that may be the bytes of one incomplete character; those before them are final."""


class Tokenizer(Protocol):
    """The part of a tokenizer that the router uses. `fingerprint` differs where the meaning of token ids may differ."""

    fingerprint: str
    rewrites: bool
    """True if the text of a token may change the characters before it."""

    def encode(self, text: str, begins: bool) -> list[int]:
        """Called for each prompt. Returns token ids: with the checkpoint's special tokens at the start if the text
        `begins`, and without a mark of a beginning, such as a space, if it continues one."""
        ...

    def encode_literally(self, text: str, begins: bool) -> list[int]:
        """Token ids of a text in which texts of special tokens are ordinary text. begins: see `encode`"""
        ...

    def knows(self, text: str) -> bool:
        """True if no part of a text becomes the unknown token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        ...

    def visible(self, ids: Sequence[int]) -> list[int]:
        """The ids without special tokens: those that `decode` turns into text."""
        ...

    def showing(self, shown: Collection[int] | None = None) -> Tokenizer:
        """A tokenizer with the same ids whose `decode` turns these special tokens into text, too. None: all of them"""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        opens_answer: bool,
        names: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a conversation by the chat template, its special tokens in it. Raises BadRequest where there is
        no template, or it refuses the messages. names: further variables of the template. tools: functions that
        it describes"""
        ...

    def encode_chat(self, conversation: str) -> list[int]:
        """The ids of a conversation's text, which has all special tokens in it, those at the start too."""
        ...

    def token_bytes(self) -> dict[int, bytes]:
        """The bytes of each id that stands for text. Raises BadRequest where ids do not stand for bytes."""
        ...


class CheckpointTokenizer:
    """The tokenizer of a Hugging Face checkpoint folder, through transformers and never with code from the folder."""

    def __init__(self, checkpoint: Path, fingerprint: str, template: Path | None = None) -> None:
        """fingerprint: hash of the token table (`Facts.tokenizer`), which fixes what ids mean. How the tokenizer splits
        new text may change during a session. template: the file of a chat template in place of the checkpoint's own"""
        self.fingerprint = fingerprint
        self._tokenizer = load_tokenizer(checkpoint, template)
        self._special = special_ids(self._tokenizer)
        self._hidden = self._special  # ids that give no text
        self._backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)  # None: a tokenizer in Python
        self._decoder = decoder_of(self._tokenizer)
        self._encoder = PromptEncoder(self._tokenizer, self._special)
        form = {} if self._backend is None else json.loads(self._backend.to_str())
        self._bytes = _byte_tokens(form, self._backend)
        self._spelt = _spelt_tokens(form, self._backend)
        self.rewrites = _rewrites(form.get("decoder"))
        self._unknown = unknown_token(form) if form else self._tokenizer.unk_token

    @property
    def size(self) -> int:
        """The greatest id plus one."""
        return int(1 + max(self._tokenizer.get_vocab().values()))

    @property
    def head(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer puts before a text."""
        return self._encoder.head

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` inside. Raises BadRequest where the tokenizer is written in Python."""
        return backend_of(self._tokenizer)

    def token_bytes(self) -> dict[int, bytes]:
        """The bytes of each id that stands for text. Raises BadRequest where ids do not stand for bytes."""
        return token_bytes_of(self._tokenizer)

    def encode(self, text: str, begins: bool) -> list[int]:
        return self._encoder.encode(text, begins)

    def encode_literally(self, text: str, begins: bool) -> list[int]:
        return self._encoder.encode_literally(text, begins)

    def knows(self, text: str) -> bool:
        if self._unknown is None:
            return True
        unknown = self._tokenizer.convert_tokens_to_ids(self._unknown)
        return self.encode(text, begins=False).count(unknown) <= text.count(self._unknown)

    def showing(self, shown: Collection[int] | None = None) -> CheckpointTokenizer:
        made = copy.copy(self)
        made._hidden = frozenset() if shown is None else self._hidden.difference(shown)
        return made

    @property
    def has_chat(self) -> bool:
        """True if the checkpoint has a chat template."""
        return bool(self._tokenizer.chat_template)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        opens_answer: bool,
        names: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The text of a conversation by the checkpoint's chat template, with the texts of special tokens. A template
        that does not know the role `developer` gets `system`. Raises BadRequest where there is no template, or it
        refuses the messages. opens_answer: True to add what an answer begins with   names: further variables of the
        template   tools: functions that the template describes"""
        if not self.has_chat:
            raise BadRequest("messages", "the target has no chat template; set its `chat_template`, or send a prompt")
        if taken := RESERVED & (names or {}).keys():
            raise BadRequest("chat_template_kwargs", f"cannot set {', '.join(sorted(taken))}")
        known = DEVELOPER in str(self._tokenizer.chat_template)
        given = [{**each, "role": "system"} if each["role"] == DEVELOPER and not known else each for each in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                given,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=opens_answer,
                **(names or {}),
            )
            str(text).encode()  # names may have what no text of UTF-8 has
        except Exception as error:  # templates raise errors of jinja, and any others for what they index
            raise BadRequest("messages", f"the chat template refuses them: {error}") from error
        return str(text)

    def encode_chat(self, conversation: str) -> list[int]:
        """The ids of a conversation's text, which has its special tokens in it, those at the start too."""
        return self.encode(conversation, begins=True)[len(self.head) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out. Raises EngineFailed where the library's decoder panics, as its
        `Strip` does on a token that is shorter than what it strips."""
        try:
            if self._spelt:
                return self._with_spelt(ids)
            return self._with_bytes(ids) if self._bytes else self._by_library(list(ids))
        except BaseException as error:
            if isinstance(error, (Exception, *NO_FAULTS)):
                raise
            raise EngineFailed(f"the tokenizer's decoder cannot decode the text: {error}") from error

    def _with_spelt(self, ids: Sequence[int]) -> str:
        """Text of token ids where some added tokens have texts of their own (`_spelt_tokens`)."""
        parts = groupby(self.visible(ids), self._spelt.__contains__)
        return "".join(
            "".join(map(self._spelt.__getitem__, run)) if spelt else self._by_library(list(run)) for spelt, run in parts
        )

    def _with_bytes(self, ids: Sequence[int]) -> str:
        """Text of token ids where the decoder falls back to bytes: a run of byte tokens is decoded as UTF-8, and only
        its invalid bytes become replacement characters. (The library's decoder replaces every byte of a run that is not
        valid UTF-8 as a whole, so that a later byte would change characters that were sent already.)"""
        tokens: list[str] = []
        for is_byte, run in groupby(self.visible(ids), self._bytes.__contains__):
            if is_byte:  # joined characters count as text, even if they spell the name of a byte token
                tokens += bytes(map(self._bytes.__getitem__, run)).decode(errors="replace")
            else:
                tokens += filter(None, map(self._backend.id_to_token, run))
        return str(self._backend.decoder.decode(tokens))

    def _by_library(self, ids: list[int]) -> str:
        hides = self._hidden is self._special
        if not hides:
            ids = self.visible(ids)
        if self._decoder is not None:  # the function that the library calls, in half to a third of its time
            return str(self._decoder.decode(ids, skip_special_tokens=hides))
        return str(self._tokenizer.decode(ids, skip_special_tokens=hides, clean_up_tokenization_spaces=False))

    def visible(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token not in self._hidden]


def _byte_tokens(form: Mapping[str, Any], backend: Any) -> dict[int, int]:
    """The byte that each byte token stands for, by id; empty where the decoder does not fall back to bytes."""
    if not falls_back_to_bytes(form.get("decoder")):
        return {}
    found = ((token, BYTE_TOKEN.fullmatch(word)) for word, token in backend.get_vocab().items())
    return {token: int(match[1], 16) for token, match in found if match}


def _spelt_tokens(form: Mapping[str, Any], backend: Any) -> dict[int, str]:
    """The texts, by id, of a byte-level tokenizer's added tokens whose characters the library's decoder takes for
    bytes, such as `é` for the byte 0xE9."""
    if form_of(form.get("decoder")) != "byte-level":
        return {}
    texts = added_texts(form, backend.id_to_token)
    return {token: text for token, text in texts.items() if bytes_of_text(text, "byte-level") != text.encode()}


def _rewrites(decoder: Mapping[str, Any] | None) -> bool:
    """True if a decoder replaces more than single characters in the text of several tokens."""
    parts: Sequence[Mapping[str, Any]] = (decoder or {}).get("decoders") or ()
    joined = next((at for at, part in enumerate(parts) if part["type"] in ("Fuse", "ByteLevel")), len(parts))
    replaced = [part["pattern"] for part in parts[joined:] if part["type"] == "Replace"]
    return any(len(pattern.get("String", "..")) > 1 for pattern in replaced)


# Prompts
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
        """Encode a continuation. Only the text before its first added token is encoded as one: after an added token
        many tokenizers mark a beginning again, also in the middle of a text."""
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
        """Encode a text after an anchor, and cut off the anchor's tokens. If the text changes the tokens of every
        anchor, it is encoded alone."""
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
    """Encode a continuation for a tokenizer that splits off and marks each word: only the first word continues."""

    def encode(text: str) -> list[int]:
        end = next((at for at, character in enumerate(text) if character.isspace()), len(text))
        return (first(text[:end]) if end else []) + others(text[end:])

    return encode


def _encoder(form: dict[str, Any]) -> Encode:
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(json.dumps(form | BARE))
    # `encode` holds the interpreter's lock, for about a second where a text has a mebibyte; `encode_batch` does not.
    return lambda text: list(made.encode_batch([text], add_special_tokens=False)[0].ids)


def _continued(form: dict[str, Any]) -> Encode | None:
    """Encoder of text that continues another; None where the tokenizer marks no beginning."""
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


# Texts of answers
class TextStream:
    """Decodes an answer incrementally; its parts together are the decoding of all tokens.

    What has been returned depends on the tokens alone and not on how they were cut into rounds, so a resumed answer
    continues at the right character. An incomplete character is held back.

    (`tokenizers.decoders.DecodeStream` raises an error for a byte run that is valid UTF-8 first and then not, cannot
    flush what it held back, and does not accept a tokenizer in Python.)
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """before: the text that the answer continues. It gives no text, but decoders change a text's first characters,
        and a character may begin in it: such a character is the answer's."""
        self._tokenizer = tokenizer
        self._window, whole = _end_of(tokenizer, before)  # the last tokens, special ones left out
        self._given = _stable(whole)  # number of the window's characters already returned
        self.length = 0  # tokens of the answer that were appended
        self._owned = len(whole) - self._given
        """Replacement characters that are still dropped: those of an incomplete character before the answer."""

    def copy(self) -> TextStream:
        """A copy that continues independently from here."""
        other = copy.copy(self)
        other._window = self._window.copy()
        return other

    @property
    def found(self) -> str:
        """The stop string that ended the answer: none is looked for."""
        return ""

    def append(self, ids: Sequence[int]) -> str:
        """Append tokens. Returns the text that they add, without an incomplete character at its end."""
        if self._tokenizer.rewrites and len(ids) > 1:
            return "".join(self.append([token]) for token in ids)
        self.length += len(ids)
        visible = self._tokenizer.visible(ids)
        if not visible:
            return ""
        self._window += visible
        whole = self._tokenizer.decode(self._window)
        stable = _stable(whole)
        text = self._own(whole[self._given : stable])
        self._given = max(self._given, stable)
        if len(self._window) > WINDOW_TOKENS:
            self._shorten(whole)
        return text

    def _own(self, text: str) -> str:
        """The text without the replacement characters of the text before the answer."""
        own = text.lstrip(INCOMPLETE)
        count = min(len(text) - len(own), self._owned)
        self._owned = self._owned - count if count == len(text) else 0
        return text[count:]

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

    def finish(self) -> str:
        """Return the text that was held back. Called after the last token."""
        whole = self._tokenizer.decode(self._window)
        text, self._given = self._own(whole[self._given :]), len(whole)
        return text

    def text_of(self, verdict: Verdict) -> str:
        """The text that a round's chunk adds. Called once a round, in order, after the next round's call was sent."""
        text = self.append(verdict.tokens)
        return text + self.finish() if verdict.finished else text


def _stable(text: str) -> int:
    """Number of a text's characters that later tokens cannot change."""
    return len(text) - min(len(text) - len(text.rstrip(INCOMPLETE)), MAX_HELD)


def _end_of(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], str]:
    """The last tokens of a text that decoding the following ones needs, and their text; all tokens if they give no
    text."""
    found: list[int] = []
    for stop in range(len(ids), 0, -WINDOW_TOKENS):
        found = tokenizer.visible(ids[max(stop - WINDOW_TOKENS, 0) : stop]) + found
        if len(found) >= CONTEXT_TOKENS and (text := tokenizer.decode(found[-CONTEXT_TOKENS:])):
            return found[-CONTEXT_TOKENS:], text
    return found, tokenizer.decode(found)
