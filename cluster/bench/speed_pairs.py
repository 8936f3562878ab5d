"""What `dendro bench speed` measures: a configuration's target and drafters, and the prompts for them.

Of the bundled demo, prompts have one length and answers another. Of a user's configuration, prompts are those of a file
and answers end where the target ends them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest
from tree_layers.checkpoint import GGUF

from cluster.bench.measurement import BASELINES, GENERATE, LLAMA_CPP_FILE, LLAMA_CPP_ROWS, LOOKUP
from cluster.bench.ours import TenantRule
from cluster.bench.speed import SpeedPlan
from cluster.bench.targets import MAMBA2, target_config
from cluster.config import Config, TargetConfig
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.hub import fetched, pinned
from cluster.prompt_files import by_turns, read_prompts, that_fit
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.training.acceptance import PROMPT_TOKENS

TIME_LIMIT_S = 1140.0  # of a whole run on the demo, startup and warm-up included: 19 minutes
COSTLY_SHARE = 0.7  # of the time limit, for the first of two targets
CHOOSING_PROMPTS = 3  # beyond the measured ones, for the library's settings
ASSISTANT = "llama"
"""The demo's drafter that the library can assist with."""


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """The options of a run."""

    prompts: int
    tokens: int
    repetitions: int
    temperatures: tuple[float, ...]
    local: bool
    seed: int


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A target with its drafters and the plan of its measurement, under the plan's name for the target."""

    config: Config  # of one target
    plan: SpeedPlan
    assistant: Path | None = None  # of the library
    own_file: Path | None = None  # the target's GGUF file
    tenants: TenantRule | None = None  # None: all answers are of one
    to_end: bool = False  # whether answers stop at their ends
    until_s: float = math.inf  # since the run began
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the prompts, for the report

    @property
    def target(self) -> TargetConfig:
        (target,) = self.config.targets.values()
        return target

    @property
    def positions(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, (*self.plan.prompts, *self.plan.choosing))) + self.plan.tokens


def demo_pairs(names: Sequence[str], settings: SpeedSettings, models: Path) -> list[MeasuredPair]:
    """The bundled targets of these names."""
    assistant = models / ASSISTANT
    if not (assistant / "config.json").exists():
        raise BadRequest("models", f"{assistant} holds no checkpoint: assisted generation needs one")
    texts = held_out_prompts(settings.prompts + CHOOSING_PROMPTS, PROMPT_TOKENS, load_tokenizer(models), models)
    found = []
    for index, name in enumerate(names):
        config = target_config(models, name)
        # The library's others need a cache that can be cropped.
        baselines = (*(BASELINES if name != MAMBA2 else (GENERATE,)), *LLAMA_CPP_ROWS)
        plan = _plan(name, config, tuple(prompt.token_ids for prompt in texts[:-CHOOSING_PROMPTS]), settings, baselines)
        plan = replace(plan, choosing=tuple(prompt.token_ids for prompt in texts[-CHOOSING_PROMPTS:]))
        last = index == len(names) - 1
        found.append(MeasuredPair(config, plan, assistant, until_s=TIME_LIMIT_S * (1.0 if last else COSTLY_SHARE)))
    return found


def file_pairs(
    configs: Mapping[str, Config],
    target: str,
    file: Path,
    tenants: Sequence[TenantRule],
    alone: bool,
    settings: SpeedSettings,
) -> list[MeasuredPair]:
    """The target of that name of each configuration, with the prompts of a file.

    tenants: each is measured   alone: without the library and llama.cpp
    """
    found = []
    for label, given in configs.items():
        config = _of_target(fetched(pinned(given)), target)
        ((name, served),) = config.targets.items()
        if settings.tokens > config.router.max_new_tokens:
            raise BadRequest("tokens", f"{settings.tokens}; router.max_new_tokens is {config.router.max_new_tokens}")
        try:
            tokenizer = CheckpointTokenizer(served.tokenizer_folder, "")
        except BadRequest as error:
            raise BadRequest(f"targets.{name}.{served.tokenizer_field}", error.reason) from error
        prompts = by_turns(that_fit(read_prompts(file, tokenizer), served.max_length - settings.tokens))
        prompts = prompts[: settings.prompts]
        own_file = served.checkpoint / GGUF
        others = (GENERATE, LOOKUP, *LLAMA_CPP_ROWS, *((LLAMA_CPP_FILE,) if own_file.is_file() else ()))
        lengths = [len(prompt.token_ids) for prompt in prompts]
        categories = tuple(prompt.category for prompt in prompts)
        for whose in tenants:
            group = f"{label}, tenants: {whose}" if len(tenants) > 1 else label
            plan = _plan(
                group, config, tuple(prompt.token_ids for prompt in prompts), settings, () if alone else others
            )
            pair = MeasuredPair(
                config,
                replace(plan, categories=categories if any(categories) else ()),
                own_file=own_file if LLAMA_CPP_FILE in plan.baselines else None,
                tenants=whose,
                to_end=True,
                facts={"prompt_file": file.name, "shortest_prompt": min(lengths), "tenants": str(whose)},
            )
            found.append(pair)
    return found


def _plan(
    name: str,
    config: Config,
    prompts: tuple[tuple[int, ...], ...],
    settings: SpeedSettings,
    baselines: tuple[str, ...],
) -> SpeedPlan:
    (target,) = config.targets
    named = config.names_drafters(target)
    return SpeedPlan(
        name,
        prompts,
        settings.tokens,
        settings.temperatures,
        settings.repetitions,
        tuple(dict.fromkeys(arm.name(named) for arm in config.arms_of(target) if not arm.off)),
        baselines,
        settings.seed,
    )


def _of_target(config: Config, name: str) -> Config:
    """The configuration with that target alone and its drafters; the first target where the name is empty. The prefix
    cache is off: each row answers the same prompts, and the library has none."""
    name = config.target_named(name)
    served = config.targets[name].model_copy(update={"share_prefixes": False})
    drafters = {drafter: config.drafters[drafter] for drafter in config.drafters_of(name)}
    return config.model_copy(update={"targets": {name: served}, "drafters": drafters})
