"""`dendro train demo`: train the demo pair on the standard library of the running Python.

    python -m cluster.demo.train --minutes 120 --out demo-pair

Stages, in order: corpus and tokenizer, target, the teacher's outputs (on that text, and on text that the target writes
itself), the three drafters, a second target that is a Mamba-2, measurements with the model card. A finished stage is
skipped; a killed one is resumed from its last saved state.

    python -m cluster.demo.train --minutes 60 --out demo-pair --only target_mamba2

trains one model alone, for all these minutes, from the folder's output of earlier stages: this one grows from `mamba2`.
"""

from __future__ import annotations

import os

# Set before torch is imported: idle OpenMP threads must not spin on cores that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from transformers import Mamba2ForCausalLM

from cluster.demo.architectures import DRAFTERS, TARGETS, DrafterName, TargetName, drafter_config, target_config
from cluster.demo.card import model_card
from cluster.demo.corpus import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    VOCABULARY,
    corpus_facts,
    encode_corpus,
    train_tokenizer,
    training_files,
)
from cluster.demo.growth import grow
from cluster.demo.measure import DrafterFacts, TargetFacts, answers_to, choose_prompts, measure_drafter, measure_target
from cluster.demo.prompts import held_out_prompts
from cluster.training.acceptance import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    TEMPERATURES,
    Acceptance,
    measure_acceptance,
)
from cluster.training.bars import shown, stage_bar
from cluster.training.checkpoints import export, load_fp32
from cluster.training.stages import StageFolder, only_run_in
from drafter_service.training.batches import DRAFTER_ROWS, HARD_SHARE, distillation_loss, text_loss
from drafter_service.training.labels import LabelledRows, TeacherFolder
from drafter_service.training.loop import Budget, Recipe, Trainer
from drafter_service.training.rows import TokenRows
from drafter_service.training.sizes import new_model
from drafter_service.training.teacher import ROW_TOKENS, Labeller, TeacherText, write_teacher_outputs

Stage = Literal["corpus", "target", "teacher", "mamba", "mamba2", "llama", "target_mamba2", "measure"]
STAGES: tuple[Stage, ...] = get_args(Stage)

# Shares of the whole time; the rest is for the corpus, the compiler and the measurements.
SHARE: dict[Stage, float] = {
    "target": 0.34,
    "teacher": 0.075,
    "mamba": 0.11,
    "mamba2": 0.1,
    "llama": 0.08,
    "target_mamba2": 0.24,
}

# Rows of a target's training step. The second target has less time, in which it takes more and smaller steps.
TARGET_ROWS: dict[TargetName, int] = {"target": 12, "target_mamba2": 4}
TARGET_LENGTH = 512


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """One training run of the pair, as requested."""

    minutes: float
    seed: int
    out: Path
    device: torch.device
    only: Stage | None = None  # this stage alone gets all the minutes

    @property
    def work(self) -> Path:
        """Everything that is not a finished checkpoint; may be deleted afterwards."""
        return self.out / ".train"

    def budget(self, stage: Stage) -> Budget:
        share = 1.0 if stage == self.only else SHARE[stage]
        return Budget(seconds=60 * self.minutes * share)

    def tokens(self) -> np.ndarray:
        tokens: np.ndarray = np.load(self.work / "tokens.npy", mmap_mode="r")
        return tokens

    def tokenizer_files(self) -> tuple[Path, Path]:
        return self.work / "tokenizer.json", self.work / "tokenizer_config.json"


def _corpus(plan: TrainingPlan) -> dict[str, Any]:
    with stage_bar("corpus") as report:
        report(0.0, "reading")
        files = training_files()
        report(0.1, "training the tokenizer")
        # A model trained alone shares the vocabulary of the models in the folder.
        existing = plan.out / "target" / "tokenizer.json"
        joins = plan.only is not None and existing.exists()
        tokenizer = Tokenizer.from_file(str(existing)) if joins else train_tokenizer(files)
        file, config_file = plan.tokenizer_files()
        tokenizer.save(str(file))
        describe = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
        config_file.write_text(json.dumps(describe, indent=2) + "\n")
        report(0.4, "encoding")
        tokens = encode_corpus(files, tokenizer, plan.seed)
        np.save(plan.work / "tokens.npy", tokens)
        report(1.0, f"{len(tokens):,} tokens")
    return asdict(corpus_facts(files, len(tokens)))


def _target(plan: TrainingPlan, name: TargetName) -> dict[str, Any]:
    model = new_model(target_config(name), plan.seed, plan.device)
    if isinstance(model, Mamba2ForCausalLM):
        drafter = load_fp32(plan.out / "mamba2", plan.device)
        assert isinstance(drafter, Mamba2ForCausalLM)
        grow(drafter, model)
    row_count = TARGET_ROWS[name]
    batch_loss = text_loss(model, TokenRows(plan.tokens(), row_count, TARGET_LENGTH, plan.seed), plan.device)
    recipe = Recipe(plan.budget(name))
    if name == "target_mamba2":  # the rates for random weights would destroy the copied ones
        recipe = Recipe(plan.budget(name), matrix_rate=2e-3, other_rate=1e-3)
    trainer = Trainer(model, batch_loss, row_count * TARGET_LENGTH, recipe, plan.work / f"{name}.state")
    with stage_bar(name) as report:
        trained = trainer.run(shown(report))
    export(model, plan.out / name, plan.tokenizer_files())
    return asdict(trained)


