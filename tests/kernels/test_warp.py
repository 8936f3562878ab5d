import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from tree_kernels.noise import gumbel_noise
from tree_kernels.warp import Warp, drafter_order, drafter_ranking, tokens_of, warp

NEARLY_ALL = math.nextafter(1.0, 0.0)

WARPS = [
    Warp(0.7),
    Warp(1.0, top_k=50),
    Warp(1.3, top_p=0.9),
    Warp(1.0, top_p=0.999),
    Warp(1.0, min_p=0.05),
    Warp(0.7, top_k=50, top_p=0.9),
    Warp(0.9, top_k=1000, top_p=0.95, min_p=0.01),
    Warp(1.0, top_k=1),
    Warp(1.0, top_p=1e-9),
    Warp(1.0, top_k=10**6, min_p=NEARLY_ALL),
]


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def by_definition(logits: torch.Tensor, warp: Warp) -> torch.Tensor:
    """The definition for one row, with full sorts: order by (value descending, id ascending), keep a prefix."""
    scores = logits / warp.temperature
    order = sorted(range(len(scores)), key=lambda token: (-float(scores[token]), token))
    order = order[: warp.top_k or len(order)]
    if warp.top_p < 1 or warp.min_p > 0:
        if warp.top_k and warp.top_k < len(scores):
            law = torch.softmax(scores[order], dim=0).tolist()
            mass = sum(law)
        else:
            whole = torch.softmax(scores, dim=0)
            mass = sum(whole.tolist())
            law = sorted(whole.tolist(), reverse=True)
        kept, before = 0, 0.0
        while kept < len(law) and (kept == 0 or warp.top_p == 1 or before < warp.top_p * mass):
            before += law[kept]
            kept += 1
        order = [token for token, mass in zip(order[:kept], law, strict=False) if mass >= warp.min_p * law[0]]
    out = torch.full_like(scores, -math.inf)
    out[order] = scores[order]
    return out


def by_transformers(logits: torch.Tensor, warp: Warp) -> torch.Tensor:
    scores = TemperatureLogitsWarper(warp.temperature)(None, logits)
    if warp.top_k:
        scores = TopKLogitsWarper(warp.top_k)(None, scores)
    if warp.top_p < 1:
        scores = TopPLogitsWarper(warp.top_p)(None, scores)
    if warp.min_p:
        scores = MinPLogitsWarper(warp.min_p)(None, scores)
    return scores


@pytest.mark.parametrize("vocabulary", [17, 1000, 4096])
@pytest.mark.parametrize("wanted", WARPS, ids=str)
def test_warp_has_the_masks_of_transformers_and_probabilities_within_1e_6(wanted, vocabulary):
    logits = random_logits(40, vocabulary)
    ours, theirs = warp(logits, wanted), by_transformers(logits, wanted)
    assert torch.equal(ours.isneginf(), theirs.isneginf())
    assert (ours.softmax(-1) - theirs.softmax(-1)).abs().max() < 1e-6


@pytest.mark.parametrize("vocabulary", [5, 17, 1001])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("wanted", WARPS, ids=str)
def test_partial_selection_equals_the_full_sort(wanted, vocabulary, spread):
    logits = random_logits(4, vocabulary, seed=1, spread=spread)
    assert torch.equal(warp(logits, wanted), torch.stack([by_definition(row, wanted) for row in logits]))


WARP_VALUES = st.builds(
    Warp,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.97, 0.75, 0.5, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, NEARLY_ALL]),
)
TIED_ROWS = st.lists(st.lists(st.integers(-3, 3), min_size=12, max_size=12), min_size=1, max_size=4)


@given(TIED_ROWS, WARP_VALUES)
@settings(max_examples=300, deadline=None)
def test_ties_are_broken_by_the_lowest_id(rows, wanted):
    logits = torch.tensor(rows, dtype=torch.float32)
    assert torch.equal(warp(logits, wanted), torch.stack([by_definition(row, wanted) for row in logits]))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_top_k_keeps_exactly_k_of_equals(k):
    assert torch.isfinite(warp(torch.zeros(1, 6), Warp(1.0, top_k=k)))[0].tolist() == [True] * k + [False] * (6 - k)


def test_top_p_keeps_the_smallest_set_with_at_least_its_mass():
    logits = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log()
    kept = {p: torch.isfinite(warp(logits, Warp(1.0, top_p=p)))[0].tolist() for p in (0.4, 0.6, 0.76, 0.9)}
    assert kept == {
        0.4: [False, True, False, False],
        0.6: [False, True, True, False],
        0.76: [True, True, True, False],
        0.9: [True, True, True, True],
    }


def test_of_two_tokens_with_equal_probabilities_top_p_keeps_the_one_with_the_larger_score():
    a = torch.tensor(0.1)
    logits = torch.stack([torch.tensor(0.5), a, torch.nextafter(a, torch.tensor(1.0))])[None]
    law = logits.softmax(1)[0]
    assert law[1] == law[2] and logits[0, 1] < logits[0, 2]
    assert torch.isfinite(warp(logits, Warp(1.0, top_p=0.5)))[0].tolist() == [True, False, True]


