"""The command line's options of a request, made of their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from dendro.errors import BadRequest
from dendro.options import OPTIONS, JsonType, Option, OptionGroup, Options
from dendro.speculation import Speculation
from dendro.structure import Structure

from cluster.command_options import given_file, numbers_of, text_and_number

NEW_TOKENS = 128
"""The command's own default of `max_new_tokens`. The clients' is the server's."""

_TYPES: Mapping[JsonType, Any] = {
    JsonType.NUMBER: float,
    JsonType.INTEGER: int,
    JsonType.BOOLEAN: bool,
    JsonType.STRING: str,
}
_LISTS: Mapping[JsonType, Any] = {JsonType.INTEGER: list[int], JsonType.STRING: list[str]}

Command = TypeVar("Command", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class CommandPart:
    """One of several options of the command line that make one option of a request."""

    name: str  # name of the command's argument
    flag: str
    type: Any
    help: str = ""  # empty: the declared one
    metavar: str | None = None
    default: Any = None


PARTS: Mapping[str, tuple[CommandPart, ...]] = {
    "logit_bias": (
        CommandPart("logit_bias", "--logit-bias", list[str], metavar="ID:BIAS"),
        CommandPart(
            "logit_bias_texts",
            "--logit-bias-text",
            list[str],
            "The same, of the token with a text; repeatable.",
            "TEXT:BIAS",
        ),
    ),
    "bad_words": (
        CommandPart("bad_words", "--bad-word", list[str], metavar="ID,ID,..."),
        CommandPart(
            "bad_word_texts",
            "--bad-word-text",
            list[str],
            "A text whose tokens are not completed, alone and after a space; repeatable.",
            "TEXT",
        ),
    ),
    "structure": (
        CommandPart(
            "json_schema", "--json-schema", Path, "The answer is JSON, in one line, that this schema accepts.", "FILE"
        ),
        CommandPart("regex", "--regex", str, "The whole answer matches this regular expression."),
        CommandPart(
            "grammar",
            "--grammar",
            Path,
            "The answer is a sentence of this grammar: Lark syntax, from `start` on.",
            "FILE",
        ),
        CommandPart("choices", "--choices", list[str], "The answer is one of these; repeatable.", "TEXT"),
    ),
    "speculation": (
        CommandPart("speculation", "--speculation", str, default="auto"),
        CommandPart("policy", "--policy", str, "The policy of auto. Default: the server's.", default=""),
        CommandPart(
            "max_nodes",
            "--max-nodes",
            int,
            "The most guesses of a round. auto leaves larger trees out; a larger shape is refused. Default: the "
            "target's limit.",
        ),
        CommandPart(
            "draft_deadline_ms",
            "--draft-deadline-ms",
            int,
            "The longest a round waits for its draft; a round whose draft is late is plain decoding. Can only shorten "
            "the server's own limit.",
        ),
    ),
}
"""The options of a request that are several of the command line."""


def _parts_of(option: Option) -> tuple[CommandPart, ...]:
    if option.name in PARTS:
        return PARTS[option.name]
    default = NEW_TOKENS if option.name == "max_new_tokens" else option.default
    listed = option.json_type is JsonType.ARRAY
    kind = _LISTS[option.items] if listed else _TYPES[option.json_type]
    metavar = "ID" if kind == list[int] else None
    return (CommandPart(option.name, f"--{option.name.replace('_', '-')}", kind, metavar=metavar, default=default),)


def _parameters() -> Iterator[inspect.Parameter]:
    for option in OPTIONS.values():
        for part in _parts_of(option) if option.flags != () else ():
            flags = option.flags if option.flags and part.name == option.name else (part.flag,)
            panel = None if option.group is OptionGroup.REQUEST else option.group.capitalize()
            info = typer.Option(*flags, help=part.help or option.help, metavar=part.metavar, rich_help_panel=panel)
            kind = part.type if part.default is not None else part.type | None
            yield inspect.Parameter(
                part.name, inspect.Parameter.KEYWORD_ONLY, default=part.default, annotation=Annotated[kind, info]
            )


def takes_request_options(command: Command) -> Command:
    """Give a command of typer that ends with `**given` the options of a request in its place."""
    own = [
        each
        for each in inspect.signature(command, eval_str=True).parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    signature = inspect.Signature([*own, *_parameters()])
    command.__dict__["__signature__"] = signature  # typer reads both
    command.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    return command


def options_given(given: Mapping[str, Any]) -> Options:
    """The request's options of the command line's. Raises BadRequest, naming the option, for one that cannot be
    read."""
    made = {
        name: () if given[name] is None and option.json_type is JsonType.ARRAY else given[name]
        for name, option in OPTIONS.items()
        if option.flags != () and name not in PARTS
    }
    made["logit_bias"] = dict(
        numbers_of("--logit-bias", each, ":", int, float) for each in given["logit_bias"] or ()
    ) | dict(text_and_number("--logit-bias-text", each) for each in given["logit_bias_texts"] or ())
    made["bad_words"] = [
        *(numbers_of("--bad-word", each, ",", *[int] * (each.count(",") + 1)) for each in given["bad_words"] or ()),
        *(given["bad_word_texts"] or ()),
    ]
    made["structure"] = structure_given(given["json_schema"], given["regex"], given["grammar"], given["choices"])
    made["speculation"] = Speculation.parse(
        given["speculation"], given["policy"], given["max_nodes"], given["draft_deadline_ms"]
    )
    return cast(Options, made)


def structure_given(
    json_schema: Path | None, regex: str | None, grammar: Path | None, choices: list[str] | None
) -> Structure | None:
    """The structure of these options; None where none is given. Raises BadRequest for more than one, and for a file
    that cannot be read."""
    made = []
    if json_schema is not None:
        made.append(Structure.json_schema(given_file("--json-schema", json_schema)))
    if regex is not None:
        made.append(Structure.regex(regex))
    if grammar is not None:
        made.append(Structure.grammar(given_file("--grammar", grammar)))
    if choices:
        made.append(Structure.choices(choices))
    if len(made) > 1:
        raise BadRequest("structure", f"is given as {' and as '.join(each.form for each in made)}; give one of them")
    return made[0] if made else None
