"""The recurrence along paths in PyTorch: matrix products for Mamba-2, token by token for Mamba-1. What a CPU runs.

A row's state is a checkpoint of its text, followed by the inputs in its `columns`, oldest first. Slot 0 holds zeros: a
column that is 0 has dt = 0, decays nothing and adds nothing.

    H heads of P channels, G groups of heads that share B and C, N state width. Mamba-1: H channels, P = 1, G = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

ROW_MULTIPLE = 8
"""Rows of a product are padded to a multiple of this: fewer, or others, take different paths through the library."""
COLUMN_MULTIPLE = 16
"""The same for the columns that a group of rows sees."""


class Inputs(NamedTuple):
    """What a layer keeps of every token, by slot; `x`, `B` after the convolution, `dt` after softplus and clamp."""

    x: Tensor  # [slots, H, P]
    B: Tensor  # [slots, G, N]
    dt: Tensor  # [slots, H] float32


@dataclass(frozen=True, slots=True)
class Fold:
    """A checkpoint moved on by one block of tokens."""

    source: int  # a slot of the states; -1 - f for what the step's fold f gives; 0 for the zero state
    columns: Tensor  # [block] int64 slots of the block's inputs, in order; all are there
    target: int  # the slot of the states that keeps it; -1: this step alone needs it


class Wave(NamedTuple):
    """The tokens at one distance from their checkpoints."""

    columns: Tensor  # [n] int64 their slots
    parents: Tensor  # [n] int64 their places in the wave before, or among the sources
    rows: Tensor  # [m] int64 the step's rows whose paths end here
    ends: Tensor  # [m] int64 and where: places in this wave


class Waves(NamedTuple):
    """Checkpoints, and what comes after them."""

    sources: tuple[int, ...]  # as a fold's
    waves: tuple[Wave, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Groups of rows, each of one text and one checkpoint, in one shape: S groups of T rows that see U columns."""

    sources: tuple[int, ...]  # [S] as a fold's
    rows: Tensor  # [S * T] int64 rows of the step; those that only pad repeat one
    columns: Tensor  # [S * U] int64 slots of all that the group's rows see, in order of position; 0 where there is none
    paths: Tensor  # [S, 1, T, K] int64 slots of each row's own, the newest first
    places: Tensor  # [S, 1, T, K] int64 where each of these is among its group's columns; the last, 0, for none
    found: Tensor  # [n] int64 the rows that count, as places in [S * T]
    targets: Tensor  # [n] int64 and their rows of the step


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """The rows of a step and what they see. The same for all layers; plain arrays, made into tensors when wanted."""

    columns: Ints  # [rows, K] slots of each row's inputs since its checkpoint, in order of position; 0 where none is
    starts: Ints  # [rows] the position of its first column
    sources: Ints  # [rows] the checkpoint, as a fold's source
    texts: Ints  # [rows] rows of one text have one number here
    folds: Sequence[Fold]
    device: torch.device
    _made: dict[str, Any] = field(default_factory=dict)

    def segments(self) -> tuple[Segments, ...]:
        """The rows in groups, for matrix products; a row that sees nothing is in none."""
        if "segments" not in self._made:
            self._made["segments"] = _segments(self)
        made: tuple[Segments, ...] = self._made["segments"]
        return made

    def waves(self) -> Waves:
        """The paths as a forest, each token of it once."""
        if "waves" not in self._made:
            self._made["waves"] = _forest(self)
        made: Waves = self._made["waves"]
        return made

    def tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def tree_scan(
    inputs: Inputs, states: Tensor, folded: Sequence[Tensor], paths: Paths, x: Tensor, C: Tensor, A: Tensor, D: Tensor
) -> Tensor:
    """Mamba-2 of every row along its own path (ALGORITHMS 6.1, and 6.4 for the rule of checkpoints).

    states [slots, H, P, N]   folded: what `fold` gave for the step's folds   x [rows, H, P], C [rows, G, N] the rows'
    own   A, D [H] float32; returns y [rows, H, P] float32
    """
    heads, width = x.shape[1:]
    groups, size = C.shape[1:]
    members = heads // groups
    y = torch.zeros(x.shape, device=x.device)
    by_head = torch.arange(heads, device=x.device)[:, None, None]
    for part in paths.segments():
        count, _, rows, length = part.paths.shape
        dt = inputs.dt.view(-1).index_select(0, (part.paths * heads + by_head).view(-1))
        dt = dt.view(count, heads, rows, length)
        total, since = _decays(dt * A[:, None, None])
        queries = C.index_select(0, part.rows).float().view(count, rows, groups, size).transpose(1, 2)
        B = inputs.B.index_select(0, part.columns).view(count, -1, groups, size).permute(0, 2, 3, 1)
        seen = part.columns.numel() // count
        alike = torch.bmm(queries.reshape(count * groups, rows, size), B.float().reshape(count * groups, size, seen))
        alike = alike.view(count, groups, rows, seen).gather(3, part.places.expand(-1, groups, -1, -1))
        weight = since.exp_().mul_(dt).view(count, groups, members, rows, length).mul_(alike[:, :, None])
        # Zeros where a column is not on a row's path: they change no bit of a sum that runs over columns in order.
        spread = dt.new_zeros(count, heads, rows, seen)
        places = part.places.expand(-1, heads, -1, -1)
        spread.scatter_(3, places, weight.view(count, heads, rows, length))
        values = inputs.x.index_select(0, part.columns).view(count, seen, heads, width).transpose(1, 2)
        values = values.to(torch.float32, memory_format=torch.contiguous_format)
        out = torch.bmm(spread.view(-1, rows, seen), values.reshape(-1, seen, width)).view(count, heads, rows, width)
        before = torch.zeros_like(out) if any(part.sources) else None
        for place, source in enumerate(part.sources):
            if before is not None and source:
                state = _source(source, states, folded).view(groups, members * width, size)
                read = torch.bmm(queries[place], state.transpose(1, 2))
                before[place] = read.view(groups, rows, members, width).transpose(1, 2).reshape(heads, rows, width)
        if before is not None:
            out.addcmul_(before, total.exp())
        y.index_copy_(0, part.targets, out.transpose(1, 2).reshape(-1, heads, width).index_select(0, part.found))
    return y.addcmul_(x.float(), D[:, None])


