"""A conversation as a prompt: the target's chat template writes it as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dendro.arguments import items_of, pairs_of, shown, text_of
from dendro.errors import BadRequest
from dendro.v1 import generation_pb2 as pb

MESSAGE_KEYS = ("role", "content")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages with a role and a content each; in a session, those since its last answer. Names that the template can
    read beside them are in `chat_template_kwargs`.

    >>> Chat([{"role": "user", "content": "Why is the sky blue?"}])
    Chat(messages=[{'role': 'user', 'content': 'Why is the sky blue?'}], chat_template_kwargs={})
    """

    messages: Sequence[Mapping[str, str]]
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def fill_chat(message: pb.Chat, chat: Chat) -> None:
    """Write a conversation into its message. Raises BadRequest, naming the field, for what it cannot hold."""
    message.SetInParent()
    for index, each in enumerate(items_of("messages", chat.messages)):
        name, added = f"messages[{index}]", message.messages.add()
        for key, value in pairs_of(name, each):
            if key not in MESSAGE_KEYS:
                raise BadRequest(name, f"has {shown(key)}; a message has {' and '.join(MESSAGE_KEYS)}")
            setattr(added, key, text_of(f"{name}.{key}", value))
    if chat.chat_template_kwargs:
        try:
            message.chat_template_kwargs = json.dumps(dict(chat.chat_template_kwargs))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest("chat_template_kwargs", f"cannot be written as JSON: {error}") from None
