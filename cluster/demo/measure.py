"""The model card's measurements of the trained models, computed offline in plain PyTorch and fp32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cluster.demo.corpus import END_OF_TEXT_ID, VOCABULARY
from cluster.demo.prompts import MEASURING_FILE, Prompt, held_out_prompts, load_passages, load_tokenizer
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS, PROMPTS, Answers, write_equal_answers
from drafter_service.training.students import StudentForward

LONG_ANSWER_TOKENS = 128
REPEATED_LIMIT = 0.3
LOSS_TOKENS = 384  # tokens of each passage


@dataclass(frozen=True, slots=True)
class Repetition:
    """How often a target's greedy answers to the shipped passages repeat themselves (mean shares of 4-grams)."""

    candidates: int
    under_limit: int  # candidates whose answer of ANSWER_TOKENS repeats less than REPEATED_LIMIT of its 4-grams
    in_all: float
    in_measured: float  # share in answers to the PROMPTS that are measured on
    in_measured_long: float  # share in answers of LONG_ANSWER_TOKENS to these prompts


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


def answers_to(target: PreTrainedModel, prompts: list[Prompt], temperature: float, length: int) -> Answers:
    """The target's answers of `length` tokens."""
    texts = torch.tensor([prompt.token_ids for prompt in prompts])
    return write_equal_answers(target, texts, temperature, length, VOCABULARY, frozenset({END_OF_TEXT_ID}))


def repeated_4grams(tokens: list[int]) -> float:
    """The share of an answer's 4-grams that occurred in it before."""
    grams = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def greedy_repetition(target: PreTrainedModel, prompts: list[Prompt], length: int = ANSWER_TOKENS) -> dict[str, float]:
    """Prompt name -> share of repeated 4-grams in the greedy answer of `length` tokens."""
    answers = answers_to(target, prompts, temperature=0.0, length=length)
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
