"""The model that a server claims to serve, as transformers runs it in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from dendro.errors import BadRequest
from tree_layers.checkpoint import read_facts

from cluster.certify.checks import LibraryModel
from cluster.certify.outward.served import ServedAnswer, ServedPrompt
from cluster.router.token_texts import VocabularyTexts
from cluster.router.tokenizer import INCOMPLETE, CheckpointTokenizer

CONTEXT = 8
"""Tokens of a text that are decoded before those whose text is wanted."""
SEARCHED = 64
"""Likeliest tokens among which one is sought that a text goes on with."""


class Reference:
    """Log-probabilities of a checkpoint, in float32 and in the dtype that the server has, and its tokens' texts."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        facts = read_facts(checkpoint)
        self.tokenizer = CheckpointTokenizer(checkpoint, facts.tokenizer)
        self.end_ids = facts.end_ids
        self.dtype = dtype
        self._checkpoint = checkpoint
        self._models = {torch.float32: LibraryModel(checkpoint, torch.float32)}
        self._texts = VocabularyTexts(self.tokenizer)
        self._ids: dict[str, int | None] = {}  # by text: the token with this text; None where several have it
        for token in range(facts.known):
            text = self._texts.text(token)
            self._ids[text] = None if text in self._ids or INCOMPLETE in text or not text else token

    def logprobs(self, ids: Sequence[int], start: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Log-probabilities [len(ids) - start + 1, V] in float64 after `ids[:start]`, `ids[:start + 1]`, ..."""
        if dtype not in self._models:
            self._models[dtype] = LibraryModel(self._checkpoint, dtype)
        count = len(ids) - start + 1
        with torch.inference_mode():
            found = self._models[dtype].model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=count)
            return torch.log_softmax(found.logits[0].double(), -1)

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The greedy answer in float32, up to its end-of-text token, which is left out."""
        found = self._models[torch.float32].greedy(prompt, tokens)
        end = next((place for place, token in enumerate(found) if token in self.end_ids), len(found))
        return found[:end]

    def token_text(self, token: int) -> str:
        return self._texts.text(token)

    def id_of(self, text: str) -> int | None:
        """The only token of a text; None where there is none, or several."""
        return self._ids.get(text)

    def ids_of(self, answer: ServedAnswer) -> list[int] | None:
        """The token ids of an answer, without its end-of-text token; None where it does not say which they are."""
        if answer.token_ids is not None:
            found: list[int] | None = list(answer.token_ids)
        else:
            found = self._named(answer)
        if found and found[-1] in self.end_ids and answer.finish == "stop":
            found = found[:-1]
        return found

    def _named(self, answer: ServedAnswer) -> list[int] | None:
        tokens = list(answer.tokens or ())
        if tokens and self.id_of(tokens[-1]) in self.end_ids:
            tokens = tokens[:-1]
        if (answer.text and not tokens) or "".join(tokens) != answer.text:
            return None
        ids = [self.id_of(text) for text in tokens]
        return None if None in ids else [token for token in ids if token is not None]

    def text_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """The text that tokens add to a prompt."""
        head = list(prompt[-CONTEXT:])
        return self.tokenizer.decode([*head, *ids])[len(self.tokenizer.decode(head)) :]

    def likeliest_going_on(
        self, logprobs: torch.Tensor, prompt: Sequence[int], before: Sequence[int], rest: str, ended: bool
    ) -> float | None:
        """The largest log-probability of a token with which a text goes on; None if none of the likeliest is one.

        logprobs [V]: after a prompt and the tokens `before`. rest: the text after these. ended: whether it is whole
        """
        known = self.text_after(prompt, before)
        for token in logprobs.topk(min(SEARCHED, len(logprobs))).indices.tolist():
            text = self.text_after(prompt, [*before, token])[len(known) :]
            if token in self.end_ids:
                going_on = not rest and ended
            else:
                going_on = bool(text) and (
                    rest.startswith(text) or (not ended and bool(rest) and text.startswith(rest))
                )
            if going_on:
                return float(logprobs[token])
        return None

    def prompt_of_text(self, text: str) -> ServedPrompt | None:
        """A text as a prompt; None for one that its tokens do not give back."""
        ids = tuple(self.tokenizer.encode(text, begins=True))
        return ServedPrompt(ids, text) if ids and self.tokenizer.decode(ids) == text else None

    def prompt_of_ids(self, ids: Sequence[int]) -> ServedPrompt | None:
        """Tokens as a prompt; None for those that their text does not give back."""
        made = self.prompt_of_text(self.tokenizer.decode(ids))
        return made if made is not None and made.ids == tuple(ids) else None

    def prompt_of_message(self, message: str) -> ServedPrompt | None:
        """A user's message by the chat template; None where there is no template."""
        try:
            conversation = self.tokenizer.chat([{"role": "user", "content": message}], opens_answer=True)
        except BadRequest:
            return None
        return ServedPrompt(tuple(self.tokenizer.encode_chat(conversation)), message)
