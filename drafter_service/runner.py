"""Runs the scheduler's plans on the model. Handles tensors, but no texts and no callers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack, unpack

import numpy as np
import torch
from dendro.errors import BadRequest
from dendro.grammars import Bits
from dendro.text import Sampling
from dendro.tree import IntArray
from torch import Tensor
from tree_kernels.acceptance_head.cpu import HeadCalls
from tree_kernels.noise import NoiseRows, NoiseTokens, prepare_kernel
from tree_kernels.ranking import Orders
from tree_kernels.row_softmax import prepare_softmax
from tree_kernels.warp import Warp, drafter_ranking
from tree_layers.graphs import CudaGraphs, Graphs
from tree_layers.launching import on_its_device

from drafter_service.acceptance_head import AcceptanceHead
from drafter_service.device_levels import CHAIN_NODES, LONGEST_CHAIN, DeviceLevels, RowOrder, layers_of
from drafter_service.device_trees import DeviceTrees
from drafter_service.mapped_noise import MappedNoise
from drafter_service.models import DrafterModel
from drafter_service.models.backbone import Backbone
from drafter_service.models.memory import FusedMemory
from drafter_service.plan import Chains, DraftOutcome, DraftPlan, Level, Levels, OneForward, TextFold
from drafter_service.recorded_levels import RecordableMemory, RecordedFolds, RecordedLevels

NOTHING = DraftOutcome(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32))


CHECKED_TOKENS = 8
"""Number of tokens whose logits are checked when a model is loaded."""

REMOVED = -1e4
"""Number added to the score of a token that the target does not draw. Finite, so that a guess of it has a
probability."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftLaw:
    """The order of a session's guesses: by logits / temperature plus the row of `added_to`.

    Logit bias and the removal of tokens are added like noise, so that any form of ranking applies them. A text at
    temperature 0 with a bias or removed tokens is ranked at temperature 1.
    """

    warp: Warp
    vocabulary: int  # guesses are below it, in the model's ids: the smaller of the drafter's and the target's
    noise: NoiseRows | MappedNoise | None  # None if the text shares no noise and has the target's ids
    shift: Tensor | None = None  # [vocabulary] float32 bias and removal; None: neither

    @classmethod
    def of(cls, sampling: Sampling, vocabulary: int, ids: IntArray | None = None) -> DraftLaw:
        """The law for a drafter with the target's tokenizer.

        ids [vocabulary]: target ids of the guessed tokens, ascending; None: 0, 1, ...
        """
        warp = Warp.of(sampling)
        shift = None
        if sampling.changes_logits:
            shift = shift_of(sampling, np.arange(vocabulary) if ids is None else ids)
        if not (warp.greedy or sampling.shares_noise):
            nothing = torch.zeros(vocabulary)  # scores at a temperature above 0 are ranked with something added
            return cls(Warp(sampling.temperature), vocabulary, None, nothing if shift is None else shift)
        noise = None
        if not warp.greedy:
            tokens = None if ids is None else NoiseTokens(ids)
            noise = NoiseRows(sampling.seed, vocabulary, sampling.sample_index, tokens)
        return cls(Warp(1.0) if warp.greedy and shift is not None else warp, vocabulary, noise, shift)

    @classmethod
    def mapped(cls, sampling: Sampling, noise_ids: IntArray) -> DraftLaw:
        """The law for a drafter with other ids than the target's.

        noise_ids: target id whose noise each guessed token gets, -1 for tokens that must not be guessed
        """
        warp = Warp.of(sampling)
        shift = shift_of(sampling, noise_ids.clip(0))
        if not sampling.shares_noise:  # logits order the ids that may be guessed; the mask excludes all others
            return cls(Warp(sampling.temperature or 1.0), len(noise_ids), MappedNoise(None, noise_ids), shift)
        rows = NoiseRows(sampling.seed, int(noise_ids.max()) + 1, sampling.sample_index)
        return cls(warp, len(noise_ids), MappedNoise(rows, noise_ids), shift)

    def added_to(self, position: int) -> Tensor | None:
        """Row [vocabulary] float32 that is added to the scores of the token at a position of the target's text; None
        if nothing is added."""
        noise = None if self.noise is None else self.noise.row(position)
        if self.shift is None or noise is None:
            return noise if self.shift is None else self.shift
        return noise + self.shift


