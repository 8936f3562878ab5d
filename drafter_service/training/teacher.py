"""The teacher's outputs, computed once and read by every student.

Running the teacher inside a student's loop would cost four times the student. Instead its largest log-probabilities are
written to disk, one chunk of rows at a time. Every fourth chunk is text that the teacher generated after a few real
tokens, because a draft is accepted where the drafter agrees with the target on the target's own text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafter_service.training.loop import Budget, autocast, compiled
from drafter_service.training.losses import TeacherRows
from drafter_service.training.rows import TokenRows, token_dtype
from drafter_service.training.saving import replacing
from drafter_service.training.stepping import SteppedText

KEPT = 32  # log-probabilities per position
CHUNK_ROWS = 256
ROW_TOKENS = 256
OWN_TEXT_STARTS = (16, 128)  # fewest and most real tokens at the start of a generated row
OWN_TEXT_TEMPERATURES = (0.0, 0.7, 1.0)
OWN_TEXT_EVERY = 4  # chunks; a generated chunk takes eight times as long as a real one
FORWARD_ROWS = 16
FORWARD_LOGITS = 1 << 26  # float32 numbers that a forward's logits may have; 256 MB


@dataclass(frozen=True, slots=True)
class TeacherText:
    """What the teacher reads and writes."""

    corpus: np.ndarray  # [tokens], real text
    vocabulary: int  # ids of the tokenizer that the model has, from 0 on; logits past them are left out
    end_ids: frozenset[int] = frozenset()
    answers: np.ndarray | None = None  # positions in the corpus where answers begin; None: own text begins anywhere
    chunk_rows: int = CHUNK_ROWS
    row_tokens: int = ROW_TOKENS

    @property
    def given(self) -> tuple[int, int]:
        """Fewest and most real tokens at the start of a generated row."""
        fewest, most = OWN_TEXT_STARTS
        return min(fewest, self.row_tokens // 4), min(most, self.row_tokens // 2)


class TeacherFolder:
    """Chunks of rows with the teacher's outputs: folders `00000` and so on, each whole or absent.

    A chunk has `tokens.npy` [rows, length + 1] and, for the first `length` positions, `ids.npy` and `log_probs.npy`
    [rows, length, K], float16, of the next token; ids are uint16, or uint32 for a large vocabulary. `facts.json` has
    whether the teacher generated it (`own`), and the seconds that it took, which a resumed run counts as spent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._chunks())

    def seconds(self) -> float:
        return float(sum(facts["seconds"] for facts in self._facts()))

    def own_share(self) -> float:
        """The share of the chunks that the teacher generated."""
        return float(np.mean([facts["own"] for facts in self._facts()]))

    def append(self, tokens: np.ndarray, ids: np.ndarray, log_probs: np.ndarray, own: bool, seconds: float) -> None:
        """Add a chunk. Raises NotSaved on a full disk."""
        with replacing(self.folder / f"{len(self):05d}") as partial:
            partial.mkdir()
            for name, array in (("tokens", tokens), ("ids", ids), ("log_probs", log_probs)):
                np.save(partial / f"{name}.npy", array)
            (partial / "facts.json").write_text(json.dumps({"own": own, "seconds": seconds}))

    def read(self) -> LabelledRows:
        """All rows, mapped from the disk."""
        if not len(self):
            raise ValueError(f"no teacher outputs in {self.folder}")
        return LabelledRows([*zip(*(self._arrays(name) for name in ("tokens", "ids", "log_probs")), strict=True)])

    def _chunks(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.isdigit())

    def _facts(self) -> list[dict[str, Any]]:
        return [json.loads((chunk / "facts.json").read_text()) for chunk in self._chunks()]

    def _arrays(self, name: str) -> list[np.ndarray]:
        return [np.load(chunk / f"{name}.npy", mmap_mode="r") for chunk in self._chunks()]


