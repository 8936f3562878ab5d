"""What the commands print: an answer with its rounds marked, and its statistics."""

from __future__ import annotations

import json
import statistics
import sys
import unicodedata
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Protocol, TextIO

from dendro.answer import (
    Complete,
    Completion,
    DrafterStats,
    EchoedPrompt,
    Event,
    OpeningStats,
    Round,
    SpeculationStats,
    collect_stream,
)
from dendro.client import Asking
from dendro.logprobs import TokenLogprobs
from dendro.options import Options
from rich.console import Console
from rich.text import Text as RichText

from cluster.tables import folding_table

ROUND_STYLES = ("bold cyan", "bold yellow")
MARK = "|"
"""Printed between rounds where the console has no colours."""


BIDI_CONTROLS = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
"""They change the order in which a terminal shows the characters around them."""

Write = Callable[[str, str], None]
"""Writes a text in a style."""


def visible(text: str) -> str:
    """`text` for a terminal: control characters but tabs and line breaks are escaped, as they would reach the terminal
    as commands of whoever wrote the text.

    >>> visible("a" + chr(27) + "[2Jb" + chr(13))
    'a\\\\x1b[2Jb\\\\r'
    """
    controls = {each for each in set(text) if unicodedata.category(each) == "Cc" or each in BIDI_CONTROLS}
    return text.translate({ord(each): ascii(each)[1:-1] for each in controls - {"\t", "\n"}})


def on_console(console: Console) -> Write:
    """Writes for a terminal."""

    def write(text: str, style: str) -> None:
        console.print(RichText(visible(text), style), end="", soft_wrap=True)
        console.file.flush()

    return write


def as_bytes(stream: TextIO) -> Write:
    """Writes the text's own bytes, in UTF-8 and without styles."""

    def write(text: str, style: str) -> None:
        stream.flush()
        stream.buffer.write(text.encode())
        stream.buffer.flush()

    return write


def on_output() -> Write:
    """Writes an answer to standard output: for a terminal, or else its bytes."""
    return on_console(Console(highlight=False)) if sys.stdout.isatty() else as_bytes(sys.stdout)


class RoundsPrinter:
    """Prints rounds as they come, in alternating styles and with a mark between them."""

    def __init__(self, write: Write, styles: Sequence[str] = ROUND_STYLES, mark: str = "") -> None:
        self._write = write
        self._styles = styles
        self._mark = mark
        self._count = 0

    def show(self, event: Event) -> None:
        """Print a round, or a part of an echoed prompt; other events have no text."""
        if isinstance(event, Round):
            text = self._mark + event.text if self._count else event.text
            self._write(text, self._styles[self._count % len(self._styles)])
            self._count += 1
        elif isinstance(event, EchoedPrompt):
            self._write(event.text, "dim")

    async def show_all(self, events: AsyncGenerator[Event, None]) -> Completion:
        """Print a stream's rounds as they come; end the stream where that fails. Returns the whole answer."""
        done = await collect_stream(events, self.show)
        self._write("\n", "")
        return done


def as_json(done: Completion) -> str:
    """An answer as one JSON object."""
    complete = done.complete
    fields = {
        "text": done.text,
        "token_ids": done.token_ids,
        "request_id": done.started.request_id,
        "sample": done.started.sample,
        "model": done.started.model,
        "mode": done.started.mode,
        "lossy": done.started.lossy,
        "seed": done.started.seed,
        "session": complete.session,
        "finish": complete.finish.value,
        "stop_string": complete.stop_string,
        "prompt_tokens": complete.prompt_tokens,
        "completion_tokens": complete.completion_tokens,
        "logprobs": [logprobs_as_json(each) for each in done.logprobs],
        "prompt": [
            {
                "offset": part.offset,
                "token_ids": part.token_ids,
                "text": part.text,
                "logprobs": [logprobs_as_json(each) if each is not None else None for each in part.logprobs],
            }
            for part in done.prompt
        ],
        "rounds": [{"offset": part.offset, "token_ids": part.token_ids, "shape": part.shape} for part in done.rounds],
        "speculation": {**asdict(complete.speculation), "tokens_per_s": round(complete.speculation.tokens_per_s, 2)},
        "drafter": asdict(complete.drafter) if complete.drafter else None,
        "drafters": [asdict(each) for each in complete.drafters],
        "target": asdict(complete.target) if complete.target else None,
    }
    return json.dumps(fields)


