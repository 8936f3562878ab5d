"""Converts values to messages and back: `..._message` makes a message from a value, `..._from` a value from a message.

Messages of peers are checked here, once. A malformed call or hello raises BadRequest, a malformed answer BadAnswer. A
statistic out of range is set to the nearest end of its range; any other field out of range is refused. The length of a
repeated field is checked before it is copied to a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np

from dendro.calls import (
    OPENING_BYTES,
    CloseCall,
    Closed,
    DraftCall,
    DrafterCall,
    Hello,
    OpenCall,
    Opened,
    PreparedTree,
    RequestParameters,
    TextUpdate,
    VerifierCall,
    VerifyCall,
)
from dendro.errors import BadAnswer, BadRequest, DendroError, error_for, one_line
from dendro.internal.v1 import calls_pb2, drafter_pb2, tree_pb2, verifier_pb2
from dendro.logprobs import echoed_from, echoed_message, fill_logprobs, logprobs_from
from dendro.options import SAMPLING_NUMBERS
from dendro.order import LONGEST_WAIT_US, Missed, Order
from dendro.shapes import MAX_ROWS, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape, UntilShape
from dendro.structure import structure_message, structure_of_call
from dendro.tasks import PART
from dendro.text import EDITS, Finish, Limits, Sampling, Verdict, stop_ids_from
from dendro.tree import LAW_TOKENS, LONGEST_TRACE, ChildLaw, DraftTree

_FINISH_MESSAGE = {
    None: verifier_pb2.FINISH_UNSPECIFIED,
    Finish.END_OF_TEXT: verifier_pb2.FINISH_END_OF_TEXT,
    Finish.LENGTH: verifier_pb2.FINISH_LENGTH,
    Finish.STOP_TOKEN: verifier_pb2.FINISH_STOP_TOKEN,
    Finish.STRUCTURE: verifier_pb2.FINISH_STRUCTURE,
}
_FINISH_FROM = {number: finish for finish, number in _FINISH_MESSAGE.items()}
_MISSED = {str(missed): missed for missed in Missed}
_CODE = {code.value[0]: code for code in grpc.StatusCode}
_INTERNAL: int = grpc.StatusCode.INTERNAL.value[0]
_MAX_COUNT = (1 << 31) - 1  # counts must fit an int32
MAX_US = 3_600_000_000
"""Longer times in a peer's statistics are lowered to this: an hour, in microseconds."""
MAX_STEP_ROWS = 1 << 14
MAX_TEXTS = 1 << 14
MAX_TRACEPARENT = 64
"""Characters of the longest span's name that is read; those of W3C Trace Context have 55."""
MAX_TRACE = 2 * LONGEST_TRACE
"""Most ranks of a trace that are read, the last ones. Policies ignore a trace of more than LONGEST_TRACE."""
MAX_NAME = 256
"""The longest name or fingerprint, in characters."""
MAX_END_IDS = 1024
MAX_STEP_SIZES = 128

Answer = Opened | DraftTree | PreparedTree | Verdict | Closed
CallMessage = TypeVar("CallMessage", drafter_pb2.DrafterCall, verifier_pb2.VerifierCall)


class ListMessages:
    """The message of the token lists that were converted last. The answers of a request share their lists and open
    their texts one after another; converting 70,000 ids takes milliseconds, and copying them a tenth."""

    def __init__(self) -> None:
        self._last = (Sampling(), calls_pb2.Sampling())

    def message_of(self, sampling: Sampling) -> calls_pb2.Sampling:
        """A message with these lists alone; do not modify. From any thread."""
        last, message = self._last
        if all(getattr(last, name) is getattr(sampling, name) for name in EDITS):
            return message
        message = calls_pb2.Sampling(
            logit_bias=dict(sampling.logit_bias),
            banned_ids=sampling.banned_ids,
            allowed_ids=sampling.allowed_ids,
            bad_words=[calls_pb2.TokenIds(ids=word) for word in sampling.bad_words],
        )
        self._last = sampling, message
        return message


LISTS = ListMessages()
"""The messages of this process."""


