"""`tools` and `tool_choice` of a chat: which functions a request describes, and which of them its answer must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dendro.arguments import shown
from dendro.errors import BadRequest
from dendro.options import JsonType
from dendro.written_numbers import json_text

from cluster.api.openai.bodies import values_of
from cluster.api.openai.errors import line_field
from cluster.api.openai.fields import Fields, typed
from cluster.api.reading import MOST_FIELDS
from cluster.distinct_keys import json_of

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CACHE_CONTROL = "cache_control"
"""Anthropic's mark of what to cache, which LiteLLM passes on in messages and tools. It has no effect here."""
NOT_BESIDE = ("structure", "response_format", "show_special_tokens")
"""Fields that a call has no place for."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that an answer can call; without any, an answer is text."""

    described: Sequence[Mapping[str, Any]]  # all functions, for the chat template, as they were sent
    schemas: Mapping[str, str]  # JSON schemas of the arguments of the functions that can be called
    required: bool = False  # True if the answer must be a call
    parallel: bool = True  # True if an answer may have several calls

    def fields_at(self, rules: str) -> dict[str, str]:
        """The fields of the schemas in a grammar of calls, by their lines as `line_field` names them. A line after
        theirs is of an answer that is no call."""
        at = {each["function"]["name"]: f"tools[{index}]" for index, each in enumerate(self.described)}
        lines = (line for line, rule in enumerate(rules.split("\n"), 1) if "%json" in rule.partition('"')[0])
        return {
            line_field("structure.grammar", line): f"{at[name]}.function.parameters"
            for line, name in zip(lines, self.schemas, strict=False)
        }


def read_tools(fields: Fields) -> Tools:
    """Take the fields of tools. Raises BadRequest naming the field."""
    given = fields.take("tools", JsonType.ARRAY) or []
    if len(given) > MAX_TOOLS:
        raise BadRequest("tools", f"has {len(given)} entries; at most {MAX_TOOLS}")
    schemas: dict[str, str] = {}
    for index, each in enumerate(given):
        name, schema = _function(f"tools[{index}]", each)
        if name in schemas:
            raise BadRequest(f"tools[{index}].function.name", f"{name} is described twice")
        schemas[name] = schema
    given = [{key: value for key, value in each.items() if key != CACHE_CONTROL} for each in given]
    choice = fields.take("tool_choice", JsonType.STRING, JsonType.OBJECT)
    parallel = fields.take("parallel_tool_calls", JsonType.BOOLEAN)
    if choice == "none" or (choice is None and not given):
        return Tools([], {})  # a template that describes functions would invite calls
    if not given:
        raise BadRequest("tool_choice", "is given without tools")
    if choice is None or choice == "auto":
        return Tools(given, schemas, parallel=parallel is not False)
    for name in NOT_BESIDE:
        if name in fields:
            raise BadRequest(name, "is given beside a tool_choice that makes the answer a call; give one of them")
    if choice == "required":
        return Tools(given, schemas, required=True, parallel=parallel is True)
    name = _named(choice)
    if name not in schemas:
        raise BadRequest("tool_choice.function.name", f"{shown(name)} is none of {', '.join(schemas)}")
    return Tools(given, {name: schemas[name]}, required=True, parallel=parallel is True)


def _function(field: str, given: Any) -> tuple[str, str]:
    """The name of a described function, and the schema of its arguments as JSON."""
    parts = Fields(typed(field, given, JsonType.OBJECT), f"{field}.")
    function = _typed_function(parts, field)
    name = function.take("name", JsonType.STRING)
    if name is None or not NAME.fullmatch(name):
        raise BadRequest(f"{field}.function.name", f"is {shown(name)}; must be 1 to 64 letters, digits, _ and -")
    function.take("description", JsonType.STRING)
    function.take("strict", JsonType.BOOLEAN)  # a schema is always enforced
    schema = function.take("parameters", JsonType.OBJECT) or {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise BadRequest(f"{field}.function.parameters.type", f"is {shown(schema['type'])}; arguments are an object")
    parts.take(CACHE_CONTROL, *JsonType)
    for each in (function, parts):
        each.finish()
    try:
        return name, json_text({"type": "object", **schema})
    except ValueError as error:
        raise BadRequest(f"{field}.function.parameters", f"cannot be written as JSON: {error}") from None


def _typed_function(parts: Fields, field: str) -> Fields:
    kind = parts.take("type", JsonType.STRING)
    if kind != "function":
        raise BadRequest(f"{field}.type", f"is {shown(kind)}; must be function")
    return Fields(parts.take("function", JsonType.OBJECT) or {}, f"{field}.function.")


def _named(choice: Any) -> Any:
    """The name in a `tool_choice` of one function."""
    if isinstance(choice, str):
        raise BadRequest("tool_choice", f"is {shown(choice)}; must be none, auto, required or a function")
    parts = Fields(choice, "tool_choice.")
    function = _typed_function(parts, "tool_choice")
    name = function.take("name", JsonType.STRING)
    for each in (function, parts):
        each.finish()
    return name


class ArgumentsBudget:
    """How many more values the arguments of a request's calls may have. They are JSON in a string, which a body's own
    limit of values does not see."""

    def __init__(self) -> None:
        self._left = MOST_FIELDS

    def take(self, field: str, text: str) -> None:
        """Count a text before it is parsed. Raises BadRequest past the limit."""
        self._left -= values_of(text.encode(errors="replace"))
        if self._left < 0:
            raise BadRequest(field, f"has too many values; all calls' arguments together have at most {MOST_FIELDS}")


def read_calls(field: str, given: Sequence[Any], budget: ArgumentsBudget) -> list[dict[str, Any]]:
    """The calls in an assistant's message. Templates read their arguments as values."""
    calls = []
    for index, each in enumerate(given):
        at = f"{field}[{index}]"
        parts = Fields(typed(at, each, JsonType.OBJECT), f"{at}.")
        call_id = parts.take("id", JsonType.STRING) or ""
        parts.take("index", JsonType.INTEGER)  # calls in a stream's parts have an index
        function = _typed_function(parts, at)
        name = function.take("name", JsonType.STRING)
        if name is None or not NAME.fullmatch(name):
            raise BadRequest(f"{at}.function.name", f"is {shown(name)}; must be 1 to 64 letters, digits, _ and -")
        function.take("parsed_arguments", *JsonType)  # OpenAI's client adds them, its own reading of the arguments
        text = function.take("arguments", JsonType.STRING) or "{}"
        budget.take(f"{at}.function.arguments", text)
        arguments = _arguments(f"{at}.function.arguments", text)
        for left in (function, parts):
            left.finish()
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _arguments(field: str, text: str) -> dict[str, Any] | str:
    """A call's arguments as a template gets them. A call that `max_tokens` cut off has a text that is no JSON."""
    try:
        found = json_of(text)
    except ValueError:
        return text
    arguments: dict[str, Any] = typed(field, found, JsonType.OBJECT)
    return arguments
