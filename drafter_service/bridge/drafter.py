"""A drafter's engine behind bridges: calls and trees have the token ids of targets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from dendro.calls import CloseCall, Closed, Deliver, DraftCall, Hello, OpenCall, Opened, PeerText, TextUpdate
from dendro.clock import Clock
from dendro.errors import BadRequest, DendroError, NotFound, PeerLost
from dendro.measured import StepTotals, microseconds
from dendro.tasks import BackgroundTasks, off_loop
from dendro.tree import DraftTree

from drafter_service.bridge.branches import LONGEST_TAIL
from drafter_service.bridge.kinds import Bridge
from drafter_service.bridge.translation import Translation
from drafter_service.engine import DrafterEngine


@dataclass(eq=False)
class _BridgedText:
    """One opening: the text in the target's ids, and its translation."""

    bridge: Bridge
    translation: Translation
    text: PeerText = field(default_factory=PeerText)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    translated: bool = False  # True once the opened text is translated

    def follow(self, update: TextUpdate) -> TextUpdate:
        """Apply an update of the target's text. Returns the update of the drafter's text. Raises NotFound for an update
        that does not fit the text, and while the text is being opened."""
        if not self.translated:
            raise NotFound("opening: is not ready")
        _check_base(update)
        self.translation.follow(self.text.ids, self.text.follow(update))
        tokens, start = self.translation.tokens, self.translation.unchanged
        self.translation.unchanged = len(tokens)
        return TextUpdate.of(update.opening, tokens, start)

    def opened(self, update: TextUpdate, marks: tuple[int, ...]) -> tuple[TextUpdate, tuple[int, ...]]:
        """Translate a text that is opened, and its marks. A mark is kept if the text up to it is a prefix of the whole
        text in the drafter's ids, too."""
        _check_base(update)
        self.text.follow(update)
        found, ids = [], self.text.ids
        for mark in sorted(marks):
            self.translation.follow(ids[:mark], mark)
            found.append((len(self.translation.tokens), self.translation.tokens.digest()))
        self.translation.follow(ids, len(ids))
        tokens = self.translation.tokens
        self.translation.unchanged = len(tokens)
        kept = (length for length, digest in found if length <= len(tokens) and tokens.digest(length) == digest)
        return TextUpdate.of(update.opening, tokens, 0), tuple(dict.fromkeys(kept))


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # a verifier's thread
        return None


def _outcome_of(drafting: asyncio.Task[DraftTree] | Future[DraftTree]) -> DraftTree | BaseException:
    """The tree of a draft that has ended, or the exception in its place."""
    if drafting.cancelled():  # the event loop of the text ends
        return PeerLost("drafter: a draft was cancelled")
    return drafting.exception() or drafting.result()


def _check_base(update: TextUpdate) -> None:
    if update.base < 1:
        raise BadRequest("update.base", "the text is empty and has no root")


class BridgedDrafter:
    """Implements `dendro.engine.LocalDrafter`. Calls of a text whose target's tokenizer has a bridge here are
    translated; others are passed on unchanged.

    `Opened` and `Closed` count tokens of the drafter. A tree of a bridged text has no trace of ranks.
    """

    def __init__(self, engine: DrafterEngine, bridges: Mapping[str, Bridge], clock: Clock = time.monotonic) -> None:
        """bridges: one per tokenizer of a target, by the tokenizer's fingerprint"""
        self.engine = engine
        self._clock = clock
        self._bridges = dict(bridges)
        self._texts: dict[bytes, _BridgedText] = {}
        self._drafting = BackgroundTasks()

    @property
    def kernels(self) -> str:
        return self.engine.kernels

    @property
    def sessions(self) -> int:
        return self.engine.sessions

    async def start(self) -> None:
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()

    async def lost(self) -> str:
        return await self.engine.lost()

    def fault(self) -> str:
        return self.engine.fault()

    def stats(self) -> dict[str, int]:
        return self.engine.stats() | {"bridged": len(self._texts)}

    def steps_by_rows(self) -> Mapping[int, StepTotals]:
        return self.engine.steps_by_rows()

    def memory_bytes(self, longest: int) -> dict[str, int]:
        return self.engine.memory_bytes(longest)

    async def hello(self) -> Hello:
        return await self.engine.hello()

    async def open(self, call: OpenCall) -> Opened:
        """Open a text at the engine (`DrafterEngine.open`). Cancelling the call closes the opening."""
        bridge = self._bridges.get(call.parameters.tokenizer)
        if bridge is None:
            return await self.engine.open(call)
        if call.parameters.sampling.draws_guesses:
            raise BadRequest("mode", f"{call.parameters.sampling.mode} needs a drafter of the target's own tokens")
        text, opening = _BridgedText(bridge, bridge.translation()), call.update.opening
        self._texts[opening] = text
        try:
            update, marks = await off_loop(call.update.base, partial(text.opened, call.update, call.parameters.marks))
            if self._texts.get(opening) is not text:
                raise NotFound("opening: was closed before it was ready")
            text.translated = True
            parameters = replace(call.parameters, marks=marks, vocabulary=0, structure=None)
            return await self.engine.open(replace(call, update=update, parameters=parameters), bridge.noise_ids)
        except BaseException:
            if self._texts.get(opening) is text:
                del self._texts[opening]
            raise

    async def draft(self, call: DraftCall) -> DraftTree:
        """Draft a tree at the engine (`DrafterEngine.draft`), and translate it within the shape's rows and depth."""
        text = self._texts.get(call.update.opening)
        if text is None:
            return await self.engine.draft(call)
        began_s = self._clock()
        update = text.follow(call.update)
        newest = text.text.ids[-LONGEST_TAIL:]
        took_s = self._clock() - began_s
        try:
            translated = DraftCall(update, call.shape)  # prepared trees have the drafter's ids: none is sent
            drafted = await self.engine.draft(translated, call.update.base - update.base)
        except BaseException:
            text.translation.unchanged = min(text.translation.unchanged, update.start)  # the engine may lack these ids
            raise
        began_s = self._clock()
        tree = text.bridge.tree(drafted, newest, call.shape)
        return replace(tree, draft_us=drafted.draft_us + microseconds(took_s + self._clock() - began_s))

    def draft_for(self, call: DraftCall, deliver: Deliver) -> None:
        """Draft a tree for a stream, or a verifier of this process. A translated text belongs to the event loop that
        opened it."""
        text = self._texts.get(call.update.opening)
        if text is None:
            self.engine.draft_for(call, deliver)
            return
        drafting: asyncio.Task[DraftTree] | Future[DraftTree]
        if _running_loop() is text.loop:  # begun before a close that comes next
            drafting = self._drafting.start(self.draft(call))
        else:
            drafting = asyncio.run_coroutine_threadsafe(self.draft(call), text.loop)
        drafting.add_done_callback(lambda done: deliver(_outcome_of(done)))

    async def close(self, call: CloseCall) -> Closed:
        """Close an opening at the engine (`DrafterEngine.close`). It ends there even if the call has another text."""
        text = self._texts.pop(call.update.opening, None)
        if text is None:
            return await self.engine.close(call)
        try:
            update = text.follow(call.update)
        except DendroError:
            self.engine.forget(call.update.opening)
            raise
        return await self.engine.close(CloseCall(update))
