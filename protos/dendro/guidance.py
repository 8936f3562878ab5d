"""Calls of llguidance, and limits on the work that it may do.

The process that compiles structures first imports this file and must start quickly, so it needs the standard library
alone.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLInterpreter, LLParserLimits, LLTokenizer

LONGEST_REASON = 400
"""Most characters of llguidance's own message in an error."""
PATIENCE = 4
"""Factor on `StructureLimits.compile_s` at replicas."""

STEP_FUEL = 1_000_000
"""Work of the lexer for one mask, in llguidance's units. 100,000 units take 1 to 2 ms."""

_ITEMS = re.compile(r'"all_items":(\d+)')  # part of a mask's report; quotes inside of its texts are escaped
_FUEL = re.compile(r'"lexer_cost":(\d+)')


@dataclass(frozen=True, slots=True)
class StructureLimits:
    """Bounds of llguidance's work, in its own units: no clock decides whether an answer goes on.

    An item is a rule of the grammar that a text may be inside of (Earley's). llguidance makes items for all tokens that
    a mask is computed for, and a token costs at most what the mask before it did.
    """

    mask_items: int = 2000
    """Items of one mask. Definitions of Kubernetes need up to 1,062."""
    row_items: int = 500
    """Items after one token."""
    symbols: int = 10_000
    """Symbols of the rules of a grammar. A deployment of Kubernetes has 4,892."""
    answer_items: int = 200_000
    """Items of all masks of an answer, `token_items` for each of its tokens not counted."""
    token_items: int = 200
    compile_s: float = 0.5
    """CPU seconds for which a structure may compile, its first mask included, in a process of its own. The only limit
    that depends on a machine's speed: it is the router's to decide, so replicas allow PATIENCE times as much."""
    compile_mb: int = 512
    """Memory for that, in MiB."""

    def of_answer(self, tokens: int) -> int:
        """Most items of all masks up to the one after `tokens` tokens of an answer."""
        return self.answer_items + self.token_items * tokens

    def parser(self) -> LLParserLimits:
        """The limits in llguidance's form."""
        from llguidance import LLParserLimits

        return LLParserLimits(
            max_items_in_row=self.row_items,
            step_max_items=self.mask_items,
            max_grammar_size=self.symbols,
            step_lexer_fuel=STEP_FUEL,
            verbose_errors=False,
        )


LIMITS = StructureLimits()


class TokenTexts:
    """A tokenizer in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        """tokens: of each id; the last one ends a text   special: ids that stand for no text"""
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = special

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # used only where tokens are forced

    def tokenizer(self) -> LLTokenizer:
        """The tokenizer in llguidance's form."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self.eos_token_id)


def begin(tokenizer: LLTokenizer, lark: str, limits: StructureLimits) -> LLInterpreter:
    """Compile a grammar. Returns its state before the first token. Raises ValueError if it does not compile."""
    from llguidance import LLInterpreter

    made = LLInterpreter(
        tokenizer, lark, enable_backtrack=False, enable_ff_tokens=False, log_level=0, limits=limits.parser()
    )
    made.start_without_prompt()
    return made


def fault_of_grammar(tokenizer: LLTokenizer, lark: str, limits: StructureLimits, most_s: float) -> str:
    """Compile a grammar and compute its first mask. Returns why it cannot be enforced, as long as llguidance writes it;
    empty if it can.

    most_s: CPU seconds that `begin` may take
    """
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(lark, tokenizer, limits=limits.parser())
    if messages:
        return f"{'does not compile' if failed else 'cannot be enforced'}: {'; '.join(messages)}"
    began_s = time.thread_time()
    try:
        begun = begin(tokenizer, lark, limits)
    except BaseException as error:
        return f"does not compile: {fault_of(error)}"
    if time.thread_time() - began_s > most_s:
        return f"its parser takes more than {most_s:g} s of CPU time; simplify it"
    try:
        begun.compute_mask_into(bytearray(4 * -(-tokenizer.vocab_size // 32)))
    except BaseException as error:
        return f"no answer can begin: {fault_of(error)}"
    return ""


def items_of(report: str) -> int:
    """Number of items of a mask, read from the report that comes with it."""
    found = _ITEMS.search(report)
    return int(found[1]) if found is not None else 0


def fuel_of(report: str) -> int:
    """Work of the lexer since the mask before, that of other copies of the interpreter included."""
    found = _FUEL.search(report)
    return int(found[1]) if found is not None else 0


def fault_of(error: BaseException) -> str:
    """Reason of a failed call. llguidance raises ValueError, and panics as a BaseException of its own. Exceptions that
    end a program are raised again."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error
    return shortened(str(error).replace("<non-verbose/>", ""))


def shortened(text: Any) -> str:
    """Shorten a message of llguidance to one line. One that quotes a long expression keeps the fault at its end."""
    line = " ".join(str(text).split())
    if len(line) <= LONGEST_REASON:
        return line
    _, word, fault = line.rpartition(" error: ")
    end = f"…{word}{fault}" if word and len(fault) < LONGEST_REASON // 2 else ""
    return line[: LONGEST_REASON - len(end)] + end