@pytest.mark.parametrize("vocabulary", [7, 50, 1003, 4096])
@pytest.mark.parametrize("wanted", WARPS, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(wanted, vocabulary):
    logits = random_logits(29, vocabulary, seed=2)
    logits[::3] *= 0.01  # flat rows widen the selection for the other rows too
    noise = gumbel_noise(3, range(29), vocabulary)
    together, tokens = warp(logits, wanted), tokens_of(logits, wanted, noise)
    order = drafter_order(logits, wanted, noise, 4)
    for row in range(29):
        alone = slice(row, row + 1)
        assert torch.equal(warp(logits[alone].clone(), wanted)[0], together[row])
        assert tokens_of(logits[alone].clone(), wanted, noise[alone]) == tokens[row]
        assert torch.equal(drafter_order(logits[alone].clone(), wanted, noise[alone], 4)[0], order[row])


def test_temperature_0_ignores_all_other_parameters():
    logits = random_logits(3, 20)
    assert torch.equal(warp(logits, Warp(0.0, top_k=2, top_p=0.1, min_p=0.9)), logits)


@pytest.mark.parametrize("wanted", [Warp(), *WARPS], ids=str)
def test_the_arguments_are_not_modified(wanted):
    logits, noise = random_logits(3, 64), None if wanted.greedy else gumbel_noise(1, range(3), 64)
    before = logits.clone(), None if noise is None else noise.clone()
    warp(logits, wanted)
    tokens_of(logits, wanted, noise)
    drafter_order(logits, wanted, noise, 3)
    assert torch.equal(logits, before[0])
    assert noise is None or (before[1] is not None and torch.equal(noise, before[1]))


def test_removed_tokens_are_never_drawn():
    logits = random_logits(1, 100, spread=1.0).expand(500, -1)
    wanted = Warp(1.5, top_k=20, top_p=0.8)
    allowed = torch.isfinite(warp(logits[:1], wanted))[0]
    drawn = tokens_of(logits, wanted, gumbel_noise(0, range(500), 100))
    assert allowed[drawn].all() and len(set(drawn.tolist())) > 3


def test_the_token_on_ties_is_the_lowest_id():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    assert tokens_of(logits, Warp(), None).tolist() == [1, 0]
    assert tokens_of(logits, Warp(1.0), torch.zeros(2, 4)).tolist() == [1, 0]


@given(TIED_ROWS, st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_greedy_guesses_are_the_largest_logits_lowest_id_first(rows, k):
    expected = [sorted(range(12), key=lambda token: (-row[token], token))[:k] for row in rows]
    assert drafter_order(torch.tensor(rows, dtype=torch.float32), Warp(), None, k).tolist() == expected


@pytest.mark.parametrize("wanted", WARPS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 8, 30])
def test_the_first_guess_is_masked_and_the_others_are_not(wanted, k):
    logits, noise = random_logits(20, 30, seed=4), gumbel_noise(5, range(20), 30)
    ranking = drafter_ranking(logits, wanted, noise, k)
    open_scores = logits / wanted.temperature + noise
    first = tokens_of(logits, wanted, noise)
    assert torch.equal(ranking.ids[:, 0], first)
    for row in range(20):
        others = [token for token in open_scores[row].argsort(descending=True).tolist() if token != first[row]]
        assert ranking.ids[row, 1:].tolist() == others[: k - 1]
        assert len(set(ranking.ids[row].tolist())) == k
    assert torch.equal(ranking.scores, open_scores.gather(1, ranking.ids))


def test_a_drafter_with_the_targets_logits_guesses_its_token_first():
    logits, noise = random_logits(50, 200), gumbel_noise(9, range(50), 200)
    for wanted in WARPS:
        assert torch.equal(drafter_order(logits, wanted, noise, 3)[:, 0], tokens_of(logits, wanted, noise))


@pytest.mark.parametrize(
    "field, values",
    [
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("temperature", {"temperature": 1e-40}),
        ("top_k", {"top_k": -1}),
        ("top_k", {"top_k": 1.5}),
        ("top_k", {"top_k": True}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.1}),
        ("top_p", {"top_p": math.nan}),
        ("min_p", {"min_p": -0.1}),
        ("min_p", {"min_p": 1.0}),
        ("min_p", {"min_p": 1.1}),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field, values):
    with pytest.raises(ValueError, match=f"^{field}:"):
        Warp(**values)


def test_noise_is_required_if_and_only_if_it_is_used():
    logits = torch.zeros(2, 4)
    for wanted, noise in [(Warp(), torch.zeros(2, 4)), (Warp(1.0), None), (Warp(1.0), torch.zeros(1, 4))]:
        with pytest.raises(ValueError, match="^noise:"):
            tokens_of(logits, wanted, noise)
        with pytest.raises(ValueError, match="^noise:"):
            drafter_order(logits, wanted, noise, 1)
    for k in (0, 5):
        with pytest.raises(ValueError, match="^k:"):
            drafter_order(logits, Warp(), None, k)


@pytest.mark.parametrize("wanted", [Warp(), *WARPS], ids=str)
def test_a_nan_logit_affects_only_its_own_row(wanted):
    logits = random_logits(3, 40)
    noise = None if wanted.greedy else gumbel_noise(1, range(3), 40)
    sound = tokens_of(logits, wanted, noise)
    logits[1, 7] = math.nan
    broken = tokens_of(logits, wanted, noise)
    assert broken[[0, 2]].equal(sound[[0, 2]]) and 0 <= broken[1] < 40
    assert drafter_order(logits, wanted, noise, 4).shape == (3, 4)
