"""The drafter of `dendro bench bridge`: a Mamba-2 of another tokenizer, made from the demo's and trained further."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Mamba2Config, PreTrainedModel
from tree_layers.tokens import TOKENIZER, TOKENIZER_CONFIG

from cluster.demo.corpus import END_OF_TEXT, encode_corpus, train_tokenizer, training_files
from cluster.training.bars import shown, stage_bar
from cluster.training.checkpoints import export, load_fp32
from drafter_service.training.batches import DRAFTER_ROWS, text_loss
from drafter_service.training.loop import Budget, Recipe, Trainer
from drafter_service.training.rows import TokenRows
from drafter_service.training.sizes import new_model
from drafter_service.training.teacher import ROW_TOKENS

ONE_FILE_IN = 6
"""The share of the library's files that is read: more text than minutes of training see, less than takes minutes to
encode."""
TESTS = "test/"
"""The tokenizer is made from the library's tests alone, so that its merges are not the first ones of the target's."""
EMBEDDINGS = "backbone.embeddings.weight"


def make_drafter(start: Path, out: Path, vocabulary: int, minutes: float, seed: int) -> None:
    """Write a drafter with a byte-level BPE of `vocabulary` tokens to the folder `out`.

    It begins with the layers of the drafter in `start`, and is trained for so many minutes on the standard library's
    text. May be repeated: a run that was killed is resumed.
    """
    files = training_files()[::ONE_FILE_IN]
    tokenizer = train_tokenizer([file for file in files if file.name.startswith(TESTS)] or files, vocabulary)
    tokens = encode_corpus(files, tokenizer, seed)
    model = _transplanted(start, tokenizer, seed)
    work = out.with_name(f".{out.name}")
    work.mkdir(parents=True, exist_ok=True)
    rows = TokenRows(np.asarray(tokens), DRAFTER_ROWS, ROW_TOKENS, seed)
    batch_loss = text_loss(model, rows, torch.device("cpu"), compile_forward=False)
    recipe = Recipe(Budget(seconds=60 * minutes), matrix_rate=2e-3, other_rate=3e-3)  # layers are trained already
    with stage_bar(out.name) as report:
        Trainer(model, batch_loss, DRAFTER_ROWS * ROW_TOKENS, recipe, work / "state").run(shown(report))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    tokenizer.save(str(work / TOKENIZER))
    (work / TOKENIZER_CONFIG).write_text(json.dumps(described) + "\n")
    export(model, out, (work / TOKENIZER, work / TOKENIZER_CONFIG))
    shutil.rmtree(work)


def _transplanted(start: Path, tokenizer: Tokenizer, seed: int) -> PreTrainedModel:
    """A drafter's model with another vocabulary: a token's embedding is the mean of those of its text's old tokens."""
    old = load_fp32(start, torch.device("cpu"))
    source = Tokenizer.from_file(str(start / TOKENIZER))
    config = Mamba2Config.from_dict({**old.config.to_dict(), "vocab_size": tokenizer.get_vocab_size()})
    model = new_model(config, seed, torch.device("cpu"))
    weights = old.state_dict()
    embeddings, given = model.state_dict()[EMBEDDINGS], weights.pop(EMBEDDINGS)
    weights.pop("lm_head.weight")  # tied
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        for token in range(len(embeddings)):
            ids = source.encode(tokenizer.decode([token], skip_special_tokens=False)).ids
            embeddings[token] = given[ids].mean(0) if ids else given.mean(0)
    return model
