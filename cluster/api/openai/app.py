"""The routes of the HTTP API."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from dendro.arguments import ids_of, shown, text_of
from dendro.chat import fill_chat
from dendro.errors import NO_FAULTS, BadRequest
from dendro.options import JsonType
from dendro.tasks import LONG, off_loop
from dendro.v1 import generation_pb2 as pb
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.api.callers import Callers
from cluster.api.openai.answers import AnswerForm, ChatForm, CompletionForm
from cluster.api.openai.bodies import BodyReader
from cluster.api.openai.chat import chat_of, read_chat
from cluster.api.openai.completions import read_completion
from cluster.api.openai.errors import HttpRefused, failure_of, naming, to_json
from cluster.api.openai.fields import EXTENDED, Fields, HttpRequest, Tokenizers, session_of
from cluster.api.openai.pages import check_page
from cluster.api.openai.serving import AnswerResponse
from cluster.api.requests import RunningRequests
from cluster.page import PAGE, POLICY
from cluster.router.ingress import Ingress

Endpoint = Callable[[Request], Awaitable[Response]]
ReadRequest = Callable[[Mapping[str, Any], str, Tokenizers], tuple[HttpRequest, AnswerForm]]
LEFT_STATUS = 499
"""Status of a response that nobody reads."""
BODY_WORK = 2
"""Bytes of a body that cost about as much to read as a token of other work."""


PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def application(
    ingress: Ingress, requests: RunningRequests, callers: Callers, healthy: Callable[[], bool]
) -> Starlette:
    """The routes of an ingress. requests, callers: of the router, over all protocols"""
    api = HttpApi(ingress, requests, callers, healthy)
    routes: dict[str, dict[str, Endpoint]] = {
        "POST": {
            "/v1/chat/completions": partial(api.generate, read_chat),
            "/v1/completions": partial(api.generate, read_completion),
            "/tokenize": api.tokenize,
            "/detokenize": api.detokenize,
            "/abort": api.abort,
        },
        "GET": {"/": api.page, "/v1/models": api.models, "/v1/models/{model:path}": api.model, "/health": api.health},
    }
    made = Starlette(
        routes=[
            Route(path, api.guarded(endpoint), methods=[method])
            for method, found in routes.items()
            for path, endpoint in found.items()
        ],
        exception_handlers={HTTPException: _not_routed},
    )
    made.router.redirect_slashes = False  # A redirect names plain HTTP where a proxy ends TLS.
    return made


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        words, code = f"the method {shown(request.method)} is not one of this path", "MethodNotAllowed"
    else:
        words = "there is no such path; there are /v1/chat/completions, /v1/completions and /v1/models, among others"
        code = "NotFound"
    refused = HttpRefused(error.status_code, words, None, code)
    failure = failure_of(refused, "")
    return _json(failure.fields, failure.status, {**failure.headers, **(error.headers or {})})


class HttpApi:
    """The endpoints: each reads a request and calls the ingress."""

    def __init__(
        self, ingress: Ingress, requests: RunningRequests, callers: Callers, healthy: Callable[[], bool]
    ) -> None:
        self._ingress = ingress
        self._requests = requests
        self._callers = callers
        self._healthy = healthy
        self._bodies = BodyReader(ingress.longest_text)

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint whose errors are counted, and sent in OpenAI's shape."""

        async def guard(request: Request) -> Response:
            try:
                check_page(request.headers, self._callers.anyone_near)
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=LEFT_STATUS)
            except BaseException as error:
                if isinstance(error, NO_FAULTS):
                    raise
                self._ingress.totals.failed(error)
                failure = failure_of(error, "before it began", EXTENDED)
                return _json(failure.fields, failure.status, failure.headers)

        return guard

    async def generate(self, read: ReadRequest, request: Request) -> Response:
        caller = self._callers.caller(request.headers.items())
        body = await self._bodies.read(request, caller)
        model = body.fields.get("model")
        if isinstance(model, str) and model and model not in self._ingress.config.targets:
            raise self._no_model(model)
        fields, session = body.fields, session_of(body.fields)
        if session and model in (None, ""):  # what is read and written by a tokenizer is of the session's target
            fields = {**fields, "model": await self._ingress.target_of(session, caller.tenant)}
        key = request.headers.get("idempotency-key", "")
        request_id = key or secrets.token_hex(16)
        work = LONG if "messages" in fields else body.size // BODY_WORK  # a template may be rendered
        asked, form = await off_loop(work, lambda: read(fields, request_id, self._ingress.tokenizer))
        repeatable = bool(key) or not asked.message.session
        return AnswerResponse(self._ingress, self._requests, asked, form, caller, repeatable)

    def _no_model(self, model: str) -> HttpRefused:
        served = ", ".join(self._ingress.config.targets)
        reason = f"model: {shown(model)} is not served here; there is {served}"
        return HttpRefused(404, reason, "model", "model_not_found")

    async def models(self, request: Request) -> Response:
        self._callers.caller(request.headers.items())
        return _json({"object": "list", "data": [self._described(each) for each in self._ingress.info().models]})

    async def model(self, request: Request) -> Response:
        self._callers.caller(request.headers.items())
        name = request.path_params["model"]
        for each in self._ingress.info().models:
            if each.name == name:
                return _json(self._described(each))
        raise self._no_model(name)

    def _described(self, model: pb.ModelInfo) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": 0,  # a checkpoint has no date
            "owned_by": "dendroaspis",
            "max_model_len": model.max_length,
            "vocabulary": model.vocabulary,
            "dtype": model.dtype,
            "drafters": list(model.drafters),
        }

    async def page(self, _: Request) -> Response:
        return Response(PAGE, 200, PAGE_HEADERS, "text/html")

    async def health(self, _: Request) -> Response:
        return _json({"status": "SERVING"}) if self._healthy() else _json({"status": "NOT_SERVING"}, 503)

    async def tokenize(self, request: Request) -> Response:
        body = await self._bodies.read(request, self._callers.caller(request.headers.items()))
        asked = await off_loop(body.size // BODY_WORK, lambda: _tokenize_request(Fields(body.fields)))
        with naming({"prompt.text": "prompt"}):
            answer = await self._ingress.tokenize(asked)
        return _json(
            {"tokens": list(answer.token_ids), "count": len(answer.token_ids), "max_model_len": answer.max_length}
        )

    async def detokenize(self, request: Request) -> Response:
        caller = self._callers.caller(request.headers.items())
        fields = Fields((await self._bodies.read(request, caller)).fields)
        asked = pb.DetokenizeRequest(model=text_of("model", fields.take("model", JsonType.STRING) or ""))
        given = fields.take("tokens", JsonType.ARRAY) or []
        asked.token_ids.extend(await off_loop(len(given), lambda: ids_of("tokens", given)))
        asked.show_special_tokens = fields.take("show_special_tokens", JsonType.BOOLEAN) or False
        fields.finish()
        with naming({"token_ids": "tokens"}):
            return _json({"prompt": (await self._ingress.detokenize(asked)).text})

    async def abort(self, request: Request) -> Response:
        caller = self._callers.caller(request.headers.items())
        fields = Fields((await self._bodies.read(request, caller)).fields)
        request_id = fields.take("request_id", JsonType.STRING) or ""
        fields.finish()
        names = {request_id, *(request_id.removeprefix(form.prefix) for form in (ChatForm, CompletionForm))}
        return _json({"aborted": await self._requests.abort_everywhere(caller.tenant, names)})


def _tokenize_request(fields: Fields) -> pb.TokenizeRequest:
    """The request for a prompt's tokens. Raises BadRequest naming the field."""
    asked = pb.TokenizeRequest(model=text_of("model", fields.take("model", JsonType.STRING) or ""))
    if (prompt := fields.take("prompt", JsonType.STRING)) is not None:
        asked.text = text_of("prompt", prompt)
    if "messages" in fields:
        if prompt is not None:
            raise BadRequest("messages", "is given beside prompt; give one of them")
        fill_chat(asked.chat, chat_of(fields))
    asked.literal_prompt = fields.take("literal_prompt", JsonType.BOOLEAN) or False
    fields.finish()
    return asked
