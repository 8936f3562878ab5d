"""A user's target and prompts, as benches measure them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest

from cluster.config import Config
from cluster.hub import fetched, pinned
from cluster.measure.ours import TenantRule
from cluster.prompt_files import FilePrompt, by_turns, read_prompts, that_fit, tokenizer_of

NEVER_SLOWER, FIXED_ARM_BAR = 0.98, 0.97
"""Least ratios of the policy's tokens a second: to those of `off`, and to those of the best fixed arm."""


def own_target(config: Config, name: str) -> Config:
    """The configuration, in folders of this machine, with the target of that name alone and its drafters; the first
    target where the name is empty. The prefix cache is off: all ways answer the same prompts."""
    config = fetched(pinned(config))
    name = config.target_named(name)
    served = config.targets[name].model_copy(update={"share_prefixes": False})
    drafters = {drafter: config.drafters[drafter] for drafter in config.drafters_of(name)}
    return config.model_copy(update={"targets": {name: served}, "drafters": drafters})


def own_prompts(config: Config, file: Path, count: int, tokens: int) -> list[FilePrompt]:
    """Take up to `count` prompts of a file, as many of each category, for answers of `tokens` tokens by the one target.

    Raises BadRequest, naming the option or the file's line.
    """
    ((name, served),) = config.targets.items()
    if tokens > config.router.max_new_tokens:
        raise BadRequest("tokens", f"{tokens}; router.max_new_tokens is {config.router.max_new_tokens}")
    prompts = read_prompts(file, tokenizer_of(served, name))
    return by_turns(that_fit(prompts, served.max_length - tokens))[:count]


def own_arms(config: Config) -> tuple[str, ...]:
    """The arms of the one target but `off`, as requests name them."""
    (target,) = config.targets
    named = config.names_drafters(target)
    return tuple(dict.fromkeys(arm.name(named) for arm in config.arms_of(target) if not arm.off))


def prompt_facts(file: Path, prompts: Sequence[FilePrompt], rule: TenantRule) -> dict[str, Any]:
    """Facts of prompts for a report."""
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    return {"prompt_file": file.name, "shortest_prompt": shortest, "tenants": str(rule)}
