"""Outputs of a teacher: computed once and read by every student, or computed during a student's training.

The teacher's largest log-probabilities are computed one chunk of rows at a time. Every fourth chunk is text that the
teacher generated after a few real tokens, because a draft is accepted where the drafter agrees with the target on the
target's own text. Labels on disk are used several times each. Labels computed during the training are of new text in
every step, and the teacher then costs a few times the student.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafter_service.training.labels import Chunk, LabelledRows, TeacherFolder
from drafter_service.training.loop import Budget, autocast
from drafter_service.training.losses import TeacherRows
from drafter_service.training.rows import ALONE, Share, TokenRows, token_dtype
from drafter_service.training.stepping import CHECKED_STEPS, SteppedText

KEPT = 32  # log-probabilities that are kept of a position
CHUNK_ROWS = 256
ROW_TOKENS = 256
OWN_TEXT_STARTS = (16, 128)  # fewest and most real tokens at the start of a generated row
OWN_TEXT_TEMPERATURES = (0.0, 0.7, 1.0)
OWN_TEXT_EVERY = 4  # chunks; a generated chunk takes eight times as long as a real one
TIMED_STEPS = 5
FORWARD_ROWS = 16
FORWARD_LOGITS = 1 << 26  # float32 numbers that a forward's logits may have; 256 MB


@dataclass(frozen=True, slots=True)
class TeacherText:
    """Text that the teacher reads, and the form of the text that it writes."""

    corpus: np.ndarray  # [tokens], real text
    vocabulary: int  # bound of the tokenizer's ids that the model has; logits past it are left out
    end_ids: frozenset[int] = frozenset()
    answers: np.ndarray | None = None  # positions in the corpus where answers begin; None: own text begins anywhere
    chunk_rows: int = CHUNK_ROWS
    row_tokens: int = ROW_TOKENS

    @property
    def given(self) -> tuple[int, int]:
        """Fewest and most real tokens at the start of a generated row."""
        fewest, most = OWN_TEXT_STARTS
        return min(fewest, self.row_tokens // 4), min(most, self.row_tokens // 2)


def is_own(chunk: int) -> bool:
    """True if the teacher generates the text of the chunk with this number."""
    return chunk % OWN_TEXT_EVERY == 1


def _process(chunk: int, share: Share) -> bool:
    """True if the process makes the chunk. Processes take generated chunks in turn, and, separately, all others."""
    own = (chunk + OWN_TEXT_EVERY - 2) // OWN_TEXT_EVERY  # number of generated chunks before the chunk
    return (own if is_own(chunk) else chunk - own) % share.processes == share.process


@torch.inference_mode()
def write_own_text(model: PreTrainedModel, starts: Tensor, given: Tensor, text: TeacherText, seed: int) -> Tensor:
    """Generate rows, each after the first `given` tokens of its start. After the model ends a text, the row goes on
    with the start's tokens.

    starts [rows, length] int64, real text   given [rows] int64, at least `text.given[0]`   returns [rows, length] int64
    Rows cycle through OWN_TEXT_TEMPERATURES; the noise is Gumbel noise from `seed`.
    """
    device = starts.device
    generator = torch.Generator(device).manual_seed(seed)
    rows, length = starts.shape
    choices = torch.tensor(OWN_TEXT_TEMPERATURES, device=device)
    temperature = choices[torch.arange(rows, device=device) % len(choices)][:, None]  # [rows, 1]
    ends = torch.tensor(sorted(text.end_ids), dtype=torch.int64, device=device)
    stepped, written = SteppedText(model), starts[:, : text.given[0]]
    real, new = torch.zeros(rows, dtype=torch.bool, device=device), written
    with autocast(device):
        while written.shape[1] < length:
            logits = stepped.feed(new)[:, : text.vocabulary]
            noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
            token = (logits + temperature * noise).argmax(-1)  # argmax of logits / temperature + noise
            position = written.shape[1]
            token = torch.where(real | (given > position), starts[:, position], token)
            real |= torch.isin(token, ends) & (given <= position)
            new = token[:, None]
            written = torch.cat([written, new], 1)
    return written


def _own_starts(text: TeacherText, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Starts of generated rows [rows, length], and the number of given tokens of each [rows]. The starts are `rows`, or
    text around the beginnings of random answers if the corpus's answers are known."""
    fewest, most = text.given
    given = rng.integers(fewest, most + 1, len(rows))
    length = rows.shape[1]
    if text.answers is None:
        return rows, given
    usable = text.answers[(text.answers >= most) & (text.answers <= len(text.corpus) - length)]
    if not len(usable):
        return rows, given
    first = rng.choice(usable, len(rows)).astype(np.int64) - given
    return np.stack([text.corpus[start : start + length] for start in first]).astype(np.int64), given


