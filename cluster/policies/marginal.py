"""The marginal rule, which sets the h and least of `until(auto,...)` shapes from measured costs and the current rate
(docs/design/stopping.md#the-marginal-rule).

A microsecond is worth `rate` tokens, since other rounds emit that many in it. Another level is drafted, and a guess
verified, only if it is expected to emit more tokens than its time is worth:

    accept * S > rate * (level_us + guesses * row_us)    S = sum of V over the rows that would get children
    V(guess) > rate * row_us                             V = the estimated chance that a row is reached

The rule maximises E[N] / E[T] over the rounds if `rate` equals that ratio (Dinkelbach), so h needs no sweep. An
`UntilShape` drafts another level while 1 - S < h. Therefore

    h = 1 - rate * (level_us + guesses * row_us) / accept        least = rate * row_us
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marginal:
    """Inputs of the marginal rule, and the h and least that it gives.

    At 200 tokens a second, a level of 1 ms with one guess, whose row costs 0.1 ms, costs 0.0002 * 1100 = 0.22 tokens.
    At an acceptance rate of 0.8 it is drafted while S > 0.22 / 0.8 = 0.275, that is 1 - S < 0.725; a guess is verified
    if its V exceeds 0.0002 * 100:

    >>> rule = Marginal(rate=0.0002, level_us=1000.0, row_us=100.0, guesses=1.0, accept=0.8)
    >>> round(rule.h, 3), round(rule.least, 3)
    (0.725, 0.02)
    """

    rate: float  # tokens emitted per microsecond
    level_us: float  # microseconds of drafting one more level
    row_us: float  # microseconds of one more row in the verifier's step
    guesses: float  # mean guesses that a level adds to the tree
    accept: float  # acceptance rate of a level below an accepted guess

    @property
    def h(self) -> float:
        """Another level is drafted while 1 - S < h."""
        return 1 - self.rate * (self.level_us + self.guesses * self.row_us) / self.accept

    @property
    def least(self) -> float:
        """Least estimated chance V of a guess that is verified."""
        return self.rate * self.row_us