def fold(inputs: Inputs, states: Tensor, folds: Sequence[Fold], A: Tensor) -> list[Tensor]:
    """The state after each fold's block, [H, P, N]; a fold may begin where an earlier one ended."""
    heads, width = inputs.x.shape[1:]
    groups, size = inputs.B.shape[1:]
    done: list[Tensor] = []
    for each in folds:
        columns = each.columns.flip(0)
        dt = inputs.dt.index_select(0, columns)  # [block, H]
        total, since = _decays((dt * A).t().contiguous())
        weight = since.exp_().t() * dt
        x = inputs.x.index_select(0, columns).float().mul_(weight[..., None])
        B = inputs.B.index_select(0, columns).float()
        x = x.view(-1, groups, heads // groups * width).permute(1, 2, 0)  # [G, channels, block]
        after = torch.bmm(x, B.transpose(0, 1)).view(heads, width, size)
        if each.source:
            after.addcmul_(_source(each.source, states, done), total.exp()[:, :, None])
        done.append(after)
    return done


def tree_scan_in_order(
    inputs: Inputs, states: Tensor, folded: Sequence[Tensor], paths: Paths, x: Tensor, C: Tensor, A: Tensor, D: Tensor
) -> Tensor:
    """Mamba-1 of every row along its own path: the recurrence, one token after another (ALGORITHMS 6.7).

    The same as `tree_scan`, but A [H, N]. A path that several rows have in common is walked once.
    """
    plan = paths.waves()
    y = torch.zeros(x.shape, device=x.device)
    C = C.float().transpose(1, 2)  # [rows, N, 1]
    zero = torch.zeros_like(states[0])
    before = [_source(source, states, folded) if source else zero for source in plan.sources]
    state = torch.stack(before)
    for wave in plan.waves:
        state = _step(inputs, state.index_select(0, wave.parents), wave.columns, A)
        if len(wave.rows):
            ends = state.index_select(0, wave.ends).flatten(1, 2)
            y[wave.rows] = torch.bmm(ends, C.index_select(0, wave.rows)).view(len(wave.rows), *x.shape[1:])
    return y.addcmul_(x.float(), D[:, None])


def fold_in_order(inputs: Inputs, states: Tensor, folds: Sequence[Fold], A: Tensor) -> list[Tensor]:
    """`fold` for Mamba-1; A [H, N]."""
    done: list[Tensor] = []
    for each in folds:
        state = states.new_zeros(1, *states.shape[1:]) if not each.source else _source(each.source, states, done)[None]
        for column in each.columns.split(1):
            state = _step(inputs, state, column, A)
        done.append(state[0])
    return done


def _decays(a: Tensor) -> tuple[Tensor, Tensor]:
    """a [..., K] log decays of tokens, the newest first, to that of all [..., 1] and of those after each [..., K].

    Sums of numbers of one sign: differences of sums from the beginning would lose what the far end of a path is worth.
    """
    total = a.cumsum(-1)
    since = torch.zeros_like(total)
    since[..., 1:] = total[..., :-1]
    return total[..., -1:], since


def _source(source: int, states: Tensor, folded: Sequence[Tensor]) -> Tensor:
    return states[source] if source >= 0 else folded[-1 - source]


def _step(inputs: Inputs, state: Tensor, columns: Tensor, A: Tensor) -> Tensor:
    """state [n, H, P, N] moved on by one token each."""
    dt = inputs.dt.index_select(0, columns)[..., None]  # [n, H, 1]
    decay = (dt * A).exp_()[:, :, None]
    drive = inputs.x.index_select(0, columns).float().mul_(dt)[..., None] * inputs.B.index_select(0, columns)[:, None]
    return drive.addcmul_(state, decay)


def _segments(paths: Paths) -> tuple[Segments, ...]:
    columns, length = paths.columns, paths.columns.shape[1]
    seeing = np.flatnonzero(columns.any(1))
    keys = np.stack([paths.texts[seeing], paths.sources[seeing]], 1)
    _, groups = np.unique(keys, axis=0, return_inverse=True)
    most = int(columns.max(initial=0)) + 1
    by_shape: dict[tuple[int, int], list[tuple[Ints, Ints, Ints]]] = {}
    for group in range(int(groups.max(initial=-1)) + 1):
        rows = seeing[groups.reshape(-1) == group]
        its = columns[rows]
        # By position; of siblings, which no path has both of, by slot.
        order = (paths.starts[rows, None] + np.arange(length) + length) * most + its
        union = np.unique(order[its > 0])
        shape = (_up(len(rows), ROW_MULTIPLE), _up(len(union) + 1, COLUMN_MULTIPLE))
        places = np.where(its > 0, np.searchsorted(union, order), shape[1] - 1)
        by_shape.setdefault(shape, []).append((rows, union % most, places))
    return tuple(_segments_of(paths, shape, members) for shape, members in by_shape.items())


def _segments_of(paths: Paths, shape: tuple[int, int], members: Sequence[tuple[Ints, Ints, Ints]]) -> Segments:
    (rows, seen), length = shape, paths.columns.shape[1]
    taken = np.zeros((len(members), rows), np.int64)
    columns = np.zeros((len(members), seen), np.int64)
    own = np.zeros((len(members), 1, rows, length), np.int64)
    places = np.full((len(members), 1, rows, length), seen - 1, np.int64)
    for index, (its, union, among) in enumerate(members):
        taken[index] = its[0]
        taken[index, : len(its)] = its
        columns[index, : len(union)] = union
        own[index, 0, : len(its)] = paths.columns[its, ::-1]
        places[index, 0, : len(its)] = among[:, ::-1]
    return Segments(
        sources=tuple(int(paths.sources[its[0]]) for its, _, _ in members),
        rows=paths.tensor(taken.reshape(-1)),
        columns=paths.tensor(columns.reshape(-1)),
        paths=paths.tensor(own),
        places=paths.tensor(places),
        found=paths.tensor(
            np.concatenate([index * rows + np.arange(len(its)) for index, (its, _, _) in enumerate(members)])
        ),
        targets=paths.tensor(np.concatenate([its for its, _, _ in members])),
    )


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _forest(paths: Paths) -> Waves:
    slots = paths.columns
    sources, begins = np.unique(paths.sources, return_inverse=True)
    ordered = np.take_along_axis(slots, np.argsort(slots == 0, axis=1, kind="stable"), 1)
    lengths = (slots != 0).sum(1)
    most = int(slots.max(initial=0)) + 1
    waves, nodes = [], begins.reshape(-1)  # nodes: of each row, the place of its token in the wave before
    begins = nodes
    for distance in range(int(lengths.max(initial=0))):
        active = np.flatnonzero(lengths > distance)
        # A slot is on one path of one text, but that path may be walked from two checkpoints.
        found, first, places = np.unique(
            begins[active] * most + ordered[active, distance], return_index=True, return_inverse=True
        )
        parents = nodes[active][first]
        nodes = nodes.copy()
        nodes[active] = places.reshape(-1)
        ending = np.flatnonzero(lengths == distance + 1)
        parts = (found % most, parents, ending, nodes[ending])
        waves.append(Wave(*map(paths.tensor, parts)))
    return Waves(tuple(sources.tolist()), tuple(waves))
