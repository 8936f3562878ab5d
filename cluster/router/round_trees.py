"""The draft trees of a request's rounds, as messages for its client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dendro.text import Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.arms import OFF_ARM, Arm
from cluster.policies import ConservativeUCB, InformedPolicy
from cluster.router.account import accepted_rows
from cluster.router.rounds import Policy
from cluster.router.token_texts import VocabularyTexts


class TreeRecorder:
    """Stands before a request's policy in the loop, and keeps the tree of the round that has ended."""

    def __init__(
        self, speculation: Policy, policy: InformedPolicy, texts: VocabularyTexts, names_drafter: bool
    ) -> None:
        """speculation: the loop's policy   policy: the request's policy, whose estimates are sent"""
        self.tree = pb.RoundTree()
        self._speculation = speculation
        self._policy = policy
        self._texts = texts
        self._names_drafter = names_drafter
        self._arms: Sequence[pb.ArmEstimate] = ()

    def choose(self) -> Arm:
        arm = self._speculation.choose()
        self._arms = arm_estimates(self._policy, self._names_drafter)  # the round changes them
        return arm

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        self._speculation.learn(arm, tree, verdict)
        tree = verdict.verified(tree)
        tokens = tree.tokens.tolist()
        self.tree = pb.RoundTree(
            token_ids=tokens,
            parents=tree.parents[1:].tolist(),
            texts=map(self._texts.text, tokens),
            chances=np.exp(tree.values[1:]).tolist() if tree.values.any() else (),
            accepted=accepted_rows(tree, verdict),
            proposed=sorted(tree.proposed),
            missed=tree.missed,
            arms=self._arms,
            draft_us=tree.draft_us,
            verify_us=verdict.verify_us,
            queue_us=verdict.queue_us,
        )


def arm_estimates(policy: InformedPolicy, names_drafter: bool) -> list[pb.ArmEstimate]:
    """What a policy expects of each arm in the round that it has chosen for; empty where it estimates none."""
    if not isinstance(policy, ConservativeUCB):
        return []
    prices = policy.experience.prices()
    timed = prices.predicted_us(OFF_ARM) is not None  # False: all times are placeholders
    found = (policy.estimate(arm, prices) for arm in policy.arms)
    return [
        pb.ArmEstimate(
            shape=each.arm.name(names_drafter),
            tokens=each.tokens,
            spread=each.bonus,
            round_us=each.us if timed else 0.0,
        )
        for each in found
    ]