def tree_message(tree: DraftTree) -> tree_pb2.DraftTree:
    return tree_pb2.DraftTree(
        tokens=tree.tokens.tolist(),
        parents=tree.parents.tolist(),
        values=tree.values.tolist(),
        proposer=tree.proposer,
        trace=tree.trace.tolist(),
        draft_us=tree.draft_us,
        texts=tree.texts,
        laws=[tree_pb2.ChildLaw(row=law.row, ids=law.ids, probabilities=law.probabilities) for law in tree.laws],
    )


def tree_from(message: tree_pb2.DraftTree) -> DraftTree:
    """The tree of a message. Raises BadRequest where its constructor raises ValueError."""
    for name in ("tokens", "parents", "values", "laws"):
        if (count := len(getattr(message, name))) > MAX_ROWS:
            raise BadRequest(f"tree.{name}", f"{count} rows; a tree has 1 to {MAX_ROWS}")
    try:
        return DraftTree(
            # Slices are lists, of which NumPy makes arrays in a tenth of the time that a message's field takes.
            tokens=np.array(message.tokens[:], np.int64),
            parents=np.array(message.parents[:], np.int64),
            values=np.array(message.values[:], np.float32),
            proposer=message.proposer[:MAX_NAME],
            trace=np.array([min(rank, _MAX_COUNT) for rank in message.trace[-MAX_TRACE:]], np.int32),
            draft_us=min(message.draft_us, MAX_US),
            texts=_within(message.texts, 1, MAX_TEXTS),
            laws=tuple(_law_from(law) for law in message.laws),
        )
    except ValueError as error:
        raise _bad("tree", error) from None


def _law_from(message: tree_pb2.ChildLaw) -> ChildLaw:
    # One token more than a law may have is kept, so that a longer law is refused.
    ids, probabilities = message.ids[: LAW_TOKENS + 1], message.probabilities[: LAW_TOKENS + 1]
    return ChildLaw(message.row, np.array(ids, np.int64), np.array(probabilities, np.float64))


def shape_message(shape: TreeShape) -> tree_pb2.TreeShape:
    match shape:
        case LevelShape(widths):
            return tree_pb2.TreeShape(widths=widths)
        case NodeShape(children):
            return tree_pb2.TreeShape(children=children)
        case BeamShape(steps, beams):
            return tree_pb2.TreeShape(beam=tree_pb2.BeamShape(steps=steps, beams=beams))
        case DynamicShape():
            return tree_pb2.TreeShape(dynamic=_dynamic_message(shape))
        case UntilShape(tree, h, least):
            return tree_pb2.TreeShape(until=tree_pb2.UntilShape(h=h, tree=_dynamic_message(tree), least=least))
    raise TypeError(f"{shape!r} has no message")


def shape_from(message: tree_pb2.TreeShape) -> TreeShape:
    """The shape of a message. Raises BadRequest where its constructor raises ValueError."""
    beam, dynamic, until = (message.HasField(name) for name in ("beam", "dynamic", "until"))
    if bool(message.widths) + bool(message.children) + beam + dynamic + until > 1:
        raise BadRequest("shape", "has several kinds")
    if max(len(message.widths), len(message.children)) >= MAX_ROWS:  # checked before they are copied to tuples
        raise BadRequest("shape", f"a tree holds at most {MAX_ROWS - 1} guesses")
    try:
        if beam:
            return BeamShape(message.beam.steps, message.beam.beams)
        if dynamic:
            return _dynamic_from(message.dynamic)
        if until:
            return UntilShape(_dynamic_from(message.until.tree), message.until.h, message.until.least)
        return NodeShape(tuple(message.children)) if message.children else LevelShape(tuple(message.widths))
    except ValueError as error:
        raise _bad("shape", error) from None


def _dynamic_message(shape: DynamicShape) -> tree_pb2.DynamicShape:
    return tree_pb2.DynamicShape(k=shape.k, steps=shape.steps, total=shape.total)


def _dynamic_from(message: tree_pb2.DynamicShape) -> DynamicShape:
    return DynamicShape(message.k, message.steps, message.total)


def _fill_update(message: calls_pb2.TextUpdate, update: TextUpdate) -> None:
    message.opening, message.base = update.opening, update.base
    message.digest, message.start = update.digest, update.start
    for start in range(0, len(update.tokens), PART):
        message.tokens.extend(update.tokens[start : start + PART])


