"""`dendro certify` on targets with states: it passes for the demo's Mamba-2 and for a hybrid."""

import shutil

import pytest

from cluster.certify.command import CertifySize, run_certify
from cluster.certify.promises import Promise
from cluster.config import DEMO_MODELS, pair_config
from tests.support.tiny_hybrids import make_checkpoint

SMALL = CertifySize(
    greedy_prompts=1,
    greedy_tokens=24,
    prompts=1,
    tokens=16,
    draws=4_000,
    far_draws=100,
    own_prompts=1,
    own_tokens=16,
    stop_draws=1,
    combinations=3,
)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["mamba2", "bamba"])
async def test_every_promise_is_kept_for_a_target_with_states(family, tmp_path):
    if family == "mamba2":
        checkpoint = DEMO_MODELS / "target_mamba2"
    else:
        checkpoint = tmp_path / family
        make_checkpoint(checkpoint, family, vocab_size=4096)
        shutil.copy(DEMO_MODELS / "target" / "tokenizer.json", checkpoint)
    config = pair_config(checkpoint, [DEMO_MODELS / "mamba2"])
    announced: list[Promise] = []
    promises = await run_certify(config, None, True, SMALL, lambda *_: lambda: None, announced.append)
    assert len(promises) == 7 and sorted(announced, key=lambda promise: promise.promise) == promises
    for promise in promises:
        assert promise.kept is True, (promise.promise, promise.broken)
    assert any("bitwise" in line for promise in promises for line in promise.found)
