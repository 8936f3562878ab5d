"""`/v1/chat/completions`: what a request asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dendro.arguments import shown
from dendro.chat import Chat
from dendro.declared import JsonType
from dendro.errors import BadRequest

from cluster.api.openai.answers import AnswerForm, ChatForm
from cluster.api.openai.calls import CallForm, CallFormat
from cluster.api.openai.fields import Fields, HttpRequest, Tokenizers, http_request, typed
from cluster.api.openai.found_calls import CallFinder
from cluster.api.openai.mixed import MixedForm
from cluster.api.openai.tools import read_calls, read_tools

NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""HTTP's names of our fields."""
UNUSED = ("name", "refusal", "annotations", "audio", "function_call")
"""Keys of messages as clients send them back. `name` has no effect; others must be null or empty."""


def read_chat(body: Mapping[str, Any], request_id: str, tokenizers: Tokenizers) -> tuple[HttpRequest, AnswerForm]:
    """What is asked for, and the form of its answer. Raises BadRequest naming the field."""
    fields = Fields(body)
    options: dict[str, Any] = {}
    top = fields.take("top_logprobs", JsonType.INTEGER)
    if fields.take("logprobs", JsonType.BOOLEAN):
        options["logprobs"] = top or 0
    elif top is not None:
        raise BadRequest("top_logprobs", "is given without logprobs: true")
    if (predictions := fields.take("prediction", JsonType.OBJECT, JsonType.ARRAY)) is not None:
        given = enumerate(predictions) if isinstance(predictions, list) else [("", predictions)]
        options["prediction"] = [
            _predicted(f"prediction[{at}]" if at != "" else "prediction", one) for at, one in given
        ]
    tools, chat = read_tools(fields), chat_of(fields)
    if not tools.schemas:
        return http_request(fields, chat, options, request_id, NAMES), ChatForm()
    model = typed("model", body.get("model") or "", JsonType.STRING)
    calls = CallFormat.of(tokenizers(model), tools.described)
    if not tools.required:
        shown = [calls.marks.marker] if calls.marks.marker else []
        chat = dataclasses.replace(chat, tools=tools.described, shown_tokens=shown)
        asked = http_request(fields, chat, options, request_id, NAMES)
        if asked.message.HasField("structure"):
            name = "structure" if "structure" in body else "response_format"
            raise BadRequest(name, "is given beside tools that the answer may call; give one of them")
        most_calls = None if tools.parallel else 1
        return asked, MixedForm(request_id, most_calls, lambda: CallFinder(calls.marks, tools.schemas))
    options["structure"] = calls.structure(tools.schemas)
    chat = dataclasses.replace(chat, tools=tools.described, answer_start=calls.marker)
    names = NAMES | {"structure": "tools", "structure.grammar": "tools"}
    return http_request(fields, chat, options, request_id, names), CallForm(calls, request_id)


def _predicted(field: str, given: Any) -> str:
    """The text of a prediction."""
    parts = Fields(typed(field, given, JsonType.OBJECT), f"{field}.")
    kind = parts.take("type", JsonType.STRING)
    if kind != "content":
        raise BadRequest(f"{field}.type", f"is {shown(kind)}; must be content")
    content = _content(f"{field}.content", parts.take("content", JsonType.STRING, JsonType.ARRAY), "")
    parts.finish()
    return content


def chat_of(fields: Fields) -> Chat:
    """The conversation in the fields `messages` and `chat_template_kwargs`."""
    messages = fields.take("messages", JsonType.ARRAY) or []
    names = fields.take("chat_template_kwargs", JsonType.OBJECT) or {}
    return Chat([_message(f"messages[{index}]", each) for index, each in enumerate(messages)], names)


def _message(field: str, given: Any) -> dict[str, Any]:
    parts = Fields(typed(field, given, JsonType.OBJECT), f"{field}.")
    role = parts.take("role", JsonType.STRING)
    if role is None:
        raise BadRequest(f"{field}.role", "is missing")
    content = _content(f"{field}.content", parts.take("content", JsonType.STRING, JsonType.ARRAY))
    for name in UNUSED:
        if name in parts and (value := parts.take(name, *JsonType)) and name != "name":
            raise BadRequest(f"{field}.{name}", f"is not supported by this server; got {shown(value)}")
    made: dict[str, Any] = {"role": role, "content": content}
    if calls := parts.take("tool_calls", JsonType.ARRAY):
        made["tool_calls"] = read_calls(f"{field}.tool_calls", calls)
    if call_id := parts.take("tool_call_id", JsonType.STRING):
        made["tool_call_id"] = call_id
    parts.finish()
    return made


def _content(field: str, given: str | list[Any] | None, joint: str = "\n") -> str:
    """A message's text. Parts of text are lines of it. joint: between parts"""
    if given is None or isinstance(given, str):
        return given or ""
    texts = []
    for index, each in enumerate(given):
        part = Fields(typed(f"{field}[{index}]", each, JsonType.OBJECT), f"{field}[{index}].")
        kind = part.take("type", JsonType.STRING)
        if kind != "text":
            raise BadRequest(f"{field}[{index}].type", f"is {shown(kind)}; only text is read")
        texts.append(part.take("text", JsonType.STRING) or "")
        part.finish()
    return joint.join(texts)
