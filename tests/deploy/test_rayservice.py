"""templates/rayservice.yaml: a RayService that KubeRay and Kubernetes accept, with our own configuration inside."""

from __future__ import annotations

import json

import jsonschema
import kubernetes_validate
import pytest
import ray
from dendro.modes import LISTED_MODES
from helm_python import HelmError
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
from ray.scripts.scripts import start as ray_start
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster import serve_config as ours
from cluster.app import DRAIN_MARGIN_S
from cluster.config import Config
from tests.support.chart import CHART, KUBERNETES, SMALL, merged, rendered, serve_config, service, strict_crd, values_of

FILES = tuple(sorted(path.name for path in CHART.glob("values-*.yaml")))
ALL = ["small", *FILES]


def values(name):
    return SMALL if name == "small" else values_of(name)


def cluster_of(deployed) -> Config:
    """The configuration inside, checked by our own models."""
    (application,) = deployed["applications"]
    return Config.of(application["args"], CHART)


def groups(manifest):
    return {each["groupName"]: each for each in manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def pods(manifest):
    config = manifest["spec"]["rayClusterConfig"]
    return [config["headGroupSpec"]["template"], *(each["template"] for each in config["workerGroupSpecs"])]


@pytest.mark.parametrize("name", ALL)
def test_kuberays_schema_has_every_key(name):
    jsonschema.validate(service(values(name)), strict_crd())


def test_the_strict_schema_notices_a_misspelt_key():
    manifest = service()
    manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplicass"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplicass"):
        jsonschema.validate(manifest, strict_crd())


@pytest.mark.parametrize("name", ALL)
def test_kubernetes_accepts_every_pod(name):
    for template in pods(service(values(name))):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"} | template["metadata"],
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ALL)
def test_serve_and_our_models_have_every_key_of_the_configuration_inside(name):
    deployed = serve_config(values(name))
    ServeDeploySchema(**deployed)
    for model, written in (
        (ServeDeploySchema, deployed),
        (HTTPOptionsSchema, deployed["http_options"]),
        (ServeApplicationSchema, deployed["applications"][0]),
    ):
        assert set(written) <= set(model.model_fields)
    config = cluster_of(deployed)
    expected = ours.serve_config(config)
    assert {key: deployed[key] for key in deployed if key != "applications"} == {
        key: expected[key] for key in expected if key != "applications"
    }
    assert (
        deployed["applications"][0].items()
        >= {key: expected["applications"][0][key] for key in ("name", "import_path")}.items()
    )


@pytest.mark.parametrize("name", FILES)
def test_every_worker_of_a_pool_fits_into_its_own_pods_alone(name):
    chosen = values(name)
    manifest, config = service(chosen), cluster_of(serve_config(chosen))
    workers: dict[str, dict] = {
        "verifier": config.targets,
        "drafter": config.drafters,
        "router": {"router": config.router},
    }
    for pool, group in groups(manifest).items():
        offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert list(offered) == [pool]
        container = group["template"]["spec"]["containers"][0]
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert group["rayStartParams"]["num-gpus"] == str(gpus)
        for model in workers[pool].values():
            assert model.resources.custom == {pool: 1.0}
            size = getattr(model, "tensor_parallel", 1)
            assert size <= offered[pool] and size * model.resources.gpu <= gpus, "one pod holds a whole replica"
            most = getattr(model, "most_replicas", getattr(model, "replicas", 1))
            assert most * size <= offered[pool] * group["maxReplicas"], "every replica finds a pod"
            assert size * model.resources.cpu <= _cpus(container["resources"]["requests"]["cpu"])


def _cpus(quantity) -> float:
    return float(quantity[:-1]) / 1000 if str(quantity).endswith("m") else float(quantity)