def sample_text(done: Completion) -> str:
    """One of several answers under a line with its number, and its log-probabilities if it has any."""
    heading = f"--- sample {done.started.sample}: {answer_line(done.complete)}; seed {done.started.seed}"
    return "\n".join([heading, done.text, *logprob_lines(done)])


def logprobs_as_json(logprobs: TokenLogprobs) -> dict[str, object]:
    top = [{"token_id": token, "logprob": value} for token, value in logprobs.top]
    return {"logprob": logprobs.logprob, "top": top}


def logprob_lines(done: Completion) -> Iterator[str]:
    """A line for each token of an answer, and before them of the prompt that is echoed, as text: its id and
    log-probability, and those of the likeliest tokens at its place. None without log-probabilities."""
    parts: Sequence[EchoedPrompt | Round] = (*done.prompt, *done.rounds)
    for token, its in (pair for part in parts for pair in zip(part.token_ids, part.logprobs, strict=False)):
        if its is None:
            yield f"token {token} has no text before it"
            continue
        top = ", ".join(f"{other} {value:.4f}" for other, value in its.top)
        yield f"token {token} {its.logprob:.4f}" + (f"; likeliest: {top}" if top else "")


def shapes_line(rounds: dict[str, int]) -> str:
    """`(3,2,1) x 9, off x 2`, the most frequent first."""
    ordered = sorted(rounds.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{shape} x {count}" for shape, count in ordered)


def opening_line(opening: OpeningStats | None) -> str:
    if opening is None:
        return "not opened"
    return (
        f"{opening.restored_tokens} tokens restored, {opening.processed_tokens} processed again "
        f"({opening.open_us / 1000:.1f} ms)"
    )


def drafter_line(drafter: DrafterStats) -> str:
    """A drafter's part in an answer, as text."""
    late = f", {drafter.late_drafts} of its trees late or lost" if drafter.late_drafts else ""
    return (
        f"drafter {drafter.name}: trees in {drafter.rounds} rounds{late}; {drafter.accepted_tokens} of "
        f"{drafter.drafted_tokens} guesses accepted; its memory of the text: {opening_line(drafter.opening)}"
    )


def account_lines(complete: Complete) -> tuple[str, ...]:
    """An answer's statistics, as text: its guesses, shapes, tokens by round, times, and each drafter's part."""
    stats = complete.speculation
    if not stats.rounds:
        return ("no rounds: the answer was complete already",)
    trimmed = f" ({stats.trimmed_tokens} of them not verified)" if stats.trimmed_tokens else ""
    late = f"; {stats.late_drafts} drafts late or lost" if stats.late_drafts else ""
    lengths = ", ".join(f"{tokens} in {rounds}" for tokens, rounds in sorted(stats.rounds_by_tokens.items()))
    parts_us = {
        "drafts": stats.draft_us,
        "verifier": stats.verify_us,
        "its queue": stats.queue_us,
        "between them": stats.hop_us,
        "opening": stats.opening_us,
    }
    parts = ", ".join(f"{name} {us / 1000:.1f}" for name, us in parts_us.items())
    return (
        f"guesses: {guesses_line(stats)}, {stats.discarded_tokens} discarded{trimmed}{late}",
        f"shapes, by {stats.policy}: {shapes_line(stats.rounds_by_shape)}",
        f"tokens of a round: {lengths} rounds",
        f"time of the rounds: {stats.rounds_us / 1000:.1f} ms = {parts}",
        *map(drafter_line, complete.drafters),
    )


def answer_line(complete: Complete) -> str:
    """Tokens, rounds and speed of an answer, in one line."""
    stats = complete.speculation
    return (
        f"{complete.completion_tokens} tokens in {stats.rounds} rounds, {stats.emitted_per_round:.2f} a round, "
        f"{stats.tokens_per_s:.0f} tokens/s"
    )


def guesses_line(stats: SpeculationStats) -> str:
    return f"{stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted"


async def speeds(client: Asking, prompt: str, options: Options, repetitions: int) -> dict[str, float]:
    """Median tokens per second of the same answer with speculation and without, measured alternately."""
    seen: dict[str, list[float]] = {"auto": [], "off": []}
    for _ in range(repetitions):
        for speculation, found in seen.items():
            changed = options.copy()
            changed["speculation"] = speculation
            done = await client.generate_text(prompt, **changed)
            found.append(done.complete.speculation.tokens_per_s)
    return {speculation: statistics.median(found) for speculation, found in seen.items()}


class Turns(Protocol):
    """Two turns of a session."""

    @property
    def first(self) -> str: ...

    def second(self, answer: Completion) -> str:
        """What is sent after the answer to the first."""


async def tour(console: Console, client: Asking, turns: Turns, new_tokens: int, repetitions: int = 3) -> None:
    """What `dendro demo` shows: two turns of one session, then speed with speculation and without."""
    coloured = console.color_system is not None
    separator = "its rounds in two alternating colours" if coloured else f"a {MARK} between its rounds"
    console.print(f"[bold]Turn one.[/] The prompt, then the answer, {separator}:\n")
    write = on_console(console)
    styles, mark = (ROUND_STYLES, "") if coloured else (("",), MARK)
    write(turns.first, "dim")
    one = await RoundsPrinter(write, styles, mark).show_all(
        client.generate(turns.first, keep_session=True, max_new_tokens=new_tokens)
    )
    second = turns.second(one)
    console.print(f"\n[bold]Turn two[/] continues the session; only this is sent: {second!r}\n")
    write(second, "dim")
    session = one.complete.session
    two = await RoundsPrinter(write, styles, mark).show_all(
        client.generate(second, session=session, keep_session=True, max_new_tokens=new_tokens)
    )
    console.print("\nMeasuring the first answer with speculation and without, in turn ...")
    measured = await speeds(client, turns.first, {"max_new_tokens": new_tokens, "ignore_end": True}, repetitions)

    both = (one.complete, two.complete)
    rows: list[tuple[str, ...]] = [
        ("text before the answer", *(f"{turn.prompt_tokens} tokens" for turn in both)),
        ("answer", *(f"{turn.completion_tokens} tokens ({turn.finish.value})" for turn in both)),
        ("rounds", *(str(turn.speculation.rounds) for turn in both)),
        ("guesses", *(guesses_line(turn.speculation) for turn in both)),
        ("emitted per round", *(f"{turn.speculation.emitted_per_round:.2f} tokens" for turn in both)),
        ("shapes the policy picked", *(shapes_line(turn.speculation.rounds_by_shape) for turn in both)),
    ]
    for name in dict.fromkeys(each.name for turn in both for each in turn.drafters):
        found = (next((each.opening for each in turn.drafters if each.name == name), None) for turn in both)
        rows.append((f"memory of the text: drafter {name}", *map(opening_line, found)))
    rows.append(("memory of the text: target", *(opening_line(turn.target) for turn in both)))
    console.print(folding_table("What happened", ("", "turn one", "turn two"), rows))
    ratio = measured["auto"] / measured["off"] if measured["off"] else float("nan")
    console.print(
        f"Speed: {measured['auto']:.0f} tokens/s with speculation, {measured['off']:.0f} with it off "
        f"({ratio:.2f} x; medians of {repetitions}, in turn). The tokens are the same either way."
    )
