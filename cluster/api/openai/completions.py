"""`/v1/completions`: what a request asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dendro.errors import BadRequest
from dendro.options import JsonType

from cluster.api.openai.answers import AnswerForm, CompletionForm
from cluster.api.openai.fields import Fields, HttpRequest, Tokenizers, http_request, typed


def read_completion(body: Mapping[str, Any], request_id: str, _: Tokenizers) -> tuple[HttpRequest, AnswerForm]:
    """Read a completion's body: the request, and the form of its answer. Raises BadRequest naming the field."""
    fields = Fields(body)
    options: dict[str, Any] = {}
    for name, kind in (("logprobs", JsonType.INTEGER), ("echo", JsonType.BOOLEAN)):
        if (value := fields.take(name, kind)) is not None:
            options[name] = value
    prompt = _prompt(fields.take("prompt", JsonType.STRING, JsonType.ARRAY))
    names = {"prompt.token_ids": "prompt", "prompt.text": "prompt"}
    asked = http_request(fields, prompt, options, request_id, names)
    before = prompt if not asked.message.session else None
    return asked, CompletionForm(asked.message.show_special_tokens, before)


def _prompt(given: str | list[Any] | None) -> str | list[int]:
    """A text, its token ids, or a list of one of these."""
    if given is None:
        raise BadRequest("prompt", "is missing")
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise BadRequest("prompt", f"has {len(given)} prompts; send a request for each")
        given = given[0]
    if isinstance(given, str):
        return given
    for index, each in enumerate(given):
        typed(f"prompt[{index}]", each, JsonType.INTEGER)
    return given
