"""Walks a step's trees, waits for the masks of structured answers, and computes log-probabilities of emitted tokens. A
fault in one text's part of a step ends that text alone, and a text whose masks take long is left out of the step."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from dendro.daemon_threads import MaskThreads
from dendro.errors import BadRequest, DendroError, EngineFailed
from dendro.failures import described, log_failure
from dendro.grammars import GrammarText, TreeMasks
from dendro.logprobs import TokenLogprobs
from dendro.modes import VerificationMode, draft_seed
from dendro.text import Sampling
from dendro.tree import DraftTree
from torch import Tensor
from tree_kernels.kernel_cache import NoKernelsError
from tree_kernels.noise import gumbel_noise, prepare_kernel
from tree_kernels.row_draw import RowDraw
from tree_kernels.row_softmax import log_probabilities, prepare_softmax, softmax
from tree_kernels.sampled_walk import Floats, NoiseCoins, SparseLaw, block, drawn_order, lenient_greedy, multi_step
from tree_kernels.tree_walk import Walk, walk
from tree_kernels.warp import History, Warp, tokens_of, warp

log = logging.getLogger("dendro.verifier")

Found = TypeVar("Found")

UNUSABLE = -2
"""Pick after a row from which no token can be drawn (`usable`). No token and no padding (-1) has this id."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A tree to walk and its request's sampling parameters. Plain values."""

    first: int  # the root's row in the step; the tree's other rows follow
    wanted: int  # the root's row in the step's logits; the tree's other rows follow
    base: int  # length of the text: the position of the token drawn after the root
    tree: DraftTree
    warp: Warp
    sampling: Sampling
    history: History | None = None  # the text's history, if parameters change logits before the temperature
    logprobs: int | None = None  # number of likeliest tokens with log-probabilities beside each token's; None: none
    structure: GrammarText | None = None  # structure of the text's answer; if there is one, so is a `history`

    def path(self, row: int) -> list[int]:
        """Tokens of the guesses on the path to a row."""
        path = list[int]()
        while row:
            path.append(int(self.tree.tokens[row]))
            row = int(self.tree.parents[row])
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Echo:
    """Rows of a text whose next tokens are known and get log-probabilities. Plain values."""

    wanted: int  # place of the first of the rows in the step's logits; the others follow
    tokens: tuple[int, ...]  # [rows] the known token after each row
    top: int  # number of likeliest tokens with log-probabilities beside each token's


def guarded(work: Callable[[], Found]) -> Found | DendroError:
    """Run one text's part of a step. Returns its result, or the error that ends this text alone."""
    try:
        return work()
    except DendroError as error:
        return error
    except BaseException as error:  # a panic of a native library is no Exception
        log_failure(log, error, "verifier: a text's part of a step failed; the others go on")
        return EngineFailed(f"verifier: {described(error)}")


# Masks of structured answers. Finished ones are kept, so a text that is left out of a step draws the same tokens later.
class MasksPending(DendroError):
    """Raised if a text's masks are not ready: it is left out of the step, and takes part again once `work` is done."""

    def __init__(self, work: Future[Any]) -> None:
        super().__init__("structure: the masks are not ready")
        self.work = work


@dataclass(frozen=True, slots=True, eq=False)
class BegunMasks:
    """Masks of one draw, computed by a thread. Until they are done, no other thread may use the text's structure."""

    work: Future[TreeMasks]
    text: GrammarText

    def result(self) -> TreeMasks:
        """The masks. Raises MasksPending if they are not ready, and any exception of the computation."""
        if not self.work.done():
            raise MasksPending(self.work)
        return self.work.result()


class StepMasks:
    """Finds the tokens that structures allow after the rows of a step's trees, while the model's forward runs."""

    def __init__(self) -> None:
        self._threads = MaskThreads()

    def begin(self, draws: Sequence[tuple[GrammarText | None, DraftTree]]) -> list[BegunMasks | None]:
        """Begin to compute the masks of each draw's tree; None for a text without a structure."""
        return [
            BegunMasks(self._threads.begin(partial(text.masks, tree)), text) if text is not None else None
            for text, tree in draws
        ]

    def wait(self, masks: Sequence[BegunMasks | None]) -> None:
        """Wait a short time for masks to become ready."""
        self._threads.wait([each.work for each in masks if each is not None])

    def settled(
        self, walks: Sequence[Walk | DendroError], masks: Sequence[BegunMasks | None]
    ) -> list[Walk | DendroError]:
        """Find what may follow the tokens of each walk, which decides whether they complete the answer. Returns the
        walks, with MasksPending in place of a walk whose result is not ready, and the error in place of one that
        failed."""
        found = list(walks)
        ahead: dict[int, Future[None]] = {}
        for number, (walked, begun) in enumerate(zip(walks, masks, strict=True)):
            if begun is not None and isinstance(walked, Walk):
                ahead[number] = self._threads.begin(partial(begun.text.foresee, walked.tokens))
        self._threads.wait(list(ahead.values()))
        for number, work in ahead.items():
            if not work.done():
                found[number] = MasksPending(work)
            elif isinstance(failed := guarded(work.result), DendroError):
                found[number] = failed
        return found