def update_from(message: calls_pb2.TextUpdate) -> TextUpdate:
    if len(message.opening) != OPENING_BYTES:
        raise BadRequest("update.opening", f"has {len(message.opening)} bytes; must be {OPENING_BYTES}")
    if message.start + len(message.tokens) != message.base or not 1 <= message.base <= _MAX_COUNT:
        raise BadRequest(
            "update.base",
            f"is {message.base}; must be start {message.start} and the {len(message.tokens)} tokens, 1 to {_MAX_COUNT}",
        )
    return TextUpdate(message.opening, message.base, message.digest, message.start, tuple(message.tokens))


def _open_message(call: OpenCall) -> calls_pb2.OpenCall:
    parameters, sampling = call.parameters, call.parameters.sampling
    message = calls_pb2.OpenCall(
        lease=call.lease,
        ahead=call.ahead,
        sampling=calls_pb2.Sampling(
            **{name: getattr(sampling, name) for name in SAMPLING_NUMBERS},
            mode=sampling.mode,
            lenience=sampling.lenience if sampling.mode.lossy else None,
        ),
        max_length=parameters.limits.max_length,
        ignore_end=parameters.limits.ignore_end,
        tenant=parameters.tenant,
        marks=parameters.marks,
        vocabulary=parameters.vocabulary,
        tokenizer=parameters.tokenizer,
        prompt_tokens=parameters.prompt_length,
        min_length=parameters.limits.min_length,
        stop_ids=parameters.limits.stop_ids,
        logprobs=parameters.logprobs,
        echo_from=parameters.echo_from,
        structure=structure_message(parameters.structure),
        traceparent=call.traceparent,
    )
    message.sampling.MergeFrom(LISTS.message_of(sampling))
    return message


def _open_from(update: TextUpdate, message: calls_pb2.OpenCall) -> OpenCall:
    raw = message.sampling
    if update.start:
        raise BadRequest("update.start", f"is {update.start}; must be 0, as an opening has the whole text")
    if not update.base <= message.max_length <= _MAX_COUNT:
        raise BadRequest("max_length", f"is {message.max_length} for a text of {update.base} tokens")
    if len(message.marks) > update.base or any(not 0 < mark <= update.base for mark in message.marks):
        raise BadRequest("marks", f"must lie in 1 to {update.base}")
    if message.vocabulary > _MAX_COUNT:
        raise BadRequest("vocabulary", f"is {message.vocabulary}; at most {_MAX_COUNT}")
    if message.prompt_tokens > update.base:
        raise BadRequest("prompt_tokens", f"is {message.prompt_tokens} for a text of {update.base} tokens")
    sampling = Sampling.read(raw)
    limits = Limits(message.max_length, message.ignore_end, message.min_length, stop_ids_from(message))
    parameters = RequestParameters(
        sampling=sampling,
        limits=limits,
        tenant=message.tenant,
        marks=tuple(message.marks),
        vocabulary=message.vocabulary,
        tokenizer=message.tokenizer,
        prompt_length=message.prompt_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        echo_from=message.echo_from if message.HasField("echo_from") else None,
        structure=structure_of_call(message),
    )
    traceparent = message.traceparent if len(message.traceparent) <= MAX_TRACEPARENT else ""
    return OpenCall(update, parameters, message.lease, message.ahead, traceparent)


def drafter_call_message(number: int, call: DrafterCall) -> drafter_pb2.DrafterCall:
    message = drafter_pb2.DrafterCall(call=number)
    _fill_update(message.update, call.update)
    match call:
        case OpenCall():
            message.open.CopyFrom(_open_message(call))
        case DraftCall():
            message.draft.shape.CopyFrom(shape_message(call.shape))
            message.draft.prepared_from = call.prepared_from
            message.draft.SetInParent()
        case CloseCall():
            message.close.SetInParent()
    return message


def drafter_call_from(message: drafter_pb2.DrafterCall) -> DrafterCall:
    update = update_from(message.update)
    match message.WhichOneof("request"):
        case "open":
            return _open_from(update, message.open)
        case "draft":
            return DraftCall(update, shape_from(message.draft.shape), message.draft.prepared_from)
        case "close":
            return CloseCall(update)
    raise BadRequest("call", "is missing")


