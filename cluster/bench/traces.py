"""What a drafter would guess at every position of known answers: recorded once, replayed by every arm.

Speculation is lossless: the target's tokens do not depend on the guesses. So once they are known, a round's acceptance
length N from a text of length L follows without the target, by walking down the drafter's tree:

    N = 1 + the number of the answer's tokens ids[L], ids[L + 1], ... on a path below the root

In a tree of static shape, the path follows from the drafter's ranks of these tokens given the true text
(docs/design/policies.md#rank-replay). Beams and dynamic trees also depend on guesses beside the text: the drafter's
engine grows one at every position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from dendro.calls import DrafterPeer, VerifierPeer
from dendro.shapes import LevelShape, NodeShape, TreeShape
from dendro.text import Sampling
from dendro.tree import DraftTree

from cluster.demo.kinds import KINDS, kind_prompts
from cluster.demo.prompts import load_tokenizer
from cluster.measure.in_process import EngineText
from cluster.measure.measurement import Step
from cluster.policies.replay import static_path
from cluster.training.acceptance import PROMPT_TOKENS

SIDE_BY_SIDE = 9
"""Texts that are drafted together."""
SPARE = 16
"""Tokens of an answer after the measured ones: a round that begins at the last of those is not cut short."""


def is_static(shape: TreeShape) -> bool:
    """Whether ranks alone determine N of a round of this shape."""
    return isinstance(shape, LevelShape | NodeShape)


@dataclass(frozen=True, slots=True, eq=False)
class TracedAnswer:
    """The target's answer to one prompt."""

    kind: str
    name: str  # name of the prompt
    temperature: float
    seed: int
    ids: tuple[int, ...]  # prompt, the measured tokens, SPARE more
    begin: int  # tokens of the prompt
    tokens: int  # measured

    @property
    def end(self) -> int:
        """The text length from which no further round begins."""
        return self.begin + self.tokens

    def rounds(self, emitted: Callable[[int], int]) -> Iterator[tuple[int, int]]:
        """(base, N) of every round, if a round from a text of length `base` emits `emitted(base)` tokens."""
        base = self.begin
        while base < self.end:
            count = emitted(base)
            yield base, count
            base += count

    @property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The prompt, and what follows it."""
        return self.ids[: self.begin], self.ids[self.begin :]

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, seed=self.seed)


@dataclass(slots=True, eq=False)
class Trace:
    """One drafter's guesses for one answer."""

    answer: TracedAnswer
    ranks: Sequence[int]  # rank of each token from `begin` on among the drafter's candidates, given the true text
    trees: dict[TreeShape, list[DraftTree]] = field(default_factory=dict)  # trees of a shape, one a position
    _paths: dict[tuple[TreeShape, int], tuple[int, ...]] = field(default_factory=dict)

    def recorded(self, shape: TreeShape, base: int) -> DraftTree | None:
        """The tree of a round from text length `base`; None where only ranks are known."""
        return self.trees[shape][base - self.answer.begin] if shape in self.trees else None

    def path(self, shape: TreeShape, base: int) -> tuple[int, ...]:
        """The N rows on the text's path in a round from text length `base`, the root first."""
        if (shape, base) not in self._paths:
            self._paths[shape, base] = self._path(shape, base)
        return self._paths[shape, base]

    def _path(self, shape: TreeShape, base: int) -> tuple[int, ...]:
        if (tree := self.recorded(shape, base)) is not None:
            return walk(tree, self.answer.ids[base:])
        if not is_static(shape):
            raise ValueError(f"shape: no trees of {shape} were recorded, and ranks do not determine them")
        return static_path(shape, self.ranks[base - self.answer.begin :])

    def emitted(self, shape: TreeShape, base: int) -> int:
        """N of a round from a text of length `base`."""
        return len(self.path(shape, base))

    def drafted_as(self, shape: TreeShape, base: int) -> TreeShape:
        """The shape whose drafts cost as much as that of a round."""
        return shape

    def rounds(self, shape: TreeShape) -> Iterator[tuple[int, int]]:
        """(base, N) of every round, if all of them are of this shape."""
        return self.answer.rounds(lambda base: self.emitted(shape, base))

    def rows(self, shape: TreeShape, base: int) -> int:
        """Rows of the tree of a round."""
        tree = self.recorded(shape, base)
        return shape.rows if tree is None else tree.rows


