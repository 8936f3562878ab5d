"""Every command of the documentation is one that its program accepts, and every code block runs.

Those that need neither Kubernetes, nor an accelerator, nor more than half a minute are run in their shortest form, by
tests marked `slow` or `long`. All others are parsed: by the command line's own parser, with the files that they
name.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from dendro.client import Client
from typer.testing import CliRunner

from cluster import cli, slow_commands
from cluster.api.callers import Callers
from cluster.api.grpc import serve_router
from cluster.api.openai.server import serve_http
from cluster.config import DEMO_MODELS, Config
from cluster.running import local_ingress
from tests.support import documented
from tests.support.documented import PAGES, ROOT, DocumentedCommand, FencedBlock, blocks, commands

COMMANDS = commands()
OURS = [each for each in COMMANDS if each.words[0] == "dendro"]

OTHER_PROGRAMS = {
    "docker": "builds images",
    "helm": "installs on Kubernetes",
    "kubectl": "asks Kubernetes",
    "grpcurl": "is another project's client",
    "curl": "calls a server: see `test_a_command_of_curl_gets_an_answer`",
    "protoc": "is another project's compiler",
    "grep": "reads a log that a running cluster writes",
}
"""Programs that no test of this file starts, each with the reason."""
READERS = {
    *("cluster.yaml", "demo-target.yaml", "prompts.jsonl", "schema.json", "code/", "chats.jsonl", "texts/", "texts"),
    *("string.yaml", "intersection.yaml", "transformer.yaml", "state-space.yaml"),
    *("keys.json", "smollm2.yaml", "two-targets.yaml", "evaluation.jsonl", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    *("models/big", "CHECKPOINT", "target-mamba2", "tests/cluster/test_largest.py", "tests/dendro/test_chain.py"),
    "tests/cluster/test_bench_lookup.py",
    "tests/cluster/test_epsilon_cutoff.py",
    "tests/drafter_service/test_ernie.py",
}
"""Files and folders that the reader has, or has made by following the page."""
WRITTEN = {"json_file", "json", "markdown", "plot", "output", "out"}
"""Parameters whose files a command writes."""


UsageError = typer.BadParameter.__mro__[1]
"""Raised by a parser; typer has it from click, or from its own copy of it."""


def parsed(words: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a command of `dendro` by name, read by its own parser without running it. Raises UsageError."""
    if words[0] in ("train", "bench", *slow_commands.MEASURING):
        command, words = slow_command(words)
    else:
        command = typer.main.get_command(cli.app)
    while (inside := getattr(command, "commands", None)) is not None and words:
        command, words = inside.get(words[0]), words[1:]
    if command is None:
        raise UsageError("there is no such command")
    return command.make_context("dendro", list(words)).params