class _UnusableRow(Exception):
    """The logits of a visited row of a tree are not finite."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def usable(logits: Tensor) -> bool:
    """True if a token can be drawn from raw logits: none is NaN or infinite, and not all are minus infinity."""
    return math.isfinite(logits.max())  # the maximum is NaN if any logit is


def unusable_text(length: int) -> BadRequest:
    """Error for a text after whose first `length` tokens the target's logits are not finite."""
    return BadRequest("prompt", f"the target's logits after the text's first {length} tokens are not finite")


def before_unusable(walked: Walk, base: int) -> Walk:
    """Cut a walk before a last row whose pick is UNUSABLE. Raises BadRequest if that row is the root. So the tokens
    before such a row, and the error, are those of plain decoding. base: length of the text before the round"""
    if walked.tokens[-1:] != (UNUSABLE,):
        return walked
    if len(walked.path) == 1:
        raise unusable_text(base)
    return Walk(walked.path[:-1], walked.tokens[:-1], walked.ranks[:-1])


def _scores(draw: Draw, logits: Callable[[int], Tensor], masks: BegunMasks | None, row: int) -> Tensor:
    """Scores [1, vocabulary] of a row of a draw's tree before the temperature: its logits with the effect of the text's
    history. Raises _UnusableRow."""
    here = logits(draw.wanted + row)
    if not usable(here):
        raise _UnusableRow(row)
    if draw.history is None:
        return here
    allowed = [masks.result().allowed(row)] if masks is not None else ()
    return draw.history.scores(here, [draw.path(row)], allowed)


class Walker:
    """Walks trees over their logits."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._row_draw: RowDraw | None = None
        with suppress(NoKernelsError):
            self._row_draw = RowDraw(vocabulary)
        prepare_kernel()
        prepare_softmax()

    def walk(self, draw: Draw, logits: Callable[[int], Tensor], masks: BegunMasks | None = None) -> Walk:
        """Walk a draw's tree from the root, drawing a token after each visited row.

        logits: returns a row of the step's logits [1, vocabulary] float32; called for visited rows only, in order
        masks: masks of the draw's structure, begun by `StepMasks`

        Raises BadRequest if the logits of the root are not finite; the walk ends before any other such row. In modes
        that do not keep the tokens of plain decoding, it is raised for any visited row.
        """
        scores = partial(_scores, draw, logits, masks)
        if not draw.sampling.keeps_tokens:
            try:
                return walk_by_mode(draw.tree, draw.base, draw.warp, draw.sampling, scores)
            except _UnusableRow as found:
                raise unusable_text(draw.base + int(draw.tree.depths[found.row])) from None
        pick = partial(self._pick, draw, logits, scores)
        return before_unusable(walk(draw.tree.tokens.tolist(), draw.tree.parents.tolist(), pick), draw.base)

    def _pick(self, draw: Draw, logits: Callable[[int], Tensor], scores: Callable[[int], Tensor], row: int) -> int:
        """The token after a row, or UNUSABLE."""
        position = draw.base + int(draw.tree.depths[row])
        unchanged = draw.history is None and not draw.warp.masks
        try:
            # A draw in one pass finds raw logits that are not usable itself, and is then undecided.
            token = self._in_one_pass(draw, logits(draw.wanted + row) if unchanged else scores(row), position)
            return self._from_all_noise(draw, scores(row), position) if token is None else token
        except _UnusableRow:
            return UNUSABLE

    def _in_one_pass(self, draw: Draw, scores: Tensor, position: int) -> int | None:
        """The token at a position, from scores [1, vocabulary] before the temperature; None if it is undecided."""
        on_cpu, temperature, sampling = scores.device.type == "cpu", draw.warp.temperature, draw.sampling
        if self._row_draw is None:
            return None
        if draw.warp.greedy:
            return self._row_draw.greedy(scores) if on_cpu else None
        if draw.warp.masks or not on_cpu:  # an accelerator divides by a temperature in another way
            scores, temperature = warp(scores, draw.warp).cpu(), 1.0
        return self._row_draw.sampled(scores, temperature, sampling.seed, position, sampling.sample_index)

    def _from_all_noise(self, draw: Draw, scores: Tensor, position: int) -> int:
        """The token at a position, from scores [1, vocabulary] before the temperature and the noise of all tokens."""
        noise, sampling = None, draw.sampling
        if not draw.warp.greedy:
            noise = gumbel_noise(sampling.seed, [position], self._vocabulary, sampling.sample_index).to(scores.device)
        return int(tokens_of(scores, draw.warp, noise)[0])


# Log-probabilities, from the raw logits of the rows that a walk visited
def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities after a row, by a softmax in float32, of a token and of the `top` tokens with the greatest
    logits; of equal logits the lower id comes first.

    logits [1, V] float32
    """
    likeliest = likeliest_tokens(logits[0], top)
    found = log_probabilities(logits, torch.cat([likeliest.new_tensor([token]), likeliest])).tolist()
    return TokenLogprobs(found[0], tuple(zip(likeliest.tolist(), found[1:], strict=True)))


