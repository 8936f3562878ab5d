"""Texts that a target writes itself, labelled while it writes them: answers to the data's prompts, and to questions
that it asks itself.

The target runs as it is served, in its verifier's engine, many texts at a time. The log-probabilities of an answer's
tokens come with the answer, so that its text needs no second forward. Questions that the target asks itself have the
subjects that it was trained on, whatever the data is about (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import torch
from dendro.calls import CloseCall, OpenCall, RequestParameters, TextUpdate, VerifyCall, new_opening
from dendro.engine import LocalVerifier, started
from dendro.errors import BadRequest
from dendro.logprobs import TokenLogprobs
from dendro.options import MAX_TOP_LOGPROBS
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from tree_layers.checkpoint import Facts

from cluster.config import TargetConfig
from cluster.engines import verifier_options
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.training.acceptance import OwnAnswer
from drafter_service.training.labels import Chunk, TeacherFolder, joined
from drafter_service.training.loop import Budget
from drafter_service.training.rows import token_dtype
from verifier_service.engine import VerifierEngine

TEXTS = 32
"""Texts of a chunk, and the texts that are written at a time."""
TEMPERATURES = (0.0, 1.0, 0.7)
QUESTION_TOKENS = 160
ANSWER_TOKENS = 320
QUESTION, ANSWER = "QUESTION", "ANSWER"
"""Texts that stand for a question and an answer in a chat template."""
PROMPT_TOKENS = 640
"""Most tokens of a prompt, which also has at most half of the target's longest text; the beginning of a longer prompt
is left out."""
LONGEST_TEXT = PROMPT_TOKENS + ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Tokens that a chat template puts around a question."""

    opening: tuple[int, ...]  # tokens before a question
    closing: tuple[int, ...]  # tokens between a question and its answer
    between: tuple[int, ...]  # tokens between an answer and the next question

    @property
    def tokens(self) -> int:
        return len(self.opening) + len(self.closing)


@dataclass(frozen=True, slots=True)
class TextPlan:
    """A prompt, and how its answer is drawn."""

    prompt: tuple[int, ...]  # empty: the target asks itself
    sampling: Sampling
    opening: tuple[int, ...] = ()  # tokens that the target's own question begins with


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The prompts of a training run, in an order that the seed determines. Text n depends on n and the seed alone."""

    given: Sequence[np.ndarray]  # tokens of each
    frame: ChatFrame | None  # None: the target asks nothing itself
    seed: int
    most: int = PROMPT_TOKENS  # most tokens of a prompt; greater than those of the frame and of an opening together
    openings: Sequence[tuple[int, ...]] = ()  # beginnings of the target's own questions

    @classmethod
    def fitting(
        cls,
        given: Sequence[np.ndarray],
        frame: ChatFrame | None,
        seed: int,
        max_length: int,
        openings: Sequence[tuple[int, ...]] = (),
    ) -> PromptOrder:
        """Prompts that leave half of the target's longest text for their answers. Without the frame, where it leaves
        no room for a question; without the openings that leave none."""
        most = min(PROMPT_TOKENS, max_length // 2)
        if frame is None or frame.tokens >= most:
            return cls(given, None, seed, most)
        return cls(given, frame, seed, most, [each for each in openings if frame.tokens + len(each) < most])

    def opening(self, number: int, turn: int) -> tuple[int, ...]:
        """The beginning of the question of a text's turn, if the target asks it itself: one of the openings for half
        of the questions, else nothing."""
        if not self.openings:
            return ()
        drawn = int(np.random.default_rng((self.seed, number, turn)).integers(2 * len(self.openings)))
        return self.openings[drawn] if drawn < len(self.openings) else ()

    def text(self, number: int) -> TextPlan:
        """Every second prompt is one that the target asks itself, where there is a frame."""
        temperature = TEMPERATURES[number // 2 % len(TEMPERATURES)]
        sampling = Sampling(temperature=temperature, seed=(self.seed << 32) + number)
        if self.frame is not None and (number % 2 or not self.given):
            return TextPlan((), sampling, self.opening(number, 0))
        place = number // 2 if self.frame is not None else number
        epoch, at = divmod(place, len(self.given))
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.given))
        return TextPlan(tuple(self.given[order[at]][-self.most :].tolist()), sampling)


class AnswerWriter:
    """Writes and labels the chunks of a run with a target's engine, TEXTS texts at a time."""

    def __init__(
        self, engine: LocalVerifier, prompts: PromptOrder, vocabulary: int, end_ids: frozenset[int], max_length: int
    ) -> None:
        """max_length: of a text, at most that of the engine"""
        self._engine = engine
        self._prompts = prompts
        self._dtype = token_dtype(vocabulary)
        self._end_ids = end_ids
        self._max_length = max_length
        self._permits = asyncio.Semaphore(TEXTS)

    async def chunks(self, first: int) -> AsyncGenerator[Chunk]:
        """The chunks from this number on. While the last texts of one are written, those of the next are begun."""
        begun = [self._begin(first), self._begin(first + 1)]
        number = first + 2
        try:
            while True:
                yield joined(await asyncio.gather(*begun.pop(0)))
                begun.append(self._begin(number))
                number += 1
        finally:
            for task in (task for tasks in begun for task in tasks):
                task.cancel()

    def _begin(self, chunk: int) -> list[asyncio.Task[Chunk]]:
        numbers = range(chunk * TEXTS, (chunk + 1) * TEXTS)
        return [asyncio.create_task(self._written(self._prompts.text(number))) for number in numbers]

    async def _written(self, asked: TextPlan) -> Chunk:
        async with self._permits:
            prompt = list(asked.prompt)
            if not prompt:
                prompt = await self._question(asked)
            tokens, labels = await self._text(prompt, asked.sampling, ANSWER_TOKENS)
        return self._labelled(prompt, tokens, labels)

    async def _question(self, asked: TextPlan) -> list[int]:
        """A prompt that the target asks itself, drawn from its own law."""
        frame = self._prompts.frame
        assert frame is not None
        drawn = Sampling(temperature=1.0, seed=asked.sampling.seed, sample_index=1)
        begun = [*frame.opening, *asked.opening]
        most = min(QUESTION_TOKENS, self._prompts.most - frame.tokens - len(asked.opening))
        question, _ = await self._text(begun, drawn, most)
        if question[-1] in self._end_ids:
            question.pop()
        return [*begun, *question, *frame.closing]

    async def _text(self, prompt: list[int], sampling: Sampling, most: int) -> tuple[list[int], list[TokenLogprobs]]:
        """Generate the target's answer to a prompt, with a limit on tokens, and the tokens' log-probabilities."""
        text, opening = Tokens(prompt), new_opening()
        limits = Limits(min(len(prompt) + most, self._max_length))
        parameters = RequestParameters(sampling, limits, "", (), prompt_length=len(prompt), logprobs=MAX_TOP_LOGPROBS)
        await self._engine.open(OpenCall(TextUpdate.of(opening, text, 0), parameters))
        tokens, labels, root, start = list[int](), list[TokenLogprobs](), prompt[-1], len(text)
        while True:
            call = VerifyCall(TextUpdate.of(opening, text, start), DraftTree.of([root], [-1]))
            verdict = await self._engine.verify(call)
            start = len(text)
            tokens += verdict.tokens
            labels += verdict.logprobs
            text.extend(verdict.tokens)
            root = verdict.tokens[-1]
            if verdict.finish is not None:
                await self._engine.close(CloseCall(TextUpdate.of(opening, text, start)))
                return tokens, labels

    def _labelled(self, prompt: list[int], tokens: list[int], labels: list[TokenLogprobs]) -> Chunk:
        count, first = len(prompt) + len(tokens), len(prompt) - 1
        ids = np.zeros((count, MAX_TOP_LOGPROBS), self._dtype)
        log_probs = np.full((count, MAX_TOP_LOGPROBS), -np.inf, np.float16)
        for row, label in enumerate(labels, first):
            ids[row] = [token for token, _ in label.top]
            log_probs[row] = [value for _, value in label.top]
        return Chunk(np.array([*prompt, *tokens], self._dtype), ids, log_probs)


