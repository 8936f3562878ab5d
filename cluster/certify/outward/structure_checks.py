"""The checks of answers in JSON and of tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.certify.outward.served import NotOffered, OpenAIServer, ServedAnswer
from cluster.certify.promises import Promise
from cluster.measure.measurement import Begin, Step

TOKENS = 160
SAMPLED = {"temperature": 1.0, "max_tokens": TOKENS}
QUESTIONS = (
    "Describe a town in JSON: its name, its number of people, and its size as small or large.",
    "Invent a village. Answer in JSON with name, people and size.",
    "Which city do you like best? Answer with a JSON object.",
)
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 1_000_000},
        "size": {"type": "string", "enum": ["small", "large"]},
    },
    "required": ["name", "people", "size"],
    "additionalProperties": False,
}
TOOL_NAME = "describe_town"
TOOL = {"type": "function", "function": {"name": TOOL_NAME, "description": "Shows a town.", "parameters": SCHEMA}}


def fits_schema(value: Any) -> bool:
    """True for a value of SCHEMA.

    >>> fits_schema({"name": "Oslo", "people": 700_000, "size": "large"}), fits_schema({"name": "Oslo"})
    (True, False)
    """
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "people", "size"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 20
        and isinstance(value["people"], int)
        and not isinstance(value["people"], bool)
        and 0 <= value["people"] <= 1_000_000
        and value["size"] in ("small", "large")
    )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


FORMATS: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "json_object": ({"type": "json_object"}, lambda value: isinstance(value, dict)),
    "json_schema": (
        {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA, "strict": True}},
        fits_schema,
    ),
}
"""Fields of `response_format`, and whether a value is one."""
CHOICES: Mapping[str, Any] = {
    "required": "required",
    "the function's name": {"type": "function", "function": {"name": TOOL_NAME}},
    "auto": "auto",
}


async def json_answers(server: OpenAIServer, times: int, begin: Begin) -> Promise:
    """(e) Whole answers with a `response_format` are JSON of that format."""
    promise, step = Promise("(e) answers in JSON are valid"), begin("(e) answers in JSON", times * len(FORMATS))
    for name, (form, fits) in FORMATS.items():
        answers = await _answers(server, promise, name, times, step, {"response_format": form})
        if answers is None:
            continue
        whole = [each for each in answers if each.finish != "length"]
        wrong = [each.text for each in whole if not fits(_parsed(each.text))]
        _judge(promise, f"response_format {name}", answers, len(whole), wrong)
    _not_offered(promise)
    return promise


async def tool_calls(server: OpenAIServer, times: int, begin: Begin) -> Promise:
    """(f) Calls of tools name an offered function and have arguments of its schema; required ones are made."""
    promise, step = Promise("(f) calls of tools can be read"), begin("(f) calls of tools", times * len(CHOICES))
    for name, choice in CHOICES.items():
        fields = {"tools": [TOOL], "tool_choice": choice}
        answers = await _answers(server, promise, f"tool_choice {name}", times, step, fields)
        if answers is None:
            continue
        whole = [each for each in answers if each.finish != "length"]
        wrong = [f"{each.text} {list(each.calls)}" for each in whole if not _is_call(each, name != "auto")]
        _judge(promise, f"tool_choice {name}", answers, len(whole), wrong)
        if name == "auto":
            promise.found.append(f"tool_choice auto: {sum(bool(each.calls) for each in whole)} answers have a call")
    _not_offered(promise)
    return promise


def _is_call(answer: ServedAnswer, required: bool) -> bool:
    if not answer.calls:
        return not required
    functions = [call.get("function") or {} for call in answer.calls]
    return all(
        each.get("name") == TOOL_NAME and fits_schema(_parsed(each.get("arguments") or "")) for each in functions
    )


async def _answers(
    server: OpenAIServer, promise: Promise, what: str, times: int, step: Step, fields: Mapping[str, Any]
) -> list[ServedAnswer] | None:
    """Answers to QUESTIONS; None where the server refuses them."""
    found: list[ServedAnswer] = []
    for number in range(times):
        question = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
        try:
            found += (await server.chat(question, **SAMPLED, **fields))[:1]
        except NotOffered as error:
            promise.found.append(f"not offered: {what}: {error}")
            return None
        step()
        promise.answers += 1
    return found


def _judge(promise: Promise, what: str, answers: Sequence[ServedAnswer], whole: int, wrong: Sequence[str]) -> None:
    asked = f"{what}, temperature 1, {len(answers)} times, {TOKENS} tokens"
    cut = f", {len(answers) - whole} cut off and not judged" if whole < len(answers) else ""
    if not whole:
        promise.found.append(f"not judged: {asked}: every answer was cut off")
        return
    example = f"; such as {wrong[0][:80]!r}" if wrong else ""
    promise.check(not wrong, f"{asked}: {whole - len(wrong)} of {whole} right{cut}{example}")


def _not_offered(promise: Promise) -> None:
    """A promise of which no part could be asked for is not offered."""
    if promise.kept is None:
        promise.offered = any(not line.startswith("not offered") for line in promise.found)
        promise.why = "no answer was whole" if promise.offered else ""