def likeliest_tokens(logits: Tensor, top: int) -> Tensor:
    """Ids of the `top` greatest logits [V], greatest first; of equal logits the lower id comes first. (torch.topk does
    not order equal numbers, and sorting the vocabulary takes longer.)

    >>> likeliest_tokens(torch.tensor([1.0, 3.0, 2.0, 3.0]), top=3).tolist()
    [1, 3, 2]
    """
    top = min(top, len(logits))
    if not top:
        return torch.zeros(0, dtype=torch.int64, device=logits.device)
    reached = (logits >= logits.topk(top).values[-1]).nonzero()[:, 0]
    order = logits[reached].sort(descending=True, stable=True).indices
    return reached[order[:top]]


def echo_logprobs(echo: Echo, logits: Callable[[int], Tensor]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of the known tokens after these rows. logits: returns a row of the step's logits [1, V]

    Raises BadRequest if logits are not finite."""
    found = []
    for row, token in enumerate(echo.tokens, echo.wanted):
        here = logits(row)
        if not usable(here):
            raise BadRequest("echo", "the target's logits of the prompt are not finite")
        found.append(token_logprobs(here, token, echo.top))
    return tuple(found)


def walk_with_logprobs(
    walker: Walker, draw: Draw, logits: Callable[[int], Tensor], masks: BegunMasks | None = None
) -> tuple[Walk, tuple[TokenLogprobs, ...]]:
    """Walk a tree (`Walker.walk`). Returns the walk and the log-probabilities of its tokens; none if the draw does not
    ask for them."""
    if draw.logprobs is None:
        return walker.walk(draw, logits, masks), ()
    read = functools.cache(logits)  # A later row may replace the block of logits of this one.
    walked = walker.walk(draw, read, masks)
    rows = zip(walked.path, walked.tokens, strict=True)
    return walked, tuple(token_logprobs(read(draw.wanted + row), token, draw.logprobs) for row, token in rows)


# Modes whose tokens are not those of plain decoding
def check_laws(tree: DraftTree, sampling: Sampling, base: int, vocabulary: int) -> None:
    """Raise BadRequest for a tree that the request's mode cannot verify: with laws although its guesses are not drawn,
    without laws although they are, with children that are not the first draws of their row's law, or with branches in a
    mode that needs a chain.

    tree: has laws, or its guesses are drawn   base: length of the text at the start of the round

    A law that was chosen after its draws cannot be detected, so a cluster serves these modes only if its configuration
    lists them.
    """
    if not sampling.draws_guesses:
        raise BadRequest("tree.laws", f"have no use in mode {sampling.mode} at temperature {sampling.temperature}")
    if tree.guesses and not tree.laws:
        raise BadRequest("tree.laws", f"are missing; mode {sampling.mode} needs those of all rows with children")
    if sampling.mode is VerificationMode.BLOCK and tree.depth < tree.guesses:
        raise BadRequest("tree.parents", "are those of a tree; mode block needs a chain")
    seed = draft_seed(sampling.seed)
    for law in tree.laws:
        if int(law.ids.max()) >= vocabulary:
            raise BadRequest(f"tree.laws[{law.row}].ids", f"a token lies outside the vocabulary of {vocabulary}")
        order = drawn_order(SparseLaw(law.ids, law.probabilities), seed, base, law.row, sampling.sample_index)
        children = tree.tokens[tree.children(law.row)].tolist()
        if children != law.ids[order[: len(children)]].tolist():
            raise BadRequest(f"tree.laws[{law.row}]", "the row's children are not the first draws of its law")


def walk_by_mode(
    tree: DraftTree, base: int, settings: Warp, sampling: Sampling, scores: Callable[[int], Tensor]
) -> Walk:
    """Walk a tree in a mode whose tokens are not those of plain decoding.

    scores: returns logits [1, vocabulary] float32 of a row of the tree, before the temperature
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    if not sampling.draws_guesses:
        return lenient_greedy(tokens, parents, lambda row: _numbers(scores(row)), sampling.lenience)

    def target_probs(row: int) -> Floats:
        return _numbers(softmax(warp(scores(row), settings)))

    laws = {law.row: SparseLaw(law.ids, law.probabilities) for law in tree.laws}
    coins = NoiseCoins(sampling.seed, base, sampling.sample_index)
    if sampling.mode is VerificationMode.BLOCK:
        return block(tokens, parents, target_probs, laws, coins)
    return multi_step(tokens, parents, target_probs, laws, coins, sampling.lenience)


def _numbers(row: Tensor) -> Floats:
    """Copy a row [1, n] to the host as [n] float64."""
    numbers: Floats = row[0].cpu().numpy().astype(np.float64)
    return numbers
