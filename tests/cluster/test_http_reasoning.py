"""OpenAI's HTTP API: reasoning between the markers of the chat template comes as `reasoning_content`."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from dendro.structure import Structure

from cluster.api.openai.reasoning import ReasoningMarkers, ReasoningReader, markers_of
from cluster.gguf_files import file_of_package, folder_of
from cluster.router.tokenizer import CheckpointTokenizer
from tests.cluster.test_http_tools import EACH, END, HERMES
from tests.support.byte_grammars import BYTES, admits
from tests.support.http_api import HELLO
from tests.support.scripted import scripted, scripted_tokenizer
from tests.support.smollm2 import SMOLLM2, needs_smollm2

TURN = "<|im_start|>{{ m.role }}\n"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n"
QWEN3 = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}" + TURN + "{% set c = m.content %}"
    "{% if m.role == 'assistant' %}{% set r = m.reasoning_content or '' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}"
    "{% if r and loop.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{% endif %}{{ c }}"
    + EACH
    + '{{ "\n<tool_call>\n" }}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>" + END + "<|im_end|>\n{% endfor %}" + OPENING + "{% if enable_thinking is false %}<think>\n\n"
    "</think>\n\n{% endif %}{% endif %}"
)
"""Reads `reasoning_content`, and leaves that of earlier turns out; the model writes both markers."""
R1 = (
    "{% for m in messages %}"
    + TURN
    + "{{ m.content.split('</think>')[-1] }}{% endfor %}"
    + OPENING
    + "<think>\n{% endif %}"
)
"""Begins each answer with the marker."""
SMOLLM3 = (
    "{% for m in messages %}"
    + TURN
    + "{{ m.content }}{% endfor %}"
    + OPENING
    + ("{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}{% endif %}")
)
"""Shows the markers where it is asked not to think alone."""
MAGISTRAL = (
    "{% for m in messages %}[INST]{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    "{{ m.content }}[/INST]{% endfor %}"
)
"""Markers that can be special tokens."""
STRIPPING = (
    "{% for m in messages %}" + TURN + "{% set c = m.content | trim %}{% if m.role == 'assistant' %}"
    "{% set c = (c.split('</think>')[-1] if not loop.last else c) | striptags | trim %}{% endif %}{{ c }}"
    + EACH
    + '{{ "\n<tool_call>\n" }}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>" + END + "<|im_end|>\n{% endfor %}" + OPENING + "{% endif %}"
)
"""Leaves reasoning, tags and whitespace out of the content of the assistant's messages."""
CHATML = "{% for m in messages %}" + TURN + "{{ m.content }}<|im_end|>\n{% endfor %}" + OPENING + "{% endif %}"
THINK = ReasoningMarkers("<think>", "</think>")
FOUND = {
    "qwen3": (QWEN3, THINK),
    "r1": (R1, THINK),
    "smollm3": (SMOLLM3, THINK),
    "stripping": (STRIPPING, THINK),
    "magistral": (MAGISTRAL, ReasoningMarkers("[THINK]", "[/THINK]")),
    "chatml": (CHATML, None),
    "hermes": (HERMES, None),
    "refusing": ("{{ raise_exception('no') }}", None),
}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [{"a": 1}]}}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", FOUND)
def test_the_markers_are_found_from_the_template(tmp_path, name):
    template, markers = FOUND[name]
    assert markers_of(scripted_tokenizer(tmp_path, template)) == markers


class CountingTokenizer(CheckpointTokenizer):
    """Counts the conversations that its template writes."""

    written = 0

    def chat(self, *given, **named):
        self.written += 1
        return super().chat(*given, **named)


@pytest.mark.parametrize("template", [QWEN3, STRIPPING, CHATML, HERMES], ids=["qwen3", "stripping", "chatml", "hermes"])
async def test_a_template_is_rendered_once_to_find_its_markers_and_not_with_each_request(tmp_path, template):
    scripted_tokenizer(tmp_path, template)
    tokenizer = CountingTokenizer(tmp_path, "bytes", tmp_path / "own.jinja")
    async with scripted(tokenizer) as asked:
        counts = []
        for turn in range(3):
            asked.peers.will_say("An answer.")
            before = tokenizer.written
            fields = {"tools": [TOOL]} if "tools" in template else {}
            await asked.client.chat.completions.create(model="demo", messages=HELLO, seed=turn, **fields)
            counts.append(tokenizer.written - before)
        assert counts[0] > counts[1] == counts[2] <= 4, counts


