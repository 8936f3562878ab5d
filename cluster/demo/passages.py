"""Choose the passages of `held_out.json`: `python -m cluster.demo.passages`. Needed when another target is shipped.

Greedy answers of a small target loop, and looping text is trivially predicted. So of all definitions in the held-out
modules those are shipped after which the target at `models` repeats itself least.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from cluster.config import DEMO_MODELS
from cluster.demo.corpus import HELD_OUT, source_files
from cluster.demo.measure import greedy_repetition
from cluster.demo.prompts import PASSAGES_FILE, Passage, as_prompts, load_tokenizer
from cluster.training.checkpoints import load_fp32

PASSAGE_CHARS = 1900  # 256 tokens of prompt and at least 128 of continuation, at 3 to 4 characters a token
APART_CHARS = 400  # least distance of the beginnings of two passages of a module
PER_MODULE = 4


def _passages_of(name: str, text: str) -> Iterator[Passage]:
    """Passages of one module, each beginning at a definition; they may overlap."""
    offsets = [0]
    for content in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(content))
    starts = sorted(
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list
    )
    free_from = 0
    for line in starts:
        offset = offsets[line - 1]
        passage = text[offset : offset + PASSAGE_CHARS]
        if offset >= free_from and len(passage) == PASSAGE_CHARS and passage.isascii():
            yield Passage(f"{name}:{line}", passage)
            free_from = offset + APART_CHARS


def candidate_passages(root: Path | None = None) -> list[Passage]:
    """All passages of the held-out modules of a standard library (the running Python's unless given)."""
    sources = (source for source in source_files(root) if source.name in HELD_OUT)
    return [passage for source in sources for passage in _passages_of(source.name, source.text)]


def choose_passages(models: Path = DEMO_MODELS) -> list[Passage]:
    """The `PER_MODULE` least repetitive passages of every module: first each module's best, then each second best."""
    prompts = as_prompts(candidate_passages(), 128, load_tokenizer(models))
    repeated = greedy_repetition(load_fp32(models / "target", torch.device("cpu")), prompts)
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in sorted(repeated, key=repeated.__getitem__):
        by_module[name.split(":")[0]].append(name)
    passages = {passage.name: passage for passage in candidate_passages()}
    ranked = [names[place] for place in range(PER_MODULE) for names in by_module.values() if place < len(names)]
    return [passages[name] for name in ranked]


if __name__ == "__main__":
    entries = [{"name": passage.name, "text": passage.text} for passage in choose_passages()]
    PASSAGES_FILE.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{len(entries)} passages of {len(HELD_OUT)} modules in {PASSAGES_FILE.name}")
