"""What the operator says, in one YAML file, checked at birth.

```yaml
targets:
  demo: {checkpoint: models/target, dtype: bfloat16, threads: 1, resources: {cpu: 0.5}}
drafters:
  mamba: {checkpoint: models/mamba, resources: {cpu: 0.5}}
speculation: {policy: ratio_ucb, arms: ["off", "(1,1,1,1)", "(3,2,2,1,1)"]}
```

Relative paths of checkpoints and tokenizers start at the YAML file's folder. A key that we do not know is refused by
its path; a value that does not fit is refused by the name of its field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import quote

import yaml
from dendro.errors import BadRequest
from dendro.health import LONGEST_STEP_S
from dendro.shapes import MAX_ROWS, OFF, TreeShape
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.policies import POLICIES
from cluster.proposers import PROPOSERS

DEMO_MODELS = Path(__file__).parent / "demo" / "models"

Dtype = Literal["bfloat16", "float16", "float32"]


def _shape_text(text: str) -> str:
    """The canonical form of a shape; ValueError for what is none."""
    try:
        return str(TreeShape.parse(text))
    except ValueError as error:
        raise ValueError(str(error).removeprefix("shape: ")) from None


ShapeText = Annotated[str, AfterValidator(_shape_text)]
"""A shape as text, in its canonical form: `off`, `(1,1,1,1)`."""

DEFAULT_ARMS: tuple[str, ...] = (
    "off",
    "proposed(15)",
    "(1,1,1,1)",
    "(2,1,1)",
    "(3,2,1)",
    "beam(5,3)",
    "dynamic(4,5,15)",
    "(3,2,2,1,1)",
)


class Section(BaseModel):
    """What all sections share: frozen, and deaf to nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Resources(Section):
    """What Ray sets aside for one replica. A fraction of a core or of an accelerator is allowed."""

    cpu: float = Field(default=1.0, ge=0)
    gpu: float = Field(default=0.0, ge=0)
    custom: dict[str, float] = Field(default_factory=dict)
    """Ray's own named resources, such as `{verifier: 1}`, that pin a pool to its machines."""

    @property
    def bundle(self) -> dict[str, float]:
        """The same as Ray's placement groups want it: without zeros."""
        return {name: amount for name, amount in {"CPU": self.cpu, "GPU": self.gpu, **self.custom}.items() if amount}


class Autoscaling(Section):
    """How many replicas a pool has, by the leases that are held: each request in progress holds one of each peer."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(ge=1)
    leases: float = Field(default=8.0, gt=0)
    """Leases that a replica should hold on the average."""
    up_after_s: float = Field(default=10.0, ge=0)
    """How long there must be more than that before a replica is added."""
    down_after_s: float = Field(default=120.0, ge=0)
    """How long there must be fewer before one is taken away; it ends with its last lease."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas < max(self.min_replicas, 1):
            raise ValueError(f"max_replicas: {self.max_replicas}; at least min_replicas, {self.min_replicas}")
        return self


