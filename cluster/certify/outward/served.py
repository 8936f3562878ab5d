"""A server of OpenAI's HTTP API: what it offers, and its answers."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from dendro.errors import BadRequest, EngineFailed, Overloaded, one_line

REQUEST_S = 300.0
"""Longest time of one request."""
MOST_BYTES = 64 << 20
"""Longest answer that is read."""
TRIES, LONGEST_WAIT_S = 6, 10.0
"""Times that a request is sent to a server that is full, and the longest pause between two."""
FULL = (429, 503)
REFUSED_KEY = (401, 403)
TOPS = 5
"""Log-probabilities asked for at each token: as many as OpenAI's completions give."""
MOST_SAMPLES = 16
"""Answers asked for in one request, at most."""


class Door(StrEnum):
    """How a prompt is sent, best first."""

    IDS = "completions of token ids"
    TEXT = "completions of texts"
    CHAT = "chats"


class NotOffered(Exception):
    """The server refuses a request; the text is what it answered."""


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """A prompt as the reference reads it and as it is sent."""

    ids: tuple[int, ...]
    text: str  # a completion's, or the user's message of a chat


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """One answer, as the server describes it."""

    text: str
    finish: str
    token_ids: tuple[int, ...] | None  # None: not given
    tokens: tuple[str, ...] | None  # texts of the tokens; None: not given
    logprobs: tuple[float, ...]
    tops: tuple[Mapping[str, float], ...]
    calls: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class UsageRow:
    """The usage of one answered request beside what is known of it."""

    prompt_tokens: int | None  # by the reference; None: not known
    answers: Sequence[ServedAnswer]
    usage: Mapping[str, Any] | None


@dataclass(slots=True)
class ServerOffer:
    """What the server takes, found by asking once for each."""

    door: Door
    samples: int = 1  # answers of one request
    tops: int = 0  # log-probabilities at each token
    seed: bool = False
    token_ids: bool = False
    refusals: dict[str, str] = field(default_factory=dict)  # field -> what the server answered

    @property
    def names_tokens(self) -> bool:
        """True if answers say which tokens they are made of."""
        return self.token_ids or self.tops > 0


def asked_tops(door: Door) -> dict[str, Any]:
    """The fields with which log-probabilities are asked for."""
    return {"logprobs": True, "top_logprobs": TOPS} if door is Door.CHAT else {"logprobs": TOPS}


