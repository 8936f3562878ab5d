"""A drafter for one target: tokenize the data, let the target answer and label it, distil, measure, export.

`train_drafter` runs the stages in order. A finished one is skipped and a killed one resumed when it is called again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from dendro.errors import BadRequest
from torch import Tensor
from transformers import PreTrainedModel
from tree_layers.checkpoint import read_facts

from cluster.drafter_figures import figures_of, write_figures
from cluster.hub import READ_FOR_TOKENIZER
from cluster.pairing import fit_of
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.training import lockstep
from cluster.training.acceptance import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    TEMPERATURES,
    Answers,
    measure_acceptance,
    measure_own_answers,
    write_equal_answers,
)
from cluster.training.answering import (
    TEXTS,
    PromptOrder,
    answers_in,
    chat_frame,
    write_answers,
)
from cluster.training.bars import Report, shown, stage_bar
from cluster.training.card import drafter_card, millions
from cluster.training.checkpoints import export, load_fp32
from cluster.training.data import PARTS, DataFolder, held_out_prompts
from cluster.training.models import load_teacher, new_student, principal_rows, student_from
from cluster.training.plan import DrafterPlan
from cluster.training.stages import StageFolder, only_run_in
from cluster.training.transplant import Transplant
from drafter_service.training.batches import distillation_loss, text_loss
from drafter_service.training.labels import LabelledRows, TeacherFolder
from drafter_service.training.loop import Budget, Recipe, Trained, Trainer
from drafter_service.training.rows import ALONE, Share, TokenRows
from drafter_service.training.saving import replacing
from drafter_service.training.sizes import StudentSize
from drafter_service.training.students import StudentForward
from drafter_service.training.teacher import (
    OWN_TEXT_EVERY,
    Labeller,
    LiveRows,
    TeacherText,
    rows_within,
    write_teacher_outputs,
)
from drafter_service.training.vocabulary import draft_embedding, most_frequent

TRAINED = ("data", "teacher", "answers", "pretrain", "distil")
"""The stages before the last, `export`."""
CHUNK_ROWS = 64  # most rows of a chunk of the teacher, which a kill loses
CHUNK_S = {"disk": 40.0, "fly": 10.0}
"""Seconds that a chunk of the teacher may take. On the fly a resumed run labels a group of chunks again, after what was
trained since the last save."""
MEASURED_CHUNKS = 2
"""Chunks of the target's answers to held-out prompts, on which a drafter is measured."""
HELD_OUT_TOKENS = 8 * PROMPT_TOKENS  # least tokens of the held-out part
NO_MEMORY = "can't allocate memory"
"""Words in the RuntimeError of torch's allocator on a CPU."""
LOSS_ROWS = 16  # rows of held-out text
CONTINUED = 0.25
"""Learning rates of a model that was trained before, as a share of a new one's, which would destroy what it knows."""
TUNED_WIDTH = 176
"""The width at which the learning rates were tuned; they fall with the square root of the width."""


