"""Conversations as prompts: the checkpoint's template writes them, and the ids are those of its text."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from dendro.chat import Chat, fill_chat
from dendro.errors import BadRequest
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc

from cluster.api.grpc import serve_router
from cluster.config import Config
from cluster.router.prompts import ANSWER, ids_of_prompt, special_tokens_of
from cluster.router.served import Served
from cluster.router.tokenizer import CheckpointTokenizer
from tests.support.edge import END, EdgePeers, ingress
from tests.support.sockets import until
from tests.support.tiny_models import write_tokenizer

TEMPLATE = (
    "<|end|>{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant{{ tone or '' }}]{% endif %}"
)
"""Begins with a special token, as templates do whose tokenizer adds one, too."""
OFF = pb.Speculation(mode=pb.Speculation.MODE_OFF)
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


@pytest.fixture
def served(tmp_path):
    return served_with(tmp_path, TEMPLATE)


def served_with(folder, template):
    write_tokenizer(folder)
    file = folder / "own.jinja"
    file.write_text(template)
    tokenizer = CheckpointTokenizer(folder, "bytes", file)
    return Served("demo", tokenizer, 257, 512, frozenset({END}), "float32")


def chat_of(*turns, **fields):
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return pb.GenerateRequest(chat=pb.Chat(messages=messages, **fields))


async def written(served, request, earlier=(), most=1 << 20):
    ids = await ids_of_prompt(request, served, most, earlier)
    return served.tokenizer.showing().decode(ids)


async def test_a_conversation_is_the_templates_text_and_no_token_is_added(served):
    asked = chat_of(("system", "be brief"), ("user", "hello"))
    text = "<|end|>[system]be brief<|end|>[user]hello<|end|>[assistant]"
    assert await written(served, asked) == text
    ids = await ids_of_prompt(asked, served, 1 << 20)
    assert ids.count(END) == 3, "special tokens of the template are tokens"


async def test_names_for_the_template_reach_it_and_those_that_it_has_anyway_are_refused(served):
    asked = chat_of(("user", "hello"), chat_template_kwargs='{"tone": ", calm"}')
    assert (await written(served, asked)).endswith("[assistant, calm]")
    for name in ("chat_template", "tokenize", "messages", "add_generation_prompt", "tools"):
        with pytest.raises(BadRequest, match=f"chat_template_kwargs: cannot set {name}"):
            await written(served, chat_of(("user", "hello"), chat_template_kwargs=f'{{"{name}": "x"}}'))


async def test_tools_calls_and_the_answers_start_reach_the_prompt(tmp_path):
    template = "{{ tools | map(attribute='name') | join if tools }}" + TEMPLATE.replace(
        "{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}{{ m.tool_calls[0].name if m.tool_calls }}"
    )
    served = served_with(tmp_path, template)
    asked = chat_of(("assistant", ""), ("tool", "4"), tools='[{"name": "add"}]', answer_start="<|end|>call:")
    asked.chat.messages[0].tool_calls, asked.chat.messages[1].tool_call_id = '[{"name": "sum"}]', "id"
    written_ids = await ids_of_prompt(asked, served, 1 << 20)
    text = "add<|end|>[assistant]sum<|end|>[tool]id4<|end|>[assistant]<|end|>call:"
    assert served.tokenizer.showing().decode(written_ids) == text
    assert written_ids.count(END) == text.count("<|end|>"), "a special token that begins a call is a token"
    assert (await written(served, asked, earlier=[5])).endswith("[tool]id4<|end|>[assistant]<|end|>call:")


async def test_tools_that_the_template_ignores_are_refused(served):
    with pytest.raises(BadRequest, match="tools: the target's chat template ignores them"):
        await written(served, chat_of(("user", "hello"), tools='[{"name": "add"}]'))


def test_shown_tokens_are_the_special_ones_of_bounded_texts(served):
    tokenizer = served.tokenizer
    shown = special_tokens_of(pb.Chat(shown_tokens=["<|end|>", "ab", ""]), tokenizer)
    assert shown == {END}, "others give text anyway"
    ids = [END, *tokenizer.encode("a", begins=False)]
    assert tokenizer.showing(shown).decode(ids) == "<|end|>a"
    assert tokenizer.showing(frozenset()).decode(ids) == tokenizer.decode(ids) == "a"
    for texts, field in ((["a"] * 17, "shown_tokens: has 17"), (["a", "b" * 1025], r"shown_tokens\[1\]: has 1025")):
        with pytest.raises(BadRequest, match=field):
            special_tokens_of(pb.Chat(shown_tokens=texts), tokenizer)


async def test_a_template_that_does_not_know_the_role_developer_gets_system(served, tmp_path):
    asked = chat_of(("developer", "be brief"), ("user", "hello"))
    assert (await written(served, asked)).startswith("<|end|>[system]be brief")
    knows = served_with(tmp_path, TEMPLATE + "{# developer #}")
    assert (await written(knows, asked)).startswith("<|end|>[developer]be brief")


@pytest.mark.parametrize("ended", [True, False], ids=["end of text", "another end"])
async def test_messages_that_continue_a_session_follow_its_last_answer(served, ended):
    earlier = [*b"[user]one<e>[assistant]two", *([END] if ended else [])]
    text = await written(served, chat_of(("user", "three")), earlier)
    assert text == ("" if ended else "<|end|>") + "[user]three<|end|>[assistant]"


@pytest.mark.parametrize("text", [ANSWER, 2 * ANSWER, "another"])
async def test_messages_continue_a_session_whatever_text_is_in_them_and_in_the_tools_before_them(tmp_path, text):
    served = served_with(tmp_path, "{{ tools | map(attribute='name') | join if tools }}" + TEMPLATE)
    asked = chat_of(("system", text), ("user", text), tools=json.dumps([{"name": f"first {text}"}]))
    ids = await ids_of_prompt(asked, served, 1 << 20, [*b"[assistant]two", END], None)
    assert served.tokenizer.showing().decode(ids) == f"[system]{text}<|end|>[user]{text}<|end|>[assistant]"


async def test_the_token_that_ended_an_answer_is_written_once_where_the_template_writes_it_after_a_space(tmp_path):
    served = served_with(tmp_path, TEMPLATE.replace("{{ m.content }}", " {{ m.content }} "))
    asked = chat_of(("user", "three"))
    ended = await written(served, asked, [*b"[user] one <e>[assistant] two", END])
    assert ended == "[user] three <|end|>[assistant]"
    assert await written(served, asked, b"[user] one <e>[assistant] two") == " <|end|>" + ended


async def test_a_special_token_that_ended_an_answer_as_a_stop_id_is_written_once(served):
    stopped = replace(served, end_ids=frozenset())
    assert await written(stopped, chat_of(("user", "three")), [*b"two", END]) == "[user]three<|end|>[assistant]"


def message_with(**fields: str) -> pb.GenerateRequest:
    """A conversation of one message with further fields."""
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="assistant", **fields)]))


@pytest.mark.parametrize(
    "request_, field",
    [
        (chat_of(), "messages: has 0 entries"),
        (chat_of(*[("user", "a")] * 4097), "messages: has 4097 entries"),
        (chat_of(("user", "a"), ("narrator", "b")), r"messages\[1\].role: is 'narrator'"),
        (chat_of(("user", "a" * 6000), ("user", "b" * 6000)), "messages: has 12000 bytes; at most 10000"),
        (
            chat_of(("user", "a"), chat_template_kwargs=" " * 10_001),
            "chat_template_kwargs: has 10001 bytes; at most 10000",
        ),
        (chat_of(("user", "a"), chat_template_kwargs="["), "chat_template_kwargs: is not JSON"),
        (chat_of(("user", "a"), tools="["), "tools: is not JSON"),
        (chat_of(("user", "a"), tools="[1]"), "tools: must be a JSON array of objects"),
        (chat_of(("user", "a"), chat_template_kwargs="[]"), "chat_template_kwargs: must be a JSON object"),
        (chat_of(("user", "a"), chat_template_kwargs="[" * 9999), "chat_template_kwargs: is not JSON: it nests"),
        (
            chat_of(("user", "a"), chat_template_kwargs='{"a": %s}' % ("9" * 5000)),
            "kwargs: is not JSON: a number has too",
        ),
        (chat_of(("user", "a"), chat_template_kwargs='{"a": "\\ud800"}'), "chat_template_kwargs: has a surrogate"),
        (chat_of(("user", "a"), tools='[{"\\ud800": 1}]'), "tools: has a surrogate"),
        (chat_of(("user", "a"), tools='[{"a": NaN}]'), "tools: is not JSON: NaN is no number"),
        (message_with(tool_calls='[{"id": "\\udc00"}]'), r"messages\[0\].tool_calls: has a surrogate"),
        (
            message_with(tool_calls='[{"a": 1, "a": 1}]'),
            r"messages\[0\].tool_calls: is not JSON: the key 'a' occurs twice",
        ),
    ],
)
async def test_a_wrong_conversation_is_refused_by_the_name_of_its_field(served, request_, field):
    with pytest.raises(BadRequest, match=field):
        await written(served, request_, most=10_000)


async def test_what_a_template_refuses_is_the_messages_fault(tmp_path):
    served = served_with(tmp_path, "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}")
    with pytest.raises(BadRequest, match="messages: the chat template refuses them: user first"):
        await written(served, chat_of(("assistant", "a")))


async def test_a_token_that_the_model_lacks_is_the_messages_fault(served):
    fewer = replace(served, vocabulary=END)
    with pytest.raises(BadRequest, match=f"^messages: has the token {END}; the model has {END}"):
        await ids_of_prompt(chat_of(("user", "hello")), fewer, 1 << 20)


async def test_a_template_without_earlier_answers_cannot_continue_a_session(tmp_path):
    served = served_with(tmp_path, "[{{ messages[-1].content }}]")
    with pytest.raises(BadRequest, match="messages: cannot continue a session"):
        await written(served, chat_of(("user", "a")), earlier=[1, 2])
    assert ANSWER not in await written(served, chat_of(("user", "a")))


def test_a_target_without_a_template_is_refused_by_name_and_a_file_gives_it_one(tmp_path):
    write_tokenizer(tmp_path)
    without = CheckpointTokenizer(tmp_path, "bytes")
    with pytest.raises(BadRequest, match="messages: the target has no chat template; set its `chat_template`"):
        without.chat([{"role": "user", "content": "a"}], True)
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    config = Config.of({"targets": {"demo": {"checkpoint": ".", "chat_template": "own.jinja"}}}, tmp_path)
    assert config.targets["demo"].chat_template == tmp_path / "own.jinja"
    with_one = CheckpointTokenizer(tmp_path, "bytes", config.targets["demo"].chat_template)
    assert "[user]a" in with_one.chat([{"role": "user", "content": "a"}], True)


@pytest.mark.parametrize(
    "text, reason",
    [
        (None, "cannot be read"),
        ("{% if %}", "no template of Jinja: line 1"),
        ("é" * (1 << 19) + "a", "has more than 1,048,576 bytes"),
    ],
    ids=["missing", "not Jinja", "long"],
)
def test_a_file_that_is_no_template_is_refused_at_start(tmp_path, text, reason):
    write_tokenizer(tmp_path)
    if text is not None:
        (tmp_path / "own.jinja").write_text(text)
    with pytest.raises(BadRequest, match=rf"chat_template: .*{reason}"):
        CheckpointTokenizer(tmp_path, "bytes", tmp_path / "own.jinja")


@asynccontextmanager
async def calling(peers=None):
    server = await serve_router(ingress(peers or EdgePeers()))
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            yield server, stub
    finally:
        await server.stop()


async def test_tokenize_gives_the_prompts_ids_and_detokenize_their_text():
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    async with calling() as (_, stub):
        ids = (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
        assert list(ids) == [*b"[user]hi", END, *b"[assistant]"]
        assert list((await stub.Tokenize(pb.TokenizeRequest(text="hi"))).token_ids) == [*b"hi"]
        asked = pb.DetokenizeRequest(token_ids=ids)
        assert (await stub.Detokenize(asked)).text == "[user]hi[assistant]"
        asked.show_special_tokens = True
        assert (await stub.Detokenize(asked)).text == "[user]hi<end>[assistant]"
        events = [event async for event in stub.Generate(pb.GenerateRequest(chat=chat, echo=True, speculation=OFF))]
        assert [token for event in events for token in event.prompt.token_ids] == list(ids), "those of a request"


async def test_wrong_tokens_and_an_unknown_model_are_refused_by_name():
    async with calling() as (_, stub):
        for call, request, details in (
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=[5, 300]), "token_ids[1]: 300 is outside"),
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=[5] * 600), "token_ids: has 600 ids"),
            (stub.Detokenize, pb.DetokenizeRequest(model="other"), "model: 'other' is not served"),
            (stub.Tokenize, pb.TokenizeRequest(text="a" * (2 << 20)), "prompt: has"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details().startswith(details)


async def test_abort_ends_the_requests_of_its_tenant_with_the_id_and_no_others():
    peers = EdgePeers()
    peers.pause_s = 0.02
    async with calling(peers) as (server, stub):
        request = pb.GenerateRequest(request_id="one", text="walk", max_new_tokens=400, speculation=OFF)
        calls = [stub.Generate(request, metadata=(("dendro-tenant", tenant),)) for tenant in ("here", "there")]
        for call in calls:
            assert (await call.read()).WhichOneof("event") == "started"
        asked = pb.AbortRequest(request_id="one")
        assert (await stub.Abort(asked)).aborted == 0, "another tenant's"
        assert (await stub.Abort(asked, metadata=(("dendro-tenant", "here"),))).aborted == 1
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await calls[0].read() is not EOF:
                pass
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        assert (await calls[1].read()).HasField("chunk")
        await until(lambda: server.stats()["running"] == 1)
        calls[1].cancel()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_lacks_is_refused_by_the_field_that_has_it(number):
    for fields, name in (({"tools": [{"a": number}]}, "tools"), ({"chat_template_kwargs": {"a": number}}, "chat_temp")):
        with pytest.raises(BadRequest, match=f"^{name}.*: cannot be written as JSON"):
            fill_chat(pb.Chat(), Chat([{"role": "user", "content": "a"}], **fields))