class OpenAIServer:
    """Sends requests to a server, counts them, and keeps their usage."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession, at_once: int, extra: Mapping[str, Any]):
        """extra: fields of every request"""
        self.url, self.model, self.extra = url, model, dict(extra)
        self.at_once = at_once
        self.requests = 0
        self.usage: list[UsageRow] = []
        self.offer = ServerOffer(Door.TEXT)
        self._session = session
        self._slots = asyncio.Semaphore(at_once)

    async def answers(self, prompt: ServedPrompt, **fields: Any) -> list[ServedAnswer]:
        """Answers to a prompt. Raises NotOffered where the server refuses it."""
        body: dict[str, Any] = {}
        match self.offer.door:
            case Door.CHAT:
                body["messages"], path = [{"role": "user", "content": prompt.text}], "/chat/completions"
            case Door.IDS:
                body["prompt"], path = list(prompt.ids), "/completions"
            case Door.TEXT:
                body["prompt"], path = prompt.text, "/completions"
        if self.offer.tops:
            body |= asked_tops(self.offer.door)
        if self.offer.token_ids:
            body["return_token_ids"] = True
        return await self._asked(path, body | fields, len(prompt.ids))

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> list[ServedAnswer]:
        """Answers to a conversation. Raises NotOffered where the server refuses it."""
        return await self._asked("/chat/completions", {"messages": list(messages), **fields}, None)

    async def _asked(self, path: str, body: Mapping[str, Any], prompt_tokens: int | None) -> list[ServedAnswer]:
        found = await self._call("POST", path, {"model": self.model, **self.extra, **body})
        choices = found.get("choices")
        if not isinstance(choices, list) or not choices:
            raise EngineFailed(f"{self.url}{path}: the answer has no choices: {_shown(found)}")
        try:
            answers = [_answer(choice) for choice in choices]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"{self.url}{path}: a choice cannot be read ({error}): {_shown(choices[0])}") from error
        usage = found.get("usage")
        self.usage.append(UsageRow(prompt_tokens, answers, usage if isinstance(usage, Mapping) else None))
        return answers

    async def models(self) -> list[str] | None:
        """The names of the served models; None where the server does not list them."""
        try:
            listed = (await self._call("GET", "/models", None)).get("data")
            return [each["id"] for each in listed] if isinstance(listed, list) else None
        except (NotOffered, KeyError, TypeError):
            return None

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        async with self._slots:
            for attempt in range(TRIES):
                status, wait_s, data = await self._sent(method, path, body)
                if status not in FULL:
                    break
                await asyncio.sleep(min(0.5 * 2**attempt if wait_s is None else wait_s, LONGEST_WAIT_S))
        if status in FULL:
            raise Overloaded(
                f"{self.url}{path} answered {status} {TRIES} times: ask with a smaller --at-once, or later"
            )
        if status in REFUSED_KEY:
            words = f"the server answered {status}; give its key in a file, or in the environment's DENDRO_API_KEY"
            raise BadRequest("--key-file", words)
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if status != 200:
            raise NotOffered(f"{status}: {_message(found, data)}")
        if not isinstance(found, dict):
            raise EngineFailed(f"{self.url}{path}: the answer is no JSON object: {_shown(data)}")
        return found

    async def _sent(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, float | None, bytes]:
        """Send a request. Returns the status, the seconds after which to retry (None: not given), and the body."""
        self.requests += 1
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                data = await response.content.read(MOST_BYTES + 1)
                while not response.content.at_eof() and len(data) <= MOST_BYTES:
                    data += await response.content.read(MOST_BYTES + 1 - len(data))
                if len(data) > MOST_BYTES:
                    raise EngineFailed(f"{self.url}{path}: an answer has more than {MOST_BYTES >> 20} MiB")
                after = response.headers.get("retry-after", "")
                return response.status, float(after) if after.isdecimal() else None, data
        except TimeoutError as error:
            words = f"no answer within {REQUEST_S:g} s: ask for less with --quick, or with a smaller --at-once"
            raise EngineFailed(f"{self.url}{path}: {words}") from error
        except aiohttp.ClientError as error:
            words = f"{self.url} does not answer ({error}); give the address of a running server, such as"
            raise BadRequest("--openai", f"{words} http://127.0.0.1:8000/v1") from error


def base_url(text: str) -> str:
    """The address before `/completions`. Raises BadRequest.

    >>> base_url("http://127.0.0.1:8000/"), base_url("https://example.org/api/v1/")
    ('http://127.0.0.1:8000/v1', 'https://example.org/api/v1')
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise BadRequest("--openai", f"{text!r} is no address such as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


@asynccontextmanager
async def server_at(
    url: str, model: str, key: str, authority: ssl.SSLContext | None, at_once: int, extra: Mapping[str, Any]
) -> AsyncIterator[OpenAIServer]:
    """A server, which is asked for its models. Raises BadRequest for a model that it does not list; without a name the
    first is meant. authority: of its certificate; None: this machine's"""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=at_once, ssl=authority or True)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        server = OpenAIServer(base_url(url), model, session, at_once, extra)
        listed = await server.models()
        if not server.model and listed:
            server.model = listed[0]
        if not server.model:
            raise BadRequest("--model", "is needed: the server does not list its models")
        if listed is not None and server.model not in listed:
            names = ", ".join(listed[:20]) or "none"
            raise BadRequest("--model", f"{server.model!r} is not listed by the server; it lists {names}")
        yield server


