"""The base of the configuration's sections, and what its pools share: resources and scaling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_args

from dendro.arguments import shown
from dendro.certificates import CertificateFiles
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

LARGEST = 1 << 53
"""Greatest integer of a configuration: all up to it are numbers of float64, too, as JSON's readers take them."""


FIELD = re.compile(r"[\w.-]{1,200}")
"""A field as an error begins with it."""


class Section(BaseModel):
    """The base of all sections. Immutable; unknown keys are errors, and so are numbers that are not finite or that
    nothing can count."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: Any) -> Any:
        """Refuse what is no mapping, and an unknown key, whose likely meaning is then not reported as missing."""
        if isinstance(given, Section):
            return given
        if not isinstance(given, Mapping):
            needed = [f"`{name}`" for name, field in cls.model_fields.items() if field.is_required()]
            raise ValueError(f"must be a mapping{' with ' * bool(needed)}{' and '.join(needed)}")
        for key in given:
            if key not in cls.model_fields:
                near = get_close_matches(key, cls.model_fields, 1) if isinstance(key, str) else ()
                named = key if isinstance(key, str) and FIELD.fullmatch(key) else shown(key)
                raise ValueError(f"{named}: is an unknown key{f'; the nearest known one is {near[0]}' if near else ''}")
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse a boolean for a number, which pydantic takes for 0 or 1: YAML reads `on` and `yes` as one. Refuse
        integers that do not fit where they are used, such as in Redis, in protobuf and in Ray."""
        if isinstance(value, int) and abs(value) > LARGEST:
            digits = len(str(abs(value))) if abs(value) < 10**4000 else "thousands of"
            raise ValueError(f"is a number of {digits} digits; must be at most {LARGEST:,}")
        if isinstance(value, bool) and info.field_name is not None:
            kind = cls.model_fields[info.field_name].annotation
            if not {kind, *get_args(kind)}.isdisjoint((int, float)):
                raise ValueError("is a boolean; must be a number")
        return value


RESERVED = frozenset({"", "cpu", "gpu", "memory", "object_store_memory"})
"""Names of Ray's resources, in lower case, that are no custom ones."""


LEAST_AMOUNT = 1e-4
"""Smallest amount of a resource that Ray counts."""
TOO_LITTLE = f"must be zero or at least {LEAST_AMOUNT:g}, as Ray counts no less"


class Resources(Section):
    """What Ray reserves for one replica. Fractions of a core or of an accelerator are allowed."""

    cpu: float = Field(default=1.0, ge=0)
    """Cores."""
    gpu: float = Field(default=0.0, ge=0)
    """Accelerators."""
    custom: dict[str, float] = Field(default_factory=dict)
    """Ray's own named resources, such as `{verifier: 1}`, that pin a pool to its machines."""

    @field_validator("cpu", "gpu")
    @classmethod
    def _check_amount(cls, amount: float) -> float:
        if 0 < amount < LEAST_AMOUNT:
            raise ValueError(f"{amount:g}; {TOO_LITTLE}")
        return amount

    @field_validator("custom")
    @classmethod
    def _check_custom(cls, custom: dict[str, float]) -> dict[str, float]:
        for name, amount in custom.items():
            if name.lower() in RESERVED:
                raise ValueError(f"{name!r} is no name of one's own; cores are `cpu`, accelerators `gpu`")
            if amount < 0:
                raise ValueError(f"{name}: {amount:g}; must be at least 0")
            if 0 < amount < LEAST_AMOUNT:
                raise ValueError(f"{name}: {amount:g}; {TOO_LITTLE}")
        return custom

    @property
    def bundle(self) -> dict[str, float]:
        """The resources as a bundle of a Ray placement group, which must have no zeros."""
        return {name: amount for name, amount in {"CPU": self.cpu, "GPU": self.gpu, **self.custom}.items() if amount}


