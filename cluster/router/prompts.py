"""The token ids of a request's prompt: of a text, of a conversation, or given as ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dendro.errors import BadRequest
from dendro.options import OPTIONS
from dendro.tasks import LONG, PART, off_loop
from dendro.v1 import generation_pb2 as pb

from cluster.distinct_keys import distinct, json_of
from cluster.proposers.prediction import PredictedText
from cluster.router.served import Served
from cluster.router.tokenizer import Tokenizer

MAX_MESSAGES = 4096
DIGEST_DIGITS = 32
MAX_SHOWN, MAX_SHOWN_BYTES = 16, 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
QUESTION, ANSWER = "A question.", "The answer so far."
"""A turn put before the messages that continue a session. What the template writes after ANSWER is what follows the
session's last answer."""


async def ids_of_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest,
    served: Served,
    most_bytes: int,
    earlier: Sequence[int] = (),
    described: str | None = None,
) -> list[int]:
    """The ids of a prompt that follows `earlier` tokens; empty for an empty prompt. Raises BadRequest naming the field.
    most_bytes: limit on a text, or on all messages together   described: `tools_digest` of the tools that the earlier
    tokens describe; None: not known"""
    kind = request.WhichOneof("prompt")
    if request.literal_prompt and kind != "text":
        raise BadRequest("literal_prompt", "is about a prompt's text; token ids and conversations are used unchanged")
    if isinstance(request, pb.GenerateRequest) and kind == "token_ids":
        return await checked_ids("prompt.token_ids", request.token_ids.ids, served)
    if kind == "chat":
        check_messages(request.chat.messages, most_bytes)
        _size("tools", request.chat.tools, most_bytes)
        _size("chat_template_kwargs", request.chat.chat_template_kwargs, most_bytes)
        _size("answer_start", request.chat.answer_start, most_bytes)
        return await off_loop(
            LONG, lambda: _in_vocabulary("messages", _ids_of_chat(request.chat, served, earlier, described), served)
        )
    if kind != "text" or not request.text:
        return []
    size = _size("prompt", request.text, most_bytes)
    encode = served.tokenizer.encode_literally if request.literal_prompt else served.tokenizer.encode
    work = LONG if request.literal_prompt else size // 2  # the first literal prompt makes the encoder
    return await off_loop(work, lambda: _in_vocabulary("prompt.text", encode(request.text, not earlier), served))


