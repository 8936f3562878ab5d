"""The runner for accelerators: the same tokens by its own kernels, whatever is in a step, and graphs where they exist.

Without an accelerator its kernels run in Triton's interpreter, and everything but the capture is as it would be.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from dendro.tree import DraftTree
from routers import LAWS, Router, alone, guessing
from tiny_models import make_checkpoint

pytest.importorskip("triton", reason="triton is not installed")

from verifier_service.device import DeviceRunner
from verifier_service.engine import VerifierEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(3, 20)), [9, 8, 7], list(range(100, 166))]
COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    return path


@pytest.fixture(scope="module")
def engine(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verifier_service.engine.runner_for", DeviceRunner)
        return VerifierEngine.load(
            folder, name="tiny", dtype=torch.float32, device=DEVICE, max_length=96, max_sessions=3, max_depth=6,
            prefill_chunk=128,
        )  # fmt: skip


@asynccontextmanager
async def running(engine):
    """The engine in this event loop."""
    again = VerifierEngine(engine.scheduler, engine.runner, await engine.hello())
    await again.start()
    try:
        yield again
    finally:
        await again.stop()


def test_rows_are_independent_and_logits_the_references(engine, folder):
    assert engine._hello.exactness == "bitwise"
    reference = VerifierEngine.load(folder, name="tiny", dtype=torch.float32, max_length=96, max_sessions=3)
    ids = [(7 * at * at + 3 * at) % 256 for at in range(40)]
    tree = DraftTree.of([ids[-1], 5, 6, 7, 8], [-1, 0, 0, 1, 1])
    ours, theirs = engine.logits_of(ids, tree).cpu(), reference.logits_of(ids, tree)
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


async def test_trees_and_company_change_no_token(engine, folder):
    rng = np.random.default_rng(0)
    async with running(engine) as ours:
        truths = await alone(ours, PROMPTS, LAWS, COUNT)
        routers = [Router(ours, prompt, law, COUNT) for prompt, law in zip(PROMPTS, LAWS, strict=True)]
        trees = [guessing(rng, truth) for truth in truths]
        assert await asyncio.gather(*map(Router.finish, routers, trees)) == truths
        assert ours.stats()["guesses"] > 0 and ours.stats()["pages_held"] == 0
    # In float32, on numbers that are not near each other, the reference draws the same.
    reference = VerifierEngine.load(folder, name="tiny", dtype=torch.float32, max_length=96, max_sessions=3)
    async with running(reference) as theirs:
        assert await alone(theirs, PROMPTS, LAWS, COUNT) == truths


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need an accelerator")
async def test_steps_without_prompt_rows_are_replayed_from_graphs(engine):
    async with running(engine) as ours:
        await alone(ours, PROMPTS, LAWS, COUNT)
        assert engine.runner._captured and engine.runner._captures
