"""The measurements of one answer, and the names of the compared rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

GENERATE = "transformers generate"
LOOKUP = "transformers prompt lookup"
ASSISTED = "transformers assisted"
BEST_LOOKUP = "transformers prompt lookup, best"
BEST_ASSISTED = "transformers assisted, best"
BATCH = "transformers batch"
LLAMA_CPP = "llama.cpp"
LLAMA_CPP_LOOKUP = "llama.cpp lookup"
LLAMA_CPP_FILE = "llama.cpp own file"
OFF = "off"
AUTO = "auto"
BASELINES = (GENERATE, LOOKUP, BEST_LOOKUP, ASSISTED, BEST_ASSISTED)
"""Rows of the library: `LOOKUP` and `ASSISTED` with its defaults, the other two with the best of `GRIDS`."""
GRIDS = {
    BEST_LOOKUP: {f"{LOOKUP} of {guesses}": guesses for guesses in (5, 10, 15)},
    BEST_ASSISTED: {f"{ASSISTED} by {guesses}": guesses for guesses in (2, 4, 6)},
}
"""Guesses of a round, by the name of the setting, for the rows whose setting is chosen on other prompts."""
LLAMA_CPP_ROWS = (LLAMA_CPP, LLAMA_CPP_LOOKUP)
"""Rows of the target's weights in its dtype; `LLAMA_CPP_FILE` is of the target's own GGUF file, quantised as it is."""
GREEDY_ROWS = (LLAMA_CPP_LOOKUP,)
"""They answer at temperature 0 alone."""

Step = Callable[[], None]
"""Advances a progress bar."""
Begin = Callable[[str, int], Step]
"""begin(title, steps) begins a progress bar and returns its step."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Milliseconds of an answer's mean round, by part, as the router and its peers measured them."""

    total_ms: float  # mean of the rounds after the first, which includes the prefill
    draft_ms: float  # drafting, and waiting at the drafter
    verify_ms: float  # verifying
    queue_ms: float  # waiting at the verifier
    shapes: Mapping[str, int]  # requested shape -> rounds

    @property
    def hop_ms(self) -> float:
        """The rest of the round: neither drafting, nor verifying, nor waiting at a peer."""
        return self.total_ms - self.draft_ms - self.verify_ms - self.queue_ms


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer of one contender."""

    tokens: tuple[int, ...]
    seconds: float  # time from the request to the last token
    first_seconds: float  # time from the request to the first tokens
    first_tokens: int  # tokens of the first chunk
    round_count: int  # chunks of tokens
    rounds: RoundTimes | None = None  # None for the library's answers and for answers of one round

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The rate after the first chunk, whose time includes the prefill; None if that was the only one."""
        if len(self.tokens) <= self.first_tokens:
            return None
        return (len(self.tokens) - self.first_tokens) / (self.seconds - self.first_seconds)
