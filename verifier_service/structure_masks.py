"""The masks of a step's structured texts. A text whose masks take long is left out of the step, so that no other text
waits for it: what was computed is kept, and a later step draws the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

from dendro.daemon_threads import DaemonThreads
from dendro.errors import DendroError
from dendro.grammars import GrammarText, TreeMasks
from dendro.tree import DraftTree
from tree_kernels.tree_walk import Walk

MASKS_AT_ONCE = 32
WAIT_S = 0.01
"""How long a step waits, after its forward, for all its masks."""


class MasksPending(DendroError):
    """A text's masks are not ready: it is left out of the step, and takes part again once `work` is done."""

    def __init__(self, work: Future[Any]) -> None:
        super().__init__("structure: the masks are not ready")
        self.work = work


@dataclass(frozen=True, slots=True, eq=False)
class BegunMasks:
    """The masks of one draw, which a thread computes. Until they are done, no other thread may use its structure."""

    work: Future[TreeMasks]
    text: GrammarText
    threads: MaskThreads

    def result(self) -> TreeMasks:
        """Raises MasksPending where they are not ready."""
        if not self.work.done():
            raise MasksPending(self.work)
        return self.work.result()


class MaskThreads:
    """Finds what structures allow in the rows of trees in threads of their own, while the model's forward runs."""

    def __init__(self) -> None:
        self._threads = DaemonThreads("structure-masks", MASKS_AT_ONCE)  # they start with the first work

    def begin(self, draws: Sequence[tuple[GrammarText | None, DraftTree]]) -> list[BegunMasks | None]:
        """Of each draw, the masks of its tree; None where its text has no structure."""
        return [
            BegunMasks(self._threads.submit(lambda text=text, tree=tree: text.masks(tree)), text, self)  # type: ignore[misc]
            if text is not None
            else None
            for text, tree in draws
        ]

    def wait(self, masks: Sequence[BegunMasks | None]) -> None:
        """Give them time to become ready."""
        _wait([each.work for each in masks if each is not None])

    def settled(
        self, walks: Sequence[Walk | DendroError], masks: Sequence[BegunMasks | None]
    ) -> list[Walk | DendroError]:
        """The walks, once it is known what may follow their tokens, which tells whether these complete an answer; for
        one of which it is not known yet, MasksPending."""
        found = list(walks)
        ahead: dict[int, Future[None]] = {}
        for number, (walked, begun) in enumerate(zip(walks, masks, strict=True)):
            if begun is not None and isinstance(walked, Walk):
                ahead[number] = self._threads.submit(lambda text=begun.text, walked=walked: text.foresee(walked.tokens))  # type: ignore[misc]
        _wait(list(ahead.values()))
        for number, work in ahead.items():
            if not work.done():
                found[number] = MasksPending(work)
        return found


def _wait(works: Sequence[Future[Any]]) -> None:
    if any(not each.done() for each in works):
        wait_for(works, WAIT_S)