def verifier_call_message(number: int, call: VerifierCall) -> verifier_pb2.VerifierCall:
    message = verifier_pb2.VerifierCall(call=number)
    _fill_update(message.update, call.update)
    match call:
        case OpenCall():
            message.open.CopyFrom(_open_message(call))
        case VerifyCall():
            message.verify.tree.CopyFrom(tree_message(call.tree))
            message.verify.ahead, message.verify.ordered = call.ahead, call.ordered
            if call.order is not None:
                message.verify.order.CopyFrom(_order_message(call.order))
        case CloseCall():
            message.close.SetInParent()
    return message


def verifier_call_from(message: verifier_pb2.VerifierCall) -> VerifierCall:
    update = update_from(message.update)
    match message.WhichOneof("request"):
        case "open":
            return _open_from(update, message.open)
        case "verify":
            return _verify_from(update, message.verify)
        case "close":
            return CloseCall(update)
    raise BadRequest("call", "is missing")


def _verify_from(update: TextUpdate, message: verifier_pb2.VerifyCall) -> VerifyCall:
    tree = tree_from(message.tree)
    if message.ordered and (tree.guesses or message.ahead):
        raise BadRequest("verify.ordered", "is set in a call with guesses of its own, or that announces a root alone")
    order = _order_from(message.order) if message.HasField("order") else None
    return VerifyCall(update, tree, message.ahead, order, message.ordered)


def _order_message(order: Order) -> verifier_pb2.Order:
    return verifier_pb2.Order(
        drafter=order.drafter,
        opening=order.opening,
        shape=shape_message(order.shape),
        start=order.start,
        wait_us=order.wait_us,
    )


def _order_from(message: verifier_pb2.Order) -> Order:
    if len(message.opening) != OPENING_BYTES:
        raise BadRequest("order.opening", f"has {len(message.opening)} bytes; must be {OPENING_BYTES}")
    if not 0 < len(message.drafter) <= MAX_NAME:
        raise BadRequest("order.drafter", f"has {len(message.drafter)} characters; must have 1 to {MAX_NAME}")
    if message.start > _MAX_COUNT or message.wait_us > LONGEST_WAIT_US:
        raise BadRequest("order", f"start and wait_us are at most {_MAX_COUNT} and {LONGEST_WAIT_US}")
    return Order(message.drafter, message.opening, shape_from(message.shape), message.start, message.wait_us)


def verdict_message(verdict: Verdict) -> verifier_pb2.Verdict:
    message = verifier_pb2.Verdict(
        tokens=verdict.tokens,
        path=verdict.path,
        ranks=verdict.ranks,
        finish=_FINISH_MESSAGE[verdict.finish],
        length=verdict.length,
        verify_us=verdict.verify_us,
        queue_us=verdict.queue_us,
        texts=verdict.texts,
        step_rows=verdict.step_rows,
        trimmed=verdict.trimmed,
        cold=verdict.cold,
        ahead_us=verdict.ahead_us,
        tree=None if verdict.tree is None else tree_message(verdict.tree),
        missed=verdict.missed,
        drafted_us=verdict.drafted_us,
    )
    for each in verdict.logprobs:
        fill_logprobs(message.logprobs.add(), each)
    return message


def verdict_from(message: verifier_pb2.Verdict) -> Verdict:
    """The verdict of a message. Raises BadRequest if it is malformed."""
    if message.finish not in _FINISH_FROM:
        raise BadRequest("verdict.finish", f"{message.finish} is unknown")
    for name in ("tokens", "path", "ranks", "logprobs"):
        if (count := len(getattr(message, name))) > MAX_ROWS:
            raise BadRequest(f"verdict.{name}", f"has {count} entries; a tree has at most {MAX_ROWS} rows")
    try:
        return Verdict(
            tokens=tuple(message.tokens),
            path=tuple(message.path),
            ranks=tuple(message.ranks),
            finish=_FINISH_FROM[message.finish],
            length=message.length,
            verify_us=min(message.verify_us, MAX_US),
            queue_us=min(message.queue_us, MAX_US),
            texts=_within(message.texts, 1, MAX_TEXTS),
            step_rows=_within(message.step_rows, 1, MAX_STEP_ROWS),
            trimmed=message.trimmed,
            cold=message.cold,
            ahead_us=min(message.ahead_us, MAX_US),
            tree=tree_from(message.tree) if message.HasField("tree") else None,
            missed=_MISSED.get(message.missed, Missed.FAILED) if message.missed else "",
            drafted_us=min(message.drafted_us, MAX_US),
            logprobs=logprobs_from(message.logprobs),
        )
    except ValueError as error:
        raise _bad("verdict", error) from None


