"""What `dendro demo` sends in its two turns: questions through a chat template, or a passage of code and more of it."""

from __future__ import annotations

from dataclasses import dataclass

from dendro.answer import Completion
from dendro.text import Finish

from cluster.checkpoints import target_facts
from cluster.config import Config
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.hub import fetched_model
from cluster.router.tokenizer import CheckpointTokenizer

QUESTION = "How does a rainbow form? Answer in four sentences."
SECOND_QUESTION = "Repeat your answer as a list, with one sentence on each line."
PASSAGE_TOKENS = 96
CONTINUATION = "\n\n\ndef main():\n"
_ANSWER = "AN ANSWER"


@dataclass(frozen=True, slots=True)
class TextTurns:
    """Two texts that are sent as they are."""

    first: str
    then: str

    def second(self, answer: Completion) -> str:
        return self.then


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """Two questions in the form that a chat template gives them."""

    first: str
    then: str  # text that follows an answer which has ended
    end: str  # text that ends an answer

    def second(self, answer: Completion) -> str:
        return self.then if answer.complete.finish is Finish.END_OF_TEXT else self.end + self.then


def chat_turns(tokenizer: CheckpointTokenizer, ends: frozenset[int], question: str, then: str) -> ChatTurns:
    """The turns of a tokenizer that has a chat template. ends: the target's end-of-text tokens."""
    asked = {"role": "user", "content": question}
    answered = [asked, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": then}]
    following = tokenizer.chat(answered, opens_answer=True).rpartition(_ANSWER)[2]
    texts = (tokenizer.showing().decode([token]) for token in ends)
    end = next((text for text in texts if following.startswith(text)), "")
    return ChatTurns(tokenizer.chat([asked], opens_answer=True), following.removeprefix(end), end)


def demo_turns(config: Config, prompt: str = "") -> TextTurns | ChatTurns:
    """The turns for a configuration's first target. prompt: in place of the first question or passage"""
    name, target = next(iter(config.targets.items()))
    here = fetched_model(f"targets.{name}", target, weights=False)
    tokenizer = CheckpointTokenizer(here.tokenizer_folder, "")
    if tokenizer.has_chat:
        return chat_turns(tokenizer, target_facts(name, target).end_ids, prompt or QUESTION, SECOND_QUESTION)
    return TextTurns(prompt or held_out_prompts(1, PASSAGE_TOKENS, load_tokenizer())[0].text, CONTINUATION)