def shift_of(sampling: Sampling, ids: IntArray) -> Tensor | None:
    """Sum of logit bias and the removal of banned or not allowed ids, [ids] float32; None if a request has neither.
    Parameters that depend on the text, such as penalties, are not applied to drafts, which can only lower acceptance.

    ids: target id of each guessed token
    """
    if not (sampling.logit_bias or sampling.banned_ids or sampling.allowed_ids):
        return None
    vocabulary = int(ids.max()) + 1
    shift = np.full(vocabulary, REMOVED if sampling.allowed_ids else 0.0, np.float32)
    for token in sampling.allowed_ids:  # the target's vocabulary may be larger than the drafter's
        if token < vocabulary:
            shift[token] = 0.0
    for token, bias in sampling.logit_bias:
        if token < vocabulary:
            shift[token] += bias / (sampling.temperature or 1.0)
    for token in sampling.banned_ids:
        if token < vocabulary:
            shift[token] = REMOVED
    return torch.from_numpy(shift[ids])


class DraftRunner:
    """A model, its memory, and the `DraftLaw` of each session. Used by one thread, in inference mode."""

    def __init__(
        self,
        model: DrafterModel,
        texts: int,
        nodes: int,
        device: torch.device,
        head: AcceptanceHead | None = None,
        graphs: Graphs | None = None,
        kernels: bool = True,
        whole_trees: bool = True,
    ) -> None:
        """texts, nodes: number of slots of either kind, slot 0 included   head: computes chances; None: the scheduler
        calibrates scores   graphs: record levels; by default CUDA's on a GPU, none elsewhere   kernels: recorded levels
        are run by Triton's kernels where these serve the model   whole_trees: these run all levels of a tree of a known
        form at once"""
        self.model = model
        self.ids = model.draft_ids
        self.head = head
        self.device = device
        if graphs is None and device.type == "cuda":
            graphs = CudaGraphs()
        self.memory = model.memory(texts, nodes + 1 + CHAIN_NODES if graphs is not None else nodes)
        self._recorded = self._recorded_folds = None
        if graphs is not None and isinstance(self.memory, RecordableMemory):
            self._recorded = RecordedLevels(self.memory, nodes, device, graphs)
            self._recorded_folds = RecordedFolds(self.memory, device, graphs)
        self._on_device = self._trees = None
        if graphs is not None and kernels and (layers := layers_of(model, self.memory)) is not None:
            assert isinstance(model, Backbone)
            self._on_device = DeviceLevels(model, layers, nodes, graphs)
            if whole_trees and head is None:
                self._trees = DeviceTrees(self._on_device, graphs, self._fold)
        self._fused = self.memory if isinstance(self.memory, FusedMemory) else None
        if self._fused is not None and head is not None:
            self._fused.use_head(HeadCalls(head.weights, head.facts.candidates))
        self._laws: dict[int, DraftLaw] = {}
        self._orders: dict[int, RowOrder] = {}  # orders at position 0, by sessions that kernels rank
        prepare_kernel()
        prepare_softmax()

    def one_forward(self, session: int) -> OneForward:
        """What a forward of this session alone may contain besides one level or one chain."""
        by_kernels = session in self._orders
        fused = self._fused is not None and not self._laws[session].warp.masks
        levels = by_kernels if self._trees is not None else fused
        return OneForward(levels, LONGEST_CHAIN if by_kernels else 0)

    @property
    def vocabulary(self) -> int:
        """Bound of the token ids of texts and guesses."""
        return self.model.vocabulary if self.ids is None else self.ids.size

    def guessed(self, vocabulary: int) -> int:
        """Number of tokens that may be guessed for a target of this vocabulary."""
        return min(vocabulary, self.model.vocabulary) if self.ids is None else len(self.ids.below(vocabulary))

    def admit(self, session: int, sampling: Sampling, vocabulary: int, noise_ids: IntArray | None = None) -> None:
        """Set the order of a session's guesses. vocabulary: number of the target's tokens
        noise_ids: see `DrafterEngine.open`"""
        if noise_ids is not None:
            of_guesses = noise_ids if self.ids is None else noise_ids[self.ids.guessed]
            if not (of_guesses >= 0).any():
                raise BadRequest("tokenizer", "the target has none of the tokens that this drafter guesses")
            law = DraftLaw.mapped(sampling, of_guesses)
        else:
            ids = None if self.ids is None else self.ids.below(vocabulary)
            law = DraftLaw.of(sampling, self.guessed(vocabulary), ids)
        self.forget(session)
        self._laws[session] = law
        if self._on_device is not None and self.head is None and (order := order_of(law)) is not None:
            self._orders[session] = order

    def forget(self, session: int) -> None:
        """Drop a session's law, if there is one."""
        self._laws.pop(session, None)
        self._orders.pop(session, None)

    def forget_all(self) -> None:
        self._laws.clear()
        self._orders.clear()

    def prepare(self, session: int, positions: range) -> bool:
        """Compute one missing row of noise of these positions; False if none is missing."""
        law = self._laws.get(session)
        if law is None or law.noise is None or session in self._orders:
            return False
        ready = len(law.noise)
        for position in positions:
            law.noise.prepare([position])
            if len(law.noise) > ready:
                return True
        return False

    def forget_noise(self, session: int, before: int) -> None:
        """Drop a session's rows of noise of positions below `before`, whose tokens are committed."""
        law = self._laws.get(session)
        if law is not None and law.noise is not None:
            law.noise.forget_before(before)

    @on_its_device
    def scores_are_finite(self) -> bool:
        """True if the logits after a few random tokens are finite. Called before any text is open."""
        tokens = np.random.default_rng(0).integers(0, self.vocabulary, (1, CHECKED_TOKENS))
        one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
        hidden = self.memory.chain(Chains(tokens, CHECKED_TOKENS * one, none, none, one, none[:0]))
        return bool(torch.isfinite(self.model.logits(hidden.flatten(0, 1))).all())

    @on_its_device
    def fold(self, folds: Sequence[TextFold], before: DraftPlan | None = None) -> None:
        """Fold accepted nodes into the memories of their texts. before: the forward that is run next, if any"""
        compiled = None if before is None or isinstance(before.rows, Chains) else self._compiled(before)
        if compiled is None:
            self._fold(folds)
        else:
            compiled.fold_first(folds)

    @on_its_device
    def run(self, plan: DraftPlan) -> DraftOutcome:
        """Run one forward. Returns the candidates in the target's ids."""
        try:
            return self._run(plan) if self.ids is None else self.ids.outcome(self._run(self.ids.plan(plan)))
        finally:
            if self._fused is not None:
                self._fused.fold_rest()

    def _fold(self, folds: Sequence[TextFold]) -> None:
        (self.memory if self._recorded_folds is None else self._recorded_folds).fold(folds)

    def _compiled(self, plan: DraftPlan) -> FusedMemory | None:
        """The fused memory, if the call that runs the plan can also rank its tokens (no session filters); else None."""
        apart = self._fused is None or any(self._laws[session].warp.masks for session in plan.sessions)
        return None if apart else self._fused

    def _run(self, plan: DraftPlan) -> DraftOutcome:
        """Run one forward. The plan and the outcome have the model's ids."""
        if self._trees is not None and isinstance(plan.rows, Levels):
            order = self._orders[plan.sessions[0]]
            width = min(plan.width, order.vocabulary)
            return DraftOutcome(*self._trees.guesses(plan.rows, order, plan.positions, width))
        compiled = self._compiled(plan)
        laws = [self._laws[session] for session in plan.sessions]
        return self._run_by_parts(plan, laws) if compiled is None else self._run_in_one(compiled, plan, laws)

    def _run_in_one(self, memory: FusedMemory, plan: DraftPlan, laws: list[DraftLaw]) -> DraftOutcome:
        """Run one forward by a memory whose call ranks the tokens, too."""
        if not isinstance(plan.rows, Chains):
            return memory.guesses(plan.rows, *_ordered(laws, plan), _width(laws, plan))
        hidden = memory.chain(plan.rows).flatten(0, 1)
        if not plan.groups:
            return NOTHING
        return memory.guesses_of_hidden(self._scored(hidden, plan), *_ordered(laws, plan), _width(laws, plan))

    def _run_by_parts(self, plan: DraftPlan, laws: list[DraftLaw]) -> DraftOutcome:
        """Run one forward by the model, and rank its tokens by kernels, where these have their orders, or in torch."""
        rows = plan.rows
        assert not isinstance(rows, Levels)
        by_row = self._device_orders(plan)
        if by_row and self._on_device is not None and isinstance(rows, Level):
            whole = by_row if plan.scored is None else _scattered(by_row, plan.scored, rows.count)
            ids, scores = self._on_device.guesses(rows, whole, _width(laws, plan))
            chosen = slice(None) if plan.scored is None else plan.scored
            return DraftOutcome(ids[chosen], scores[chosen])
        if len(by_row) == rows.count and self._on_device is not None and isinstance(rows, Chains) and is_short(rows):
            return DraftOutcome(*self._on_device.chain(rows, by_row, _width(laws, plan), self._fold))
        hidden = self.memory.chain(rows).flatten(0, 1) if isinstance(rows, Chains) else self._level(rows)
        if not plan.groups:
            return NOTHING
        hidden = self._scored(hidden, plan)
        if by_row and self._on_device is not None:
            return DraftOutcome(*self._on_device.rank(hidden, by_row, _width(laws, plan)))
        return self._order(hidden, laws, plan)

    def _scored(self, hidden: Tensor, plan: DraftPlan) -> Tensor:
        """The rows [scored, d] of a forward's hidden rows [tokens, d] after which candidates are wanted."""
        if plan.scored is None or len(plan.scored) == len(hidden):
            return hidden
        return hidden.index_select(0, torch.from_numpy(plan.scored).to(self.device))

    def _device_orders(self, plan: DraftPlan) -> list[RowOrder]:
        """The order of each scored row; empty if some row cannot be ranked by the accelerator's kernels."""
        orders = [order for session in plan.sessions if (order := self._orders.get(session)) is not None]
        if plan.masks or len(orders) < len(plan.sessions):
            return []
        groups = zip(orders, plan.positions, plan.groups, strict=True)
        return [order for each, at, count in groups for order in [each._replace(position=at)] * count]

    def _level(self, rows: Level) -> Tensor:
        if self._on_device is not None:
            return self._on_device.hidden(rows)
        return self.memory.level(rows) if self._recorded is None else self._recorded.level(rows)

    def _order(self, hidden: Tensor, laws: list[DraftLaw], plan: DraftPlan) -> DraftOutcome:
        """Candidates of each scored row, ordered by the law of the row's group. hidden [scored, d]"""
        logits, width = self.model.logits(hidden), _width(laws, plan)
        alike: dict[tuple[Warp, int], list[int]] = {}  # rows by their warp and vocabulary
        group_of = np.repeat(np.arange(len(laws)), plan.groups).tolist()
        for row, group in enumerate(group_of):
            alike.setdefault((laws[group].warp, laws[group].vocabulary), []).append(row)
        candidates = np.empty((len(group_of), width), np.int64)
        found = np.empty((len(group_of), width), np.float32)
        chances = None if self.head is None else np.empty((len(group_of), width), np.float32)
        depths = torch.from_numpy(np.repeat(np.array(plan.depths, np.int64), plan.groups)).to(self.device)
        for (warp, vocabulary), rows in alike.items():
            chosen = slice(None) if len(alike) == 1 else torch.tensor(rows, device=self.device)
            part = logits[chosen, :vocabulary]
            noise = self._noise([group_of[row] for row in rows], laws, plan.positions)
            allowed = _masked(part, [plan.masks[row] for row in rows]) if plan.masks else part
            ids, scores = candidates_of(allowed, warp, noise, width)
            candidates[rows], found[rows] = ids.cpu().numpy(), scores.cpu().numpy()
            if self.head is not None and chances is not None:
                of = hidden[chosen], part, ids, scores, warp.temperature, depths[chosen]
                chances[rows] = self.head.chances(self.model, *of).cpu().numpy()
        return DraftOutcome(candidates, found, chances)

    def _noise(self, groups: list[int], laws: list[DraftLaw], positions: Sequence[int]) -> Tensor | None:
        """Rows [rows, V] that are added to the scores; None if nothing is. groups: group of each row"""
        found = {group: laws[group].added_to(positions[group]) for group in groups}
        noise = {group: row for group, row in found.items() if row is not None}
        if not noise:
            return None
        if len(noise) == 1:  # a level of one tree
            return noise[groups[0]].to(self.device).expand(len(groups), -1)
        return torch.stack([noise[group] for group in groups]).to(self.device)


