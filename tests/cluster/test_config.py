"""Errors in a configuration name the path of the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dendro.errors import BadRequest
from dendro.guidance import LIMITS

from cluster.arms import OFF_ARM
from cluster.config import Config, demo_config, pair_config
from cluster.demo.prompts import load_tokenizer

GOOD = """
targets:
  demo: {checkpoint: models/target, threads: 2, resources: {cpu: 0.5, custom: {verifier: 1}}, max_rows: 16}
drafters:
  mamba: {checkpoint: /abs/mamba}
  other: {checkpoint: x, targets: [demo]}
speculation: {policy: paper_ucb, arms: ["off", "1, 1", "(3,2,2,1,1)"]}
"""


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str) -> Config:
        (tmp_path / "c.yaml").write_text(text)
        return Config.load(tmp_path / "c.yaml")

    return load


def test_a_valid_file_is_read_completely(load, tmp_path: Path):
    (tmp_path / "models" / "target").mkdir(parents=True)
    config = load(GOOD)
    assert config.targets["demo"].checkpoint == tmp_path / "models" / "target"
    assert config.drafters["mamba"].checkpoint == Path("/abs/mamba")
    assert config.targets["demo"].resources.custom == {"verifier": 1.0}
    assert config.arm_texts("demo") == ("off", "(1,1)", "(3,2,2,1,1)")
    assert config.redis.url == "" and config.grpc.port == 0
    assert config.drafters_of("demo") == ("mamba", "other")
    assert config.target_named("") == "demo"


@pytest.mark.parametrize(
    "text, fault",
    [
        (GOOD + "grpc: {port: 1}\ngrpc: {port: 2}\n", "line 9: the key 'grpc' occurs twice"),
        (GOOD + "grpc:\n  port: 1\n  host: ::1\n  'port': 2\n", "line 11: the key 'port' occurs twice"),
        (GOOD.replace("max_rows: 16", "max_rows: 16, threads: 3"), "line 3: the key 'threads' occurs twice"),
        ("a: &a {b: 1}\nc: {<<: *a, d: 1, <<: *a}", "line 2: the key '<<' occurs twice"),
        ("targets: {t: {checkpoint: x}}\ndrafters: {1: {checkpoint: x}, 0x1: {checkpoint: y}}", "line 2: the key 1"),
        ("targets: {t: {checkpoint: 2026-13-01}}", "is not YAML: .*month must be in 1..12"),
        ("targets: {t: {checkpoint: !!bool x}}", "is not YAML: .*KeyError: 'x'"),
        ("targets: " + "[" * 2000, "is not YAML: it nests mappings and lists more than 100 deep"),
    ],
    ids=["section", "field", "flow", "merge", "spelled otherwise", "date", "tag", "depth"],
)
def test_a_file_that_two_readers_may_take_for_different_values_is_refused_with_the_line(load, text, fault):
    with pytest.raises(BadRequest, match=fault):
        load(text)


@pytest.mark.parametrize(
    "text, fault",
    [
        ("target: {t: {checkpoint: x}}", "target: is an unknown key; the nearest known one is targets"),
        ("targets: {t: {checkpoit: x}}", "targets.t.checkpoit: is an unknown key; the nearest known one is checkpoint"),
        ("targets: {t: {checkpoint: x, 7: 8}}", "targets.t.7: is an unknown key"),
        ('targets: {t: {"a\\ud800": 8}}', "targets.t: 'a\\ud800': is an unknown key"),
        ("targets: {t: x}", "targets.t: must be a mapping with `checkpoint`"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one_before_what_is_missing(load, text, fault):
    with pytest.raises(BadRequest) as refused:
        load(text)
    assert str(refused.value) == fault


@pytest.mark.parametrize("text", ["./models/big", "../models/big"])
def test_a_path_that_begins_with_dots_is_no_name_on_the_hub(load, tmp_path, monkeypatch, text):
    config = load(f"targets: {{t: {{checkpoint: {text}, tokenizer: {text}}}}}")
    assert config.targets["t"].checkpoint == config.targets["t"].tokenizer == (tmp_path / text).resolve()
    monkeypatch.chdir(tmp_path)
    assert Config.load("c.yaml").targets["t"].checkpoint_name == ""


T = "targets: {t: {checkpoint: x}}\n"


@pytest.mark.parametrize(
    "text, fault",
    [
        ("targets: {t: {checkpoint: x, threads: four}}", "targets.t.threads: must be a whole number; got 'four'"),
        ("targets: {t: {checkpoint: x, threads: 1.5}}", "targets.t.threads: must be a whole number; got 1.5"),
        ("targets: {t: {checkpoint: x, max_sessions: 0}}", "targets.t.max_sessions: must be at least 1; got 0"),
        (
            "targets: {t: {checkpoint: x, dtype: bf16}}",
            "targets.t.dtype: must be one of 'bfloat16', 'float16' or 'float32'; got 'bf16'",
        ),
        (
            "targets: {t: {checkpoint: x, share_prefixes: maybe}}",
            "targets.t.share_prefixes: must be true or false; got 'maybe'",
        ),
        ("targets: {t: }", "targets.t: must be a mapping with `checkpoint`"),
        ("targets: {}", "targets: must have at least 1"),
        (T + "drafters: [d]", "drafters: must be a mapping of names, each to a mapping with `checkpoint`"),
        (
            T + "verification_modes: [multistep]",
            "verification_modes: 'multistep' is not one of naive, multi-step, block, lenient; coupled and greedy are "
            "always served",
        ),
        (
            T + "speculation: {arms: [(3,2,1)]}",
            "speculation.arms.0: '(3' is a part of a shape, split at its commas; write \"(3,2,1)\", with the quotes "
            "(and 2 more)",
        ),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_right(load, text, fault):
    with pytest.raises(BadRequest) as refused:
        load(text)
    assert str(refused.value) == fault


@pytest.mark.parametrize(
    "text, fault", [("", "has no `targets`$"), ("targets:\n\tt: {}\n", "; indent with spaces, not with a tab$")]
)
def test_an_empty_file_and_one_with_tabs_are_refused_with_what_they_lack(load, text, fault):
    with pytest.raises(BadRequest, match=fault):
        load(text)


@pytest.mark.parametrize(
    "text, fault",
    [
        ("grpc: {port: yes}", r"grpc\.port: is a boolean; must be a number"),
        ("grpc: {port: 1:30}", r"grpc\.port: must be a whole number; got '1:30'$"),
        ("router: {request_timeout_s: 1:30.5}", r"router\.request_timeout_s: must be a number; got '1:30.5'$"),
        ("router: {request_timeout_s: on}", r"router\.request_timeout_s: is a boolean"),
        ("router: {resources: {custom: {CPU: 4}}}", r"router\.resources\.custom: 'CPU' is no name of one's own"),
        ("router: {resources: {custom: {a: -1}}}", r"router\.resources\.custom\.a: -1; must be at least 0"),
    ],
)
def test_a_value_that_would_be_taken_for_another_is_refused(load, text, fault):
    with pytest.raises(BadRequest, match=fault):
        load("targets: {t: {checkpoint: x}}\n" + text)


@pytest.mark.parametrize(
    "sections, field",
    [
        ({"router": {"request_timeout_s": 2_200_000}}, r"router\.request_timeout_s"),
        ({"router": {"resources": {"cpu": 1e-9}}}, r"router\.resources\.cpu"),
        ({"targets": {"t": {"checkpoint": "x", "resources": {"gpu": 9e-5}}}}, r"targets\.t\.resources\.gpu"),
        ({"router": {"resources": {"custom": {"a": 1e-5}}}}, r"router\.resources\.custom\.a"),
        ({"targets": {"t": {"checkpoint": "x", "tensor_parallel": 1 << 40}}}, r"targets\.t\.tensor_parallel"),
    ],
)
def test_a_number_that_grpc_or_ray_cannot_count_is_refused_by_its_field(sections, field):
    with pytest.raises(BadRequest, match=rf"^{field}: "):
        Config.of({"targets": {"t": {"checkpoint": "x"}}, **sections}, Path.cwd())


@pytest.mark.parametrize(
    "text, fault",
    [
        ("grpc: {port: 9000}\nhttp: {port: 9000}", r"http\.port: is 9000, as grpc\.port is; set another port"),
        ("grpc: {port: 9000, status_port: 9000}", r"grpc\.status_port: is 9000, as grpc\.port is"),
        ("grpc: {replica_status_port: 8000}\nhttp: {port: 8000}", r"grpc\.replica_status_port: is 8000, as http\.port"),
    ],
)
def test_two_equal_ports_are_refused_by_field(load, text, fault):
    with pytest.raises(BadRequest, match=fault):
        load("targets: {t: {checkpoint: x}}\n" + text)


@pytest.mark.parametrize(
    "text, fault",
    [
        ("grpc: {port: 9000, share_port: false}\nhttp: {port: 9001}", r"http\.port: is 9001, a port of grpc\.port for"),
        ("grpc: {port: 9000, share_port: false, status_port: 9002}", r"grpc\.status_port: is 9002, a port of grpc\.p"),
        ("grpc: {port: 9001}\nhttp: {port: 9000, share_port: false}", r"grpc\.port: is 9001, a port of http\.port for"),
    ],
)
def test_a_port_that_a_further_router_takes_is_refused_by_field(load, text, fault):
    with pytest.raises(BadRequest, match=fault):
        load("targets: {t: {checkpoint: x}}\nrouter: {autoscaling: {max_replicas: 3}}\n" + text)
    assert load("targets: {t: {checkpoint: x}}\n" + text), "one router takes one port"


def test_ports_that_are_left_to_the_system_are_not_taken_for_equal(load):
    assert load("targets: {t: {checkpoint: x}}\ngrpc: {port: 0}\nhttp: {port: 0}").ports == {}


def test_the_cluster_of_a_command_takes_no_port_of_one_that_may_run_beside_it(load):
    own = "grpc: {port: 9000, status_port: 9100, replica_status_port: 9200}\nhttp: {port: 8000}"
    assert load("targets: {t: {checkpoint: x}}\n" + own).private().ports == {}


@pytest.mark.parametrize("field", ["max_requests", "drain_s"])
def test_an_integer_that_nothing_can_count_is_refused_by_its_field(load, field):
    for number, digits in ((1 << 53) + 1, 16), (10**400, 401):
        with pytest.raises(
            BadRequest, match=rf"router\.{field}: is a number of {digits} digits; must be at most 9,007"
        ):
            load(f"targets: {{t: {{checkpoint: x}}}}\nrouter: {{{field}: {number}}}")


def test_digits_after_a_zero_are_a_decimal_number(load):
    assert load(GOOD + "grpc: {port: 010}").grpc.port == 10


def test_a_key_may_stand_in_a_mapping_and_in_one_that_is_merged_into_it(load):
    merged = load("targets:\n  a: &a {checkpoint: x, threads: 2}\n  b: {<<: *a, threads: 3}\ndrafters: {}")
    assert [target.threads for target in merged.targets.values()] == [2, 3]


def test_the_tokenizer_is_in_the_checkpoint_or_where_its_field_points(load, tmp_path: Path):
    (tmp_path / "y" / "z").mkdir(parents=True)
    config = load("targets: {t: {checkpoint: x, tokenizer: y/z}}\ndrafters: {d: {checkpoint: x}}")
    assert config.targets["t"].tokenizer_folder == tmp_path / "y" / "z"
    assert config.drafters["d"].tokenizer_folder == config.drafters["d"].checkpoint


def test_arms_too_large_for_a_target_are_omitted_for_it(load):
    assert [str(arm) for arm in load(GOOD).arms_of("demo")] == ["off", "mamba:(1,1)", "other:(1,1)"]


def test_a_target_without_drafters_and_proposers_has_only_off(load):
    alone = load("targets: {t: {checkpoint: x}}\nspeculation: {proposers: []}")
    assert alone.arms_of("t") == (OFF_ARM,)


@pytest.mark.parametrize("drafters", ["{}", "{d: {checkpoint: x}}"])
@pytest.mark.parametrize("proposers", ["[]", "[lookup, suffix]"])
def test_a_target_has_only_the_arms_that_its_drafters_and_proposers_can_make(load, drafters, proposers):
    text = f"targets: {{t: {{checkpoint: x}}}}\ndrafters: {drafters}\nspeculation: {{proposers: {proposers}"
    arms = load(f"{text}, arms: ['(2,1)', 'off', proposed(7)]}}").arms_of("t")
    wanted = ["d:(2,1)"] * (drafters != "{}") + ["off"] + ["lookup+suffix:proposed(7)"] * (proposers != "[]")
    assert [str(arm) for arm in arms] == wanted


def test_a_shape_is_an_arm_of_each_drafter_of_a_target_and_a_named_one_of_its_drafter_alone(load):
    config = load("""
