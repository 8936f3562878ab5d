"""The operator's configuration: one YAML file, checked when it is loaded.

```yaml
targets:
  demo: {checkpoint: models/target, dtype: bfloat16, threads: 1, resources: {cpu: 0.5}}
drafters:
  mamba: {checkpoint: models/mamba, resources: {cpu: 0.5}}
speculation: {policy: conservative_ucb, arms: ["off", "(1,1,1,1)", "(3,2,2,1,1)"]}
```

Relative paths of checkpoints and tokenizers start at the YAML file's folder. An unknown key is refused by its path, an
invalid value by the name of its field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import quote

import yaml
from dendro.arguments import shown
from dendro.destinations import is_loopback
from dendro.engine import LONGEST_STEP_S
from dendro.errors import BadRequest
from dendro.guidance import LIMITS, StructureLimits
from dendro.modes import LISTED_MODES, VerificationMode
from dendro.shapes import DEFAULT_DEPTH, MAX_ROWS, TreeShape
from dendro.state import MAX_BLOB_BYTES
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from cluster.arms import OFF_ARM, Arm, canonical_arm, distinct_arms, parsed_arms, quoted_arm
from cluster.distinct_keys import RepeatedKey, yaml_of
from cluster.model_paths import absolute_path, hub_name, kept_folder, resolved_path
from cluster.policies import POLICIES, unknown_policy
from cluster.proposers import PROPOSERS
from cluster.redis_address import SCHEMES, SENTINEL, SENTINEL_PASSWORD, unreadable
from cluster.sections import (
    Auth,
    Autoscaling,
    Replicated,
    Resources,
    RouterScaling,
    Section,
    Tls,
    TraceExport,
    auth_section,
    first_fault,
)

DEMO_MODELS = Path(__file__).parent / "demo" / "models"

Dtype = Literal["bfloat16", "float16", "float32"]
BridgeChoice = Literal["auto", "none", "string", "intersection"]


ArmText = Annotated[str, BeforeValidator(quoted_arm), AfterValidator(canonical_arm)]
"""A shape as text, in its canonical form, with or without its drafter: `off`, `(1,1,1,1)`, `small:(3,2,1)`."""
ArmTexts = Annotated[tuple[ArmText, ...], AfterValidator(distinct_arms)]

DEFAULT_ARMS: tuple[str, ...] = (
    "off",
    "proposed(3)",
    "proposed(7)",
    "proposed(15)",
    "(1)",
    "(1,1)",
    "(1,1,1,1)",
    "(2,1)",
    "(2,1,1)",
    "(3,2,1)",
    "beam(5,3)",
    "dynamic(4,5,15)",
    "(3,2,2,1,1)",
)


class ModelConfig(Replicated):
    """What a target and a drafter share: one Serve deployment with `replicas` replicas."""

    checkpoint: Path
    """A folder; or, where that does not exist and the text has one slash, and no `./` before it, a name on the hub,
    `organisation/name`. A target's may be a GGUF file: of this machine, `organisation/name/file.gguf` on the hub, or
    `package:name/file.gguf` in an installed Python package."""
    revision: str = ""
    """Branch, tag or commit of a checkpoint on the hub. Default: its main branch. Resolved once, at start."""
    tokenizer: Path | None = None
    """The folder, or the name on the hub, of the tokenizer that this model's token ids belong to. Default: the
    checkpoint's own; state-spaces' releases have none."""
    tokenizer_revision: str = ""
    """Branch, tag or commit of a tokenizer on the hub."""
    dtype: Dtype = "bfloat16"
    """Numbers of weights and arithmetic, independent of those in the checkpoint's files."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of a replica, or of each worker of one."""
    autoscaling: Autoscaling | None = None
    resources: Resources = Resources()
    max_sessions: int = Field(default=16, ge=1)
    """Texts that a replica can hold at once."""
    longest_step_s: float = Field(default=LONGEST_STEP_S, gt=0)
    """How long one step of the engine may take, a first compilation included, before the replica counts as hung: its
    texts are opened elsewhere, and Serve replaces it. A long prompt takes many steps."""

    _keep_folder = field_validator("checkpoint", "tokenizer", mode="before")(kept_folder)

    @property
    def checkpoint_name(self) -> str:
        """The checkpoint's name on the hub; empty where it is a folder."""
        return hub_name(self.checkpoint)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name on the hub; empty where it is a folder, or the checkpoint's own."""
        return "" if self.tokenizer is None else hub_name(self.tokenizer)

    @property
    def on_hub(self) -> bool:
        """Whether checkpoint or tokenizer is a name on the hub, which each node must fetch."""
        return bool(self.checkpoint_name or self.tokenizer_name)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer's files."""
        return self.checkpoint if self.tokenizer is None else self.tokenizer

    @property
    def tokenizer_field(self) -> str:
        """The field that names it."""
        return "checkpoint" if self.tokenizer is None else "tokenizer"