async def test_calls_and_reasoning_of_a_template_that_strips_the_content_of_messages_are_found(tmp_path):
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
    async with target(tmp_path, "{{ tools }}" + STRIPPING) as asked:
        choice = await asked.ask(f"<think>\nHm.\n</think>\n\n So: \n{call}", tools=[TOOL])
        assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "So:")
        assert [each.function.arguments for each in choice.message.tool_calls] == ['{"a": 1}']


@needs_smollm2
def test_smollm2s_template_has_no_reasoning():
    assert markers_of(CheckpointTokenizer(folder_of(file_of_package(SMOLLM2)), "smollm2")) is None


def target(folder, template=QWEN3):
    return scripted(scripted_tokenizer(folder, template, ("[THINK]", "[/THINK]")))


@pytest.mark.parametrize("template", [QWEN3, SMOLLM3, R1, MAGISTRAL], ids=["qwen3", "smollm3", "r1", "magistral"])
async def test_reasoning_and_content_come_apart_whole_and_streamed(tmp_path, template):
    begin, end = ("[THINK]", "[/THINK]") if template is MAGISTRAL else ("<think>", "</think>")
    begin = "" if template is R1 else begin
    async with target(tmp_path, template) as asked:
        choice = await asked.ask(f"{begin}\nHm. <th </think?\n\nYes.\n{end}\n\nAn <answer>.\n")
        assert choice.message.reasoning_content == "Hm. <th </think?\n\nYes."
        assert (choice.message.content, choice.finish_reason) == ("An <answer>.\n", "stop")
        assert (await asked.ask(f"{begin}{end}Two {end} {begin}")).message.content == f"Two {end} {begin}"
        markers = len(asked.peers.tokenizer.encode(begin, begins=False))
        choice = await asked.ask(f"{begin}It goes on</th", max_tokens=markers + 5)
        assert (choice.message.reasoning_content, choice.message.content) == ("It go", "")
        assert choice.finish_reason == "length"


async def test_an_answer_without_the_marker_at_its_beginning_has_no_reasoning(tmp_path):
    async with target(tmp_path) as asked:
        for text in ("  \n plain\n", "a <think>b</think>", "<thin", "", " \n"):
            message = (await asked.ask(text)).message
            assert (message.content, getattr(message, "reasoning_content", None)) == (text, None)
        message = (await asked.ask("<think>a</think>b", extra_body=OFF)).message
        assert message.content == "<think>a</think>b", "the prompt ended the reasoning"
    async with target(tmp_path, CHATML) as asked:
        assert (await asked.ask("<think>a</think>b")).message.content == "<think>a</think>b"


async def test_the_usage_counts_the_tokens_up_to_the_end_of_reasoning(tmp_path):
    async with target(tmp_path) as asked:
        for text, count in (("<think>\n\u20ac</think>\n\nb", 19), ("b", 0), ("<think>ab", 9 + 1)):
            asked.peers.will_say(text)
            answer = await asked.client.chat.completions.create(model="demo", messages=HELLO)
            assert answer.usage.completion_tokens_details.reasoning_tokens == count, text
    async with target(tmp_path, MAGISTRAL) as asked:
        asked.peers.will_say("[THINK]ab[/THINK]c")
        answer = await asked.client.chat.completions.create(model="demo", messages=HELLO)
        assert answer.usage.completion_tokens_details.reasoning_tokens == 4, "a marker is one token"


async def test_calls_follow_reasoning_and_those_in_it_are_not_made(tmp_path):
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>'
    async with target(tmp_path) as asked:
        choice = await asked.ask(f"<think>I call {call}</think>\n\nSo:\n{call}", tools=[TOOL])
        assert choice.message.reasoning_content == f"I call {call}" and choice.message.content == "So:"
        assert [each.function.arguments for each in choice.message.tool_calls] == ['{"a": 1}']
        result = {"role": "tool", "tool_call_id": "a", "content": "rain"}
        await asked.ask("Rain.", messages=[*HELLO, choice.message, result], tools=[TOOL])
        await asked.ask("Rain.", messages=[*HELLO, choice.message], tools=[TOOL])
        assert f"<think>\nI call {call}\n</think>\n\nSo:\n{call}" in asked.prompt()


