"""Measures how much of a target's answers a drafter guesses, offline, in plain PyTorch and fp32.

Emitted per round is measured by replay, under the shared-noise rule (docs/design/noise.md#shared-noise): the target's
own text is fixed by its noise, so a drafter's ranks of that text's tokens, among its own scores with the same noise,
determine which guesses of a tree of static shape are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from dendro.shapes import LevelShape
from dendro.text import Sampling
from torch import Tensor
from transformers import PreTrainedModel
from tree_kernels.noise import NoiseRows

from cluster.policies.replay import round_lengths
from drafter_service.training.stepping import SteppedText
from drafter_service.training.students import StudentForward
from drafter_service.training.vocabulary import draft_embedding

PROMPTS = 32
PROMPT_TOKENS = 128
ANSWER_TOKENS = 64  # longer greedy answers of a target as small as the demo's loop
TEMPERATURES = (0.0, 0.7, 1.0)
SHAPES = ((1, 1, 1, 1), (3, 2, 2, 1, 1), (4, 2, 1, 1))
NOISE_SEED = 2024


@dataclass(frozen=True, slots=True)
class Answers:
    """A target's answers to prompts of equal length, at one temperature."""

    temperature: float
    vocabulary: int  # ids of the target's tokenizer, from 0 on
    prompt_tokens: int
    texts: Tensor  # [prompts, prompt and answer tokens] int64
    lengths: tuple[int, ...]  # answer tokens up to and with the first end of text

    @classmethod
    def of(
        cls, temperature: float, vocabulary: int, prompt_tokens: int, texts: Tensor, end_ids: frozenset[int]
    ) -> Answers:
        lengths = []
        for answer in texts[:, prompt_tokens:].tolist():
            end = next((place for place, token in enumerate(answer) if token in end_ids), len(answer) - 1)
            lengths.append(end + 1)
        return cls(temperature, vocabulary, prompt_tokens, texts, tuple(lengths))

    def tokens(self) -> list[list[int]]:
        """The answers, each up to its end."""
        answers: list[list[int]] = self.texts[:, self.prompt_tokens :].tolist()
        return [answer[:length] for answer, length in zip(answers, self.lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a drafter's guesses of a target's answers."""

    first_rank: dict[str, float]  # temperature -> share of answer tokens that the drafter ranks first
    emitted: dict[str, dict[str, float]]  # temperature -> shape -> tokens per round; NaN where answers are too short
    ranks: dict[str, list[list[int]]] = field(default_factory=dict)  # temperature -> of each answer's tokens


def shape_name(shape: tuple[int, ...]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"


def noise_rows(temperature: float, rows: int, position: int, vocabulary: int) -> Tensor:
    """Gumbel noise of an answer position, the same for target and drafter: [rows, vocabulary].

    Zero at temperature 0. This noise is for measurements; it is not that of the public contract (DESIGN.md).
    """
    if temperature == 0:
        return torch.zeros(rows, vocabulary)
    generator = torch.Generator().manual_seed(NOISE_SEED * 1_000_003 + position)
    return -torch.empty(rows, vocabulary).exponential_(generator=generator).log_()


def perturbed(logits: Tensor, temperature: float, noise: Tensor) -> Tensor:
    """logits / temperature + noise, or the plain logits at temperature 0."""
    return logits if temperature == 0 else logits / temperature + noise.to(logits.device)


@torch.inference_mode()
def write_equal_answers(
    target: PreTrainedModel,
    prompts: Tensor,
    temperature: float,
    length: int,
    vocabulary: int,
    end_ids: frozenset[int],
) -> Answers:
    """Answers of `length` tokens to prompts [prompts, tokens] int64; tokens after an end of text are generated and not
    counted."""
    device = next(target.parameters()).device
    stepped, new = SteppedText(target), prompts.to(device)
    written = [prompts]
    for position in range(length):
        logits = stepped.feed(new)[:, :vocabulary]
        noise = noise_rows(temperature, len(prompts), position, vocabulary)
        new = perturbed(logits, temperature, noise).argmax(-1, keepdim=True)
        written.append(new.cpu())
    return Answers.of(temperature, vocabulary, prompts.shape[1], torch.cat(written, 1), end_ids)


@torch.inference_mode()
def answer_ranks(drafter: PreTrainedModel, answers: Answers) -> Tensor:
    """The drafter's rank of every answer token among its own perturbed scores, given the true text before it.

    returns [prompts, answer tokens] int64, 0 for the drafter's first choice
    """
    device = next(drafter.parameters()).device
    texts, first = answers.texts.to(device), answers.prompt_tokens
    hidden = StudentForward(drafter)(texts[:, :-1])
    ranks = []
    for position in range(texts.shape[1] - first):
        logits = drafter.lm_head(hidden[:, first - 1 + position])[:, : answers.vocabulary]
        noise = noise_rows(answers.temperature, len(texts), position, answers.vocabulary)
        scores = perturbed(logits, answers.temperature, _guessed(drafter, noise, logits.shape[1]))
        ranks.append(_ranks(drafter, scores, texts[:, first + position], answers.vocabulary))
    return torch.stack(ranks, 1)


def _guessed(drafter: PreTrainedModel, noise: Tensor, guessed: int) -> Tensor:
    """The noise of the tokens that a drafter guesses. noise [rows, V], by the target's ids   returns [rows, guessed]"""
    embedding = draft_embedding(drafter)
    return noise[:, :guessed] if embedding is None else noise[:, embedding.ids.to(noise.device)]


def _ranks(drafter: PreTrainedModel, scores: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """The rank of each row's token among its scores; `vocabulary`, the target's, for one that is not guessed or whose
    score is not finite. Scores that are no number rank before it.

    scores [rows, guessed]   tokens [rows] the target's ids   returns [rows] int64
    """
    embedding, last = draft_embedding(drafter), scores.shape[1] - 1
    places = tokens if embedding is None else embedding.places[tokens]
    of_chosen = scores.gather(1, places.clamp(max=last)[:, None])
    ranked = (places <= last) & of_chosen[:, 0].isfinite()
    return torch.where(ranked, (~(scores <= of_chosen)).sum(-1), vocabulary)


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """An answer that a target wrote as it is served."""

    tokens: list[int]  # tokens of the whole text
    begin: int  # place of the answer's first token
    sampling: Sampling


@torch.inference_mode()
def own_answer_ranks(drafter: PreTrainedModel, answer: OwnAnswer, vocabulary: int) -> list[int]:
    """Ranks of an answer's tokens among a drafter's candidates under shared noise (`answer_ranks`), with version 1 of
    the noise. A token that the drafter cannot guess has the rank `vocabulary`, the size of the target's."""
    device, sampling = next(drafter.parameters()).device, answer.sampling
    text = torch.tensor(answer.tokens, device=device)
    hidden = StudentForward(drafter)(text[None, :-1])[0, answer.begin - 1 :]
    scores = drafter.lm_head(hidden)[:, :vocabulary].float()
    if sampling.temperature:
        rows = NoiseRows(sampling.seed, vocabulary, sampling.sample_index).rows(range(answer.begin, len(text)))
        scores = perturbed(scores, sampling.temperature, _guessed(drafter, rows, scores.shape[1]))
    ranks: list[int] = _ranks(drafter, scores, text[answer.begin :], vocabulary).tolist()
    return ranks


def measure_own_answers(drafter: PreTrainedModel, answers: Sequence[OwnAnswer], vocabulary: int) -> Acceptance:
    """The drafter's acceptance on answers of any lengths, by temperature."""
    ranks = dict[str, list[list[int]]]()
    for answer in answers:
        ranks.setdefault(f"{answer.sampling.temperature:g}", []).append(own_answer_ranks(drafter, answer, vocabulary))
    return _acceptance({temperature: ranks[temperature] for temperature in sorted(ranks, key=float)})


def emitted_per_round(ranks: list[list[int]], shape: tuple[int, ...]) -> float:
    """Tokens per round if every round drafts `shape`: the accepted guesses and one token of the target's own.

    `ranks` has one list per answer. Rounds that the answer's end would cut short are not counted; NaN where all are.
    """
    lengths = [length for answer in ranks for length in round_lengths(LevelShape(shape), answer)]
    return fmean(lengths) if lengths else math.nan


def measure_acceptance(drafter: PreTrainedModel, all_answers: Sequence[Answers]) -> Acceptance:
    """The drafter's acceptance on one target's answers, by temperature."""
    ranks = {}
    for answers in all_answers:
        both = zip(answer_ranks(drafter, answers).tolist(), answers.lengths, strict=True)
        ranks[f"{answers.temperature:g}"] = [row[:length] for row, length in both]
    return _acceptance(ranks)


def _acceptance(ranks: Mapping[str, list[list[int]]]) -> Acceptance:
    """Compute the acceptance of a drafter. ranks: temperature -> for each answer, the ranks of its tokens"""
    first_rank: dict[str, float] = {}
    emitted: dict[str, dict[str, float]] = {}
    for temperature, rows in ranks.items():
        flat = [rank for row in rows for rank in row]
        first_rank[temperature] = flat.count(0) / len(flat)
        emitted[temperature] = {shape_name(shape): emitted_per_round(rows, shape) for shape in SHAPES}
    return Acceptance(first_rank, emitted, dict(ranks))
