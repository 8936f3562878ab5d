"""Proposers against slow references, and their proposals in merged trees."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from dendro.shapes import MAX_ROWS, OFF, LevelShape, ProposedShape, TreeShape
from dendro.text import Limits, Sampling, Text, Verdict
from dendro.tree import DraftTree
from hypothesis import given
from hypothesis import strategies as st

from cluster.arms import Arm
from cluster.policies import Experience, Static
from cluster.policies.experience import Concurrency
from cluster.policies.step_time import TargetSteps
from cluster.proposers import lookup, suffix
from cluster.proposers.lookup import Lookup
from cluster.proposers.prediction import PredictedOutput, PredictedText
from cluster.proposers.proposal import LEAST, Proposal
from cluster.proposers.proposals import TENANTS, Chances, ProposalLibrary, Proposals, merge
from cluster.proposers.suffix import END, Automaton, Outputs, Recent, Suffix
from cluster.router.request_speculation import RequestSpeculation
from cluster.router.speculation import SpeculationPlan
from tests.support.fakes import NoDrafter

STRINGS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
"""With so few different tokens that most substrings recur."""


def of_mamba(shape: TreeShape) -> Arm:
    return Arm.of("mamba", shape)


def a_text(ids, tenant: str = "", prompt: int | None = None) -> Text:
    text = Text(ids[: prompt or len(ids)], Sampling(), Limits(10_000), tenant=tenant)
    if text.ids != list(ids):
        append(text, ids[len(text) :])
    return text


def append(text: Text, tokens) -> None:
    text.commit(Verdict(tuple(tokens), (0,) * len(tokens), (), None, len(tokens)))


def proposed(proposer, text: Text, max_rows: int = 64, max_depth: int = 16) -> Proposal:
    proposer.grow(text)
    return proposer.propose(text, max_rows, max_depth)


def paths(tree: Proposal | DraftTree) -> list[tuple[int, ...]]:
    """The path to every row but the root, in order of rows."""
    found: list[tuple[int, ...]] = [()]
    for row in range(1, len(tree.tokens)):
        found.append((*found[int(tree.parents[row])], int(tree.tokens[row])))
    return found[1:]


# Lookup


def slow_lookup(ids: list[int], max_depth: int) -> list[tuple[int, ...]]:
    """The continuations of every earlier n-gram that matches the end, longest first, then newest."""
    found: dict[int, tuple[int, ...]] = {}
    for n in range(lookup.LONGEST, 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:] and ids[end] not in found and len(found) < lookup.BRANCHES:
                longer = list(ids)
                for place in range(end, end + max_depth):
                    longer.append(longer[place])
                found[ids[end]] = tuple(longer[len(ids) :])
    return list(found.values())


@given(STRINGS, st.integers(1, 6))
def test_lookup_finds_the_continuations_of_the_longest_n_grams(ids, max_depth):
    chains = [path for path in paths(proposed(Lookup(), a_text(ids), 64, max_depth)) if len(path) == max_depth]
    assert chains == slow_lookup(ids, max_depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "FEW", 0)  # compares many occurrences at once
        patch.setattr(lookup, "SHORT", len(ids) // 2)
        many = [path for path in paths(proposed(Lookup(), a_text(ids), 64, max_depth)) if len(path) == max_depth]
    assert many == chains


@given(STRINGS, st.integers(1, 40))
def test_a_lookup_that_grew_with_its_text_equals_one_given_the_whole_text(ids, prompt):
    text, grown = a_text(ids[:prompt]), Lookup()
    proposed(grown, text)
    for token in ids[prompt:]:
        append(text, [token])
    assert proposed(grown, text) == proposed(Lookup(), a_text(ids))


def test_a_root_with_more_occurrences_than_are_compared_still_has_its_longest_match():
    ids = [5, 6, 7, 0, 3, *[1, 0] * lookup.MOST, 5, 6, 7, 0]
    assert proposed(Lookup(), a_text(ids)).tokens[1:3] == [3, 1]


def test_a_lookup_considers_a_bounded_number_of_occurrences_and_the_newest_of_them():
    ids = [7, 1, *[9, 0] * lookup.SCANNED, 5, 0]
    grown = Lookup()
    for length in (len(ids) - 2, len(ids)):
        grown.grow(Text(ids[:length], Sampling(), Limits(1 << 20)))
    places = grown._earlier(0)
    assert len(places) == lookup.SCANNED
    assert places.tolist() == [place for place, token in enumerate(ids[:-1]) if token == 0][-lookup.SCANNED :]
    assert grown._earlier(7).tolist() == []


@pytest.mark.parametrize("make", [Lookup, lambda: Suffix(Outputs(64), 64)], ids=["lookup", "suffix"])
@pytest.mark.parametrize(
    "ids, guesses",
    [([3], []), ([3, 4], []), ([3, 3], [3]), ([3] * 4, [3]), ([1, 2, 1, 2], [1]), ([1, 2, 3, 1], [2])],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_an_end_does_not_match_itself_but_an_overlapping_occurrence(make, ids, guesses):
    """The end of `aaaa` matches the earlier `aaa`, which an `a` follows."""
    found = proposed(make(), a_text(ids), 64, 3)
    firsts = [token for token, parent in zip(found.tokens, found.parents, strict=True) if parent == 0]
    assert firsts == guesses
    if guesses and len(set(ids)) == 1:
        assert paths(found)[-1] == (3, 3, 3)


@pytest.mark.parametrize("make", [Lookup, lambda: Suffix(Outputs(64), 64)], ids=["lookup", "suffix"])
@given(ids=STRINGS, max_rows=st.integers(1, 9), max_depth=st.integers(1, 4))
def test_a_proposal_keeps_its_limits_and_has_no_path_twice(make, ids, max_rows, max_depth):
    found = proposed(make(), a_text(ids), max_rows, max_depth)
    assert len(found.tokens) <= max_rows and max(map(len, paths(found)), default=0) <= max_depth
    assert len(set(paths(found))) == found.guesses
    assert all(0 < hope < 1 for hope in found.hopes[1:])
    tree = Chances().tree("any", found)
    assert replace(tree).rows == tree.rows, "passes the constructor's checks"


# Suffix automata


def followers(corpus: list[int], context: list[int]) -> tuple[Counter[int], int]:
    """How often each token followed the context's longest suffix that anything followed, and that suffix's length."""
    for n in range(len(context), 0, -1):
        found = Counter(
            corpus[end]
            for end in range(n, len(corpus))
            if corpus[end - n : end] == context[-n:] and corpus[end] != END and END not in corpus[end - n : end]
        )
        if found:
            return found, n
    return Counter(), 0


def automaton_of(ids) -> Automaton:
    automaton = Automaton()
    for token in ids:
        automaton.extend(token)
    return automaton


@given(STRINGS)
def test_the_automaton_finds_the_longest_suffix_that_occurred_before(ids):
    _, length = automaton_of(ids).before()
    assert length == max(
        n for n in range(len(ids)) if any(ids[e - n : e] == ids[len(ids) - n :] for e in range(len(ids)))
    )


@given(st.lists(st.integers(-1, 2), max_size=30), STRINGS)
def test_the_automaton_finds_the_longest_suffix_of_another_string_and_what_followed_it(corpus, tail):
    automaton = automaton_of(corpus)
    state, length = automaton.longest(tail)
    expected, longest = followers(corpus, tail)
    assert length == longest
    assert {token for _, token, _ in automaton.following(state, length)[0]} == expected.keys()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=suffix.COUNTED))
def test_continuations_are_weighed_by_how_often_they_followed(ids):
    automaton = automaton_of(ids)
    expected, longest = followers(ids, ids)
    found, length = automaton.following(*automaton.before())
    assert length == longest
    assert {token: share for share, token, _ in found} == pytest.approx(
        {token: count / expected.total() for token, count in expected.items()}
    )


@given(STRINGS)
def test_every_guess_of_the_suffix_proposer_followed_the_longest_known_suffix_of_its_path(ids):
    found = proposed(Suffix(Outputs(64), 100), a_text(ids), 64, 4)
    for path, matched in zip(paths(found), found.matched[1:], strict=True):
        expected, longest = followers(ids, ids + list(path[:-1]))
        assert path[-1] in expected and matched == longest
    assert {path[0] for path in paths(found) if len(path) == 1} == followers(ids, ids)[0].keys()


def test_a_long_prompt_is_processed_in_slices_without_its_oldest_part(monkeypatch):
    monkeypatch.setattr(suffix, "SLICE", 10)
    ids = [7, 8, 9, *range(100, 150), 7, 8]
    text, unbounded, bounded = a_text(ids), Suffix(Outputs(64), 200), Suffix(Outputs(64), 40)
    rounds = 0
    while not (found := proposed(unbounded, text)).guesses:
        rounds += 1
    assert found.tokens[1] == 9 and rounds == 0  # the end is matched against the tokens processed so far
    assert not any(proposed(bounded, text).guesses for _ in range(10))


@given(st.lists(STRINGS, max_size=8), st.integers(2, 20))
def test_memory_is_bounded_and_keeps_the_newest_tokens(answers, budget):
    recent, written = Recent(budget), []
    for answer in answers:
        for token in answer:
            recent.extend(token)
            written.append(token)
            assert recent.tokens <= budget and len(recent.newer._next) + len(recent.older._next) <= 2 * budget + 2
    for automaton, end in ((recent.newer, len(written)), (recent.older, len(written) - recent.newer.tokens)):
        kept = written[end - automaton.tokens : end]
        assert all(automaton.longest(kept[:-1])[1] == len(kept) - 1 for _ in [0] if kept)


def test_queued_answers_are_bounded():
    outputs = Outputs(20)
    for _ in range(5):
        outputs.add(range(15))
    outputs.grow()
    assert outputs.recent.tokens <= 20


async def test_an_answer_is_proposed_to_its_tenant_only():
    library = ProposalLibrary(("suffix",), 64, 16)
    first = a_text([1, 2, 3, 40, 41, 42, 43], "one", prompt=3)

    async def guesses(tenant: str) -> list[tuple[int, ...]]:
        handle = library.of(tenant, MAX_ROWS, 0.0)
        return paths(await drafted(handle, a_text([9, 40, 41], tenant), of_mamba(LevelShape((1, 1, 1)))))

    assert await guesses("one") == []
    handle = library.of("one", MAX_ROWS, 0.0)
    handle.end(first)
    handle.end(first)
    assert await guesses("one") == [(42,), (42, 43)]
    assert await guesses("two") == await guesses("") == []
    for number in range(TENANTS):
        await guesses(f"other {number}")
    assert await guesses("one") == [], "dropped as the least recently used"


def test_no_match_crosses_from_one_answer_into_the_next():
    outputs = Outputs(100)
    outputs.add([1, 2])
    outputs.add([3, 4])
    assert proposed(Suffix(outputs, 100), a_text([9, 1, 2])).guesses == 0


# Chances


def test_a_chance_is_the_share_that_came_true_given_its_path():
    chances, proposal = Chances(), Proposal(5)
    chain = proposal.add(proposal.add(0, 6, 1, 0.5), 7, 2, 0.6)
    proposal.add(0, 8, 1, 0.1)
    before = chances.tree("lookup", proposal)
    assert before.values[1] == pytest.approx(math.log(0.5)) and before.values[2] == pytest.approx(math.log(0.3))
    for _ in range(100):
        for came in ([6, 7, 1], [6, 1], [8], [9, 6]):
            chances.learn("lookup", proposal, came)
    assert sum(count.of for count in chances.counts.values()) == 100 * (3 + 3 + 2 + 2), (
        "rows after a wrong guess do not count"
    )
    tree = chances.tree("lookup", proposal)
    first, below, other = np.exp(tree.values[1:])
    assert chain == 2 and (first, below, other) == pytest.approx((0.5, 0.25, 0.25), abs=0.01)
    assert np.array_equal(chances.tree("suffix", proposal).values, before.values), "proposers are counted separately"


def test_guesses_that_never_come_true_get_no_rows_until_they_do_again():
    chances, proposal = Chances(), Proposal(5)
    proposal.add(proposal.add(0, 6, 1, 0.5), 7, 2, 0.6)
    for _ in range(200):
        chances.learn("lookup", proposal, [1])
    assert chances.tree("lookup", proposal).guesses == 0
    for _ in range(200):
        chances.learn("lookup", proposal, [6])
    assert np.exp(chances.tree("lookup", proposal).values[1]) > 0.4


# Merging

TOKENS = st.integers(0, 3)


@st.composite
def trees(draw, most: int = 12) -> DraftTree:
    """Any tree below the token 9, with values that fall along its paths."""
    tokens, parents, values = [9], [-1], [0.0]
    for _ in range(draw(st.integers(0, most))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(TOKENS)
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
            values.append(values[parent] - draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])))
    return DraftTree(np.array(tokens), np.array(parents), np.array(values, np.float32), draw(st.sampled_from("abc")))


@given(st.lists(trees(), min_size=1, max_size=4))
def test_without_limits_a_merged_tree_has_exactly_the_paths_of_its_parts(some):
    merged = merge(some, 64, 63)
    assert len(paths(merged)) == len(set(paths(merged)))
    assert set(paths(merged)) == set().union(*map(set, map(paths, some)))


@given(st.lists(trees(), min_size=1, max_size=4), st.integers(1, 10), st.integers(0, 4))
def test_the_rows_of_greatest_value_stay_and_siblings_are_in_order_of_value(some, max_rows, max_depth):
    merged, whole = merge(some, max_rows, max_depth), merge([*some, DraftTree.root_only(9)], 64, 63)
    assert merged.rows <= max_rows and merged.depths.max() <= max_depth
    assert replace(merged).rows == merged.rows, "passes the constructor's checks"
    assert (merged.values[1:] <= merged.values[merged.parents[1:]]).all()
    value = dict(zip(paths(whole), whole.values[1:].tolist(), strict=True))
    allowed = sorted((each for path, each in value.items() if len(path) <= max_depth), reverse=True)
    if len(some) > 1:
        assert merged.values[1:].tolist() == allowed[: max_rows - 1]
        for row in range(merged.rows):
            ranked = merged.values[merged.children(row)].tolist()
            assert ranked == sorted(ranked, reverse=True)


def test_a_rows_value_uses_the_greatest_chance_of_each_step():
    one = DraftTree.of([9, 1, 2], [-1, 0, 1], [0.0, math.log(0.2), math.log(0.1)])
    two = DraftTree.of([9, 1], [-1, 0], [0.0, math.log(0.8)])
    assert np.exp(merge([one, two], 64, 63).values) == pytest.approx([1.0, 0.8, 0.4])


def test_a_merged_tree_keeps_the_drafters_fields():
    own = DraftTree(
        np.array([9, 1]),
        np.array([-1, 0]),
        np.array([0, -0.5], np.float32),
        "mamba",
        trace=np.array([0, 2], np.int32),
        draft_us=70,
        texts=3,
    )
    found = DraftTree(np.array([9, 2]), np.array([-1, 0]), np.array([0, -0.1], np.float32), "lookup")
    same = DraftTree(np.array([9, 2]), np.array([-1, 0]), np.array([0, -0.7], np.float32), "suffix")
    merged = merge([own, found, same], 3, 8)
    assert merged.tokens.tolist() == [9, 2, 1] and merged.proposer == "mamba"
    assert (merged.draft_us, merged.texts, merged.trace.tolist(), merged.missed) == (70, 3, [0, 2], False)
    assert merged.proposed == {1}
    assert merge([own], 64, 8) is own


def test_trees_with_different_roots_are_refused():
    with pytest.raises(ValueError, match="one root"):
        merge([DraftTree.root_only(1), DraftTree.root_only(2)], 8, 8)


# With a drafter's trees


async def drafted(proposals: Proposals, text: Text, arm: Arm, sizes: TargetSteps | None = None) -> DraftTree:
    """The tree of a round without a drafter."""
    experience = Experience(Concurrency(target=sizes or TargetSteps()))
    with experience.concurrency.running() as running:
        plan = SpeculationPlan("fixed", Static(arm))
        return await RequestSpeculation(plan, experience, running, text, NoDrafter(), proposals).draft(text, arm)


async def test_proposals_fill_padding_rows_only():
    ids = [5, 6, 7, 8] * 8
    for shape, max_rows, rows in (
        (LevelShape((1, 1)), 64, 8),
        (LevelShape((1,) * 6), 64, 8),
        (LevelShape((3, 2, 1)), 64, 16),
        (LevelShape((3, 2, 1)), 12, 12),
        (OFF, 64, 1),
    ):
        handle = ProposalLibrary(("lookup", "suffix"), max_rows, 16).of("", MAX_ROWS, 0.0)
        assert (await drafted(handle, a_text(ids), of_mamba(shape))).rows == rows, shape
    few = (LevelShape((1, 1)), 3), (LevelShape((1,) * 6), 8), (LevelShape((3, 2, 1)), 16)
    padded = (LevelShape((1, 1)), 8), (LevelShape((1,) * 6), 8), (LevelShape((3, 2, 1)), 16)
    for sizes, cases in ((TargetSteps((1, 2, 3, 8, 16)), few), (TargetSteps(), padded)):
        for shape, rows in cases:
            handle = ProposalLibrary(("lookup", "suffix"), 64, 16).of("", MAX_ROWS, 0.0)
            assert (await drafted(handle, a_text(ids), of_mamba(shape), sizes)).rows == rows, (sizes, shape)
    own_limit = ProposalLibrary(("lookup",), 64, 16).of("", 5, 0.0)
    assert (await drafted(own_limit, a_text(ids), of_mamba(LevelShape((3, 2, 1))))).rows == 5
    three_deep = ProposalLibrary(("lookup",), 64, 3).of("", MAX_ROWS, 0.0)
    shallow = await drafted(three_deep, a_text(ids), of_mamba(LevelShape((3, 2, 1))))
    assert shallow.depths.max() == 3


async def test_nothing_is_proposed_past_an_answers_length_limit():
    text = Text([5, 5, 5, 5], Sampling(), Limits(7))
    handle = ProposalLibrary(("lookup",), 64, 16).of("", MAX_ROWS, 0.0)
    tree = await drafted(handle, text, of_mamba(LevelShape((1,) * 7)))
    assert tree.depths.max() == 2  # the target's own token is the third
    append(text, [5, 5])
    assert (await drafted(handle, text, of_mamba(LevelShape((1,) * 7)))).guesses == 0


async def test_proposals_that_do_not_come_true_lose_chance():
    library = ProposalLibrary(("lookup",), 64, 16)
    handle, text, values = library.of("", MAX_ROWS, 0.0), a_text([1, 2, 3, 1, 2]), []
    for number in range(100, 140):  # what followed 1, 2 before never follows again
        tree = await drafted(handle, text, of_mamba(LevelShape((1,) * 7)))
        values.append(float(tree.values[1]))
        append(text, [number, 1, 2])
    assert values[0] == pytest.approx(math.log(2 / 3))
    assert math.log(LEAST) < values[-1] < math.log(0.1)


def test_nothing_is_proposed_without_proposers_or_room_for_guesses():
    assert ProposalLibrary((), 64, 16).of("", MAX_ROWS, 0.0) is None
    assert ProposalLibrary(("lookup",), 64, 16).of("", 1, 0.0) is None, "the tree may only have its root"


async def test_chances_are_counted_per_temperature_class():
    """Wrong proposals at temperature 1 do not change the chances for greedy answers."""
    library = ProposalLibrary(("lookup",), 64, 16)
    warm, text = library.of("", MAX_ROWS, 1.0), a_text([1, 2, 3, 1, 2])
    for number in range(100, 140):
        warm.offer(text)
        append(text, [number, 1, 2])
    last = a_text([1, 2, 3, 1, 2])
    unlikely = library.of("", MAX_ROWS, 1.0).offer(last)
    greedy = library.of("", MAX_ROWS, 0.0).offer(last)
    assert greedy.values[1] == pytest.approx(math.log(2 / 3)) and not (unlikely.values[1:] > math.log(0.1)).any()


async def test_chances_are_counted_per_tenant():
    library = ProposalLibrary(("lookup",), 64, 16)
    library.of("two", MAX_ROWS, 0.0)  # a tenant that came later would begin with the counts of "one"
    one, text = library.of("one", MAX_ROWS, 0.0), a_text([1, 2, 3, 1, 2], "one")
    for number in range(100, 140):
        one.offer(text)
        append(text, [number, 1, 2])
    values = {}
    for tenant in ("one", "two"):
        offered = library.of(tenant, MAX_ROWS, 0.0).offer(a_text([1, 2, 3, 1, 2], tenant))
        values[tenant] = offered.values[1:]
    assert values["two"][0] == pytest.approx(math.log(2 / 3)) and not (values["one"] > math.log(0.1)).any()


async def test_an_offer_has_the_proposals_that_the_round_then_uses():
    """Proposals are made once per round, and counted once."""
    ids = [5, 6, 7, 8] * 4
    library = ProposalLibrary(("lookup", "suffix"), 64, 16)
    handle, text = library.of("", MAX_ROWS, 0.0), a_text(ids)
    offer = handle.offer(text)
    tree = await drafted(handle, text, of_mamba(ProposedShape(3)))
    assert tree.rows == 4 and tree.values.tolist() == sorted(offer.values.tolist(), reverse=True)[:4]
    append(text, [5, 6])
    handle.offer(text)
    before = {kind: count.of for kind, count in library._pasts[""].chances["greedy"].counts.items()}
    await drafted(handle, text, of_mamba(LevelShape((1, 1))))
    handle.offer(text)
    assert {kind: count.of for kind, count in library._pasts[""].chances["greedy"].counts.items()} == before


async def test_an_offer_below_the_wanted_chance_is_not_made():
    """After 1, 2 the text went on with 3; a token that never occurred before promises nothing."""
    library = ProposalLibrary(("lookup", "suffix"), 64, 16)
    for ids, least, offered in (
        ([1, 2, 3, 1, 2], 0.5, True),
        ([1, 2, 3, 1, 2], 0.9, False),
        ([1, 2, 3, 4, 5], 0.5, False),
    ):
        assert bool(library.of("", MAX_ROWS, 0.0).offer(a_text(ids), least).guesses) == offered


@pytest.mark.parametrize("names", [("lookup",), ("suffix",), ("lookup", "suffix")])
def test_an_offer_of_a_wanted_chance_has_no_guess_after_a_match_of_a_single_token(names):
    text = a_text([1, 2, 3, 4, 2])
    assert ProposalLibrary(names, 64, 16).of("", MAX_ROWS, 0.0).offer(text).guesses
    assert not ProposalLibrary(names, 64, 16).of("", MAX_ROWS, 0.0).offer(text, 0.1).guesses


def test_an_offer_of_a_wanted_chance_has_the_prediction_where_the_text_repeats_nothing():
    predicted = PredictedOutput([PredictedText.of([5, 6, 7, 8, 9])], begins=4)
    proposals = ProposalLibrary(("lookup", "suffix"), 64, 16).of("", MAX_ROWS, 0.0, predicted)
    assert proposals.offer(a_text([1, 2, 3, 4, 5, 6, 7]), 0.5).tokens.tolist() == [7, 8, 9]


class NotedLookup(Lookup):
    """A lookup that notes the depths to which it was asked for proposals."""

    def __init__(self) -> None:
        super().__init__()
        self.depths: list[int] = []

    def propose(self, text: Text, max_rows: int, max_depth: int) -> Proposal:
        self.depths.append(max_depth)
        return super().propose(text, max_rows, max_depth)


def test_deeper_guesses_are_made_only_if_a_first_guess_has_the_wanted_chance():
    noted, text = NotedLookup(), a_text([1, 2, 3, 1, 2])
    proposals = Proposals([noted], Chances(), 64, 16)
    assert not proposals.offer(text, 0.9).guesses and noted.depths == [1]
    offered = proposals.offer(text, 0.5)
    assert paths(offered)[-1] == (3, 1, 2) * 5 + (3,) and noted.depths == [1, 16]
    assert proposals.offer(text, 0.5) is offered is proposals.offer(text) and noted.depths == [1, 16]


@given(STRINGS, st.sampled_from([0.1, 0.5, 0.7, 0.9]))
def test_an_offer_of_a_wanted_chance_is_the_offer_without_one_or_the_root_alone(ids, least):
    library = ProposalLibrary(("lookup", "suffix"), 64, 16)
    wanted = library.of("", MAX_ROWS, 0.0).offer(a_text(ids), least)
    whole = library.of("", MAX_ROWS, 0.0).offer(a_text(ids))
    assert not wanted.guesses or (paths(wanted), wanted.values.tolist()) == (paths(whole), whole.values.tolist())
