"""The drafter of `dendro bench bridge`: a Mamba-2 of another tokenizer, made from the demo's and trained further."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from tree_layers.checkpoint import CONFIG, read_facts
from tree_layers.tokens import TOKENIZER, TOKENIZER_CONFIG

from cluster.demo.corpus import END_OF_TEXT, END_OF_TEXT_ID, encode_corpus, train_tokenizer, training_files
from cluster.training.bars import shown, stage_bar
from cluster.training.checkpoints import export
from cluster.training.models import start_from, student_from
from drafter_service.training.batches import DRAFTER_ROWS, text_loss
from drafter_service.training.loop import Budget, Recipe, Trainer
from drafter_service.training.rows import TokenRows
from drafter_service.training.teacher import ROW_TOKENS

ONE_FILE_IN = 6
"""The share of the library's files that is read: more text than minutes of training see, less than takes minutes to
encode."""
TESTS = "test/"
"""The tokenizer is made from the library's tests alone, so that its merges are not the first ones of the target's."""
CPU = torch.device("cpu")


def make_drafter(start: Path, out: Path, vocabulary: int, minutes: float, seed: int) -> None:
    """Write a drafter with a byte-level BPE of `vocabulary` tokens to the folder `out`.

    It begins with the layers of the drafter in `start` and its vocabulary transplanted, and is trained for so many
    minutes on the standard library's text. May be repeated: a run that was killed is resumed.
    """
    files = training_files()[::ONE_FILE_IN]
    tokenizer = train_tokenizer([file for file in files if file.name.startswith(TESTS)] or files, vocabulary)
    tokens = encode_corpus(files, tokenizer, seed)
    work = out.with_name(f".{out.name}")
    work.mkdir(parents=True, exist_ok=True)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    tokenizer.save(str(work / TOKENIZER))
    (work / TOKENIZER_CONFIG).write_text(json.dumps(described) + "\n")
    config = json.loads((start / CONFIG).read_text()) | {"vocab_size": tokenizer.get_vocab_size()}
    (work / CONFIG).write_text(json.dumps(config | {"eos_token_id": END_OF_TEXT_ID, "bos_token_id": END_OF_TEXT_ID}))
    wanted = read_facts(work)
    given = start_from(start, None, wanted)
    model = student_from(given, wanted, given.transplant(wanted, work), seed, CPU)
    rows = TokenRows(np.asarray(tokens), DRAFTER_ROWS, ROW_TOKENS, seed)
    batch_loss = text_loss(model, rows, CPU, compile_forward=False)
    recipe = Recipe(Budget(seconds=60 * minutes), matrix_rate=2e-3, other_rate=3e-3)  # layers are trained already
    with stage_bar(out.name) as report:
        Trainer(model, batch_loss, DRAFTER_ROWS * ROW_TOKENS, recipe, work / "state").run(shown(report))
    export(model, out, (work / TOKENIZER, work / TOKENIZER_CONFIG))
    shutil.rmtree(work)
