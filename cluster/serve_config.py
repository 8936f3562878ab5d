"""Our configuration as Ray Serve's own file, for `serve deploy` and KubeRay: the same cluster as `dendro serve`.

Serve ignores unknown keys, so nothing is passed on unchecked: our configuration refuses unknown keys, and tests check
the keys that are written against Serve's models.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from dendro.errors import BadRequest

from cluster.config import Config
from cluster.redis_address import SENTINEL_PASSWORD

APPLICATION = "dendro"
ROUTE = "/dendro"
"""Serve's HTTP proxy reports a node as healthy only where an application has a route. Nothing is served at it."""
IMPORT_PATH = "cluster.app:application"
HTTP_PORT = 8000
"""Port of Serve's HTTP proxy, at which KubeRay checks the health of the pods of verifiers and drafters."""

ENVIRONMENT = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a killed proxy fails its pod's probes for 4 s instead of 30
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # a hung replica would otherwise last as long as a request
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would let any other process starve the engines
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Read by Ray's and Serve's own processes when they start, so it must be in their environment."""


def check_redis(config: Config) -> None:
    """Raise BadRequest without a Redis url, as no embedded server is started for a cluster that Serve deploys, and for
    a password in it."""
    if not config.redis.url:
        raise BadRequest("redis.url", "is empty; a cluster that Serve deploys needs a running Redis")
    parts = urlsplit(config.redis.url)
    given = parse_qs(parts.query)
    for field, found in (
        ("password_variable", parts.password or "password" in given),
        ("sentinel_password_variable", SENTINEL_PASSWORD in given),
    ):
        if found:
            raise BadRequest("redis.url", f"has a password, which Ray's dashboard shows; set redis.{field}")


def serve_config(config: Config) -> dict[str, Any]:
    """The file's contents. Raises BadRequest as `check_redis`, without a gRPC port, which only `dendro serve` can
    choose, and for a port that Serve's HTTP proxy has."""
    check_redis(config)
    if not config.grpc.port:
        raise BadRequest("grpc.port", "is 0; set the port that clients will call")
    for field, port in config.ports.items():
        if port == HTTP_PORT:  # both share their port, so the kernel would divide the calls between them
            raise BadRequest(field, f"is {port}, as that of Serve's HTTP proxy is; set another port")
    for field, ports in config.router_ports.items():
        if HTTP_PORT in ports:
            which = ports.index(HTTP_PORT) + 1
            raise BadRequest(
                field, f"gives router {which} the port {HTTP_PORT}, that of Serve's HTTP proxy; set another"
            )
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": ROUTE,
                "import_path": IMPORT_PATH,
                "args": config.model_dump(mode="json", exclude_unset=True),
            }
        ],
    }


def as_yaml(config: Config) -> str:
    """The file's text, with the environment that Ray's processes need as a comment."""
    lines = [f"#   {name}={value}" for name, value in ENVIRONMENT.items()]
    head = "# For `serve deploy` and KubeRay. Ray's processes must be started with:\n" + "\n".join(lines) + "\n"
    return head + yaml.safe_dump(serve_config(config), sort_keys=False)
