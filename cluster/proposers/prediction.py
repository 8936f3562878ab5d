"""Proposes what a request's prediction has next, aligned with the answer again after each difference
(docs/design/drafting.md#proposers).

OpenAI's predicted outputs: a client that knows most of an answer, such as a file that is edited, sends it along. An
answer that goes on as predicted is verified many tokens at a time. Any other is not changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from dendro.text import Text

from cluster.proposers.proposal import Proposal, trust

LONGEST = 16
"""Most tokens of a match that are compared."""
NEAR = 32
"""Most occurrences of a token in the prediction that are compared, those around the expected position."""
BRANCHES = 3
"""Places from which one predicted text is followed at once."""
SLICE = 64
"""Most tokens of an answer that are followed in a round: a token may be compared NEAR * LONGEST times. A resumed answer
has no proposals until the alignment has caught up."""
UNMATCHED = 0.25
"""Estimated chance of a guess after a token that the prediction does not have."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer may be in a predicted text."""

    next: int  # position of the predicted token that would follow
    matched: int  # tokens before the place that equal the answer's last tokens; 0: a guess, right after a difference

    @property
    def hope(self) -> float:
        """Estimated chance of the predicted token."""
        return trust(self.matched) if self.matched else UNMATCHED


@dataclass(frozen=True, slots=True)
class PredictedText:
    """A text that a client expects as the answer. All answers of a request read the same one."""

    tokens: Sequence[int]
    where: Mapping[int, Sequence[int]]  # positions in ascending order, by token

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Self:
        where: dict[int, list[int]] = {}
        for position, token in enumerate(tokens):
            where.setdefault(token, []).append(position)
        return cls(tokens, where)


class Alignment:
    """Follows an answer through one predicted text.

    The answer has 9 where 2 was predicted. After 9 either 3 follows (2 was replaced) or 2 (9 was inserted); 3 decides:

    >>> alignment = Alignment(PredictedText.of([1, 2, 3, 4]))
    >>> alignment.append([1, 9]), [place.next for place in alignment.places]
    (None, [2, 1])
    >>> alignment.append([3]), [place.next for place in alignment.places], alignment.accepted
    (None, [3], 2)
    """

    def __init__(self, predicted: PredictedText) -> None:
        self.predicted = predicted.tokens
        self.places = [Place(0, 1)]  # likeliest first; the beginning is as certain as a match of one token
        self.accepted = 0  # tokens of the answer that a place predicted
        self._answer: list[int] = []  # the answer's last tokens
        self._where = predicted.where

    def append(self, tokens: Sequence[int]) -> None:
        """Follow tokens of the answer."""
        for token in tokens:
            self._answer.append(token)
            followed = [
                Place(place.next + 1, place.matched + 1)
                for place in self.places
                if place.next < len(self.predicted) and self.predicted[place.next] == token
            ]
            self.accepted += bool(followed)
            self.places = followed or self._found(token)
        del self._answer[:-LONGEST]

    def _found(self, token: int) -> list[Place]:
        """Places after a token that no place predicted: at its occurrences in the prediction, those with the longest
        match and of these the nearest; and as if it replaced a predicted token, or was inserted. The longest match
        comes first, of equal ones the nearest."""
        expected = self.places[0].next if self.places else 0
        positions = self._where.get(token, [])
        middle = bisect_left(positions, expected)
        near = positions[max(middle - NEAR // 2, 0) : middle + NEAR // 2]
        found = [Place(position + 1, self._matched(position)) for position in near]
        found.sort(key=lambda place: (-place.matched, abs(place.next - expected)))
        guesses = [Place(min(expected + 1, len(self.predicted)), 0), Place(expected, 0)]
        places: dict[int, Place] = {}
        for place in (*found[:BRANCHES], *guesses):
            places.setdefault(place.next, place)
        return list(places.values())[:BRANCHES]

    def _matched(self, position: int) -> int:
        """Number of tokens up to a position that equal the answer's last tokens."""
        most, count = min(LONGEST, position + 1, len(self._answer)), 0
        while count < most and self.predicted[position - count] == self._answer[-1 - count]:
            count += 1
        return count


class PredictedOutput:
    """Proposes what one request's predicted texts have next."""

    name = "prediction"

    def __init__(self, predicted: Sequence[PredictedText], begins: int) -> None:
        """predicted: alternatives, the likeliest first   begins: the text's length at which the answer begins"""
        self._alignments = [Alignment(each) for each in predicted]
        self._length = begins

    def grow(self, text: Text) -> None:
        more = text.ids[self._length : self._length + SLICE]
        self._length += len(more)
        for alignment in self._alignments:
            alignment.append(more)

    def propose(self, text: Text, max_rows: int, max_depth: int) -> Proposal:
        proposal = Proposal(text.root)
        if self._length < len(text):
            return proposal
        places = [(place, each.predicted) for each in self._alignments for place in each.places]
        for place, predicted in sorted(places, key=lambda found: -found[0].matched):
            self._follow(proposal, predicted, place, min(max_depth, max_rows - 1 - proposal.guesses))
        return proposal

    def _follow(self, proposal: Proposal, predicted: Sequence[int], place: Place, depth: int) -> None:
        """Propose what follows a place. Guesses that other places have already proposed are not repeated."""
        row = 0
        for offset, token in enumerate(predicted[place.next : place.next + max(depth, 0)]):
            below = proposal.children(row)
            same = next((child for child in below if proposal.tokens[child] == token), None)
            if same is not None:
                row = same
            else:
                hope = (place.hope if not offset else trust(place.matched + offset)) / (1 + len(below))
                row = proposal.add(row, token, place.matched + offset, hope)

    def end(self, text: Text) -> None:
        """Do nothing: a prediction is its request's alone."""


def predicted_tokens(predicted: Sequence[PredictedText], answer: Sequence[int]) -> tuple[int, int]:
    """Number of an answer's tokens that its prediction had next, and number of the prediction's other tokens. If there
    are several predictions, the best one counts. Depends on the answer alone, and not on trees.

    >>> predicted_tokens([PredictedText.of([1, 2, 3, 4])], [1, 9, 3, 4])
    (3, 1)
    """
    accepted = []
    for each in predicted:
        alignment = Alignment(each)
        alignment.append(answer)
        accepted.append((min(alignment.accepted, len(each.tokens)), len(each.tokens)))
    best, length = max(accepted)
    return best, length - best
