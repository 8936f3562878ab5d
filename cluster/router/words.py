"""Converts bad words and biases that a request gives as texts to tokens of the target."""

from __future__ import annotations

from dataclasses import replace

from dendro.arguments import shown
from dendro.errors import BadRequest
from dendro.options import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED_IDS, MAX_WORD_BYTES, SHIFT, check_count
from dendro.tasks import off_loop
from dendro.text import Sampling
from dendro.v1 import generation_pb2 as pb

from cluster.router.tokenizer import Tokenizer

WORD_WORK = 64
"""Cost of encoding a short text, in tokens of other work (`off_loop`)."""


async def with_words(sampling: Sampling, request: pb.GenerateRequest, tokenizer: Tokenizer) -> Sampling:
    """Add to the sampling the bad words and biases that the request gives as texts. Called if there are any. Raises
    BadRequest, naming the text, for one without usable tokens."""
    words, biases = request.bad_word_texts, request.logit_bias_texts
    check_count("bad_words", range(len(words) + len(sampling.bad_words)), MAX_BAD_WORDS)
    check_count("logit_bias", range(len(biases) + len(sampling.logit_bias)), MAX_BIASED_IDS)
    for field, texts in (("bad_words", words), ("logit_bias", biases)):
        for text in texts:
            if not text:
                raise BadRequest(_name(field, text), "is empty; it needs at least one character")
            if (size := len(text.encode())) > MAX_WORD_BYTES:
                raise BadRequest(_name(field, text), f"has {size} bytes; at most {MAX_WORD_BYTES}")
    work = WORD_WORK * (2 * len(words) + len(biases)) + sum(map(len, words)) + sum(map(len, biases))
    return await off_loop(work, lambda: _with_words(sampling, list(words), dict(biases), tokenizer))


def _with_words(sampling: Sampling, words: list[str], biases: dict[str, float], tokenizer: Tokenizer) -> Sampling:
    found = dict.fromkeys(sampling.bad_words)
    for text in words:
        for spelling in spellings(text):
            ids = tuple(tokenizer.encode(spelling, begins=False))
            if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                reason = f"has {len(ids)} tokens; must have 1 to {MAX_BAD_WORD_TOKENS}"
                raise BadRequest(_name("bad_words", text), reason)
            _check_known("bad_words", text, tokenizer)
            found[ids] = None
    tokens = dict(sampling.logit_bias)
    for text, bias in biases.items():
        ids = tuple(tokenizer.encode(text, begins=False))
        if len(ids) != 1:
            raise BadRequest(_name("logit_bias", text), f"has {len(ids)} tokens of this target; a bias needs one")
        _check_known("logit_bias", text, tokenizer)
        SHIFT.check(_name("logit_bias", text), bias)
        if ids[0] in tokens:
            raise BadRequest(_name("logit_bias", text), f"is the token {ids[0]}, which has a bias already")
        tokens[ids[0]] = bias
    return replace(sampling, bad_words=tuple(found), logit_bias=tuple(sorted(tokens.items())))


def spellings(text: str) -> list[str]:
    """A bad word as it may stand in a text: within a word or at its beginning, after a space."""
    return [text] if text.startswith(" ") else [text, f" {text}"]


def _check_known(field: str, text: str, tokenizer: Tokenizer) -> None:
    """Raise BadRequest if a part of a text becomes the unknown token, which stands for other texts, too."""
    if not tokenizer.knows(text):
        raise BadRequest(_name(field, text), "has characters that the target has no tokens for")


def _name(field: str, text: str) -> str:
    return f"{field}[{shown(text)}]"