MOST_WORKERS = 1024
"""Workers of one replica, for each of which a bundle of a placement group is made."""


class TargetConfig(ModelConfig):
    """A served model: one verifier deployment."""

    chat_template: Path | None = None
    """The file of a chat template in Jinja, in place of the checkpoint's own."""
    max_length: int = Field(default=2048, ge=2)
    """Tokens of the longest text that a replica holds, prompt and answer together."""
    max_waiting: int = Field(default=64, ge=0)
    """Texts that may queue at a full replica, where tenants share the places; beyond that a request is refused with
    RESOURCE_EXHAUSTED."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """The share of the device's free memory, once the weights are loaded, that texts may use. Default: as much as
    `max_sessions` texts of `max_length` need."""
    share_prefixes: bool = True
    """Prefix cache: whether texts of one tenant share the memory and the computation of a common prefix."""
    tensor_parallel: int = Field(default=1, ge=1, le=MOST_WORKERS)
    """Workers of a replica, each with a shard of the weights and of every text's keys, and with `resources` and
    `threads` of its own. The same for all replicas of a target: other numbers round differently."""
    max_rows: int = Field(default=MAX_ROWS, ge=1, le=MAX_ROWS)
    """Rows of the largest tree, the root included."""
    max_depth: int = Field(default=DEFAULT_DEPTH, ge=0, le=MAX_ROWS - 1)
    """Guesses on the longest path of a tree."""
    arms: ArmTexts | None = None
    """The target's own arms in place of `speculation.arms`. Each must be within its limits and have a drafter, or
    proposers. Default: those of `speculation.arms` for which that holds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tensor_parallel > 1 and not self.resources.bundle:
            raise ValueError("resources: are all zero; workers of a sharded target are placed by their resources")
        return self

    def holds(self, shape: TreeShape) -> bool:
        """Whether trees of this shape are within the limits. Proposals have no fixed depth; `max_depth` cuts them."""
        return shape.rows <= self.max_rows and (shape.depth <= self.max_depth or not shape.drafted)


class DrafterConfig(ModelConfig):
    """A drafter deployment, of a checkpoint of any kind in `drafter_service.models.MODELS`."""

    targets: tuple[str, ...] = ()
    """The targets that it may draft for. Empty: all."""
    bridge: BridgeChoice = "auto"
    """What translates between its tokenizer and a target's (docs/bridge.md). none: nothing; another one is refused."""
    form: Literal["auto", "eager", "fused"] = "auto"
    """fused: one compiled call per forward (Mambas, on a CPU); eager: torch's operations; auto: fused where it can."""
    head: Path | None = None
    """The file of its acceptance head (`dendro train head`). Default: none; chances are calibrated while it drafts."""
    structures: bool = True
    """Guess only what the structure of an answer allows (docs/structured.md). Needs llguidance; without it, and through
    a bridge, guesses are of any tokens."""
    draft_ahead: Literal["auto", "on", "off"] = "auto"
    """Prepare trees for the likely outcomes of a verification while it runs. auto: if the drafter runs on a CPU
    whose machine has more cores than the threads of all targets, of the drafter and of a router."""


