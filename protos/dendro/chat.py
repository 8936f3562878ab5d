"""A conversation as a prompt: the target's chat template writes it as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dendro.arguments import items_of, pairs_of, shown, text_of
from dendro.errors import BadRequest
from dendro.v1 import generation_pb2 as pb

MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages with a role and a content each; in a session, those since its last answer. Names that the template can
    read beside them are in `chat_template_kwargs`, functions that it describes in `tools`, text that the answer goes
    on from in `answer_start`, and special tokens whose text the answer has in `shown_tokens`. An
    assistant's message can have `tool_calls` and `reasoning_content`, a result's the `tool_call_id`.

    >>> Chat([{"role": "user", "content": "Why is the sky blue?"}])
    Chat(messages=[{'role': 'user', 'content': 'Why is the sky blue?'}])
    """

    messages: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    tools: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    answer_start: str = field(default="", repr=False)
    shown_tokens: Sequence[str] = field(default=(), repr=False)


def fill_chat(message: pb.Chat, chat: Chat) -> None:
    """Write a conversation into its message. Raises BadRequest, naming the field, for what it cannot hold."""
    message.SetInParent()
    for index, each in enumerate(items_of("messages", chat.messages)):
        name, added = f"messages[{index}]", message.messages.add()
        for key, value in pairs_of(name, each):
            if key not in MESSAGE_KEYS:
                raise BadRequest(name, f"has {shown(key)}; a message has {' and '.join(MESSAGE_KEYS)}")
            text = _json(f"{name}.{key}", value) if key == "tool_calls" else value
            setattr(added, key, text_of(f"{name}.{key}", text))
    if chat.chat_template_kwargs:
        kwargs = dict(pairs_of("chat_template_kwargs", chat.chat_template_kwargs))
        message.chat_template_kwargs = _json("chat_template_kwargs", kwargs)
    if chat.tools:
        message.tools = _json("tools", items_of("tools", chat.tools))
    message.answer_start = text_of("answer_start", chat.answer_start)
    for index, text in enumerate(items_of("shown_tokens", chat.shown_tokens)):
        message.shown_tokens.append(text_of(f"shown_tokens[{index}]", text))


def _json(field: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(field, f"cannot be written as JSON: {error}") from None
