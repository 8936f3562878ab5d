"""`dendro check`: whether a configuration can be served on this machine, before anything is started."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from dendro.engine import Engine
from dendro.errors import BadRequest, DendroError
from dendro.state import MemoryStates
from rich.console import Console
from tree_layers.checkpoint import GENERATION, Facts, read_facts
from tree_layers.errors import CheckpointError
from tree_layers.tokens import read_object

from cluster.api.access_files import access_problems
from cluster.api.keys import read_keys
from cluster.checkpoints import check_head, check_weights, misfit, pairs_of, read_cluster
from cluster.config import Config, ModelConfig
from cluster.deploy import check_ports, check_resources
from cluster.drafter_figures import read_figures
from cluster.hub import fetched_model, pinned
from cluster.pairing import Pairing
from cluster.redis_client import REDIS_FAULTS, reason_of, warning_at
from cluster.router.served import Served
from cluster.tables import folding_table
from cluster.worth import DraftingEngine, Drafts, Steps, TargetEngine, Timer, worth_of

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}
NOT_LOADED = "-"
REDIS_BUDGET_S = 5.0


@dataclass(slots=True)
class ModelReport:
    """One entry of `targets` or `drafters`. Bytes are those of one replica; None where the model was not loaded."""

    name: str
    kind: str
    dtype: str
    replicas: int
    commit: str  # empty for a folder
    weights: int | None
    stored: str = ""  # types of tensors stored in a GGUF file, with their numbers; empty for other files
    memory: dict[str, int] | None = None
    exactness: str = ""  # bitwise or margin; empty unless a loaded target
    kernels: str = ""  # forms of products and layers that run; empty unless loaded
    arms: list[str] = field(default_factory=list)  # arms of a target
    left_out: dict[str, str] = field(default_factory=dict)  # configured arms that it cannot use, and why

    @property
    def total(self) -> int | None:
        """Bytes of a replica."""
        if self.weights is None or self.memory is None:
            return None
        return self.weights + sum(self.memory.values())


@dataclass(slots=True)
class Pair:
    """A drafter and a target that it is configured for."""

    drafter: str
    target: str
    fits: bool
    bridge: str  # translation between the tokenizers: none, string or intersection
    why: str
    worth: str = ""  # tokens a round by its checkpoint's figures, and whether a round can pay here


@dataclass(slots=True)
class Report:
    """The result of a check. `problems`: why the configuration cannot be served, each beginning with its field.
    `redis`: what was found at its address."""

    targets: list[ModelReport] = field(default_factory=list)
    drafters: list[ModelReport] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    redis: str = ""
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_problem(self, problem: BadRequest | str) -> None:
        """Add a problem once: reading facts and loading may find the same problem."""
        if str(problem) not in self.problems:
            self.problems.append(str(problem))


NEUTRAL_GENERATION: Mapping[str, object] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": {},
}
"""Fields of a generation configuration that change greedy answers, with the values that change none."""


@dataclass(slots=True)
class Timings:
    """Times of the models that were loaded, by name; none without a timer."""

    timer: Timer | None = None
    steps: dict[str, Steps] = field(default_factory=dict)  # key: target
    drafts: dict[str, Drafts] = field(default_factory=dict)  # key: drafter

    def time_target(self, name: str, engine: TargetEngine, most_rows: int) -> None:
        if self.timer is not None:
            self.steps[name] = asyncio.run(self.timer.steps(engine, most_rows))

    def time_drafter(self, name: str, engine: DraftingEngine) -> None:
        if self.timer is not None:
            self.drafts[name] = asyncio.run(self.timer.drafts(engine))


def examine(
    config: Config, load: bool, show_line: Callable[[str], None], timer: Timer | None = None, here: bool = True
) -> Report:
    """Read all checkpoints' facts; then, where `load`, load each model alone, as a replica does, and free it again.

    show_line: called with a line of progress before each load   timer: of loaded models; without one nothing is timed
    here: whether the cluster will be this machine alone, whose ports and accelerators then count
    Raises BadRequest for a checkpoint whose facts cannot be read.
    """
    config = pinned(config)
    facts = read_cluster(config)
    report = Report()
    for name, target in config.targets.items():
        positions = facts.targets[name].positions
        if positions is not None and target.max_length > positions:
            report.add_problem(f"targets.{name}.max_length: {target.max_length}; the model has {positions} positions")
        try:
            Served.of(name, target, facts.targets[name], config.structures)  # loads its tokenizer, as each router does
        except BadRequest as error:
            report.add_problem(error)
        if unread := _unread_generation(facts.targets[name]):
            reason = f"{', '.join(unread)} of {GENERATION} {'are' if len(unread) > 1 else 'is'} not applied"
            report.warnings.append(f"targets.{name}.checkpoint: {reason}; requests give their own parameters")
        if past := sorted(facts.targets[name].named_end_ids - facts.targets[name].end_ids):
            vocabulary = facts.targets[name].vocabulary
            reason = f"no answer ends with the ids {past}: the vocabulary has {vocabulary}"
            report.warnings.append(f"targets.{name}.checkpoint: {reason}")
        entry = _describe(report, "targets", name, target, facts.targets[name])
        entry.arms = [arm.name(config.names_drafters(name)) for arm in config.arms_of(name)]
        entry.left_out = config.arms_left_out(name)
        report.targets.append(entry)
    for name, drafter in config.drafters.items():
        report.drafters.append(_describe(report, "drafters", name, drafter, facts.drafters[name]))
        try:
            check_head(name, drafter)
        except BadRequest as error:
            report.add_problem(error)
    for name, of, pairing in pairs_of(config, facts):
        why = _why(config, name, of, pairing)
        report.pairs.append(Pair(name, of, not pairing.refusal, pairing.bridge or "none", why))
        if pairing.refusal:
            report.add_problem(misfit(name, of, pairing))
    _examine_redis(config, report)
    _examine_access(config, report)
    if here:
        _examine_machine(config, report)
    timings = Timings(timer)
    if load:
        _load_all(config, report, show_line, timings)
    for pair in report.pairs:
        if pair.fits:
            pair.worth = _worth(config, pair, timings)
    return report


def _worth(config: Config, pair: Pair, timings: Timings) -> str:
    try:
        figures = read_figures(config.drafters[pair.drafter].checkpoint)
    except BadRequest as error:
        return f"the figures of its guesses cannot be read: {error}"
    return worth_of(figures, timings.steps.get(pair.target, {}), timings.drafts.get(pair.drafter, {}))


def _examine_redis(config: Config, report: Report) -> None:
    """Find whether Redis can be reached from here, and whether it would evict sessions before saved states."""
    if not config.redis.url:
        report.redis = "embedded: it starts and ends with the cluster"
        return
    try:
        warning = asyncio.run(warning_at(config.redis.address(os.environ), REDIS_BUDGET_S))
    except BadRequest as error:
        report.add_problem(error)
    except REDIS_FAULTS as error:
        report.redis = "cannot be reached from here"
        report.add_problem(f"redis.url: cannot be reached from here: {reason_of(error)}")
    else:
        report.redis = "can be reached"
        if warning:
            report.warnings.append(warning)


def _examine_access(config: Config, report: Report) -> None:
    """Find whether the files of keys and certificates can be read here, and what of them is likely a mistake."""
    for problem in access_problems(config):
        report.add_problem(problem)
    if config.auth.keys is None or report.problems:
        return
    if not read_keys(config.auth.keys).keys:
        report.warnings.append("auth.keys: the file has no key; all calls are refused until `dendro keys add`")
    if config.reachable and config.tls.clients is None:
        report.warnings.append("auth.keys: keys are sent in the open; set tls.clients, or end TLS before the routers")


def _examine_machine(config: Config, report: Report) -> None:
    """Find which ports are taken, and which resources a Ray of this machine alone would lack."""
    try:
        check_ports(config)
    except BadRequest as error:  # perhaps by the very cluster whose new configuration is checked
        report.warnings.append(str(error))
    try:
        check_resources(config, {"CPU": math.inf, "GPU": torch.cuda.device_count()})  # `serve` gives Ray enough cores
    except BadRequest as error:
        if ":" not in error.field:  # Ray finds some resources itself, such as accelerator_type:H100
            report.add_problem(error)


def _unread_generation(facts: Facts) -> list[str]:
    """The fields of a checkpoint's generation configuration that would change greedy answers."""
    given = read_object(facts.folder, GENERATION) if (facts.folder / GENERATION).is_file() else {}
    return [field for field, neutral in NEUTRAL_GENERATION.items() if given.get(field) not in (None, neutral)]


