"""Failures in a process's log: where an error was raised, and its message only where that quotes no text.

Errors of Python and of libraries often quote what they were given: a KeyError its key, a parser the line, a panic of
the tokenizer the prompt. So the log has the class and the stack of such an error.
"""

from __future__ import annotations

import logging
import traceback

from dendro.errors import BadRequest, DendroError

QUOTING_NOTHING = (DendroError, OSError, RuntimeError, ArithmeticError, MemoryError)
"""Errors whose messages quote no text. Torch's are RuntimeErrors. A BadRequest quotes the field's value."""

MOST_ERRORS = 8
"""Errors of a chain that are logged: errors may refer to each other in a circle."""


def described(error: BaseException) -> str:
    """The error's message if that quotes no text, else its class."""
    quotes = isinstance(error, BadRequest) or not isinstance(error, QUOTING_NOTHING)
    return type(error).__name__ if quotes else str(error) or type(error).__name__


def log_failure(log: logging.Logger, error: BaseException, message: str, *arguments: object) -> None:
    """Log a message with the error's stack, and those of the errors that it came from."""
    log.error(f"{message}\n%s", *arguments, _stack_of(error))


def _stack_of(error: BaseException) -> str:
    parts: list[str] = []
    found: BaseException | None = error
    while found is not None and len(parts) < MOST_ERRORS:
        name, message = type(found).__name__, described(found)
        stack = "".join(traceback.format_tb(found.__traceback__))
        parts.append(stack + (name if message == name else f"{name}: {message}"))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return "\nraised after:\n".join(parts)