def is_short(rows: Chains) -> bool:
    """True if chains may run as levels of one token each: no roots are in them, and none is over LONGEST_CHAIN."""
    return not len(rows.roots) and rows.tokens.shape[1] <= LONGEST_CHAIN


def order_of(law: DraftLaw) -> RowOrder | None:
    """The order of a law at position 0; None if kernels do not rank by this law."""
    if law.warp.masks or law.shift is not None or isinstance(law.noise, MappedNoise):
        return None
    if law.noise is None:
        return RowOrder(0, 0, 0, 0, law.vocabulary)
    (bits,), (seed,) = unpack("=i", pack("=f", law.warp.temperature)), unpack("=q", pack("=Q", law.noise.seed))
    return RowOrder(bits, seed, 0, law.noise.sample_index, law.vocabulary)


def _scattered(orders: Sequence[RowOrder], places: IntArray, count: int) -> list[RowOrder]:
    """The orders of `count` rows: the given ones in their places, the first of them in all others."""
    found = [orders[0]] * count
    for place, order in zip(places.tolist(), orders, strict=True):
        found[place] = order
    return found


def _width(laws: Sequence[DraftLaw], plan: DraftPlan) -> int:
    """Number of candidates of each scored row: the plan's width, or the smallest vocabulary."""
    return min(plan.width, *(law.vocabulary for law in laws))


