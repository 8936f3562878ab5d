"""The account of a request's rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

from dendro.calls import Hello
from dendro.shapes import OFF, TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.policies import Experience, Offer, Place
from cluster.policies.prior import Prior
from cluster.router.speculation import Asked


class Tally:
    """Wraps a policy, keeps the account of its rounds, and times them for its tenant's experience."""

    def __init__(
        self,
        asked: Asked,
        experience: Experience,
        place: Place,
        temperature: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notes = Prior()
        self._temperature = temperature
        self._policy = asked.policy
        self._chosen = asked.adaptive  # shapes are a policy's choice, of arms that the configuration bounds
        self._experience = experience
        self.place = place
        self._clock = clock  # seconds
        self._began_s = self._first_s = 0.0
        self._disturbed = False
        self.shape: TreeShape = OFF  # of the round that runs
        self.offer: Offer | None = None  # of the next one
        self.account = pb.SpeculationStats(policy=asked.name)

    def choose(self) -> TreeShape:
        self._began_s = self._clock()
        self.shape = self._policy.choose(self.offer)
        self._disturbed = self._experience.shared.opening > 0
        return self.shape

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        now_s = self._clock()
        first = self.account.rounds == 0
        self._policy.learn(shape, tree, verdict)
        worth = self._experience.worth(shape, tree, verdict, self._temperature) if self._chosen else None
        self.notes.learn(shape, tree, verdict, worth)
        self.place.begun()
        took_us = 1e6 * (now_s - self._began_s)
        if not first:  # which waits for its text to be opened
            disturbed = self._disturbed or self._experience.shared.opening > 0
            self._experience.learn_time(shape, tree, verdict, took_us, disturbed)
        self._count(shape, tree, verdict)
        self._time(tree, verdict, int(took_us), now_s, first)

    def meet(self, hello: Hello | None) -> None:
        """What the verifier says of itself: how its target's steps grow with their rows."""
        if hello is not None:
            self._experience.shared.attends = hello.attends

    def _count(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        account, tokens, accepted = self.account, len(verdict.tokens), len(verdict.ranks)
        account.rounds += 1
        account.pulls[str(shape)] += 1
        account.emitted[tokens] += 1
        account.emitted_tokens += tokens
        account.cut_tokens += verdict.length - tokens
        account.drafted_tokens += tree.guesses
        account.accepted_tokens += accepted
        account.discarded_tokens += tree.guesses - accepted
        account.trimmed_tokens += verdict.trimmed
        account.late_drafts += tree.missed

    def _time(self, tree: DraftTree, verdict: Verdict, took_us: int, now_s: float, first: bool) -> None:
        account, tokens = self.account, len(verdict.tokens)
        busy_us = tree.draft_us + verdict.verify_us + verdict.queue_us
        rest_us = max(took_us - busy_us, 0)  # peers round by themselves, and the last word on a round is theirs
        account.rounds_us += busy_us + rest_us
        account.draft_us += tree.draft_us
        account.verify_us += verdict.verify_us
        account.queue_us += verdict.queue_us
        if first:
            account.opening_us = rest_us
            self._first_s = now_s
        else:
            account.hop_us += rest_us
            account.decode_tokens += tokens
            account.decode_us = int(1e6 * (now_s - self._first_s))