def chat_frame(tokenizer: CheckpointTokenizer) -> ChatFrame | None:
    """The frame of a tokenizer's chat template; None if it has no template, or one that changes questions."""
    asked, answered = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    try:
        once = tokenizer.chat([asked], opens_answer=True)
        twice = tokenizer.chat([asked, answered, asked], opens_answer=True)
    except BadRequest:
        return None
    if once.count(QUESTION) != 1 or twice.count(QUESTION) != 2 or twice.count(ANSWER) != 1:
        return None
    before, after = once.split(QUESTION)
    between = twice.split(ANSWER)[1].split(QUESTION)[0]
    opening = tokenizer.encode_chat(before)
    closing, again = (tuple(tokenizer.encode(text, begins=False)) for text in (after, between))
    return ChatFrame(tuple(opening), closing, again) if opening and closing and again else None


def write_answers(
    name: str,
    target: TargetConfig,
    facts: Facts,
    prompts: PromptOrder,
    device: torch.device,
    folder: TeacherFolder,
    budget: Budget,
    on_chunk: Callable[[float], None],
) -> None:
    """Have a target write and label texts, as it is served, until the budget (in seconds, or in chunks) is spent, one
    chunk always. What the folder has counts.

    name: the target's in the configuration, `target` has folders of this machine
    `on_chunk(fraction of the budget)` is called after each chunk. Raises BadRequest for a target that is not served;
    NotSaved on a full disk.
    """
    length = min(target.max_length, LONGEST_TEXT)
    options = replace(
        verifier_options(name, target),
        device=device,
        threads=torch.get_num_threads(),
        max_length=length,
        max_sessions=TEXTS,
        max_waiting=TEXTS,
    )
    engine = VerifierEngine.load(target.checkpoint, options)
    writer = AnswerWriter(engine, prompts, facts.vocabulary, facts.end_ids, length)
    asyncio.run(_write(engine, writer, folder, budget, on_chunk))


async def _write(
    engine: LocalVerifier,
    writer: AnswerWriter,
    folder: TeacherFolder,
    budget: Budget,
    on_chunk: Callable[[float], None],
) -> None:
    seconds, count = folder.seconds(), len(folder)
    async with started(engine):
        began = time.monotonic()
        async with aclosing(writer.chunks(count)) as chunks:
            while not count or budget.spent(seconds, count) < 1:
                chunk = await anext(chunks)
                took, began = time.monotonic() - began, time.monotonic()
                folder.add(count, chunk, own=True, seconds=took)
                seconds, count = seconds + took, count + 1
                on_chunk(budget.spent(seconds, count))


def answers_in(chunks: Sequence[Chunk], prompts: PromptOrder) -> list[OwnAnswer]:
    """The answers of chunks 0, 1 and so on, whose prompts these were."""
    found = list[OwnAnswer]()
    for chunk in chunks:
        labelled = np.isfinite(chunk.log_probs[:, 0])
        edges = np.flatnonzero(np.diff(labelled.astype(np.int8), prepend=0, append=0))
        text_begins = 0
        for first, after in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            tokens = chunk.tokens[text_begins : after + 1].tolist()
            begin, text_begins = first + 1 - text_begins, after + 1
            found.append(OwnAnswer(tokens, begin, prompts.text(len(found)).sampling))
    return found
