"""Calls, limits, texts and counters of a verifier's scheduler, and whose text is admitted next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dendro.calls import (
    MOST_PREPARED,
    CloseCall,
    OpenCall,
    PeerText,
    PreparedTree,
    RequestParameters,
    TextUpdate,
    VerifyCall,
)
from dendro.engine import Ticket
from dendro.errors import BadRequest
from dendro.grammars import GrammarText
from dendro.logprobs import TokenLogprobs, check_echo
from dendro.order import Order
from dendro.text import Sampling, check_choice
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE, near_window
from tree_kernels.tree_walk import Walk
from tree_kernels.warp import History, Processors, Warp
from tree_layers.tree_mixers import Array

from verifier_service.memory import TextMemory, most_pages, salt_of
from verifier_service.recurrent import Arrangement, TextStates
from verifier_service.walk import check_laws

Call = OpenCall | VerifyCall | CloseCall


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of an engine, computed when it is loaded."""

    vocabulary: int
    max_length: int  # most tokens of a text
    max_rows: int  # most rows of a tree
    max_depth: int  # most levels of a tree below the root
    max_sessions: int  # most texts that hold pages at once
    max_waiting: int  # most texts that wait until an open text leaves its place
    step_rows: int  # most rows of a step
    sizes: tuple[int, ...]  # numbers of rows to which steps are padded
    prefill_rows: int  # rows of a step reserved for prompts; beside few rows of trees, most rows of the whole step
    pages: int  # number of pages for texts
    share_prefixes: bool
    first_scratch: int  # the first slot for guesses
    end_ids: frozenset[int]
    window: int | None = None  # most positions that a row sees, if every layer has a sliding window; else None
    saves: bool = False  # True if a text's whole memory is small, and is saved when the text is closed
    recurrent: Arrangement | None = None  # layout of the states' memory; None for a target without states

    def pages_of(self, tokens: int) -> int:
        """Most pages that a text of `tokens` tokens, guesses included, holds at once."""
        return most_pages(tokens, self.window, self.slack, self.step_rows + self.max_depth)

    @property
    def slack(self) -> int:
        """Most tokens by which a text is cut when the router drops a verdict."""
        return self.max_depth + 1

    @property
    def near(self) -> int:
        return near_window(self.max_depth)

    def check_text(self, base: int, tokens: Sequence[int]) -> None:
        """Raise BadRequest for a text of `base` tokens, the newest of which are `tokens`, that cannot be verified."""
        if base < 1:
            raise BadRequest("text", "is empty: there is no token to go on from")
        if base >= self.max_length:
            raise BadRequest("text", f"has {base} tokens; at most {self.max_length - 1} leave room for one more")
        if not self.knows(tokens):
            raise BadRequest("text", f"has a token outside the vocabulary of {self.vocabulary}")

    def knows(self, tokens: Sequence[int]) -> bool:
        """True if all of these ids are in the vocabulary."""
        return not tokens or 0 <= min(tokens) <= max(tokens) < self.vocabulary

    def check_opening(self, update: TextUpdate, parameters: RequestParameters) -> None:
        """Raise BadRequest, naming the field, for a text that cannot be opened with these parameters."""
        self.check_text(update.base, update.tokens)
        longest = parameters.limits.max_length
        if longest > self.max_length:
            raise BadRequest("limits.max_length", f"{longest} tokens; a text here has at most {self.max_length}")
        if longest <= update.base:
            raise BadRequest("limits.max_length", f"{longest} tokens leave no room after a text of {update.base}")
        if (first := parameters.echo_from) is not None:
            check_echo("text", update.base - first, parameters.logprobs)
        check_choice(parameters.sampling, parameters.limits, self.vocabulary, self.end_ids, parameters.structure)
        needed = self.pages_of(longest + self.max_depth)
        if needed > self.pages:
            raise BadRequest(
                "max_new_tokens",
                f"makes a text of up to {longest} tokens, which needs {needed} pages of {PAGE} tokens; there are "
                f"{self.pages} in the target's memory",
            )

    def check_tree(self, tree: DraftTree, ids: Sequence[int], sampling: Sampling) -> None:
        """Raise BadRequest for a tree that does not begin with the last token of the text `ids`, exceeds a limit, or
        cannot be verified in the request's mode."""
        root, tokens = ids[-1], tree.tokens.tolist()
        if tokens[0] != root:
            raise BadRequest("tree.tokens", f"begins with {tokens[0]}, the text ends with {root}")
        if tree.rows > self.max_rows:
            raise BadRequest("tree.tokens", f"{tree.rows} rows; a tree here has at most {self.max_rows}")
        if max(tokens) >= self.vocabulary:
            raise BadRequest("tree.tokens", f"a token lies outside the vocabulary of {self.vocabulary}")
        if tree.depth > self.max_depth:
            raise BadRequest("tree.parents", f"depth {tree.depth}; a tree here has at most {self.max_depth}")
        if tree.laws or sampling.draws_guesses:
            check_laws(tree, sampling, len(ids), self.vocabulary)


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Memory of a state-space text after `length` tokens."""

    length: int
    tokens: int  # number of newest tokens whose inputs the memory holds, after its checkpoint
    arrays: Mapping[str, Array]
    source: TextStates | None = None  # the place of an open text with the same prefix, from which arrays are copied


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """A call that waits for its answer."""

    call: Call
    ticket: Ticket
    saved: Saved | None = None  # stored memory of a text that is opened
    structure: GrammarText | None = None  # structure of the answer of a text that is opened
    missed: str = ""  # reason why the ordered tree of this round did not come; empty if it came
    drafted_us: int = 0  # microseconds from the last verdict until an ordered tree came


@dataclass(slots=True, eq=False)
class OrderedRound:
    """A round for whose tree this verifier has asked a drafter. Trees that the drafter sends ahead, for the round after
    this one, are kept here until that round is ordered."""

    session: VerifierText
    order: Order
    began_s: float  # time at which the drafter was asked
    first: int  # least length of a text whose prepared tree is kept
    claim: PendingCall | None = None  # the router's call for the round, if it came before the tree
    prepared: dict[tuple[int, int], DraftTree] = field(default_factory=dict)  # key: length and digest of the text

    def follow(self, last: OrderedRound) -> None:
        """Take over the trees that were sent ahead for this round while `last` was ordered, if the opening at the
        drafter and the shape are the same."""
        if (last.order.opening, last.order.shape) == (self.order.opening, self.order.shape):
            self.first -= 1  # trees that are still on their way may be for this round, too
            self.prepared = {key: tree for key, tree in last.prepared.items() if key[0] == self.first}

    def keep(self, sent: PreparedTree) -> bool:
        """Keep a prepared tree. False if it is repeated, drawn, too large or for an earlier text, or if MOST_PREPARED
        are kept already."""
        key, tree, shape = (sent.base, sent.digest), sent.tree, self.order.shape
        if key in self.prepared or len(self.prepared) == MOST_PREPARED or sent.base < self.first:
            return False
        if tree.rows > shape.rows or tree.laws:
            return False
        self.prepared[key] = tree
        return True

    @property
    def late_s(self) -> float:
        """Time from which on the round has its root alone."""
        return self.began_s + self.order.wait_us / 1e6


@dataclass(slots=True, eq=False)
class VerifierText:
    """One opening of a text."""

    number: int  # number of texts opened before it, and 1
    name: bytes  # name of the opening
    parameters: RequestParameters
    warp: Warp
    text: PeerText
    memory: TextMemory
    opening: PendingCall | None = None  # the open call, until the prompt is consumed
    asks: deque[PendingCall] = field(default_factory=deque)  # calls to verify, in order of arrival
    ahead: PendingCall | None = None  # a round that was begun before the router's call: an entry of `asks`, or settled
    ordered: OrderedRound | None = None  # the next round, while its tree is awaited
    latest: OrderedRound | None = None  # the round ordered last; it keeps trees sent ahead for the round after it
    way_s: float = 0.0  # smoothed time of an ordered tree's way, there and back; 0: none has come
    leaving: bool = False  # True once the text was closed, while its memory is being saved
    admitted: bool = False  # True once the text may hold pages; until then it waits
    answered: float | None = None  # time of the last verdict; None if no round is expected next
    rows: int = 1  # rows of the last tree
    away_s: float = 0.0  # smoothed time from a verdict to the router's next round
    counted: bool = False  # True once the text is counted in `VerifierCounters.waited`
    restored: int = 0  # tokens that were restored or shared on admission
    saved: Saved | None = None  # the stored memory, until admission
    history: History | None = None  # history for parameters that change logits before the temperature; None: none do
    structure: GrammarText | None = None  # the answer's structure; follows the text, or is one verdict ahead of it
    masks: Future[Any] | None = None  # late masks; until they are done, the text takes part in no step
    echoed: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position: log-probabilities from `echo_from` on

    @classmethod
    def opened(cls, number: int, ask: PendingCall, call: OpenCall, text: PeerText, capacity: Capacity) -> VerifierText:
        """Make a text for an open call."""
        parameters, sampling = call.parameters, call.parameters.sampling
        warp = Warp.of(sampling)
        memory = TextMemory(salt_of(parameters.tenant))
        history = None
        if ask.structure is not None or sampling.changes_logits or parameters.limits.min_length:
            processors = processors_of(parameters, capacity.end_ids)
            history = History(processors, capacity.vocabulary, parameters.prompt_length)
            history.follow(text.ids, 0)
        return cls(
            number,
            call.update.opening,
            parameters,
            warp,
            text,
            memory,
            opening=ask,
            saved=ask.saved,
            history=history,
            structure=ask.structure,
        )

    def drop_all(self) -> None:
        """Remove all calls that wait for a step, and the opening."""
        self.asks.clear()
        self.ahead = self.opening = self.latest = None

    def follow(self, update: TextUpdate) -> int:
        """Apply a call's update to the text. Returns the length of the common prefix of the old and the new text."""
        common = self.text.follow(update)
        if self.history is not None:
            self.history.follow(self.text.ids, common)
        return common

    def follow_structure(self, structure: GrammarText) -> None:
        """Bring the answer's structure up to the text. Raises BadRequest if the structure is complete."""
        structure.follow(self.text.ids)
        if structure.complete:
            raise BadRequest("structure", "is complete: no token may follow the answer")

    def before_stuck(self, walked: Walk, structure: GrammarText) -> Walk:
        """Cut a walk before a row after which the structure allows no token. Raises BadRequest if that row is the root.
        The tokens before such a row, and the refusal, do not depend on the rest of the tree or on other trees."""
        kept = next((place for place, row in enumerate(walked.path) if row in structure.stuck), len(walked.path))
        if not kept:
            reason = (
                f"cannot go on after the answer's first {len(self.text.ids) - self.parameters.prompt_length} tokens"
            )
            raise BadRequest("structure", f"{reason}: {structure.why_stuck}")
        return Walk(walked.path[:kept], walked.tokens[:kept], walked.ranks[: kept - 1])

    @property
    def trimmed(self) -> bool:
        """True if guesses of the text's trees may be left out of a step. Drawn guesses may not: dropping them would
        bias the output."""
        return not self.parameters.sampling.draws_guesses

    def least_rows(self, tree: DraftTree) -> int:
        """Least number of the tree's rows that a step must verify."""
        return 1 if self.trimmed else tree.rows

    @property
    def lacking(self) -> int:
        """Number of committed tokens before the root that the memory has not consumed."""
        return len(self.text.ids) - 1 - len(self.memory.consumed)

    @property
    def shareable(self) -> list[int]:
        """Tokens whose memory may be shared with other texts: all but the root; while the text is opened, only those
        before the first row whose log-probabilities are asked for."""
        first = self.parameters.echo_from if self.opening is not None else None
        return self.text.ids[: min(len(self.text.ids), first or len(self.text.ids)) - 1]

    @property
    def masked(self) -> bool:
        """True if no thread is computing the text's masks."""
        return self.masks is None or self.masks.done()

    @property
    def waits(self) -> bool:
        """True if a call for the text waits."""
        return self.opening is not None or bool(self.asks)