def slow_command(words: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """A command of a module that is slow to import, and its arguments."""
    found = []

    def noted(module: str, function: str, context: typer.Context) -> None:
        app = typer.Typer(add_completion=False)
        app.command()(slow_commands.function_of(module, function))
        found.append((typer.main.get_command(app), tuple(context.args)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_commands, "_run_from", noted)
        CliRunner().invoke(cli.app, list(words))
    return found[0] if found else (None, words)


def missing(words: tuple[str, ...]) -> list[str]:
    """Files that the parsed command reads and that neither the repository nor the reader has."""
    given = parsed(words)
    paths = [
        str(each)
        for name, value in given.items()
        if name not in WRITTEN
        for each in (value if isinstance(value, list | tuple) else [value])
        if isinstance(each, Path)
    ]
    return [path for path in paths if not {path, f"{path}/"} & READERS and not (ROOT / path).exists()]


@pytest.mark.parametrize("command", OURS, ids=str)
def test_dendros_parser_accepts_every_command_and_its_files_exist(command: DocumentedCommand):
    if command.words[1] != "--version":
        assert not missing(command.words[1:])


def test_every_other_command_starts_a_program_that_is_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in COMMANDS:
        program, *rest = command.words
        if program == "make":
            assert set(rest) <= targets, command
        elif program.endswith("python"):
            assert rest[0] == "-m" and importlib.util.find_spec(rest[1]) is not None, command
            assert not [each for each in rest[2:] if "/" in each and each not in READERS and not (ROOT / each).exists()]
        elif program != "dendro":
            assert program in OTHER_PROGRAMS, command


def test_what_is_no_command_is_refused():
    for words in ("generate --nowhere x", "bench speed --colour", "nothing", "tune --prompt-file"):
        with pytest.raises(UsageError):
            parsed(tuple(words.split()))
    assert missing(("check", "nowhere.yaml")) == ["nowhere.yaml"]
    assert missing(("bench", "speed", "nowhere.yaml")) == ["nowhere.yaml"]


def test_the_words_of_a_line_are_those_of_a_shell():
    assert doctest.testmod(documented) == doctest.TestResults(failed=0, attempted=1)


YAML = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.page)
def test_every_configuration_of_the_documentation_is_accepted(block: FencedBlock):
    given = yaml.safe_load(block.text)
    given = given.get("cluster", given)  # of the chart's values
    if not set(given) & set(Config.model_fields):
        pytest.skip("is part of another file")
    given.setdefault("targets", {"big": {"checkpoint": "models/big"}})
    Config.of(given, Path("/nowhere"))


# What is run. The server is the demo pair in this process; each answer has few tokens.
CONFIG: dict[str, Any] = {
    "targets": {"big": {"checkpoint": str(DEMO_MODELS / "target")}},
    "drafters": {"small": {"checkpoint": str(DEMO_MODELS / "mamba2")}},
    "router": {"default_new_tokens": 48},  # enough to spell the name of a tool letter by letter
}
RUN = ("generate", "check", "config", "--version")
"""Commands that take a second in their shortest form."""
SHORTEST = {
    "kernels": ("--quick", "--rows", "1,8", "--repetitions", "1"),
}
"""Benches that take less than half a minute, and the options of that."""


@contextmanager
def in_a_thread(context) -> Iterator:
    """The value of an asynchronous context manager whose event loop is in another thread."""
    entered: Future = Future()
    leave = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def hold() -> None:
        try:
            async with context as value:
                entered.set_result(value)
                await leave.wait()
        except BaseException as error:
            if not entered.done():
                entered.set_exception(error)
            raise

    thread = threading.Thread(target=loop.run_until_complete, args=(hold(),))
    thread.start()
    try:
        yield entered.result(timeout=90)
    finally:
        loop.call_soon_threadsafe(leave.set)
        thread.join()
        loop.close()


TEMPLATE = (
    "{{ tools | tojson if tools }}{% for each in messages %}{{ each.content }}\n"
    "{% for call in each.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endfor %}"
)
"""A chat template for the demo's target, which has none."""


@asynccontextmanager
async def both_servers(config: Config) -> AsyncIterator[tuple[str, str]]:
    """The addresses of a router's servers of gRPC and HTTP."""
    async with local_ingress(config) as ingress:
        server = await serve_router(ingress)
        http = await serve_http(ingress, server.requests, Callers(config))
        try:
            yield server.address, http.address
        finally:
            await http.stop()
            await server.stop(drain_s=1.0)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    targets = {"big": CONFIG["targets"]["big"] | {"chat_template": str(template)}}
    with in_a_thread(both_servers(Config.of(CONFIG | {"targets": targets}, ROOT))) as found:
        yield found


@pytest.fixture
def address(addresses):
    return addresses[0]


@pytest.fixture
def readers_folder(tmp_path, monkeypatch):
    """A folder with the reader's files."""
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"a": {"type": "boolean"}}}')
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> str:
    done = CliRunner().invoke(cli.app, list(words))
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in OURS if each.words[1] in RUN], ids=str)
def test_a_quick_command_runs(command: DocumentedCommand, address, readers_folder):
    words = [address if word == "127.0.0.1:9000" else word for word in command.words[1:]]
    if words[0] == "generate":
        words += ["--max-new-tokens", "4"]
    if words[0] == "config":  # what every node reads needs a Redis and a port
        shared = {"redis": {"url": "redis://127.0.0.1:6379"}, "grpc": {"port": 9000}}
        Path("cluster.yaml").write_text(yaml.safe_dump(CONFIG | shared))
    if "TOKEN" in words:
        kept = run("generate", "a", "--address", address, "--keep-session", "--max-new-tokens", "2", "--json")
        words[words.index("TOKEN")] = json.loads(kept)["session"]
    run(*words)