MOST_REQUEST_S = 7 * 24 * 3600
"""A week. gRPC counts the age of a connection in milliseconds of 32 bits, some 24 days."""


class Router(Replicated):
    """The deployment that clients call, with its limits."""

    replicas: int = Field(default=1, ge=1)
    autoscaling: RouterScaling | None = None
    resources: Resources = Resources(cpu=0.25)
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)
    """Bytes of the longest prompt that one request may send."""
    max_new_tokens: int = Field(default=4096, ge=1)
    """The most tokens that one request may ask for."""
    max_requests: int = Field(default=1024, ge=1)
    """Answers that one router runs at once: a request with `n` counts as so many. Past them a request is refused with
    RESOURCE_EXHAUSTED. The last eighth is kept for tenants that have less than an equal share."""
    drain_s: float = Field(default=20.0, ge=0)
    """How long a router that is removed lets its requests run on; those left are ended with UNAVAILABLE, at which
    clients resume them at another router."""
    default_new_tokens: int = Field(default=256, ge=1)
    """The limit of a request that sets no `max_new_tokens`."""
    request_timeout_s: float = Field(default=600.0, gt=0, le=MOST_REQUEST_S)
    """A request's wall-clock limit, also where its client is gone."""
    draft_timeout_ms: float = Field(default=500.0, gt=0)
    """The longest a round waits for its draft; a round whose draft is late is plain decoding. Rounds with a fixed shape
    wait up to this limit; others have a shorter deadline, computed from usual drafts and rounds."""
    ordered_trees: bool = True
    """Whether routers let verifiers ask drafters for trees, so that a tree does not pass through the router. Verifiers
    must be able to reach drafters. Off: every tree passes through the router."""
    explained_share: float = Field(default=0.0, ge=0, le=1)
    """The share of requests whose rounds a router keeps in memory for `dendro explain`, with their answers' texts. 0:
    none."""
    explained_requests: int = Field(default=64, ge=1, le=1024)
    """The requests whose rounds are kept, the newest, each of at most 2 MiB."""