def test_the_head_has_no_resources_for_replicas():
    head = service()["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]
    assert (head["num-cpus"], head["num-gpus"]) == ("0", "0") and "resources" not in head


@pytest.mark.parametrize("name", ALL)
def test_no_container_is_root_or_can_become_root(name):
    for template in pods(service(values(name))):
        assert (
            template["spec"]["securityContext"]["runAsNonRoot"] and template["spec"]["securityContext"]["runAsUser"] > 0
        )
        for container in template["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_containers_have_the_environment_that_processes_read():
    for template in pods(service()):
        environment = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        assert environment == ours.ENVIRONMENT | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "645"}


def ports(template):
    return {each["name"]: each["containerPort"] for each in template["spec"]["containers"][0]["ports"]}


def test_no_client_reaches_serves_proxy_and_every_pod_answers_kuberays_probes_with_it():
    """KubeRay's service has the ports whose names begin with `serve`; a pool without a probe gets KubeRay's."""
    deployed = serve_config()
    assert "grpc_options" not in deployed and deployed["http_options"]["port"] == ours.HTTP_PORT
    for name, group in groups(service()).items():
        assert {port for key, port in ports(group["template"]).items() if key.startswith("serve")} == {ours.HTTP_PORT}
        assert ("readinessProbe" in group["template"]["spec"]["containers"][0]) == (name == "router")


@pytest.mark.parametrize("name", ALL)
def test_routers_listen_for_all_pods_on_the_ports_that_their_service_and_probe_call(name):
    chosen = merged(values(name), {"grpc": {"port": 9100, "statusPort": 9200}, "http": {"port": 8100}})
    manifest, config = service(chosen), cluster_of(serve_config(chosen))
    assert (config.grpc.host, config.grpc.port, config.grpc.status_port) == ("0.0.0.0", 9100, 9200)
    assert (config.http.host, config.http.port) == ("0.0.0.0", 8100)
    router = groups(manifest)["router"]["template"]
    found = ports(router)
    assert (found["grpc"], found["http"], found["status"]) == (9100, 8100, 9200)
    assert router["spec"]["containers"][0]["readinessProbe"]["httpGet"] == {"path": "/healthz", "port": "status"}
    (entry,) = rendered(chosen)["router.yaml"]
    kubernetes_validate.validate(entry, KUBERNETES, strict=True)
    assert {port["port"]: found[port["targetPort"]] for port in entry["spec"]["ports"]} == {9100: 9100, 8100: 8100}
    selected = [
        each for each in pods(manifest) if entry["spec"]["selector"].items() <= each["metadata"]["labels"].items()
    ]
    assert selected == [router], "the service has the routers' pods and no others"
    assert entry["spec"]["clusterIP"] == "None"


KUBERAY = {"metrics-export-port": "8080", "dashboard-agent-listen-port": str(DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)}
"""What KubeRay adds to the `ray start` of every pod that does not set it."""
WORKER_PORTS = [option.default for option in ray_start.params if option.name in ("min_worker_port", "max_worker_port")]


@pytest.mark.parametrize("name", ALL)
def test_no_pod_has_a_port_twice_with_those_that_kuberay_and_ray_add(name):
    chosen = merged(values(name), {"pools": {"verifier": {"slots": 4}}})
    config = service(chosen)["spec"]["rayClusterConfig"]
    for group in (config["headGroupSpec"], *config["workerGroupSpecs"]):
        started, named = KUBERAY | group["rayStartParams"], ports(group["template"])
        metrics = named.pop("metrics", 8080)  # KubeRay adds a port of this name where a pod has none
        assert metrics == int(started["metrics-export-port"])
        every = [*named.values(), metrics, int(started["dashboard-agent-listen-port"])]
        assert len(set(every)) == len(every) and ours.HTTP_PORT in every
        assert not [port for port in every if WORKER_PORTS[0] <= port <= WORKER_PORTS[1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grpc": {"port": 8080}}, "http.port: is 8080, as grpc.port is; set another port"),
        ({"grpc": {"statusPort": 9000}}, "grpc.statusPort: is 9000, as grpc.port is"),
        ({"grpc": {"replicaStatusPort": 9001}}, "grpc.statusPort: is 9001, as grpc.replicaStatusPort is"),
        ({"http": {"port": ours.HTTP_PORT}}, "http.port: is 8000, as that of Serve's HTTP proxy is"),
        ({"grpc": {"statusPort": ours.HTTP_PORT}}, "grpc.statusPort: is 8000, as that of Serve's HTTP proxy is"),
        ({"http": {"port": 8081}}, "http.port: is 8081, as that of Ray's metrics is"),
        ({"grpc": {"port": DEFAULT_DASHBOARD_AGENT_LISTEN_PORT}}, "grpc.port: is 52365, as that of Ray's agent is"),
        ({"http": {"port": WORKER_PORTS[0]}}, "http.port: is 10002, as one of Ray's workers is"),
        ({"http": {"port": WORKER_PORTS[1]}}, "http.port: is 19999, as one of Ray's workers is"),
        ({"grpc": {"replicaStatusPort": 7999}, "pools": {"verifier": {"slots": 2}}}, "replica 1 of a pod has 8000"),
    ],
)
def test_two_equal_ports_fail_the_render(change, message):
    with pytest.raises(HelmError, match=message):
        rendered(merged(SMALL, change))


@pytest.mark.parametrize("name", ALL)
def test_pods_have_the_time_to_finish_the_longest_request_and_use_it(name):
    chosen = values(name)
    manifest, longest = service(chosen), cluster_of(serve_config(chosen)).router.request_timeout_s
    for template in pods(manifest):
        grace = template["spec"]["terminationGracePeriodSeconds"]
        assert grace >= longest + DRAIN_MARGIN_S + 30
        environment = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
        assert longest + DRAIN_MARGIN_S < int(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) == grace - 15
    assert manifest["spec"]["rayClusterDeletionDelaySeconds"] >= longest
    assert manifest["spec"]["upgradeStrategy"] == {"type": "NewCluster"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drain": {"gracePeriodSeconds": 600}}, "drain.gracePeriodSeconds: 600; .* at least 660"),
        ({"cluster": {"router": {"request_timeout_s": 900}}}, "at least 960"),
        ({"drain": {"oldClusterSeconds": 30}}, "drain.oldClusterSeconds: 30"),
        ({"cluster": {"router": {"drain_s": 645.5}}}, "cluster.router.drain_s: 645.5; .* at most 645"),
        ({"cluster": {"targets": None}}, "targets"),
    ],
)
def test_inconsistent_drain_times_fail_the_render(change, message):
    with pytest.raises(HelmError, match=message):
        rendered(merged(SMALL, change))