def _why(config: Config, drafter: str, target: str, pairing: Pairing) -> str:
    """Difference of the tokens of a pair, in words. Raises BadRequest for a bridge that cannot be made."""
    from cluster.engines import load_bridge

    fit = pairing.fit
    if pairing.bridge:
        return f"{pairing.why}; {load_bridge(drafter, config.drafters[drafter], target, config.targets[target])}"
    return pairing.refusal or "; ".join(part for part in (fit.warning, fit.note) if part) or "the same tokens"


def _describe(report: Report, section: str, name: str, model: ModelConfig, facts: Facts) -> ModelReport:
    try:
        check_weights(model, f"{section}.{name}.checkpoint")
    except BadRequest as error:
        report.add_problem(error)
    numbers = facts.numbers
    return ModelReport(
        name=name,
        kind=facts.model_type,
        dtype=model.dtype,
        replicas=model.most_replicas,
        commit=model.revision,
        weights=None if numbers is None else numbers * BYTES_OF[model.dtype],
        stored=", ".join(f"{count} {kind}" for kind, count in sorted(facts.stored.items())),
    )


def _load_all(config: Config, report: Report, show_line: Callable[[str], None], timings: Timings) -> None:
    longest = max(target.max_length for target in config.targets.values())
    entries = [*(("targets", entry) for entry in report.targets), *(("drafters", entry) for entry in report.drafters)]
    for place, (section, entry) in enumerate(entries, 1):
        show_line(f"loading {section}.{entry.name}, {place} of {len(entries)} ...")
        try:
            _load_model(config, section, entry, longest, timings)
        except BadRequest as error:
            given = error.field.startswith(section)
            field_of = error.field if given else f"{section}.{entry.name}.{error.field}"
            report.add_problem(f"{field_of}: {error.reason}")
        except (DendroError, CheckpointError, MemoryError) as error:
            report.add_problem(f"{section}.{entry.name}: {error or type(error).__name__}")
        gc.collect()  # the model is freed before the next one is loaded