class SpeculationConfig(Section):
    """How shapes are chosen for requests in mode `auto`."""

    policy: str = "conservative_ucb"
    """conservative_ucb or paper_ucb."""
    arms: ArmTexts = DEFAULT_ARMS
    """The shapes to choose among, for targets without `arms` of their own. `(3,2,1)` is an arm of each drafter of a
    target, `small:(3,2,1)` of the drafter `small` alone. A target uses those that it has a drafter for, or proposers,
    for `proposed(7)`. `off` is always added, and for each drafter with arms a chain of depth 4 at most: policies fall
    back to these."""
    proposers: tuple[str, ...] = PROPOSERS
    """Proposers that guess without a model, beside a drafter or without one. Empty: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.policy not in POLICIES:
            raise ValueError(f"policy: {unknown_policy(self.policy)}")
        for name in self.proposers:
            if name not in PROPOSERS:
                raise ValueError(f"proposers: {name!r} is not one of {', '.join(PROPOSERS)}")
        if len(set(self.proposers)) != len(self.proposers):
            raise ValueError("proposers: names one twice")
        return self


MOST_TTL_S = 10**9
"""Some 30 years. Redis refuses to write a key with more than it can count."""


class Redis(Section):
    """Where records, states and priors are stored."""

    url: str = ""
    """`redis://HOST:PORT`, over TLS `rediss://`; `unix://PATH`; `redis+sentinel://HOST:PORT,HOST:PORT/SERVICE`, of
    Sentinels and the name that they have for the primary; or `redis+cluster://HOST:PORT,HOST:PORT`, of some nodes of a
    cluster; over TLS `rediss+sentinel://` and `rediss+cluster://`. Empty: an embedded redis-server is started beside
    the cluster and ends with it."""
    password_variable: str = ""
    """The environment variable that has the server's password, so that no file contains it."""
    sentinel_password_variable: str = ""
    """The environment variable that has the Sentinels' own password. Default: they want none."""
    user: str = ""
    """The server's user. Default: Redis' own default user."""
    authority: Path | None = None
    """The authority of the server's certificate, in PEM, for a url that begins with rediss://. Default: this machine's
    authorities."""
    record_ttl_s: int = Field(default=7 * 24 * 3600, ge=1, le=MOST_TTL_S)
    """How long the text of a session is kept after its last turn; longer than a state."""
    state_ttl_s: int = Field(default=24 * 3600, ge=1, le=MOST_TTL_S)
    """How long the saved state of a drafter, or of a state-space target, is kept."""
    max_state_mb: int = Field(default=64, ge=0, le=MAX_BLOB_BYTES >> 20)
    """The largest saved state of a text, in MiB; a text with a larger one is processed again in the next turn."""
    prior_ttl_s: int = Field(default=7 * 24 * 3600, ge=1, le=MOST_TTL_S)
    """How long the prior of a kind of request is kept after the last request of that kind."""
    memory_mb: int = Field(default=512, ge=8)
    """Memory of the embedded server; beyond it, the keys with the least time left are evicted first."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        scheme = self.url.partition("://")[0]
        if self.url and (scheme not in SCHEMES or "://" not in self.url):
            raise ValueError(f"url: does not begin with one of {', '.join(f'{each}://' for each in SCHEMES)}")
        if self.url and (reason := unreadable(self.url)):
            raise ValueError(f"url: {reason}")
        if self.password_variable and not self.url:
            raise ValueError("password_variable: is set without url; set that of the server whose password it is")
        if self.password_variable and "@" in self.url:
            raise ValueError("password_variable: is set, but the url has credentials of its own")
        if self.user and not self.password_variable:
            raise ValueError("user: is set without password_variable")
        if self.authority is not None and not scheme.startswith("rediss"):
            raise ValueError("authority: is set, but the url does not begin with rediss")
        if self.sentinel_password_variable and not scheme.endswith(SENTINEL):
            raise ValueError("sentinel_password_variable: is set, but the url is not one of Sentinels")
        if self.record_ttl_s <= self.state_ttl_s:
            raise ValueError(
                f"record_ttl_s: is {self.record_ttl_s}, not above state_ttl_s, {self.state_ttl_s}: a full server that "
                "evicts the keys with the least time left would evict sessions before saved states"
            )
        return self

    def address(self, environment: Mapping[str, str]) -> str:
        """The url with user, password and authority. Raises BadRequest where the variable is not set."""
        url = self.url
        if self.password_variable:
            password = _secret_in(environment, "password_variable", self.password_variable)
            scheme, _, rest = url.partition("://")
            url = f"{scheme}://{quote(self.user, safe='')}:{quote(password, safe='')}@{rest}"
        if self.authority is not None:
            url += f"{'&' if '?' in url else '?'}ssl_ca_certs={quote(str(self.authority))}"
        if self.sentinel_password_variable:
            password = _secret_in(environment, "sentinel_password_variable", self.sentinel_password_variable)
            url += f"{'&' if '?' in url else '?'}{SENTINEL_PASSWORD}={quote(password, safe='')}"
        return url


def _secret_in(environment: Mapping[str, str], field: str, variable: str) -> str:
    if not (found := environment.get(variable, "")):
        raise BadRequest(f"redis.{field}", f"there is no {variable} in the environment")
    return found


class Structures(Section):
    """Whether answers may have structures, and how much work these may cause (docs/structured.md)."""

    enabled: bool = True
    """No: a request with a structure is refused."""
    mask_items: int = Field(default=LIMITS.mask_items, ge=1)
    """Items that llguidance may make for one mask."""
    row_items: int = Field(default=LIMITS.row_items, ge=1)
    """Items after one token."""
    symbols: int = Field(default=LIMITS.symbols, ge=1)
    """Symbols of a grammar's rules."""
    answer_items: int = Field(default=LIMITS.answer_items, ge=1)
    """Items of all masks of an answer, beside `token_items` for each token."""
    token_items: int = Field(default=LIMITS.token_items, ge=0)
    """Items of an answer's masks that each of its tokens adds to `answer_items`."""
    compile_s: float = Field(default=LIMITS.compile_s, gt=0)
    """CPU seconds for which a structure may compile at a router; at a replica four times as many."""
    compile_mb: int = Field(default=LIMITS.compile_mb, ge=16)
    """Memory for that, in MiB."""

    @property
    def limits(self) -> StructureLimits:
        return StructureLimits(**self.model_dump(exclude={"enabled"}))