async def predicted_texts(texts: Sequence[str], served: Served, most_bytes: int) -> list[PredictedText]:
    """The alternatives of a prediction, each no longer than a text may be. Raises BadRequest naming the field."""
    OPTIONS["prediction"].check_entries(texts)
    size = sum(_size("prediction", text, most_bytes) for text in texts)
    _check_size("prediction", size, most_bytes)

    def encoded() -> list[PredictedText]:
        made = [served.tokenizer.encode(text, begins=False)[: served.max_length] for text in texts]
        return [PredictedText.of(ids) for ids in made if ids]

    return await off_loop(size // 2, encoded)


def special_tokens_of(chat: pb.Chat, tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that the answer's text has. Raises BadRequest for too many, or a text that is too long."""
    texts = chat.shown_tokens
    if len(texts) > MAX_SHOWN:
        raise BadRequest("shown_tokens", f"has {len(texts)} entries; at most {MAX_SHOWN}")
    for index, text in enumerate(texts):
        _check_size(f"shown_tokens[{index}]", len(text.encode()), MAX_SHOWN_BYTES)
    return frozenset(
        token for text in texts for token in tokenizer.encode(text, begins=False) if not tokenizer.visible([token])
    )


def _size(field: str, text: str, most: int) -> int:
    """Size of a text in UTF-8, checked. A text of more than `most` characters is refused without being encoded."""
    size = len(text) if len(text) > most else len(text.encode())
    _check_size(field, size, most)
    return size


def _check_size(field: str, size: int, most: int) -> None:
    if size > most:
        raise BadRequest(field, f"has {size} bytes; at most {most}")


def check_messages(messages: Sequence[pb.ChatMessage], most_bytes: int) -> None:
    """Raise BadRequest, naming the field, for too many messages, an unknown role, or too many bytes."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequest("messages", f"has {len(messages)} entries; must have 1 to {MAX_MESSAGES}")
    for index, each in enumerate(messages):
        if each.role not in ROLES:
            raise BadRequest(f"messages[{index}].role", f"is {each.role[:32]!r}; must be one of {', '.join(ROLES)}")
    texts = [text for each in messages for text in _texts_of(each)]
    _check_size("messages", sum(_size("messages", text, most_bytes) for text in texts), most_bytes)


def _texts_of(message: pb.ChatMessage) -> tuple[str, ...]:
    return message.content, message.tool_calls, message.tool_call_id, message.reasoning_content


def tools_digest(tools: str) -> str:
    """Digest of the tools of a request; empty if there are none."""
    return hashlib.sha256(tools.encode()).hexdigest()[:DIGEST_DIGITS] if tools else ""


def _ids_of_chat(chat: pb.Chat, served: Served, earlier: Sequence[int], described: str | None) -> list[int]:
    tokenizer = served.tokenizer
    text = text_of_chat(chat, tokenizer, bool(earlier))
    if not earlier:
        return tokenizer.encode_chat(text)
    _, found, rest = text.partition(_answer_before(chat))
    if not found:
        raise BadRequest("messages", "cannot continue a session: the chat template leaves earlier answers out")
    if chat.tools and described not in (None, tools_digest(chat.tools)):
        plain = pb.Chat()
        plain.CopyFrom(chat)
        plain.ClearField("tools")
        if text_of_chat(plain, tokenizer, True).partition(_answer_before(plain))[2] == rest:
            raise BadRequest(
                "tools",
                "are not those of the session, and the target's chat template writes them at its beginning alone",
            )
    last = earlier[-1]
    # The template writes the answer's last special token again (Llama 2's after a space), so it is cut off.
    if last in served.end_ids or not tokenizer.visible([last]):
        end, written = tokenizer.showing().decode([last]), rest.lstrip()
        rest = written.removeprefix(end) if written.startswith(end) else rest
    return tokenizer.encode(rest, begins=False)


def text_of_chat(chat: pb.Chat, tokenizer: Tokenizer, continues: bool) -> str:
    """The text of a conversation by the chat template, up to the answer. Raises BadRequest naming the field.
    continues: True if the turn (QUESTION, ANSWER) is put first, in place of the session's turns"""
    messages = [_message(f"messages[{index}]", each) for index, each in enumerate(chat.messages)]
    names, tools = _template_names(chat.chat_template_kwargs), _objects("tools", chat.tools)
    turn = [("user", QUESTION), ("assistant", _answer_before(chat))] if continues else []
    before = [{"role": role, "content": content} for role, content in turn]
    text = tokenizer.chat([*before, *messages], True, names, tools)
    if tools and text == tokenizer.chat([*before, *messages], True, names):
        raise BadRequest("tools", "the target's chat template ignores them")
    return text + chat.answer_start


def _answer_before(chat: pb.Chat) -> str:
    """The answer in the turn put before the messages: ANSWER, followed by a digest if the conversation itself has
    ANSWER."""
    texts = [chat.tools, chat.chat_template_kwargs, *(text for each in chat.messages for text in _texts_of(each))]
    if not any(ANSWER in text for text in texts):
        return ANSWER
    return f"{ANSWER} {hashlib.sha256(chr(0).join(texts).encode()).hexdigest()}"


def _message(field: str, given: pb.ChatMessage) -> dict[str, Any]:
    """A message as templates read it."""
    made: dict[str, Any] = {"role": given.role, "content": given.content}
    if calls := _objects(f"{field}.tool_calls", given.tool_calls):
        made["tool_calls"] = calls
    for name in ("tool_call_id", "reasoning_content"):
        if text := getattr(given, name):
            made[name] = text
    return made


def _objects(field: str, text: str) -> list[dict[str, Any]]:
    """The objects of a JSON array; none if the text is empty."""
    found = _parsed(field, text or "[]")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadRequest(field, "must be a JSON array of objects")
    return found


def _template_names(text: str) -> Mapping[str, Any]:
    names = _parsed("chat_template_kwargs", text or "{}")
    if not isinstance(names, dict):
        raise BadRequest("chat_template_kwargs", "must be a JSON object")
    return names


def _parsed(field: str, text: str) -> Any:
    try:
        found = json_of(text, distinct)
    except ValueError as error:
        raise BadRequest(field, f"is not JSON: {error}") from None
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest(field, "has a surrogate code point, which UTF-8 cannot encode") from None
    except RecursionError:
        raise BadRequest(field, "nests objects and arrays too deeply") from None
    return found


def _in_vocabulary(name: str, ids: list[int], served: Served) -> list[int]:
    if max(ids, default=0) >= served.vocabulary:
        raise BadRequest(name, f"has the token {max(ids)}; the model has {served.vocabulary}")
    return ids


async def checked_ids(name: str, raw: Sequence[int], served: Served) -> list[int]:
    """Check ids, and return them as a list. More ids than a text may have are refused before the list is made."""
    if len(raw) > served.max_length:
        fault = f"has {len(raw)} ids; a text has at most {served.max_length}"
        raise BadRequest(name, fault, too_long=name == "prompt.token_ids")
    return await off_loop(len(raw), lambda: _below_vocabulary(name, raw, served.vocabulary))


def _below_vocabulary(name: str, raw: Sequence[int], vocabulary: int) -> list[int]:
    ids: list[int] = []
    for start in range(0, len(raw), PART):
        part = raw[start : start + PART]
        if max(part) >= vocabulary:
            index, token = next((index, token) for index, token in enumerate(part, start) if token >= vocabulary)
            raise BadRequest(f"{name}[{index}]", f"{token} is outside the vocabulary of {vocabulary}")
        ids += part
    return ids
