"""The prompts of a measurement of a user's own target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dendro.errors import BadRequest

from cluster.config import TargetConfig
from cluster.demo.kinds import served_kinds
from cluster.prompt_files import QUESTIONS, by_turns, read_prompts, that_fit, tokenizer_of
from cluster.training.acceptance import PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class ChosenPrompts:
    """Different prompts of several kinds, in an order in which the first ones are of several kinds, too."""

    source: str
    ids: tuple[tuple[int, ...], ...]


def choose_prompts(file: Path | None, target: TargetConfig, name: str, count: int, tokens: int) -> ChosenPrompts:
    """`count` prompts after which an answer of so many tokens fits. Without a file: questions where the target has a
    chat template, else passages of code and prose and edits of code. Raises BadRequest, naming the option."""
    tokenizer = tokenizer_of(target, name)
    longest = target.max_length - tokens
    if file is not None or tokenizer.has_chat:
        found = that_fit(read_prompts(file or QUESTIONS, tokenizer), longest)
        ids = list(dict.fromkeys(prompt.token_ids for prompt in by_turns(found)))
        source = f"of {file}" if file is not None else "with a user's questions"
    else:
        if longest < PROMPT_TOKENS:
            raise BadRequest("tokens", f"{tokens} after prompts of {PROMPT_TOKENS}; max_length is {target.max_length}")
        ids, source = served_kinds(PROMPT_TOKENS, tokenizer), "of code, prose and edits"
    if count > len(ids):
        raise BadRequest(
            "prompts", f"there are {len(ids)} prompts {source} for this target, not {count}; ask for fewer"
        )
    return ChosenPrompts(source, tuple(ids[:count]))
