"""Training of an acceptance head: its labels against enumeration, its loss, its gradients, and its calibration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from tree_kernels.acceptance_head import log_chances
from tree_kernels.acceptance_head.constants import OUTPUTS
from tree_kernels.tree_walk import walk
from tree_kernels.warp import Warp

from drafter_service.confidence import CANDIDATES, Calibration
from drafter_service.training import examples
from drafter_service.training.examples import MIXED, TEXT, ExampleLaw, Teacher, examples_of, mixed, write_answers
from drafter_service.training.heads import (
    AcceptanceRows,
    HeadModel,
    acceptance_loss,
    calibration_error,
    fit_calibration,
    head_loss,
    online_chances,
    outcome_losses,
    quality_of,
)

WIDTH = 12


def rows_of(count: int, seed: int = 0, **changes: Tensor) -> AcceptanceRows:
    """Random rows at depths 0 to 3, with ranks that the scores predict."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, CANDIDATES, generator=generator).mul(2).sort(1, descending=True).values
    law = torch.cat([scores, scores[:, -1:] + 3], 1).softmax(1)
    made: dict[str, Any] = {
        "hidden": torch.randn(count, WIDTH, generator=generator),
        "first": torch.randint(0, 9, (count,), generator=generator),
        "scores": scores,
        "entropy": torch.rand(count, generator=generator),
        "log_prob": -torch.rand(count, generator=generator),
        "temperature": torch.ones(count),
        "depth": torch.randint(0, 4, (count,), generator=generator),
        "rank": torch.multinomial(law, 1, generator=generator)[:, 0],
        "drafted": torch.ones(count, dtype=torch.bool),
    }
    return AcceptanceRows(**{**made, **changes})


def model_of(blocks: int = 2, tied: bool = False) -> HeadModel:
    torch.manual_seed(1)
    embedding = torch.randn(9, WIDTH)
    return HeadModel(WIDTH, blocks, tied, lambda ids: embedding[ids])


def test_the_loss_equals_the_formula_by_hand():
    """Of two rows the second was not drafted. P = (1, 0) and w = 3: L = -(log .6 + 3 log(1 - .3)) / (3 + 1)."""
    chances = torch.tensor([[0.6, 0.3], [0.9, 0.05]]).log()
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    loss = acceptance_loss(chances, labels, torch.tensor([True, False]), 3.0)
    assert loss.item() == pytest.approx(-(math.log(0.6) + 3 * math.log(0.7)) / 4, rel=1e-6)
    soft = acceptance_loss(chances[:1], torch.tensor([[0.25, 0.5]]), torch.tensor([True]), 6.0)
    by_hand = 0.25 * math.log(0.6) + 0.5 * math.log(0.3) + 6 * (0.75 * math.log(0.4) + 0.5 * math.log(0.7))
    assert soft.item() == pytest.approx(-by_hand / (6 * 1.25 + 0.75), rel=1e-6)


def test_gradients_come_only_from_rows_whose_token_was_drafted():
    model, rows = model_of(), rows_of(40)
    hidden = rows.hidden.clone().requires_grad_()
    drafted = torch.arange(40) % 3 != 0
    chosen = replace(rows, hidden=hidden, drafted=drafted)
    torch.nn.init.normal_(model.output)
    chances = log_chances(model.outputs(chosen), torch.zeros(1, OUTPUTS), chosen.scores, chosen.depth, CANDIDATES)
    acceptance_loss(chances, chosen.labels, chosen.drafted, 1.0).backward()
    assert torch.equal(hidden.grad.abs().sum(1) > 0, drafted)


@pytest.mark.parametrize("blocks, tied, sets", [(3, False, 3), (3, True, 1), (0, False, 0), (0, True, 0)])
def test_untied_blocks_have_parameter_sets_of_their_own_and_tied_ones_share_one(blocks, tied, sets):
    model = model_of(blocks, tied)
    matrices = [name for name, _ in model.named_parameters() if name.endswith(".weight")]
    assert len(matrices) == sets and len(model.weights().blocks) == blocks
    loss = head_loss(model, rows_of(64), 1.0, 0)(0)
    torch.nn.init.normal_(model.output)
    head_loss(model, rows_of(64), 1.0, 0)(0).backward()
    assert loss.isfinite() and all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_a_head_begins_as_the_calibration_of_a_drafter_without_one():
    """But for the lift of the first candidate, softplus(-3)."""
    model, rows, start = model_of(), rows_of(30), Calibration()
    with torch.no_grad():
        model.output_bias[2] = -80.0
        chances = log_chances(model.outputs(rows), torch.zeros(1, OUTPUTS), rows.scores, rows.depth, CANDIDATES)
    torch.testing.assert_close(chances, torch.tensor(start.confidences(rows.scores.tolist())), atol=1e-5, rtol=0)


