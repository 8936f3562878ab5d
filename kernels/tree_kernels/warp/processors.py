"""Changes of logits before the temperature: the plain formulas, for one row and the whole text before it.

`History` computes the same, bit for bit, for the rows of a tree, and reads a text's tokens once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Processors:
    """The parameters whose effect may depend on a row's own text. The defaults change nothing."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # ids, each once, and what is added
    banned: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()
    ending: tuple[int, ...] = ()  # tokens that are banned while the text has fewer than `min_length`
    min_length: int = 0  # tokens of the text, prompt included

    def __post_init__(self) -> None:
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty: must be above 0 and finite, got {self.repetition_penalty}")
        shifts = [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        shifts += [(f"logit_bias[{token}]", bias) for token, bias in self.logit_bias]
        for name, shift in shifts:
            if not math.isfinite(shift):
                raise ValueError(f"{name}: must be finite, got {shift}")
        if not all(self.bad_words):
            raise ValueError("bad_words: one is empty")

    @property
    def counts(self) -> bool:
        """True if tokens of the text are counted."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def processed(logits: Tensor, processors: Processors, text: Sequence[int], prompt_length: int) -> Tensor:
    """logits [V] of the token after `text` -> scores [V] float32, -inf where a token is removed.

    prompt_length: tokens of the text before the answer. At least one token must stay.

        logit bias          score + bias
        repetition          score * penalty where score < 0, else score / penalty; of tokens in the text
        removed             banned; not allowed; the last token of a bad word whose others end the text; a token that
                            ends the answer, while the text is shorter than min_length
        frequency           score - times in the answer * penalty
        presence            score - penalty; of tokens in the answer

    As in transformers 5.23 (SequenceBias, RepetitionPenalty, SuppressTokens, NoBadWords without its `eos_token_id`, and
    MinNewTokensLength, each a `...LogitsProcessor`); the last two, which it has not, as in the OpenAI API.
    """
    scores = logits.float().clone()
    for token, bias in processors.logit_bias:
        scores[token] += bias
    for token in set(text):
        score, penalty = scores[token].clone(), processors.repetition_penalty
        scores[token] = score * penalty if score < 0 else score / penalty
    removed = set(processors.banned)
    if processors.allowed:
        removed |= set(range(len(scores))) - set(processors.allowed)
    for *start, last in processors.bad_words:
        if len(start) <= len(text) and list(text[len(text) - len(start) :]) == start:
            removed.add(last)
    if len(text) < processors.min_length:
        removed |= set(processors.ending)
    scores[list(removed)] = -math.inf
    for token, times in Counter(text[prompt_length:]).items():
        scores[token] -= torch.tensor(float(times)) * processors.frequency_penalty
        scores[token] -= processors.presence_penalty
    return scores
