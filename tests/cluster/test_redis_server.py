"""The embedded redis-server: on a private socket, without persistence, ended with its parent."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import redis
from dendro.errors import EngineFailed

from cluster import redis_server
from cluster.redis_server import RedisServer
from cluster.sessions import RedisSessions
from tests.support.sockets import until


def test_it_answers_on_a_private_socket_and_stops():
    with RedisServer(memory_mb=16) as server:
        folder = Path(server.url.removeprefix("unix://")).parent
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        assert client.config_get("maxmemory")["maxmemory"] == str(16 << 20)
        assert client.config_get("save")["save"] == "" and client.config_get("appendonly")["appendonly"] == "no"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not psutil.pid_exists(server.pid)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the parent's death")
def test_it_ends_when_its_parent_is_killed_and_the_next_server_removes_its_folder(tmp_path, monkeypatch):
    code = (
        "import time; from cluster.redis_server import RedisServer as S; print(S(16).pid, flush=True); time.sleep(60)"
    )
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    named = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=named) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
        os.kill(parent.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs([child], timeout=10)
    assert not alive
    (left,) = tmp_path.iterdir()
    assert not (left / redis_server.SOCKET).exists(), "redis-server has removed it"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RedisServer(memory_mb=16):
        assert not left.exists()


def test_without_a_binary_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineFailed, match=r"dendroaspis\[embedded\]"):
        RedisServer()


def test_a_server_that_does_not_start_raises_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_server, "find_redis_server", lambda: Path("/bin/false"))
    began_s = time.monotonic()
    with pytest.raises(EngineFailed, match="did not start"):
        RedisServer()
    assert time.monotonic() - began_s < redis_server.START_TIMEOUT_S


def pinged(url: str) -> bool:
    """True if a server answers."""
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


async def test_a_server_that_is_killed_is_started_again_and_sessions_work(caplog: pytest.LogCaptureFixture):
    with RedisServer(memory_mb=16) as server:
        killed, sessions = psutil.Process(server.pid), RedisSessions(server.url, ttl_s=60)
        assert await sessions.new_token("acme")
        killed.kill()
        await until(lambda: server.pid != killed.pid and pinged(server.url), timeout_s=30.0)
        assert await sessions.new_token("acme")
        assert not killed.is_running(), "no zombie is left"
        await sessions.close()
    assert "the embedded redis-server ended (-9)" in caplog.text
    assert not psutil.pid_exists(server.pid) and not Path(server.url.removeprefix("unix://")).parent.exists()


async def test_a_server_is_started_again_once_a_process_can_be(monkeypatch):
    monkeypatch.setattr(redis_server, "RESTART_S", 0.01)
    with RedisServer(memory_mb=16) as server:
        killed, popen, failures = server.pid, subprocess.Popen, iter(range(2))

        def refused(*given, **named):
            if next(failures, None) is not None:
                raise BlockingIOError("no process can be made")
            return popen(*given, **named)

        monkeypatch.setattr(subprocess, "Popen", refused)
        os.kill(killed, signal.SIGKILL)
        await until(lambda: server.pid != killed and pinged(server.url), timeout_s=30.0)


def test_a_folder_of_another_user_is_left_and_keeps_no_server_from_starting(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other, is_socket = tmp_path / "dendro-redis-other", Path.is_socket
    other.mkdir()

    def denied(path):
        if path.parent == other:
            raise PermissionError(13, "Permission denied")
        return is_socket(path)

    monkeypatch.setattr(Path, "is_socket", denied)
    with RedisServer(memory_mb=16) as server:
        assert other.exists() and pinged(server.url)


def test_folders_of_killed_servers_are_removed_and_those_of_running_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RedisServer(memory_mb=16) as running:
        left, other = tmp_path / "dendro-redis-left", tmp_path / "dendro-redis-new"
        for folder in (left, other):
            folder.mkdir()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(left / redis_server.SOCKET))
        with RedisServer(memory_mb=16):
            assert not left.exists() and other.exists()
            assert redis.Redis.from_url(running.url).ping()
