"""The committed text of a request, its chained digests, and the verdicts that extend it."""

from __future__ import annotations

import copy
import hashlib
import sys
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, Self

from google.protobuf.message import Message

from dendro.errors import BadRequest
from dendro.internal.v1 import calls_pb2
from dendro.logprobs import TokenLogprobs
from dendro.modes import DRAWING_MODES, LISTED_MODES, VerificationMode, draft_seed
from dendro.options import (
    MAX_BAD_WORD_TOKENS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    OPTIONS,
    SAMPLING_NUMBERS,
    SamplingNumbers,
    check_count,
)
from dendro.structure import Structure
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2


class Finish(StrEnum):
    """Reason why an answer ended."""

    END_OF_TEXT = "end_of_text"
    LENGTH = "length"
    STOP_STRING = "stop_string"  # found by the router; a verifier sees no text and never reports it
    STOP_TOKEN = "stop_token"
    STRUCTURE = "structure"  # the answer is what its structure describes, and nothing may follow


@dataclass(frozen=True, slots=True)
class Sampling(SamplingNumbers):
    """Sampling parameters and the seed of the noise. Temperature 0 is greedy and uses no noise.

    Raises BadRequest for numbers out of range, both in clients' requests and in calls to peers. Whether ids lie in the
    target's vocabulary is checked by `check_choice`.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # ids, each once, and what is added to their logits
    banned_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences that the answer does not complete
    mode: VerificationMode = VerificationMode.COUPLED
    lenience: float = 1.0  # in (0, 1) in mode LENIENT; 1 in all others

    def __post_init__(self) -> None:
        self._check_mode()
        self.check_numbers()
        if any(getattr(self, name) for name in EDITS):
            self._check_edits()

    def _check_edits(self) -> None:
        OPTIONS["logit_bias"].check_entries(self.logit_bias)
        for token, bias in self.logit_bias:
            OPTIONS["logit_bias"].check(bias, f"[{token}]")
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise BadRequest("logit_bias", "has an id twice")
        for name in ("banned_ids", "allowed_ids", "bad_words"):
            OPTIONS[name].check_entries(getattr(self, name))
        for index, word in enumerate(self.bad_words):
            check_count(f"bad_words[{index}]", word, MAX_BAD_WORD_TOKENS)
            if not word:
                raise BadRequest(f"bad_words[{index}]", "is empty; it needs at least one token")

    @classmethod
    def read(cls, message: calls_pb2.Sampling | generation_pb2.Sampling, **others: int) -> Self:
        """The parameters of a peer's message or a client's. Absent numbers have their defaults. others: numbers in
        place of the message's"""
        whole: Message = message
        declared = whole.DESCRIPTOR.fields_by_name
        given = (name for name in SAMPLING_NUMBERS if not declared[name].has_presence or whole.HasField(name))
        numbers: dict[str, Any] = {name: getattr(message, name) for name in given}
        edits = _edits_from(message) if any(getattr(message, name) for name in EDITS) else {}
        mode = message.mode or VerificationMode.COUPLED
        if mode not in tuple(VerificationMode):
            raise BadRequest("mode", f"{mode[:32]!r} is not one of {', '.join(VerificationMode)}")
        return cls(
            **numbers | edits | others,
            mode=VerificationMode(mode),
            lenience=message.lenience if message.HasField("lenience") else 1.0,
        )

    def _check_mode(self) -> None:
        greedy, mode = self.temperature == 0, self.mode
        if mode is VerificationMode.GREEDY and not greedy:
            raise BadRequest("mode", f"is greedy, but the temperature is {self.temperature}; greedy needs 0")
        if greedy and mode in (VerificationMode.NAIVE, VerificationMode.MULTI_STEP, VerificationMode.BLOCK):
            raise BadRequest("mode", f"is {mode}, which draws tokens; at temperature 0 use greedy or coupled")
        if mode is VerificationMode.LENIENT:
            OPTIONS["lenience"].check(self.lenience)
        elif self.lenience != 1:
            raise BadRequest("lenience", f"is {self.lenience}, but the mode is {mode}; it belongs to lenient")

    def of_sample(self, index: int) -> Self:
        """A copy with another sample index, below 2**32. Nothing else differs, so nothing is checked again and the
        lists are shared."""
        other = copy.copy(self)
        object.__setattr__(other, "sample_index", index)  # frozen for all others
        return other

    @property
    def draws_guesses(self) -> bool:
        """True if guesses are drawn from the drafter's law, which is sent with the tree, and tested by their
        probabilities. No guess may then be left out, added or moved because of what was drawn."""
        return self.temperature > 0 and self.mode in DRAWING_MODES

    @property
    def shares_noise(self) -> bool:
        """True if drafters rank by the noise that the target draws with."""
        return self.temperature > 0 and self.mode not in LISTED_MODES

    @property
    def keeps_tokens(self) -> bool:
        """True if the tokens are those of plain decoding with the same seed, whatever the trees."""
        return not self.draws_guesses and not self.mode.lossy

    @property
    def changes_logits(self) -> bool:
        """True if logits are changed before the temperature: by biases, penalties or the removal of tokens."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        listed = self.logit_bias or self.banned_ids or self.allowed_ids or self.bad_words
        return penalties != (1.0, 0.0, 0.0) or bool(listed)

    @property
    def of_drafters(self) -> Sampling:
        """The parameters that drafters get: in LISTED_MODES with another seed, which hides the verifier's noise."""
        return replace(self, seed=draft_seed(self.seed)) if self.mode in LISTED_MODES else self