def _ordered(laws: Sequence[DraftLaw], plan: DraftPlan) -> tuple[Sequence[int], Sequence[int], Orders]:
    """Sizes of a plan's groups, their depths, and the order of each group's candidates before filters."""
    noise = [law.added_to(place) for law, place in zip(laws, plan.positions, strict=True)]
    orders = Orders([law.warp.temperature for law in laws], noise, [law.vocabulary for law in laws])
    return _masked_orders(orders, plan) if plan.masks else (plan.groups, plan.depths, orders)


def _masked_orders(orders: Orders, plan: DraftPlan) -> tuple[Sequence[int], Sequence[int], Orders]:
    """`_ordered` for a plan with masks: each scored token becomes a group, since its mask removes candidates of
    its own."""
    temperatures, noise, vocabularies, depths = [], list[Tensor | None](), [], []
    for group, mask in zip(np.repeat(np.arange(len(plan.groups)), plan.groups).tolist(), plan.masks, strict=True):
        added, vocabulary = orders.noise[group], orders.vocabularies[group]
        removed = removed_by(mask, vocabulary)
        if removed is not None:
            added = (torch.zeros(vocabulary) if added is None else added).masked_fill(removed, -math.inf)
        temperatures.append(orders.temperatures[group])
        noise.append(added)
        vocabularies.append(vocabulary)
        depths.append(plan.depths[group])
    return [1] * len(noise), depths, Orders(temperatures, noise, vocabularies)


def _masked(logits: Tensor, masks: Sequence[Bits | None]) -> Tensor:
    """Copy of logits [rows, V] with minus infinity for tokens that a row's mask removes."""
    logits = logits.clone()
    for row, mask in zip(logits, masks, strict=True):
        if (removed := removed_by(mask, len(row))) is not None:
            row.masked_fill_(removed.to(row.device), -math.inf)
    return logits


def removed_by(mask: Bits | None, vocabulary: int) -> Tensor | None:
    """Removed tokens [vocabulary] bool; None if none is removed. A mask that allows no token removes none: the row then
    has finite scores, and the scheduler drops all its candidates."""
    if mask is None:
        return None
    allowed = np.unpackbits(mask, count=vocabulary, bitorder="little")
    return torch.from_numpy(allowed == 0) if allowed.any() else None


def candidates_of(logits: Tensor, warp: Warp, noise: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """The best `width` ids of each row, best first, and their scores.

    The first guess respects top-k, top-p and min-p, so it may not have the greatest score; its score is then set to the
    greatest.
    """
    ranking = drafter_ranking(logits, warp, noise, width)
    if warp.masks:
        ranking.scores[:, 0] = ranking.scores.amax(1)
    return ranking.ids, ranking.scores