class ModelConfig(Section):
    """What a target and a drafter share: one Serve deployment with `replicas` replicas."""

    checkpoint: Path
    """A folder; or, where there is none and the text has one slash, a name on the hub, `organisation/name`."""
    revision: str = ""
    """Branch, tag or commit of a checkpoint on the hub. Default: its main branch. Resolved once, at start."""
    tokenizer: Path | None = None
    """The folder, or the name on the hub, whose tokenizer this model's token ids mean. Default: the checkpoint's own;
    state-spaces' releases have none."""
    tokenizer_revision: str = ""
    dtype: Dtype = "bfloat16"
    threads: int = Field(default=1, ge=1)
    replicas: int = Field(default=1, ge=0)
    """A fixed number, where `autoscaling` is not given."""
    autoscaling: Autoscaling | None = None
    resources: Resources = Resources()
    max_sessions: int = Field(default=16, ge=1)
    """Texts that a replica holds at once."""
    longest_step_s: float = Field(default=LONGEST_STEP_S, gt=0)
    """How long one step of the engine may take, a first compilation included, before the replica counts as hung: its
    texts go on elsewhere, and Serve replaces it. A long prompt is many steps."""

    @property
    def checkpoint_name(self) -> str:
        """The checkpoint's name on the hub; empty where it is a folder."""
        return _hub_name(self.checkpoint)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name on the hub; empty where it is a folder, or the checkpoint's own."""
        return "" if self.tokenizer is None else _hub_name(self.tokenizer)

    @property
    def on_hub(self) -> bool:
        """Whether checkpoint or tokenizer is a name on the hub, which each node fetches for itself."""
        return bool(self.checkpoint_name or self.tokenizer_name)

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer's files are."""
        return self.checkpoint if self.tokenizer is None else self.tokenizer

    @property
    def tokenizer_field(self) -> str:
        """The field that names it."""
        return "checkpoint" if self.tokenizer is None else "tokenizer"

    @property
    def most_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.replicas

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas: is given beside autoscaling, whose min_replicas and max_replicas say it")
        return self


class TargetConfig(ModelConfig):
    """A served model: one verifier deployment."""

    max_length: int = Field(default=2048, ge=2)
    """Tokens of the longest text that a replica holds, prompt and answer together."""
    max_waiting: int = Field(default=64, ge=0)
    """Texts that wait at a replica for one of its places; past them a request is refused with RESOURCE_EXHAUSTED."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """The share of the device's free memory, once the weights are loaded, that texts may take. Default: as much as
    `max_sessions` of the longest texts need."""
    share_prefixes: bool = True
    """Whether texts of one tenant that begin alike share that part's memory and computation."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Workers that a replica is made of, each with a shard of the weights, of every text's keys, and `resources` and
    `threads` of its own. All replicas of a target have the same number: another would round differently."""
    max_rows: int = Field(default=MAX_ROWS, ge=1, le=MAX_ROWS)
    """Rows of the largest tree, its root among them."""
    max_depth: int = Field(default=16, ge=0, le=MAX_ROWS - 1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tensor_parallel > 1 and not self.resources.bundle:
            raise ValueError("resources: are all zero; workers of a sharded target are placed by what they take")
        return self

    def holds(self, shape: TreeShape) -> bool:
        """Whether trees of this shape keep within the limits. Proposals are never deeper than the target takes them."""
        return shape.rows <= self.max_rows and (shape.depth <= self.max_depth or not shape.drafted)


class DrafterConfig(ModelConfig):
    """A drafter deployment, of a `mamba`, `mamba2`, `llama`, `qwen2` or `qwen3` checkpoint. It serves every target
    that shares its tokenizer, or only those named in `targets`."""

    targets: tuple[str, ...] = ()


SettledModel = TypeVar("SettledModel", bound=ModelConfig)


class Router(Section):
    """The deployment that clients speak to, and its patience."""

    replicas: int = Field(default=1, ge=1)
    resources: Resources = Resources(cpu=0.25)
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)
    max_new_tokens: int = Field(default=4096, ge=1)
    """The most tokens that one request may ask for."""
    default_new_tokens: int = Field(default=256, ge=1)
    """What a request gets that names no number."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """A request's wall-clock limit: an orphan ends here at the latest."""
    draft_timeout_ms: float = Field(default=500.0, gt=0)
    """The longest a round waits for its draft; a late one makes the round plain decoding. Rounds of a request that
    fixes its shape wait so long, others no longer than a late draft may cost."""


