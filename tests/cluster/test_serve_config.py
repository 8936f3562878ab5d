"""Ray Serve's configuration file: the same deployments as `dendro serve`, and no key that Serve ignores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from dendro.errors import BadRequest
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema
from typer.testing import CliRunner

from cluster import cli
from cluster.app import application, build
from cluster.config import Config
from cluster.serve_config import as_yaml, serve_config

CONFIG = """
targets:
  big:
    checkpoint: models/big
    tensor_parallel: 2
    resources: {cpu: 2, gpu: 1, custom: {verifier: 1}}
    autoscaling: {min_replicas: 2, max_replicas: 6, leases: 12, up_after_s: 3}
drafters:
  small: {checkpoint: /models/small, replicas: 3, resources: {cpu: 1, custom: {drafter: 1}}}
redis: {url: "redis://sessions:6379"}
grpc: {port: 9000}
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "models" / "big").mkdir(parents=True)
    (tmp_path / "cluster.yaml").write_text(CONFIG)
    return Config.load(tmp_path / "cluster.yaml")


def deployments(app):
    """Settings by name, of the router's deployment and of those bound to it."""
    router = app._bound_deployment
    targets, drafters = router.init_args[2], router.init_args[3]
    bound = [router, *(each._bound_deployment for each in (*targets.values(), *drafters.values()))]
    return {
        each.name: (each._deployment_config.model_dump(), each._replica_config.ray_actor_options,
                    each._replica_config.placement_group_bundles)
        for each in bound
    }  # fmt: skip


def test_the_written_file_deploys_what_dendro_serve_deploys(config):
    (written,) = yaml.safe_load(as_yaml(config))["applications"]
    assert written["import_path"] == "cluster.app:application"
    ours, deployed = deployments(build(config, config.redis.url)), deployments(application(written["args"]))
    assert deployed.keys() == {"router", "verifier-big", "drafter-small"}
    assert deployed == ours


def test_serve_has_every_key_that_is_written(config):
    whole = serve_config(config)
    assert ServeDeploySchema(**whole)
    for model, section in (
        (ServeDeploySchema, whole),
        (HTTPOptionsSchema, whole["http_options"]),
        (ServeApplicationSchema, whole["applications"][0]),
    ):
        assert set(section) <= set(model.model_fields)


def test_a_pool_scales_by_its_leases(config):
    verifier, options, bundles = deployments(build(config, config.redis.url))["verifier-big"]
    scaling = verifier["autoscaling_config"]
    assert set(scaling) <= set(AutoscalingConfig.model_fields)
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (2, 6, 12)
    assert (scaling["upscale_delay_s"], scaling["downscale_delay_s"]) == (3, 120)
    assert bundles == [{"CPU": 2.0, "GPU": 1.0, "verifier": 1.0}] * 2
    assert options["resources"] == {"verifier": 1.0}
    drafter, _, _ = deployments(build(config, config.redis.url))["drafter-small"]
    assert drafter["num_replicas"] == 3 and drafter["autoscaling_config"] is None


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("max_replicas: 6", "max_replica: 6", "targets.big.autoscaling"),
        ("max_replicas: 6", "max_replicas: 1", "at least min_replicas"),
        ("tensor_parallel: 2", "replicas: 2", "is given beside autoscaling"),
        ("leases: 12", "leases: 0", "targets.big.autoscaling.leases"),
    ],
)
def test_an_error_names_its_field(tmp_path, before, after, message):
    (tmp_path / "c.yaml").write_text(CONFIG.replace(before, after))
    with pytest.raises(BadRequest, match=message):
        Config.load(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [("port: 9000", "port: 0", "grpc.port"), ('"redis://sessions:6379"', '""', "redis.url")],
)
def test_settings_that_only_dendro_serve_can_choose_are_required(tmp_path, before, after, message):
    (tmp_path / "c.yaml").write_text(CONFIG.replace(before, after))
    with pytest.raises(BadRequest, match=message):
        serve_config(Config.load(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("redis://:word@sessions:6379", "password_variable"),
        ("rediss://user:word@sessions:6379/1", "password_variable"),
        ("redis://sessions:6379?password=word", "password_variable"),
        ("redis+cluster://:word@a:6379,b:6379", "password_variable"),
        ("redis+sentinel://a:1,b:2/sessions?sentinel_password=word", "sentinel_password_variable"),
    ],
)
def test_a_password_in_a_url_that_rays_dashboard_would_show_is_refused(config, url, field):
    given = config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})
    arguments = given.model_dump(mode="json", exclude_unset=True)
    reason = f"redis.url: has a password, which Ray's dashboard shows; set redis.{field}"
    for deploying in (lambda: serve_config(given), lambda: application(arguments)):
        with pytest.raises(BadRequest, match=f"^{re.escape(reason)}$"):
            deploying()
    assert build(config, url), "`dendro serve` deploys without a dashboard"


@pytest.mark.parametrize(
    ("ports", "field"),
    [
        ("grpc: {port: 8000}", r"grpc\.port"),
        ("grpc: {port: 9000}\nhttp: {port: 8000}", r"http\.port"),
        ("grpc: {port: 9000, replica_status_port: 8000}", r"grpc\.replica_status_port"),
    ],
)
def test_the_port_of_serves_proxy_is_refused_by_field(tmp_path, ports, field):
    (tmp_path / "c.yaml").write_text(CONFIG.replace("grpc: {port: 9000}", ports))
    with pytest.raises(BadRequest, match=rf"^{field}: is 8000, as that of Serve's HTTP proxy is; set another port"):
        serve_config(Config.load(tmp_path / "c.yaml"))


def test_a_port_of_a_further_router_may_not_be_that_of_serves_proxy(tmp_path):
    ports = "grpc: {port: 7999, share_port: false}\nrouter: {replicas: 2}"
    (tmp_path / "c.yaml").write_text(CONFIG.replace("grpc: {port: 9000}", ports))
    with pytest.raises(BadRequest, match=r"^grpc\.port: gives router 2 the port 8000, that of Serve's HTTP proxy"):
        serve_config(Config.load(tmp_path / "c.yaml"))


def test_the_command_writes_the_file(tmp_path, config):
    source, target = tmp_path / "cluster.yaml", tmp_path / "serve.yaml"
    assert CliRunner().invoke(cli.app, ["config", str(source), "-o", str(target)]).exit_code == 0
    assert target.read_text() == as_yaml(config) == CliRunner().invoke(cli.app, ["config", str(source)]).stdout


def test_an_output_that_cannot_be_written_is_refused_by_its_option(tmp_path, config):
    done = CliRunner().invoke(cli.app, ["config", str(tmp_path / "cluster.yaml"), "-o", str(tmp_path)])
    assert isinstance(done.exception, BadRequest)
    assert str(done.exception) == f"--output: {tmp_path} cannot be written: Is a directory"