def longest_saved(session: VerifierText, others: Iterable[VerifierText]) -> Saved | None:
    """The longest memory from which a state-space text can go on: its stored memory, or that of another open text of
    its tenant, where one text is a prefix of the other. None if there is neither."""
    best, session.saved = session.saved, None
    most = len(session.shareable)
    if best is not None and best.length > most:
        best = None
    for other in others:
        place, consumed = other.memory.place, other.memory.consumed
        length = min(len(consumed), most)
        if place is None or other.opening is not None or other.memory.salt != session.memory.salt:
            continue
        if length <= (best.length if best is not None else 0) or not place.can_cut(length):
            continue
        if consumed[:length] == session.text.ids[:length]:
            best = Saved(length, length - place.base_of(length) * place.extent.block, {}, place)
    return best


def processors_of(parameters: RequestParameters, end_ids: frozenset[int]) -> Processors:
    """Processors of logits before the temperature, from a request's parameters. end_ids: the target's end-of-text
    tokens"""
    sampling, limits = parameters.sampling, parameters.limits
    return Processors(
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        banned=sampling.banned_ids,
        allowed=sampling.allowed_ids,
        bad_words=sampling.bad_words,
        ending=tuple(sorted(limits.ending(end_ids))) if limits.min_length else (),
        min_length=limits.min_length,
    )


