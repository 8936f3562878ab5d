"""Requests that call a verifier's engine directly, and random trees that contain the target's tokens."""

from __future__ import annotations

import asyncio

import numpy as np
from dendro.calls import CloseCall, OpenCall, RequestParameters, TextUpdate, VerifyCall, new_opening
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree

from tests.support.exactness import bitwise_or_skip

LAWS = (
    Sampling(),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=6, repetition_penalty=1.2, frequency_penalty=0.5),
)


class RoundByRound:
    """One request at the engine, round by round."""

    def __init__(self, engine, prompt, sampling=None, count=24, tenant=""):
        self.engine, self.prompt = engine, list(prompt)
        self.text = Tokens()
        self.text.extend(prompt)
        self.end = len(prompt) + count
        self.parameters = RequestParameters(sampling or Sampling(), Limits(self.end, ignore_end=True), tenant, ())
        self.opening, self.known = new_opening(), 0

    def update(self):
        return TextUpdate.of(self.opening, self.text, self.known)

    async def open(self, ahead=False):
        opened = await self.engine.open(OpenCall(self.update(), self.parameters, ahead=ahead))
        self.known = len(self.text)
        return opened

    async def round(self, tree=None, ahead=None):
        tree = tree or DraftTree.root_only(self.text.ids[-1])
        call = VerifyCall(self.update(), tree, ahead is not None and not tree.guesses and ahead())
        self.known = len(self.text)
        verdict = await self.engine.verify(call)
        for above, row, token in zip(verdict.path, verdict.path[1:], verdict.tokens, strict=False):
            assert tree.parents[row] == above and tree.tokens[row] == token, (
                "the path is not one of the tree that was sent"
            )
            assert tree.children(above)[verdict.ranks[verdict.path.index(above)]] == row
        self.text.extend(verdict.tokens)
        return verdict

    def back_to(self, length):
        """Drop the tokens after `length`, as if their verdicts had not arrived."""
        before = Tokens()
        before.extend(self.text.ids[:length])
        self.text, self.known = before, min(self.known, length)

    async def close(self):
        return await self.engine.close(CloseCall(self.update()))

    @property
    def answer(self):
        return self.text.ids[len(self.prompt) :]

    async def finish(self, trees=None, ahead=None):
        await self.open(ahead is not None and ahead())
        return await self.go_on(trees, ahead)

    async def go_on(self, trees=None, ahead=None):
        """Rounds up to the end. trees, ahead: make a round's tree, None for the root alone; whether
        a round of the root alone announces another."""
        while len(self.text) < self.end:
            await self.round(trees(self) if trees else None, ahead)
        await self.close()
        return self.answer


def guessing(rng, truth, vocabulary=256):
    """Trees of random shape. Below a true row, the true token is a child with probability 0.8 or more."""

    def tree(router):
        tokens, parents, values = [router.text.ids[-1]], [-1], [0.0]
        done, right, level = len(router.answer), 0, [0]
        for step in range(int(rng.integers(0, 6))):
            below = []
            for parent in level:
                siblings = dict.fromkeys(rng.integers(0, vocabulary, int(rng.integers(1, 4))).tolist())
                if parent == right and done + step < len(truth) and rng.random() < 0.8:
                    siblings[truth[done + step]] = None
                for token in siblings:
                    if len(tokens) < 32:
                        tokens.append(token)
                        parents.append(parent)
                        values.append(float(rng.normal()) - 1.0)
                        below.append(len(tokens) - 1)
            true_token = truth[done + step] if done + step < len(truth) else None
            right = next((row for row in below if parents[row] == right and tokens[row] == true_token), -1)
            level = below[:4]
        return DraftTree.of(tokens, parents, np.minimum(values, 0.0))

    return tree


def watch_logits(engine):
    """{session: {position: logits}} of every row that is walked from now on, for tests that compare their bits."""
    bitwise_or_skip(engine)
    seen, walk = {}, engine.runner.walker.walk

    def watched(draw, logits, masks=None):
        walked = walk(draw, logits, masks)
        number = next(share.session.number for share in engine.scheduler._running if share.tree is draw.tree)
        for row in walked.path:
            position = draw.base + int(draw.tree.depths[row])
            seen.setdefault(number, {})[position] = logits(draw.wanted + row)[0].clone()
        return walked

    engine.runner.walker.walk = watched
    return seen


async def alone(engine, prompts, laws, count):
    """The answer to each text when it runs alone, for tests that compare other answers with it."""
    bitwise_or_skip(engine)
    return [await RoundByRound(engine, prompt, law, count).finish() for prompt, law in zip(prompts, laws, strict=True)]


async def arrive_at_random(engine, prompts, laws, count, rng, vocabulary=256, leaving=False):
    """Send texts at random times, with random trees, and check that each has the answer that it has alone. Random calls
    and openings announce a round without a tree; some of the rounds after them have one.

    leaving: every fifth text is closed after five rounds
    """
    truths = await alone(engine, prompts, laws, count)

    def announced():
        return rng.random() < 0.5

    async def request(prompt, law, truth, leaves):
        await asyncio.sleep(float(rng.random()) * 0.05)
        router, guesses = RoundByRound(engine, prompt, law, count), guessing(rng, truth, vocabulary)

        def trees(router):
            return guesses(router) if rng.random() < 0.6 else None

        if not leaves:
            assert await router.finish(trees, announced) == truth
            return
        await router.open(announced())
        for _ in range(5):
            await router.round(trees(router), announced)
        await router.close()
        assert truth[: len(router.answer)] == router.answer

    leaves = [leaving and place % 5 == 4 for place in range(len(prompts))]
    await asyncio.gather(*map(request, prompts, laws, truths, leaves))