class Scaling(Section):
    """Bounds and delays of a pool whose number of replicas follows its load."""

    min_replicas: int = Field(default=1, ge=0)
    """Replicas that are kept without load. Zero: the pool sleeps. The next request waits for a target's load, at most
    `router.request_timeout_s`; it does not wait for a drafter's."""
    max_replicas: int = Field(ge=1)
    """Replicas that are never exceeded."""
    up_after_s: float = Field(default=10.0, ge=0)
    """How long the average load must be above its target before a replica is added."""
    down_after_s: float = Field(default=120.0, ge=0)
    """How long it must be below before a replica is removed. Where `min_replicas` is zero it should be longer than a
    load, else a replica may be removed while it loads. A drafter or verifier ends with its last lease, a router when it
    has drained."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas < max(self.min_replicas, 1):
            raise ValueError(f"max_replicas: {self.max_replicas}; must be at least min_replicas, {self.min_replicas}")
        return self


class Autoscaling(Scaling):
    """How many replicas a pool has, by its leases: a running request holds one of a verifier and one of
    each drafter that its policy has chosen. A lease for n answers counts as n."""

    leases: float = Field(default=8.0, gt=0)
    """Target number of leases of a replica, on average."""


class RouterScaling(Scaling):
    """How many routers there are, by the requests that run on them."""

    min_replicas: int = Field(default=1, ge=1)
    """Routers that are kept without load."""
    requests: float = Field(default=64.0, gt=0)
    """Target number of running requests of a router, on average."""


class Replicated(Section):
    """A deployment of a fixed number of replicas, or of a number that follows its load."""

    replicas: int = Field(default=1, ge=0)
    """A fixed number; must not be given beside `autoscaling`."""
    autoscaling: Scaling | None = None
    """A number of replicas that follows the load, in place of `replicas`."""

    @property
    def most_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling is not None else self.replicas

    @property
    def least_replicas(self) -> int:
        return self.autoscaling.min_replicas if self.autoscaling is not None else self.replicas

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas: is given beside autoscaling, which has min_replicas and max_replicas")
        return self


class CertificatePair(Section):
    """A certificate with its chain, and its key, as files in PEM. They are read again when they change."""

    certificate: Path
    """The certificate's file."""
    key: Path
    """The key's file."""


class Auth(Section):
    """Who may call the routers (docs/security.md). `auth: none`: whoever reaches them. A host of `grpc` or
    `http` beyond this machine needs this section."""

    keys: Path | None = None
    """The file of API keys, which `dendro keys` writes and routers read again when it changes. Calls without one of its
    keys are refused; a key decides the tenant and has limits."""
    open: bool = False
    """True is what `auth: none` means; without keys alone."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.open and self.keys is not None:
            raise ValueError("open: is set beside keys")
        return self


def auth_section(value: Any) -> Any:
    """`none` as a section."""
    return {"open": True} if value == "none" else value


class ClientTls(Section):
    """TLS of the ports that clients call. Without this section they have none."""

    certificate: Path
    """The certificate's file, with its chain, in PEM."""
    key: Path
    """The key's file, in PEM."""
    gateways: Path | None = None
    """The authority, in PEM, of gateways' certificates. With it, callers need such a certificate, no keys are allowed,
    and a call's tenant is what the gateway wrote into `dendro-tenant`."""

    def files(self) -> CertificateFiles:
        """The files. Raises BadRequest for those that cannot be used."""
        return CertificateFiles("tls.clients", self.certificate, self.key, self.gateways)


class PeerTls(Section):
    """Mutual TLS between routers, drafters and verifiers, whose certificates have the DNS names `router.dendro`,
    `drafter.dendro` and `verifier.dendro`. A process reads the files of its own role."""

    authority: Path
    """The authority of all three, in PEM."""
    router: CertificatePair
    """Files of routers, which call drafters and verifiers."""
    drafter: CertificatePair
    """Files of drafters."""
    verifier: CertificatePair
    """Files of verifiers."""

    def files(self, role: str) -> CertificateFiles:
        """The files of a role. Raises BadRequest for those that cannot be used."""
        pair: CertificatePair = getattr(self, role)
        return CertificateFiles(f"tls.peers.{role}", pair.certificate, pair.key, self.authority)


class Tls(Section):
    """Certificates (docs/security.md)."""

    clients: ClientTls | None = None
    peers: PeerTls | None = None


class TraceExport(Section):
    """Traces of answers by OpenTelemetry (docs/metrics.md). Needs the extra `trace`."""

    endpoint: str
    """The collector's address for spans, OTLP over HTTP: `http://collector:4318/v1/traces`."""
    share: float = Field(default=0.01, gt=0, le=1)
    """Share of the answers that have a span, where the caller has none; a caller's span decides for its answers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("endpoint: does not begin with http:// or https://")
        return self


_QUOTING = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be finite",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "literal_error": "must be one of {expected}",
    "enum": "must be one of {expected}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
}
"""Reasons by pydantic's types of faults whose values are shown."""
_SILENT = {
    "missing": "is missing",
    "string_type": "must be a text; write it in quotes",
    "path_type": "must be a path; write it in quotes",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "too_short": "must have at least {min_length}",
}
"""Reasons whose values are not shown: they are long, or may hold a secret."""


def first_fault(error: ValidationError) -> tuple[str, str]:
    """Path and reason of the first error; the reason ends with the number of further ones."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    path = ".".join(str(part) for part in fault["loc"])
    kind, facts = fault["type"], fault.get("ctx", {})
    if kind in _QUOTING:
        reason = f"{_QUOTING[kind].format_map(facts)}; got {shown(fault['input'])}"
    elif kind in _SILENT:
        reason = _SILENT[kind].format_map(facts)
    else:
        reason = str(facts.get("error", fault["msg"]))
        head, _, rest = reason.partition(": ")
        if rest and FIELD.fullmatch(head):  # a section's check begins with its field
            path, reason = ".".join(part for part in (path, head) if part), rest
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return path, reason + more
