"""The clients of docs/clients.md that have no code of ours: by reflection, and stubs of other languages."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from dendro.client import AsyncClient

from cluster.api.grpc import serve_router
from tests.support.edge import EdgePeers, ingress

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
LANGUAGES = ("go", "java", "csharp")


async def test_the_pages_client_by_reflection_gets_the_answer_that_our_client_gets():
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "dendro.v1.GenerationService" in script and "generation_pb2" not in script
    server = await serve_router(ingress(EdgePeers()))

    def run() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(script.replace("127.0.0.1:9000", server.address), {})
        return printed.getvalue()

    try:
        printed = await asyncio.to_thread(run)
        async with AsyncClient(server.address) as client:
            done = await client.generate_text("def area(radius):", max_new_tokens=16)
    finally:
        await server.stop()
    assert printed == f"['demo']\n{done.text}\n" and len(done.token_ids) == 16


def test_the_pages_commands_for_three_languages_name_the_file_and_its_folder(tmp_path):
    """The languages' own plugins are not here: protoc reads the file, and writes no code."""
    commands = [shlex.split(each) for each in re.findall(r"^protoc (?:.*\\\n)*.*$", PAGE, re.MULTILINE)]
    assert [[each for each in LANGUAGES if f"--{each}_out" in command] for command in commands] == [
        [each] for each in LANGUAGES
    ]
    for command in commands:
        at = command.index("--proto_path")
        tool = [sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_out={tmp_path / 'set'}"]
        done = subprocess.run(
            [*tool, *command[at : at + 2], command[-1]], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert b"GenerationService" in (tmp_path / "set").read_bytes()


CALLS = """
import sys
import grpc
from dendro.v1 import generation_pb2, generation_pb2_grpc

assert generation_pb2.__file__.startswith(sys.argv[1]), "these are the new stubs"
with grpc.insecure_channel(sys.argv[2]) as channel:
    request = generation_pb2.GenerateRequest(text="def area(radius):", max_new_tokens=16)
    for event in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request):
        print(event.chunk.text, end="")
"""


@pytest.fixture
def python_stubs(tmp_path) -> Path:
    """A folder with new stubs of the file."""
    tool = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path", str(ROOT / "protos")]
    outputs = [f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", "dendro/v1/generation.proto"]
    subprocess.run([*tool, *outputs], check=True)
    for folder in ("dendro", "dendro/v1"):
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


async def test_stubs_of_python_made_from_the_file_get_the_answer_that_our_client_gets(python_stubs):
    server = await serve_router(ingress(EdgePeers()))
    try:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CALLS, str(python_stubs), server.address),
            env=os.environ | {"PYTHONPATH": str(python_stubs)},
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await child.communicate()
        async with AsyncClient(server.address) as client:
            done = await client.generate_text("def area(radius):", max_new_tokens=16)
    finally:
        await server.stop()
    assert child.returncode == 0 and printed.decode() == done.text and len(done.token_ids) == 16