EDITS = ("logit_bias", "banned_ids", "allowed_ids", "bad_words")
"""The fields of a Sampling that are lists of tokens."""


def _edits_from(message: calls_pb2.Sampling | generation_pb2.Sampling) -> dict[str, Any]:
    """The lists of tokens of a message. Their lengths are checked before they are copied."""
    for name in EDITS:
        OPTIONS[name].check_entries(getattr(message, name))
    words: Sequence[calls_pb2.TokenIds | generation_pb2.TokenIds] = message.bad_words
    for index, word in enumerate(words):
        check_count(f"bad_words[{index}]", word.ids, MAX_BAD_WORD_TOKENS)
    return {
        "logit_bias": tuple(sorted(message.logit_bias.items())),
        "banned_ids": tuple(message.banned_ids),
        "allowed_ids": tuple(message.allowed_ids),
        "bad_words": tuple(tuple(word.ids) for word in words),
    }


@dataclass(frozen=True, slots=True)
class Limits:
    """An answer ends at `max_length` tokens of text, or at an end-of-text or stop token, none of which is drawn while
    the text has less than `min_length`. Raises BadRequest for limits that contradict each other."""

    max_length: int  # tokens of the whole text, prompt included
    ignore_end: bool = False  # continue past the end-of-text token (for measuring)
    min_length: int = 0  # tokens of the whole text, as in `max_length`
    stop_ids: tuple[int, ...] = ()  # the stop token that ends an answer is its last token

    def __post_init__(self) -> None:
        if not 0 <= self.min_length <= self.max_length:
            raise BadRequest("min_length", f"is {self.min_length}; must lie in 0 to max_length, {self.max_length}")
        if self.stop_ids:
            OPTIONS["stop_ids"].check_entries(self.stop_ids)

    def ending(self, end_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end an answer; end_ids: the target's end-of-text tokens."""
        return frozenset(self.stop_ids) if self.ignore_end else frozenset((*end_ids, *self.stop_ids))


def stop_ids_from(message: calls_pb2.OpenCall | generation_pb2.GenerateRequest) -> tuple[int, ...]:
    """The stop tokens of a peer's message or a client's. Their number is checked before they are copied."""
    if message.stop_ids:
        OPTIONS["stop_ids"].check_entries(message.stop_ids)
    return tuple(message.stop_ids)


def check_choice(
    sampling: Sampling,
    limits: Limits,
    vocabulary: int,
    end_ids: Collection[int],
    structure: Structure | None = None,
) -> None:
    """Raise BadRequest for ids outside the target's vocabulary, and for removals that may leave no token to draw."""
    if structure is not None:
        _check_beside_structure(sampling, limits)
    if limits.stop_ids or any(getattr(sampling, name) for name in EDITS):
        _check_known(sampling, limits, vocabulary)
    if sampling.banned_ids or sampling.allowed_ids or sampling.bad_words or limits.min_length:
        _check_some_left(sampling, limits, vocabulary, end_ids)


def _check_known(sampling: Sampling, limits: Limits, vocabulary: int) -> None:
    """Raise BadRequest for ids outside the vocabulary."""
    words = [(f"bad_words[{index}]", word) for index, word in enumerate(sampling.bad_words)]
    biased = tuple(token for token, _ in sampling.logit_bias)
    listed = (
        ("logit_bias", biased),
        ("banned_ids", sampling.banned_ids),
        ("allowed_ids", sampling.allowed_ids),
        *words,
        ("stop_ids", limits.stop_ids),
    )
    for field, ids in listed:
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            bad = next(token for token in ids if not 0 <= token < vocabulary)
            raise BadRequest(field, f"{bad} is outside the vocabulary of {vocabulary}")


def _check_some_left(sampling: Sampling, limits: Limits, vocabulary: int, end_ids: Collection[int]) -> None:
    """Raise BadRequest where all tokens may be removed from a row. Bad words remove tokens from some rows only; their
    last tokens all count as removed."""
    removed = {*sampling.banned_ids, *(word[-1] for word in sampling.bad_words)}
    if limits.min_length:
        removed |= limits.ending(end_ids)
    allowed = set(sampling.allowed_ids) if sampling.allowed_ids else range(vocabulary)
    if not any(token not in removed for token in allowed):
        field = "allowed_ids" if sampling.allowed_ids else "banned_ids"
        raise BadRequest(
            field,
            "may leave no token to draw: banned_ids, the last tokens of bad_words and, before min_new_tokens, "
            f"end-of-text tokens and stop_ids remove all {len(allowed)} that are allowed",
        )


def _check_beside_structure(sampling: Sampling, limits: Limits) -> None:
    """Raise BadRequest for a removal of tokens: it could leave none of those that the answer's structure allows."""
    if not sampling.keeps_tokens:
        reason = f"is not enforced in the mode {sampling.mode}, in which trees change tokens; take coupled"
        raise BadRequest("structure", reason)
    for field in ("banned_ids", "allowed_ids", "bad_words"):
        if getattr(sampling, field):
            raise BadRequest(field, "may leave no token that `structure` allows; describe the answer there alone")
    if limits.min_length and limits.stop_ids:  # a stop token may be the only one that the structure allows
        raise BadRequest("min_new_tokens", "removes stop_ids, and may so leave no token that `structure` allows")


@dataclass(frozen=True, slots=True)
class StopStrings:
    """An answer ends with the token that completes one of the `strings` in its text."""

    strings: tuple[str, ...] = ()
    included: bool = False  # True if the text that clients get includes the stop string

    @classmethod
    def of(cls, strings: Sequence[str], included: bool) -> Self:
        """Raises BadRequest for too many strings, for one that is empty, too long or cannot be encoded as UTF-8, and
        for `included` without any."""
        if len(strings) > MAX_STOP_STRINGS:
            raise BadRequest("stop", f"has {len(strings)} strings; at most {MAX_STOP_STRINGS}")
        if included and not strings:
            raise BadRequest("include_stop", "has no effect without stop strings; give them as `stop`")
        return cls(tuple(_checked_stop(index, each) for index, each in enumerate(strings)), included)

    @property
    def characters(self) -> int:
        """Number of characters of all strings together."""
        return sum(map(len, self.strings))


def _checked_stop(index: int, string: str) -> str:
    name, characters = f"stop[{index}]", len(string)
    if not string:
        raise BadRequest(name, "is empty; a stop string has at least one character")
    if characters > MAX_STOP_BYTES:  # a character has at least one byte; do not encode more
        raise BadRequest(name, f"has {characters} characters; at most {MAX_STOP_BYTES} bytes of UTF-8")
    try:
        size = len(string.encode())
    except UnicodeEncodeError:
        raise BadRequest(name, "has a surrogate code point, which UTF-8 cannot encode") from None
    if size > MAX_STOP_BYTES:
        raise BadRequest(name, f"has {size} bytes of UTF-8; at most {MAX_STOP_BYTES}")
    return string


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a round's verification."""

    tokens: tuple[int, ...]  # emitted tokens, at least one
    path: tuple[int, ...]  # accepted rows of the tree, the root first; as many as tokens
    ranks: tuple[int, ...]  # rank of each accepted guess among its siblings
    finish: Finish | None
    length: int  # N: tokens emitted before any cut
    verify_us: int = 0  # microseconds the verifier was busy with the round
    queue_us: int = 0  # microseconds the round was queued at the verifier
    ahead_us: int = 0  # microseconds of the step before the round's call arrived; `verify_us` has the rest
    texts: int = 1  # texts in the step, this one included
    step_rows: int = 1  # rows of the step
    trimmed: int = 0  # guesses of the tree that the step had no room for
    cold: bool = False  # True if times do not predict later rounds: the step compiled kernels, or had rows of a prompt
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the request asks for them
    refused: bool = False  # the verifier refused the tree, so the round had its root alone
    tree: DraftTree | None = None  # the ordered tree, or its root alone; None if the call had its own tree
    missed: str = ""  # why the ordered tree did not come, one of `dendro.order.Missed`; empty if it did
    drafted_us: int = 0  # microseconds from the last verdict until the ordered tree came, or did not

    def __post_init__(self) -> None:
        if not self.tokens or len(self.path) != len(self.tokens) or self.length < len(self.tokens):
            raise ValueError(f"verdict: {len(self.tokens)} tokens, {len(self.path)} rows, N = {self.length}")
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"verdict.logprobs: {len(self.logprobs)} entries for {len(self.tokens)} tokens")
        if self.texts < 1:
            raise ValueError(f"verdict.texts: must be at least 1, got {self.texts}")
        if self.step_rows < 1:
            raise ValueError(f"verdict.step_rows: must be at least 1, got {self.step_rows}")
        if self.trimmed < 0:
            raise ValueError(f"verdict.trimmed: negative: {self.trimmed}")
        if self.path[0] != 0:
            raise ValueError(f"verdict.path: must begin at the root, got {self.path}")

    @property
    def finished(self) -> bool:
        return self.finish is not None

    def verified(self, sent: DraftTree) -> DraftTree:
        """The tree that was verified: the ordered one, if `sent` stands for it."""
        if self.tree is None or not sent.ordered:
            return sent
        return replace(self.tree, draft_us=self.drafted_us, missed=True) if self.missed else self.tree

    def cut(self, kept: int, finish: Finish | None) -> Verdict:
        """A copy with the first `kept` tokens, at least one. The verdict itself if nothing differs."""
        if kept == len(self.tokens) and finish is self.finish:
            return self
        return replace(
            self,
            tokens=self.tokens[:kept],
            path=self.path[:kept],
            ranks=self.ranks[:kept],
            finish=finish,
            logprobs=self.logprobs[:kept],
        )


