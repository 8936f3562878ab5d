"""values.yaml and its schema: every value has a comment beside it, and a misspelt one is refused."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from dendro.modes import LISTED_MODES
from helm_python import HelmError, lint

from cluster.config import Config
from tests.support.chart import CHART, SMALL, merged, rendered, values_of

DEFAULTS = values_of("values.yaml")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
FREE = ("cluster", "resources", "nodeSelector", "volume", "labels")  # their keys are not the chart's


def paths(values, at=()):
    for key, value in values.items():
        yield (*at, key)
        if isinstance(value, dict) and key not in FREE:
            yield from paths(value, (*at, key))


def test_helm_lint_reports_nothing():
    report = lint(str(CHART), SMALL, strict=True)
    assert not report["errors"]
    assert not [each for each in report["messages"] if "icon" not in each["error"]]


def test_every_default_is_in_the_schema_and_every_schema_key_has_a_default():
    jsonschema.validate(merged(DEFAULTS, SMALL), SCHEMA)

    def keys(schema, at=()):
        for key, value in schema.get("properties", {}).items():
            yield (*at, key)
            if key not in FREE:
                yield from keys(value, (*at, key))

    known = {path for path in keys(SCHEMA) if path[0] not in ("global", "cluster")}
    assert known == {path for path in paths(DEFAULTS) if path[0] != "cluster"}


def test_the_schema_and_the_defaults_have_every_key_of_the_configuration_that_the_chart_does_not_fill_in():
    filled_in = {"grpc", "http", "auth", "tls"}
    known = SCHEMA["properties"]["cluster"]["properties"]
    assert known.keys() == DEFAULTS["cluster"].keys() == Config.model_fields.keys() - filled_in
    assert known["verification_modes"]["items"]["enum"] == [*LISTED_MODES]


def test_the_schema_has_the_keys_of_every_section_of_the_configuration():
    """Serve would refuse a misspelt one only once the pods have started."""
    models, known = Config.model_json_schema()["$defs"], SCHEMA["properties"]["cluster"]["properties"]
    target, drafter, router = (
        known["targets"]["additionalProperties"],
        known["drafters"]["additionalProperties"],
        known["router"],
    )
    found = {"TargetConfig": target, "DrafterConfig": drafter, "Router": router}
    for name, section in found.items():
        scaling = "RouterScaling" if name == "Router" else "Autoscaling"
        assert section["properties"]["autoscaling"]["propertyNames"]["enum"] == [*models[scaling]["properties"]]
        assert section["properties"]["resources"]["propertyNames"]["enum"] == [*models["Resources"]["properties"]]
    named = {"SpeculationConfig": "speculation", "Structures": "structures", "TraceExport": "trace"}
    for name, section in (found | {model: known[key] for model, key in named.items()}).items():
        assert section["propertyNames"]["enum"] == [*models[name]["properties"]], name


def test_every_section_has_a_comment():
    lines = (CHART / "values.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"[a-zA-Z]+:", line):
            around = [lines[number - 1], *lines[number + 1 : number + 3]]
            assert any(each.strip().startswith("#") for each in around), line


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"pool": {}}, "pool"),
        ({"pools": {"verifier": {"minPod": 1}}}, "minPod"),
        ({"pools": {"verifier": {"slots": 0}}}, "slots"),
        ({"redis": {"url": "redis://:secret@cache:6379"}}, "url"),
        ({"redis": {"password": "x"}}, "password"),
        ({"podSecurity": {"runAsUser": 0}}, "runAsUser"),
        ({"cluster": {"redis": {"url": "redis://x"}}}, "redis"),
        ({"cluster": {"redis": {"max_state_mb": 513}}}, "max_state_mb"),
        ({"cluster": {"targets": {"demo": {"tensor_paralel": 2}}}}, "tensor_paralel"),
        ({"cluster": {"targets": {"demo": {"autoscaling": {"lease": 2}}}}}, "lease"),
        ({"cluster": {"drafters": {"small": {"checkpoint": "/s", "thread": 2}}}}, "thread"),
        ({"cluster": {"router": {"replica": 3}}}, "replica"),
        ({"cluster": {"speculation": {"arm": ["off"]}}}, "arm"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ],
)
def test_a_misspelt_or_impossible_value_is_refused_by_its_name(change, name):
    with pytest.raises(HelmError, match=name):
        rendered(merged(SMALL, change))


@pytest.mark.parametrize("name", sorted(path.name for path in CHART.glob("values-*.yaml")))
def test_values_files_set_only_existing_keys(name):
    assert set(paths(values_of(name))) <= set(paths(DEFAULTS))
