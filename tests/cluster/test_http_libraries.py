"""The script of docs/http-libraries.md: LiteLLM and LangChain, unchanged, against a router with keys."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cluster.api.callers import Callers
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.api.openai.server import serve_http
from cluster.api.requests import RunningRequests
from cluster.config import Config
from cluster.demo.real_pair import SMOLLM2
from cluster.router.allowance import KeyLimits
from cluster.running import local_ingress
from tests.support.documented import ROOT
from tests.support.smollm2 import needs_smollm2

PAGE = (ROOT / "docs" / "http-libraries.md").read_text()
MISSING = [each for each in ("litellm", "langchain_openai") if find_spec(each) is None]


def shown(command: str, end: str) -> str:
    """What the page shows after a command, up to the line that begins with `end`."""
    (found,) = re.findall(rf"^\$ {re.escape(command)}\n(.*?)^{re.escape(end)}", PAGE, re.DOTALL | re.MULTILINE)
    return found


def configuration(folder: Path) -> Config:
    (folder / "chat.jinja").write_text(shown("cat > chat.jinja", "$ cat"))
    target = {"checkpoint": SMOLLM2, "max_length": 2048, "chat_template": "chat.jinja"}
    return Config.of({"targets": {"smollm2": target}, "auth": {"keys": "keys.json"}}, folder)


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(MISSING), reason=f"not installed, and no dependencies of this project: {MISSING}")
async def test_the_pages_script_of_two_libraries_runs_to_its_end(tmp_path):
    key, entry = new_key("libraries", "libraries", KeyLimits())
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(entry,)))
    config = configuration(tmp_path)
    async with local_ingress(config) as ingress:
        server = await serve_http(ingress, RunningRequests(64), Callers(config))
        try:
            script = shown("cat libraries.py", "$ python").replace("127.0.0.1:18000", server.address)
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", script),
                env=os.environ | {"DENDRO_API_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
                stdout=asyncio.subprocess.PIPE,
            )
            printed = (await child.communicate())[0].decode()
        finally:
            await server.stop()
    assert child.returncode == 0, printed
    titled = re.compile(r"^L\w+: .*|^litellm\.\w+Error|\bTrue$", re.MULTILINE)
    titles = titled.findall(printed)
    assert titles and titles == titled.findall(shown("python libraries.py", "```"))
    assert "False" not in printed