def test_chances_of_a_row_never_increase_and_sum_to_at_most_1_for_any_outputs():
    rows = rows_of(200)
    outputs = 30 * torch.randn(200, OUTPUTS, generator=torch.Generator().manual_seed(2))
    chances = log_chances(outputs, torch.zeros(1, OUTPUTS), rows.scores, rows.depth, CANDIDATES)
    assert (chances[:, 1:] <= chances[:, :-1]).all() and (chances <= 1e-6).all()
    assert (chances.exp().sum(1) <= 1 + 1e-5).all()


def test_mixed_texts_take_the_guess_where_it_is_drafted_and_count_accepted_guesses_as_depth():
    target, guesses = torch.tensor([[1, 2, 3, 4, 5, 6]] * 400), torch.tensor([[1, 2, 9, 4, 5, 9]] * 400)
    mixture = mixed(target, guesses, 0.15, torch.Generator().manual_seed(0))
    assert torch.equal(mixture.fed, torch.where(mixture.drafted, guesses, target))
    assert mixture.drafted.float().mean().item() == pytest.approx(0.85, abs=0.02)
    for drafted, depth in zip(mixture.drafted.tolist(), mixture.depth.tolist(), strict=True):
        accepted = 0
        for position in range(6):
            assert depth[position] == accepted
            accepted = accepted + 1 if drafted[position] and position not in (2, 5) else 0


class TableDrafter:
    """A drafter whose logits depend on the last token alone, of which a hidden row is the one-hot vector."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.vocabulary = table, table.shape[1]

    def memory(self, texts: int, nodes: int) -> TableDrafter:
        return self

    def chain(self, rows: Any) -> Tensor:
        return torch.nn.functional.one_hot(torch.from_numpy(rows.tokens), len(self.table)).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.table

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden


WARPS = (Warp(), Warp(0.7), Warp(1.3, top_k=2), Warp(1.0, top_k=3, top_p=0.8))


@pytest.mark.parametrize("warp", WARPS, ids=["greedy", "0.7", "top-2", "top-3 and top-p"])
def test_labels_equal_enumeration_of_all_noise_over_a_tiny_vocabulary(warp, monkeypatch):
    """4 tokens, and noise of 3 levels each: all 81 noise vectors. A label is the rank, among the drafter's candidates,
    of the token to which the verifier's walk goes."""
    levels, vocabulary = (-1.1, 0.3, 1.7), 4
    every = torch.tensor(list(itertools.product(levels, repeat=vocabulary)))
    every = every + torch.arange(vocabulary) * 1e-3  # no ties
    target_logits = torch.tensor([0.2, 1.0, -0.5, 0.7])
    drafter = TableDrafter(torch.tensor([[0.4, 0.1, 0.9, 0.6]] * vocabulary))
    rows = len(every)

    class Constant:
        """A target with the same logits everywhere."""

        def __init__(self, model: object) -> None: ...

        def feed(self, tokens: Tensor) -> Tensor:
            return target_logits.expand(len(tokens), -1)

    monkeypatch.setattr(examples, "SteppedText", Constant)
    noise = [[(slice(0, rows), warp, None if warp.greedy else every)]]
    monkeypatch.setattr(examples, "_noise", lambda *_: noise)
    teacher, law = Teacher(torch.nn.Linear(1, 1), vocabulary, frozenset()), ExampleLaw((warp,), 1)
    texts, drawn = write_answers(teacher, torch.zeros(rows, 3, dtype=torch.int64), 1, law, 0)
    found = examples_of(drafter, texts, drawn, law, teacher, 0)
    assert len(found) == rows and found.depth.eq(0).all()
    own = drafter.table[0].tolist()
    for row, each in enumerate(every.tolist()):
        free, kept, of_target = (
            by_definition(own, each, warp, masked=False),
            by_definition(own, each, warp, masked=True),
            by_definition(target_logits.tolist(), each, warp, masked=True),
        )
        first, wanted = kept.index(max(kept)), of_target.index(max(of_target))
        others = sorted((token for token in range(vocabulary) if token != first), key=lambda token: -free[token])
        path = walk([0, first, *others], [-1, 0, 0, 0, 0], lambda row, token=wanted: token).path
        assert drawn[row, 0, 0] == wanted and list(path) == [0, 1 + int(found.rank[row])]


def test_the_share_of_labels_equals_the_law_of_shared_noise():
    """P(the first candidate is the token) = sum_v 1 / (sum_u max(p_u / p_v, q_u / q_v)): both argmaxes are
    v exactly if g_u - g_v <= min(log p_v / p_u, log q_v / q_u) for all u. 40,000 draws: 4 sigma are 0.01."""
    p_logits, q_logits = torch.tensor([0.2, 1.0, -0.5, 0.7]), torch.tensor([0.4, 0.1, 0.9, 0.6])
    p, q = p_logits.softmax(0), q_logits.softmax(0)
    wanted = sum(1 / torch.maximum(p / p[v], q / q[v]).sum().item() for v in range(4))
    drafter, teacher = TableDrafter(q_logits.expand(4, -1)), Teacher(torch.nn.Linear(1, 1), 4, frozenset())
    law = ExampleLaw((Warp(1.0),), 4)
    noise = [part for ((_, _, part),) in examples._noise(law, 10_000, 0, 4, 7)]
    drawn = torch.stack([(p_logits + each).argmax(1) for each in noise], 1)
    texts = torch.cat([torch.zeros(10_000, 3, dtype=torch.int64), drawn[:, :1]], 1)
    found = examples_of(drafter, texts, drawn[:, None], law, teacher, 7)
    assert len(found) == 40_000
    assert (found.rank == 0).float().mean().item() == pytest.approx(wanted, abs=0.01)


