"""Requests with parameters: each alone, decoding by the plain formulas, and the page that lists them.

python -m tests.parameters            write docs/parameters.md
python -m tests.parameters --check    exit with 1 where docs/parameters.md is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dendro.calls import RequestParameters
from dendro.options import (
    MAX_WORD_BYTES,
    OPTIONS,
)
from dendro.text import Limits, Sampling
from dendro.tree import DraftTree
from tree_kernels.noise import gumbel_noise
from tree_kernels.warp import Warp, processed, tokens_of

from verifier_service.requests import processors_of

PAGE = Path(__file__).parent.parent / "docs" / "parameters.md"

Options = dict[str, Any]
"""Keyword arguments of `build_request`."""

BIASED = {token: 3.0 * (-1) ** token for token in range(0, 250, 5)}
EVEN = tuple(range(0, 256, 2))

EACH: dict[str, Options] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 4.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "logit_bias": {"logit_bias": BIASED},
    "banned_ids": {"banned_ids": EVEN},
    "allowed_ids": {"allowed_ids": EVEN},
    "bad_words": {"bad_words": [(token, other) for token in range(256) for other in (41, 132, 190, 213)]},
    "min_new_tokens": {"min_new_tokens": 16, "stop_ids": EVEN},
    "stop_ids": {"stop_ids": tuple(range(64))},
}
"""Each parameter alone, strong enough to change a small model's answers; the rest of a request is plain."""


def parameters_of(options: Options, prompt: int, tokens: int) -> RequestParameters:
    """What peers get of a request with a prompt of so many tokens, which does not end at an end-of-text token."""
    fields = dict(options)
    logprobs = fields.pop("logprobs", None)
    fields.pop("echo", None)
    fields["logit_bias"] = tuple(sorted(fields.get("logit_bias", {}).items()))
    for name in ("banned_ids", "allowed_ids"):
        fields[name] = tuple(fields.get(name, ()))
    fields["bad_words"] = tuple(tuple(word) for word in fields.get("bad_words", ()))
    least, stop_ids = fields.pop("min_new_tokens", 0), tuple(fields.pop("stop_ids", ()))
    limits = Limits(prompt + tokens, True, prompt + least if least else 0, stop_ids)
    return RequestParameters(Sampling(**fields), limits, "", (), prompt_length=prompt, logprobs=logprobs)


def decoded(
    logits_of: Callable[[Sequence[int], DraftTree], Any], prompt: Sequence[int], given: RequestParameters
) -> list[int]:
    """The answer by the plain formulas: each row from its whole text, one token after the other."""
    its, sampling, text = processors_of(given, frozenset()), given.sampling, list(prompt)
    warp = Warp.of(sampling)
    while len(text) < given.limits.max_length:
        logits = logits_of(text, DraftTree.root_only(text[-1]))[0]
        scores = processed(logits, its, text, given.prompt_length)[None]
        noise = None if warp.greedy else gumbel_noise(sampling.seed, [len(text)], len(logits), sampling.sample_index)
        text.append(int(tokens_of(scores, warp, noise)[0]))
        if text[-1] in given.limits.stop_ids:
            break
    return text[len(prompt) :]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A line of the page."""

    name: str  # of the field of the public API
    oracle: str  # a class of transformers, or where the formula is from
    applies: str
    drafter: str  # what a drafter does with it
    identical: str = "yes"
    bounds: str = ""  # of a field that is no option of its own; else the declared ones


USED, FIRST, IGNORED = "ranks with it", "ranks its first guess with it", "ignores it"
PARAMETERS = (
    Parameter("logit_bias", "`SequenceBiasLogitsProcessor`", "every row", USED),
    Parameter(
        "logit_bias_texts",
        "`logit_bias` of the texts' tokens",
        "every row",
        USED,
        bounds=f"as `logit_bias`, together with it; texts of 1 to {MAX_WORD_BYTES} bytes that are one token",
    ),
    Parameter(
        "repetition_penalty", "`RepetitionPenaltyLogitsProcessor`", "tokens of the prompt and of the answer", IGNORED
    ),
    Parameter("banned_ids", "`SuppressTokensLogitsProcessor`", "every row", USED),
    Parameter("allowed_ids", "`SuppressTokensLogitsProcessor` of all other ids", "every row", USED),
    Parameter(
        "bad_words",
        "`NoBadWordsLogitsProcessor` without `eos_token_id`",
        "rows whose prompt and answer end with all of a sequence but its last token",
        IGNORED,
    ),
    Parameter(
        "bad_word_texts",
        "`bad_words` of the texts' tokens",
        "as for `bad_words`",
        IGNORED,
        bounds=f"as `bad_words`, together with it; texts of 1 to {MAX_WORD_BYTES} bytes",
    ),
    Parameter(
        "min_new_tokens",
        "`MinNewTokensLengthLogitsProcessor`, of end-of-text tokens and `stop_ids`",
        "rows of an answer that is shorter",
        IGNORED,
    ),
    Parameter(
        "structure",
        "trying every token (`tests/dendro/test_grammars.py`); the package `jsonschema`",
        "every row",
        "guesses only what it allows, where it can follow it",
    ),
    Parameter("frequency_penalty", "the formula of the OpenAI API", "tokens of the answer, once each time", IGNORED),
    Parameter("presence_penalty", "the formula of the OpenAI API", "tokens of the answer", IGNORED),
    Parameter("temperature", "`TemperatureLogitsWarper`", "every row", USED),
    Parameter(
        "top_k",
        "`TopKLogitsWarper`; of tokens that tie with the k-th, those of the lowest ids",
        "every row above temperature 0",
        FIRST,
    ),
    Parameter("top_p", "`TopPLogitsWarper`", "every row above temperature 0", FIRST),
    Parameter("min_p", "`MinPLogitsWarper`", "every row above temperature 0", FIRST),
    Parameter("seed", "none: the noise is a contract of its own", "every row above temperature 0", USED),
    Parameter("sample_index", "none, as for `seed`", "every row above temperature 0", USED),
    Parameter("n", "so many requests, with `sample_index` and the numbers after it", "the answers to a prompt", USED),
    Parameter("stop_ids", "`EosTokenCriteria`", "ends the answer, whose last token it is", IGNORED),
    Parameter("ignore_end", "`generate` with `eos_token_id=None`", "end-of-text tokens end no answer", IGNORED),
    Parameter("max_new_tokens", "`MaxLengthCriteria`", "ends the answer", IGNORED),
    Parameter(
        "mode",
        "enumeration of all drafts and outcomes (`tests/kernels/test_sampled_walk.py`)",
        "how the guesses of a tree decide the tokens (docs/modes.md)",
        "draws or ranks its guesses by it",
        "coupled, greedy, naive; multi-step and block keep the law alone, lenient is lossy",
    ),
    Parameter("lenience", "as for `mode`", "guesses in mode lenient", IGNORED, "lossy"),
    Parameter(
        "literal_prompt",
        "`split_special_tokens` of transformers' tokenizers",
        "the request's own prompt",
        "gets the tokens",
    ),
    Parameter(
        "show_special_tokens",
        "`decode` with `skip_special_tokens=False`",
        "the text of answer and echo, and with it `stop`; changes no token",
        IGNORED,
    ),
    Parameter(
        "echo", "`log_softmax` of the raw logits, in float32", "the request's own prompt; changes no token", IGNORED
    ),
    Parameter(
        "logprobs", "`log_softmax` of the raw logits, in float32", "every token of the answer; changes none", IGNORED
    ),
)
"""All parameters that change an answer or what is reported of it, in the order in which they are applied."""


def declared_cells(name: str, bounds: str = "") -> str:
    """The cells of an option's type, bounds and default, as declared."""
    option = OPTIONS.get(name)
    if option is None:
        return f"- | {bounds} | -"
    default = "-" if option.default in (None, "") else f"`{str(option.default).lower()}`"
    return f"{option.json_type} | {option.accepts or '-'} | {default}"


