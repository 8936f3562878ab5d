"""Answers to prompts of every kind, which benches record and replay."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dendro.calls import VerifierPeer

from cluster.bench.traces import TracedAnswer, write_answer
from cluster.demo.kinds import KINDS, kind_prompts
from cluster.demo.prompts import load_tokenizer
from cluster.measure.measurement import Step
from cluster.training.acceptance import PROMPT_TOKENS


async def write_answers(
    verifier: VerifierPeer, models: Path, prompts: int, tokens: int, temperature: float, seed: int, step: Step
) -> list[TracedAnswer]:
    """The target's answers to so many prompts of each kind; kinds alternate, also in the order of a replay."""
    tokenizer = load_tokenizer(models)
    by_kind = {kind: kind_prompts(kind, prompts, PROMPT_TOKENS, tokenizer, models) for kind in KINDS}
    answers = []
    for index in range(prompts):
        for number, kind in enumerate(KINDS):
            prompt = by_kind[kind][index]
            own = seed * 1_000_003 + index * len(KINDS) + number
            answers.append(write_answer(verifier, kind, prompt.name, prompt.token_ids, temperature, own, tokens))
    written = await asyncio.gather(*answers)
    step()
    return written