def _load_model(config: Config, section: str, entry: ModelReport, longest: int, timings: Timings) -> None:
    from cluster.engines import load_drafter, load_verifier

    model: ModelConfig
    engine: Engine
    timed: Callable[[], None]
    if section == "targets":
        model = target = fetched_model(f"targets.{entry.name}", config.targets[entry.name])
        verifier = load_verifier(entry.name, target, MemoryStates())
        engine, workers = verifier, target.tensor_parallel
        timed = partial(timings.time_target, entry.name, verifier, target.max_rows)
    else:
        model = drafter = fetched_model(f"drafters.{entry.name}", config.drafters[entry.name])
        drafting = load_drafter(entry.name, drafter, MemoryStates(), config.targets)
        engine, workers = drafting, 1
        timed = partial(timings.time_drafter, entry.name, drafting)
    try:
        own = engine.memory_bytes(longest)  # bytes in this process; each other worker needs as much
        entry.memory = {part: count * workers for part, count in own.items()}
        entry.weights = _weights(model) or entry.weights
        entry.exactness = asyncio.run(engine.hello()).exactness
        entry.kernels = engine.kernels
        timed()
    finally:
        asyncio.run(engine.stop())


def _weights(model: ModelConfig) -> int | None:
    """Bytes of a model's weights, whose files are on this machine."""
    numbers = read_facts(model.checkpoint, model.tokenizer).numbers
    return None if numbers is None else numbers * BYTES_OF[model.dtype]


def show(console: Console, report: Report) -> None:
    """Print a report as tables."""
    models = [
        (
            f"{section}.{entry.name}",
            entry.kind,
            entry.dtype,
            str(entry.replicas),
            _memory(entry),
            entry.exactness or NOT_LOADED,
        )
        for section, entries in (("targets", report.targets), ("drafters", report.drafters))
        for entry in entries
    ]
    columns = ("model", "kind", "dtype", "replicas", "memory of one, at most", "exactness")
    console.print(folding_table("models", columns, models, right=[3]))
    if report.pairs:
        pairs = [
            (pair.drafter, pair.target, "yes" if pair.fits else "no", pair.bridge, pair.why) for pair in report.pairs
        ]
        console.print(folding_table("drafters", ("drafter", "target", "fits", "bridge", "why"), pairs))
        for pair in report.pairs:
            if pair.worth:
                line = f"worth of {pair.drafter} for {pair.target}: {pair.worth}"
                console.print(line, markup=False, soft_wrap=True)
    for entry in report.targets:
        if entry.stored:
            line = f"tensors of {entry.name}: {entry.stored}, unpacked into {entry.dtype}"
            console.print(line, markup=False, soft_wrap=True)
    for entry in (*report.targets, *report.drafters):
        if entry.kernels:
            console.print(f"kernels of {entry.name}: {entry.kernels}", markup=False, soft_wrap=True)
    for entry in report.targets:
        console.print(f"arms of {entry.name}: {', '.join(entry.arms)}", markup=False, soft_wrap=True)
        for arm, why in entry.left_out.items():
            console.print(f"  left out: {arm}: {why}", markup=False, soft_wrap=True)
    if report.redis:
        console.print(f"redis: {report.redis}", markup=False, soft_wrap=True)
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"cannot be served: {problem}", style="red", markup=False, soft_wrap=True)
    if not report.problems:
        console.print("can be served")


def _memory(entry: ModelReport) -> str:
    """`weights 2.1 MB, head 1 MB, pages 4 MB, states 0 B; in all 7.1 MB`; without what is not known."""
    parts = {"weights": entry.weights, **(entry.memory or {})}
    known = ", ".join(f"{part} {_size(count)}" for part, count in parts.items() if count is not None)
    return known + ("" if entry.total is None else f"; in all {_size(entry.total)}") or NOT_LOADED


def _size(count: int) -> str:
    scaled, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if scaled >= 1000:
            scaled, unit = scaled / 1000, larger
    return f"{scaled:.4g} {unit}"


def as_report(report: Report) -> str:
    """The report as JSON; bytes are numbers, and null where a model was not loaded."""
    return json.dumps(asdict(report) | {"can_be_served": not report.problems}, indent=2) + "\n"
