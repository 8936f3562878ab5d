"""`/v1/chat/completions`: what a request asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dendro.arguments import shown
from dendro.chat import Chat
from dendro.client import MAX_MESSAGE_BYTES
from dendro.errors import BadRequest
from dendro.options import JsonType
from dendro.structure import fill_structure, structure_from
from dendro.v1 import generation_pb2 as pb

from cluster.api.openai.answers import AnswerForm, ChatForm
from cluster.api.openai.calls import CallForm, CallFormat
from cluster.api.openai.errors import line_field, naming, renamed
from cluster.api.openai.fields import Fields, HttpRequest, Tokenizers, http_request, typed
from cluster.api.openai.mixed import MixedForm, MixedParts
from cluster.api.openai.reasoning import ReasoningMarkers, ReasoningPlace, is_plain, markers_of, rule_of
from cluster.api.openai.tools import CACHE_CONTROL, ArgumentsBudget, Tools, read_calls, read_tools
from cluster.router.prompts import check_messages, special_tokens_of, text_of_chat
from cluster.router.tokenizer import Tokenizer

NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
"""HTTP's names of our fields."""
WITHOUT_EFFECT = ("name", "parsed", "provider_specific_fields", CACHE_CONTROL)
"""Keys of messages that are accepted without effect. OpenAI's client adds `parsed`, its own reading of the content;
LiteLLM's proxy adds `provider_specific_fields` to the answers that it passes on, and passes them back."""
UNUSED = ("refusal", "annotations", "audio", "function_call")
"""Keys of messages as clients send them back, which must be null or empty."""


def read_chat(body: Mapping[str, Any], request_id: str, tokenizers: Tokenizers) -> tuple[HttpRequest, AnswerForm]:
    """Read a chat's body: the request, and the form of its answer. Raises BadRequest naming the field."""
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
    tokenizer = tokenizers(typed("model", body.get("model") or "", JsonType.STRING))
    calls = CallFormat.of(tokenizer) if tools.schemas else None
    markers = markers_of(tokenizer)
    if calls is not None and tools.required:
        chat = dataclasses.replace(chat, tools=tools.described, answer_start=calls.marker)
        made = calls.structure_of_several if tools.parallel else calls.structure
        try:
            structure = options["structure"] = made(tools.schemas)
        except BadRequest as error:  # the schemas are too long together
            raise BadRequest(error.field if error.field == "parallel_tool_calls" else "tools", error.reason) from None
        names = NAMES | {"structure": "tools", "structure.grammar": "tools"} | tools.fields_at(structure.texts[0])
        asked = http_request(fields, chat, options, request_id, names)
        if markers is not None and _place(asked.message, markers, tokenizer, calls.marker) is ReasoningPlace.BEGUN:
            asked.message.chat.MergeFrom(pb.Chat(answer_start=markers.closing + calls.marker))
        if not tools.parallel:
            return asked, CallForm(calls, request_id)
        several = MixedParts(None, False, calls.marks, [*tools.schemas], None, tokenizer, calls.marks.marker)
        return asked, MixedForm(request_id, several)
    marks = calls.marks if calls is not None else None
    shown = [marks.marker] if marks is not None and marks.marker else []
    shown += [markers.begin, markers.end] if markers is not None else []
    chat = dataclasses.replace(chat, tools=tools.described, shown_tokens=shown)
    asked = http_request(fields, chat, options, request_id, NAMES)
    if calls is not None and asked.message.HasField("structure"):
        asked = _or_calls(asked, calls, tools, tokenizer)
    place = ReasoningPlace.ENDED
    if markers is not None:
        place = _place(asked.message, markers, tokenizer)
        if asked.message.HasField("structure"):
            place, asked = _after_reasoning(asked, markers, place, tokenizer)
    if marks is None and place is ReasoningPlace.ENDED:
        return asked, ChatForm()
    parts = MixedParts(
        markers=None if place is ReasoningPlace.ENDED else markers,
        begun=place is ReasoningPlace.BEGUN,
        marks=marks,
        names=[*tools.schemas],
        most_calls=None if tools.parallel else 1,
        tokenizer=tokenizer.showing(special_tokens_of(asked.message.chat, tokenizer)),
    )
    return asked, MixedForm(request_id, parts)


