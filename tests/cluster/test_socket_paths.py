"""A folder for temporary files whose sockets would have too long paths is refused by the variable that names it."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest
from dendro.errors import BadRequest

from cluster.config import demo_config
from cluster.redis_server import RedisServer
from cluster.running import running_cluster
from cluster.socket_paths import check_ray_sockets, ray_logs


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
async def test_a_cluster_is_not_started_where_rays_sockets_would_have_too_long_paths(monkeypatch, variable: str):
    monkeypatch.setenv(variable, f"/tmp/{'x' * 60}")
    with pytest.raises(BadRequest, match=f"^{variable}: has 65 bytes, .* more than 107; .* at most") as refused:
        async with running_cluster(demo_config()):
            pass
    longest = int(re.findall(r"at most (\d+) bytes", str(refused.value))[0])
    monkeypatch.setenv(variable, "/tmp/".ljust(longest, "x"))
    check_ray_sockets()
    monkeypatch.setenv(variable, "/tmp/".ljust(longest + 1, "x"))
    with pytest.raises(BadRequest, match=f"^{variable}: "):
        check_ray_sockets()


def test_redis_is_not_started_where_its_socket_would_have_too_long_a_path(tmp_path: Path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(BadRequest, match="^TMPDIR: has"):
        RedisServer(16)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_the_logs_are_those_of_this_processs_last_ray_in_the_folder_that_is_set(tmp_path: Path, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path))
    assert ray_logs() == tmp_path / "ray/session_latest/logs"
    for session in (f"01-01_{os.getpid()}", f"01-02_{os.getpid()}", "01-03_1"):
        (tmp_path / f"ray/session_2026-{session}").mkdir(parents=True)
    assert ray_logs() == tmp_path / f"ray/session_2026-01-02_{os.getpid()}/logs"