def by_definition(logits: list[float], noise: list[float], warp: Warp, masked: bool) -> list[float]:
    """logits / temperature + noise; minus infinity where top-k and then top-p remove a token."""
    if warp.greedy:
        return logits
    scores = [logit / warp.temperature for logit in logits]
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    kept = order[: warp.top_k or len(order)]
    total = sum(math.exp(scores[token]) for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass < warp.top_p:
            nucleus.append(token)
        mass += math.exp(scores[token]) / total
    return [
        score + each if token in nucleus or not masked else -math.inf
        for token, (score, each) in enumerate(zip(scores, noise, strict=True))
    ]


@pytest.mark.parametrize("feed", [TEXT, MIXED])
def test_a_mixed_feed_changes_what_the_drafter_consumes_and_never_the_labels(feed):
    """The drafter always guesses 3 and the target's text has none, so a mixed text differs at drafted positions."""
    table = torch.zeros(5, 5)
    table[:, 3] = 9.0
    texts = torch.tensor([[0, 1, 2, 1, 2, 1, 4]] * 50)
    law, teacher = ExampleLaw((Warp(),), 1, feed), Teacher(torch.nn.Linear(1, 1), 5, frozenset())
    found = examples_of(TableDrafter(table), texts, texts[:, 2:, None], law, teacher, 0)
    consumed = found.hidden.argmax(1).view(5, 50)  # by position, the token before it
    drafted = found.drafted.view(5, 50)
    before = texts[:, 1:-1].T.clone()
    if feed == MIXED:
        before[1:][drafted[:-1]] = 3
    assert torch.equal(consumed, before)
    assert (found.rank.view(5, 50) > 0).all() and found.depth.eq(0).all()


def test_rows_after_the_first_end_of_text_and_repeated_greedy_draws_are_left_out():
    table = torch.eye(5)
    texts = torch.tensor([[0, 1, 2, 4, 2], [0, 1, 4, 1, 1], [0, 1, 2, 3, 3], [0, 1, 3, 3, 3]])
    drawn = texts[:, 2:, None].expand(-1, -1, 2)
    law, teacher = ExampleLaw((Warp(), Warp(1.0)), 2), Teacher(torch.nn.Linear(1, 1), 5, frozenset({4}))
    found = examples_of(TableDrafter(table), texts, drawn, law, teacher, 0)
    assert (found.temperature == 0).sum() == 2 + 1  # up to and with the end, one draw
    assert (found.temperature == 1).sum() == 2 * 3 * 2


def test_a_calibration_removes_what_a_weight_of_rejections_biases():
    """Outputs that are 2 too high in log n at depth 0, and right elsewhere."""
    rows, moved = rows_of(24_000, 3), torch.tensor([0.0, 3.0, -80.0])
    outputs = moved.expand(24_000, -1).clone()
    outputs[rows.depth == 0, 1] += 2.0
    calibration = fit_calibration(outputs, rows)
    assert calibration[0, 1].item() == pytest.approx(-2, abs=0.4) and abs(calibration[2, 1].item()) < 0.4
    before = log_chances(outputs, torch.zeros(1, OUTPUTS), rows.scores, rows.depth, CANDIDATES)
    after = log_chances(outputs, calibration, rows.scores, rows.depth, CANDIDATES)
    assert outcome_losses(after, rows.rank).mean() < outcome_losses(before, rows.rank).mean()
    other = rows_of(6000, 4)
    chances = log_chances(moved.expand(6000, -1), calibration, other.scores, other.depth, CANDIDATES)
    assert quality_of(chances, other).error < 0.05


def test_the_calibration_error_is_that_of_bins_of_equal_mass_by_hand():
    """50 chances of 0.2 that come true never, and 100 of 0.8 that always do: each of 15 bins of 10 is 0.2 off."""
    chances = torch.tensor([0.2] * 50 + [0.8] * 100)
    assert calibration_error(chances, (chances > 0.5).float()) == pytest.approx(0.2, abs=1e-6)


def test_the_baseline_is_the_drafters_own_calibration_fitted_in_order():
    warm, rows = rows_of(30, 5), rows_of(20, 6)
    calibration, wanted = Calibration(), []
    for part, kept in ((warm, False), (rows, True)):
        for scores, rank in zip(part.scores.tolist(), part.rank.tolist(), strict=True):
            if kept:
                wanted.append(calibration.confidences([scores])[0])
            calibration = calibration.learn(scores, rank)
    np.testing.assert_allclose(online_chances(warm, rows).numpy(), wanted, atol=1e-6)