STATUS_PORTS = 64
"""Ports that a router tries from `grpc.status_port` on, and a replica from `grpc.replica_status_port` on. A process
that drains keeps its port while its successor starts."""


class ClientPort(Section):
    """The port of each router for clients of one protocol."""

    host: str = "127.0.0.1"
    """The address that routers listen at: the default accepts calls from this machine alone, `0.0.0.0` from all."""
    port: int = Field(default=0, ge=0, le=65535)
    """The port that clients call. Zero: `dendro serve` takes free ones and prints them; it refuses a port that another
    process has."""
    share_port: bool = True
    """Whether routers on one machine listen on the same port, and the kernel divides connections among them. Else each
    takes the first free port from `port` on, one for each of `router.replicas`."""
    max_connections: int = Field(default=4096, ge=8)
    """Connections of clients that a router has open at this port, at most also a quarter of the files that its process
    may open (`ulimit -n`); further ones are closed at once. Over HTTP the last eighth is kept for addresses that have
    less than an equal share."""

    def client_ports(self, routers: int) -> range:
        """The ports of which a router takes the first that is free, where `routers` of them run."""
        return _ports(self.port, 1 if self.share_port else routers)


class Http(ClientPort):
    """The port of each router for OpenAI's HTTP API (docs/http.md)."""


class Grpc(ClientPort):
    """The ports of each router for gRPC, and those of routers and replicas for metrics. No two ports that are set may
    be equal, that of `http` included."""

    status_port: int = Field(default=0, ge=0, le=65535)
    """A router's own port, for its metrics and health over HTTP; the first that is free from this one on. Zero: a free
    port."""
    replica_status_port: int = Field(default=0, ge=0, le=65535)
    """A port of each drafter's and verifier's replica for its metrics and health, at the address at which routers call
    it; the first that is free from this one on. Zero: a free port."""

    @property
    def replica_status_ports(self) -> range:
        """Ports of which a replica takes the first that is free for metrics and health."""
        return _ports(self.replica_status_port, STATUS_PORTS)

    @property
    def status_ports(self) -> range:
        """Ports of which a router takes the first that is free for metrics and health."""
        return _ports(self.status_port, STATUS_PORTS)


PortSection = TypeVar("PortSection", bound=ClientPort)


def _ports(first: int, number: int) -> range:
    return range(first, min(first + number, 65536)) if first else range(1)


