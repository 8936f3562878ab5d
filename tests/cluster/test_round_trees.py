"""Each round's draft tree, for a client that asks for them: over gRPC's messages and over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from dendro.answer import build_request, tree_from
from dendro.errors import BadRequest, EngineFailed
from dendro.v1 import generation_pb2 as pb

from cluster.api.local import LocalClient
from tests.support.edge import EdgePeers, ingress
from tests.support.http_api import HELLO, client_of, http_at, post

PROMPT = list(b"walk the ")


@pytest.mark.parametrize("count", [23, 24])  # of 23 tokens, the last is a guess
async def test_a_rounds_tree_has_its_answers_tokens_on_the_accepted_path(count: int):
    client = LocalClient(ingress(EdgePeers()))
    done = await client.generate_text(PROMPT, max_new_tokens=count, speculation="(2,1)", trees=True)
    plain = await client.generate_text(PROMPT, max_new_tokens=count, speculation="off")
    assert done.token_ids == plain.token_ids and all(each.tree is None for each in plain.rounds)
    before = PROMPT[-1]
    for each in done.rounds:
        tree = each.tree
        assert tree is not None and tree.token_ids[0] == before and not tree.missed
        assert tree.parents == (0, 0, 1, 2) and tree.texts[0] == bytes([before]).decode(errors="replace")
        accepted = tuple(tree.token_ids[row] for row in tree.accepted)
        assert accepted and accepted == each.token_ids[: len(accepted)]
        assert len(each.token_ids) - len(accepted) == (0 if each is done.rounds[-1] and count == 23 else 1)
        before = each.token_ids[-1]
    assert sum(len(each.tree.accepted) for each in done.rounds if each.tree) == (
        done.complete.speculation.accepted_tokens
    )


async def test_a_round_has_what_the_policy_expected_of_each_arm():
    client = LocalClient(ingress(EdgePeers()))
    first = await client.generate_text(PROMPT, max_new_tokens=24, trees=True)
    assert first.rounds[0].tree is not None and not first.rounds[0].tree.arms[0].round_us  # nothing was timed yet
    done = await client.generate_text(PROMPT, max_new_tokens=24, trees=True)
    for each in done.rounds:
        assert each.tree is not None
        assert [arm.shape for arm in each.tree.arms] == ["off", "(1,1,1)", "(2,1)"]
        assert all(arm.tokens >= 1 and arm.round_us > 0 and arm.tokens_per_s > 0 for arm in each.tree.arms)
    fixed = await client.generate_text(PROMPT, max_new_tokens=4, speculation="(2,1)", trees=True)
    assert all(each.tree is not None and each.tree.arms == () for each in fixed.rounds)


async def test_a_lost_drafters_round_says_so():
    peers = EdgePeers()
    peers.drafter_lost = True
    done = await LocalClient(ingress(peers)).generate_text(PROMPT, max_new_tokens=3, speculation="(2,1)", trees=True)
    assert all(each.tree is not None and each.tree.missed and len(each.tree.token_ids) == 1 for each in done.rounds)


@pytest.mark.parametrize(
    "tree",
    [
        pb.RoundTree(),
        pb.RoundTree(token_ids=[1, 2], texts=["a", "b"]),
        pb.RoundTree(token_ids=[1, 2], texts=["a"], parents=[0]),
        pb.RoundTree(token_ids=[1, 2], texts=["a", "b"], parents=[1]),
        pb.RoundTree(token_ids=[1, 2], texts=["a", "b"], parents=[0], accepted=[2]),
        pb.RoundTree(token_ids=[1, 2], texts=["a", "b"], parents=[0], chances=[0.5, 0.5]),
    ],
)
def test_a_client_refuses_what_is_no_tree(tree: pb.RoundTree):
    with pytest.raises(EngineFailed, match="tree is malformed"):
        tree_from(tree)


def test_trees_is_true_or_false():
    with pytest.raises(BadRequest, match="^trees: "):
        build_request(PROMPT, trees="yes")


async def test_a_stream_over_http_has_the_round_of_each_part():
    extension = {"trees": True, "speculation": "(2,1)"}
    asked: Any = {"model": "demo", "messages": HELLO, "max_tokens": 12, "temperature": 0, "stream": True}
    async with http_at() as (server, _), client_of(server) as client:
        stream = await client.chat.completions.create(**asked, extra_body={"dendro": extension})
        rounds = [part.model_extra["dendro"]["round"] async for part in stream if _has_round(part)]
        stream = await client.chat.completions.create(**asked)
        assert not [part async for part in stream if _has_round(part)]
        status, _, answer = await post(server, "/v1/completions", {"prompt": "p", "dendro": {"trees": 1}})
    assert len([token for each in rounds for token in each["token_ids"]]) == 12
    for each in rounds:
        assert each["index"] == 0 and each["shape"] == "(2,1)" and len(each["texts"]) == 5
        assert [each["tree_ids"][row] for row in each["accepted"]] == each["token_ids"][: len(each["accepted"])]
    assert status == 400 and answer["error"]["param"] == "dendro.trees"


def _has_round(part: Any) -> bool:
    return "round" in (part.model_extra or {}).get("dendro", {})
