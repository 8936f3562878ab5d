"""Drafters of a demo target on the held-out prompts: `python -m cluster.demo.compare target OWN_DRAFTER ...`.

Each is measured by the same replay of the same answers as the drafters of the demo's card, beside the bundled ones, and
as it was before its training: with random layers, and rows from the target's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel

from cluster.config import DEMO_MODELS
from cluster.demo.architectures import DRAFTERS, TargetName
from cluster.demo.measure import answers_to
from cluster.demo.prompts import held_out_prompts
from cluster.training.acceptance import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    SHAPES,
    TEMPERATURES,
    Acceptance,
    measure_acceptance,
    shape_name,
)
from cluster.training.card import acceptance_table
from cluster.training.checkpoints import load_fp32
from cluster.training.models import principal_rows, set_rows
from drafter_service.training.sizes import new_model

CPU = torch.device("cpu")


def compare(target: TargetName, drafters: Iterable[Path], models: Path = DEMO_MODELS) -> dict[str, Acceptance]:
    """Measure acceptance, by drafter: the bundled drafters, then each given one before and after its training."""
    teacher = load_fp32(models / target, CPU)
    prompts = held_out_prompts(PROMPTS, PROMPT_TOKENS, models=models)
    answers = [answers_to(teacher, prompts, temperature, ANSWER_TOKENS) for temperature in TEMPERATURES]
    candidates: dict[str, PreTrainedModel] = {name: load_fp32(models / name, CPU) for name in DRAFTERS}
    for folder in drafters:
        trained = load_fp32(folder, CPU)
        candidates[f"{folder.name}, before"] = before = new_model(trained.config, 0, CPU).eval()
        set_rows(before, principal_rows(teacher.get_output_embeddings().weight, trained.config.hidden_size))
        candidates[f"{folder.name}, after"] = trained
    return {name: measure_acceptance(model, answers) for name, model in candidates.items()}


def shares(found: Mapping[str, Acceptance], beside: str) -> dict[str, float]:
    """Emitted per round of each drafter as a share of that of the one named `beside`: the smallest over temperatures
    and shapes."""
    return {
        name: min(
            facts.emitted[temperature][shape] / found[beside].emitted[temperature][shape]
            for temperature in facts.emitted
            for shape in map(shape_name, SHAPES)
        )
        for name, facts in found.items()
    }


def main(
    target: Annotated[str, typer.Argument(help="target or target_mamba2.")],
    drafters: Annotated[list[Path], typer.Argument(help="Folders of checkpoints that `dendro train drafter` wrote.")],
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
) -> None:
    """Emitted per round of drafters of a demo target on the demo's held-out prompts, as a Markdown table."""
    torch.set_num_threads(threads)
    name: TargetName = "target_mamba2" if target == "target_mamba2" else "target"
    if name != target:
        raise typer.BadParameter(f"{target!r} is no target of the demo", param_hint="TARGET")
    found = compare(name, drafters)
    print(acceptance_table(found))
    for drafter, share in shares(found, "mamba2").items():
        print(f"{drafter}: at least {share:.3f} of mamba2's, over temperatures and shapes")


if __name__ == "__main__":
    typer.run(main)