class Config(Section):
    """One cluster."""

    targets: dict[str, TargetConfig] = Field(min_length=1)
    """The served models by name. The first is the default of requests."""
    drafters: dict[str, DrafterConfig] = Field(default_factory=dict)
    """The drafters by name."""
    router: Router = Router()
    speculation: SpeculationConfig = SpeculationConfig()
    redis: Redis = Redis()
    grpc: Grpc = Grpc()
    auth: Annotated[Auth, BeforeValidator(auth_section)] = Auth()
    http: Http = Http()
    tls: Tls = Tls()
    trace: TraceExport | None = None
    """Default: no traces."""
    structures: Structures = Structures()
    verification_modes: tuple[VerificationMode, ...] = ()
    """Modes beside coupled and greedy that requests may name: naive, multi-step, block and lenient. A drafter that
    reports false probabilities changes the law of answers in the last three; lenient is lossy anyway."""

    @field_validator("targets", "drafters", mode="before")
    @classmethod
    def _check_entries(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            raise ValueError("must be a mapping of names, each to a mapping with `checkpoint`")
        return given

    @field_validator("verification_modes", mode="before")
    @classmethod
    def _check_modes(cls, given: Any) -> Any:
        for mode in given if isinstance(given, (list, tuple)) else ():
            if mode not in LISTED_MODES:
                others = ", ".join(LISTED_MODES)
                raise ValueError(f"{shown(mode)} is not one of {others}; coupled and greedy are always served")
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.verification_modes)) < len(self.verification_modes):
            raise ValueError("verification_modes: names one twice")
        if self.has_gateways and (self.auth.open or self.auth.keys is not None):
            raise ValueError("auth: is set beside tls.clients.gateways, which decides who may call")
        free = self.auth.keys is None and not self.auth.open and not self.has_gateways
        if (section := self._reachable_section) and free:
            raise ValueError(
                f"{section}.host: is {getattr(self, section).host!r}, which other machines reach: set auth.keys, or "
                "`auth: none` to answer whoever calls"
            )
        taken: dict[int, str] = {}
        for field, port in self.ports.items():
            if port in taken:
                raise ValueError(f"{field}: is {port}, as {taken[port]} is; set another port")
            taken[port] = field
        for field, ports in self.router_ports.items():
            for port in taken.keys() & set(ports[1:]):
                raise ValueError(f"{taken[port]}: is {port}, a port of {field} for a further router; set another")
        for name in (*self.targets, *self.drafters):
            if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                raise ValueError(f"name {name!r}: only letters, digits, '-', '_' and '.' are allowed")
        for name, model in self.drafters.items():
            for target in model.targets:
                if target not in self.targets:
                    raise ValueError(f"drafters.{name}.targets: there is no target {target!r}")
        for maker, shape in parsed_arms(self.speculation.arms):
            if maker and maker not in self.drafters:
                arm = Arm(maker, shape)
                raise ValueError(f"speculation.arms: {arm} names a drafter that is not among drafters, {maker!r}")
        for name, served in self.targets.items():
            if served.arms is not None:
                for text, why in self.arms_left_out(name).items():
                    raise ValueError(f"targets.{name}.arms: {text} cannot be used: {why}")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read and check a YAML file; raises BadRequest naming the file or the field."""
        path = Path(path)
        try:
            sections = yaml_of(path.read_text())
        except FileNotFoundError:
            raise BadRequest("config", f"there is no file {path}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest("config", f"{path} cannot be read: {error}") from error
        except RepeatedKey as error:
            raise BadRequest("config", f"{path}: {error}") from None
        except yaml.YAMLError as error:
            advice = "; indent with spaces, not with a tab" if r"'\t'" in str(error) else ""
            raise BadRequest("config", f"{path} is not YAML: {error}{advice}") from error
        if sections is None:
            raise BadRequest("config", f"{path} has no `targets`")
        if not isinstance(sections, dict):
            raise BadRequest("config", f"{path} has no mapping of sections")
        return cls.of(sections, path.parent)

    @classmethod
    def of(cls, sections: Mapping[str, Any], folder: Path) -> Config:
        """Check a configuration given as a mapping; relative paths start at `folder`."""
        try:
            config = cls.model_validate(sections, context=folder.absolute())
        except ValidationError as error:
            field, reason = first_fault(error)
            raise BadRequest(field or "config", reason) from None
        config = config.model_copy(
            update={
                name: _from(folder, name, getattr(config, name))
                for name in ("auth", "tls", "redis")
                if name in sections
            }
        )
        return config.with_models(lambda where, model: _resolved(where, model, folder))

    @property
    def reachable(self) -> bool:
        """Whether routers listen beyond this machine."""
        return bool(self._reachable_section)

    @property
    def _reachable_section(self) -> str:
        """The first section of a host that other machines reach; empty: there is none."""
        return next((name for name, each in self._client_sections if not is_loopback(each.host)), "")

    @property
    def _client_sections(self) -> tuple[tuple[str, ClientPort], ...]:
        return ("grpc", self.grpc), ("http", self.http)

    @property
    def ports(self) -> dict[str, int]:
        """The ports that are set, by field; those left to the system are not among them."""
        grpc = self.grpc
        found = {
            "grpc.port": grpc.port,
            "http.port": self.http.port,
            "grpc.status_port": grpc.status_port,
            "grpc.replica_status_port": grpc.replica_status_port,
        }
        return {field: port for field, port in found.items() if port}

    @property
    def router_ports(self) -> dict[str, range]:
        """The ports that clients call, by field: one for each router that does not share it; 0 is a free one."""
        return {f"{name}.port": each.client_ports(self.router.most_replicas) for name, each in self._client_sections}

    @property
    def has_gateways(self) -> bool:
        """Whether callers are gateways with a certificate."""
        return self.tls.clients is not None and self.tls.clients.gateways is not None

    def private(self) -> Config:
        """A copy for the cluster that a command starts for itself: on this machine alone, at free ports, without keys
        or TLS. The ports that are set are those of a cluster that may run beside it."""

        def here(section: PortSection, **ports: int) -> PortSection:
            host = section.host if is_loopback(section.host) else "127.0.0.1"
            return section.model_copy(update={"host": host, "port": 0, **ports})

        grpc = here(self.grpc, status_port=0, replica_status_port=0)
        return self.model_copy(update={"grpc": grpc, "http": here(self.http), "auth": Auth(), "tls": Tls()})

    def with_models(self, change: Callable[[str, ModelConfig], ModelConfig]) -> Config:
        """A copy with `change(path, entry)` in place of each target's and drafter's entry, whose path is `path`."""
        sections: dict[str, Mapping[str, ModelConfig]] = {"targets": self.targets, "drafters": self.drafters}
        return self.model_copy(
            update={
                section: {name: change(f"{section}.{name}", model) for name, model in models.items()}
                for section, models in sections.items()
            }
        )

    def target_named(self, name: str) -> str:
        """The target of that name; an empty name means the first. Raises BadRequest for one that is not served."""
        if not name:
            return next(iter(self.targets))
        if name not in self.targets:
            raise BadRequest("model", f"{name!r} is not served here; there is {', '.join(self.targets)}")
        return name

    def drafters_of(self, target: str) -> tuple[str, ...]:
        """The drafters that may draft for a target, in the order of the file."""
        return tuple(
            name for name, drafter in self.drafters.items() if not drafter.targets or target in drafter.targets
        )

    def arms_of(self, target: str) -> tuple[Arm, ...]:
        """The arms that are within a target's limits and can be made for it; `off` alone where there are none. A shape
        without a drafter's name is an arm of each drafter of the target."""
        limits = self.targets[target]
        arms = (
            Arm(maker, shape)
            for drafter, shape in parsed_arms(self.arm_texts(target))
            if limits.holds(shape)
            for maker in self.makers_of(target, shape)
            if drafter in ("", maker)
        )
        return tuple(arms) or (OFF_ARM,)

    def arm_texts(self, target: str) -> tuple[str, ...]:
        """The arms that are configured for a target: its own, else those of `speculation`."""
        own = self.targets[target].arms
        return self.speculation.arms if own is None else own

    def arms_left_out(self, target: str) -> dict[str, str]:
        """Arms that are configured for a target and that it cannot use, each with the reason."""
        limits, texts, reasons = self.targets[target], self.arm_texts(target), {}
        for text, (drafter, shape) in zip(texts, parsed_arms(texts), strict=True):
            makers = self.makers_of(target, shape)
            if not limits.holds(shape):
                most = f"max_rows is {limits.max_rows}, max_depth {limits.max_depth}"
                reasons[text] = f"{shape.rows} rows and depth {shape.depth}; {most}"
            elif drafter and drafter not in makers:
                reasons[text] = f"{drafter} does not draft for it"
            elif not makers:
                reasons[text] = "no drafter makes it" if shape.drafted else "no proposer makes it"
        return reasons

    def makers_of(self, target: str, shape: TreeShape) -> tuple[str, ...]:
        """Who can make trees of this shape for a target: each of its drafters, or the proposers together. Empty where
        nobody can; the maker of `off` is the empty name."""
        if shape.drafted:
            return self.drafters_of(target)
        proposers = "+".join(self.speculation.proposers)
        return ("",) if shape.off else (proposers,) if proposers else ()

    def names_drafters(self, target: str) -> bool:
        """Whether the name of a target's arm has its drafter, `small:(3,2,1)`: it has several."""
        return len(self.drafters_of(target)) > 1