def written() -> str:
    """The page."""
    lines = [
        "# Parameters of a request",
        "",
        "Written by `python -m tests.parameters` from the declarations in `protos/dendro/options.py`;",
        "`tests/cluster/test_parameters.py` compares it. Fields are those of",
        "`GenerateRequest` and of its `Sampling` in `protos/dendro/v1/generation.proto`; the clients' `generate` has",
        "the same names. They are applied in this order, to every row of a tree with the row's own path as its text.",
        "Those down to `presence_penalty` are applied at temperature 0 too.",
        "",
        "- *Oracle*: the class of transformers that a single row is compared with, bit for bit for those down to",
        "  `presence_penalty` (`tests/kernels/test_processors.py`, `test_warp.py`).",
        "- *Identical*: answers with speculation have the tokens of answers without, for the parameter alone and in",
        "  random combinations (`tests/cluster/test_parameters.py`, `tests/verifier_service/test_parameters.py`,",
        "  `dendro certify`; 200 of all parameters on a cluster: `tests/cluster/test_random_requests.py`).",
        "  Log-probabilities are the same numbers, bit for bit, where the verifier is `bitwise`; where it is `margin`,",
        "  they differ by the rounding of its logits.",
        "- *Drafter*: what a drafter does with it. What it ignores can lower acceptance, and changes no token.",
        "",
        "| parameter | type | bounds | default | oracle | applies to | identical | drafter |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| `{each.name}` | {declared_cells(each.name, each.bounds)} | {each.oracle} | {each.applies} | "
            f"{each.identical} | {each.drafter} |"
            for each in PARAMETERS
        ),
        "",
        "The other options of a request:",
        "",
        "| option | type | bounds | default | meaning |",
        "|---|---|---|---|---|",
        *(
            f"| `{name}` | {declared_cells(name)} | {option.help} |"
            for name, option in OPTIONS.items()
            if name not in {each.name for each in PARAMETERS}
        ),
        "",
        "Texts of bad words and biases are made tokens by the target's tokenizer, as parts of a text: without special",
        "tokens and without the space that some tokenizers put before a text. In the clients they are in `bad_words`",
        "and `logit_bias`, beside ids. A bad word `cat` is two sequences, the tokens of `cat` and those of ` cat`, as",
        "users of transformers' `bad_words_ids` give them; ` cat` is that one alone. Other tokens that spell the same",
        "text, such as `c` and `at`, can still be drawn one after the other. A bias is of one token: `cat` and ` cat`",
        "are two, and a text of several is refused.",
        "",
        "Refused by the field's name: a number that is not one or out of bounds, more entries than the bound, an id",
        "outside the target's vocabulary, `min_new_tokens` above the answer's most tokens, and removals that may leave",
        "no token to draw (the last tokens of all `bad_words` count as removed). A `structure` (structured.md) is",
        "refused beside `banned_ids`, `allowed_ids` and `bad_words`, and beside `min_new_tokens` with `stop_ids`, as",
        "they could leave no token that it allows.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return 0 if PAGE.is_file() and PAGE.read_text() == written() else 1
    PAGE.write_text(written())
    return 0


if __name__ == "__main__":
    sys.exit(main())