@dataclass(slots=True)
class VerifierCounters:
    """Counters since the engine was loaded; they never decrease."""

    steps: int = 0
    step_us: int = 0  # time of steps, each from the choice of its rows to its answers
    forward_us: int = 0  # time of the model's forwards, part of `step_us`
    rows: int = 0  # rows of steps, without padding
    guesses: int = 0  # rows of steps that are guesses
    trimmed: int = 0  # guesses that were sent and left out of the step
    waited: int = 0  # texts that had to wait to be admitted
    refused: int = 0  # texts refused because the queue was full
    ahead: int = 0  # rounds that were begun before their calls
    unclaimed: int = 0  # rounds begun ahead whose verdict no call asked for: the next call had another tree
    preempted: int = 0  # preemptions: a text's pages went to an older one, and it is computed again
    structures: int = 0  # texts with a structure that ended
    structure_items: int = 0  # grammar items that the masks of ended texts took
    structure_budget: int = 0  # grammar items that the masks of ended texts were allowed
    structures_stuck: int = 0  # rounds after which a structure allowed no token: their answers end with an error
    ordered: int = 0  # trees that drafters were asked for
    ordered_missed: int = 0  # ordered trees that did not come, came late or were malformed
    ordered_dropped: int = 0  # ordered trees that no round had: the text ended, or its next call had another tree
    prepared: int = 0  # trees that drafters sent before they were asked for them
    prepared_used: int = 0  # prepared trees with which a round began
    prepared_refused: int = 0  # prepared trees dropped on arrival: no live order, too many, too large
    masks_late: int = 0  # rounds left out of a step because their masks were not ready


