"""What `dendro generate` writes: an answer's own bytes, and to a terminal nothing that is a command of it."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from dendro.answer import Round
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc
from typer.testing import CliRunner

from cluster import cli
from cluster.showing import RoundsPrinter, visible

TEXT = "\ta\r\n\x1b[31mred\x1b]0;title\x07 \x08\x7f\x9b2J é 𝛼 [bold]b[/] \u202etxt.exe \N{NO-BREAK SPACE}"
PARTS = (TEXT[:12], TEXT[12:])


class Controls(generation_pb2_grpc.GenerationServiceServicer):
    """Answers each request with TEXT, in two rounds."""

    async def Generate(self, request, context):
        for sample in range(max(request.n, 1)):
            started = pb.GenerateStarted(request_id="r", model="m", seed=9, prompt_tokens=3, target="t")
            yield pb.GenerateResponse(started=started, sample=sample)
            for offset, text in enumerate(PARTS):
                chunk = pb.GenerateChunk(offset=offset, token_ids=[7], text=text)
                yield pb.GenerateResponse(chunk=chunk, sample=sample)
            usage = pb.Usage(completion_tokens=2)
            complete = pb.GenerateComplete(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage)
            yield pb.GenerateResponse(complete=complete, sample=sample)


@asynccontextmanager
async def answering():
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Controls(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_pipe_gets_the_answers_bytes(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    async with answering() as address:
        words = ["generate", "p", "--address", address]
        one = await asyncio.to_thread(CliRunner().invoke, cli.app, words)
        two = await asyncio.to_thread(CliRunner().invoke, cli.app, [*words, "-n", "2"])
    assert one.stdout_bytes == f"{TEXT}\n".encode()
    assert two.stdout_bytes.count(TEXT.encode()) == 2


@pytest.mark.parametrize("words", [(), ("-n", "2")], ids=["one", "two"])
async def test_a_terminal_gets_no_command_of_the_answer(words, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal, ours = os.openpty()
    with os.fdopen(ours, "w", encoding="utf-8") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        async with answering() as address:
            call = ["generate", "p", "--address", address, *words]
            await asyncio.to_thread(cli.app, call, standalone_mode=False)
        output.flush()
        shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    for style in ("\x1b[1;36m", "\x1b[1;33m", "\x1b[0m"):  # ours, of the rounds
        shown = shown.replace(style, "")
    assert not set(shown) & set("\x1b\x07\x08\x7f\x9b\u202e") and "\r" not in shown.replace("\r\n", "")
    assert r"\r" in shown and r"\x1b[31mred\x1b]0;title\x07 \x08\x7f\x9b2J é 𝛼 [bold]b[/] \u202etxt.exe" in shown


def test_line_breaks_tabs_and_letters_are_shown_as_they_are():
    assert visible("\ta\né 𝛼\u200d\n") == "\ta\né 𝛼\u200d\n"


async def test_an_answer_that_cannot_be_printed_is_ended_at_once():
    ended = []

    async def events():
        try:
            yield Round(0, (7,), "text", "off")
            pytest.fail("it goes on")
        finally:
            ended.append(True)

    def write(text: str, style: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await RoundsPrinter(write).show_all(events())
    assert ended
