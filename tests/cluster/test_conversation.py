"""`dendro chat`: a conversation over standard input and output."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys

import pytest
from dendro.answer import ExpectedRound, Round, RoundTree
from dendro.text import Sampling
from typer.testing import CliRunner

from cluster import cli
from cluster.api.grpc import serve_router
from cluster.conversation import round_lines, tree_lines
from tests.cluster.test_showing import TEXT, answering
from tests.support.edge import END, EdgePeers, ingress, plain_answer

HELLO = [*b"[user]hello", END, *b"[assistant]"]
AGAIN = list(b"<end>[user]again<end>[assistant]")
"""What the fake tokenizer makes of a message that continues a session."""


def words_of(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


async def run(address: str, lines: str, *words: str):
    command = ["chat", address, "--max-new-tokens", "12", *words]
    return await asyncio.to_thread(CliRunner().invoke, cli.app, command, input=lines, env={"COLUMNS": "200"})


async def test_each_line_is_a_turn_of_one_session(address: str):
    done = await run(address, "hello\n\nagain\n")
    first = plain_answer(HELLO, Sampling(), 12)
    second = plain_answer([*HELLO, *first, *AGAIN], Sampling(), 12)
    assert done.exit_code == 0 and done.stdout == f"{words_of(first)}\n{words_of(second)}\n"
    assert done.stderr.count("tokens/s") == 2


async def test_a_session_goes_on_in_another_chat(address: str):
    first = await run(address, "hello\n/session\n")
    token = first.stdout.splitlines()[-1]
    second = await run(address, "again\n/session\n", "--session", token)
    both = await run(address, "hello\nagain\n")
    assert second.stdout.splitlines()[0] == both.stdout.splitlines()[1]
    assert second.stdout.splitlines()[-1] == token


async def test_off_ends_speculation_and_on_begins_it_again(address: str):
    done = await run(address, "/off\nhello\n/tree 1\n/on\nhello\n/tree 1\n/quit\nhello\n", "--temperature", "0.5")
    assert done.exit_code == 0 and "speculation: off" in done.stdout and "speculation: auto" in done.stdout
    without, with_arms = done.stdout.split("round 1 of ")[1:]
    assert without.splitlines()[1].startswith("off: 1 tokens, no tree") and "arm " not in without
    assert "arm (2,1): expects" in with_arms
    assert done.stderr.count("tokens/s") == 2  # nothing is sent after /quit


async def test_commands_say_what_they_take(address: str):
    done = await run(address, "/tree\n/session\n/help\n/what\nhello\n/tree 99\n/tree x\n")
    assert "there is no tree" in done.stdout and "none yet" in done.stdout and "/quit" in done.stdout
    assert "there is no command /what" in done.stdout and done.stdout.count("/tree takes a round from 1 to") == 2


async def test_the_system_message_is_before_the_first_turn_alone(address: str):
    done = await run(address, "hello\nagain\n", "--system", "be brief")
    prompt = [*b"[system]be brief", END, *HELLO]
    first = plain_answer(prompt, Sampling(), 12)
    assert done.stdout.splitlines()[0] == words_of(first)
    assert done.stdout.splitlines()[1] == words_of(plain_answer([*prompt, *first, *AGAIN], Sampling(), 12))


async def test_no_control_character_of_an_answer_is_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    async with answering() as address:
        done = await run(address, "hello\n")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", plain)
    assert r"\x1b[31mred" in plain and "[bold]b[/]" in plain and len(plain) > len(TEXT)
    assert "\x1b[1;36m" in done.stdout and "\x1b[1;33m" in done.stdout  # the rounds' two styles


async def test_an_error_ends_a_piped_chat_with_its_status(address: str):
    done = await run(address, "hello\n", "--session", "unknown")
    assert done.exit_code != 0 and done.stdout == ""
    refused = await run(address, "hello\n", "--temperature", "-1")
    assert refused.exit_code != 0


async def test_options_of_an_address_are_refused_without_one(tmp_path):
    key = tmp_path / "key"
    key.write_text("k")
    file = tmp_path / "cluster.yaml"
    file.write_text("targets: {}\n")
    done = await asyncio.to_thread(CliRunner().invoke, cli.app, ["chat", str(file), "--key-file", str(key)])
    assert "--key-file" in str(done.exception)


@pytest.mark.slow
async def test_ctrl_c_ends_an_answer_and_not_the_conversation():
    peers = EdgePeers()
    peers.pause_s = 0.02
    server = await serve_router(ingress(peers))
    command = [sys.executable, "-m", "cluster.cli", "chat", server.address, "--max-new-tokens", "400"]
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        async with asyncio.timeout(60):
            child.stdin.write(b"hello\n")
            await child.stdout.read(1)
            child.send_signal(signal.SIGINT)
            await peers.all_closed.wait()
            child.stdin.write(b"/session\n/quit\n")
            output, notes = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
        await server.stop()
    assert child.returncode == 0 and b"none yet" in output and b"not part of the session" in notes


def test_a_tree_is_drawn_parents_before_their_guesses():
    arm = ExpectedRound("(2,1)", 2.5, 0.5, 10_000.0)
    tree = RoundTree(
        (1, 2, 3, 4), (0, 0, 1), (" a", " b", "\n", '"'), (0.5, 0.25, 0.5), (1, 3), (2,), False, (arm,), 0, 5, 0
    )
    assert list(tree_lines(tree)) == [
        '" a"',
        '├─ " b"  0.50  accepted',
        '│  └─ "\\""  0.50  accepted',
        '└─ "\\n"  0.25  proposed',
    ]
    lines = list(round_lines(Round(0, (2, 4, 9), " b", "(2,1)", tree=tree)))
    assert lines[0].startswith("(2,1): 3 tokens, 2 of 3 guesses accepted") and "250 tokens/s  chosen" in lines[-1]
