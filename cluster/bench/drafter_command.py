"""`dendro bench drafter`: load the demo's drafters in every form, time their work in turns, report."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from dendro.shapes import MAX_ROWS

from cluster.bench.context import CONTEXTS, with_positions
from cluster.bench.drafter import (
    DRAFTERS,
    LLAMA,
    SHAPES,
    STEP_ROWS,
    TREE,
    DraftCase,
    LevelCase,
    draft_rows,
    drafter_aims,
    level_rows,
    measure_in_turns,
    memory_rows,
)
from cluster.bench.drafter_forms import FUSED, DrafterForms, load_forms
from cluster.bench.drafter_heads import HeadCase, head_aims, head_rows
from cluster.bench.drafter_report import facts_of, tables_of
from cluster.bench.drafter_report import plot as draw
from cluster.command_options import JsonFile
from cluster.config import DEMO_MODELS
from cluster.demo.prompts import Prompt, held_out_prompts, load_tokenizer
from cluster.measure.in_process import DRAFTER_DTYPE
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import Default, MarkdownFile, Models, PlotFile, present, with_bars
from cluster.measure.targets import parameter_count

THREADS = 1
REPETITIONS = Default(60, quick=7)
SESSIONS = Default((1, 2, 4, 8, 16, 32), quick=(1, 8, 32))
"""Texts that draft a TREE at once."""
LENGTHS = Default(CONTEXTS, quick=(256, 2048))
"""Tokens of the texts of different lengths, as in Figure 1 of Mamba Drafters for Speculative Decoding."""
PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 256
"""Tokens of each of the prompts that together are a long text."""


Case = TypeVar("Case", LevelCase, DraftCase)


def long_text(tokens: int, models: Path) -> list[int]:
    """A text of so many tokens, made of held-out prompts."""
    prompts = held_out_prompts(-(-tokens // LONG_PROMPT_TOKENS), LONG_PROMPT_TOKENS, load_tokenizer(models), models)
    return [token for prompt in prompts for token in prompt.token_ids][:tokens]


def load_drafters(models: Path, positions: int, folder: Path) -> list[DrafterForms]:
    """The demo's drafters; the Llama with at least so many positions, copied to `folder`."""
    paths = {name: models / name for name in DRAFTERS}
    paths[LLAMA] = with_positions(paths[LLAMA], positions, folder)
    return [load_forms(name, path) for name, path in paths.items()]


def measure_drafters(
    drafters: Sequence[DrafterForms],
    weights: Mapping[str, int],
    prompts: Sequence[Prompt],
    ids: Sequence[int],
    sessions: Sequence[int],
    contexts: Sequence[int],
    repetitions: int,
    begin: Begin,
) -> dict[str, Any]:
    """The measured part of the report.

    weights: bytes of each drafter's weights   prompts: at least one for each session
    ids: a text of at least the longest context
    """
    started = begin("prefill", len(drafters) * (1 + len(contexts) + len(SHAPES) + len(sessions)))

    def ready(case: Case) -> Case:
        started()
        return case

    levels = [ready(LevelCase(forms, prompts[0].token_ids)) for forms in drafters]
    lengths = [ready(LevelCase(forms, ids[:context], [STEP_ROWS])) for context in contexts for forms in drafters]
    drafts = [ready(DraftCase(forms, shape, prompts[:1])) for shape in SHAPES for forms in drafters]
    batches = [ready(DraftCase(forms, TREE, prompts[:count])) for count in sessions for forms in drafters]
    heads = [HeadCase(forms, prompts[0].token_ids) for forms in drafters if FUSED in forms.models]
    for title, cases in (("levels", [*levels, *lengths]), ("heads", heads), ("drafts", [*drafts, *batches])):
        measure_in_turns(cases, repetitions, begin(title, repetitions + 1))
    level_results, draft_results, head_results = level_rows(levels), draft_rows(drafts), head_rows(heads)
    missing = {forms.name: forms.missing[FUSED] for forms in drafters if FUSED in forms.missing}
    return {
        "rows": level_results,
        "heads": head_results,
        "drafts": draft_results,
        "sessions": draft_rows(batches),
        "lengths": level_rows(lengths),
        "memory": memory_rows(lengths, weights),
        "aims": [*drafter_aims(level_results, draft_results, missing), *head_aims(head_results, missing)],
    }


def run_drafter(
    sessions: Sequence[int], contexts: Sequence[int], repetitions: int, models: Path, begin: Begin
) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started, load_average = time.monotonic(), os.getloadavg()[0]
    torch.set_num_threads(THREADS)
    prompts = held_out_prompts(max(sessions), PROMPT_TOKENS, load_tokenizer(models), models)
    with tempfile.TemporaryDirectory() as folder:
        drafters = load_drafters(models, max(contexts) + MAX_ROWS, Path(folder))
    parameters = {forms.name: parameter_count(models / forms.name) for forms in drafters}
    weights = {name: count * getattr(torch, DRAFTER_DTYPE).itemsize for name, count in parameters.items()}
    ids = long_text(max(contexts), models)
    found = measure_drafters(drafters, weights, prompts, ids, sessions, contexts, repetitions, begin)
    return {
        **report_head("drafter", started, True, 0, THREADS),
        "plan": {
            "drafters": [
                {
                    "drafter": forms.name,
                    "parameters": parameters[forms.name],
                    "forms": list(forms.models),
                    "missing": dict(forms.missing),
                }
                for forms in drafters
            ],
            "dtype": DRAFTER_DTYPE,
            "tokens": PROMPT_TOKENS,
            "repetitions": repetitions,
            "load_average": round(load_average, 2),
        },
        **found,
    }


def bench_drafter(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: fewer lengths, sessions, repetitions.")
    ] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    repetitions: Annotated[int | None, REPETITIONS.option("Repetitions of everything.", least=1)] = None,
    models: Models = DEMO_MODELS,
) -> None:
    """Time the demo's drafters in every form, in this process, with one thread, at temperature 1: levels of a tree,
    whole drafts, 1 to 32 sessions at once; and the time and memory of the three drafters from 256 to 8,192 tokens.
    """
    repeated = REPETITIONS.chosen(repetitions, quick)
    report = with_bars(lambda begin: run_drafter(SESSIONS.at(quick), LENGTHS.at(quick), repeated, models, begin))
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw)