def _teacher(plan: TrainingPlan) -> dict[str, Any]:
    model = load_fp32(plan.out / "target", plan.device)
    folder = TeacherFolder(plan.work / "teacher")
    with stage_bar("teacher") as report:
        write_teacher_outputs(
            Labeller(model, TeacherText(plan.tokens(), VOCABULARY, frozenset({END_OF_TEXT_ID})), plan.seed),
            folder,
            plan.budget("teacher"),
            on_chunk=lambda spent, chunks: report(spent, f"{chunks} chunks"),
        )
    return {"tokens": folder.labelled(), "own_share": folder.own_share()}


def _drafter(plan: TrainingPlan, name: DrafterName) -> dict[str, Any]:
    model = new_model(drafter_config(name), plan.seed, plan.device)
    rows = LabelledRows(TeacherFolder(plan.work / "teacher").read(), ROW_TOKENS, ROW_TOKENS + 1)
    batch_loss = distillation_loss(model, rows, plan.seed, plan.device)
    recipe = Recipe(plan.budget(name), other_rate=3e-3)
    trainer = Trainer(model, batch_loss, DRAFTER_ROWS * ROW_TOKENS, recipe, plan.work / f"{name}.state")
    with stage_bar(name) as report:
        trained = trainer.run(shown(report))
    export(model, plan.out / name, plan.tokenizer_files())
    return asdict(trained)


def _measure(plan: TrainingPlan, done: StageFolder) -> dict[str, Any]:
    """Measure the exported models in fp32; write the card and the list of measuring prompts."""
    with stage_bar("measure") as report:
        cpu = torch.device("cpu")
        report(0.0, "choosing prompts")
        choose_prompts(load_fp32(plan.out / "target", cpu), plan.out)
        prompts = held_out_prompts(PROMPTS, PROMPT_TOKENS, models=plan.out)
        drafters = {name: load_fp32(plan.out / name, cpu) for name in DRAFTERS}
        target_facts: dict[str, TargetFacts] = {}
        acceptance: dict[str, dict[str, Acceptance]] = {}
        for place, target_name in enumerate(TARGETS):
            report(0.1 + 0.4 * place, target_name)
            target = load_fp32(plan.out / target_name, cpu)
            target_facts[target_name] = measure_target(target, plan.out)
            report(0.3 + 0.4 * place, f"{target_name}'s answers")
            answers = [answers_to(target, prompts, temperature, ANSWER_TOKENS) for temperature in TEMPERATURES]
            acceptance[target_name] = {name: measure_acceptance(model, answers) for name, model in drafters.items()}
        report(0.9, "drafters")
        drafter_facts: dict[str, DrafterFacts] = {
            name: measure_drafter(model, plan.out) for name, model in drafters.items()
        }
        stages = {stage: done.facts(stage) for stage in STAGES if stage != "measure"}
        names = [prompt.name for prompt in prompts]
        card = model_card(stages, names, target_facts, drafter_facts, acceptance, plan.seed, HARD_SHARE)
        (plan.out / "README.md").write_text(card)
        report(1.0, "card written")
    return {
        "targets": {name: asdict(facts) for name, facts in target_facts.items()},
        "drafters": {name: asdict(facts) for name, facts in drafter_facts.items()},
        "acceptance": {
            target_name: {name: asdict(facts) for name, facts in of_drafters.items()}
            for target_name, of_drafters in acceptance.items()
        },
    }


def _run_stage(plan: TrainingPlan, done: StageFolder, stage: Stage) -> dict[str, Any]:
    match stage:
        case "corpus":
            return _corpus(plan)
        case "target" | "target_mamba2":
            return _target(plan, stage)
        case "teacher":
            return _teacher(plan)
        case "measure":
            return _measure(plan, done)
        case "mamba" | "mamba2" | "llama":
            return _drafter(plan, stage)


def train_demo(
    out: Path,
    minutes: float = 120,
    seed: int = 0,
    resume: bool = True,
    threads: int = 2,
    stop_after: Stage | None = None,
    only: Stage | None = None,
) -> None:
    """Train the demo pair and write it to `out`: both targets, `mamba`, `mamba2`, `llama` and a model card.

    Uses a GPU if there is one. Takes about `minutes` on any machine, as schedules are by time: a faster machine sees
    more tokens. May be repeated: finished stages are skipped and a killed one is resumed, unless `resume` is false,
    which begins anew. `stop_after` ends the run after that stage; `only` runs `corpus` and that stage, for all the
    minutes, from the contents of `out`. The trainer's files are in `out/.train`. Raises BadRequest for a folder that
    was begun with another seed, or in which another process trains.
    """
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = TrainingPlan(minutes, seed, out, device, only)
    with only_run_in(plan.work):
        done = StageFolder(plan.work, {"seed": seed}, resume)
        for stage in STAGES if only is None else ("corpus", only):
            done.run(stage, partial(_run_stage, plan, done, stage))
            if stage == stop_after:
                return


def main(
    out: Annotated[Path, typer.Option(help="Folder of the checkpoints and the model card.")] = Path("demo-pair"),
    minutes: Annotated[float, typer.Option(help="Time for the whole training.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed of weights, order of text and sampled text.")] = 0,
    resume: Annotated[bool, typer.Option(help="Resume a stopped run in the same folder.")] = True,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    stop_after: Annotated[Stage | None, typer.Option(help="End after this stage.")] = None,
    only: Annotated[Stage | None, typer.Option(help="Train this model alone, for all the minutes.")] = None,
) -> None:
    """Train the demo pair: a small Llama on Python's standard library, three drafters distilled from it, a Mamba-2."""
    train_demo(out, minutes, seed, resume, threads, stop_after, only)


if __name__ == "__main__":
    typer.run(main)