class SpeculationConfig(Section):
    """How shapes are chosen where a request leaves that to us (`auto`)."""

    policy: str = "ratio_ucb"
    """One of ratio_ucb, discounted_ucb, thompson, fullinfo, ucbspec and paper_ucb."""
    arms: tuple[ShapeText, ...] = DEFAULT_ARMS
    """The shapes to choose among, as far as the target has who makes them: a drafter, or proposers for `proposed(7)`.
    `off` is always one of them, and a chain, of depth 4 at most, where a drafter makes trees: what a policy falls back
    to is not to be forgotten."""
    proposers: tuple[str, ...] = PROPOSERS
    """Who guesses without a model, beside the drafter or in its absence. Empty: nobody."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.policy not in POLICIES:
            raise ValueError(f"policy: {self.policy!r} is not one of {', '.join(POLICIES)}")
        if not self.arms:
            raise ValueError("arms: is empty; name at least one shape")
        if len(set(self.arms)) != len(self.arms):
            raise ValueError("arms: names a shape twice")
        for name in self.proposers:
            if name not in PROPOSERS:
                raise ValueError(f"proposers: {name!r} is not one of {', '.join(PROPOSERS)}")
        if len(set(self.proposers)) != len(self.proposers):
            raise ValueError("proposers: names one twice")
        return self

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        return tuple(TreeShape.parse(arm) for arm in self.arms)


class Redis(Section):
    """Where records and states are kept."""

    url: str = ""
    """Empty: an embedded redis-server is started beside the cluster and ends with it."""
    password_variable: str = ""
    """The environment variable that has the server's password, so that it stands in no file."""
    record_ttl_s: int = Field(default=7 * 24 * 3600, ge=1)
    state_ttl_s: int = Field(default=24 * 3600, ge=1)
    prior_ttl_s: int = Field(default=7 * 24 * 3600, ge=1)
    """How long what texts of one kind were like is kept from their last request on, so that others begin with it."""
    memory_mb: int = Field(default=512, ge=8)
    """What the embedded server may hold; it forgets the oldest beyond that."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.url and not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"url: {self.url!r} does not begin with redis://, rediss:// or unix://")
        if self.password_variable and "@" in self.url:
            raise ValueError("password_variable: is named beside a url that has credentials of its own")
        return self

    def address(self, environment: Mapping[str, str]) -> str:
        """The url with the password in it. Raises BadRequest where the variable is not set."""
        if not self.password_variable:
            return self.url
        password = environment.get(self.password_variable, "")
        if not password:
            raise BadRequest("redis.password_variable", f"there is no {self.password_variable} in the environment")
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://:{quote(password, safe='')}@{rest}"


class Grpc(Section):
    """Where clients reach us."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """Zero: a free port is taken and printed."""


class Config(Section):
    """One cluster."""

    targets: dict[str, TargetConfig] = Field(min_length=1)
    drafters: dict[str, DrafterConfig] = Field(default_factory=dict)
    router: Router = Router()
    speculation: SpeculationConfig = SpeculationConfig()
    redis: Redis = Redis()
    grpc: Grpc = Grpc()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in (*self.targets, *self.drafters):
            if not name or not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
                raise ValueError(f"name {name!r}: letters, digits, '-', '_' and '.' alone")
        for name, drafter in self.drafters.items():
            for target in drafter.targets:
                if target not in self.targets:
                    raise ValueError(f"drafters.{name}.targets: there is no target {target!r}")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read and check a YAML file; raises BadRequest naming the file or the field."""
        path = Path(path)
        try:
            said = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            raise BadRequest("config", f"there is no file {path}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest("config", f"{path} cannot be read: {error}") from error
        except yaml.YAMLError as error:
            raise BadRequest("config", f"{path} is not YAML: {error}") from error
        if not isinstance(said, dict):
            raise BadRequest("config", f"{path} holds no mapping of sections")
        return cls.of(said, path.parent)

    @classmethod
    def of(cls, said: Mapping[str, Any], folder: Path) -> Config:
        """Check a configuration that is already a mapping; relative checkpoints start at `folder`."""
        try:
            config = cls.model_validate(said)
        except ValidationError as error:
            raise BadRequest(*_first_fault(error)) from None
        return config.model_copy(
            update={
                "targets": {name: _settled(f"targets.{name}", model, folder) for name, model in config.targets.items()},
                "drafters": {
                    name: _settled(f"drafters.{name}", model, folder) for name, model in config.drafters.items()
                },
            }
        )

    def target_named(self, name: str) -> str:
        """The target a request means; an empty name is the first. Raises BadRequest for one that is not served."""
        if not name:
            return next(iter(self.targets))
        if name not in self.targets:
            raise BadRequest("model", f"{name!r} is not served here; there is {', '.join(self.targets)}")
        return name

    def drafters_of(self, target: str) -> tuple[str, ...]:
        """The drafters that may draft for a target, in the order they were written."""
        return tuple(
            name for name, drafter in self.drafters.items() if not drafter.targets or target in drafter.targets
        )

    def arms_of(self, target: str) -> tuple[TreeShape, ...]:
        """The arms that fit a target's limits and that somebody makes for it; `off` alone where there are none."""
        holds = self.targets[target].holds
        return tuple(shape for shape in self.speculation.shapes if holds(shape) and self.makes(target, shape)) or (OFF,)

    def makes(self, target: str, shape: TreeShape) -> bool:
        """Whether a target has who makes trees of this shape."""
        if shape.off:
            return True
        return bool(self.drafters_of(target) if shape.drafted else self.speculation.proposers)


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _hub_name(path: Path) -> str:
    """The name on the hub that a settled path is; empty where it is a folder: those are absolute."""
    return "" if path.is_absolute() else path.as_posix()


def _settled(where: str, model: SettledModel, folder: Path) -> SettledModel:
    """With absolute folders; what is no folder and may be a name on the hub stays as it is."""
    paths = {"checkpoint": model.checkpoint, **({} if model.tokenizer is None else {"tokenizer": model.tokenizer})}
    settled = model.model_copy(update={field: settled_path(path, folder) for field, path in paths.items()})
    for field, name, of in (
        ("revision", settled.checkpoint_name, "checkpoint"),
        ("tokenizer_revision", settled.tokenizer_name, "tokenizer"),
    ):
        if getattr(settled, field) and not name:
            raise BadRequest(f"{where}.{field}", f"belongs to a name on the hub, and {of} is none")
    return settled


def settled_path(path: Path, folder: Path) -> Path:
    """An absolute folder, where a relative one starts at `folder`; or a name on the hub, as it was written."""
    here = (folder / path.expanduser()).resolve()
    return path if HUB_NAME.fullmatch(path.as_posix()) and not here.is_dir() else here


def _first_fault(error: ValidationError) -> tuple[str, str]:
    """Path and reason of the first thing that is wrong; how many more there are is said with it."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        reason = "is not a key that we know"
    elif fault["type"] == "missing":
        reason = "is missing"
    else:
        reason = str(fault.get("ctx", {}).get("error", fault["msg"]))
        head, _, rest = reason.partition(": ")
        if rest and head.replace(".", "").replace("_", "").isalnum():  # a check of several fields names its own
            path, reason = ".".join(part for part in (path, head) if part), rest
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return path or "config", reason + more


def pair_config(
    target: Path, drafters: Sequence[Path], *, dtype: Dtype = "bfloat16", threads: int = 1, **sections: Any
) -> Config:
    """The configuration of one target and its drafters, each named after its folder; `sections` are the others."""
    share = 0.5
    return Config.of(
        {
            "targets": {
                target.name: {"checkpoint": target, "dtype": dtype, "threads": threads, "resources": {"cpu": share}}
            },
            "drafters": {
                path.name: {"checkpoint": path, "dtype": dtype, "threads": threads, "resources": {"cpu": share}}
                for path in drafters
            },
            **sections,
        },
        Path.cwd(),
    )


def demo_config(models: Path = DEMO_MODELS, drafter: str = "mamba2") -> Config:
    """The bundled demo: one router, one verifier, one drafter, an embedded Redis. Its proposers forget an answer with
    its text: a prompt that is shown or measured again is none whose answer is known."""
    return pair_config(models / "target", [models / drafter], speculation={"proposers": ["lookup"]})
