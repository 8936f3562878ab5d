"""A published target, SmolLM2-135M-Instruct in Q4_1, and a drafter: what holds for tiny models holds for it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from dendro.answer import Completion
from dendro.client import Asking
from dendro.options import Options
from dendro.structure import Structure, StructureForm
from dendro.text import Finish

from cluster.api.local import LocalClient
from cluster.certify.checks import MARGINS, LibraryModel
from cluster.hub import fetched
from cluster.router.tokenizer import CheckpointTokenizer
from cluster.running import local_ingress
from tests.random_requests import WAYS, Cases
from tests.support.smollm2 import ARMS, QUESTIONS, needs_smollm2, pair

pytestmark = [pytest.mark.long, needs_smollm2, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
TOKENS = 24
CASES = 16
GUESSED = ("auto", *(arm for arm in ARMS if arm != "off"))
LAWS: dict[str, Options] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0, "seed": 3},
    "top-k": {"temperature": 1.0, "top_k": 50, "seed": 4},
    "top-p": {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    "min-p": {"temperature": 1.3, "min_p": 0.05, "seed": 6},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "seed": 7},
}


@dataclass(frozen=True)
class RealPair:
    """The served pair, and its target as transformers runs it."""

    client: Asking
    call: Any  # as of `Cases`
    folder: Path  # of the target
    tokenizer: CheckpointTokenizer
    library: LibraryModel
    prompts: tuple[tuple[int, ...], ...]

    @torch.inference_mode()
    def logits_along(self, ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary] float32, after each of `ids`, by transformers."""
        logits: torch.Tensor = self.library.model(torch.tensor([list(ids)])).logits[0].float()
        return logits

    async def both(self, prompt: Sequence[int], way: str, **options: Any) -> tuple[Completion, Completion]:
        """An answer without speculation and one with it, at the same time."""
        options = {"max_new_tokens": TOKENS} | options
        one, other = await asyncio.gather(
            *(self.client.generate_text(prompt, **options, speculation=each) for each in ("off", way))
        )
        return one, other


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealPair]:
    config = pair(tmp_path_factory.mktemp("pair"), verification_modes=["naive", "multi-step", "block"])
    folder = fetched(config).targets["smollm2"].checkpoint
    tokenizer = CheckpointTokenizer(folder, "")
    asked = [tokenizer.chat([{"role": "user", "content": each}], opens_answer=True) for each in QUESTIONS[:4]]
    async with local_ingress(config) as ingress:
        yield RealPair(
            LocalClient(ingress),
            ingress.generate,
            folder,
            tokenizer,
            LibraryModel(folder, torch.bfloat16),
            tuple(tuple(tokenizer.encode_chat(text)) for text in asked),
        )


@pytest.mark.parametrize("law", LAWS)
async def test_answers_are_those_without_speculation_in_every_law(real: RealPair, law: str):
    """At the same time, so that their rows share the target's steps."""
    prompt = real.prompts[len(law) % len(real.prompts)]
    options: Options = LAWS[law] | {"max_new_tokens": TOKENS}
    plain, *guessed = await asyncio.gather(
        *(real.client.generate_text(prompt, **options, speculation=way) for way in ("off", *GUESSED))
    )
    for way, each in zip(GUESSED, guessed, strict=True):
        assert (each.token_ids, each.text) == (plain.token_ids, plain.text), way


@pytest.mark.parametrize(("mode", "way"), [("naive", "(3,2,1)"), ("multi-step", "(3,2,1)"), ("block", "(1,1,1)")])
async def test_where_the_law_has_one_token_every_mode_has_the_greedy_answer(real: RealPair, mode: str, way: str):
    """For other laws the last two keep the law alone: `dendro certify` measures it."""
    options: Options = {"max_new_tokens": TOKENS, "speculation": way, "mode": mode, "seed": 8}
    plain = await real.client.generate_text(real.prompts[0], max_new_tokens=TOKENS, speculation="off")
    drawn = await real.client.generate_text(real.prompts[0], temperature=1.0, top_k=1, **options)
    assert drawn.token_ids == plain.token_ids


async def test_greedy_answers_are_transformers_own_where_its_margins_allow(real: RealPair):
    """Every token has its best logit after the tokens before it, or one that rounding may have made the best."""
    same = tokens = 0
    for prompt in real.prompts:
        ours = (await real.client.generate_text(prompt, max_new_tokens=TOKENS)).token_ids
        logits = real.logits_along([*prompt, *ours])[len(prompt) - 1 : -1]
        drawn = logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
        behind = logits.max(1).values - drawn
        assert behind.max() < MARGINS["bfloat16"]
        same, tokens = same + int((behind == 0).sum()), tokens + len(ours)
    assert same >= 0.9 * tokens