async def test_a_structure_begins_after_the_reasoning(tmp_path):
    async with target(tmp_path) as asked:
        text = '<think>\n{"a": 2}\n</think>\n\n{"a": 1}'
        choice = await asked.ask(text, response_format=JSON)
        assert (choice.message.reasoning_content, choice.message.content) == ('{"a": 2}', '{"a": 1}')
        grammar = await BYTES.compiled(asked.peers.texts[-1].structure)
        assert admits(grammar, text) and admits(grammar, '{"a": 1}') and admits(grammar, '<think></think>{"a": 1}')
        for wrong in (
            '<think>{"a": 1}',
            '<think></think>{"a": 2}',
            '</think>{"a": 1}',
            '<think></think>\n\n\n{"a": 1}',
        ):
            assert not admits(grammar, wrong)
        await asked.ask(
            '{"a": 1}', response_format=JSON, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )
        assert asked.peers.texts[-1].structure == Structure.json_schema({"enum": [{"a": 1}]}), "there is no reasoning"
    async with target(tmp_path, R1) as asked:
        for fields, wrong in (({"regex": "[a-c]/{2}"}, "d//"), ({"choices": ["b//", "a."]}, "ab")):
            choice = await asked.ask("Hm.</think>\nb//", extra_body={"structure": fields})
            assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "b//")
            grammar = await BYTES.compiled(asked.peers.texts[-1].structure)
            assert admits(grammar, "x</think>b//") and not admits(grammar, "b//"), "the prompt began the reasoning"
            assert not admits(grammar, "x</think>" + wrong)


@pytest.mark.parametrize("template", [R1, MAGISTRAL], ids=["r1", "special tokens"])
async def test_where_no_structure_can_follow_reasoning_the_answer_has_none(tmp_path, template):
    async with target(tmp_path, template + ("[THINK]" if template is MAGISTRAL else "")) as asked:
        structure: dict[str, Any] = {"grammar": 'start: "a"'} if template is R1 else {"regex": "a"}
        choice = await asked.ask("a", extra_body={"structure": structure})
        assert (choice.message.content, getattr(choice.message, "reasoning_content", None)) == ("a", None)
        end = "</think>" if template is R1 else "[/THINK]"
        assert asked.prompt().endswith(f"\n{end}\n\n")


async def test_a_call_that_must_be_made_is_made_without_reasoning(tmp_path):
    async with target(tmp_path, QWEN3.replace(OPENING, OPENING + "<think>\n")) as asked:
        asked.peers.will_say('\n{"name": "weather", "arguments": {}}\n</tool_call>')
        create = asked.client.chat.completions.create
        answer = await create(model="demo", messages=HELLO, tools=[TOOL], tool_choice="required")
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
        assert asked.prompt().endswith("<think>\n\n</think>\n\n<tool_call>")


async def test_an_error_of_a_structure_names_the_field_that_was_sent(tmp_path):
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(?=x)"}}}
    async with target(tmp_path) as asked:
        for fields, param in (
            ({"response_format": wrong}, "response_format.json_schema"),
            ({"structure": {"regex": "("}}, "structure.regex"),
            ({"structure": {"json_schema": '{"type": "string"} | "b"'}}, "structure.json_schema"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await asked.client.chat.completions.create(model="demo", messages=HELLO, extra_body=fields)
            assert refused.value.param == param
        with pytest.raises(openai.BadRequestError) as refused:
            await asked.client.chat.completions.create(model="demo", messages=[{"role": "narrator", "content": "a"}])
        assert refused.value.param == "messages[0].role"


TEXTS = ("<think>a </think> b", " <think>", "<think><think>a</thin</think></think>c", "a</think>b", "\n\n", "<", "")


@pytest.mark.parametrize("begun", [False, True])
def test_how_reasoning_comes_in_parts_changes_nothing(begun):
    for text in (
        "<think>a </think> b",
        " <think>",
        "<think><think>a</thin</think></think>c",
        "a</think>b",
        "\n\n",
        "<",
        "",
    ):
        whole = read(text, len(text) or 1, begun)
        assert all(read(text, size, begun) == whole for size in (1, 2, 3, 7))
    assert json.dumps(read("<think>a </think> b", 1, False)) == '["a", "b"]'


def read(text, size, begun):
    reader = ReasoningReader(THINK, begun)
    parts = [reader.push(text[at : at + size]) for at in range(0, len(text), size)] + [reader.end()]
    return ["".join(each) for each in zip(*parts, strict=True)]
