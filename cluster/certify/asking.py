"""The requests of `dendro certify`, sent to a remote cluster or to engines in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from dendro.answer import Completion
from dendro.client import Asking
from dendro.errors import EngineFailed
from dendro.speculation import Speculation

from cluster.measure.measurement import Step


@dataclass(frozen=True, slots=True)
class SamplingLaw:
    """The temperature, top-k and top-p that warp the target's law."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __str__(self) -> str:
        words = [f"temperature {self.temperature:g}"]
        words += [f"top-k {self.top_k}"] if self.top_k else []
        words += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join(words)


async def completion(
    service: Asking,
    prompt: Sequence[int],
    law: SamplingLaw,
    seed: int,
    speculation: Speculation | str,
    tokens: int,
    model: str = "",
    stop: Sequence[str] = (),
) -> Completion:
    """One answer, of exactly `tokens` tokens if no stop string ends it. Raises EngineFailed if its statistics
    contradict each other."""
    done = await service.generate_text(
        prompt,
        model=model,
        temperature=law.temperature,
        top_k=law.top_k,
        top_p=law.top_p,
        seed=seed,
        speculation=speculation,
        max_new_tokens=tokens,
        ignore_end=True,
        stop=stop,
    )
    if wrong := done.complete.speculation.contradictions:
        raise EngineFailed(f"{speculation}: an answer's statistics contradict each other: {'; '.join(wrong)}")
    return done


async def answers(
    service: Asking,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    law: SamplingLaw,
    speculation: Speculation | str,
    tokens: int,
    step: Step,
    at_once: int = 1,
    model: str = "",
) -> list[Completion]:
    """One answer to each (prompt, seed), `at_once` of them at a time."""
    slots = asyncio.Semaphore(at_once)

    async def one(prompt: Sequence[int], seed: int) -> Completion:
        async with slots:
            done = await completion(service, prompt, law, seed, speculation, tokens, model)
        step()
        return done

    asked = [asyncio.ensure_future(one(prompt, seed)) for prompt, seed in zip(prompts, seeds, strict=True)]
    try:
        return await asyncio.gather(*asked)
    finally:
        for each in asked:  # no further request is sent once one failed
            each.cancel()