STRUCTURES = {
    "schema": Structure(
        StructureForm.JSON_SCHEMA,
        (
            json.dumps(
                {
                    "type": "object",
                    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer"}},
                    "required": ["name", "age"],
                    "additionalProperties": False,
                }
            ),
        ),
    ),
    "regex": Structure(StructureForm.REGEX, (r"[A-Z][a-z]{2,12}( [a-z]{1,12}){3}\.",)),
    "choices": Structure(StructureForm.CHOICES, ("blue and white", "blue and red", "green")),
}


@pytest.mark.parametrize("kind", STRUCTURES)
async def test_structured_answers_are_valid_and_the_same(real: RealPair, kind: str):
    pytest.importorskip("llguidance")
    for way in ("auto", "(3,2,2,1,1)"):
        plain, guessed = await real.both(real.prompts[0], way, structure=STRUCTURES[kind], temperature=0.7, seed=2)
        assert guessed.token_ids == plain.token_ids and guessed.text == plain.text
        (text,) = STRUCTURES[kind].texts[:1]
        if kind == "regex":
            assert re.fullmatch(text, plain.text)
        elif kind == "choices":
            assert plain.text in STRUCTURES[kind].texts
        elif plain.complete.finish is not Finish.LENGTH:  # an integer has any number of digits
            assert json.loads(plain.text)["name"] in ("Ada", "Alan")


@pytest.mark.parametrize("way", ["auto", "dynamic(4,5,15)"])
async def test_an_answer_ends_at_a_stop_string_that_runs_over_tokens(real: RealPair, way: str):
    whole = await real.client.generate_text(real.prompts[1], max_new_tokens=TOKENS, speculation="off")
    stop = whole.text[len(whole.text) // 2 - 3 : len(whole.text) // 2 + 3]
    plain, guessed = await real.both(real.prompts[1], way, stop=[stop])
    assert plain.text == whole.text[: whole.text.index(stop)] and plain.complete.finish is Finish.STOP_STRING
    assert (guessed.text, guessed.token_ids) == (plain.text, plain.token_ids)


async def test_log_probabilities_are_bit_for_bit_the_same_and_near_transformers_own(real: RealPair):
    prompt = real.prompts[2]
    plain, guessed = await real.both(prompt, "(3,2,2,1,1)", logprobs=3, max_new_tokens=8)
    assert guessed.logprobs == plain.logprobs
    for place, ours in enumerate(plain.logprobs):
        theirs = real.library.logits([*prompt, *plain.token_ids[:place]]).log_softmax(-1)
        assert ours.logprob == pytest.approx(float(theirs[plain.token_ids[place]]), abs=MARGINS["bfloat16"])


@pytest.mark.parametrize("way", ["auto", "(2,1,1)"])
async def test_a_second_turn_is_the_answer_to_the_whole_conversation(real: RealPair, way: str):
    first = await real.client.generate_text(
        real.prompts[3], keep_session=True, max_new_tokens=TOKENS, speculation=way, seed=1
    )
    following = real.tokenizer.encode("<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n", False)
    second = await real.client.generate_text(
        following, session=first.complete.session, max_new_tokens=TOKENS, speculation=way, seed=1
    )
    text = [*real.prompts[3], *first.token_ids, *following]
    whole = await real.client.generate_text(text, max_new_tokens=TOKENS, speculation="off", seed=1)
    assert second.token_ids == whole.token_ids


async def test_the_chat_template_of_the_file_gives_the_librarys_ids(real: RealPair):
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(real.folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Łódź? \U0001f5fa"}]
    ours = real.tokenizer.encode_chat(real.tokenizer.chat(messages, opens_answer=True))
    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert "<|im_" not in (await real.client.generate_text(ours, max_new_tokens=TOKENS)).text


async def test_random_requests_show_the_same_with_and_without_speculation(real: RealPair):
    """Of all parameters, resumed and repeated: the cases of `tests/random_requests.py`."""
    cases, slots = Cases(real.call, WAYS), asyncio.Semaphore(4)

    async def one(number: int) -> None:
        async with slots:
            await cases.run(number)

    await asyncio.gather(*(one(number) for number in range(CASES)))
    assert not cases.differences and cases.refusals.total() <= CASES // 8, cases.refusals
