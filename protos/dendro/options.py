"""The options of a request, each declared once: `OPTIONS`, read from the annotations of `Options`.

Derived from a declaration: the keyword argument of the Python clients, the field of the message that it fills, the
check of a number and of a length at admission and at peers, the option of `dendro generate` with its help, and its line
in docs/parameters.md. The order here is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, get_type_hints

from dendro.errors import BadRequest
from dendro.modes import VerificationMode
from dendro.speculation import Speculation
from dendro.structure import MAX_CHOICES, MAX_STRUCTURE_BYTES, Structure


class OptionGroup(StrEnum):
    """The part of a request that an option belongs to: a panel of `dendro generate --help`, but for REQUEST, whose
    options stand beside those of the call."""

    REQUEST = "request"
    SAMPLING = "sampling"
    STRUCTURE = "structure"
    OUTPUT = "output"
    SPECULATION = "speculation"


class JsonType(StrEnum):
    """The type of a value in JSON. The clients read an argument by it."""

    NUMBER = "number"
    INTEGER = "integer"
    BOOLEAN = "boolean"
    STRING = "string"
    ARRAY = "array"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class NumberBounds:
    """Numbers that a field accepts: an interval, and the words of a refusal.

    >>> NumberBounds(0, 1, "[)").holds(1)
    False
    >>> NumberBounds(0, 1, "[)").must
    'must lie in [0, 1)'
    """

    least: float
    most: float
    ends: str = "[]"  # a round bracket: the interval has not that end
    besides: float | None = None  # accepted beside the interval
    words: str = ""  # "must ..."; empty: made of the interval

    def holds(self, value: float) -> bool:
        """True if the field accepts a number; False for NaN."""
        above = self.least <= value if self.ends[0] == "[" else self.least < value
        below = value <= self.most if self.ends[1] == "]" else value < self.most
        return (above and below) or value == self.besides

    @property
    def must(self) -> str:
        return self.words or f"must lie in {self.ends[0]}{self.least:g}, {self.most:g}{self.ends[1]}"

    def check(self, field: str, value: float) -> None:
        """Raise BadRequest, naming the field, for a number that it does not accept."""
        if not self.holds(value):
            raise BadRequest(field, f"{self.must}; got {value}")


def whole(least: int, most: int) -> NumberBounds:
    """The whole numbers from `least` to `most`."""
    return NumberBounds(least, most, words=f"must lie in {least} to {most}")


def unsigned(bits: int) -> NumberBounds:
    """The whole numbers of `bits` bits."""
    return NumberBounds(0, 1 << bits, "[)", words=f"must be an unsigned {bits}-bit number")


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option of a request."""

    group: OptionGroup
    json_type: JsonType
    help: str  # a line of `dendro generate --help`
    default: Any = None  # None: the server's, or nothing
    bounds: NumberBounds | None = None  # bounds of the number, or of each number of an array or a mapping
    entries: int | None = None  # most entries of an array or a mapping
    items: JsonType = JsonType.INTEGER  # type of an array's items
    limits: str = ""  # limits that `bounds` does not express, in words
    flags: tuple[str, ...] | None = None  # flags of the command line; None: made of the name; empty: no flag
    name: str = ""  # name in the protocol, the clients and errors; read from the list of declarations

    @property
    def accepts(self) -> str:
        """The bounds in words; empty: there are none."""
        if self.limits or self.bounds is None:
            return self.limits
        return self.bounds.must.removeprefix("must lie in ").removeprefix("must be ")

    def check(self, value: float, part: str = "") -> None:
        """Raise BadRequest for a number out of bounds. part: its place in the field, as `[7]`"""
        assert self.bounds is not None
        self.bounds.check(f"{self.name}{part}", value)

    def check_entries(self, values: Sized) -> None:
        """Raise BadRequest for too many entries. Call it before they are copied."""
        assert self.entries is not None
        check_count(self.name, values, self.entries)


def check_count(field: str, values: Sized, most: int) -> None:
    """Raise BadRequest for a field with more than `most` values. Call it before they are copied."""
    if len(values) > most:
        raise BadRequest(field, f"has {len(values)} entries; at most {most}")


SEED_BITS = 64
SMALLEST_TEMPERATURE = 1e-6
"""Least temperature above 0: logits divided by less could overflow float32."""
LARGEST_TEMPERATURE = 1e30
"""Greatest temperature, below the largest float32."""
REPETITION_PENALTIES = (0.01, 100.0)
"""The least and the greatest repetition penalty."""
LARGEST_SHIFT = 100.0
"""The greatest magnitude of a presence penalty, a frequency penalty and a logit bias."""
MAX_BIASED_IDS = 1024
MAX_LISTED_IDS = 4096
"""The most ids of `banned_ids` and of `allowed_ids`."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_WORD_BYTES = 1024
"""Bytes in UTF-8 of a text in `bad_words` and `logit_bias`."""
MAX_STOP_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
"""Bytes of a stop string in UTF-8."""
MAX_TOP_LOGPROBS = 20
"""The most likeliest tokens that a request may ask for at each place."""
MAX_ECHOED = 1 << 17
"""The most log-probabilities of a prompt, those of likeliest tokens included."""
MAX_PREDICTIONS = 4
"""The most alternatives of a request's prediction."""
MAX_SAMPLES = 16
"""The most answers that a request may ask for."""
MAX_REQUEST_ID = 128
"""The most characters of a request's id."""
SHIFT = NumberBounds(-LARGEST_SHIFT, LARGEST_SHIFT)
ANY = NumberBounds(0, math.inf, "[)", words="must be at least 0 (0 keeps all)")
TEMPERATURE = NumberBounds(
    SMALLEST_TEMPERATURE,
    LARGEST_TEMPERATURE,
    besides=0,
    words=f"must be 0 (greedy), or a number from {SMALLEST_TEMPERATURE:g} to {LARGEST_TEMPERATURE:g}",
)

