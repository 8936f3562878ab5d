"""`dendro train demo`: train the demo pair from the standard library of the Python that runs.

    python -m cluster.demo.train --minutes 90 --out demo-pair

Stages, in order: corpus and tokenizer, target, the teacher's outputs (on that text, and on text that the target writes
itself), the three drafters, measurements with the model card. A stage that is finished is skipped; one that was killed
goes on from its last state.
"""

from __future__ import annotations

import os

# Before torch is imported: idle OpenMP threads must not spin on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
import typer
from torch import Tensor

from cluster.demo.architectures import DRAFTERS, DrafterName, drafter_config, new_model, target_config
from cluster.demo.bars import stage_bar
from cluster.demo.card import model_card
from cluster.demo.checkpoints import export, load_fp32
from cluster.demo.corpus import corpus_facts, encode_corpus, train_tokenizer, training_files
from cluster.demo.measure import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    TEMPERATURES,
    DrafterFacts,
    choose_prompts,
    measure_drafter,
    measure_target,
    write_answers,
)
from cluster.demo.prompts import held_out_prompts
from drafter_service.training.loop import Budget, Progress, Recipe, Trainer, autocast, compiled
from drafter_service.training.losses import projected_loss
from drafter_service.training.rows import TokenRows
from drafter_service.training.students import StudentForward
from drafter_service.training.teacher import ROW_TOKENS, TeacherFolder, write_teacher_outputs

Stage = Literal["corpus", "target", "teacher", "mamba", "mamba2", "llama", "measure"]
STAGES: tuple[Stage, ...] = get_args(Stage)

# Of the whole time; the rest is for the corpus, the compiler and the measurements.
SHARE: dict[Stage, float] = {"target": 0.45, "teacher": 0.1, "mamba": 0.15, "mamba2": 0.13, "llama": 0.11}

TARGET_ROWS, TARGET_LENGTH = 12, 512  # of a target's training step
DRAFTER_ROWS = 8  # of a drafter's, ROW_TOKENS long
HARD_SHARE = 0.1  # of a drafter's loss; it teaches the tail that the teacher's kept log-probabilities leave out


@dataclass(frozen=True, slots=True)
class Plan:
    """One training run of the pair, as the user asked for it."""

    minutes: float
    seed: int
    out: Path
    device: torch.device

    @property
    def work(self) -> Path:
        """Everything that is not a finished checkpoint; may be deleted afterwards."""
        return self.out / ".train"

    def budget(self, stage: Stage) -> Budget:
        return Budget(seconds=60 * self.minutes * SHARE[stage])

    def tokens(self) -> np.ndarray:
        tokens: np.ndarray = np.load(self.work / "tokens.npy", mmap_mode="r")
        return tokens

    def facts(self, stage: Stage) -> dict[str, Any]:
        """What a finished stage left to say in the model card."""
        facts: dict[str, Any] = json.loads(self.done_file(stage).read_text())
        return facts

    def done_file(self, stage: Stage) -> Path:
        return self.work / f"{stage}.done.json"


def _show(report: Callable[[float, str], None]) -> Callable[[Progress], None]:
    def on_step(progress: Progress) -> None:
        report(progress.spent, f"loss {progress.loss:.3f}, {progress.tokens_per_s:,.0f} tokens/s")

    return on_step


def _corpus(plan: Plan) -> dict[str, Any]:
    with stage_bar("corpus") as report:
        report(0.0, "reading")
        files = training_files()
        report(0.1, "training the tokenizer")
        tokenizer = train_tokenizer(files)
        tokenizer.save(str(plan.work / "tokenizer.json"))
        report(0.4, "encoding")
        tokens = encode_corpus(files, tokenizer, plan.seed)
        np.save(plan.work / "tokens.npy", tokens)
        report(1.0, f"{len(tokens):,} tokens")
    return asdict(corpus_facts(files, len(tokens)))


def _target(plan: Plan) -> dict[str, Any]:
    model = new_model(target_config(), plan.seed, plan.device)
    rows = TokenRows(plan.tokens(), TARGET_ROWS, TARGET_LENGTH, plan.seed)
    forward = compiled(model.model)

    def batch_loss(step: int) -> Tensor:
        inputs, labels = (tensor.to(plan.device) for tensor in rows.batch(step))
        with autocast(plan.device):
            hidden = forward(inputs, use_cache=False).last_hidden_state
            return projected_loss(hidden, model.lm_head.weight, labels)

    recipe = Recipe(plan.budget("target"))
    trainer = Trainer(model, batch_loss, TARGET_ROWS * TARGET_LENGTH, recipe, plan.work / "target.state")
    with stage_bar("target") as report:
        trained = trainer.run(_show(report))
    export(model, plan.out / "target", plan.work / "tokenizer.json")
    return asdict(trained)


def _teacher(plan: Plan) -> dict[str, Any]:
    model = load_fp32(plan.out / "target", plan.device)
    folder = TeacherFolder(plan.work / "teacher")
    with stage_bar("teacher") as report:
        write_teacher_outputs(
            model,
            plan.tokens(),
            folder,
            plan.budget("teacher"),
            plan.seed,
            on_chunk=lambda spent, chunks: report(spent, f"{chunks} chunks"),
        )
    return {"tokens": folder.read().tokens[:, 1:].size, "own_share": folder.own_share()}


