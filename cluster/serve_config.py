"""Our configuration as Ray Serve's own file, for `serve deploy` and KubeRay: the same cluster as `dendro serve`.

Serve says nothing of keys that it does not know, so nothing here is passed on unchecked: our configuration refuses
them, and the keys that are written are held against Serve's models in the tests.
"""

from __future__ import annotations

from typing import Any

import yaml
from dendro.errors import BadRequest

from cluster.config import Config

APPLICATION = "dendro"
ROUTE = "/dendro"
IMPORT_PATH = "cluster.app:application"
SERVICER = "dendro.v1.generation_pb2_grpc.add_GenerationServiceServicer_to_server"
HTTP_PORT = 8000
"""Where Kubernetes asks a node's proxy whether it is well."""

ENVIRONMENT = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a killed proxy is back in 4 s instead of 30
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(8 << 20),
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # else a hung one may go on for as long as a request
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray makes its workers nice (15): any other process would starve the engines
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Read by Ray's and Serve's own processes when they start, so it must be set where they do."""


def serve_config(config: Config) -> dict[str, Any]:
    """The file's contents. Raises BadRequest for what only a cluster of our own can choose: a free port, a Redis."""
    if not config.redis.url:
        raise BadRequest("redis.url", "is empty; a cluster that Serve deploys needs a Redis that is there")
    if not config.grpc.port:
        raise BadRequest("grpc.port", "is 0; name the port that clients will find")
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
        "grpc_options": {"port": config.grpc.port, "grpc_servicer_functions": [SERVICER]},
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
    """The file's text, with what must stand in the environment of Ray's processes as a comment."""
    lines = [f"#   {name}={value}" for name, value in ENVIRONMENT.items()]
    head = "# For `serve deploy` and KubeRay. Ray's processes must be started with:\n" + "\n".join(lines) + "\n"
    return head + yaml.safe_dump(serve_config(config), sort_keys=False)
