"""Masks of a step's structured texts. A text whose masks take long is left out of the step, so that no other text waits
for it; finished work is kept, and a later step draws the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from dendro.daemon_threads import MaskThreads
from dendro.errors import DendroError
from dendro.grammars import GrammarText, TreeMasks
from dendro.tree import DraftTree
from tree_kernels.tree_walk import Walk

from verifier_service.guarding import guarded


class MasksPending(DendroError):
    """Raised if a text's masks are not ready: it is left out of the step, and takes part again once `work` is done."""

    def __init__(self, work: Future[Any]) -> None:
        super().__init__("structure: the masks are not ready")
        self.work = work


@dataclass(frozen=True, slots=True, eq=False)
class BegunMasks:
    """Masks of one draw, computed by a thread. Until they are done, no other thread may use the text's structure."""

    work: Future[TreeMasks]
    text: GrammarText

    def result(self) -> TreeMasks:
        """The masks. Raises MasksPending if they are not ready, and any exception of the computation."""
        if not self.work.done():
            raise MasksPending(self.work)
        return self.work.result()


class StepMasks:
    """Finds the tokens that structures allow after the rows of a step's trees, while the model's forward runs."""

    def __init__(self) -> None:
        self._threads = MaskThreads()

    def begin(self, draws: Sequence[tuple[GrammarText | None, DraftTree]]) -> list[BegunMasks | None]:
        """Begin to compute the masks of each draw's tree; None for a text without a structure."""
        return [
            BegunMasks(self._threads.begin(partial(text.masks, tree)), text) if text is not None else None
            for text, tree in draws
        ]

    def wait(self, masks: Sequence[BegunMasks | None]) -> None:
        """Wait a short time for masks to become ready."""
        self._threads.wait([each.work for each in masks if each is not None])

    def settled(
        self, walks: Sequence[Walk | DendroError], masks: Sequence[BegunMasks | None]
    ) -> list[Walk | DendroError]:
        """Find what may follow the tokens of each walk, which decides whether they complete the answer. Returns the
        walks, with MasksPending in place of a walk whose result is not ready, and the error in place of one that
        failed."""
        found = list(walks)
        ahead: dict[int, Future[None]] = {}
        for number, (walked, begun) in enumerate(zip(walks, masks, strict=True)):
            if begun is not None and isinstance(walked, Walk):
                ahead[number] = self._threads.begin(partial(begun.text.foresee, walked.tokens))
        self._threads.wait(list(ahead.values()))
        for number, work in ahead.items():
            if not work.done():
                found[number] = MasksPending(work)
            elif isinstance(failed := guarded(work.result), DendroError):
                found[number] = failed
        return found