def _place(
    message: pb.GenerateRequest, markers: ReasoningMarkers, tokenizer: Tokenizer, marker: str = ""
) -> ReasoningPlace:
    """Where the answer has reasoning. Raises BadRequest for messages that the template refuses. marker: what the
    prompt has after the template's text"""
    check_messages(message.chat.messages, MAX_MESSAGE_BYTES)
    return markers.place(text_of_chat(message.chat, tokenizer, bool(message.session)).removesuffix(marker))


def _or_calls(asked: HttpRequest, calls: CallFormat, tools: Tools, tokenizer: Tokenizer) -> HttpRequest:
    """Let the answer be calls, or text of the request's structure. Raises BadRequest where no structure has both."""
    structure = structure_from(asked.message.structure)
    named = renamed(structure.field, asked.names)
    with naming(asked.names):
        answer = rule_of(structure)
    if answer is None or not is_plain(calls.marks.marker, tokenizer):
        raise BadRequest(
            named.partition(".")[0],
            "is given beside tools that the answer may call; give one of them, as "
            + ("a grammar has no calls" if answer is None else f"no structure has the special token {calls.marker}"),
        )
    try:
        either = calls.structure_or(tools.schemas, tools.parallel, answer)
    except BadRequest as error:  # the schemas are too long together
        raise BadRequest("tools", error.reason) from None
    fill_structure(asked.message.structure, either)
    text = either.texts[0]
    names = {line_field(either.field, text.count("\n") + 1): named} | tools.fields_at(text)
    return dataclasses.replace(asked, names={**asked.names, either.field: named, **names})


def _after_reasoning(
    asked: HttpRequest, markers: ReasoningMarkers, place: ReasoningPlace, tokenizer: Tokenizer
) -> tuple[ReasoningPlace, HttpRequest]:
    """Let the structure of a request begin after the reasoning. Where it cannot, the answer has no reasoning."""
    if place is ReasoningPlace.ENDED:
        return place, asked
    structure = structure_from(asked.message.structure)
    with naming(asked.names):
        after = markers.structure(structure, place is ReasoningPlace.BEGUN, tokenizer)
    if after is None:
        if place is ReasoningPlace.BEGUN:
            asked.message.chat.MergeFrom(pb.Chat(answer_start=markers.closing))
        return ReasoningPlace.ENDED, asked
    named = renamed(structure.field, asked.names)
    asked.message.structure.Clear()
    fill_structure(asked.message.structure, after)
    return place, dataclasses.replace(asked, names={**asked.names, after.field: named})


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
    budget = ArgumentsBudget()
    return Chat([_message(f"messages[{index}]", each, budget) for index, each in enumerate(messages)], names)


def _message(field: str, given: Any, budget: ArgumentsBudget) -> dict[str, Any]:
    parts = Fields(typed(field, given, JsonType.OBJECT), f"{field}.")
    role = parts.take("role", JsonType.STRING)
    if role is None:
        raise BadRequest(f"{field}.role", "is missing")
    content = _content(f"{field}.content", parts.take("content", JsonType.STRING, JsonType.ARRAY))
    for name in WITHOUT_EFFECT:
        parts.take(name, *JsonType)
    for name in UNUSED:
        if value := parts.take(name, *JsonType):
            raise BadRequest(f"{field}.{name}", f"is not supported by this server; got {shown(value)}")
    made: dict[str, Any] = {"role": role, "content": content}
    if calls := parts.take("tool_calls", JsonType.ARRAY):
        made["tool_calls"] = read_calls(f"{field}.tool_calls", calls, budget)
    for name in ("tool_call_id", "reasoning_content"):
        if text := parts.take(name, JsonType.STRING):
            made[name] = text
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
        part.take(CACHE_CONTROL, *JsonType)
        part.finish()
    return joint.join(texts)