class LabelledRows:
    """The rows of a teacher's chunks, all of equal size. Their order depends on the seed and the epoch."""

    def __init__(self, chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """chunks: tokens [rows, length + 1], ids and log_probs [rows, length, K] of each"""
        self._chunks = chunks
        self._rows = len(chunks[0][0])
        self._epoch: tuple[int, int] | None = None
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._rows * len(self._chunks)

    @property
    def tokens(self) -> int:
        """Labelled tokens."""
        return len(self) * int(self._chunks[0][1].shape[1])

    def batch(self, step: int, rows: int, seed: int) -> tuple[Tensor, Tensor, TeacherRows]:
        """Inputs and labels [rows, length] int64 and the teacher's outputs for the labels."""
        epoch, place = divmod(step, len(self) // rows)
        if self._epoch != (seed, epoch):
            self._epoch, self._order = (seed, epoch), np.random.default_rng((seed, epoch)).permutation(len(self))
        chosen = [divmod(int(row), self._rows) for row in np.sort(self._order[place * rows : (place + 1) * rows])]
        tokens, ids, log_probs = (
            torch.from_numpy(np.stack([self._chunks[chunk][part][row] for chunk, row in chosen]).astype(dtype))
            for part, dtype in enumerate((np.int64, np.int64, np.float16))
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), TeacherRows(ids, log_probs)


@torch.inference_mode()
def write_own_text(model: PreTrainedModel, starts: Tensor, given: Tensor, text: TeacherText, seed: int) -> Tensor:
    """Rows that the model generates, each after the first `given` tokens of its start. Where the model ends a text, the
    row goes on with the start's tokens.

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
            token = (logits + temperature * noise).argmax(-1)  # the same as logits / temperature + noise
            position = written.shape[1]
            token = torch.where(real | (given > position), starts[:, position], token)
            real |= torch.isin(token, ends) & (given <= position)
            new = token[:, None]
            written = torch.cat([written, new], 1)
    return written


def _own_starts(text: TeacherText, rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The starts of generated rows, [rows, length], and how many tokens of each are given: those of `rows`, or, where
    it is known where answers begin, the text before and after random ones of these."""
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


def write_teacher_outputs(
    model: PreTrainedModel,
    text: TeacherText,
    folder: TeacherFolder,
    budget: Budget,
    seed: int,
    on_chunk: Callable[[float, int], None],
    compile_forward: bool = True,
) -> None:
    """Add chunks to the folder until the budget (in seconds, or in chunks) is spent; at least two.

    `on_chunk(fraction of the budget, chunks)` is called after each. Chunk c depends on the seed and c alone. Logits are
    those of the model's own forward, with what it does after its head. Raises NotSaved on a full disk.
    """
    device = next(model.parameters()).device
    rows = TokenRows(text.corpus, text.chunk_rows, text.row_tokens, seed)
    forward = compiled(model) if compile_forward else model
    dtype = token_dtype(text.vocabulary)
    seconds = folder.seconds()
    while budget.spent(seconds, len(folder)) < 1 or len(folder) < 2:
        started = time.monotonic()
        chunk = len(folder)
        inputs, labels = rows.batch(chunk)
        tokens = torch.cat([inputs, labels[:, -1:]], 1)
        own = chunk % OWN_TEXT_EVERY == 1
        if own:
            rng = np.random.default_rng((seed, chunk))
            starts, given = (torch.from_numpy(each).to(device) for each in _own_starts(text, tokens.numpy(), rng))
            tokens = write_own_text(model, starts, given, text, seed * 1_000_003 + chunk)
        ids, log_probs = _largest(forward, tokens[:, :-1].to(device), text.vocabulary)
        took = time.monotonic() - started
        folder.append(tokens.cpu().numpy().astype(dtype), ids.astype(dtype), log_probs, own, took)
        seconds += took
        on_chunk(budget.spent(seconds, len(folder)), len(folder))


@torch.inference_mode()
def rows_within(model: PreTrainedModel, text: TeacherText, seconds: float) -> int:
    """How many rows of own text the model writes in about so many seconds, by the time of one step of each number:
    `text.chunk_rows`, or its half, quarter and so on."""
    device = next(model.parameters()).device
    rows, prompt = text.chunk_rows, torch.from_numpy(text.corpus[: text.given[0]].astype(np.int64)).to(device)
    while rows > 1:
        stepped = SteppedText(model)
        with autocast(device):
            stepped.feed(prompt.expand(rows, -1))
            started = time.monotonic()
            stepped.feed(prompt[-1:].expand(rows, -1)).sum().item()  # waits for a GPU
        if (time.monotonic() - started) * text.row_tokens <= seconds:
            break
        rows //= 2
    return rows


@torch.inference_mode()
def _largest(forward: Callable[..., Any], tokens: Tensor, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities of the most likely next tokens at every position: [rows, positions, K] each."""
    rows = max(1, min(FORWARD_ROWS, FORWARD_LOGITS // (tokens.shape[1] * vocabulary)))
    ids, log_probs = [], []
    for part in tokens.split(rows):
        with autocast(tokens.device):
            scores = forward(part, use_cache=False).logits[..., :vocabulary].float()
        kept = scores.topk(min(KEPT, vocabulary), dim=-1)
        ids.append(kept.indices.cpu().numpy())
        log_probs.append((kept.values - scores.logsumexp(-1, keepdim=True)).half().cpu().numpy())
    return np.concatenate(ids), np.concatenate(log_probs)