def walk(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, ...]:
    """The rows on the path of these tokens from the root, the root included."""
    edges = zip(tree.parents, tree.tokens, strict=True)
    children = {(int(above), int(token)): row for row, (above, token) in enumerate(edges)}
    path = [0]
    for token in tokens:
        row = children.get((path[-1], token))
        if row is None:
            break
        path.append(row)
    return tuple(path)


async def write_answer(
    verifier: VerifierPeer, kind: str, name: str, prompt: Sequence[int], temperature: float, seed: int, tokens: int
) -> TracedAnswer:
    """The target's answer, by plain decoding."""
    peer = EngineText(prompt, Sampling(temperature=temperature, seed=seed))
    await peer.open(verifier, tokens + SPARE + 1)
    held = len(prompt)
    while len(peer.text) < len(prompt) + tokens + SPARE:
        verdict = await peer.verify(verifier, DraftTree.root_only(peer.text.ids[-1]), held)
        held = len(peer.text)
        peer.text.extend(verdict.tokens)
    await peer.close(verifier)
    ids = tuple(peer.text.ids[: len(prompt) + tokens + SPARE])
    return TracedAnswer(kind, name, temperature, seed, ids, len(prompt), tokens)


async def write_answers(
    verifier: VerifierPeer, models: Path, prompts: int, tokens: int, temperature: float, seed: int
) -> list[TracedAnswer]:
    """The target's answers to so many prompts of each kind; kinds alternate, also in the order of a replay."""
    tokenizer = load_tokenizer(models)
    by_kind = [kind_prompts(kind, prompts, PROMPT_TOKENS, tokenizer, models) for kind in KINDS]
    asked = [(kind, own[index]) for index in range(prompts) for kind, own in zip(KINDS, by_kind, strict=True)]
    return await asyncio.gather(
        *(
            write_answer(verifier, kind, each.name, each.token_ids, temperature, seed * 1_000_003 + number, tokens)
            for number, (kind, each) in enumerate(asked)
        )
    )


async def grown_trees(
    drafter: DrafterPeer, answers: Sequence[TracedAnswer], shapes: Sequence[TreeShape], step: Step
) -> list[dict[TreeShape, list[DraftTree]]]:
    """Trees of each answer by shape, at its positions, drafted SIDE_BY_SIDE together; all have as many tokens. `step`
    is called for each position of each answer."""
    found: list[dict[TreeShape, list[DraftTree]]] = []
    for start in range(0, len(answers), SIDE_BY_SIDE):
        found += await _grown_together(drafter, answers[start : start + SIDE_BY_SIDE], shapes, step)
    return found


async def _grown_together(
    drafter: DrafterPeer, answers: Sequence[TracedAnswer], shapes: Sequence[TreeShape], step: Step
) -> list[dict[TreeShape, list[DraftTree]]]:
    peers = [EngineText(answer.ids[: answer.begin], answer.sampling) for answer in answers]
    await asyncio.gather(*(peer.open(drafter, answer.tokens) for peer, answer in zip(peers, answers, strict=True)))
    trees: list[dict[TreeShape, list[DraftTree]]] = [{shape: [] for shape in shapes} for _ in answers]
    for offset in range(answers[0].tokens):
        for shape in shapes:
            new = shape == shapes[0] and offset > 0
            grown = await asyncio.gather(*(peer.draft(drafter, shape, len(peer.text) - new) for peer in peers))
            for own, tree in zip(trees, grown, strict=True):
                own[shape].append(tree)
        for peer, answer in zip(peers, answers, strict=True):
            peer.text.extend([answer.ids[len(peer.text)]])
            step()
    await asyncio.gather(*(peer.close(drafter, len(peer.text) - 1) for peer in peers))
    return trees


def trimmed(tree: DraftTree, rows: int) -> DraftTree:
    """The root and the guesses of greatest value, `rows` rows in all; of equals the shallower, then the first. No row's
    value exceeds its parent's, so the kept rows form a tree (docs/design/drafting.md#dynamic-trees).

    A dynamic tree trimmed to fewer guesses equals one grown to them with the same k and depth.
    """
    order = np.lexsort((np.arange(tree.rows), tree.depths, -tree.values))
    kept = np.sort(order[:rows])
    parents = np.append(-1, np.searchsorted(kept, tree.parents[kept[1:]]))
    return DraftTree(tree.tokens[kept], parents, tree.values[kept])