class Stopping(Protocol):
    """Ends an answer by its text, which its verifier does not see."""

    def cut(self, verdict: Verdict) -> Verdict:
        """Called once for each round's verdict, in order. Returns it, cut and finished if the answer ends in it."""
        ...


DIGEST_BYTES = 8
CHECKPOINT_TOKENS = 1024
"""Tokens between two stored states of a text's running hash: what a digest of an older prefix hashes again at most."""


class Tokens:
    """A growing list of tokens, and the 64-bit digest of any of its prefixes. Router and replicas keep one each and
    compare digests.

    A digest is BLAKE2b of the prefix as little-endian 32-bit numbers. The state of the running hash is kept, so the
    digest of a text that grew by a round costs the same whatever the text's length.
    """

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids: list[int] = list(ids)
        self._checkpoints = [_new_hash()]  # the k-th has taken in ids[: k * CHECKPOINT_TOKENS]
        self._newest = (0, _new_hash())  # length of the prefix whose digest was computed last, and its hash

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        self.ids += tokens

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.ids[length:], self._checkpoints[length // CHECKPOINT_TOKENS + 1 :]
        if self._newest[0] > length:
            self._newest = (0, _new_hash())

    def digest(self, length: int | None = None) -> int:
        """Digest of the first `length` tokens, by default of all."""
        return _number(self._hash(len(self.ids) if length is None else length))

    def digest_with(self, tokens: Sequence[int]) -> int:
        """Digest of this list continued by `tokens`."""
        running = self._hash(len(self.ids)).copy()
        running.update(packed_ids(tokens))
        return _number(running)

    def _hash(self, length: int) -> hashlib.blake2b:
        if not 0 <= length <= len(self.ids):
            raise IndexError(f"a prefix of {length} tokens of {len(self.ids)}")
        done, running = self._newest
        known = min(length // CHECKPOINT_TOKENS, len(self._checkpoints) - 1)
        if not known * CHECKPOINT_TOKENS <= done <= length:
            done, running = known * CHECKPOINT_TOKENS, self._checkpoints[known]
        running = running.copy()
        while done < length:
            upto = min((done // CHECKPOINT_TOKENS + 1) * CHECKPOINT_TOKENS, length)
            running.update(packed_ids(self.ids[done:upto]))
            done = upto
            if done == len(self._checkpoints) * CHECKPOINT_TOKENS:
                self._checkpoints.append(running.copy())
        self._newest = (length, running)
        return running


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def packed_ids(tokens: Iterable[int]) -> bytes:
    """Tokens as little-endian 32-bit numbers. (An array takes a third of NumPy's time to read a list.)"""
    numbers = array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _number(running: hashlib.blake2b) -> int:
    return int.from_bytes(running.digest(), "little")


class Text:
    """The committed tokens of one request, owned by the router's loop; peers hold copies.

    `marks` are lengths at which earlier turns ended and a state may have been saved.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limits: Limits,
        *,
        tenant: str = "",
        marks: tuple[int, ...] = (),
        stopping: Stopping | None = None,
        held: int = 0,
        logprobs: int | None = None,
        echo_from: int | None = None,
        structure: Structure | None = None,
    ) -> None:
        """held: number of the prompt's last tokens that a resumed answer already has; else 0
        logprobs: number of likeliest tokens whose log-probabilities a verdict has beside that of each of its tokens;
        None: it has none
        echo_from: the position of the first token whose log-probability the opening reports; None: it reports none
        structure: what the answer's text must be
        """
        if not prompt:
            raise BadRequest("prompt", "is empty; it needs at least one token")
        if limits.max_length <= len(prompt):
            raise BadRequest("max_new_tokens", "leaves no room for a single token")
        self._tokens = Tokens(prompt)
        self.prompt_length = len(prompt) - held
        self.sampling = sampling
        self.limits = limits
        self.logprobs = logprobs
        self.echo_from = echo_from
        self.tenant = tenant
        self.marks = marks
        self.structure = structure
        self.traceparent = ""  # the name of the answer's span; empty: the answer is not sampled
        self._stopping = stopping
        self.finish: Finish | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def ids(self) -> list[int]:
        """The committed tokens; do not modify."""
        return self._tokens.ids

    @property
    def root(self) -> int:
        return self._tokens.ids[-1]

    @property
    def answer(self) -> list[int]:
        return self._tokens.ids[self.prompt_length :]

    def digest(self, length: int) -> int:
        return self._tokens.digest(length)

    def commit(self, verdict: Verdict) -> Verdict:
        """Append the emitted tokens, up to the one at which `stopping` ends the answer. Returns the verdict, cut there.
        Raises ValueError after a finish, and for tokens past the limit."""
        if self.finish is not None:
            raise ValueError("text: committed after its end")
        room = self.limits.max_length - len(self)
        if len(verdict.tokens) > room:
            raise ValueError(f"text: {len(verdict.tokens)} tokens for room of {room}")
        if self._stopping is not None:
            verdict = self._stopping.cut(verdict)
        self._tokens.extend(verdict.tokens)
        self.finish = verdict.finish
        return verdict


def cut_verdict(verdict: Verdict, end_ids: frozenset[int], length: int, limits: Limits) -> Verdict:
    """Cut a verdict after the first token that ends the answer, then at the limit. length: of the text before it"""
    kept, finish = len(verdict.tokens), verdict.finish
    for index, token in enumerate(verdict.tokens):
        if (ended := finish_at(token, end_ids, limits)) is not None:
            kept, finish = index + 1, ended
            break
    room = limits.max_length - length
    if kept > room or (kept == room and finish is None):
        kept, finish = room, Finish.LENGTH
    return verdict.cut(kept, finish)


def finish_at(token: int, end_ids: Collection[int], limits: Limits) -> Finish | None:
    """Reason why an answer with this last token has ended, its length aside; None if it has not."""
    if token in end_ids and not limits.ignore_end:
        return Finish.END_OF_TEXT
    return Finish.STOP_TOKEN if token in limits.stop_ids else None


def state_name(tenant: str, fingerprint: str, layout: str, tokens: Sequence[int]) -> str:
    """The name of the state of `fingerprint` in `layout` (dtype included) after consuming exactly `tokens`.

    Salted by tenant, so that a tenant can neither find nor detect another's state.
    """
    head = "\0".join((tenant, fingerprint, layout, str(len(tokens)))).encode()
    return hashlib.sha256(head + b"\0\0" + packed_ids(tokens)).hexdigest()
