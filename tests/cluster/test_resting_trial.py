"""What a request in mode auto costs while a speculation trial rests: what one in mode off does."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from dendro import wire
from dendro.v1 import generation_pb2 as pb

from cluster.peers.pools import LocalPool, Peers
from cluster.policies import Experience
from cluster.policies.prior import Prior
from cluster.policies.step_time import StepTime
from cluster.policies.trial import SpeculationTrial
from cluster.proposers.lookup import Lookup
from cluster.proposers.proposals import Chances
from cluster.proposers.suffix import Automaton, Suffix
from cluster.router.ingress import Ingress
from cluster.router.priors import Priors
from cluster.router.served import Served
from cluster.sessions import MemorySessions
from tests.support.fakes import END, VOCABULARY, FakeDrafter, FakeVerifier
from tests.support.toy_cluster import ToyTokenizer, toy_config
from tests.support.toy_edge import RecordedPriors

CLIENTS, TOKENS = 4, 24
SPECULATIVE = (
    (Experience, "learn"),
    (Prior, "lengths_of"),
    (Prior, "add"),
    (Priors, "_write"),
    (StepTime, "learn"),
    (StepTime, "coefficients"),
    (Chances, "learn"),
    (Chances, "tree"),
    (Lookup, "grow"),
    (Lookup, "propose"),
    (Suffix, "grow"),
    (Suffix, "propose"),
    (Automaton, "extend"),
)
"""Work that only guesses need."""


class WeighedVerifier(FakeVerifier):
    """Counts calls and their bytes."""

    def __init__(self, work: Counter[str]) -> None:
        super().__init__()
        self.work = work

    def _weigh(self, name, call):
        self.work[f"verifier.{name}"] += 1
        self.work[f"verifier.{name} bytes"] += wire.verifier_call_message(1, call).ByteSize()

    async def open(self, call):
        self._weigh("open", call)
        return await super().open(call)

    async def verify(self, call):
        self._weigh("verify", call)
        return await super().verify(call)

    async def close(self, call):
        self._weigh("close", call)
        return await super().close(call)


class CountedPool(LocalPool):
    """Counts leases."""

    def __init__(self, engine, work: Counter[str], name: str) -> None:
        super().__init__(engine)
        self.work, self.name = work, name

    async def lease(self):
        self.work[f"{self.name} leases"] += 1
        return await super().lease()


class SavedPriors(RecordedPriors):
    """Counts the bytes that are saved."""

    def __init__(self, work: Counter[str]) -> None:
        super().__init__()
        self.work = work

    async def save(self, key, prior) -> bool:
        saved = await super().save(key, prior)
        self.work["saved bytes"] += len(self.blobs[key])
        return saved


def request(mode, client) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[(7 * client + place) % 9 for place in range(20)]),
        max_new_tokens=TOKENS,
        ignore_end=True,
    )
    asked.speculation.mode = mode
    return asked


def counted(function, work, name):
    def count(*arguments, **named):
        work[name] += 1
        return function(*arguments, **named)

    return count


@pytest.mark.parametrize("policy", ["conservative_ucb"])
async def test_while_a_trial_rests_requests_cost_peers_stores_and_indexes_what_requests_without_speculation_cost(
    monkeypatch: pytest.MonkeyPatch, policy: str
):
    work: Counter[str] = Counter()
    drafter, verifier = FakeDrafter(), WeighedVerifier(work)
    config = toy_config(speculation={"policy": policy})
    served = Served("toy", ToyTokenizer(), VOCABULARY, 2048, frozenset({END}), "float32")
    targets = {"toy": CountedPool(verifier, work, "verifier")}
    drafters = {"helper": CountedPool(drafter, work, "drafter")}
    ingress = Ingress(config, Peers(config, targets, drafters), MemorySessions(), {"toy": served}, SavedPriors(work))

    async def clients(mode) -> tuple[Counter[str], list[list[int]]]:
        async def client(number):
            ids: list[int] = []
            async for event in ingress.generate(request(mode, number)):
                ids += event.chunk.token_ids
            return ids

        work.clear()
        answers = await asyncio.gather(*map(client, range(CLIENTS)))
        work["drafter calls"] = drafter.calls
        return Counter(work), answers

    guessing, answers = await clients(pb.Speculation.MODE_AUTO)
    assert guessing["drafter leases"] and guessing["saved bytes"], "a router's first requests guess"
    trials = ingress.experience["toy"].concurrency.trials
    for load in range(8):
        trials[load] = SpeculationTrial.begun(1.0, 0.7)
    await clients(pb.Speculation.MODE_AUTO)  # ends what the first began, and saves the gains
    drafter.calls = 0
    for owner, name in SPECULATIVE:
        full = f"{owner.__name__}.{name}"
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), work, full))
    off, plain = await clients(pb.Speculation.MODE_OFF)
    auto, resting = await clients(pb.Speculation.MODE_AUTO)
    assert answers == plain == resting
    assert auto == off
    assert auto["verifier.verify"] == CLIENTS * TOKENS and set(auto) <= {
        "verifier leases",
        "drafter calls",
        *(f"verifier.{name}{bytes_}" for name in ("open", "verify", "close") for bytes_ in ("", " bytes")),
    }
    assert auto["drafter calls"] == 0
