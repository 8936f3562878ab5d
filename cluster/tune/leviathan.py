"""Emitted tokens and speedup of a chain of guesses, in closed form: Leviathan et al., Fast Inference from
Transformers via Speculative Decoding (arXiv 2211.17192), theorems 3.8 and 3.11; docs/design/policies.md#chains.

`acceptance` is the chance that a guess is accepted if those before it are, the same at every depth; `guesses` their
number in a round; `cost` the time of a drafter's forward over that of the target's.
"""

from __future__ import annotations


def emitted(acceptance: float, guesses: int) -> float:
    """E[N] = (1 - a^(g+1)) / (1 - a): accepted guesses and the target's own token.

    >>> emitted(0.5, 2), emitted(1.0, 4), emitted(0.0, 4)
    (1.75, 5.0, 1.0)
    """
    _check(acceptance, guesses)
    return guesses + 1.0 if acceptance == 1 else (1 - acceptance ** (guesses + 1)) / (1 - acceptance)


def gain(acceptance: float, guesses: int, cost: float) -> float:
    """Speedup over plain decoding, E[N] / (g c + 1), where guesses do not slow the target's forward."""
    _check(acceptance, guesses, cost)
    return emitted(acceptance, guesses) / (guesses * cost + 1)


def operations(acceptance: float, guesses: int, operations_ratio: float) -> float:
    """Arithmetic operations per token, relative to plain decoding: (g chat + g + 1) / E[N].

    operations_ratio: chat, operations of the drafter per token over the target's
    """
    _check(acceptance, guesses, operations_ratio)
    return (guesses * operations_ratio + guesses + 1) / emitted(acceptance, guesses)


def _check(acceptance: float, guesses: int, cost: float = 0.0) -> None:
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance: {acceptance} is not in 0 to 1")
    if guesses < 0:
        raise ValueError(f"guesses: {guesses}; at least 0")
    if cost < 0:
        raise ValueError(f"cost: {cost}; at least 0")
