"""templates/redis.yaml: a small server for trials, or none if a URL is given."""

from __future__ import annotations

import os
import subprocess

import kubernetes_validate
import psutil
import pytest
import redis
from helm_python import HelmError
from ray._private.services import get_address
from redis.backoff import ConstantBackoff
from redis.connection import parse_url
from redis.retry import Retry

from cluster.redis_server import find_redis_server
from tests.support.chart import KUBERNETES, SMALL, merged, rendered, service

SECRET = {"redis": {"existingSecret": "mine"}}


@pytest.mark.parametrize("values", [SMALL, merged(SMALL, SECRET)], ids=["open", "with a password"])
def test_kubernetes_accepts_its_manifests(values):
    kinds = []
    for manifest in rendered(values)["redis.yaml"]:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        kinds.append(manifest["kind"])
    assert kinds == ["Service", "StatefulSet"]


def test_the_clusters_redis_address_is_its_service():
    name, _ = (manifest["metadata"]["name"] for manifest in rendered()["redis.yaml"])
    address = service()["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    assert address == f"redis://{name}:6379"


def test_its_service_selects_its_pods():
    found, stateful = rendered()["redis.yaml"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert found["spec"]["selector"].items() <= labels.items()
    assert stateful["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (port,) = stateful["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert found["spec"]["ports"][0]["targetPort"] == port["name"]


def test_it_requires_the_secrets_password_which_no_argument_of_its_process_has(tmp_path):
    """The container's command, run here."""
    _, stateful = rendered(merged(SMALL, SECRET))["redis.yaml"]
    container = stateful["spec"]["template"]["spec"]["containers"][0]
    (variable,) = container["env"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "password"}}
    password, socket = """a"b\\c'd $HOME `e` %s""", tmp_path / "s"
    (tmp_path / "redis-server").symlink_to(find_redis_server())
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", variable["name"]: password}
    given = [str(tmp_path) if each == "/data" else each for each in container["args"]]
    given = [*container["command"], *given, "--port", "0", "--unixsocket", str(socket)]
    server = subprocess.Popen(given, env=environment, stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(unix_socket_path=str(socket), password=password, retry=Retry(ConstantBackoff(0.1), 100))
        assert client.ping()
        with pytest.raises(redis.exceptions.AuthenticationError):
            redis.Redis(unix_socket_path=str(socket)).ping()
        assert password not in " ".join(psutil.Process(server.pid).cmdline())
    finally:
        server.kill()
        server.wait()


def test_none_is_started_if_a_url_is_given():
    assert rendered(merged(SMALL, {"redis": {"url": "redis://mine:6379"}}))["redis.yaml"] == []


def test_keys_with_an_expiry_are_evicted_those_that_expire_first_before_others():
    """Ray's own keys have no expiry; states and records have one. States expire first."""
    _, stateful = rendered()["redis.yaml"]
    args = stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--maxmemory-policy") + 1] == "volatile-ttl"


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:6379/1",
        "redis://h:6379/",
        "redis://h:6379?db=1",
        "redis://h:99999",
        "redis://h:0",
        "redis://:secret@h:6379",
        "redis://h:6379,redis://i:6379",
        "redis://:6379",
        "unix:///redis.sock",
        "h:6379",
    ],
)
def test_an_address_that_ray_or_the_cluster_cannot_read_is_refused(url: str):
    with pytest.raises(HelmError, match="url"):
        rendered(merged(SMALL, {"redis": {"url": url}}))


@pytest.mark.parametrize("url", ["redis://h:6379", "rediss://sessions.example.internal:65535", "redis://[::1]:6379"])
def test_an_address_that_is_accepted_is_one_that_ray_and_the_cluster_read(url: str):
    inside = service(merged(SMALL, {"redis": {"url": url}}))["spec"]["rayClusterConfig"]
    assert inside["gcsFaultToleranceOptions"]["redisAddress"] == url
    host, port, _ = get_address(url)
    parsed = parse_url(url)
    assert (parsed["host"], parsed["port"]) == (host, int(port))