TWO = {"targets": {"a": {"checkpoint": "/a"}, "b": {"checkpoint": "/b"}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": {"targets": {"demo": {"replicas": 2}}}}, "cluster.targets.demo: has up to 2 .* holds 1"),
        ({"cluster": {"targets": {"demo": {"autoscaling": {"max_replicas": 3}}}}}, "cluster.targets.demo: .* 3"),
        ({"cluster": {"targets": {"demo": {"tensor_parallel": 2}}}}, "cluster.targets.demo: .* 2 slots"),
        ({"cluster": {"targets": {"demo": {"resources": {"gpu": 1}}}}}, "cluster.targets.demo: .* 1 GPUs"),
        ({"cluster": {"drafters": {"small": {"checkpoint": "/s", "replicas": 2}}}}, "cluster.drafters.small: .* 2"),
        ({"cluster": {"router": {"replicas": 2}}}, "cluster.router: has up to 2"),
        ({"cluster": {"router": {"autoscaling": {"max_replicas": 2}}}}, "cluster.router: has up to 2"),
        (
            {
                "autoscaler": {"enabled": False},
                "cluster": {"router": {"replicas": 3}},
                "pools": {"router": {"maxPods": 3}},
            },
            "cluster.router: has up to 3 .* holds 1: 1 pods",
        ),
        ({"pools": {"router": {"minPods": 3, "maxPods": 1}}}, "pools.router.minPods: is 3, above maxPods, 1"),
        ({"pools": {"router": {"slots": 2}}}, "pools.router.slots: .* one router"),
        ({"cluster": TWO}, "cluster.targets: all replicas take 3 slots .* 1 pods have 1"),
        (
            {
                "cluster": {"targets": {"demo": {"tensor_parallel": 2, "replicas": 2}}},
                "pools": {"verifier": {"slots": 3, "maxPods": 1}},
            },
            "cluster.targets.demo: has up to 2 .* holds 1",
        ),
        (
            {
                "cluster": {"targets": {"demo": {"replicas": 2, "resources": {"gpu": 0.6}}}},
                "pools": {"verifier": {"slots": 2, "gpus": 1}},
            },
            "1.2 GPUs",
        ),
    ],
)
def test_more_replicas_than_a_pools_pods_can_hold_fail_the_render(change, message):
    with pytest.raises(HelmError, match=message):
        rendered(merged(SMALL, change))


def test_a_pool_that_just_holds_its_replicas_is_rendered():
    pools = {"verifier": {"slots": 2, "gpus": 1, "maxPods": 2}}
    targets = {"demo": {"tensor_parallel": 2, "replicas": 2, "resources": {"gpu": 0.5}}}
    assert service(merged(SMALL, {"cluster": {"targets": targets}, "pools": pools}))