class DrafterRun:
    """The stages of a plan, for one of the processes that train together. Models are loaded when a stage needs them."""

    def __init__(self, plan: DrafterPlan, done: StageFolder, processes: Accelerator | None) -> None:
        self.plan = plan
        self.done = done
        self.processes = processes
        self.share = ALONE if processes is None else Share(processes.process_index, processes.num_processes)
        self.data_folder = DataFolder(plan.work / "data", plan.facts.vocabulary)
        self.teacher_folder = TeacherFolder(plan.work / "teacher")
        self.measured_folder = TeacherFolder(plan.work / "measured")

    @cached_property
    def target(self) -> PreTrainedModel:
        return load_teacher(self.plan.target_name, self.plan.target, self.plan.facts, self.plan.device)

    @cached_property
    def transplant(self) -> Transplant | None:
        """Transplant of the vocabulary of the checkpoint to continue from; None if none is needed."""
        plan = self.plan
        return None if plan.start is None else plan.start.transplant(plan.facts, plan.target.tokenizer_folder)

    def student(self) -> PreTrainedModel:
        """The drafter before its training."""
        plan = self.plan
        if plan.start is not None:
            return student_from(plan.start, plan.facts, self.transplant, plan.seed, plan.device)
        assert plan.size is not None
        rows, guessed = self._rows(plan.size), self._guessed()
        return new_student(plan.kind, plan.size, plan.facts, rows, guessed, plan.seed, plan.device)

    def _guessed(self) -> np.ndarray | None:
        """The tokens that the drafter guesses, chosen once by the labels; None: all."""
        plan, file = self.plan, self.plan.work / "vocabulary.npy"
        if plan.vocabulary is None or plan.vocabulary >= plan.facts.vocabulary:
            return None
        if not file.exists():
            chosen = most_frequent(
                self.teacher_folder.read(), plan.facts.vocabulary, plan.vocabulary, plan.facts.end_ids
            )
            with replacing(file) as partial, partial.open("wb") as stream:
                np.save(stream, chosen)
        return np.asarray(np.load(file))

    def _rows(self, size: StudentSize) -> Tensor:
        """Embedding rows of a new drafter's tokens, made from rows of the target's head. They are kept in a file, so
        that the target is not loaded again."""
        file = self.plan.work / "rows.npy"
        if not file.exists():
            head = self.target.get_output_embeddings().weight
            assert isinstance(head, Tensor)
            with replacing(file) as partial, partial.open("wb") as stream:
                np.save(stream, principal_rows(head[: self.plan.facts.vocabulary], size.width).cpu().numpy())
        return torch.from_numpy(np.load(file))

    def data(self) -> dict[str, Any]:
        plan = self.plan
        tokenizer = CheckpointTokenizer(plan.target.tokenizer_folder, plan.facts.tokenizer)
        files = plan.source.files()
        size = sum(file.stat().st_size for file in files)
        with self._bar("data") as report:
            written = self.data_folder.write(
                plan.source,
                tokenizer,
                min(plan.facts.end_ids, default=None),
                HELD_OUT_TOKENS,
                lambda so_far: report(min(so_far.characters / max(size, 1), 0.99), f"{so_far.train:,} tokens"),
            )
            report(1.0, f"{written.train:,} tokens, {written.held_out:,} held out")
        least = (plan.rows + 2) * plan.row_tokens
        if written.train <= least or written.held_out < PROMPT_TOKENS:
            named = ", ".join(map(str, plan.source.paths))
            raise BadRequest(
                "--data",
                f"{named} has {written.train:,} tokens, and {written.held_out:,} held out; more than {least:,} and "
                f"{PROMPT_TOKENS} are needed: give more text, or a smaller --row-tokens",
            )
        return {"files": len(files), "bytes": size, **asdict(written)}

    def answers(self) -> dict[str, Any]:
        """The target's answers to held-out prompts, and what the untrained drafter guesses of them."""
        plan = self.plan
        if self._answers_prompts:
            self._write_answers("answers", "held_out", self.measured_folder, Budget(steps=MEASURED_CHUNKS))
            return {"prompts": MEASURED_CHUNKS * TEXTS, **self._measured(self.student())}
        prompts = held_out_prompts(self.data_folder.read("held_out"), PROMPTS, PROMPT_TOKENS)
        texts, vocabulary = torch.from_numpy(prompts), plan.facts.vocabulary
        found = []
        with self._bar("answers") as report:
            for place, temperature in enumerate(TEMPERATURES):
                report(place / (len(TEMPERATURES) + 1), f"temperature {temperature:g}")
                found.append(
                    write_equal_answers(self.target, texts, temperature, ANSWER_TOKENS, vocabulary, plan.facts.end_ids)
                )
            with replacing(self._answers_file) as partial_file, partial_file.open("wb") as stream:
                np.save(stream, torch.stack([each.texts for each in found]).numpy())
            report(len(TEMPERATURES) / (len(TEMPERATURES) + 1), "the drafter before")
            before = self._measured(self.student())
            report(1.0, f"{len(prompts)} prompts")
        return {"prompts": len(prompts), **before}

    def teacher(self) -> dict[str, Any]:
        plan = self.plan
        if plan.labels == "fly":
            return {}
        if self._answers_prompts:
            if plan.device.type == "cpu":
                budget = plan.length.teacher(TEXTS, plan.rows)
                self._write_answers("teacher", "train", self.teacher_folder, budget)
            else:
                self._write_conversations(plan.length.teacher(lockstep.TEXTS, plan.rows))
            return {"labelled": self.teacher_folder.labelled(), "own_share": self.teacher_folder.own_share()}
        labeller = self._labeller()
        chunk_tokens = labeller.text.chunk_rows * plan.row_tokens
        with self._bar("teacher") as report:
            write_teacher_outputs(
                labeller,
                self.teacher_folder,
                plan.length.teacher(labeller.text.chunk_rows, plan.rows),
                lambda spent, chunks: report(min(spent, 1.0), f"{chunks * chunk_tokens:,} labelled tokens"),
                self.share,
            )
        return {"labelled": self.teacher_folder.labelled(), "own_share": self.teacher_folder.own_share()}

    @property
    def _answers_prompts(self) -> bool:
        """True if the target's labels are of its answers to the data's prompts, and of questions of its own."""
        return self.share.processes == 1 and all(self.data_folder.prompts(part) for part in PARTS)

    def _prompts(self, part: str) -> PromptOrder:
        plan = self.plan
        frame = chat_frame(CheckpointTokenizer(plan.target.tokenizer_folder, plan.facts.tokenizer))
        given, seed = self.data_folder.prompts(part), 2 * plan.seed + PARTS.index(part)
        return PromptOrder.fitting(given, frame, seed, plan.target.max_length, plan.openings)

    def _write_conversations(self, budget: Budget) -> None:
        plan, folder = self.plan, self.teacher_folder
        with self._bar("teacher") as report:
            lockstep.write_conversations(
                self.target,
                plan.facts.vocabulary,
                plan.facts.end_ids,
                self._prompts("train"),
                lockstep.longest(plan.target.max_length),
                folder,
                budget,
                lambda spent: self._chunk_written(folder, spent, report),
            )

    def _write_answers(self, stage: str, part: str, folder: TeacherFolder, budget: Budget) -> None:
        plan = self.plan
        with self._bar(stage) as report:
            write_answers(
                plan.target_name,
                plan.target,
                plan.facts,
                self._prompts(part),
                plan.device,
                folder,
                budget,
                lambda spent: self._chunk_written(folder, spent, report),
            )

    def _chunk_written(self, folder: TeacherFolder, spent: float, report: Report) -> None:
        if folder is self.teacher_folder:
            self._check_labels()
        report(min(spent, 1.0), f"{folder.labelled():,} labelled tokens")

    def _check_labels(self) -> None:
        """Raises BadRequest, naming the option, if no chunk of labels so far has more tokens than a row."""
        most, row = max(len(chunk.tokens) for chunk in self.teacher_folder.read()), self.plan.row_tokens
        if most <= row:
            raise BadRequest(
                "--row-tokens",
                f"{row} are not fewer than the {most} tokens of a chunk of the target's answers: give fewer with "
                "--no-resume, or longer conversations in --data",
            )

    def _labeller(self) -> Labeller:
        plan, data = self.plan, self.data_folder.read("train")
        most = min(CHUNK_ROWS, TokenRows(data.tokens, 1, plan.row_tokens, plan.seed).windows)
        answers = data.answers if len(data.answers) else None
        text = TeacherText(data.tokens, plan.facts.vocabulary, plan.facts.end_ids, answers, most, plan.row_tokens)
        return Labeller(self.target, replace(text, chunk_rows=self._chunk_rows(text)), plan.seed)

    def pretrain(self) -> dict[str, Any]:
        if not self.plan.length.pretrain:
            return {}
        return self._train("pretrain", self.student())

    def distil(self) -> dict[str, Any]:
        model = self.student()
        if self.plan.length.pretrain:
            state = torch.load(self._state("pretrain"), map_location=self.plan.device, weights_only=True)
            model.load_state_dict(state["model"])
        return self._train("distil", model)

    def export(self) -> dict[str, Any]:
        """Write the checkpoint, measure it as it is on disk, and add its card."""
        plan = self.plan
        with self._bar("export") as report:
            report(0.0, "writing the checkpoint")
            model = self.student()
            state = torch.load(self._state("distil"), map_location=plan.device, weights_only=True)
            model.load_state_dict(state["model"])
            tokenizer = plan.target.tokenizer_folder
            files = [tokenizer / name for name in READ_FOR_TOKENIZER if (tokenizer / name).is_file()]
            made = plan.work / "checkpoint"
            export(model, made, files)
            fit = fit_of(plan.facts, read_facts(made))
            assert fit.fits, fit.refusal
            report(0.3, "measuring it")
            after = self._measured(load_fp32(made, plan.device))
            facts = {stage: self.done.facts(stage) for stage in TRAINED}
            with replacing(plan.out) as partial_folder:
                (made / "README.md").write_text(self._card(model.num_parameters(), facts, after))
                traces = {float(temperature): each for temperature, each in after["acceptance"].pop("ranks").items()}
                write_figures(made, figures_of(plan.target_name, traces))
                made.rename(partial_folder)
            report(1.0, f"written to {plan.out}")
        return {"parameters": model.num_parameters(), **after}

    def _chunk_rows(self, text: TeacherText) -> int:
        """Rows of a chunk, fewer where the target is slow; chosen once for a run, by its first process."""
        file = self.plan.work / "chunk_rows.json"
        if self.share.process == 0 and not file.exists():
            rows = rows_within(self.target, text, CHUNK_S[self.plan.labels])
            if self.plan.labels == "fly":  # a group has the rows of a step
                rows = max(rows, -(-self.plan.rows // OWN_TEXT_EVERY))
            with replacing(file) as partial:
                partial.write_text(json.dumps(rows))
        self.wait()
        return int(json.loads(file.read_text()))

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Raises BadRequest, naming the option, where a step does not fit in memory."""
        plan = self.plan
        try:
            yield
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(error):
                raise
            sizes = f"{plan.rows} rows of {plan.row_tokens} tokens"
            reason = f"a step of {sizes} does not fit in the memory of {plan.device}: give fewer, or --row-tokens fewer"
            raise BadRequest("--rows", reason) from error

    def _bar(self, stage: str) -> AbstractContextManager[Report]:
        """The first process alone shows its progress."""
        return stage_bar(stage) if self.share.process == 0 else nullcontext(lambda fraction, words: None)

    def wait(self) -> None:
        """Wait for the other processes."""
        if self.processes is not None:
            self.processes.wait_for_everyone()

    def _card(self, parameters: int, facts: dict[str, dict[str, Any]], after: dict[str, Any]) -> str:
        plan = self.plan
        made = f"with random layers and rows from the target's head, {plan.size}"
        if plan.start is not None:
            made = f"continued from {plan.start.folder}"
        if (guessed := self._guessed()) is not None:
            made += f". It guesses {len(guessed):,} of the target's {plan.facts.vocabulary:,} tokens and reads all"
        if self.transplant is not None:
            made += f". Its vocabulary is transplanted: {self.transplant.words}"
        return drafter_card(
            title=plan.out.name,
            target=plan.target_name,
            model=f"A {plan.kind} of {millions(parameters)} parameters, {made}",
            conversations=self._answers_prompts and plan.labels == "disk",
            source=", ".join(f"`{path}`" for path in plan.source.paths),
            command=plan.command,
            seed=plan.seed,
            facts=facts,
            after=after,
        )

    def _train(self, stage: str, model: PreTrainedModel) -> dict[str, Any]:
        plan, processes = self.plan, self.processes
        live = LiveRows(self._labeller(), self.share) if stage == "distil" and plan.labels == "fly" else None
        if live is None:
            vars(self).pop("target", None)  # frees the target's memory
        if stage == "pretrain":
            rows = TokenRows(self.data_folder.read("train").tokens, plan.rows, plan.row_tokens, plan.seed, self.share)
            batch_loss = text_loss(model, rows, plan.device, plan.compile_forward, processes)
        else:
            labelled = live if live is not None else self._labelled_rows()
            batch_loss = distillation_loss(
                model, labelled, plan.seed, plan.device, plan.compile_forward, plan.rows, processes
            )
        recipe = Recipe(
            plan.length.student(stage, plan.labels), **_rates(model.config.hidden_size, plan.start is not None)
        )
        tokens = plan.rows * plan.row_tokens
        trainer = Trainer(model, batch_loss, tokens, recipe, self._state(stage), processes, plan.seed)
        with self._bar(stage) as report, self._fitting():
            trained: Trained = trainer.run(shown(report))
        facts = asdict(trained)
        if live is not None:
            facts |= {"labelled": live.tokens(trained.steps, plan.rows), "own_share": 1 / OWN_TEXT_EVERY}
        return facts

    def _labelled_rows(self) -> LabelledRows:
        length = self.plan.row_tokens
        apart = length if self._answers_prompts else length + 1
        self._check_labels()
        return LabelledRows(self.teacher_folder.read(), length, apart, self.share)

    def _measured(self, model: PreTrainedModel) -> dict[str, Any]:
        """Held-out loss, and the acceptance of the target's answers."""
        loss = held_out_loss(model.eval(), self.data_folder.read("held_out").tokens, self.plan.row_tokens)
        if self._answers_prompts:
            answers = answers_in(self.measured_folder.read(), self._prompts("held_out"))
            acceptance = measure_own_answers(model, answers, self.plan.facts.vocabulary)
        else:
            acceptance = measure_acceptance(model, self._read_answers())
        return {"held_out_loss": loss, "acceptance": asdict(acceptance)}

    def _read_answers(self) -> list[Answers]:
        texts = torch.from_numpy(np.load(self._answers_file))
        ends = self.plan.facts.end_ids
        return [
            Answers.of(temperature, self.plan.facts.vocabulary, PROMPT_TOKENS, each, ends)
            for temperature, each in zip(TEMPERATURES, texts, strict=True)
        ]

    @property
    def _answers_file(self) -> Path:
        return self.plan.work / "answers.npy"

    def _state(self, stage: str) -> Path:
        return self.plan.work / f"{stage}.state"


def _rates(width: int, continued: bool) -> dict[str, float]:
    scale = min(1.0, (TUNED_WIDTH / width) ** 0.5) * (CONTINUED if continued else 1.0)
    return {"matrix_rate": 4e-3 * scale, "other_rate": 3e-3 * scale}


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, tokens: np.ndarray, row_tokens: int) -> float:
    """Nats per token on the first LOSS_ROWS rows of held-out text, of the tokens that the drafter can guess."""
    rows = min(LOSS_ROWS, max(1, (len(tokens) - 1) // row_tokens))
    device = next(model.parameters()).device
    forward, total, count = StudentForward(model), 0.0, 0
    for row in range(rows):
        ids = torch.from_numpy(tokens[row * row_tokens : (row + 1) * row_tokens + 1].astype(np.int64)).to(device)
        scores = model.lm_head(forward(ids[None, :-1]))[0].float()
        labels = ids[1:] if (embedding := draft_embedding(model)) is None else embedding.places[ids[1:]]
        known = labels < scores.shape[1]
        total += torch.nn.functional.cross_entropy(scores[known], labels[known], reduction="sum").item()
        count += int(known.sum())
    return total / count


TOGETHER = ("teacher", "pretrain", "distil")
"""The stages in which all processes work; in other stages the first process works alone."""


def train_drafter(
    plan: DrafterPlan, resume: bool = True, stop_after: str | None = None, processes: Accelerator | None = None
) -> DrafterRun:
    """Train a drafter and write it to `plan.out`, as a checkpoint folder with a card. Where several processes train
    together, each calls this with what joins them.

    May be repeated: finished stages are skipped and a killed one is resumed, unless `resume` is false, which begins
    anew. The export is done again where its result is gone. `stop_after` ends the run after that stage. Raises
    BadRequest, naming the option or field, also while another process trains there; NotSaved on a full disk.
    """
    settings, first = plan.settings(), processes is None or processes.is_main_process
    if first and plan.out.exists() and not (resume and StageFolder.begun(plan.work)):
        raise BadRequest("--out", f"{plan.out} is there already; name another folder")
    with only_run_in(plan.work) if first else nullcontext():
        if first:
            begun = StageFolder(plan.work, settings, resume)
            if not plan.out.exists():
                begun.forget("export")
        if processes is not None:
            processes.wait_for_everyone()
        run = DrafterRun(plan, StageFolder(plan.work, settings, resume=True), processes)
        works: dict[str, Callable[[], dict[str, Any]]] = {
            "data": run.data,
            "teacher": run.teacher,
            "answers": run.answers,
            "pretrain": run.pretrain,
            "distil": run.distil,
            "export": run.export,
        }
        for stage, work in works.items():
            if stage in TOGETHER and not run.done.done(stage):
                facts = work()
                run.wait()  # waits until no process of this stage is at work
                if first:
                    run.done.finish(stage, facts)
            elif first:
                run.done.run(stage, work)
            run.wait()
            if stage == stop_after:
                break
    return run