async def find_offer(server: OpenAIServer, prompt: ServedPrompt, message: ServedPrompt | None) -> None:
    """Find what a server takes, and keep it in `server.offer`.

    prompt: of completions; message: of a chat, None where the reference has no chat template. Raises BadRequest for a
    server that answers neither.
    """
    refusals: dict[str, str] = {}

    async def takes(what: str, asked: ServedPrompt, **fields: Any) -> list[ServedAnswer] | None:
        try:
            return await server.answers(asked, max_tokens=1, temperature=0, **fields)
        except NotOffered as error:
            refusals[what] = str(error)
            return None

    asked = prompt
    for door in Door:
        if door is Door.CHAT and message is None:
            refusals[door] = "the reference has no chat template"
            continue
        asked = prompt if door is not Door.CHAT or message is None else message
        server.offer = ServerOffer(door)
        if await takes(door, asked) is None:
            continue
        if door is not Door.IDS or (server.usage[-1].usage or {}).get("prompt_tokens") == len(prompt.ids):
            break
        refusals[door] = "they are read as other tokens, as the usage has another number"
    else:
        answered = "; ".join(f"{what}: {reason}" for what, reason in refusals.items())
        raise BadRequest(
            "--openai", f"{server.url} answers neither completions nor chats of {server.model}: {answered}"
        )
    offer = server.offer
    if (found := await takes("logprobs", asked, **asked_tops(offer.door))) and found[0].tops:
        offer.tops = TOPS
    elif found:
        refusals["logprobs"] = "the field is ignored"
    if (found := await takes("return_token_ids", asked, return_token_ids=True)) and found[0].token_ids is not None:
        offer.token_ids = True
    offer.seed = await takes("seed", asked, seed=1) is not None
    found = await takes("n", asked, n=MOST_SAMPLES)
    offer.samples = len(found) if found else 1
    if found and len(found) < MOST_SAMPLES:
        refusals["n"] = f"{MOST_SAMPLES} answers were asked for and {len(found)} came"
    refusals.pop("return_token_ids", None)  # no field of OpenAI's
    offer.refusals = refusals
    server.usage.clear()


def _answer(choice: Mapping[str, Any]) -> ServedAnswer:
    """A choice of either endpoint. Raises KeyError, TypeError or ValueError where it has another form."""
    message = choice.get("message")
    ids = choice.get("token_ids")
    found = choice.get("logprobs") or {}
    tokens: tuple[str, ...] | None = None
    logprobs: tuple[float, ...] = ()
    tops: tuple[Mapping[str, float], ...] = ()
    if (content := found.get("content")) is not None:
        tokens = tuple(_token_text(each) for each in content)
        logprobs = tuple(float(each["logprob"]) for each in content)
        tops = tuple({_token_text(top): float(top["logprob"]) for top in each["top_logprobs"]} for each in content)
    elif (listed := found.get("tokens")) is not None:
        tokens = tuple(map(str, listed))
        logprobs = tuple(float(each) for each in found["token_logprobs"])
        tops = tuple(
            {str(token): float(value) for token, value in (each or {}).items()}
            for each in found.get("top_logprobs") or ()
        )
    return ServedAnswer(
        str((choice.get("text") if message is None else message.get("content")) or ""),
        str(choice.get("finish_reason") or ""),
        tuple(map(int, ids)) if isinstance(ids, list) else None,
        tokens,
        logprobs,
        tops,
        tuple((message or {}).get("tool_calls") or ()),
    )


def _token_text(token: Mapping[str, Any]) -> str:
    """A token's text of a chat's log-probabilities, by its bytes where they are given."""
    data = token.get("bytes")
    return bytes(data).decode(errors="replace") if isinstance(data, list) else str(token["token"])


def _message(found: Any, data: bytes) -> str:
    """The message of an error in OpenAI's form, or what there is."""
    error = found.get("error", found) if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return one_line(str(message), 160) if message else _shown(data)


def _shown(value: Any) -> str:
    return one_line(value.decode(errors="replace") if isinstance(value, bytes) else str(value), 160)
