"""A step's last layer runs on the rows whose logits are wanted, and these have the bits that they always have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama
from tree_kernels.decoder_layer.cpu import OPERATIONS, DecoderLayers

from tests.support import tiny_models
from tests.support.made_once import made_once
from verifier_service.engine import VerifierEngine
from verifier_service.models import load_target
from verifier_service.options import VerifierOptions
from verifier_service.rows import text_rows

TEXT = list(range(1, 33))
WANTED = np.array([29, 3, 30, 31, 17, 0, 8, 12])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = made_once(tmp_path_factory, tiny_models.make_checkpoint)
    return lambda family: folders(family)[0]


def runner_of(folder, dtype=torch.float32):
    options = VerifierOptions(name="tiny", max_length=256, max_sessions=1, prefill_chunk=128, dtype=dtype)
    return VerifierEngine.load(folder, options).runner


def logits(runner, wanted):
    rows = np.arange(len(TEXT))
    plan = text_rows(TEXT, rows, None, runner.own_pages, runner.pages.scratch, runner.near, runner.target.window)
    with torch.inference_mode():
        return runner.forward(replace(plan, wanted=wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_rows_have_the_same_bits_whether_the_last_layer_runs_on_all_rows_or_on_the_wanted(family, dtype, folder_of):
    runner = runner_of(folder_of(family), dtype)
    assert runner.target.last_layer is not None
    rows = np.arange(len(TEXT))
    assert torch.equal(logits(runner, WANTED), logits(runner, rows)[torch.from_numpy(WANTED)])


def test_the_keys_of_rows_that_are_not_wanted_are_written(folder_of):
    runner = runner_of(folder_of("llama"))
    kept = []
    for wanted in (np.arange(len(TEXT)), WANTED):
        for pool in runner.pages.layers:
            pool.zero_()
        logits(runner, wanted)
        kept.append([pool.clone() for pool in runner.pages.layers])
    assert all(torch.equal(*pools) for pools in zip(*kept, strict=True))
    assert kept[0][-1].any()


def test_the_last_mlp_runs_on_the_wanted_rows(folder_of, monkeypatch):
    """By a program of the compiled layers, or by the module where none can be compiled."""
    runner = runner_of(folder_of("llama"))
    rows, program = [], DecoderLayers._program
    last = runner.target.model.model.layers[-1]
    last.mlp.register_forward_hook(lambda module, given, made: rows.append(made.shape[1]))

    def noted(layers, count, columns, first, end):
        if end == OPERATIONS * len(layers.weights):
            rows.append(count)
        return program(layers, count, columns, first, end)

    monkeypatch.setattr(DecoderLayers, "_program", noted)
    logits(runner, WANTED)
    assert rows == [8]


def test_a_layer_whose_results_depend_on_the_number_of_its_rows_runs_on_all_rows(folder_of, monkeypatch):
    library = modeling_llama.LlamaDecoderLayer.forward

    def scaled(self, hidden_states, *args, **named):
        return library(self, hidden_states, *args, **named) * (1 + hidden_states.shape[1] / 64)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", scaled)
    runner = runner_of(folder_of("llama"))
    assert runner.target.last_layer is None
    rows = np.arange(len(TEXT))
    assert torch.equal(logits(runner, WANTED), logits(runner, rows)[torch.from_numpy(WANTED)])


def test_a_failing_forward_of_the_wanted_rows_leaves_the_layers_their_forwards(folder_of, monkeypatch):
    library = modeling_llama.LlamaDecoderLayer.forward

    def in_order(self, hidden_states, *args, position_ids, **named):
        if hidden_states.shape[1] == 8 and position_ids[0, 0] > 0:
            raise ValueError("rows: not in order")
        return library(self, hidden_states, *args, position_ids=position_ids, **named)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", in_order)
    target = load_target(folder_of("llama"), torch.float32, torch.device("cpu"), (8, 16))
    assert target.last_layer is None
    assert not isinstance(target.model.model.layers[-1].forward, partial)
