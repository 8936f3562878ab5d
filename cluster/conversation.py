"""`dendro chat`: a conversation in the terminal. Rounds alternate in style, and their draft trees can be shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from dendro.answer import Completion, Round, RoundTree
from dendro.chat import Chat
from dendro.client import Asking
from dendro.daemon_threads import in_thread
from dendro.errors import BadRequest, DendroError
from dendro.options import Options
from rich.console import Console

from cluster.showing import MARK, ROUND_STYLES, RoundsPrinter, answer_line, on_console, visible

PROMPT = "> "
HELP = """/off      no speculation from now on; the tokens stay the same
/on       speculation again
/tree     the draft tree of the last answer's best round; /tree 3 that of its third
/session  the session's token, for `dendro chat --session` and for other clients
/help     these lines
/quit     the end, as Ctrl-D; Ctrl-C ends an answer"""


class TerminalChat:
    """A session with a client's target. A turn that ends early is not part of it."""

    def __init__(self, client: Asking, console: Console, options: Options, system: str = "", session: str = "") -> None:
        """options: those of every turn   system: message before the first turn
        session: token of the session to continue; empty: begin a new one"""
        self.session = session
        self.speculation = "auto"
        self.last: Completion | None = None
        self._client = client
        self._console = console
        self._options = options
        self._system = system
        coloured = console.color_system is not None
        self._styles = ROUND_STYLES if coloured else ("",)
        self._mark = MARK if console.is_terminal and not coloured else ""

    async def say(self, message: str) -> Completion:
        """Send a message, and print the answer as it comes."""
        messages = [{"role": "user", "content": message}]
        if self._system and not self.session:
            messages.insert(0, {"role": "system", "content": self._system})
        options = self._options.copy()
        options["session"], options["keep_session"] = self.session, True
        options["speculation"], options["trees"] = self.speculation, True
        printer = RoundsPrinter(on_console(self._console), self._styles, self._mark)
        self.last = await printer.show_all(self._client.generate(Chat(messages), **options))
        self.session = self.last.complete.session
        return self.last

    def command(self, line: str) -> str | None:
        """Text that a command prints; None: it ends the conversation."""
        name, _, given = line.partition(" ")
        match name:
            case "/quit":
                return None
            case "/help":
                return HELP
            case "/off" | "/on":
                self.speculation = "off" if name == "/off" else "auto"
                return f"speculation: {self.speculation}"
            case "/session":
                return self.session or "none yet: it begins with the first answer"
            case "/tree":
                return self._tree(given.strip())
        return f"there is no command {name}; /help lists them"

    def _tree(self, given: str) -> str:
        rounds = self.last.rounds if self.last is not None else ()
        trees = {number: each for number, each in enumerate(rounds, 1) if each.tree is not None}
        if not trees:
            return "there is no tree: no answer yet, or it was sent from its session's record"
        if not given:
            number = max(trees, key=lambda each: (len(accepted_of(trees[each])), -each))
        elif not (given.isdecimal() and len(given) < 10 and int(given) in trees):
            return f"/tree takes a round from {min(trees)} to {max(trees)}"
        else:
            number = int(given)
        return "\n".join([f"round {number} of {len(rounds)}", *round_lines(trees[number])])


def accepted_of(part: Round) -> Sequence[int]:
    return part.tree.accepted if part.tree is not None else ()


def quoted(text: str) -> str:
    """A token's text in quotes, on one line.

    >>> quoted(" the"), quoted(chr(10))
    ('" the"', '"\\\\n"')
    """
    return visible(json.dumps(text, ensure_ascii=False))


def round_lines(part: Round) -> Iterator[str]:
    """A round with its draft tree and its policy's expectations, as text."""
    tree = part.tree
    assert tree is not None
    guesses, accepted = len(tree.token_ids) - 1, len(tree.accepted)
    how = f"{accepted} of {guesses} guesses accepted" if guesses else "no tree came" if tree.missed else "no tree"
    draft = f"draft {tree.draft_us / 1000:.1f} ms, " if guesses else ""
    yield f"{part.shape}: {len(part.token_ids)} tokens, {how}; {draft}verifier {tree.verify_us / 1000:.1f} ms"
    yield from tree_lines(tree)
    for arm in tree.arms:
        chosen = "  chosen" if arm.shape == part.shape else ""
        speed = f" in {arm.round_us / 1000:.1f} ms, {arm.tokens_per_s:.0f} tokens/s" if arm.round_us else ""
        yield f"arm {arm.shape}: expects {arm.tokens:.2f} +- {arm.spread:.2f} tokens{speed}{chosen}"


def tree_lines(tree: RoundTree) -> Iterator[str]:
    """A draft tree with a line for each row, each below its parent: text, probability, and whether it was accepted."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(tree.parents, 1):
        children.setdefault(parent, []).append(row)
    yield quoted(tree.texts[0])
    waiting = [(row, "") for row in reversed(children.get(0, []))]
    while waiting:
        row, before = waiting.pop()
        last = children[tree.parents[row - 1]][-1] == row
        chance = f"  {tree.chances[row - 1]:.2f}" if tree.chances else ""
        notes = "  proposed" * (row in tree.proposed) + "  accepted" * (row in tree.accepted)
        yield f"{before}{'└─' if last else '├─'} {quoted(tree.texts[row])}{chance}{notes}"
        inside = before + ("   " if last else "│  ")
        waiting += [(child, inside) for child in reversed(children.get(row, []))]


@contextlib.contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `act` meanwhile, in the loop's thread."""
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def read_line() -> str | None:
    """The next line of standard input; None at its end. Raises BadRequest for one that is not text."""

    def read() -> str | None:
        try:
            if sys.stdin.isatty():
                return input(PROMPT)
            return sys.stdin.readline() or None
        except EOFError:
            return None
        except UnicodeDecodeError:
            raise BadRequest("stdin", "is not UTF-8") from None

    return await in_thread("stdin", read)


async def converse(conversation: TerminalChat, console: Console, notes: Console) -> None:
    """Read messages and commands from standard input until its end or /quit. notes: for what is not of the answer.

    Raises an answer's DendroError where standard input is no terminal; there it is shown, and the conversation goes on.
    """
    attended = sys.stdin.isatty()
    if attended:
        notes.print("[dim]/help lists the commands; Ctrl-C ends an answer, /quit the conversation[/]")
    while True:
        with on_interrupt(lambda: notes.print("\n[dim]/quit or Ctrl-D ends the conversation[/]")):
            line = await read_line()
        if line is None:
            return
        line = line.strip()
        if line.startswith("/"):
            answer = conversation.command(line)
            if answer is None:
                return
            console.print(visible(answer), markup=False, highlight=False, soft_wrap=True)
        elif line:
            try:
                done = await _answer(conversation, line)
            except DendroError as error:
                if not attended:
                    raise
                notes.print(f"error: {visible(str(error))}", style="red", markup=False, highlight=False)
                continue
            note = answer_line(done.complete) if done is not None else "ended; this turn is not part of the session"
            notes.print(f"{'' if done is not None else chr(10)}{note}", style="dim", markup=False, highlight=False)


async def _answer(conversation: TerminalChat, message: str) -> Completion | None:
    """The answer to a message; None where Ctrl-C ended it."""
    answering = asyncio.ensure_future(conversation.say(message))
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        answering.cancel()

    with on_interrupt(interrupt):
        try:
            return await answering
        except asyncio.CancelledError:
            if not interrupted:
                raise
            return None
