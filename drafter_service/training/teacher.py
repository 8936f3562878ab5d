"""The teacher's outputs, computed once and read by every student.

Running the teacher inside a student's loop would cost four times the student. Instead its largest log-probabilities are
written to disk, one chunk of rows at a time. Every fourth chunk is text that the teacher generated after a few real
tokens, because a draft is accepted where the drafter agrees with the target on the target's own text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from drafter_service.training.loop import Budget, autocast, compiled
from drafter_service.training.losses import TeacherRows
from drafter_service.training.rows import TokenRows

KEPT = 32  # log-probabilities per position
CHUNK_ROWS = 256
ROW_TOKENS = 256
OWN_TEXT_STARTS = (16, 128)  # fewest and most real tokens at the start of a generated row
OWN_TEXT_TEMPERATURES = (0.0, 0.7, 1.0)
OWN_TEXT_EVERY = 4  # chunks; a generated chunk takes eight times as long as a real one
FORWARD_ROWS = 16


class TeacherFolder:
    """Chunks of rows with the teacher's outputs: `00000.npz` and so on, each whole or absent.

    A chunk has tokens [rows, length + 1] uint16 and, for the first `length` positions, ids [rows, length, K] uint16 and
    log_probs [rows, length, K] float16 of the next token; whether the teacher generated it (`own`); and the seconds
    that it took, which a resumed run counts as spent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._paths())

    def seconds(self) -> float:
        return float(np.sum(self._column("seconds")))

    def own_share(self) -> float:
        """The share of the chunks that the teacher generated."""
        return float(np.mean(self._column("own")))

    def append(self, tokens: np.ndarray, ids: np.ndarray, log_probs: np.ndarray, own: bool, seconds: float) -> None:
        partial = self.folder / "partial.npz"
        np.savez(partial, tokens=tokens, ids=ids, log_probs=log_probs, own=own, seconds=seconds)
        os.replace(partial, self.folder / f"{len(self):05d}.npz")

    def read(self) -> TeacherText:
        if not len(self):
            raise ValueError(f"no teacher outputs in {self.folder}")
        tokens, ids, log_probs = (np.concatenate(self._column(name)) for name in ("tokens", "ids", "log_probs"))
        return TeacherText(tokens, ids, log_probs)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.npz"))

    def _column(self, name: str) -> list[np.ndarray]:
        """One array of every chunk, in order."""
        arrays = []
        for path in self._paths():
            with np.load(path) as chunk:
                arrays.append(chunk[name])
        return arrays


class TeacherText:
    """All rows of a teacher folder, in memory (130 bytes a token). Their order depends on the seed and the epoch."""

    def __init__(self, tokens: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> None:
        self.tokens, self.ids, self.log_probs = tokens, ids, log_probs

    def batch(self, step: int, rows: int, seed: int) -> tuple[Tensor, Tensor, TeacherRows]:
        """Inputs and labels [rows, length] int64 and the teacher's outputs for the labels."""
        steps_per_epoch = len(self.tokens) // rows
        epoch, place = divmod(step, steps_per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(len(self.tokens))
        chosen = np.sort(order[place * rows : (place + 1) * rows])
        tokens = torch.from_numpy(self.tokens[chosen].astype(np.int64))
        teacher = TeacherRows(
            torch.from_numpy(self.ids[chosen].astype(np.int64)), torch.from_numpy(self.log_probs[chosen])
        )
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), teacher


@torch.inference_mode()
def write_own_text(model: PreTrainedModel, starts: Tensor, length: int, seed: int) -> Tensor:
    """Rows of `length` tokens that the model generates, each after a random number of tokens of its start.

    starts [rows, at least OWN_TEXT_STARTS[1]] int64   returns [rows, length] int64
    Rows cycle through OWN_TEXT_TEMPERATURES; the noise is Gumbel noise from `seed`.
    """
    device = starts.device
    generator = torch.Generator(device).manual_seed(seed)
    rows = len(starts)
    given = torch.randint(OWN_TEXT_STARTS[0], OWN_TEXT_STARTS[1] + 1, (rows,), generator=generator, device=device)
    choices = torch.tensor(OWN_TEXT_TEMPERATURES, device=device)
    temperature = choices[torch.arange(rows, device=device) % len(choices)][:, None]  # [rows, 1]
    text = starts[:, : OWN_TEXT_STARTS[0]]
    cache = DynamicCache(config=model.config)
    fed = 0
    with autocast(device):
        while text.shape[1] < length:
            logits = model(text[:, fed:], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
            fed = text.shape[1]
            noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
            token = (logits + temperature * noise).argmax(-1)  # the same as logits / temperature + noise
            if fed < OWN_TEXT_STARTS[1]:
                token = torch.where(given > fed, starts[:, fed], token)
            text = torch.cat([text, token[:, None]], 1)
    return text


def write_teacher_outputs(
    model: PreTrainedModel,
    corpus: np.ndarray,
    folder: TeacherFolder,
    budget: Budget,
    seed: int,
    on_chunk: Callable[[float, int], None],
) -> None:
    """Add chunks to the folder until the budget (in seconds, or in chunks) is spent; at least two.

    `on_chunk(fraction of the budget, chunks)` is called after each. Chunk c depends on the seed and c alone.
    """
    device = next(model.parameters()).device
    rows = TokenRows(corpus, CHUNK_ROWS, ROW_TOKENS, seed)
    forward = compiled(model.model)
    seconds = folder.seconds()
    while budget.spent(seconds, len(folder)) < 1 or len(folder) < 2:
        started = time.monotonic()
        chunk = len(folder)
        inputs, labels = rows.batch(chunk)
        tokens = torch.cat([inputs, labels[:, -1:]], 1).to(device)
        own = chunk % OWN_TEXT_EVERY == 1
        if own:
            tokens = write_own_text(model, tokens, ROW_TOKENS + 1, seed=seed * 1_000_003 + chunk)
        ids, log_probs = [], []
        for part in tokens[:, :-1].split(FORWARD_ROWS):
            with torch.inference_mode(), autocast(device):
                hidden = forward(part, use_cache=False).last_hidden_state
                scores = (hidden @ model.lm_head.weight.T).float()
            kept = scores.topk(KEPT, dim=-1)
            ids.append(kept.indices.to(torch.int32).cpu().numpy().astype(np.uint16))
            log_probs.append((kept.values - scores.logsumexp(-1, keepdim=True)).half().cpu().numpy())
        took = time.monotonic() - started
        text = tokens.cpu().numpy().astype(np.uint16)
        folder.append(text, np.concatenate(ids), np.concatenate(log_probs), own, took)
        seconds += took
        on_chunk(budget.spent(seconds, len(folder)), len(folder))
