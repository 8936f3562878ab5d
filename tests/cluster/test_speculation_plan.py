"""The `speculation` field of requests, and the account of their rounds."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from time import monotonic

import pytest
from dendro.answer import Completion, SpeculationStats, build_request
from dendro.clock import Clock
from dendro.errors import BadRequest
from dendro.modes import VerificationMode
from dendro.shapes import TreeShape
from dendro.speculation import Mode, Speculation
from dendro.text import Finish, Limits, Sampling, Text, Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.api.local import LocalClient
from cluster.arms import OFF_ARM, Arm
from cluster.peers.pools import Peers
from cluster.policies import ConservativeUCB, Experience, Offer, PaperUCB, RunningRequest, Static
from cluster.router.account import ROUND_PARTS, AnswerAccount, TargetTotals
from cluster.router.ingress import Ingress
from cluster.router.request_speculation import RequestSpeculation
from cluster.router.speculation import SpeculationPlan, TargetArms, plan_speculation
from cluster.sessions import MemorySessions
from tests.support import fakes
from tests.support.edge import END, SERVED, EdgePeers, config, ingress, plain_answer, resume_of
from tests.support.fakes import NoDrafter
from tests.support.virtual_time import SetClock

PROMPT = "walk the "
IDS = list(PROMPT.encode())
CHAIN = Arm.parse("mamba:(1,1,1)")


def planned(requested: Speculation | str, **sections: object) -> SpeculationPlan:
    message = build_request(PROMPT, speculation=requested).speculation
    return plan_speculation(message, TargetArms.of(config(**sections), "demo"), Experience(), Sampling())


# Requests


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", Speculation()),
        ("auto", Speculation(Mode.AUTO)),
        (" off ", Speculation(Mode.OFF)),
        ("(3,2,1)", Speculation(Mode.FIXED, "(3,2,1)")),
        ("beam(4,3)", Speculation(Mode.FIXED, "beam(4,3)")),
        ("wide", Speculation(Mode.FIXED, "wide")),  # the server refuses it
    ],
)
def test_a_text_is_parsed_as_a_mode_or_a_shape(text: str, expected: Speculation):
    assert Speculation.parse(text) == expected


def test_every_field_is_in_the_message_and_fields_left_out_stay_absent():
    message = build_request("p", speculation=Speculation.parse("auto", "paper_ucb", 0, 9)).speculation
    assert (message.mode, message.shape, message.policy) == (pb.Speculation.MODE_AUTO, "", "paper_ucb")
    assert message.HasField("max_nodes") and (message.max_nodes, message.deadline_ms) == (0, 9)
    plain = build_request("p").speculation
    assert not plain.HasField("max_nodes") and not plain.HasField("deadline_ms")


@pytest.mark.parametrize(
    "shape",
    ["(3,2,1)", "3,2,1", "nodes(2,1)", "beam(4,3)", "dynamic(3,2,6)", "until(0.6,8)", "until(auto,8)", "proposed(7)"]
    + ["off"],
)
def test_every_kind_of_shape_can_be_fixed(shape: str):
    plan = planned(Speculation(Mode.FIXED, shape))
    assert isinstance(plan.policy, Static) and plan.policy.arm.shape == TreeShape.parse(shape) and plan.name == "fixed"


TWO_DRAFTERS = {"drafters": {"mamba": {"checkpoint": "mamba"}, "small": {"checkpoint": "small"}}}


@pytest.mark.parametrize(
    "shape, arm", [("small:(3,2,1)", "small:(3,2,1)"), ("mamba: 1,1", "mamba:(1,1)"), ("(2,1)", "mamba:(2,1)")]
)
def test_a_fixed_shape_may_name_its_drafter_and_has_the_first_otherwise(shape: str, arm: str):
    plan = planned(Speculation(Mode.FIXED, shape), **TWO_DRAFTERS)
    assert isinstance(plan.policy, Static) and str(plan.policy.arm) == arm


async def test_rounds_are_counted_by_drafter_and_shape_where_a_target_has_several_drafters():
    client = LocalClient(ingress(EdgePeers(), **TWO_DRAFTERS))
    done = await client.generate_text(PROMPT, speculation="auto", max_new_tokens=60)
    stats = done.complete.speculation
    assert stats.contradictions == () and done.token_ids == tuple(plain_answer(IDS, Sampling(), 60))
    assert Counter(part.shape for part in done.rounds) == stats.rounds_by_shape
    assert all(shape == "off" or shape.startswith(("mamba:", "small:")) for shape in stats.rounds_by_shape)
    for arm in ("mamba:(1,1,1)", "small:(2,1)"):
        fixed = await client.generate_text(PROMPT, speculation=arm, max_new_tokens=9)
        assert fixed.complete.speculation.rounds_by_shape.keys() == {arm}


def test_auto_chooses_among_the_shapes_of_all_drafters():
    policy = planned("auto", **TWO_DRAFTERS).policy
    assert isinstance(policy, ConservativeUCB)
    assert [str(arm) for arm in policy.arms] == ["off", "mamba:(1,1,1)", "small:(1,1,1)", "mamba:(2,1)", "small:(2,1)"]


@pytest.mark.parametrize("text", ["until(0,8)", "until(1,8)", "until(0.6,0)", "until(0.12345,8)", "until(0.6,9)"])
def test_a_stop_rule_with_a_bad_number_is_refused_by_the_name_of_the_field(text: str):
    """The target's greatest depth is 8."""
    with pytest.raises(BadRequest, match="^speculation.shape"):
        planned(Speculation(Mode.FIXED, text))