targets: {t: {checkpoint: x}, u: {checkpoint: y}}
drafters: {d: {checkpoint: x}, small: {checkpoint: x, targets: [t]}, e: {checkpoint: x, targets: [u]}}
speculation: {arms: ["off", "(2,1)", "small: 3,2,1", proposed(7)], proposers: [lookup]}
""")
    assert config.speculation.arms == ("off", "(2,1)", "small:(3,2,1)", "proposed(7)")
    assert [str(arm) for arm in config.arms_of("t")] == [
        "off",
        "d:(2,1)",
        "small:(2,1)",
        "small:(3,2,1)",
        "lookup:proposed(7)",
    ]
    assert [str(arm) for arm in config.arms_of("u")] == ["off", "d:(2,1)", "e:(2,1)", "lookup:proposed(7)"]


TWO_TARGETS = """
targets:
  big-one: {{checkpoint: x, max_depth: 3, arms: {arms}}}
  other: {{checkpoint: y}}
drafters: {{d: {{checkpoint: x}}, e: {{checkpoint: x, targets: [other]}}}}
speculation: {{arms: ["off", "(2,1)"], proposers: []}}
"""


def test_a_targets_own_arms_replace_the_clusters_for_it_alone(load):
    config = load(TWO_TARGETS.format(arms="['off', '1,1,1', 'd: beam(2,2)']"))
    assert [str(arm) for arm in config.arms_of("big-one")] == ["off", "d:(1,1,1)", "d:beam(2,2)"]
    assert [str(arm) for arm in config.arms_of("other")] == ["off", "d:(2,1)", "e:(2,1)"]


@pytest.mark.parametrize(
    "arms, field, reason",
    [
        ("[]", "targets.big-one.arms", "is empty; name at least one shape"),
        ("['1,1', '(1,1)']", "targets.big-one.arms", "names a shape twice"),
        ("['d:(2,1)', '(2,1)']", "targets.big-one.arms", "names d:(2,1) beside (2,1), an arm of every drafter"),
        ("[wide]", "targets.big-one.arms.0", "'wide' is not a shape"),
        ("[off, '2,1']", "targets.big-one.arms.0", 'is a boolean: YAML reads off as one; write "off", with the quotes'),
        (
            "['1,1,1,1']",
            "targets.big-one.arms",
            "(1,1,1,1) cannot be used: 5 rows and depth 4; max_rows is 64, max_depth 3",
        ),
        ("['e:(2,1)']", "targets.big-one.arms", "e:(2,1) cannot be used: e does not draft for it"),
        ("['f:(2,1)']", "targets.big-one.arms", "f:(2,1) cannot be used: f does not draft for it"),
        ("[proposed(7)]", "targets.big-one.arms", "proposed(7) cannot be used: no proposer makes it"),
    ],
)
def test_a_targets_own_arm_that_it_cannot_use_is_refused_by_its_field(load, arms: str, field: str, reason: str):
    with pytest.raises(BadRequest) as refused:
        load(TWO_TARGETS.format(arms=arms))
    assert refused.value.field == field and refused.value.reason.startswith(reason)


@pytest.mark.parametrize(
    "arms, field, reason",
    [
        ("['small:(2,1)']", "speculation.arms", "a drafter that is not among drafters, 'small'"),
        ("['d:(2,1)', '(2,1)']", "speculation.arms", "beside"),
        ("['d:(2,1)', 'd: 2,1']", "speculation.arms", "twice"),
        ("[d:off]", "speculation.arms.0", "no drafter makes off"),
        ("[d:proposed(7)]", "speculation.arms.0", "no drafter makes proposed"),
        ("[':(2,1)']", "speculation.arms.0", "no drafter before"),
        ("['d:wide']", "speculation.arms.0", "not a shape"),
    ],
)
def test_an_arm_with_a_wrong_drafter_is_refused_by_its_field(load, arms: str, field: str, reason: str):
    with pytest.raises(BadRequest, match=reason) as refused:
        load(f"targets: {{t: {{checkpoint: x}}}}\ndrafters: {{d: {{checkpoint: x}}}}\nspeculation: {{arms: {arms}}}")
    assert refused.value.field == field


@pytest.mark.parametrize(
    "text, field",
    [
        ("", "config"),
        ("a: [", "config"),
        ("- 1", "config"),
        ("drafters: {}", "targets"),
        ("targets: {}", "targets"),
        ("targets: {t: {}}", "targets.t.checkpoint"),
        ("targets: {t: {checkpoint: x, tread: 2}}", "targets.t.tread"),
        ("targets: {t: {checkpoint: x, resources: {cpus: 2}}}", "targets.t.resources.cpus"),
        ("targets: {t: {checkpoint: x, threads: 0}}", "targets.t.threads"),
        ("targets: {t: {checkpoint: x, dtype: int8}}", "targets.t.dtype"),
        ("targets: {t: {checkpoint: x, max_rows: 65}}", "targets.t.max_rows"),
        ("targets: {'a b': {checkpoint: x}}", "config"),
        ("targets: {t: {checkpoint: x}}\ndrafters: {d: {checkpoint: x, targets: [u]}}", "drafters.d.targets"),
        ("targets: {t: {checkpoint: x}}\nspeculation: {arms: [wide]}", "speculation.arms.0"),
        ("targets: {t: {checkpoint: x}}\nspeculation: {arms: ['(9,9)']}", "speculation.arms.0"),
        ("targets: {t: {checkpoint: x}}\nspeculation: {arms: []}", "speculation.arms"),
        ("targets: {t: {checkpoint: x}}\nspeculation: {arms: ['1,1', '(1,1)']}", "speculation.arms"),
        ("targets: {t: {checkpoint: x}}\nspeculation: {policy: best}", "speculation.policy"),
        ("targets: {t: {checkpoint: x}}\nspeculation: {proposers: [oracle]}", "speculation.proposers"),
        ("targets: {t: {checkpoint: x}}\nspeculation: {proposers: [suffix, suffix]}", "speculation.proposers"),
        ("targets: {t: {checkpoint: x}}\nredis: {url: localhost}", "redis.url"),
        *(
            (f"targets: {{t: {{checkpoint: x}}}}\nredis: {{url: '{url}'}}", "redis.url")
            for url in (
                "redis://h:99999",
                "redis://h:0",
                "redis://h:port",
                "redis://h:6379/one",
                "redis://h:6379?socket_timeout=soon",
                "redis://h:6379?tiemout=1",
                "redis://[::1",
                "unix://",
            )
        ),
        ("targets: {t: {checkpoint: x}}\nredis: {record_ttl_s: 0}", "redis.record_ttl_s"),
        ("targets: {t: {checkpoint: x}}\nredis: {record_ttl_s: 60, state_ttl_s: 60}", "redis.record_ttl_s"),
        *(
            (f"targets: {{t: {{checkpoint: x}}}}\nredis: {{{field}: 100000000000000000}}", f"redis.{field}")
            for field in ("record_ttl_s", "state_ttl_s", "prior_ttl_s")
        ),
        ("targets: {t: {checkpoint: x}}\ngrpc: {port: 70000}", "grpc.port"),
        ("targets: {t: {checkpoint: x}}\nrouter: {drain_s: .inf}", "router.drain_s"),
        ("targets: {t: {checkpoint: x, longest_step_s: .nan}}", "targets.t.longest_step_s"),
        ("targets: {t: {checkpoint: x, resources: {custom: {a: .inf}}}}", "targets.t.resources.custom.a"),
        ("targets: {t: {checkpoint: x}}\nrouter: {replicas: 0}", "router.replicas"),
        ("targets: {t: {checkpoint: x}}\nredys: {}", "redys"),
    ],
    ids=lambda value: None,
)
def test_an_error_names_the_path_of_its_field(load, text: str, field: str):
    with pytest.raises(BadRequest) as refused:
        load(text)
    assert refused.value.field == field


def test_a_redis_password_without_an_address_is_refused(load):
    with pytest.raises(BadRequest, match=r"^redis\.password_variable: is set without url; set that of the server"):
        load("targets: {t: {checkpoint: x}}\nredis: {password_variable: SECRET}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2/x@h:6379",
        "redis://me:hunter2#x@h:6379/0",
        "redis://me:hunter2?x@h:6379",
        "redis://:hunter2\N{FULLWIDTH SOLIDUS}@h:6379",
        "redis:/:hunter2@h:6379",
    ],
)
def test_an_error_of_a_redis_address_has_no_part_of_its_password(load, url: str):
    with pytest.raises(BadRequest, match="^redis.url: ") as refused:
        load(f"targets: {{t: {{checkpoint: x}}}}\nredis: {{url: '{url}'}}")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("path", ["'loop'", "'~nobody-at-all/x'", f"'{'x' * 5000}'", '"a\\0b"'])
@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("targets: {t: {checkpoint: x, chat_template: PATH}}", "targets.t.chat_template"),
        ("targets: {t: {checkpoint: PATH}}", "targets.t.checkpoint"),
        ("targets: {t: {checkpoint: x, tokenizer: PATH}}", "targets.t.tokenizer"),
        ("targets: {t: {checkpoint: x}}\ndrafters: {d: {checkpoint: x, head: PATH}}", "drafters.d.head"),
        ("targets: {t: {checkpoint: x}}\nauth: {keys: PATH}", "auth.keys"),
        ("targets: {t: {checkpoint: x}}\ntls: {clients: {certificate: x, key: PATH}}", "tls.clients.key"),
    ],
)
def test_a_path_that_no_system_can_have_is_refused_by_its_field(load, tmp_path: Path, path: str, section: str, field):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BadRequest, match="is no usable path") as refused:
        load(section.replace("PATH", path))
    assert refused.value.field == field


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(BadRequest, match="none.yaml"):
        Config.load(tmp_path / "none.yaml")


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(BadRequest, match="model: 'x' is not served here; there is target"):
        demo_config().target_named("x")


def test_without_the_demos_models_one_sentence_says_what_to_do(tmp_path: Path):
    """An installed wheel has none."""
    for use in (demo_config, load_tokenizer):
        with pytest.raises(BadRequest, match="no folder .* checkout .* a configuration, or .* `dendro train demo`$"):
            use(tmp_path / "models")


def test_a_pair_is_named_after_its_folders():
    config = pair_config(Path("/m/big"), [Path("/m/small")], dtype="float32", redis={"memory_mb": 9})
    assert list(config.targets) == ["big"] and list(config.drafters) == ["small"]
    assert config.targets["big"].dtype == "float32" and config.redis.memory_mb == 9


def test_workers_of_a_sharded_target_must_request_a_resource(load):
    text = "targets: {big: {checkpoint: x, tensor_parallel: 2, resources: {cpu: 0}}}"
    with pytest.raises(BadRequest, match="resources: are all zero"):
        load(text)
    assert load(text.replace("cpu: 0", "cpu: 0, gpu: 1")).targets["big"].resources.bundle == {"GPU": 1.0}


def test_a_sharded_replica_requests_one_bundle_per_worker(load):
    from cluster.app import build

    config = load("targets: {big: {checkpoint: x, tensor_parallel: 3, resources: {cpu: 2, custom: {verifier: 1}}}}")
    deployment = build(config, "redis://nowhere")._bound_deployment.init_args[2]["big"]._bound_deployment
    assert deployment._replica_config.placement_group_bundles == [{"CPU": 2.0, "verifier": 1.0}] * 3


def test_a_password_is_accepted_only_from_the_environment(load):
    text = "targets: {big: {checkpoint: x}}\nredis: {url: 'rediss://cache:6380/1', password_variable: SECRET}"
    redis = load(text).redis
    assert redis.address({"SECRET": "p/w@rd"}) == "rediss://:p%2Fw%40rd@cache:6380/1"
    with pytest.raises(BadRequest, match="there is no SECRET"):
        redis.address({})
    with pytest.raises(BadRequest, match="password_variable"):
        load(text.replace("cache", "user:secret@cache"))


def test_the_limits_of_structures_are_those_of_their_code_unless_the_section_sets_others():
    model = {"targets": {"t": {"checkpoint": "x"}}}
    assert Config.of(model, Path()).structures.limits == LIMITS
    section = Config.of(model | {"structures": {"mask_items": 7, "compile_s": 2}}, Path()).structures
    assert section.enabled and section.limits == replace(LIMITS, mask_items=7, compile_s=2)