def _drafter(plan: Plan, name: DrafterName) -> dict[str, Any]:
    model = new_model(drafter_config(name), plan.seed, plan.device)
    text = TeacherFolder(plan.work / "teacher").read()
    forward = compiled(StudentForward(model))

    def batch_loss(step: int) -> Tensor:
        inputs, labels, teacher = text.batch(step, DRAFTER_ROWS, plan.seed)
        with autocast(plan.device):
            hidden = forward(inputs.to(plan.device))
            return projected_loss(
                hidden, model.lm_head.weight, labels.to(plan.device), teacher.to(plan.device), HARD_SHARE
            )

    recipe = Recipe(plan.budget(name), other_rate=3e-3)
    trainer = Trainer(model, batch_loss, DRAFTER_ROWS * ROW_TOKENS, recipe, plan.work / f"{name}.state")
    with stage_bar(name) as report:
        trained = trainer.run(_show(report))
    export(model, plan.out / name, plan.work / "tokenizer.json")
    return asdict(trained)


def _measure(plan: Plan) -> dict[str, Any]:
    """Measures what was exported, in fp32, and writes the card and the list of measuring prompts."""
    with stage_bar("measure") as report:
        cpu = torch.device("cpu")
        target = load_fp32(plan.out / "target", cpu)
        report(0.0, "choosing prompts")
        chosen = choose_prompts(target, plan.out)
        report(0.3, "writing answers")
        prompts = held_out_prompts(PROMPTS, PROMPT_TOKENS, models=plan.out)
        answers = [write_answers(target, prompts, temperature, ANSWER_TOKENS) for temperature in TEMPERATURES]
        report(0.6, "target")
        target_facts = measure_target(target, plan.out)
        drafter_facts: dict[str, DrafterFacts] = {}
        for place, name in enumerate(DRAFTERS):
            report(0.7 + 0.1 * place, name)
            drafter_facts[name] = measure_drafter(load_fp32(plan.out / name, cpu), answers, plan.out)
        stages = {stage: plan.facts(stage) for stage in STAGES if stage != "measure"}
        names = [prompt.name for prompt in prompts]
        card = model_card(stages, chosen, names, target_facts, drafter_facts, plan.seed, HARD_SHARE)
        (plan.out / "README.md").write_text(card)
        report(1.0, "card written")
    drafters = {name: asdict(facts) for name, facts in drafter_facts.items()}
    return {"prompts": asdict(chosen), "target": asdict(target_facts), "drafters": drafters}


def _run_stage(plan: Plan, stage: Stage) -> dict[str, Any]:
    match stage:
        case "corpus":
            return _corpus(plan)
        case "target":
            return _target(plan)
        case "teacher":
            return _teacher(plan)
        case "measure":
            return _measure(plan)
        case "mamba" | "mamba2" | "llama":
            return _drafter(plan, stage)


def train_demo(
    out: Path,
    minutes: float = 90,
    seed: int = 0,
    resume: bool = True,
    threads: int = 2,
    stop_after: Stage | None = None,
) -> None:
    """Train the demo pair and write it to `out`: `target`, `mamba`, `mamba2`, `llama` and a model card.

    Takes about `minutes` on any machine, on a GPU where there is one: the schedules run in time, and a faster machine
    sees more tokens. May be repeated: finished stages are skipped and a killed one goes on, unless `resume` is false,
    which begins anew. `stop_after` ends the run early after that stage. The trainer's files are in `out/.train`.
    """
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = Plan(minutes, seed, out, device)
    if not resume:
        shutil.rmtree(plan.work, ignore_errors=True)
    plan.work.mkdir(parents=True, exist_ok=True)
    (plan.work / ".gitignore").write_text("*\n")
    seed_file = plan.work / "seed"
    if seed_file.exists() and int(seed_file.read_text()) != seed:
        raise ValueError(f"{plan.work} was begun with seed {seed_file.read_text()}; begin anew with resume=False")
    seed_file.write_text(str(seed))
    for stage in STAGES:
        if not plan.done_file(stage).exists():
            facts = _run_stage(plan, stage)
            plan.done_file(stage).write_text(json.dumps(facts, indent=1) + "\n")
        if stage == stop_after:
            return


def main(
    out: Annotated[Path, typer.Option(help="Folder of the checkpoints and the model card.")] = Path("demo-pair"),
    minutes: Annotated[float, typer.Option(help="Time for the whole training.")] = 90,
    seed: Annotated[int, typer.Option(help="Of weights, order of text and sampled text.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on where a run in the same folder stopped.")] = True,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    stop_after: Annotated[Stage | None, typer.Option(help="End after this stage.")] = None,
) -> None:
    """Train the demo pair: a small Llama on Python's standard library, and three drafters distilled from it."""
    train_demo(out, minutes, seed, resume, threads, stop_after)


if __name__ == "__main__":
    typer.run(main)
