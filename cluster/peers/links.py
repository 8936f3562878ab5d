"""A verifier replica's ways to drafters, for trees that routers order (`dendro.order`)."""

from __future__ import annotations

import asyncio
from functools import partial

from dendro.calls import Deliver, DraftCall
from dendro.certificates import CertificateFiles
from dendro.errors import DendroError, PeerLost
from dendro.failures import described
from dendro.order import Missed
from dendro.tasks import BackgroundTasks
from dendro.tree import DraftTree

from cluster.peers.opening import log
from cluster.peers.stream import DRAFTER, RemoteDrafter, Streams


class StreamLinks:
    """One stream to each drafter replica, connected when it is first needed. Belongs to the event loop in which it is
    made; `draft` may be called from any thread."""

    def __init__(self, certificates: CertificateFiles | None = None) -> None:
        """certificates: of this verifier; without them, no TLS"""
        self._streams = Streams(DRAFTER, certificates)
        self._loop = asyncio.get_running_loop()
        self._connecting = BackgroundTasks()

    def draft(self, drafter: str, call: DraftCall, deliver: Deliver) -> None:
        stream = self._streams.connected(drafter) if call.alone else None
        if stream is not None and RemoteDrafter(stream).draft_at_once(call, deliver):
            return
        try:
            self._loop.call_soon_threadsafe(self._draft, drafter, call, deliver)
        except RuntimeError:  # the loop is closed: the replica ends
            deliver(Missed.UNLINKED)

    def _draft(self, drafter: str, call: DraftCall, deliver: Deliver) -> None:
        if (stream := self._streams.connected(drafter)) is not None:
            RemoteDrafter(stream).draft(call).add_done_callback(partial(_deliver, deliver))
            return
        # A call that waited for the connection could reach the drafter after a later call of the router.
        deliver(Missed.UNLINKED)
        self._connecting.start(self._connect(drafter))

    async def _connect(self, drafter: str) -> None:
        try:
            await self._streams.to(drafter)
        except DendroError as error:
            log.info("a drafter cannot be called from here: %s", described(error))

    async def close(self) -> None:
        self._connecting.cancel()
        await self._streams.close()


def _deliver(deliver: Deliver, done: asyncio.Future[DraftTree]) -> None:
    if done.cancelled():
        deliver(PeerLost("drafter: the call was cancelled"))
    else:
        deliver(done.exception() or done.result())