def test_a_password_is_a_reference_to_a_secret_and_never_a_value():
    chosen = merged(SMALL, {"redis": {"url": "rediss://cache:6379", "existingSecret": "mine", "secretKey": "word"}})
    manifest = service(chosen)
    secret = {"secretKeyRef": {"name": "mine", "key": "word"}}
    fault_tolerance = manifest["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert fault_tolerance == {"redisAddress": "rediss://cache:6379", "redisPassword": {"valueFrom": secret}}
    for template in pods(manifest):
        assert {"name": "DENDRO_REDIS_PASSWORD", "valueFrom": secret} in template["spec"]["containers"][0]["env"]
    redis = cluster_of(serve_config(chosen)).redis
    assert (redis.url, redis.password_variable) == ("rediss://cache:6379", "DENDRO_REDIS_PASSWORD")


@pytest.mark.parametrize("url", ["", "redis://cache:6379"])
def test_no_pod_has_a_variable_that_kuberay_refuses_beside_its_own_options_of_redis(url):
    """KubeRay sets the head's REDIS_PASSWORD itself, and RAY_REDIS_ADDRESS, and refuses them in a pod's template."""
    found = rendered(merged(SMALL, {"redis": {"url": url, "existingSecret": "mine", "user": "u" if url else ""}}))
    templates = [*pods(found["rayservice.yaml"][0]), *(each["spec"]["template"] for each in found["redis.yaml"][1:])]
    assert len(templates) == (4 if url else 5)
    for template in templates:
        names = {each["name"] for each in template["spec"]["containers"][0]["env"]}
        assert not names & {"REDIS_PASSWORD", "REDIS_USERNAME", "RAY_REDIS_ADDRESS"}


def test_routers_alone_mount_the_secret_with_the_keys_and_the_configuration_names_its_file():
    chosen = merged(SMALL, {"keys": {"open": False, "existingSecret": "mine", "secretKey": "all.json"}})
    assert str(cluster_of(serve_config(chosen)).auth.keys) == "/etc/dendro/keys/all.json"
    for name, group in groups(service(chosen)).items():
        spec = group["template"]["spec"]
        mounts = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "keys"]
        volumes = [each for each in spec["volumes"] if each["name"] == "keys"]
        if name == "router":
            assert mounts == [{"name": "keys", "mountPath": "/etc/dendro/keys", "readOnly": True}]
            assert volumes == [{"name": "keys", "secret": {"secretName": "mine"}}]
        else:
            assert not mounts and not volumes


def test_routers_without_keys_need_an_explicit_value():
    assert cluster_of(serve_config()).auth.open
    for keys in ({"open": False}, {"open": True, "existingSecret": "mine"}):
        with pytest.raises(HelmError, match="keys\\."):
            rendered(merged(SMALL, {"keys": keys}))


def test_the_times_and_sizes_of_what_is_kept_reach_the_cluster():
    kept = {"record_ttl_s": 31536000, "state_ttl_s": 50, "prior_ttl_s": 40, "max_state_mb": 512}
    found = cluster_of(serve_config(merged(SMALL, {"cluster": {"redis": kept}}))).redis
    assert {name: getattr(found, name) for name in kept} == kept and found.url.startswith("redis://dendro-redis")
    elsewhere = {"url", "user", "password_variable", "sentinel_password_variable", "authority", "memory_mb"}
    assert kept.keys() == set(type(found).model_fields) - elsewhere


def test_verification_modes_reach_the_cluster():
    chosen = merged(SMALL, {"cluster": {"verification_modes": [*LISTED_MODES]}})
    assert cluster_of(serve_config(chosen)).verification_modes == LISTED_MODES
    assert cluster_of(serve_config()).verification_modes == ()


def test_traces_reach_the_cluster_where_a_collector_is_named():
    assert cluster_of(serve_config()).trace is None
    section = {"endpoint": "http://collector:4318/v1/traces", "share": 0.5}
    found = cluster_of(serve_config(merged(SMALL, {"cluster": {"trace": section}}))).trace
    assert found.model_dump() == section


def test_every_pod_has_the_hubs_address_and_a_token_by_reference_to_a_secret():
    """Routers and the head too: they read configurations and tokenizers, and resolve revisions."""
    chosen = merged(SMALL, {"hub": {"endpoint": "https://hub.example", "existingSecret": "mine", "secretKey": "word"}})
    secret = {"secretKeyRef": {"name": "mine", "key": "word"}}
    for template in pods(service(chosen)):
        environment = template["spec"]["containers"][0]["env"]
        assert {"name": "HF_TOKEN", "valueFrom": secret} in environment
        assert {"name": "HF_ENDPOINT", "value": "https://hub.example"} in environment
    for template in pods(service()):
        assert not [each for each in template["spec"]["containers"][0]["env"] if each["name"].startswith("HF_")]


def test_checkpoints_are_mounted_at_the_paths_of_the_configuration():
    chosen = values_of("values-production.yaml")
    config = cluster_of(serve_config(chosen))
    for pool in ("verifier", "drafter"):
        spec = groups(service(chosen))[pool]["template"]["spec"]
        (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "checkpoints")
        assert (
            mount["readOnly"]
            and {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints", "readOnly": True}}
            in spec["volumes"]
        )
        for model in (*config.targets.values(), *config.drafters.values()):
            assert model.checkpoint.is_relative_to(mount["mountPath"])


def test_the_chart_has_the_installed_version_of_ray():
    assert service()["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