S = TypeVar("S", bound=Section)


def _from(folder: Path, where: str, section: S) -> S:
    """A copy of the section at `where`, with its files' paths made absolute; relative ones start at `folder`."""
    changed: dict[str, Any] = {}
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, Path):
            changed[name] = absolute_path(f"{where}.{name}", value, folder)
        elif isinstance(value, Section):
            changed[name] = _from(folder, f"{where}.{name}", value)
    return section.model_copy(update=changed)


def _resolved(where: str, model: ModelConfig, folder: Path) -> ModelConfig:
    """The model with absolute folders; a path that is not a folder and may be a name on the hub is unchanged. Raises
    BadRequest for a revision of a folder."""
    paths = {"checkpoint": model.checkpoint, **({} if model.tokenizer is None else {"tokenizer": model.tokenizer})}
    found = {field: resolved_path(f"{where}.{field}", path, folder) for field, path in paths.items()}
    if isinstance(model, DrafterConfig) and model.head is not None:
        found["head"] = absolute_path(f"{where}.head", model.head, folder)
    if isinstance(model, TargetConfig) and model.chat_template is not None:
        found["chat_template"] = absolute_path(f"{where}.chat_template", model.chat_template, folder)
    resolved = model.model_copy(update=found)
    for field, name, of in (
        ("revision", resolved.checkpoint_name, "checkpoint"),
        ("tokenizer_revision", resolved.tokenizer_name, "tokenizer"),
    ):
        if getattr(resolved, field) and not name:
            raise BadRequest(f"{where}.{field}", f"belongs to a name on the hub, and {of} is not one")
    return resolved


