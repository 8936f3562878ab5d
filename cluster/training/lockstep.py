"""Conversations of a target with itself, labelled while it writes them: thousands at a time on an accelerator.

All texts of a batch have the same number of tokens at any time, so that none is padded and each step is one forward of
the library. A text's next token is either given (a prompt, or what the chat template puts between turns) or drawn. When
an answer ends, the target asks itself the next question.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from dendro.options import MAX_TOP_LOGPROBS
from torch import Tensor
from transformers import PreTrainedModel

from cluster.training.answering import ANSWER_TOKENS, LONGEST_TEXT, QUESTION_TOKENS, PromptOrder
from drafter_service.training.labels import Chunk, TeacherFolder
from drafter_service.training.loop import Budget
from drafter_service.training.rows import token_dtype
from drafter_service.training.stepping import SteppedText

TEXTS = 2048
"""Texts of a batch at first; half of them where they do not fit in memory."""
QUESTION_TEMPERATURE = 1.0


@dataclass(slots=True)
class Conversation:
    """The state of one text of a batch. A drawn token belongs to a question or to an answer."""

    temperature: float  # temperature of the text's answers
    given: list[int]  # tokens that come next, in reverse order
    asks: bool  # True if a question is drawn after `given`, else an answer
    left: int  # tokens that the question or answer may still have

    def draws_answer(self) -> bool:
        return not self.given and not self.asks


@dataclass(slots=True)
class Conversations:
    """The texts of a batch, token by token."""

    prompts: PromptOrder
    first: int  # the number of the first text, in the order of the prompts
    count: int
    end_ids: frozenset[int]
    texts: list[Conversation] = field(default_factory=list)
    used: int = 0  # prompts that were given after an answer, where the target asks itself nothing

    def __post_init__(self) -> None:
        for number in range(self.first, self.first + self.count):
            planned, frame = self.prompts.text(number), self.prompts.frame
            opening = planned.prompt or (frame.opening if frame is not None else ())
            text = Conversation(planned.sampling.temperature, list(reversed(opening)), not planned.prompt, 0)
            text.left = self._most(text)
            self.texts.append(text)

    def temperatures(self) -> list[float]:
        """Temperature of each text's next token, if that is drawn."""
        return [QUESTION_TEMPERATURE if text.asks else text.temperature for text in self.texts]

    def next(self, drawn: list[int]) -> tuple[list[int], list[bool]]:
        """Each text's next token, and True if it belongs to an answer. drawn: the tokens that the target would draw"""
        tokens, answers = list[int](), list[bool]()
        for text, token in zip(self.texts, drawn, strict=True):
            answers.append(text.draws_answer())
            tokens.append(text.given.pop() if text.given else self._drawn(text, token))
        return tokens, answers

    def _drawn(self, text: Conversation, token: int) -> int:
        ended, frame = token in self.end_ids, self.prompts.frame
        text.left -= 1
        if text.asks:
            assert frame is not None
            if ended or not text.left:  # the template's words take the place of its last token
                self._give(text, frame.closing, asks=False)
                return text.given.pop()
            return token
        if ended or not text.left:
            if frame is None:
                self._give(text, self._another(), asks=False)
            else:
                between = frame.between
                self._give(text, between[1:] if ended and between[0] in self.end_ids else between, asks=True)
        return token

    def _give(self, text: Conversation, tokens: tuple[int, ...], asks: bool) -> None:
        text.given, text.asks = list(reversed(tokens)), asks
        text.left = self._most(text)

    def _most(self, text: Conversation) -> int:
        return QUESTION_TOKENS if text.asks else ANSWER_TOKENS

    def _another(self) -> tuple[int, ...]:
        """The prompt that follows an answer where the chat template gives no frame for questions of the target's."""
        self.used += 1
        return self.prompts.text(self.first + self.count + self.used).prompt


def write_conversations(
    target: PreTrainedModel,
    vocabulary: int,
    end_ids: frozenset[int],
    prompts: PromptOrder,
    length: int,
    folder: TeacherFolder,
    budget: Budget,
    on_chunk: Callable[[float], None],
) -> None:
    """Have a target write and label conversations of `length` tokens, until the budget (in seconds, or in batches) is
    spent, one batch always. What the folder has counts.

    `on_chunk(fraction of the budget)` is called after each batch. Raises NotSaved on a full disk.
    """
    seconds, count, texts = folder.seconds(), len(folder), TEXTS
    while not count or budget.spent(seconds, count) < 1:
        began = time.monotonic()
        try:
            batch = Conversations(prompts, count * texts, texts, end_ids)
            chunk = _written(target, vocabulary, batch, length, (prompts.seed << 20) + count)
        except torch.OutOfMemoryError:
            if texts == 1:
                raise
            texts //= 2
            torch.cuda.empty_cache()
            continue
        took = time.monotonic() - began
        folder.add(count, chunk, own=True, seconds=took)
        seconds, count = seconds + took, count + 1
        on_chunk(budget.spent(seconds, count))


def longest(max_length: int) -> int:
    """Tokens of a conversation with a target of this longest text."""
    return min(max_length, LONGEST_TEXT)


@torch.inference_mode()
def _written(target: PreTrainedModel, vocabulary: int, batch: Conversations, length: int, seed: int) -> Chunk:
    """The texts one after another, each of `length` tokens. A label is at the token before the one that it is of."""
    device = next(target.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    stepped, dtype = SteppedText(target), token_dtype(vocabulary)
    texts, kept = batch.count, min(MAX_TOP_LOGPROBS, vocabulary)
    tokens = np.zeros((texts, length), dtype)
    ids = np.zeros((texts, length, kept), dtype)
    log_probs = np.full((texts, length, kept), -np.inf, np.float16)
    new, answers = batch.next([0] * texts)  # a conversation begins with given tokens
    tokens[:, 0] = new
    for place in range(1, length):
        logits = stepped.feed(torch.tensor(new, device=device)[:, None])[:, :vocabulary]
        drawn = _drawn(logits, torch.tensor(batch.temperatures(), device=device), generator)
        top = logits.topk(kept)
        of_top = top.values - logits.logsumexp(-1, keepdim=True)
        new, answers = batch.next(drawn.tolist())
        tokens[:, place] = new
        ids[answers, place - 1] = top.indices.cpu().numpy()[answers]
        log_probs[answers, place - 1] = of_top.half().cpu().numpy()[answers]
    return Chunk(tokens.reshape(-1), ids.reshape(-1, kept), log_probs.reshape(-1, kept))


def _drawn(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row: the likeliest at temperature 0. logits [rows, V]   temperatures [rows]   returns [rows]"""
    noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
    hot = temperatures[:, None]
    scores = logits / hot.clamp(min=1e-3) + noise * (hot > 0)
    return scores.argmax(-1)
