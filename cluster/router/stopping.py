"""Wraps a drafter so that it is asked for shapes with numbers: those of `until(auto,...)` are computed here."""

from __future__ import annotations

from collections.abc import Mapping

from dendro.calls import Opened
from dendro.text import Text
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies.stopping import StopRule
from cluster.router.ports import DrafterPort


class StoppingDrafter:
    """A request's drafter handle with its stop rule."""

    def __init__(self, drafter: DrafterPort, rule: StopRule) -> None:
        self._drafter = drafter
        self._rule = rule

    @property
    def openings(self) -> Mapping[str, Opened]:
        return self._drafter.openings

    async def prepare(self, text: Text, arm: Arm) -> None:
        await self._drafter.prepare(text, arm)

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        tree = await self._drafter.draft(text, self._rule.resolved(arm))
        self._rule.drafted(tree)
        return tree

    async def close(self, text: Text) -> None:
        """As the drafter's: never raises, and may be called again."""
        await self._drafter.close(text)
