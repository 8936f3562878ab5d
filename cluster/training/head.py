"""An acceptance head for a drafter and its target: the target answers, the head learns which candidates come true.

`train_head` runs the stages in order. A finished one is skipped and a killed one resumed when it is called again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dendro.errors import BadRequest
from tree_kernels.acceptance_head import log_chances
from tree_kernels.warp import Warp
from tree_layers.checkpoint import read_facts, weights_fingerprint

from cluster.router.tokenizer import CheckpointTokenizer
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS
from cluster.training.bars import Report, shown, stage_bar
from cluster.training.data import DataFolder, TokenStream, Written, held_out_prompts
from cluster.training.head_card import head_card
from cluster.training.head_plan import HeadPlan
from cluster.training.models import load_teacher
from cluster.training.stages import StageFolder, only_run_in
from drafter_service.acceptance_head import VERSION, HeadFacts, write_head
from drafter_service.confidence import CANDIDATES
from drafter_service.models import DrafterModel, load_model
from drafter_service.options import DTYPES
from drafter_service.training.examples import ExampleFolder, Teacher, examples_of, write_answers
from drafter_service.training.heads import (
    BATCH_ROWS,
    DEPTHS,
    HeadModel,
    fit_calibration,
    head_loss,
    online_chances,
    quality_of,
)
from drafter_service.training.loop import Budget, Recipe, Trained, Trainer
from drafter_service.training.saving import replacing

CHUNK_PROMPTS = 24  # prompts of a chunk of examples, which a kill loses
HELD_OUT_PROMPTS = 24  # prompts of each kind for the calibration, and as many for the report
EPOCHS = 6
"""How often each row is seen. More often, the head learns the rows by heart: a loss on other texts grows."""
CARD_FILE = "acceptance_head.md"
SPLITS = ("calibration", "report")


class HeadRun:
    """The stages of a plan. Models are loaded when a stage needs them."""

    def __init__(self, plan: HeadPlan, done: StageFolder, fingerprint: str) -> None:
        self.plan = plan
        self.done = done
        self.fingerprint = fingerprint

    @cached_property
    def teacher(self) -> Teacher:
        plan = self.plan
        model = load_teacher(plan.target_name, plan.target, plan.facts, plan.device)
        return Teacher(model, plan.facts.vocabulary, plan.facts.end_ids)

    @cached_property
    def drafter(self) -> DrafterModel:
        drafter = self.plan.drafter
        given = drafter.checkpoint, DTYPES[drafter.dtype], self.plan.device, drafter.tokenizer, drafter.form
        return load_model(*given)[0]

    def data(self) -> dict[str, Any]:
        """The tokens of every kind."""
        plan, found = self.plan, dict[str, Any]()
        tokenizer = CheckpointTokenizer(plan.target.tokenizer_folder, plan.facts.tokenizer)
        least = (CHUNK_PROMPTS + 1) * PROMPT_TOKENS
        with stage_bar("data") as report:
            for number, (name, source) in enumerate(plan.kinds.items()):
                end, held_out = min(plan.facts.end_ids, default=None), 2 * HELD_OUT_PROMPTS * PROMPT_TOKENS
                written = self._data(name).write(
                    source, tokenizer, end, held_out, partial(_report_data, report, number)
                )
                if written.train <= least or written.held_out < 2 * PROMPT_TOKENS:
                    raise BadRequest(
                        "--data",
                        f"{name} has {written.train:,} tokens, and {written.held_out:,} held out; more than {least:,} "
                        f"and {2 * PROMPT_TOKENS} are needed: give more text",
                    )
                found[name] = {"train": written.train, "held_out": written.held_out}
            report(1.0, f"{sum(each['train'] for each in found.values()):,} tokens")
        return found

    def held_out(self) -> dict[str, Any]:
        """Examples on held-out prompts, one chunk per kind for the calibration and one for the report."""
        total = len(SPLITS) * len(self.plan.kinds)
        with stage_bar("held out") as report:
            for place, split in enumerate(SPLITS):
                folder = self._held_out(split)
                for kind in list(self.plan.kinds)[len(folder) :]:
                    report((place * len(self.plan.kinds) + len(folder)) / total, f"{kind}, for the {split}")
                    stream = self._data(kind).read("held_out")
                    prompts = held_out_prompts(stream, 2 * HELD_OUT_PROMPTS, PROMPT_TOKENS)[place :: len(SPLITS)]
                    self._append(folder, prompts, ("held out", split, kind))
            report(1.0, f"{total} chunks")
        return {"rows": {split: len(self._held_out(split).read()) for split in SPLITS}}

    def examples(self) -> dict[str, Any]:
        """Examples to train on, of the kinds in turn."""
        plan, folder, kinds = self.plan, self._examples, list(self.plan.kinds)
        budget = Budget(None if plan.minutes is None else 60 * plan.minutes, plan.chunks)
        with stage_bar("examples") as report:
            spent = folder.seconds()
            while budget.spent(spent, len(folder)) < 1 or len(folder) < 1:
                chunk = len(folder)
                kind = kinds[chunk % len(kinds)]
                rng = np.random.default_rng((plan.seed, chunk))
                spent += self._append(folder, prompts_of(self._data(kind).read("train"), rng), ("train", chunk))
                report(min(budget.spent(spent, len(folder)), 1.0), f"{len(folder) * CHUNK_PROMPTS} answers")
        rows = folder.read()
        return {"rows": len(rows), "answers": len(folder) * CHUNK_PROMPTS, "drafted": int(rows.drafted.sum())}

    def train(self) -> dict[str, Any]:
        plan, rows = self.plan, self._examples.read()
        steps = max(1, EPOCHS * len(rows) // BATCH_ROWS)
        recipe = Recipe(Budget(steps=steps), matrix_rate=2e-3, other_rate=2e-3)
        model = self._model()
        loss = head_loss(model, rows, plan.rejection_weight, plan.seed)
        trainer = Trainer(model, loss, BATCH_ROWS, recipe, self._state)
        with stage_bar("train") as report:
            trained: Trained = trainer.run(shown(report))
        return asdict(trained)

    def export(self) -> dict[str, Any]:
        """Round, calibrate, report, and write the head with its card."""
        plan = self.plan
        with stage_bar("export") as report:
            model = self._model()
            model.load_state_dict(torch.load(self._state, map_location="cpu", weights_only=True)["model"])
            model.round_blocks()
            warm = self._held_out("calibration").read()
            report(0.2, "calibrating it")
            with torch.inference_mode():
                outputs = model.outputs(warm)
            calibration = fit_calibration(outputs.clone(), warm)
            qualities: dict[str, dict[str, Any]] = {}
            for number, kind in enumerate([*plan.kinds, "all"]):
                report(0.3 + 0.6 * number / (len(plan.kinds) + 1), f"measuring it: {kind}")
                rows = self._held_out("report").read(slice(None) if kind == "all" else slice(number, number + 1))
                rows = rows[rows.drafted]
                with torch.inference_mode():
                    chances = log_chances(model.outputs(rows), calibration, rows.scores, rows.depth, CANDIDATES)
                qualities[kind] = {
                    "head": asdict(quality_of(chances, rows)),
                    "calibrated": asdict(quality_of(online_chances(warm[warm.drafted], rows), rows)),
                }
            facts = HeadFacts(
                version=VERSION,
                drafter=self.fingerprint,
                width=self.drafter.hidden_size,
                vocabulary=self.drafter.vocabulary,
                blocks=plan.blocks,
                tied=plan.tied,
                depths=DEPTHS,
            )
            plan.out.mkdir(parents=True, exist_ok=True)
            with replacing(plan.file) as partial_file:
                write_head(partial_file, facts, model.tensors(calibration))
            made = {"bytes": plan.file.stat().st_size, "qualities": qualities}
            stages = {stage: self.done.facts(stage) for stage in ("data", "held_out", "examples", "train")}
            with replacing(plan.out / CARD_FILE) as partial_file:
                partial_file.write_text(head_card(plan, facts, stages, made))
            report(1.0, f"written to {plan.file}")
        return made

    def _model(self) -> HeadModel:
        torch.manual_seed(self.plan.seed)
        return HeadModel(self.drafter.hidden_size, self.plan.blocks, self.plan.tied, self.drafter.embed)

    def _append(self, folder: ExampleFolder, prompts: np.ndarray, name: tuple[Any, ...]) -> float:
        """Add the examples of one chunk; its noise depends on the seed and the chunk's name. Returns the seconds that
        it took."""
        started = time.monotonic()
        seed = int(np.random.default_rng((self.plan.seed, *map(ord, repr(name)))).integers(1 << 31))
        texts, drawn = write_answers(self.teacher, torch.from_numpy(prompts), ANSWER_TOKENS, self.plan.law, seed)
        rows = examples_of(self.drafter, texts, drawn, self.plan.law, self.teacher, seed)
        took = time.monotonic() - started
        folder.append(rows, took)
        return took

    def _data(self, kind: str) -> DataFolder:
        number = list(self.plan.kinds).index(kind)
        return DataFolder(self.plan.work / "data" / f"{number:02d}", self.plan.facts.vocabulary)

    def _held_out(self, split: str) -> ExampleFolder:
        return ExampleFolder(self.plan.work / split)

    @property
    def _examples(self) -> ExampleFolder:
        return ExampleFolder(self.plan.work / "examples")

    @property
    def _state(self) -> Path:
        return self.plan.work / "train.state"


def _report_data(report: Report, number: int, so_far: Written) -> None:
    report(0.0, f"kind {number + 1}: {so_far.train:,} tokens")


def prompts_of(stream: TokenStream, rng: np.random.Generator) -> np.ndarray:
    """Random prompts of a stream, [CHUNK_PROMPTS, PROMPT_TOKENS] int64: text before answers of conversations where
    there are any."""
    usable = stream.answers[stream.answers >= PROMPT_TOKENS]
    ends = usable if len(usable) else np.arange(PROMPT_TOKENS, len(stream.tokens))
    chosen = [stream.tokens[end - PROMPT_TOKENS : end] for end in rng.choice(ends, CHUNK_PROMPTS)]
    return np.stack(chosen).astype(np.int64)


def train_head(plan: HeadPlan, resume: bool = True, stop_after: str | None = None) -> HeadRun:
    """Train a head and write it to `plan.out`, with a card.

    May be repeated: finished stages are skipped and a killed one is resumed, unless `resume` is false, which begins
    anew. The export is done again where its result is gone. `stop_after` ends the run after that stage. Raises
    BadRequest, naming the option or field, also while another process trains there; NotSaved on a full disk.
    """
    facts = read_facts(plan.drafter.checkpoint, plan.drafter.tokenizer)
    if facts.draft is not None:  # examples have the target's ids alone
        reason = f"{plan.drafter_name} {facts.draft}; heads are trained for drafters that guess all"
        raise BadRequest("--drafter", reason)
    fingerprint = weights_fingerprint(plan.drafter.checkpoint)
    settings = plan.settings(fingerprint)
    if plan.file.exists() and not (resume and StageFolder.begun(plan.work)):
        raise BadRequest("--out", f"{plan.file} is there already; name another folder")
    with only_run_in(plan.work):
        run = HeadRun(plan, StageFolder(plan.work, settings, resume), fingerprint)
        if not plan.file.exists():
            run.done.forget("export")
        works: dict[str, Callable[[], dict[str, Any]]] = {
            "data": run.data,
            "held_out": run.held_out,
            "examples": run.examples,
            "train": run.train,
            "export": run.export,
        }
        for stage, work in works.items():
            run.done.run(stage, work)
            if stage == stop_after:
                break
    return run


def warps_of(temperatures: tuple[float, ...], top_k: int, top_p: float) -> tuple[Warp, ...]:
    """The laws of requests with these options. Raises BadRequest, naming the option."""
    found = []
    for temperature in temperatures:
        try:
            found.append(Warp(temperature, top_k, top_p) if temperature else Warp())
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            raise BadRequest(f"--{field.replace('_', '-')}", reason) from error
    return tuple(found)
