"""Runs the scheduler's plans on the model. Handles tensors, but no texts and no callers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dendro.text import Sampling
from torch import Tensor
from tree_kernels.noise import NoiseRows
from tree_kernels.ranking import ranked
from tree_kernels.warp import Warp, drafter_ranking

from drafter_service.models import DrafterModel
from drafter_service.plan import Chains, DraftOutcome, DraftPlan, Level, TextFold

NOTHING = DraftOutcome(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class DraftLaw:
    """How a session's guesses are ordered."""

    warp: Warp
    vocabulary: int  # guesses are below it: the smaller of the drafter's and the target's
    noise: NoiseRows | None  # None at temperature 0

    def noise_of(self, position: int) -> Tensor | None:
        """[vocabulary] noise of the token at a position; None at temperature 0."""
        return None if self.noise is None else self.noise.row(position)


class DraftRunner:
    """A model, its memory, and the `DraftLaw` of each session. Used by one thread, in inference mode."""

    def __init__(self, model: DrafterModel, texts: int, nodes: int, device: torch.device) -> None:
        """texts, nodes: number of slots of either kind, slot 0 included."""
        self.model = model
        self.device = device
        self.memory = model.memory(texts, nodes)
        self._laws: dict[int, DraftLaw] = {}

    def admit(self, session: int, sampling: Sampling, vocabulary: int) -> None:
        """Set how a session's guesses are ordered. vocabulary: the target's."""
        warp = Warp(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        guessed = min(vocabulary, self.model.vocabulary)
        rows = NoiseRows(sampling.seed, guessed, sampling.sample_index)
        self._laws[session] = DraftLaw(warp, guessed, None if warp.greedy else rows)

    def forget(self, session: int) -> None:
        """Drop a session's law, if there is one."""
        self._laws.pop(session, None)

    def forget_all(self) -> None:
        self._laws.clear()

    def prepare(self, session: int, positions: range) -> bool:
        """Compute one missing row of noise of these positions; False if none is missing. Drops earlier rows."""
        law = self._laws.get(session)
        if law is None or law.noise is None:
            return False
        law.noise.forget_before(positions.start)
        ready = len(law.noise)
        for position in positions:
            law.noise.prepare([position])
            if len(law.noise) > ready:
                return True
        return False

    def fold(self, folds: Sequence[TextFold]) -> None:
        """Fold accepted nodes into the memories of their texts."""
        self.memory.fold(folds)

    def run(self, plan: DraftPlan) -> DraftOutcome:
        """One forward."""
        match plan.rows:
            case Chains():
                hidden = self.memory.chain(plan.rows).flatten(0, 1)
            case Level():
                hidden = self.memory.level(plan.rows)
        if not len(plan.scored):
            return NOTHING
        if len(plan.scored) < len(hidden):
            hidden = hidden.index_select(0, torch.from_numpy(plan.scored).to(self.device))
        return self._order(self.model.logits(hidden), plan)

    def _order(self, logits: Tensor, plan: DraftPlan) -> DraftOutcome:
        """The candidates of each scored row, ordered by the law of its session. logits [scored, V]"""
        laws = [self._laws[session] for session in plan.sessions.tolist()]
        width = min(plan.width, *(law.vocabulary for law in laws))
        if self.model.form == "fused" and not any(law.warp.masks for law in laws):
            places = plan.positions.tolist()
            noise = [law.noise_of(place) for law, place in zip(laws, places, strict=True)]
            vocabularies = [law.vocabulary for law in laws]
            return DraftOutcome(*ranked(logits, [law.warp.temperature for law in laws], noise, vocabularies, width))
        groups: dict[tuple[Warp, int], list[int]] = {}
        for row, law in enumerate(laws):
            groups.setdefault((law.warp, law.vocabulary), []).append(row)
        candidates = np.empty((len(laws), width), np.int64)
        found = np.empty((len(laws), width), np.float32)
        for (warp, vocabulary), rows in groups.items():
            part = logits if len(groups) == 1 else logits[torch.tensor(rows, device=self.device)]
            ids, scores = _candidates(part[:, :vocabulary], warp, self._noise(laws, rows, plan), width)
            candidates[rows], found[rows] = ids.cpu().numpy(), scores.cpu().numpy()
        return DraftOutcome(candidates, found)

    def _noise(self, laws: list[DraftLaw], rows: list[int], plan: DraftPlan) -> Tensor | None:
        """[rows, V] noise of the token that each row guesses; None at temperature 0."""
        picked = [(laws[row].noise, int(plan.positions[row])) for row in rows]
        noise, position = picked[0]
        if noise is None:
            return None
        if all(other is noise and place == position for other, place in picked):  # a level of one tree
            return noise.row(position).to(self.device).expand(len(picked), -1)
        return torch.stack([source.row(place) for source, place in picked if source is not None]).to(self.device)


def _candidates(logits: Tensor, warp: Warp, noise: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """The best `width` ids of each row in order, and their scores.

    The warp's masks may put a guess first whose score is not the greatest; its score is then set to the greatest.
    """
    ranking = drafter_ranking(logits, warp, noise, width)
    if warp.masks:
        ranking.scores[:, 0] = ranking.scores.amax(1)
    return ranking.ids, ranking.scores
