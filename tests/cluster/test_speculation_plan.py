"""What a request may ask of speculation, and the account of what came of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import fakes
import pytest
from dendro.answer import Completion, Mode, Speculation, SpeculationStats, build_request
from dendro.errors import BadRequest
from dendro.shapes import OFF, LevelShape, TreeShape
from dendro.text import Finish, Sampling, Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb
from edge import END, SERVED, EdgePeers, config, ingress, plain_answer, resume_of

from cluster.api.local import LocalClient
from cluster.peers.places import Peers
from cluster.policies import Experience, Offer, PaperUCB, RatioUCB, Static
from cluster.router.account import RoundAccount
from cluster.router.ingress import Ingress
from cluster.router.speculation import SpeculationPlan, plan_speculation
from cluster.sessions import MemorySessions

PROMPT = "walk the "
IDS = list(PROMPT.encode())
CHAIN = LevelShape((1, 1, 1))


def asked(said: Speculation | str, **sections: object) -> SpeculationPlan:
    message = build_request(PROMPT, speculation=said).speculation
    return plan_speculation(message, "demo", config(**sections), Experience(), Sampling())


# What is asked


@pytest.mark.parametrize(
    "text, said",
    [
        ("", Speculation()),
        ("auto", Speculation(Mode.AUTO)),
        (" off ", Speculation(Mode.OFF)),
        ("(3,2,1)", Speculation(Mode.FIXED, "(3,2,1)")),
        ("beam(4,3)", Speculation(Mode.FIXED, "beam(4,3)")),
        ("wide", Speculation(Mode.FIXED, "wide")),  # for the server to refuse
    ],
)
def test_a_text_is_read_as_a_mode_or_a_shape(text: str, said: Speculation):
    assert Speculation.parse(text) == said


def test_every_field_reaches_the_message_and_what_is_left_out_stays_absent():
    said = build_request("p", speculation=Speculation.parse("auto", "paper_ucb", 0, 9)).speculation
    assert (said.mode, said.shape, said.policy) == (pb.Speculation.MODE_AUTO, "", "paper_ucb")
    assert said.HasField("max_nodes") and (said.max_nodes, said.deadline_ms) == (0, 9)
    plain = build_request("p").speculation
    assert not plain.HasField("max_nodes") and not plain.HasField("deadline_ms")


@pytest.mark.parametrize(
    "shape", ["(3,2,1)", "3,2,1", "nodes(2,1)", "beam(4,3)", "dynamic(3,2,6)", "proposed(7)", "off"]
)
def test_every_kind_of_shape_can_be_fixed(shape: str):
    found = asked(Speculation(Mode.FIXED, shape))
    assert isinstance(found.policy, Static) and found.policy.shape == TreeShape.parse(shape) and found.name == "fixed"


def test_proposals_may_have_more_guesses_than_the_target_takes_levels():
    """Which is 8 here: what is proposed is cut to it."""
    assert asked(Speculation(Mode.FIXED, "proposed(15)")).proposed_rows == 16


def test_off_asks_for_no_tree_and_auto_is_the_servers_policy_on_the_servers_arms():
    off, auto = asked("off"), asked("auto")
    assert isinstance(off.policy, Static) and off.policy.shape == OFF and off.name == "off"
    assert isinstance(auto.policy, RatioUCB) and auto.name == "ratio_ucb"
    assert [str(arm) for arm in auto.policy.arms] == ["off", "(1,1,1)", "(2,1)"]
    absent = plan_speculation(pb.Speculation(), "demo", config(), Experience(), Sampling())
    assert absent.name == "ratio_ucb" and absent.free


def test_a_named_policy_picks_the_shapes():
    found = asked(Speculation(policy="paper_ucb"))
    assert isinstance(found.policy, PaperUCB) and found.name == "paper_ucb"


@pytest.mark.parametrize(
    "max_nodes, left", [(0, ["off"]), (2, ["off"]), (3, ["off", "(1,1,1)"]), (4, ["off", "(1,1,1)", "(2,1)"])]
)
def test_auto_leaves_out_the_arms_with_more_guesses(max_nodes: int, left: list[str]):
    policy = asked(Speculation(max_nodes=max_nodes)).policy
    assert isinstance(policy, RatioUCB) and [str(arm) for arm in policy.arms] == left


def test_auto_cuts_proposals_to_the_guesses_allowed_and_names_none_twice():
    policy = asked(Speculation(max_nodes=3), speculation={"arms": ["proposed(7)", "proposed(8)", "(2,1)"]}).policy
    assert isinstance(policy, RatioUCB) and [str(arm) for arm in policy.arms] == ["off", "proposed(3)"]


def test_proposals_that_are_fixed_may_have_as_many_rows_and_a_fixed_tree_gets_none():
    assert asked(Speculation(Mode.FIXED, "proposed(5)")).proposed_rows == 6
    assert asked(Speculation(Mode.FIXED, "(2,1)")).proposed_rows == 1


def test_where_no_arm_is_small_enough_off_is_left():
    policy = asked(Speculation(max_nodes=1), speculation={"arms": ["(2,1)"]}).policy
    assert isinstance(policy, RatioUCB) and policy.arms == (OFF,)


def test_a_fixed_shape_of_as_many_guesses_as_are_allowed_is_taken():
    assert asked(Speculation(Mode.FIXED, "(2,1)", max_nodes=4)).policy.choose() == LevelShape((2, 1))


@pytest.mark.parametrize(
    "said, free",
    [
        (Speculation(), True),
        (Speculation(policy="ratio_ucb"), True),
        (Speculation(policy="paper_ucb"), False),
        (Speculation(max_nodes=60), False),
        (Speculation(deadline_ms=5), False),
        (Speculation(Mode.OFF), False),
        (Speculation(Mode.FIXED, "(1,)"), False),
    ],
    ids=str,
)
def test_only_requests_that_ask_for_nothing_are_tried_together(said: Speculation, free: bool):
    assert asked(said).free is free


NOTHING_TO_DRAFT = {"drafters": {}}


@pytest.mark.parametrize(
    "field, said, sections",
    [
        ("shape", Speculation(shape="(1,1)"), {}),
        ("shape", Speculation(Mode.OFF, "(1,1)"), {}),
        ("shape", Speculation(Mode.FIXED), {}),
        ("shape", Speculation(Mode.FIXED, "wide"), {}),
        ("shape", Speculation(Mode.FIXED, "auto"), {}),
        ("shape", Speculation(Mode.FIXED, "(9,9)"), {}),
        ("shape", Speculation(Mode.FIXED, "(1,1,1,1,1,1,1,1,1)"), {}),  # the target takes a depth of 8
        ("shape", Speculation(Mode.FIXED, "(1,)"), NOTHING_TO_DRAFT),
        ("shape", Speculation(Mode.FIXED, "proposed(3)"), {"speculation": {"proposers": []}}),
        ("deadline_ms", Speculation(Mode.FIXED, "proposed(3)", deadline_ms=5), {}),
        ("policy", Speculation(policy="best"), {}),
        ("policy", Speculation(Mode.OFF, policy="ratio_ucb"), {}),
        ("policy", Speculation(Mode.FIXED, "(1,)", "ratio_ucb"), {}),
        ("max_nodes", Speculation(Mode.FIXED, "(2,1)", max_nodes=3), {}),
        ("max_nodes", Speculation(Mode.FIXED, "(1,)", max_nodes=0), {}),
        ("max_nodes", Speculation(Mode.FIXED, "dynamic(3,2,6)", max_nodes=5), {}),
        ("max_nodes", Speculation(Mode.OFF, max_nodes=3), {}),
        ("max_nodes", Speculation(Mode.FIXED, "off", max_nodes=3), {}),
        ("deadline_ms", Speculation(deadline_ms=0), {}),
        ("deadline_ms", Speculation(Mode.FIXED, "(1,)", deadline_ms=0), {}),
        ("deadline_ms", Speculation(Mode.OFF, deadline_ms=5), {}),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_by_its_name(field: str, said: Speculation, sections: dict):
    with pytest.raises(BadRequest) as refused:
        asked(said, **sections)
    assert refused.value.field == f"speculation.{field}"


def test_a_mode_that_nobody_knows_is_refused():
    with pytest.raises(BadRequest) as refused:
        plan_speculation(pb.Speculation(mode=9), "demo", config(), Experience(), Sampling())  # type: ignore[arg-type]
    assert refused.value.field == "speculation.mode"


@pytest.mark.parametrize("field, said", [("max_nodes", {"max_nodes": -1}), ("deadline_ms", {"deadline_ms": 1 << 32})])
def test_a_number_that_its_field_cannot_hold_is_refused_before_it_is_sent(field: str, said: dict):
    with pytest.raises(BadRequest) as refused:
        build_request("p", speculation=Speculation(**said))
    assert refused.value.field == f"speculation.{field}"


async def test_only_what_asks_for_nothing_is_not_counted_as_fixed():
    router = ingress(EdgePeers())
    seen = []
    for said in (Speculation(), Speculation(max_nodes=3), Speculation(Mode.OFF)):
        async for event in LocalClient(router).generate(PROMPT, speculation=said, max_new_tokens=3):
            del event
            seen.append((said.mode, said.max_nodes, router.experience["demo"].concurrency.fixed))
    assert {each for each in seen if each[2]} == {(Mode.AUTO, 3, 1), (Mode.OFF, None, 1)}


# The wait for a draft


@pytest.mark.parametrize("server_ms, request_ms", [(60_000, 1), (1, 60_000)], ids=["request", "server"])
async def test_the_shorter_of_two_deadlines_bounds_the_wait_for_a_draft(server_ms: int, request_ms: int):
    """A draft takes half a minute: a round that waited for it would not end in time."""
    drafter, verifier = fakes.FakeDrafter(pause_s=30.0), fakes.FakeVerifier()
    settings = config(router={"draft_timeout_ms": server_ms})
    places = Peers(settings, {"demo": fakes.FakePool(verifier)}, {"mamba": fakes.FakePool(drafter)})
    client = LocalClient(Ingress(settings, places, MemorySessions(), SERVED))
    async with asyncio.timeout(10):
        done = await client.generate_text(
            [5, 6, 7], max_new_tokens=5, speculation=Speculation(Mode.FIXED, "(1,1)", deadline_ms=request_ms)
        )
    assert list(done.token_ids) == fakes.plain([5, 6, 7], 5)
    assert done.complete.speculation.late_drafts == 5 and drafter.calls == 1


# The account


def recounted(done: Completion) -> SpeculationStats:
    """The parts of an account that can be read off the stream."""
    return replace(
        done.complete.speculation,
        rounds=len(done.rounds),
        pulls=dict(Counter(part.shape for part in done.rounds)),
        emitted=dict(Counter(len(part.token_ids) for part in done.rounds)),
        emitted_tokens=len(done.token_ids),
    )


SAID = [
    Speculation(),
    Speculation(Mode.OFF),
    Speculation(Mode.FIXED, "(1,1,1)"),
    Speculation(Mode.FIXED, "beam(3,2)"),
    Speculation(max_nodes=3, policy="paper_ucb"),
    Speculation(deadline_ms=50),
]


@pytest.mark.parametrize("said", SAID, ids=str)
@pytest.mark.parametrize("tokens", range(1, 10))
async def test_an_account_adds_up_and_is_that_of_the_stream_and_no_token_changes(said: Speculation, tokens: int):
    """At every length, so that the limit cuts the last round at every place."""
    client = LocalClient(ingress(EdgePeers()))
    done = await client.generate_text(PROMPT, speculation=said, temperature=1.0, seed=3, max_new_tokens=tokens)
    stats = done.complete.speculation
    assert list(done.token_ids) == plain_answer(IDS, Sampling(temperature=1.0, seed=3), tokens)
    assert stats.contradictions == () and recounted(done) == stats


async def test_an_answer_without_trees_is_accounted_for_with_zeros_where_nothing_was_drafted():
    done = await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, speculation="off", max_new_tokens=7)
    stats = done.complete.speculation
    assert (stats.policy, stats.rounds, stats.pulls, stats.emitted) == ("off", 7, {"off": 7}, {1: 7})
    guesses = (stats.drafted_tokens, stats.accepted_tokens, stats.discarded_tokens, stats.trimmed_tokens)
    assert guesses == (0, 0, 0, 0) and (stats.late_drafts, stats.draft_us, stats.cut_tokens) == (0, 0, 0)
    assert stats.verify_us == 7 * 5 and stats.contradictions == ()


async def test_a_resumed_answer_accounts_for_the_rounds_of_its_own_stream():
    held = plain_answer(IDS, Sampling(), 3)
    request = build_request(PROMPT, speculation="(1,1,1)", max_new_tokens=9)
    request.resume.CopyFrom(resume_of(IDS, held))
    events = [event async for event in ingress(EdgePeers()).generate(request)]
    account = events[-1].complete.speculation
    assert (account.rounds, dict(account.emitted), account.emitted_tokens) == (2, {4: 1, 2: 1}, 6)


class StepClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def drafted(guesses: int, draft_us: int) -> DraftTree:
    plain = DraftTree.of(range(guesses + 1), range(-1, guesses))
    return replace(plain, draft_us=draft_us)


def verdict(emitted: int, length: int, verify_us: int, queue_us: int, trimmed: int = 0) -> Verdict:
    accepted = min(length - 1, emitted)
    finish = Finish.LENGTH if emitted < length else None
    path = tuple(range(emitted))
    return Verdict((1,) * emitted, path, (0,) * accepted, finish, length, verify_us, queue_us, texts=2, trimmed=trimmed)


def test_a_tally_on_paper():
    """Five rounds with the times that they took in milliseconds, and all that the account must say of them."""
    clock, experience = StepClock(), Experience()
    rounds = [  # shape, tree, verdict, wall in ms
        (CHAIN, drafted(3, 2000), verdict(4, 4, 5000, 1000), 50.0),  # the first: 42 ms of it are its opening
        (CHAIN, drafted(3, 2000), verdict(2, 2, 5000, 0, trimmed=1), 9.0),
        (CHAIN, replace(drafted(0, 4000), missed=True), verdict(1, 1, 4000, 500), 9.0),  # a late draft
        (OFF, drafted(0, 0), verdict(1, 1, 4001, 0), 4.0),  # a peer that counts more than was there: a rounding
        (CHAIN, drafted(3, 2000), verdict(2, 4, 5000, 0), 8.0),  # cut: two accepted, one more and the target's not
    ]
    with experience.concurrency.running() as place:
        account = RoundAccount(
            SpeculationPlan("fixed", ScriptedPolicy([shape for shape, *_ in rounds])), experience, place, 0.0, clock
        )
        for shape, tree, found, wall_ms in rounds:
            clock.now_s += 0.25  # between rounds: the client is slow
            assert account.choose() == shape
            clock.now_s += (wall_ms + 0.0005) / 1e3
            account.learn(shape, tree, found)
    account = account.stats
    assert account == pb.SpeculationStats(
        policy="fixed",
        rounds=5,
        pulls={"(1,1,1)": 4, "off": 1},
        emitted={4: 1, 2: 2, 1: 2},
        emitted_tokens=10,
        cut_tokens=2,
        drafted_tokens=9,
        accepted_tokens=6,
        discarded_tokens=3,
        trimmed_tokens=1,
        late_drafts=1,
        rounds_us=50_000 + 9_000 + 9_000 + 4_001 + 8_000,
        draft_us=10_000,
        verify_us=23_001,
        queue_us=1_500,
        hop_us=2_000 + 500 + 0 + 1_000,
        opening_us=42_000,
        decode_tokens=6,
        decode_us=account.decode_us,
    )
    assert account.decode_us == pytest.approx(4 * 250_000 + 30_000, abs=10)


class ScriptedPolicy:
    """Chooses what it was told to."""

    def __init__(self, shapes: list[TreeShape]) -> None:
        self.shapes = shapes

    def choose(self, offer: Offer | None = None) -> TreeShape:
        return self.shapes.pop(0)

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        """There is nothing to learn."""


GOOD = SpeculationStats(
    policy="fixed",
    rounds=3,
    pulls={"(1,1,1)": 2, "off": 1},
    emitted={4: 1, 1: 1, 2: 1},
    emitted_tokens=7,
    cut_tokens=1,
    drafted_tokens=6,
    accepted_tokens=5,
    discarded_tokens=1,
    trimmed_tokens=1,
    rounds_us=15,
    draft_us=1,
    verify_us=2,
    queue_us=3,
    hop_us=4,
    opening_us=5,
)


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"pulls": {"off": 2}}, "rounds, by shape"),
        ({"emitted": {4: 1, 3: 1}}, "rounds, by emitted tokens"),
        ({"emitted": {4: 1, 2: 2}}, "emitted_tokens"),
        ({"cut_tokens": 0}, "accepted_tokens"),
        ({"discarded_tokens": 2}, "drafted_tokens"),
        ({"trimmed_tokens": 2}, "trimmed_tokens"),
        ({"hop_us": 3}, "rounds_us"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_figure_is_found_in_its_account(wrong: dict, told: str):
    assert GOOD.contradictions == ()
    found = replace(GOOD, **wrong).contradictions
    assert len(found) == 1 and found[0].startswith(told)


async def test_an_end_of_text_that_cuts_a_round_is_accounted_for(monkeypatch: pytest.MonkeyPatch):
    """The target's third token ends the text; the chain's guesses go on past it."""
    spoken = plain_answer(IDS, Sampling(), 12)
    monkeypatch.setattr("edge.next_token", lambda ids, _: END if len(ids) == len(IDS) + 2 else spoken[len(ids) % 12])
    done = await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, speculation="(1,1,1)", max_new_tokens=12)
    stats = done.complete.speculation
    assert done.complete.finish is Finish.END_OF_TEXT and len(done.token_ids) == 3
    assert (stats.emitted, stats.cut_tokens, stats.accepted_tokens, stats.discarded_tokens) == ({3: 1}, 1, 3, 0)
    assert stats.contradictions == ()