def hello_message(hello: Hello) -> calls_pb2.Hello:
    return calls_pb2.Hello(
        protocol=hello.protocol,
        model=hello.model,
        fingerprint=hello.fingerprint,
        tokenizer=hello.tokenizer,
        vocabulary=hello.vocabulary,
        max_length=hello.max_length,
        max_rows=hello.max_rows,
        max_depth=hello.max_depth,
        dtype=hello.dtype,
        exactness=hello.exactness,
        pid=hello.pid,
        end_ids=hello.end_ids,
        attends=hello.attends,
        facts=hello.facts,
        step_sizes=hello.step_sizes,
        orders=hello.orders,
        timed_steps=[calls_pb2.TimedStep(rows=rows, us=us) for rows, us in hello.timed_steps],
    )


def hello_from(message: calls_pb2.Hello) -> Hello:
    """The hello of a message. Limits above ours are lowered. Raises BadRequest for limits with no room for a text."""
    for name in ("vocabulary", "max_length", "max_rows"):
        if getattr(message, name) < 1:
            raise BadRequest(f"hello.{name}", "is 0; must be at least 1")
    if message.vocabulary > _MAX_COUNT:
        raise BadRequest("hello.vocabulary", f"is {message.vocabulary}; at most {_MAX_COUNT}")
    if len(message.end_ids) > MAX_END_IDS:
        raise BadRequest("hello.end_ids", f"has {len(message.end_ids)} entries; at most {MAX_END_IDS}")
    sizes = _rows_of_steps("hello.step_sizes", message.step_sizes)
    timed = _rows_of_steps("hello.timed_steps.rows", [each.rows for each in message.timed_steps])
    times = [each.us for each in message.timed_steps]
    if times != sorted(times) or (times and not 1 <= times[0] <= times[-1] <= MAX_US):
        raise BadRequest("hello.timed_steps.us", f"must not fall, and be at least 1 and at most {MAX_US}")
    return Hello(
        protocol=message.protocol,
        model=one_line(message.model, MAX_NAME),
        fingerprint=one_line(message.fingerprint, MAX_NAME),
        tokenizer=one_line(message.tokenizer, MAX_NAME),
        vocabulary=message.vocabulary,
        max_length=min(message.max_length, _MAX_COUNT),
        max_rows=min(message.max_rows, MAX_ROWS),
        max_depth=min(message.max_depth, MAX_ROWS - 1),
        dtype=one_line(message.dtype, MAX_NAME),
        exactness=one_line(message.exactness, MAX_NAME),
        pid=message.pid,
        end_ids=tuple(message.end_ids),
        attends=message.attends,
        facts=one_line(message.facts, MAX_NAME),
        step_sizes=sizes,
        orders=message.orders,
        timed_steps=tuple(zip(timed, times, strict=True)),
    )


def _rows_of_steps(name: str, rows: Sequence[int]) -> tuple[int, ...]:
    """Ascending numbers of rows. Raises BadRequest, naming the field, if they are not, or too many."""
    if len(rows) > MAX_STEP_SIZES:
        raise BadRequest(name, f"has {len(rows)} entries; at most {MAX_STEP_SIZES}")
    if list(rows) != sorted(set(rows)) or (rows and not 1 <= rows[0] <= rows[-1] <= _MAX_COUNT):
        raise BadRequest(name, f"must ascend, and be at least 1 and at most {_MAX_COUNT}")
    return tuple(rows)