@dataclass(slots=True, eq=False)
class StepShare:
    """One text's rows of a step."""

    session: VerifierText
    prefill: int  # number of committed rows, which follow the consumed tokens
    ask: PendingCall | None  # the call that the step answers; None: only committed rows
    tree: DraftTree | None = None  # the part of the call's tree that is in the step

    @property
    def echoed(self) -> range:
        """Positions of the committed rows whose next token's log-probability the client asked for."""
        first = self.session.parameters.echo_from if self.session.opening is not None else None
        start = len(self.session.memory.consumed)
        stop = start + self.prefill
        return range(stop if first is None else min(max(first - 1, start), stop), stop)


# Shares of tenants
def texts_by_tenant(sessions: Sequence[VerifierText]) -> Counter[str]:
    return Counter(session.parameters.tenant for session in sessions)


def next_in_turn(waiting: Sequence[VerifierText], admitted: Mapping[str, int]) -> VerifierText:
    """The text that is admitted next: the oldest of the tenant with the fewest admitted texts.

    waiting: at least one text, oldest first   admitted: number of admitted texts by tenant
    """
    return min(waiting, key=lambda session: admitted[session.parameters.tenant])  # min takes the first of equal ones


def displaced_by(tenant: str, sessions: Sequence[VerifierText]) -> VerifierText | None:
    """The text that leaves if all places are taken and `tenant` opens one more text: the youngest waiting text of the
    tenant with the most texts. None if that would not make the shares more equal."""
    texts = texts_by_tenant(sessions)
    larger = [each for each in sessions if not each.admitted and texts[each.parameters.tenant] > texts[tenant] + 1]
    return max(larger, key=lambda each: (texts[each.parameters.tenant], each.number), default=None)
