"""Training examples of an acceptance head: a target's answers, and a drafter's candidates at every position of them.

The target draws each token with Gumbel noise, and the drafter orders its candidates by the same noise, as when they
serve (docs/design/noise.md#shared-noise). Further draws of the noise at the same positions give more labels: all are
exact, whatever top-k, top-p and temperature are, since both sides use the functions that serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from tree_kernels.acceptance_head import row_law
from tree_kernels.warp import Warp
from tree_kernels.warp.reference import tokens_of

from drafter_service.confidence import CANDIDATES
from drafter_service.models import DrafterModel
from drafter_service.plan import EMPTY_TEXT, Chains
from drafter_service.runner import candidates_of
from drafter_service.training.heads import AcceptanceRows
from drafter_service.training.saving import replacing
from drafter_service.training.stepping import SteppedText

FEEDS = ("text", "mixed")
"""Feeds: the tokens that the drafter has consumed before a row. text: only the target's tokens, as on the rows of a
tree that the text reaches. mixed: SpecDec++'s token mixing, in which drafted tokens replace some of the target's."""
TEXT, MIXED = FEEDS
FROM_TARGET = 0.15
"""r: share of a mixture's tokens that are the target's own; the others are drafted and have losses."""


@dataclass(frozen=True, slots=True)
class ExampleLaw:
    """Parameters by which examples are drawn."""

    warps: tuple[Warp, ...]  # the rows of a chunk are divided among the warps
    draws: int = 4  # draws of the noise at each position; one at temperature 0
    feed: str = TEXT  # one of FEEDS
    from_target: float = FROM_TARGET


@dataclass(frozen=True, slots=True)
class Mixture:
    """A drafted text, simulated from the target's tokens and the drafter's first candidates. Tensors are
    [rows, positions]."""

    drafted: Tensor  # bool: True if the token at the position was drafted, and has a loss
    depth: Tensor  # int64: number of drafted tokens since the last that was the target's or was rejected
    fed: Tensor  # int64: the token that the drafter consumes at the position if the feed is MIXED


def mixed(target: Tensor, guesses: Tensor, from_target: float, generator: torch.Generator) -> Mixture:
    """Token mixing: each position takes the guess with probability 1 - from_target, else the target's token.

    target, guesses [rows, positions] int64
    """
    rows, positions = target.shape
    drafted = torch.rand(rows, positions, generator=generator) >= from_target
    accepted, depth = drafted & (guesses == target), torch.zeros_like(target)
    for position in range(1, positions):
        depth[:, position] = torch.where(accepted[:, position - 1], depth[:, position - 1] + 1, 0)
    return Mixture(drafted, depth, torch.where(drafted, guesses, target))


@torch.inference_mode()
def hidden_rows(drafter: DrafterModel, texts: Tensor) -> Tensor:
    """Hidden rows [rows, tokens, d] after each token of texts [rows, tokens] of one length."""
    rows, length = texts.shape
    none, own = np.zeros(rows, np.int64), np.arange(1, 1 + rows)
    chains = Chains(texts.numpy(), np.full(rows, length), none, np.full(rows, EMPTY_TEXT), own, none[:0])
    return drafter.memory(1 + rows, 1).chain(chains)


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target that answers in examples."""

    model: PreTrainedModel
    vocabulary: int  # bound of the tokenizer's ids
    end_ids: frozenset[int]


@torch.inference_mode()
def write_answers(teacher: Teacher, prompts: Tensor, length: int, law: ExampleLaw, seed: int) -> tuple[Tensor, Tensor]:
    """Generate answers to prompts [rows, tokens] int64.

    Returns texts [rows, tokens + length], and the target's token by every draw of the noise [rows, length, draws]. The
    text has the token of the first draw.
    """
    device = next(teacher.model.parameters()).device
    stepped, new, written, drawn = SteppedText(teacher.model), prompts, [prompts], list[Tensor]()
    for position in range(length):
        logits = stepped.feed(new.to(device))[:, : teacher.vocabulary].cpu()
        tokens = torch.stack(
            [
                torch.cat([tokens_of(logits[part], warp, each) for part, warp, each in parts])
                for parts in _noise(law, len(prompts), position, teacher.vocabulary, seed)
            ],
            1,
        )
        drawn.append(tokens)
        new = tokens[:, :1]
        written.append(new)
    return torch.cat(written, 1), torch.stack(drawn, 1)


Part = tuple[slice, Warp, Tensor | None]
"""Rows with one warp, the warp, and the rows' noise; None at temperature 0."""