class Labeller:
    """Makes and labels the chunks of a text. A chunk depends on the seed and its number alone.

    Logits come from the model's own forward, with what it does after its head. It is not compiled: that takes a minute
    on a CPU and saves 3 % (the demo target).
    """

    def __init__(self, model: PreTrainedModel, text: TeacherText, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._rows = TokenRows(text.corpus, text.chunk_rows, text.row_tokens, seed)
        self._device = next(model.parameters()).device
        self.text = text

    def chunk(self, chunk: int) -> Chunk:
        inputs, labels = self._rows.batch(chunk)
        tokens = torch.cat([inputs, labels[:, -1:]], 1)
        if is_own(chunk):
            rng = np.random.default_rng((self._seed, chunk))
            found = _own_starts(self.text, tokens.numpy(), rng)
            starts, given = (torch.from_numpy(each).to(self._device) for each in found)
            tokens = write_own_text(self._model, starts, given, self.text, self._seed * 1_000_003 + chunk)
        ids, log_probs = _largest(self._model, tokens[:, :-1].to(self._device), self.text.vocabulary)
        dtype = token_dtype(self.text.vocabulary)
        last = [(0, 0), (0, 1), (0, 0)]  # a row's last token has no label: the token after it is another row's
        ids, log_probs = np.pad(ids, last), np.pad(log_probs, last, constant_values=-np.inf)
        return Chunk(
            tokens.cpu().numpy().astype(dtype).ravel(),
            *(np.concatenate(each) for each in (ids.astype(dtype), log_probs)),
        )


def write_teacher_outputs(
    labeller: Labeller,
    folder: TeacherFolder,
    budget: Budget,
    on_chunk: Callable[[float, int], None],
    share: Share = ALONE,
) -> None:
    """Add a process's chunks to the folder until the budget (in seconds, or in chunks) is spent. Chunks 0 and 1 are
    always made.

    `on_chunk(fraction of the budget, chunks in the folder)` is called after each chunk. Raises NotSaved on a full disk.
    """
    seconds = folder.seconds(partial(_process, share=share))
    for chunk in _own_chunks(share):
        if chunk > 1 and budget.spent(seconds, chunk) >= 1:
            return
        if folder.has(chunk):
            continue
        started = time.monotonic()
        labelled = labeller.chunk(chunk)
        took = time.monotonic() - started
        folder.add(chunk, labelled, is_own(chunk), took)
        seconds += took
        on_chunk(budget.spent(seconds, chunk + 1), len(folder))


def _own_chunks(share: Share) -> Iterator[int]:
    return (chunk for chunk in count() if _process(chunk, share))


class LiveRows:
    """Rows that the teacher labels when a step needs them: always new text, and nothing on disk.

    A group of OWN_TEXT_EVERY chunks, one of them generated, is labelled at the first step that needs it. A resumed run
    labels its last group again. Each process has groups of its own.
    """

    def __init__(self, labeller: Labeller, share: Share = ALONE) -> None:
        self._labeller = labeller
        self._share = share
        self._group: int | None = None
        self._rows: LabelledRows | None = None

    def batch(self, step: int, rows: int, seed: int) -> tuple[Tensor, Tensor, TeacherRows]:
        """This process's share of a step's batch: inputs and labels [rows, length] int64, and the teacher's outputs for
        the labels."""
        own = self._share.of(rows)
        own_rows = own.stop - own.start
        group, place = divmod(step, self._steps(own_rows))
        if self._group != group or self._rows is None:
            first = (group * self._share.processes + self._share.process) * OWN_TEXT_EVERY
            chunks = [self._labeller.chunk(chunk) for chunk in range(first, first + OWN_TEXT_EVERY)]
            length = self._labeller.text.row_tokens
            self._group, self._rows = group, LabelledRows(chunks, length, length + 1)
        return self._rows.batch(place, own_rows, seed + group)

    def tokens(self, steps: int, rows: int) -> int:
        """Number of tokens that all processes together label for `steps` steps of `rows` rows."""
        own_rows = rows // self._share.processes
        groups = -(-steps // self._steps(own_rows)) * self._share.processes
        return groups * OWN_TEXT_EVERY * self._labeller.text.chunk_rows * self._labeller.text.row_tokens

    def _steps(self, own_rows: int) -> int:
        """Number of steps that a group of chunks is enough for."""
        steps = OWN_TEXT_EVERY * self._labeller.text.chunk_rows // own_rows
        if not steps:
            raise ValueError(f"{own_rows} rows of a step are more than a group's")
        return steps


@torch.inference_mode()
def rows_within(model: PreTrainedModel, text: TeacherText, seconds: float) -> int:
    """Most rows of own text that the model writes in about `seconds`: `text.chunk_rows`, or its half, quarter and so
    on. Each number of rows is judged by the fastest of TIMED_STEPS steps, as other work may delay a step."""
    device = next(model.parameters()).device
    rows, prompt = text.chunk_rows, torch.from_numpy(text.corpus[: text.given[0]].astype(np.int64)).to(device)
    while rows > 1:
        stepped = SteppedText(model)
        with autocast(device):
            stepped.feed(prompt.expand(rows, -1))
            for _ in range(CHECKED_STEPS):  # slower than later steps
                stepped.feed(prompt[-1:].expand(rows, -1))
            fastest = min(_timed(stepped, prompt[-1:].expand(rows, -1)) for _ in range(TIMED_STEPS))
        if fastest * text.row_tokens <= seconds:
            break
        rows //= 2
    return rows


def _timed(stepped: SteppedText, tokens: Tensor) -> float:
    started = time.monotonic()
    stepped.feed(tokens).sum().item()  # waits for a GPU
    return time.monotonic() - started


@torch.inference_mode()
def _largest(model: PreTrainedModel, tokens: Tensor, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities of the most likely next tokens at every position: [rows, positions, K] each."""
    rows = max(1, min(FORWARD_ROWS, FORWARD_LOGITS // (tokens.shape[1] * vocabulary)))
    ids, log_probs = [], []
    for part in tokens.split(rows):
        with autocast(tokens.device):
            scores = model(part, use_cache=False).logits[..., :vocabulary].float()
        kept = scores.topk(min(KEPT, vocabulary), dim=-1)
        ids.append(kept.indices.cpu().numpy())
        log_probs.append((kept.values - scores.logsumexp(-1, keepdim=True)).half().cpu().numpy())
    return np.concatenate(ids), np.concatenate(log_probs)
