"""Two drafters of the demo's target, with real engines: the tokens are the target's, and each saves its own state."""

from __future__ import annotations

import pytest
from dendro.client import Speculation

from cluster.api.local import LocalClient
from cluster.config import DEMO_MODELS, Config, pair_config
from cluster.demo.prompts import held_out_prompts
from cluster.running import local_client, local_ingress

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.usefixtures("opened_drafters")]

WAYS = ("off", "(1,1,1)", "llama:(1,1,1)", "mamba2:(3,2,1)", "llama:beam(2,2)", "auto")


def two_drafters() -> Config:
    return pair_config(
        DEMO_MODELS / "target",
        [DEMO_MODELS / "mamba2", DEMO_MODELS / "llama"],
        speculation={"arms": ["off", "(1,1,1)", "mamba2:(3,2,1)"], "proposers": []},
        router={"draft_timeout_ms": 30_000},
    )


async def test_answers_of_every_drafter_and_of_the_policy_are_those_without_speculation():
    played: set[str] = set()
    async with local_ingress(two_drafters()) as ingress:
        assert list(ingress.info().models[0].drafters) == ["mamba2", "llama"]
        client = LocalClient(ingress)
        for number, prompt in enumerate(held_out_prompts(2, 96)):
            for temperature in (0.0, 1.0):
                answers = {
                    way: await client.generate_text(
                        prompt.token_ids,
                        temperature=temperature,
                        seed=number,
                        max_new_tokens=48,
                        ignore_end=True,
                        speculation=way,
                    )
                    for way in WAYS
                }
                # It tries every arm; the configured policy need not: it may find one drafter too slow to try.
                answers["paper_ucb"] = await client.generate_text(
                    prompt.token_ids,
                    temperature=temperature,
                    seed=number,
                    max_new_tokens=48,
                    ignore_end=True,
                    speculation=Speculation(policy="paper_ucb"),
                )
                for way, done in answers.items():
                    assert done.token_ids == answers["off"].token_ids, way
                    assert done.complete.speculation.contradictions == ()
                assert answers["(1,1,1)"].complete.speculation.rounds_by_shape.keys() == {"mamba2:(1,1,1)"}
                assert {part.shape for part in answers["llama:(1,1,1)"].rounds} == {"llama:(1,1,1)"}
                assert answers["llama:(1,1,1)"].complete.speculation.accepted_tokens > 0
                played |= answers["paper_ucb"].complete.speculation.rounds_by_shape.keys()
    assert {arm.partition(":")[0] for arm in played} >= {"mamba2", "llama"}


async def test_a_session_restores_the_state_of_the_drafter_that_saved_it():
    (first,) = (prompt.token_ids for prompt in held_out_prompts(1, 96))
    async with local_client(two_drafters()) as client:
        session, restored = "", []
        for way in ("mamba2:(1,1,1)", "mamba2:(1,1,1)", "llama:(1,1,1)", "llama:(1,1,1)", "mamba2:(1,1,1)"):
            done = await client.generate_text(
                (5, 6) if session else first,
                session=session,
                keep_session=True,
                max_new_tokens=64,  # enough rounds for a drafter to read the prompt in the first ones
                ignore_end=True,
                speculation=way,
            )
            session, drafter = done.complete.session, done.complete.drafter
            assert drafter is not None
            restored.append(drafter.restored_tokens)
    # A turn adds a prompt of 2 tokens and an answer of 64; a saved state lacks the text's last token.
    assert restored == [0, 159, 0, 291, 225]
