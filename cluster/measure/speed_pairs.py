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

from cluster.config import Config, TargetConfig
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.measurement import BASELINES, GENERATE, LLAMA_CPP_FILE, LLAMA_CPP_ROWS, LOOKUP
from cluster.measure.ours import TenantRule
from cluster.measure.own_target import own_arms, own_prompts, own_target, prompt_facts
from cluster.measure.speed import SpeedPlan
from cluster.measure.targets import MAMBA2, target_config
from cluster.training.acceptance import PROMPT_TOKENS

TIME_LIMIT_S = 1140.0  # 19 minutes for a whole run on the demo, startup and warm-up included
COSTLY_SHARE = 0.7  # share of the time limit for the first of two targets
CHOOSING_PROMPTS = 3  # further prompts, on which the library's settings are chosen
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

    config: Config  # a configuration with one target
    plan: SpeedPlan
    assistant: Path | None = None  # folder of the library's assistant
    own_file: Path | None = None  # the target's GGUF file
    rule: TenantRule | None = None  # None: all answers are of one tenant
    to_end: bool = False  # whether answers stop at their ends
    until_s: float = math.inf  # seconds since the run began at which it ends
    facts: Mapping[str, Any] = field(default_factory=dict)  # facts of the prompts, for the report

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
    rules: Sequence[TenantRule],
    alone: bool,
    settings: SpeedSettings,
    no_arms: bool = False,
) -> list[MeasuredPair]:
    """The target of that name of each configuration, with the prompts of a file.

    rules: each is measured   alone: without the library and llama.cpp   no_arms: without fixed arms
    """
    found = []
    for label, given in configs.items():
        config = own_target(given, target)
        (served,) = config.targets.values()
        prompts = own_prompts(config, file, settings.prompts, settings.tokens)
        own_file = served.checkpoint / GGUF
        others = (GENERATE, LOOKUP, *LLAMA_CPP_ROWS, *((LLAMA_CPP_FILE,) if own_file.is_file() else ()))
        categories = tuple(prompt.category for prompt in prompts)
        ids = tuple(prompt.token_ids for prompt in prompts)
        for whose in rules:
            group = f"{label}, tenants: {whose}" if len(rules) > 1 else label
            plan = _plan(group, config, ids, settings, () if alone else others)
            pair = MeasuredPair(
                config,
                replace(plan, categories=categories if any(categories) else (), shapes=() if no_arms else plan.shapes),
                own_file=own_file if LLAMA_CPP_FILE in plan.baselines else None,
                rule=whose,
                to_end=True,
                facts=prompt_facts(file, prompts, whose),
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
    return SpeedPlan(
        name,
        prompts,
        settings.tokens,
        settings.temperatures,
        settings.repetitions,
        own_arms(config),
        baselines,
        settings.seed,
    )