REQUEST, SAMPLING, STRUCTURE, OUTPUT, SPECULATION = OptionGroup
NUMBER, INTEGER, BOOLEAN, STRING, ARRAY, OBJECT = JsonType

Biases = Mapping[int, float] | Mapping[str, float] | Mapping[int | str, float]
"""Logit biases by token id, or by the text of a token."""


class Options(TypedDict, total=False):
    """A request's options besides its prompt: the keyword arguments of the clients. Absent ones, and numbers that are
    None, get the server's default."""

    model: Annotated[str, Option(REQUEST, STRING, "The target's name. Default: the first.", "")]
    session: Annotated[str, Option(REQUEST, STRING, "Continue this session.", "")]
    keep_session: Annotated[
        bool, Option(REQUEST, BOOLEAN, "Begin a session, whose token comes with the answer's end.", False)
    ]
    request_id: Annotated[str, Option(REQUEST, STRING, "The same over all resumes. Default: random.", "", flags=())]

    temperature: Annotated[float | None, Option(SAMPLING, NUMBER, "0 is greedy.", 0.0, TEMPERATURE)]
    top_k: Annotated[int | None, Option(SAMPLING, INTEGER, "0 keeps all.", 0, ANY)]
    top_p: Annotated[
        float | None,
        Option(SAMPLING, NUMBER, "1 keeps all.", 1.0, NumberBounds(0, 1, "(]"), limits="(0, 1], 1 keeps all"),
    ]
    min_p: Annotated[
        float | None,
        Option(SAMPLING, NUMBER, "0 keeps all.", 0.0, NumberBounds(0, 1, "[)"), limits="[0, 1), 0 keeps all"),
    ]
    seed: Annotated[
        int | None,
        Option(SAMPLING, INTEGER, "Default: the session's, or drawn and reported.", bounds=unsigned(SEED_BITS)),
    ]
    sample_index: Annotated[
        int | None,
        Option(SAMPLING, INTEGER, "Of a seed's samples. Default: the session's, or 0.", bounds=unsigned(32), flags=()),
    ]
    n: Annotated[
        int | None,
        Option(
            SAMPLING,
            INTEGER,
            "So many answers, each with a sample index of its own.",
            1,
            whole(1, MAX_SAMPLES),
            limits=f"1 to {MAX_SAMPLES}; 1 with a session or a resume",
            flags=("--n", "-n"),
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        Option(
            SAMPLING,
            NUMBER,
            "Of tokens of the prompt and the answer, as a factor.",
            1.0,
            NumberBounds(*REPETITION_PENALTIES),
        ),
    ]
    presence_penalty: Annotated[
        float | None, Option(SAMPLING, NUMBER, "Subtracted from logits of tokens of the answer.", 0.0, SHIFT)
    ]
    frequency_penalty: Annotated[
        float | None,
        Option(SAMPLING, NUMBER, "The same, for each time that the answer has the token.", 0.0, SHIFT),
    ]
    logit_bias: Annotated[
        Biases,
        Option(
            SAMPLING,
            OBJECT,
            "Added to a token's logit; repeatable.",
            bounds=SHIFT,
            entries=MAX_BIASED_IDS,
            limits=f"{MAX_BIASED_IDS} ids, each {-LARGEST_SHIFT:g} to {LARGEST_SHIFT:g}",
        ),
    ]
    banned_ids: Annotated[
        Sequence[int],
        Option(
            SAMPLING,
            ARRAY,
            "A token that is not drawn; repeatable.",
            entries=MAX_LISTED_IDS,
            limits=f"{MAX_LISTED_IDS} ids",
            flags=("--ban",),
        ),
    ]
    allowed_ids: Annotated[
        Sequence[int],
        Option(
            SAMPLING,
            ARRAY,
            "Draw only tokens given so; repeatable.",
            entries=MAX_LISTED_IDS,
            limits=f"{MAX_LISTED_IDS} ids",
            flags=("--allow",),
        ),
    ]
    bad_words: Annotated[
        Sequence[str | Sequence[int]],
        Option(
            SAMPLING,
            ARRAY,
            "Tokens that are not completed in order; repeatable.",
            entries=MAX_BAD_WORDS,
            items=ARRAY,
            limits=f"{MAX_BAD_WORDS} sequences of 1 to {MAX_BAD_WORD_TOKENS} ids",
            flags=("--bad-word",),
        ),
    ]

    structure: Annotated[
        Structure | None,
        Option(
            STRUCTURE,
            OBJECT,
            "What the answer's text must be.",
            limits=f"{MAX_STRUCTURE_BYTES} bytes, {MAX_CHOICES} choices",
        ),
    ]

    max_new_tokens: Annotated[
        int | None,
        Option(
            OUTPUT,
            INTEGER,
            "The most tokens of the answer.",
            limits="0 (with `echo`, and no session) to `router.max_new_tokens` and to the room of the text",
        ),
    ]
    min_new_tokens: Annotated[
        int | None,
        Option(
            OUTPUT,
            INTEGER,
            "Before so many tokens, none that ends the answer is drawn.",
            0,
            limits="0 to `max_new_tokens`",
        ),
    ]
    stop_ids: Annotated[
        Sequence[int],
        Option(
            OUTPUT,
            ARRAY,
            "A token that ends the answer, as its last; repeatable.",
            entries=MAX_STOP_IDS,
            limits=f"{MAX_STOP_IDS} ids",
            flags=("--stop-id",),
        ),
    ]
    ignore_end: Annotated[bool, Option(OUTPUT, BOOLEAN, "Continue past the end-of-text token.", False, flags=())]
    stop: Annotated[
        str | Sequence[str],
        Option(
            OUTPUT,
            ARRAY,
            "End the answer at this string; its text ends before it. May be given several times. In bash, $'\\n' is a "
            "line break.",
            items=STRING,
            entries=MAX_STOP_STRINGS,
            limits=f"{MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_BYTES} bytes",
        ),
    ]
    include_stop: Annotated[bool, Option(OUTPUT, BOOLEAN, "End the text after the stop string.", False)]
    echo: Annotated[
        bool,
        Option(
            OUTPUT,
            BOOLEAN,
            "Print the prompt, too, with its log-probabilities.",
            False,
            limits=f"{MAX_ECHOED} log-probabilities with `logprobs`, those of likeliest tokens included",
        ),
    ]
    show_special_tokens: Annotated[
        bool, Option(OUTPUT, BOOLEAN, "Print special tokens, too, such as the end of text.", False)
    ]
    literal_prompt: Annotated[
        bool,
        Option(
            OUTPUT,
            BOOLEAN,
            "Read texts of special tokens in the prompt as ordinary text.",
            False,
            limits="only with a prompt's text",
        ),
    ]
    logprobs: Annotated[
        int | None,
        Option(
            OUTPUT,
            INTEGER,
            f"Print each token's log-probability, and those of so many likeliest, 0 to {MAX_TOP_LOGPROBS}.",
            bounds=whole(0, MAX_TOP_LOGPROBS),
            limits=f"0 to {MAX_TOP_LOGPROBS} likeliest tokens",
        ),
    ]

    speculation: Annotated[
        Speculation | str,
        Option(
            SPECULATION,
            OBJECT,
            "auto: a policy picks the shape of every round. off: no trees. Or a shape for every round: 3,2,1, "
            "nodes(2,1), beam(4,3), dynamic(6,5,24), until(0.6,8), until(auto,8) or, without a drafter, proposed(7). "
            "Changes no token.",
            "auto",
        ),
    ]
    prediction: Annotated[
        str | Sequence[str],
        Option(
            SPECULATION,
            ARRAY,
            "What the answer likely is, such as a file that is edited; repeatable. Changes no token.",
            items=STRING,
            entries=MAX_PREDICTIONS,
            limits=f"{MAX_PREDICTIONS} texts, together of at most `router.max_prompt_bytes`",
        ),
    ]
    trees: Annotated[
        bool, Option(SPECULATION, BOOLEAN, "Send each round's draft tree. Changes no token.", False, flags=())
    ]
    mode: Annotated[
        str,
        Option(
            SPECULATION,
            STRING,
            "coupled, greedy, or, where the configuration lists it, naive, multi-step, block or lenient (lossy).",
            "coupled",
            limits=f"{', '.join(VerificationMode)}; all but the first two where the configuration lists them",
        ),
    ]
    lenience: Annotated[
        float | None,
        Option(
            SPECULATION,
            NUMBER,
            "Of --mode lenient, between 0 and 1.",
            bounds=NumberBounds(0, 1, "()", words="must lie in (0, 1) in mode lenient"),
            limits="above 0, below 1; only in mode lenient",
        ),
    ]


def _read() -> Mapping[str, Option]:
    hints = get_type_hints(Options, include_extras=True)
    return MappingProxyType({name: replace(hint.__metadata__[0], name=name) for name, hint in hints.items()})


OPTIONS = _read()
"""The declarations by name."""


@dataclass(frozen=True, slots=True)
class SamplingNumbers:
    """The numbers of a request's sampling. Raises BadRequest, naming the field, for one out of its declared bounds."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def check_numbers(self) -> None:
        for name in SAMPLING_NUMBERS:
            OPTIONS[name].check(getattr(self, name))


SAMPLING_NUMBERS = tuple(each.name for each in fields(SamplingNumbers))
