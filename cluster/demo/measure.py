"""The model card's measurements of the trained models, computed offline in plain PyTorch and fp32.

Emitted per round is measured by replay, under the shared-noise rule (ALGORITHMS 3.5): the target's own text is fixed by
its noise, so a drafter's ranks of that text's tokens, among its own scores with the same noise, determine which guesses
of a tree of static shape are accepted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from dendro.shapes import LevelShape
from torch import Tensor
from transformers import DynamicCache, Mamba2ForCausalLM, PreTrainedModel

from cluster.demo.corpus import END_OF_TEXT_ID, VOCABULARY
from cluster.demo.prompts import MEASURING_FILE, Prompt, held_out_prompts, load_passages, load_tokenizer
from cluster.policies.replay import round_lengths
from drafter_service.training.students import StudentForward

PROMPTS = 32
PROMPT_TOKENS = 128
ANSWER_TOKENS = 64  # longer greedy answers of a target this small loop
LONG_ANSWER_TOKENS = 128
TEMPERATURES = (0.0, 0.7, 1.0)
SHAPES = ((1, 1, 1, 1), (3, 2, 2, 1, 1), (4, 2, 1, 1))
REPEATED_LIMIT = 0.3
LOSS_TOKENS = 384  # of each passage
NOISE_SEED = 2024


@dataclass(frozen=True, slots=True)
class Answers:
    """The target's answers to the measuring prompts at one temperature."""

    temperature: float
    texts: Tensor  # [prompts, PROMPT_TOKENS + answer tokens] int64
    lengths: tuple[int, ...]  # answer tokens up to and with the first end of text

    def tokens(self) -> list[list[int]]:
        """The answers, each up to its end."""
        answers: list[list[int]] = self.texts[:, PROMPT_TOKENS:].tolist()
        return [answer[:length] for answer, length in zip(answers, self.lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class Repetition:
    """How often a target's greedy answers to the shipped passages repeat themselves (mean shares of 4-grams)."""

    candidates: int
    under_limit: int  # candidates whose answer of ANSWER_TOKENS repeats less than REPEATED_LIMIT of its 4-grams
    in_all: float
    in_measured: float  # over the PROMPTS that are measured on
    in_measured_long: float  # over the same, answers of LONG_ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class TargetFacts:
    parameters: int
    loss: float  # nats per token, held-out passages
    agreement_with_text: float  # share of held-out tokens that the greedy guess gets right
    repetition: Repetition


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    parameters: int
    loss: float  # nats per token, held-out passages


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How well a drafter guesses a target's answers."""

    first_rank: dict[str, float]  # temperature -> share of answer tokens that the drafter ranks first
    emitted: dict[str, dict[str, float]]  # temperature -> shape -> tokens per round


def _shape_name(shape: tuple[int, ...]) -> str:
    return "(" + ",".join(map(str, shape)) + ")"


def noise_rows(temperature: float, rows: int, positions: int) -> Tensor:
    """Gumbel noise for every answer position, the same for target and drafter: [rows, positions, vocabulary].

    Zero at temperature 0. This noise is for measurements; it is not that of the public contract (DESIGN.md).
    """
    shape = (rows, positions, VOCABULARY)
    if temperature == 0:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return -torch.empty(shape).exponential_(generator=generator).log_()


def perturbed(logits: Tensor, temperature: float, noise: Tensor) -> Tensor:
    """logits / temperature + noise, or the plain logits at temperature 0."""
    return logits if temperature == 0 else logits / temperature + noise


@torch.inference_mode()
def write_answers(target: PreTrainedModel, prompts: list[Prompt], temperature: float, length: int) -> Answers:
    """Answers of `length` tokens; tokens after an end of text are generated and not counted."""
    noise = noise_rows(temperature, len(prompts), length)
    texts = torch.tensor([prompt.token_ids for prompt in prompts])
    cache_name = "cache_params" if isinstance(target, Mamba2ForCausalLM) else "past_key_values"
    past: Any = {cache_name: DynamicCache(config=target.config)}
    fed = 0
    for position in range(length):
        logits = target(texts[:, fed:], **past, use_cache=True, logits_to_keep=1).logits[:, -1]
        fed = texts.shape[1]
        token = perturbed(logits, temperature, noise[:, position]).argmax(-1, keepdim=True)
        texts = torch.cat([texts, token], 1)
    lengths = []
    for answer in texts[:, PROMPT_TOKENS:].tolist():
        lengths.append(answer.index(END_OF_TEXT_ID) + 1 if END_OF_TEXT_ID in answer else length)
    return Answers(temperature, texts, tuple(lengths))


def repeated_4grams(tokens: list[int]) -> float:
    """The share of an answer's 4-grams that occurred in it before."""
    grams = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def greedy_repetition(target: PreTrainedModel, prompts: list[Prompt], length: int = ANSWER_TOKENS) -> dict[str, float]:
    """Prompt name -> share of repeated 4-grams in the greedy answer of `length` tokens."""
    answers = write_answers(target, prompts, temperature=0.0, length=length)
    return {prompt.name: repeated_4grams(answer) for prompt, answer in zip(prompts, answers.tokens(), strict=True)}


def choose_prompts(target: PreTrainedModel, out: Path) -> None:
    """Write the order of the measuring passages: first those whose greedy answer repeats few 4-grams, in the shipped
    order, then the others by their share.

    Looping text is trivially predicted, so it would raise the acceptance of every drafter.
    """
    (out / MEASURING_FILE).unlink(missing_ok=True)
    repeated = greedy_repetition(target, held_out_prompts(None, PROMPT_TOKENS, models=out))
    varied = [name for name, share in repeated.items() if share < REPEATED_LIMIT]
    looping = sorted((name for name in repeated if name not in set(varied)), key=repeated.__getitem__)
    listing = {
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "repeated_4grams": repeated,
        "order": varied + looping,
    }
    (out / MEASURING_FILE).write_text(json.dumps(listing, indent=1) + "\n")


def measure_repetition(target: PreTrainedModel, out: Path) -> Repetition:
    """Repetition on the prompts of `choose_prompts`, which may have been chosen with another target."""
    prompts = held_out_prompts(None, PROMPT_TOKENS, models=out)
    repeated = list(greedy_repetition(target, prompts).values())
    long = greedy_repetition(target, prompts[:PROMPTS], LONG_ANSWER_TOKENS)
    return Repetition(
        candidates=len(prompts),
        under_limit=sum(share < REPEATED_LIMIT for share in repeated),
        in_all=sum(repeated) / len(repeated),
        in_measured=sum(repeated[:PROMPTS]) / PROMPTS,
        in_measured_long=sum(long.values()) / PROMPTS,
    )


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, out: Path) -> tuple[float, float]:
    """Nats per token, and the share of tokens that the model's first guess gets right, on all held-out passages."""
    tokenizer = load_tokenizer(out)
    forward = StudentForward(model)
    loss = torch.zeros(())
    right = tokens = 0
    for passage in load_passages():
        ids = torch.tensor([tokenizer.encode(passage.text).ids[:LOSS_TOKENS]])
        scores = model.lm_head(forward(ids[:, :-1]))
        loss += torch.nn.functional.cross_entropy(scores[0], ids[0, 1:], reduction="sum")
        right += int((scores[0].argmax(-1) == ids[0, 1:]).sum())
        tokens += ids.shape[1] - 1
    return loss.item() / tokens, right / tokens


def measure_target(target: PreTrainedModel, out: Path) -> TargetFacts:
    loss, right = held_out_loss(target, out)
    return TargetFacts(_parameters(target), loss, right, measure_repetition(target, out))


def measure_drafter(drafter: PreTrainedModel, out: Path) -> DrafterFacts:
    return DrafterFacts(_parameters(drafter), held_out_loss(drafter, out)[0])


def _parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.inference_mode()
def answer_ranks(drafter: PreTrainedModel, answers: Answers) -> Tensor:
    """The drafter's rank of every answer token among its own perturbed scores, given the true text before it.

    returns [prompts, answer tokens] int64, 0 for the drafter's first choice
    """
    hidden = StudentForward(drafter)(answers.texts[:, :-1])
    noise = noise_rows(answers.temperature, len(answers.texts), answers.texts.shape[1] - PROMPT_TOKENS)
    ranks = []
    for row, text in enumerate(answers.texts):
        scores = perturbed(drafter.lm_head(hidden[row, PROMPT_TOKENS - 1 :]), answers.temperature, noise[row])
        chosen = scores.gather(1, text[PROMPT_TOKENS:, None])
        ranks.append((scores > chosen).sum(-1))
    return torch.stack(ranks)


def emitted_per_round(ranks: list[list[int]], shape: tuple[int, ...]) -> float:
    """Tokens per round if every round drafts `shape`: the accepted guesses and one token of the target's own.

    `ranks` has one list per answer. Rounds that the answer's end would cut short are not counted.
    """
    return fmean(length for answer in ranks for length in round_lengths(LevelShape(shape), answer))


def measure_acceptance(drafter: PreTrainedModel, all_answers: list[Answers]) -> Acceptance:
    """The drafter's acceptance on one target's answers, by temperature."""
    first_rank: dict[str, float] = {}
    emitted: dict[str, dict[str, float]] = {}
    for answers in all_answers:
        ranks = [
            row[:length] for row, length in zip(answer_ranks(drafter, answers).tolist(), answers.lengths, strict=True)
        ]
        flat = [rank for row in ranks for rank in row]
        temperature = f"{answers.temperature:g}"
        first_rank[temperature] = flat.count(0) / len(flat)
        emitted[temperature] = {_shape_name(shape): emitted_per_round(ranks, shape) for shape in SHAPES}
    return Acceptance(first_rank, emitted)
