"""OpenAI's HTTP API: calls of tools, in the formats of three families' chat templates, by OpenAI's own client."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from cluster.api.openai.tools import ArgumentsBudget, read_calls
from cluster.config import DEMO_MODELS, Config
from cluster.running import local_ingress
from tests.support.edge import EdgePeers, ingress
from tests.support.http_api import HELLO, client_of, http_at

HEAD = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.tool_call_id }}: {{ m.content }}"
)
CALL = '{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}'
TAIL = "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
EACH, END = "{% for c in m.tool_calls or [] %}", "{% endfor %}"
HERMES = HEAD + EACH + "{{ '\\n<tool_call>\\n' }}" + CALL.replace("KEY", "arguments") + "}\n</tool_call>" + END + TAIL
MISTRAL = (
    HEAD
    + "{% if m.tool_calls %}[TOOL_CALLS] ["
    + EACH
    + CALL.replace("KEY", "arguments")
    + ', "id": "{{ c.id }}"}{{ ", " if not loop.last }}'
    + END
    + "]{% endif %}"
    + TAIL
)
LLAMA = HEAD + EACH + CALL.replace("KEY", "parameters") + "}" + END + TAIL
OTHER = HEAD + EACH + "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>" + END + TAIL
IGNORING = LLAMA.partition("{% endif %}")[2]
LONELY = (
    "{% for m in messages if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endfor %}" + LLAMA
)
TEMPLATES = {
    "hermes": HERMES,
    "lonely": LONELY,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "other": OTHER,
    "ignoring": IGNORING,
}


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": schema}}


WEATHER = tool("weather", {"city": {"enum": ["Oslo", "Rome"]}, "hourly": {"type": "boolean"}})
TIME = tool("local_time", {"zone": {"enum": ["CET", "UTC"]}})
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "local_time"}}
ASKED: dict[str, Any] = {"messages": HELLO, "max_tokens": 64, "temperature": 1.0}


@asynccontextmanager
async def calling(folder):
    targets = {}
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template)
        targets[name] = {"checkpoint": str(DEMO_MODELS / "target"), "chat_template": str(folder / f"{name}.jinja")}
    drafters = {"m": {"checkpoint": str(DEMO_MODELS / "mamba2")}}
    async with (
        local_ingress(Config.of({"targets": targets, "drafters": drafters}, DEMO_MODELS)) as made,
        http_at(served_ingress=made) as (server, _),
        client_of(server) as client,
    ):
        yield client


@pytest.mark.slow
async def test_an_answer_that_must_be_a_call_is_one_in_each_format_whole_and_streamed(tmp_path):
    async with calling(tmp_path) as client:
        for model in ("hermes", "mistral", "llama"):
            names = set()
            for choice in ("required", NAMED):
                for seed in range(4 if choice == "required" else 1):
                    name, arguments = await one_call(client, model, choice, seed)
                    assert choice == "required" or name == "local_time"
                    schema = next(each for each in TOOLS if each["function"]["name"] == name)["function"]["parameters"]
                    assert [*arguments] == schema["required"], "the arguments are those of the schema"
                    names.add(name)
            assert names == {"weather", "local_time"}, f"{model}: either function can be called"
        await cut_off(client)
        await refused_templates(client)
        await later_turns(client)


async def one_call(client, model, choice, seed) -> tuple[str, dict[str, Any]]:
    """The call of an answer, which is the same whole and streamed."""
    asked = ASKED | {"model": model, "tools": TOOLS, "tool_choice": choice, "seed": seed}
    headers = {"Idempotency-Key": f"{model}-{seed}"}
    whole = (await client.chat.completions.create(**asked, extra_headers=headers)).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls
    assert len(call.id) == 9 and call.type == "function"
    parts = []
    async for part in await client.chat.completions.create(**asked, extra_headers=headers, stream=True):
        parts += part.choices
    assert parts[-1].finish_reason == "tool_calls" and not any(part.delta.content for part in parts)
    first, *more = [each for part in parts for each in part.delta.tool_calls or []]
    assert (first.index, first.id, first.type, first.function.name) == (0, call.id, "function", call.function.name)
    assert all((each.index, each.id, each.function.name) == (0, None, None) for each in more)
    assert "".join(each.function.arguments for each in (first, *more)) == call.function.arguments
    return call.function.name, json.loads(call.function.arguments)


@pytest.mark.slow
async def test_an_answer_that_must_be_calls_has_several_in_each_format_where_that_is_asked_for(tmp_path):
    async with calling(tmp_path) as client:
        for model in ("hermes", "mistral", "llama"):
            counts = set()
            for seed in range(12):
                counts.add(await several_calls(client, model, seed))
                if len(counts) > 1 and max(counts) > 1:
                    break
            assert max(counts) > 1, f"{model}: {counts}"
        asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True}
        with pytest.raises(openai.BadRequestError, match="one call an answer") as refused:
            await client.chat.completions.create(**asked, model="lonely")
        assert refused.value.param == "parallel_tool_calls"
        assert await one_call(client, "lonely", "required", 1)
        cut = await client.chat.completions.create(**asked | {"model": "hermes", "max_tokens": 2})
        assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.tool_calls is None


async def several_calls(client, model, seed) -> int:
    """The number of calls of an answer, each of which is valid, and the same whole and streamed."""
    asked = ASKED | {
        "model": model,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": seed,
        "max_tokens": 400,
        "temperature": 2.0,
    }
    asked["extra_headers"] = {"Idempotency-Key": f"{model}-{seed}"}
    asked["parallel_tool_calls"] = True
    whole = (await client.chat.completions.create(**asked)).choices[0]
    calls = whole.message.tool_calls
    for each in calls:
        schema = next(one for one in TOOLS if one["function"]["name"] == each.function.name)["function"]["parameters"]
        assert [*json.loads(each.function.arguments)] == schema["required"]
    if whole.finish_reason == "tool_calls":
        assert whole.message.content is None
    parts = [part.choices[0] async for part in await client.chat.completions.create(**asked, stream=True)]
    streamed = [each for part in parts for each in part.delta.tool_calls or []]
    assert [(each.index, each.id, each.function) for each in streamed] == [
        (index, each.id, streamed[index].function) for index, each in enumerate(calls)
    ]
    assert [each.function.arguments for each in streamed] == [each.function.arguments for each in calls]
    assert parts[-1].finish_reason == whole.finish_reason
    return len(calls)


CITY = tool("city", {"name": {"enum": ["Oslo", "Rome"]}, "large": {"type": "boolean"}})["function"]["parameters"]


@pytest.mark.slow
async def test_an_answer_beside_tools_is_calls_or_has_the_form_that_is_asked_for(tmp_path):
    async with calling(tmp_path) as client:
        for model in ("hermes", "llama", "lonely"):
            found = set()
            for seed in range(40):
                found.add(await call_or_city(client, model, seed))
                if found >= {"tool_calls", "stop"}:
                    break
            assert found >= {"tool_calls", "stop"}, f"{model}: either can be the answer"
        broken = {"json_schema": {"name": "city", "schema": {"pattern": "(?=x)", "type": "string"}}}
        for fields, param in (
            ({"response_format": {"type": "json_schema"} | broken}, "response_format.json_schema"),
            ({"tools": [TIME, tool("f", {"a": {"contains": {}}})]}, "tools[1].function.parameters"),
            ({"tools": [tool(f"f{each}", {"a": {"const": "a" * 1000}}) for each in range(99)]}, "tools"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**form_beside_tools("hermes", 1) | fields)
            assert refused.value.param == param, refused.value


def form_beside_tools(model, seed) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    asked = ASKED | {"model": model, "tools": TOOLS, "response_format": form, "seed": seed, "max_tokens": 200}
    return asked | {"parallel_tool_calls": model == "llama"}


async def call_or_city(client, model, seed) -> str:
    """Why an answer that is one of both ended; it is the same whole and streamed."""
    asked = form_beside_tools(model, seed) | {"extra_headers": {"Idempotency-Key": f"{model}-{seed}"}}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    if whole.message.tool_calls:
        for each in whole.message.tool_calls:
            described = next(one["function"] for one in TOOLS if one["function"]["name"] == each.function.name)
            assert [*json.loads(each.function.arguments)] == described["parameters"]["required"]
    elif whole.finish_reason == "stop":
        assert [*json.loads(whole.message.content)] == CITY["required"]
    parts = [part.choices[0] async for part in await client.chat.completions.create(**asked, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == (whole.message.content or "")
    assert [each.id for part in parts for each in part.delta.tool_calls or []] == [
        each.id for each in whole.message.tool_calls or []
    ]
    return whole.finish_reason


async def cut_off(client) -> None:
    """A call that the length cuts off is no finished one."""
    asked = ASKED | {"model": "hermes", "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    whole = await client.chat.completions.create(**asked)
    tokens = whole.usage.completion_tokens
    for most in (1, tokens - 1):
        cut = (await client.chat.completions.create(**asked | {"max_tokens": most})).choices[0]
        assert cut.finish_reason == "length"
        assert (cut.message.tool_calls is None) == (most == 1), "a call has a name at least"
        sent_back = [*HELLO, cut.message, {"role": "user", "content": "Go on."}]
        assert (await client.chat.completions.create(**asked | {"messages": sent_back})).choices, "and is sent back"


async def refused_templates(client) -> None:
    for model, reason in (("other", "none of the formats of Hermes"), ("ignoring", "chat template ignores them")):
        with pytest.raises(openai.BadRequestError, match=reason) as refused:
            await client.chat.completions.create(**ASKED, model=model, tools=TOOLS, tool_choice="required")
        assert refused.value.param == "tools"
    for name in ("other", "ignoring"):
        answer = await client.chat.completions.create(**ASKED, model=name, tools=TOOLS, tool_choice="none", seed=1)
        plain = await client.chat.completions.create(**ASKED, model=name, seed=1)
        assert answer.choices[0].message.content == plain.choices[0].message.content, "the template describes none"
    fine, place = tool("g", {}), "tools[1].function.parameters"
    for schema, fault in (
        ({"type": "string", "pattern": "(?=x)"}, "does not compile: /properties/a/pattern: regex parse error"),
        ({"type": "string", "contains": {}}, "does not compile: /properties/a/contains: Unimplemented keys"),
    ):
        given = [fine, tool("f", {"a": schema})]
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**ASKED, model="llama", tools=given, tool_choice=choice)
            found, body = refused.value, str(refused.value.body)
            assert found.param == place and f"{place}: {fault}" in body
            assert not any(internal in body for internal in ("%json", "arguments_", "line", "guidance"))
    large = [tool(f"f{each}", {"a": {"const": "a" * 1000}}) for each in range(99)]
    with pytest.raises(openai.BadRequestError, match="tools: has .* characters") as refused:
        await client.chat.completions.create(**ASKED, model="llama", tools=large, tool_choice="required")
    assert refused.value.param == "tools"


async def later_turns(client) -> None:
    """The template gets a call and its result as they were, the arguments as values."""
    create = client.chat.completions.create
    asked = ASKED | {"model": "hermes", "tools": TOOLS, "seed": 1}
    message = (await create(**asked, tool_choice="required")).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    answer = await create(
        **ASKED | {"model": "hermes", "messages": [*HELLO, message, result], "seed": 1, "max_tokens": 8}
    )
    name, arguments = call.function.name, json.dumps(json.loads(call.function.arguments))
    written = f'user : hello\nassistant : \n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'
    prompt = f"{written}tool {call.id}: rain\nassistant: "
    plain = await client.completions.create(model="hermes", prompt=prompt, max_tokens=8, seed=1, temperature=1.0)
    assert answer.choices[0].message.content == plain.choices[0].text


def call_of(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "template": ({"tools": TOOLS}, "tools"),
    "no tools": ({"tool_choice": "required"}, "tool_choice"),
    "unknown choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    "unknown name": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name",
    ),
    "twice": ({"tools": [TIME, TIME], "tool_choice": "required"}, "tools[1].function.name"),
    "too many": ({"tools": [TIME] * 129, "tool_choice": "required"}, "tools"),
    "name": ({"tools": [tool("a b", {})], "tool_choice": "none"}, "tools[0].function.name"),
    "kind": ({"tools": [{"type": "custom"}], "tool_choice": "none"}, "tools[0].type"),
    "no object": (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters.type",
    ),
    "two structures": (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "many values in the arguments of calls": (
        {"messages": [{"role": "assistant", "tool_calls": [call_of('{"a": [' + "[]," * 4_000 + "[]]}")] * 3}]},
        "messages[0].tool_calls[2].function.arguments",
    ),
    "arguments that are no object": (
        {"messages": [{"role": "assistant", "tool_calls": [call_of("[1]")]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
}


@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=BAD)
async def test_a_wrong_field_of_tools_is_refused_by_name(fields, param):
    async with http_at(served_ingress=ingress(EdgePeers())) as (server, _), client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "demo", "messages": HELLO} | fields)
        assert refused.value.param == param


@pytest.mark.parametrize("arguments", ['{"city": "Os', '{"city": "Oslo"}}', '{"a": NaN}', "{" * 2000, "Oslo"])
def test_a_template_gets_arguments_that_are_no_json_as_the_text_that_they_are(arguments):
    (call,) = read_calls("tool_calls", [call_of(arguments)], ArgumentsBudget())
    assert call["function"]["arguments"] == arguments
