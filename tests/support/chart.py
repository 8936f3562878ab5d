"""Renders the chart with Helm's own engine, without a cluster, and has a strict schema for its manifests."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
CRD = ROOT / "tests" / "deploy" / "data" / "ray.io_rayservices.yaml"
KUBERNETES = "1.34"
SMALL = {"cluster": {"targets": {"demo": {"checkpoint": "/checkpoints/target"}}}, "keys": {"open": True}}


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Values as Helm merges them: mappings by key, everything else replaced."""
    result = copy.deepcopy(under)
    for key, value in over.items():
        result[key] = (
            merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
        )
    return result


def values_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((CHART / name).read_text())


def rendered(values: dict[str, Any] | None = None, name: str = "dendro") -> dict[str, list[dict[str, Any]]]:
    """The manifests of each template. Raises helm_python's error for values that the schema or a template refuses."""
    from helm_python import Chart

    with Chart.load(str(CHART)) as chart:
        files = chart.render(SMALL if values is None else values, name=name, namespace="serving")
    found = {}
    for path, text in files.items():
        if path.endswith(".yaml"):
            found[Path(path).name] = [each for each in yaml.safe_load_all(text) if each]
    return found


def service(values: dict[str, Any] | None = None) -> dict[str, Any]:
    (manifest,) = rendered(values)["rayservice.yaml"]
    return manifest


def serve_config(values: dict[str, Any] | None = None) -> dict[str, Any]:
    return yaml.safe_load(service(values)["spec"]["serveConfigV2"])


@cache
def strict_crd() -> dict[str, Any]:
    """KubeRay's schema, made strict: an unknown key is an error wherever the schema names keys."""
    versions = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    schema = next(each for each in versions if each["name"] == "v1")["schema"]["openAPIV3Schema"]

    def closed(node: Any) -> Any:
        if isinstance(node, list):
            return [closed(each) for each in node]
        if not isinstance(node, dict):
            return node
        made = {key: closed(value) for key, value in node.items()}
        if made.get("x-kubernetes-int-or-string"):
            made.pop("type", None)
        if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
        return made

    schema = closed(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema
