"""What a drafter's training measured of its guesses, as a file in its checkpoint: commands and policies read it before
anything was drafted here."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from dendro.errors import BadRequest
from dendro.shapes import LevelShape, NodeShape, TreeShape
from dendro.tree import RANKED
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.config import Config
from cluster.policies.costs import CLASS_TEMPERATURES
from cluster.policies.prior import DEPTHS as PRIOR_DEPTHS
from cluster.policies.prior import KEPT_ROUNDS, RankCounts
from cluster.policies.sequoia import SURPLUS, expected_tokens

log = logging.getLogger("dendro.router")

FIGURES = "acceptance.json"
"""The file's name in a drafter's checkpoint folder."""
MOST_BYTES = 1 << 20
DEPTHS = 8
BACK_OFF = 32.0
"""Weight, in rounds, of one depth's table as the prior of the next: few rounds reach deep rows."""
FloatTable = npt.NDArray[np.float64]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Chance = Annotated[float, Field(ge=0, le=1)]


class RankFigures(BaseModel):
    """The ranks that a drafter gave to a target's tokens at one temperature, in the target's own answers."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    temperature: float = Field(ge=0, le=1000)
    ranks: tuple[Count, ...] = Field(min_length=RANKED + 1, max_length=RANKED + 1)
    """Tokens by rank, 0 for the first choice; the last: all others."""
    accepted: tuple[tuple[Chance, ...], ...] = Field(min_length=1, max_length=DEPTHS)
    """a[d][j]: how often the j-th candidate was the target's token, where the d tokens before it were candidates."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(len(row) != RANKED or sum(row) > 1 + SURPLUS for row in self.accepted):
            raise ValueError(f"accepted: each depth has {RANKED} chances, together at most 1")
        return self

    def emitted(self, shape: TreeShape) -> float | None:
        """Tokens of a round with a tree of fixed form; None for others."""
        if not isinstance(shape, LevelShape | NodeShape) or shape.width > RANKED:
            return None
        return expected_tokens(shape, self.accepted)

    @property
    def first(self) -> float:
        """Share of the target's tokens that were the drafter's first candidate."""
        return self.ranks[0] / max(sum(self.ranks), 1)


class DrafterFigures(BaseModel):
    """A drafter's figures for the target that it was trained for."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    target: str = Field(max_length=1000)
    by_temperature: tuple[RankFigures, ...] = Field(min_length=1, max_length=64)

    def at(self, temperature: float) -> RankFigures:
        """Figures of the temperature nearest to the given one."""
        return min(self.by_temperature, key=lambda each: abs(each.temperature - temperature))


def figures_of(target: str, traces: Mapping[float, Sequence[Sequence[int]]]) -> DrafterFigures:
    """Count a drafter's figures for a target. traces: by temperature, the ranks of each answer's tokens"""
    found = []
    for temperature, answers in traces.items():
        flat = np.minimum([rank for answer in answers for rank in answer], RANKED)
        # Rounded to the nearest, the chances of siblings might exceed 1 together.
        table = np.floor(1e6 * accepted(answers, DEPTHS, RANKED)) / 1e6
        found.append(
            RankFigures(
                temperature=temperature,
                ranks=tuple(np.bincount(flat, minlength=RANKED + 1).tolist()),
                accepted=tuple(map(tuple, table.tolist())),
            )
        )
    return DrafterFigures(target=target, by_temperature=tuple(found))


def rank_counts(card: DrafterFigures) -> dict[str, RankCounts]:
    """The counts with which a drafter's figures begin the prior of requests, by class of temperatures."""
    found = {}
    for kind, temperature in CLASS_TEMPERATURES.items():
        accepted = np.array(card.at(temperature).accepted)
        deeper = accepted[np.minimum(np.arange(PRIOR_DEPTHS), len(accepted) - 1)]
        found[kind] = KEPT_ROUNDS * np.column_stack([deeper, np.maximum(1 - deeper.sum(1), 0)])
    return found


def check_writable(folder: Path) -> None:
    """Raise BadRequest for a checkpoint into which `write_figures` cannot write."""
    file = folder / FIGURES
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise BadRequest("figures", f"{file} cannot be written")


def write_figures(folder: Path, figures: DrafterFigures) -> None:
    (folder / FIGURES).write_text(figures.model_dump_json(indent=1) + "\n")


def read_figures(folder: Path) -> DrafterFigures | None:
    """None where a checkpoint has none. Raises BadRequest for a file that cannot be read."""
    file = folder / FIGURES
    try:
        with file.open("rb") as stream:
            text = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRequest(FIGURES, f"cannot be read: {error.strerror}") from error
    if len(text) > MOST_BYTES:
        raise BadRequest(FIGURES, f"is longer than {MOST_BYTES:,} bytes")
    try:
        return DrafterFigures.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadRequest(FIGURES, f"{place}: {first['msg']}" if place else first["msg"]) from error


def figures_of_drafters(config: Config) -> dict[str, DrafterFigures]:
    """The figures of a configuration's drafters that have some. A file that cannot be read is logged and ignored."""
    found = {}
    for name, drafter in config.drafters.items():
        try:
            figures = read_figures(drafter.checkpoint)
        except BadRequest as error:
            log.warning("drafters.%s: %s", name, error)
            continue
        if figures is not None:
            found[name] = figures
    return found


def accepted(traces: Sequence[Sequence[int]], depth: int, children: int) -> FloatTable:
    """a[d][j], [depth, children]: the frequency with which the j-th candidate was the target's token, given that the d
    tokens before it were among the candidates. Every position of a text counts as a root.

    Each depth's frequencies start from those of the depth above, with the weight of BACK_OFF rounds.
    """
    counts, reached = np.zeros((depth, children)), np.zeros(depth)
    for trace in traces:
        for start in range(len(trace)):
            for below, rank in enumerate(trace[start : start + depth]):
                reached[below] += 1
                if rank >= children:
                    break
                counts[below, rank] += 1
    if not reached[0]:
        raise ValueError("accepted: no ranks")
    table = np.empty_like(counts)
    table[0] = counts[0] / reached[0]
    for below in range(1, depth):
        table[below] = (counts[below] + BACK_OFF * table[below - 1]) / (reached[below] + BACK_OFF)
    return table
