"""A router warns once of a drafter none of whose guesses is accepted."""

from __future__ import annotations

import pytest
from dendro.v1 import generation_pb2 as pb

from cluster.router.account import UNACCEPTED, AcceptanceWatch


def stats(name: str, drafted: int, accepted: int = 0) -> list[pb.DrafterStats]:
    return [pb.DrafterStats(name=name, drafted_tokens=drafted, accepted_tokens=accepted)]


def test_a_drafter_without_an_accepted_guess_is_warned_of_once(caplog):
    watch = AcceptanceWatch()
    for _ in range(4):
        watch.learn("large", stats("small", UNACCEPTED // 2))
    assert [record.getMessage() for record in caplog.records] == [
        f"drafter small: none of its {UNACCEPTED} guesses for large was accepted; was it trained for this target?"
    ]


@pytest.mark.parametrize("accepted", [1, UNACCEPTED])
def test_a_drafter_with_an_accepted_guess_is_not(caplog, accepted):
    watch = AcceptanceWatch()
    watch.learn("large", stats("small", UNACCEPTED - 1, accepted))
    watch.learn("large", stats("small", 10 * UNACCEPTED))
    watch.learn("other", stats("small", UNACCEPTED - 1))
    assert not caplog.records