def test_a_plan_knows_whether_an_arms_numbers_are_computed_before_each_round():
    assert planned(Speculation(Mode.FIXED, "until(auto,8)")).stops
    assert not planned(Speculation(Mode.FIXED, "until(0.6,8)")).stops
    assert not planned(Speculation()).stops


def test_proposals_may_have_more_guesses_than_the_targets_greatest_depth():
    """It is 8 here; deeper proposals are cut."""
    assert planned(Speculation(Mode.FIXED, "proposed(15)")).proposed_rows == 16


@pytest.mark.parametrize(
    ("speculation", "mode", "plain"),
    [("off", "coupled", True), ("auto", "coupled", True), ("(2,1)", "coupled", False), ("auto", "multi-step", False)],
)
def test_the_first_round_has_no_tree_unless_the_client_fixes_one_or_its_guesses_are_drawn(speculation, mode, plain):
    message = build_request("p", speculation=speculation).speculation
    sampling = Sampling(temperature=1.0, mode=VerificationMode(mode))
    settings = config(verification_modes=["multi-step"])
    assert plan_speculation(message, TargetArms.of(settings, "demo"), Experience(), sampling).plain_first is plain


@pytest.mark.parametrize(
    ("speculation", "plain", "first"), [("off", True, "off"), ("auto", True, "off"), ("(1,1,1)", False, "(1,1,1)")]
)
async def test_a_request_tells_its_verifier_of_a_first_round_without_a_tree_and_prepares_its_drafter(
    speculation: str, plain: bool, first: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cluster.router.speculation.policy_named", lambda *_: Static(CHAIN))
    peers = EdgePeers()
    request = build_request("walk", speculation=speculation, max_new_tokens=20)
    events = [event async for event in ingress(peers).generate(request)]
    assert peers.plain_first == [plain]
    assert next(event.chunk.shape for event in events if event.HasField("chunk")) == first
    assert peers.prepared == {"off": [OFF_ARM], "auto": [CHAIN], "(1,1,1)": []}[speculation]
    if speculation == "auto":
        stats = events[-1].complete.speculation
        assert stats.rounds_by_shape == {"off": 1, "(1,1,1)": stats.rounds - 1}


def test_off_means_no_trees_and_auto_the_configured_policy_and_arms():
    off, auto = planned("off"), planned("auto")
    assert isinstance(off.policy, Static) and off.policy.arm == OFF_ARM and off.name == "off"
    assert isinstance(auto.policy, ConservativeUCB) and auto.name == "conservative_ucb"
    assert [str(arm) for arm in auto.policy.arms] == ["off", "mamba:(1,1,1)", "mamba:(2,1)"]
    absent = plan_speculation(pb.Speculation(), TargetArms.of(config(), "demo"), Experience(), Sampling())
    assert absent.name == "conservative_ucb" and absent.free


def test_a_request_can_name_its_policy():
    plan = planned(Speculation(policy="paper_ucb"))
    assert isinstance(plan.policy, PaperUCB) and plan.name == "paper_ucb"


@pytest.mark.parametrize(
    "max_nodes, left",
    [(0, ["off"]), (2, ["off"]), (3, ["off", "mamba:(1,1,1)"]), (4, ["off", "mamba:(1,1,1)", "mamba:(2,1)"])],
)
def test_auto_leaves_out_arms_with_more_guesses_than_max_nodes(max_nodes: int, left: list[str]):
    policy = planned(Speculation(max_nodes=max_nodes)).policy
    assert isinstance(policy, ConservativeUCB) and [str(arm) for arm in policy.arms] == left


def test_auto_cuts_proposals_to_max_nodes_without_duplicates():
    policy = planned(Speculation(max_nodes=3), speculation={"arms": ["proposed(7)", "proposed(8)", "(2,1)"]}).policy
    assert isinstance(policy, ConservativeUCB) and [str(arm) for arm in policy.arms] == [
        "off",
        "lookup+suffix:proposed(3)",
    ]


def test_proposals_fill_a_fixed_proposed_shape_and_add_nothing_to_a_fixed_tree():
    assert planned(Speculation(Mode.FIXED, "proposed(5)")).proposed_rows == 6
    assert planned(Speculation(Mode.FIXED, "(2,1)")).proposed_rows == 1


def test_off_is_the_only_arm_where_no_other_is_small_enough():
    policy = planned(Speculation(max_nodes=1), speculation={"arms": ["(2,1)"]}).policy
    assert isinstance(policy, ConservativeUCB) and policy.arms == (OFF_ARM,)


def test_auto_adds_a_chain_that_fits_where_max_nodes_leaves_a_drafters_own_out():
    policy = planned(Speculation(max_nodes=4), speculation={"arms": ["(1,1,1,1,1)", "(2,1)"]}).policy
    assert isinstance(policy, ConservativeUCB)
    assert [str(arm) for arm in policy.arms] == ["off", "mamba:(1,1)", "mamba:(2,1)"]


def test_a_fixed_shape_may_have_exactly_max_nodes_guesses():
    assert planned(Speculation(Mode.FIXED, "(2,1)", max_nodes=4)).policy.choose() == Arm.parse("mamba:(2,1)")


@pytest.mark.parametrize(
    "speculation, free",
    [
        (Speculation(), True),
        (Speculation(policy="conservative_ucb"), True),
        (Speculation(policy="paper_ucb"), False),
        (Speculation(max_nodes=60), False),
        (Speculation(deadline_ms=5), False),
        (Speculation(Mode.OFF), False),
        (Speculation(Mode.FIXED, "(1,)"), False),
    ],
    ids=str,
)
def test_only_requests_with_default_speculation_join_a_trial(speculation: Speculation, free: bool):
    assert planned(speculation).free is free


NO_DRAFTERS = {"drafters": {}}


@pytest.mark.parametrize(
    "field, speculation, sections",
    [
        ("shape", Speculation(shape="(1,1)"), {}),
        ("shape", Speculation(Mode.OFF, "(1,1)"), {}),
        ("shape", Speculation(Mode.FIXED), {}),
        ("shape", Speculation(Mode.FIXED, "wide"), {}),
        ("shape", Speculation(Mode.FIXED, "auto"), {}),
        ("shape", Speculation(Mode.FIXED, "(9,9)"), {}),
        ("shape", Speculation(Mode.FIXED, "(1,1,1,1,1,1,1,1,1)"), {}),  # the target takes a depth of 8
        ("shape", Speculation(Mode.FIXED, "(1,)"), NO_DRAFTERS),
        ("shape", Speculation(Mode.FIXED, "small:(1,)"), {}),  # the drafter is mamba
        ("shape", Speculation(Mode.FIXED, "mamba:(1,)"), NO_DRAFTERS),
        ("shape", Speculation(Mode.FIXED, "mamba:off"), {}),
        ("shape", Speculation(Mode.FIXED, "mamba:proposed(3)"), {}),
        ("shape", Speculation(Mode.FIXED, ":(1,)"), {}),
        ("shape", Speculation(Mode.FIXED, "m" * 500 + ":(1,1,1,1,1)"), {}),
        ("shape", Speculation(Mode.FIXED, "proposed(3)"), {"speculation": {"proposers": []}}),
        ("deadline_ms", Speculation(Mode.FIXED, "proposed(3)", deadline_ms=5), {}),
        ("policy", Speculation(policy="best"), {}),
        ("policy", Speculation(Mode.OFF, policy="conservative_ucb"), {}),
        ("policy", Speculation(Mode.FIXED, "(1,)", "conservative_ucb"), {}),
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
def test_contradictory_fields_are_refused_by_name(field: str, speculation: Speculation, sections: dict):
    with pytest.raises(BadRequest) as refused:
        planned(speculation, **sections)
    assert refused.value.field == f"speculation.{field}"


def test_an_unknown_mode_is_refused():
    with pytest.raises(BadRequest) as refused:
        plan_speculation(pb.Speculation(mode=9), TargetArms.of(config(), "demo"), Experience(), Sampling())
    assert refused.value.field == "speculation.mode"


@pytest.mark.parametrize("field, fields", [("max_nodes", {"max_nodes": -1}), ("deadline_ms", {"deadline_ms": 1 << 32})])
def test_a_number_that_its_field_cannot_hold_is_refused_before_it_is_sent(field: str, fields: dict):
    with pytest.raises(BadRequest) as refused:
        build_request("p", speculation=Speculation(**fields))
    assert refused.value.field == f"speculation.{field}"


async def test_all_requests_but_those_with_default_or_no_speculation_count_as_fixed():
    router = ingress(EdgePeers())
    seen = []
    for each in (Speculation(), Speculation(max_nodes=3), Speculation(Mode.OFF)):
        async for event in LocalClient(router).generate(PROMPT, speculation=each, max_new_tokens=3):
            del event
            seen.append((each.mode, each.max_nodes, router.experience["demo"].concurrency.fixed))
    assert {entry for entry in seen if entry[2]} == {(Mode.AUTO, 3, 1)}


# The wait for a draft


@pytest.mark.parametrize("server_ms, request_ms", [(60_000, 1), (1, 60_000)], ids=["request", "server"])
async def test_the_shorter_of_two_deadlines_bounds_the_wait_for_a_draft(server_ms: int, request_ms: int):
    """Drafts take half a minute, so a round that waited for its draft would time out."""
    drafter, verifier = fakes.FakeDrafter(pause_s=30.0), fakes.FakeVerifier()
    settings = config(router={"draft_timeout_ms": server_ms})
    peers = Peers(settings, {"demo": fakes.FakePool(verifier)}, {"mamba": fakes.FakePool(drafter)})
    client = LocalClient(Ingress(settings, peers, MemorySessions(), SERVED))
    async with asyncio.timeout(10):
        done = await client.generate_text(
            [5, 6, 7], max_new_tokens=5, speculation=Speculation(Mode.FIXED, "(1,1)", deadline_ms=request_ms)
        )
    assert list(done.token_ids) == fakes.plain([5, 6, 7], 5)
    assert done.complete.speculation.late_drafts == 5 and drafter.calls == 1


# The account


def recounted(done: Completion) -> SpeculationStats:
    """The account with the fields that the stream determines recomputed from it."""
    return replace(
        done.complete.speculation,
        rounds=len(done.rounds),
        rounds_by_shape=dict(Counter(part.shape for part in done.rounds)),
        rounds_by_tokens=dict(Counter(len(part.token_ids) for part in done.rounds)),
        emitted_tokens=len(done.token_ids),
    )


REQUESTS = [
    Speculation(),
    Speculation(Mode.OFF),
    Speculation(Mode.FIXED, "(1,1,1)"),
    Speculation(Mode.FIXED, "beam(3,2)"),
    Speculation(max_nodes=3, policy="paper_ucb"),
    Speculation(deadline_ms=50),
]


@pytest.mark.parametrize("speculation", REQUESTS, ids=str)
@pytest.mark.parametrize("tokens", range(1, 10))
async def test_an_account_is_consistent_and_speculation_changes_no_token(speculation: Speculation, tokens: int):
    """At every length, so that the limit cuts the last round at every position."""
    client = LocalClient(ingress(EdgePeers()))
    done = await client.generate_text(PROMPT, speculation=speculation, temperature=1.0, seed=3, max_new_tokens=tokens)
    stats = done.complete.speculation
    assert list(done.token_ids) == plain_answer(IDS, Sampling(temperature=1.0, seed=3), tokens)
    assert stats.contradictions == () and recounted(done) == stats


async def test_the_account_of_an_answer_without_trees_has_zeros_for_drafts():
    done = await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, speculation="off", max_new_tokens=7)
    stats = done.complete.speculation
    assert (stats.policy, stats.rounds, stats.rounds_by_shape, stats.rounds_by_tokens) == ("off", 7, {"off": 7}, {1: 7})
    guesses = (stats.drafted_tokens, stats.accepted_tokens, stats.discarded_tokens, stats.trimmed_tokens)
    assert guesses == (0, 0, 0, 0) and (stats.late_drafts, stats.draft_us, stats.cut_tokens) == (0, 0, 0)
    assert stats.verify_us == 7 * 5 and stats.contradictions == ()


async def test_a_resumed_answer_accounts_for_the_rounds_of_its_own_stream():
    earlier = plain_answer(IDS, Sampling(), 3)
    request = build_request(PROMPT, speculation="(1,1,1)", max_new_tokens=9)
    request.resume.CopyFrom(resume_of(IDS, earlier))
    events = [event async for event in ingress(EdgePeers()).generate(request)]
    account = events[-1].complete.speculation
    assert (account.rounds, dict(account.rounds_by_tokens), account.emitted_tokens) == (2, {4: 1, 2: 1}, 6)


def drafted(guesses: int, draft_us: int) -> DraftTree:
    plain = DraftTree.of(range(guesses + 1), range(-1, guesses))
    return replace(plain, draft_us=draft_us)


def verdict(emitted: int, length: int, verify_us: int, queue_us: int, trimmed: int = 0) -> Verdict:
    accepted = min(length - 1, emitted)
    finish = Finish.LENGTH if emitted < length else None
    path = tuple(range(emitted))
    return Verdict((1,) * emitted, path, (0,) * accepted, finish, length, verify_us, queue_us, texts=2, trimmed=trimmed)


def speculation_of(
    experience: Experience,
    running: RunningRequest,
    arms: list[Arm],
    stays: bool = False,
    clock: Clock = monotonic,
    account: AnswerAccount | None = None,
) -> RequestSpeculation:
    """Of a text without drafters, whose policy chooses these arms."""
    policy, text = ScriptedPolicy(arms), Text((1, 2, 3), Sampling(), Limits(64))
    policy.next_arm = OFF_ARM if stays else None
    plan = SpeculationPlan("fixed", policy)
    return RequestSpeculation(plan, experience, running, text, NoDrafter(), clock=clock, account=account)


async def announces(speculation: RequestSpeculation, arm: Arm) -> bool:
    """Whether the current round announces that the next has no tree."""
    tree = await speculation.draft(Text((1, 2, 3), Sampling(), Limits(64)), arm)
    return tree.ahead


async def test_a_tree_for_a_round_that_was_announced_without_one_is_drafted_a_round_later():
    """The verifier has begun the round by then: a tree would wait for it, and what it computed would be lost."""
    experience = Experience()
    with experience.concurrency.running() as running:
        speculation = speculation_of(experience, running, [OFF_ARM, CHAIN, CHAIN, CHAIN], stays=True)
        assert speculation.choose().off and await announces(speculation, OFF_ARM)
        assert speculation.choose().off and not await announces(speculation, OFF_ARM)
        assert speculation.choose() == CHAIN and not await announces(speculation, CHAIN)
        assert speculation.choose() == CHAIN


async def test_a_tree_is_drafted_at_once_where_no_round_was_announced():
    experience = Experience()
    with experience.concurrency.running() as running:
        speculation = speculation_of(experience, running, [OFF_ARM, CHAIN])
        assert speculation.choose().off and not await announces(speculation, OFF_ARM)
        assert speculation.choose() == CHAIN and not await announces(speculation, CHAIN)


def test_paper_ucb_learns_what_a_level_costs_beside_a_step():
    """Drafts of three levels take 6 ms, steps 10 ms: lambda_gamma is 2 / 10. Rounds before the drafter is open are left
    out."""
    experience = Experience()
    unopened = replace(drafted(0, 0), missed=True)
    with experience.concurrency.running() as running:
        for _ in range(2):
            plan = SpeculationPlan("paper_ucb", PaperUCB([OFF_ARM, CHAIN], experience.draft_ratio))
            speculation = RequestSpeculation(
                plan, experience, running, Text((1, 2, 3), Sampling(), Limits(64)), NoDrafter()
            )
            speculation.choose()
            speculation.learn(CHAIN, unopened, verdict(1, 1, 10_000, 0))
            assert CHAIN not in experience.costs.draft or experience.costs.draft[CHAIN].us
            for arm, tree in ((OFF_ARM, drafted(0, 0)), (CHAIN, drafted(3, 6_000))) * 3:
                speculation.choose()
                speculation.learn(arm, tree, verdict(1, tree.rows, 10_000, 0))
    assert experience.draft_ratio == pytest.approx(0.2)


def test_the_account_of_a_hand_example():
    """Five rounds with their times in milliseconds, and all fields of their account; the router's totals have its parts
    too, without the time between rounds."""
    clock, experience, totals = SetClock(), Experience(), TargetTotals.of(config(), "demo")
    account = AnswerAccount("fixed")
    account.begin(totals, clock())
    rounds = [  # arm, tree, verdict, wall in ms
        (CHAIN, drafted(3, 2000), verdict(4, 4, 5000, 1000), 50.0),  # the first: 42 ms of it are its opening
        (CHAIN, drafted(3, 2000), verdict(2, 2, 5000, 0, trimmed=1), 9.0),
        (CHAIN, replace(drafted(0, 4000), missed=True), verdict(1, 1, 4000, 500), 9.0),  # a late draft
        (OFF_ARM, drafted(0, 0), verdict(1, 1, 4001, 0), 4.0),  # the peer's time exceeds the round's, by rounding
        (CHAIN, drafted(3, 2000), verdict(2, 4, 5000, 0), 8.0),  # cut: the third accepted token and the target's
    ]
    with experience.concurrency.running() as running:
        speculation = speculation_of(experience, running, [arm for arm, *_ in rounds], clock=clock, account=account)
        for arm, tree, found, wall_ms in rounds:
            clock.now_s += 0.25  # between rounds: the client is slow
            assert speculation.choose() == arm
            clock.now_s += (wall_ms + 0.0005) / 1e3
            speculation.learn(arm, tree, found)
    complete = pb.GenerateComplete()
    speculation.fill(complete, None, 0)
    stats = complete.speculation
    assert stats == pb.SpeculationStats(
        policy="fixed",
        rounds=5,
        rounds_by_shape={"(1,1,1)": 4, "off": 1},
        rounds_by_tokens={4: 1, 2: 2, 1: 2},
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
        decode_us=stats.decode_us,
    )
    assert stats.decode_us == pytest.approx(4 * 250_000 + 30_000, abs=10)
    assert totals.round_s == pytest.approx({part: getattr(stats, f"{part}_us") / 1e6 for part in ROUND_PARTS})


class ScriptedPolicy:
    """Chooses the given arms in order."""

    next_arm: Arm | None = None

    def __init__(self, arms: list[Arm]) -> None:
        self.arms = arms

    def choose(self, offer: Offer | None = None) -> Arm:
        return self.arms.pop(0)

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        """Does nothing."""


GOOD = SpeculationStats(
    policy="fixed",
    rounds=3,
    rounds_by_shape={"(1,1,1)": 2, "off": 1},
    rounds_by_tokens={4: 1, 1: 1, 2: 1},
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
    "wrong, named",
    [
        ({"rounds_by_shape": {"off": 2}}, "rounds, by shape"),
        ({"rounds_by_tokens": {4: 1, 3: 1}}, "rounds, by emitted tokens"),
        ({"rounds_by_tokens": {4: 1, 2: 2}}, "emitted_tokens"),
        ({"cut_tokens": 0}, "accepted_tokens"),
        ({"discarded_tokens": 2}, "drafted_tokens"),
        ({"trimmed_tokens": 2}, "trimmed_tokens"),
        ({"hop_us": 3}, "rounds_us"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_figure_is_named_as_a_contradiction(wrong: dict, named: str):
    assert GOOD.contradictions == ()
    found = replace(GOOD, **wrong).contradictions
    assert len(found) == 1 and found[0].startswith(named)


async def test_an_end_of_text_that_cuts_a_round_is_accounted_for(monkeypatch: pytest.MonkeyPatch):
    """The target's third token ends the text; the chain has guesses beyond it."""
    answer = plain_answer(IDS, Sampling(), 12)
    monkeypatch.setattr(
        "tests.support.edge.next_token", lambda ids, _: END if len(ids) == len(IDS) + 2 else answer[len(ids) % 12]
    )
    done = await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, speculation="(1,1,1)", max_new_tokens=12)
    stats = done.complete.speculation
    assert done.complete.finish is Finish.END_OF_TEXT and len(done.token_ids) == 3
    assert (stats.rounds_by_tokens, stats.cut_tokens) == ({3: 1}, 1)
    assert (stats.accepted_tokens, stats.discarded_tokens) == (3, 0)
    assert stats.contradictions == ()
