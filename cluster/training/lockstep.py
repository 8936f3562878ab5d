"""Conversations of a target with itself, labelled while it writes them: thousands at a time on an accelerator.

All texts of a batch have the same number of tokens at any time, so that none is padded and each step is one forward of
the library. A text's next token is either given (a prompt, or what the chat template puts between turns) or drawn. When
an answer ends, the target asks itself the next question.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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


class Conversations:
    """The texts of a batch, token by token. A text's next token is given, or drawn for a question or an answer."""

    def __init__(self, prompts: PromptOrder, first: int, count: int, end_ids: frozenset[int]) -> None:
        """first: number of the first text, in the order of the prompts"""
        self.count = count
        self._prompts = prompts
        self._first = first
        self._end_ids = np.array(sorted(end_ids), np.int64)
        self._used = 0  # prompts that were given after an answer, where the target asks itself nothing
        self._turns = np.zeros(count, np.int64)  # questions of each text so far, without its first question
        self._answers_at = np.zeros(count, np.float32)  # temperature of each text's answers
        self._asks = np.zeros(count, bool)  # True where a question is drawn after the given tokens, else an answer
        self._left = np.zeros(count, np.int64)  # tokens that the question or answer may still have
        between = 0 if prompts.frame is None else len(prompts.frame.between)
        longest = max(prompts.most, between + max(map(len, prompts.openings), default=0))
        self._given = np.zeros((count, longest), np.int64)  # given tokens of each text, from `_at` to `_end`
        self._at = np.zeros(count, np.int64)
        self._end = np.zeros(count, np.int64)
        for row in range(count):
            planned, frame = prompts.text(first + row), prompts.frame
            self._answers_at[row] = planned.sampling.temperature
            asked = (*frame.opening, *planned.opening) if frame is not None else ()
            self._give(row, planned.prompt or asked, asks=not planned.prompt)

    def temperatures(self) -> np.ndarray:
        """Temperature of each text's next token, if that is drawn: [count] float32."""
        return np.where(self._asks, np.float32(QUESTION_TEMPERATURE), self._answers_at)

    def next(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each text's next token [count] int64, and True where it belongs to an answer. drawn [count]: the tokens that
        the target would draw"""
        rows, pending = np.arange(self.count), self._at < self._end
        given = self._given[rows, np.minimum(self._at, self._given.shape[1] - 1)]
        tokens, answers = np.where(pending, given, drawn), ~pending & ~self._asks
        self._at[pending] += 1
        self._left[~pending] -= 1
        ended = ~pending & np.isin(drawn, self._end_ids)
        for row in np.flatnonzero(ended | (~pending & (self._left == 0))).tolist():
            if self._asks[row]:
                tokens[row] = self._answer(row)
            else:
                self._ask(row, bool(ended[row]))
        return tokens, answers

    def _answer(self, row: int) -> int:
        """End a text's question. Returns the token that takes the place of the question's last token."""
        frame = self._prompts.frame
        assert frame is not None
        self._give(row, frame.closing[1:], asks=False)
        return frame.closing[0]

    def _ask(self, row: int, ended: bool) -> None:
        """Let a question follow a text's answer. ended: True if the answer's last token is an end token"""
        frame = self._prompts.frame
        if frame is None:
            self._used += 1
            self._give(row, self._prompts.text(self._first + self.count + self._used).prompt, asks=False)
            return
        between = frame.between[1:] if ended and frame.between[0] in self._end_ids else frame.between
        self._turns[row] += 1
        opening = self._prompts.opening(self._first + row, int(self._turns[row]))
        self._give(row, (*between, *opening), asks=True)

    def _give(self, row: int, tokens: tuple[int, ...], asks: bool) -> None:
        self._given[row, : len(tokens)] = tokens
        self._at[row], self._end[row], self._asks[row] = 0, len(tokens), asks
        self._left[row] = QUESTION_TOKENS if asks else ANSWER_TOKENS


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
    """The texts one after another, each of `length` tokens. A label is at the token before its own."""
    device = next(target.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    stepped, texts, kept = SteppedText(target, length), batch.count, min(MAX_TOP_LOGPROBS, vocabulary)
    tokens, answers = np.zeros((texts, length), np.int64), np.zeros((texts, length), bool)
    ids = torch.zeros(texts, length, kept, dtype=torch.int32, device=device)
    log_probs = torch.full((texts, length, kept), -torch.inf, dtype=torch.float16, device=device)
    tokens[:, 0], answers[:, 0] = batch.next(tokens[:, 0])  # a conversation begins with given tokens
    for place in range(1, length):
        new, hot = (torch.from_numpy(each).to(device) for each in (tokens[:, place - 1], batch.temperatures()))
        logits = stepped.feed(new[:, None])[:, :vocabulary]
        drawn = _drawn(logits, hot, generator).cpu().numpy()
        top = logits.topk(kept)  # computed while the texts go on
        ids[:, place - 1] = top.indices
        log_probs[:, place - 1] = top.values - logits.logsumexp(-1, keepdim=True)
        tokens[:, place], answers[:, place] = batch.next(drawn)
    labelled = np.roll(answers, -1, axis=1)  # no text begins with an answer
    found = log_probs.cpu().numpy()
    found[~labelled] = -np.inf
    dtype = token_dtype(vocabulary)
    return Chunk(
        tokens.astype(dtype).reshape(-1),
        (ids.cpu().numpy() * labelled[..., None]).astype(dtype).reshape(-1, kept),
        found.reshape(-1, kept),
    )


def _drawn(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row: the likeliest at temperature 0. logits [rows, V]   temperatures [rows]   returns [rows]"""
    noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
    hot = temperatures[:, None]
    scores = logits / hot.clamp(min=1e-3) + noise * (hot > 0)
    return scores.argmax(-1)