def pair_config(target: Path, drafters: Sequence[Path], *, dtype: Dtype = "bfloat16", **sections: Any) -> Config:
    """The configuration of one target and its drafters, each named after its folder, and of other `sections`."""

    def models(*paths: Path) -> dict[str, dict[str, Any]]:
        shared = {"dtype": dtype, "threads": 1, "resources": {"cpu": 0.5}}
        return {path.name: {"checkpoint": path, **shared} for path in paths}

    return Config.of({"targets": models(target), "drafters": models(*drafters), **sections}, Path.cwd())


def demo_models(models: Path = DEMO_MODELS) -> Path:
    """`models`, a folder that exists. DEMO_MODELS is part of a checkout of the repository, not of the wheel."""
    if not models.is_dir():
        reason = f"no folder {models}; the package has no weights: work in a checkout of the repository,"
        raise BadRequest("models", f"{reason} give a configuration, or train models with `dendro train demo`")
    return models


def demo_config(models: Path = DEMO_MODELS) -> Config:
    """The demo: one router, one verifier, one drafter, an embedded Redis. Its only proposer, `lookup`, does not use
    earlier answers, which would include those to the same prompt when it is measured again."""
    models = demo_models(models)
    return pair_config(models / "target", [models / "mamba2"], speculation={"proposers": ["lookup"]})
