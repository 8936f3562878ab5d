"""`tests/entered.py` counts the functions that a command enters, and those of its request alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOY = """
import asyncio
from threading import Thread


def load():
    pass


def answer():
    return 1


def never():
    return 2


class Ingress:
    async def generate(self):
        worker = Thread(target=answer)
        worker.start()
        for token in range(3):
            await asyncio.sleep(0)
            yield token
        worker.join()


def stop():
    pass


async def run():
    load()
    async for _ in Ingress().generate():
        pass
    stop()


def app(arguments, standalone_mode):
    asyncio.run(run())
"""


def test_lines_of_the_command_and_of_its_request_are_counted_in_every_thread(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "__init__.py").touch()
    (tmp_path / "cluster" / "cli.py").write_text(TOY)
    script = Path(__file__).with_name("entered.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [  # all but `never`; then without `load`, `stop` and `app`
        "the command: 20 lines of functions entered, in 1 modules of 40 lines",
        "its request: 14 lines of functions entered, in 1 modules of 40 lines",
    ]