@pytest.mark.long
@pytest.mark.timeout(300)  # on a machine with other work
@pytest.mark.parametrize("name", SHORTEST)
def test_a_quick_bench_runs_and_shows_its_plot_on_its_page(name: str, tmp_path):
    """In a process of its own: a bench sets the number of threads."""
    pages = (each for each in OURS if each.page == "docs/measure.md")
    words = next(each.words for each in pages if each.words[1:3] == ("bench", name))
    command = [sys.executable, "-m", "cluster.cli", *words[1:], *SHORTEST[name]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{name}.png").stat().st_size > 0 and json.loads((tmp_path / f"{name}.json").read_text())
    assert f"]({name}.png)" in (tmp_path / f"{name}.md").read_text()


CURL = [each for each in COMMANDS if each.words[0] == "curl"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", CURL, ids=str)
def test_a_command_of_curl_gets_an_answer(command: DocumentedCommand, addresses):
    words = [word.replace("127.0.0.1:8000", addresses[1]) for word in command.words]
    done = subprocess.run([*words, "--silent", "--fail-with-body"], capture_output=True, text=True)
    assert done.returncode == 0
    if "-N" in words:
        parts = [json.loads(each[6:]) for each in done.stdout.split("\n\n") if each.startswith("data: {")]
        assert "error" not in parts[-1] and parts[-1]["usage"] and done.stdout.endswith("data: [DONE]\n\n")
    elif words[1].endswith("/abort"):
        assert json.loads(done.stdout) == {"aborted": 0}
    else:
        assert json.loads(done.stdout)["object"] in ("chat.completion", "text_completion", "list")


@pytest.fixture
def unread(monkeypatch):
    """The prompts of calls of `Client.generate` whose events nobody has begun to read: such a call does nothing."""
    prompts, generate = [], Client.generate

    def noted(self, prompt, *args, **options):
        def events():
            prompts.remove(prompt)
            yield from generate(self, prompt, *args, **options)

        prompts.append(prompt)
        return events()

    monkeypatch.setattr(Client, "generate", noted)
    return prompts


PYTHON = [
    block
    for page in PAGES
    for block in blocks(page)
    if block.language == "python" and re.search(r"\bclient\b", block.text)
]


def test_code_blocks_of_the_client_are_found():
    assert len(PYTHON) > 10


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"{block.page}: {block.text.splitlines()[-1]}")
def test_a_code_block_of_the_client_runs_and_reads_its_answers(block: FencedBlock, addresses, unread):
    address, http = addresses
    text = textwrap.dedent(block.text).replace("127.0.0.1:9000", address).replace("127.0.0.1:8000", http)
    code = compile(text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with Client(address, proxy=False) as client:
        names = {"client": client, "Structure": importlib.import_module("dendro.structure").Structure}
        done = eval(code, names)
        if inspect.isawaitable(done):
            asyncio.run(done)
    assert not unread


DIFFS = [block for page in PAGES for block in blocks(page) if block.language == "diff"]


def hunks(diff: str) -> Iterator[tuple[str, str]]:
    """Each file that a diff changes, with the lines that are there before the change."""
    for change in re.split(r"^--- .*\n", diff, flags=re.MULTILINE)[1:]:
        name, *parts = re.split(r"^@@.*\n", change, flags=re.MULTILINE)
        for part in parts:
            kept = [line[1:] for line in part.splitlines() if not line.startswith("+")]
            yield name.strip().removeprefix("+++ b/"), "\n".join(kept) + "\n"


@pytest.mark.parametrize("block", DIFFS, ids=lambda block: block.text.splitlines()[0])
def test_a_diff_of_the_documentation_fits_the_files_that_it_changes(block: FencedBlock):
    found = list(hunks(block.text))
    assert found
    for name, before in found:
        assert f"\n{before}" in (ROOT / name).read_text(), f"{name}:\n{before}"