def drafter_answer_message(
    number: int, answer: Opened | DraftTree | PreparedTree | Closed | Exception
) -> drafter_pb2.DrafterAnswer:
    message = drafter_pb2.DrafterAnswer(call=number)
    match answer:
        case DraftTree():
            message.tree.CopyFrom(tree_message(answer))
        case PreparedTree(opening, base, digest, tree):
            prepared = drafter_pb2.PreparedTree(opening=opening, base=base, digest=digest, tree=tree_message(tree))
            message.prepared.CopyFrom(prepared)
        case _:
            _fill_answer(message, answer)
    return message


def verifier_answer_message(number: int, answer: Opened | Verdict | Closed | Exception) -> verifier_pb2.VerifierAnswer:
    message = verifier_pb2.VerifierAnswer(call=number)
    if isinstance(answer, Verdict):
        message.verdict.CopyFrom(verdict_message(answer))
    else:
        _fill_answer(message, answer)
    return message


def _fill_answer(
    message: drafter_pb2.DrafterAnswer | verifier_pb2.VerifierAnswer, answer: Opened | Closed | Exception
) -> None:
    match answer:
        case Opened():
            message.opened.CopyFrom(_opened_message(answer))
        case Closed():
            message.closed.saved = answer.saved
            message.closed.SetInParent()
        case Exception():
            message.error.CopyFrom(_error_message(answer))


def answer_from(message: drafter_pb2.DrafterAnswer | verifier_pb2.VerifierAnswer) -> Answer:
    """The answer of a drafter or verifier. Raises the peer's error, and BadAnswer for a malformed answer."""
    kind = message.WhichOneof("answer")
    if kind is None:
        raise BadAnswer("answer: is empty")
    if kind == "error":
        raise _error_from(message.error)
    try:
        return _ANSWER_FROM[kind](getattr(message, kind))
    except BadRequest as error:
        raise BadAnswer(str(error)) from None


def _opened_message(opened: Opened) -> calls_pb2.Opened:
    return calls_pb2.Opened(
        restored=opened.restored,
        processed=opened.processed,
        open_us=opened.open_us,
        echoed=echoed_message(opened.logprobs),
    )


def _opened_from(message: calls_pb2.Opened) -> Opened:
    counts = (min(message.restored, _MAX_COUNT), min(message.processed, _MAX_COUNT))
    try:
        return Opened(*counts, open_us=min(message.open_us, MAX_US), logprobs=echoed_from(message.echoed))
    except ValueError as error:
        raise _bad("opened", error) from None


def _closed_from(message: calls_pb2.Closed) -> Closed:
    return Closed(min(message.saved, _MAX_COUNT))


def _prepared_from(message: drafter_pb2.PreparedTree) -> PreparedTree:
    return PreparedTree(message.opening[:OPENING_BYTES], message.base, message.digest, tree_from(message.tree))


_ANSWER_FROM: dict[str, Callable[[Any], Answer]] = {
    "opened": _opened_from,
    "tree": tree_from,
    "prepared": _prepared_from,
    "verdict": verdict_from,
    "closed": _closed_from,
}


def _within(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))


def _error_message(error: Exception) -> calls_pb2.CallError:
    """The error as sent to the peer: the whole message of a DendroError, nothing of any other exception."""
    if isinstance(error, DendroError):
        return calls_pb2.CallError(code=error.code.value[0], message=one_line(str(error)))
    return calls_pb2.CallError(code=_INTERNAL, message="internal error; the replica's log has it")


def _error_from(message: calls_pb2.CallError) -> DendroError:
    return error_for(_CODE.get(message.code, grpc.StatusCode.INTERNAL), one_line(message.message))


def _bad(field: str, error: ValueError) -> BadRequest:
    """A ValueError as a BadRequest. The field is the message up to the first ": ", else `field`."""
    name, _, reason = str(error).partition(": ")
    return BadRequest(name, reason) if reason else BadRequest(field, name)


def batched(messages: Iterable[CallMessage], limit: int) -> list[list[CallMessage]]:
    """Messages in frames of at most `limit` bytes each, in order; a larger message gets its own frame."""
    frames: list[list[CallMessage]] = []
    room = 0
    for message in messages:
        size = message.ByteSize()
        if not frames or size > room:
            frames.append([])
            room = limit
        frames[-1].append(message)
        room -= size
    return frames
