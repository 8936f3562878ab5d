"""A step as plain arrays: rows of texts, their positions, the slots of the keys that each sees, and its own slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from dendro.errors import DendroError
from dendro.logprobs import TokenLogprobs
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE
from tree_kernels.tree_walk import Walk
from tree_layers.memory import pages_for

from verifier_service.recurrent import RecurrentRows, pack_recurrent
from verifier_service.walk import Draw, Echo

Ints = npt.NDArray[np.int64]
NO_ROWS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Far:
    """Rows [start, stop) of a plan, which belong to one text, and the text's pages with far keys of any of them."""

    start: int
    stop: int
    pages: tuple[int, ...]  # page numbers by position
    first: int  # index of the first of these pages in the text


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step. It can be sent to shards, or fill a graph's buffers."""

    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    slots: Ints  # [rows] slot to which the row's key and value are written: a scratch slot for a guess, else its home
    homes: Ints  # [rows] slot of the row's position in its text, to which an accepted guess is copied
    near: Ints  # [rows, 2 * near] slots of the keys at near * (p // near - 1) + column; 0 where there is none
    far: tuple[Far, ...]
    wanted: Ints  # [k] rows whose logits are needed
    draws: tuple[Draw, ...]
    recurrent: RecurrentRows | None = None  # the rows for mixers; None for a target without states
    echoes: tuple[Echo, ...] = ()

    @property
    def certain(self) -> npt.NDArray[np.bool_]:
        """True for rows that are not guesses, [rows]."""
        certain: npt.NDArray[np.bool_] = self.slots == self.homes
        return certain


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a plan."""

    walks: tuple[Walk | DendroError, ...]  # one per draw; an error ends its text alone
    forward_us: int  # time of the model's forward, attention included
    run_us: int  # time of all of the step's work in the model's thread
    cold: bool = False  # True if kernels were compiled or recorded: later steps of this shape take less time
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by draw: one per token of a walk
    echoed: tuple[tuple[TokenLogprobs, ...] | DendroError, ...] = ()  # one per echo; an error ends its text alone


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """One text's rows of a step; the fields are those of `StepPlan`."""

    tokens: Ints
    positions: Ints
    slots: Ints
    homes: Ints
    near: Ints
    pages: tuple[int, ...]  # pages with far keys of any of the rows
    first_page: int  # index of the first of these pages in the text
    recurrent: RecurrentRows | None = None


