"""Finds the masks of texts that wait for a forward, in threads. A text whose masks are late waits alone; the others go
on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

from dendro.clock import Clock
from dendro.mask_threads import MaskThreads

from drafter_service.texts import DrafterText, RowMasks

log = logging.getLogger("dendro.drafter")

LATE_S = 1.0
"""Seconds of waiting for masks after which a text is drafted without its structure for good."""


class TextMasks:
    """Begins to find masks of texts, and says which texts can take part in a forward."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        """wake: called, from any thread, when a text that was left out has its masks"""
        self._threads = MaskThreads()
        self._clock = clock
        self._wake = wake
        self.patience_s: float | None = None
        """Seconds until a text that the last `ready` left out is drafted without its structure; None if it left out
        none."""

    def ready(self, texts: Collection[DrafterText]) -> set[DrafterText]:
        """The texts whose masks are known after a short wait. Texts whose masks took longer the last time are not
        waited for, so that they delay the others only once."""
        now_s, begun, awaited = self._clock(), [], []
        for text in texts:
            quick = text.structure is not None and text.structure.quick  # read before a thread measures again
            if (masks := self._begun(text, now_s)) is not None:
                begun.append(masks.work)
                awaited += [masks.work] if quick else []
        self._threads.wait(awaited)
        for work in begun:
            if not work.done():
                work.add_done_callback(lambda _: self._wake())
        late = {text: text.begun.begun_s for text in texts if not text.has_masks and text.begun is not None}
        self.patience_s = max(0.0, min(late.values()) + LATE_S - now_s) if late else None
        return set(texts).difference(late)

    def _begun(self, text: DrafterText, now_s: float) -> RowMasks | None:
        """Begin to find the masks that the text's round needs. None if nothing was begun: none are needed, or they are
        known or on the way."""
        if text.has_masks or text.structure is None or text.round is None:
            return None
        if text.begun is not None and not text.begun.work.done():
            if now_s - text.begun.begun_s >= LATE_S:
                text.structure = None
                log.warning("a text is drafted without its structure, whose masks take more than %g s", LATE_S)
            return None
        growth = text.round.growth
        if growth.processed:
            work = partial(text.structure.of_level, growth)
        else:
            work = partial(text.structure.after_text, list(text.text.ids), text.covers)
        text.begun = RowMasks(self._threads.begin(work), text.round, growth.processed, now_s)
        return text.begun