def _noise(law: ExampleLaw, rows: int, position: int, vocabulary: int, seed: int) -> list[list[Part]]:
    """Noise at a position of the answer: for every draw, one part per warp."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % (1 << 62))
    shares = np.array_split(np.arange(rows), len(law.warps))
    found: list[list[Part]] = []
    for _ in range(law.draws):
        noise = -torch.empty(rows, vocabulary).exponential_(generator=generator).log_()
        parts: list[Part] = []
        for share, warp in zip(shares, law.warps, strict=True):
            part = slice(int(share[0]), int(share[-1]) + 1) if len(share) else slice(0, 0)
            parts.append((part, warp, None if warp.greedy else noise[part]))
        found.append(parts)
    return found


@torch.inference_mode()
def examples_of(
    drafter: DrafterModel, texts: Tensor, drawn: Tensor, law: ExampleLaw, teacher: Teacher, seed: int
) -> AcceptanceRows:
    """A drafter's rows on a target's answers; rows after the first end of text are left out.

    texts, drawn: results of `write_answers` with the same law and seed
    """
    length, first = drawn.shape[1], texts.shape[1] - drawn.shape[1]
    known = min(teacher.vocabulary, drafter.vocabulary)
    ranked = _every_position(drafter, texts, length, law, known, teacher.vocabulary, seed)
    guesses = torch.stack([each.ids[0][:, 0] for each in ranked], 1)  # candidates of the draw that the text has
    mixture = mixed(texts[:, first:], guesses, law.from_target, torch.Generator().manual_seed(seed))
    if law.feed == MIXED:
        fed = torch.cat([texts[:, :first], mixture.fed], 1)
        ranked = _every_position(drafter, fed, length, law, known, teacher.vocabulary, seed)
    temperature, counted = _temperatures(law, len(texts)), _before_the_end(texts[:, first:], teacher.end_ids)
    found: list[AcceptanceRows] = []
    for at, each in enumerate(ranked):
        for draw, (ids, scores) in enumerate(zip(each.ids, each.scores, strict=True)):
            of_law = row_law(each.logits, ids[:, 0], temperature)
            match = ids == drawn[:, at, draw, None]
            rows = AcceptanceRows(
                hidden=each.normed,
                first=ids[:, 0],
                scores=scores,
                entropy=of_law.entropy,
                log_prob=of_law.log_prob,
                temperature=temperature,
                depth=mixture.depth[:, at],
                rank=torch.where(match.any(1), match.int().argmax(1), CANDIDATES),
                drafted=mixture.drafted[:, at],
            )
            found.append(rows[counted[:, at] & ((temperature > 0) | (draw == 0))])
    return AcceptanceRows.joined(found)


class _Position(NamedTuple):
    """A drafter's outputs at one position of every text."""

    normed: Tensor  # [rows, d] input of the drafter's head
    logits: Tensor  # [rows, known]
    ids: list[Tensor]  # [draws] of [rows, K] candidates
    scores: list[Tensor]  # [draws] of [rows, K] scores of the candidates


def _every_position(
    drafter: DrafterModel, texts: Tensor, length: int, law: ExampleLaw, known: int, vocabulary: int, seed: int
) -> list[_Position]:
    """The drafter's outputs at the last `length` positions of texts, each after the text before the position.

    known: bound of the ids that may be guessed   vocabulary: the target's, for which noise is drawn
    """
    hidden, found = hidden_rows(drafter, texts[:, :-1])[:, -length:], list[_Position]()
    for at in range(length):
        logits, ids, scores = drafter.logits(hidden[:, at])[:, :known].cpu(), list[Tensor](), list[Tensor]()
        for parts in _noise(law, len(logits), at, vocabulary, seed):
            ranked = [
                candidates_of(logits[part], warp, None if noise is None else noise[:, :known], min(CANDIDATES, known))
                for part, warp, noise in parts
            ]
            ids.append(torch.cat([each for each, _ in ranked]))
            scores.append(torch.cat([each for _, each in ranked]))
        found.append(_Position(drafter.normed(hidden[:, at]).cpu(), logits, ids, scores))
    return found


def _temperatures(law: ExampleLaw, rows: int) -> Tensor:
    shares = zip(np.array_split(np.arange(rows), len(law.warps)), law.warps, strict=True)
    return torch.cat([torch.full((len(share),), warp.temperature) for share, warp in shares])


def _before_the_end(answers: Tensor, end_ids: frozenset[int]) -> Tensor:
    """True at positions before which the answer has no end of text, [rows, positions]."""
    ends = torch.isin(answers, torch.tensor(sorted(end_ids), dtype=torch.int64))
    return (ends.cumsum(1) - ends.long()) == 0


class ExampleFolder:
    """A folder of chunks of rows, `00000.npz` and so on, each whole or absent, with the seconds that it took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._files())

    def append(self, rows: AcceptanceRows, seconds: float) -> None:
        """Add a chunk. Raises NotSaved on a full disk."""
        arrays = {field.name: getattr(rows, field.name).numpy() for field in fields(AcceptanceRows)}
        arrays["hidden"] = arrays["hidden"].astype(np.float16)
        with replacing(self.folder / f"{len(self):05d}.npz") as partial, partial.open("wb") as stream:
            np.savez(stream, seconds=np.float64(seconds), **arrays)

    def seconds(self) -> float:
        found = 0.0
        for file in self._files():
            with np.load(file) as arrays:
                found += float(arrays["seconds"])
        return found

    def read(self, chunks: slice = slice(None)) -> AcceptanceRows:
        """Read the rows of these chunks."""
        parts = []
        for file in self._files()[chunks]:
            with np.load(file) as arrays:
                parts.append(
                    AcceptanceRows(*(torch.from_numpy(arrays[field.name]) for field in fields(AcceptanceRows)))
                )
        return AcceptanceRows.joined(parts)

    def _files(self) -> Sequence[Path]:
        return sorted(path for path in self.folder.glob("*.npz") if path.stem.isdigit())