def first_near(positions: Ints, near: int) -> Ints:
    """Position of the first near column of rows at these positions; below 0 in the first block.

    >>> first_near(np.array([5, 16, 40]), near=16).tolist()
    [-16, 0, 16]
    """
    return near * (positions // near - 1)


def text_rows(
    ids: Sequence[int],
    committed: Ints,
    tree: DraftTree | None,
    pages: Sequence[int],
    scratch: int,
    near: int,
    window: int | None = None,
) -> TextRows:
    """Rows of one text in a step: committed ones at these positions, then those of a tree whose root is the text's last
    token.

    pages: the text's pages by position   scratch: first slot for keys of guesses, which are used in order; all other
    keys go to their homes   window: the widest sliding window; None if a layer sees all positions
    The keys that a row sees must be in place already, or belong to rows of the same step.
    """
    root = len(ids) - 1
    tokens = np.array([ids[position] for position in committed.tolist()], np.int64)
    positions, certain = committed, committed  # certain: the last position of a row's path that is not a guess
    trail = np.zeros((len(committed), 1), np.int64)  # column d: the slot of the row's guess at depth d
    if tree is not None:
        depths = tree.depths
        paths = np.where(tree.paths <= 0, 0, scratch - 1 + tree.paths)
        trail = np.concatenate([np.zeros((len(committed), paths.shape[1]), np.int64), paths])
        tokens = np.concatenate([tokens, tree.tokens])
        positions = np.concatenate([committed, root + depths])
        certain = np.concatenate([committed, np.full(tree.rows, root)])
    table = np.array(pages, np.int64)
    homes = table[positions // PAGE] * PAGE + positions % PAGE
    slots = homes.copy()
    guesses = positions > certain
    slots[guesses] = trail[guesses, (positions - certain)[guesses]]
    reach = max(int(first_near(positions, near).max()), 0)
    first_page = 0 if window is None else max(int(positions.min()) - window + 1, 0) // PAGE
    far = tuple(pages[first_page : pages_for(reach)])
    return TextRows(tokens, positions, slots, homes, _near(table, positions, certain, trail, near), far, first_page)


def root_rows(
    texts: Sequence[tuple[Sequence[int], Sequence[int]]], near: int, window: int | None = None
) -> list[TextRows]:
    """Rows of texts whose only row is the root, as `text_rows` returns them, computed for all texts at once: a call for
    each would take as long as a layer.

    texts: tokens and pages of each   near, window: see `text_rows`
    """
    roots = np.array([len(ids) - 1 for ids, _ in texts], np.int64)
    tokens = np.array([ids[-1] for ids, _ in texts], np.int64)
    first = first_near(roots, near)
    low = np.maximum(first, 0) // PAGE  # the index of the page with the first near key
    table = np.zeros((len(texts), 2 * near // PAGE + 2), np.int64)
    for row, (start, (_, pages)) in enumerate(zip(low.tolist(), texts, strict=True)):
        held = pages[start : start + table.shape[1]]
        table[row, : len(held)] = held
    keys = first[:, None] + np.arange(2 * near)
    seen = np.clip(keys, 0, roots[:, None])
    slots = np.take_along_axis(table, seen // PAGE - low[:, None], 1) * PAGE + seen % PAGE
    homes = np.take_along_axis(slots, (roots - first)[:, None], 1)[:, 0]
    slots[keys != seen] = 0
    first_pages = np.zeros_like(roots) if window is None else np.maximum(roots - window + 1, 0) // PAGE
    ends = -(-np.maximum(first, 0) // PAGE)
    parts = []
    for row, ((_, pages), begin, end) in enumerate(zip(texts, first_pages.tolist(), ends.tolist(), strict=True)):
        one = slice(row, row + 1)
        far = tuple(pages[begin:end])
        parts.append(TextRows(tokens[one], roots[one], homes[one], homes[one], slots[one], far, begin))
    return parts


def _near(table: Ints, positions: Ints, certain: Ints, trail: Ints, near: int) -> Ints:
    keys = first_near(positions, near)[:, None] + np.arange(2 * near)
    seen = np.clip(keys, 0, positions[:, None])  # clipped to valid positions; hidden columns become 0 below
    depth = seen - certain[:, None]
    guessed = depth > 0
    committed = np.where(guessed, 0, seen)
    slots: Ints = table[committed // PAGE] * PAGE + committed % PAGE
    rows = np.broadcast_to(np.arange(len(positions))[:, None], keys.shape)
    slots[guessed] = trail[rows[guessed], depth[guessed]]
    slots[(keys < 0) | (keys > positions[:, None])] = 0
    return slots


def pack(parts: Sequence[TextRows], wanted: Ints, draws: Sequence[Draw] = (), echoes: Sequence[Echo] = ()) -> StepPlan:
    """Join the rows of several texts in one step, in this order."""
    far, start = [], 0
    for part in parts:
        stop = start + len(part.tokens)
        if part.pages:
            far.append(Far(start, stop, part.pages, part.first_page))
        start = stop
    recurrent = [part.recurrent for part in parts if part.recurrent is not None]
    return StepPlan(
        tokens=np.concatenate([part.tokens for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        slots=np.concatenate([part.slots for part in parts]),
        homes=np.concatenate([part.homes for part in parts]),
        near=np.concatenate([part.near for part in parts]),
        far=tuple(far),
        wanted=wanted,
        draws=tuple(draws),
        echoes=tuple(echoes),
        recurrent=pack_recurrent(recurrent) if recurrent else None,
    )
