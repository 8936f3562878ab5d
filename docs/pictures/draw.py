"""The pictures of the front page.

python docs/pictures/draw.py            draw both from the committed data
python docs/pictures/draw.py --record   first run the demo's published pair, and write round.json anew

round.json has one round of an answer: its draft tree and the rows that the target accepted. gains.svg is drawn from the
tables of docs/speed.md and docs/speed-llama.md.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent
ROUND, TREE, GAINS = HERE / "round.json", HERE / "tree.svg", HERE / "gains.svg"
QUESTION = "A shop sells pens at 3 dollars each. How much do 4 pens and a notebook of 5 dollars cost together?"
SHAPE, TOKENS = "dynamic(4,5,15)", 96

GREEN, GREY, RED = "#2f9e77", "#7d828b", "#d1603d"
"""Readable on white and on black."""
FONT = 'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"'


@dataclass(frozen=True)
class DrawnRound:
    """One round. Row 0 of the tree is the last token of the text before it."""

    before: str  # the end of the text before the root
    tokens: tuple[str, ...]  # text of each row
    parents: tuple[int, ...]  # row of each row's parent; -1 for the root
    path: tuple[int, ...]  # accepted rows, the root first
    emitted: tuple[str, ...]  # text of the tokens that the target kept: one more than it accepted guesses
    source: str  # the command that was run

    @classmethod
    def read(cls, file: Path) -> DrawnRound:
        found = json.loads(file.read_text())
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})


class RoundRecorder:
    """A verifier's engine that keeps the tree and the verdict of each round."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.rounds: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def verify(self, call: Any) -> Any:
        verdict = await self._engine.verify(call)
        self.rounds.append((call.tree, verdict))
        return verdict


async def recorded() -> DrawnRound:
    """The round that accepts the most guesses with a fork on its path; of equals the first."""
    from dendro.answer import build_request
    from dendro.speculation import Speculation
    from dendro.state import MemoryStates

    from cluster.api.local import LocalClient
    from cluster.checkpoints import check_checkpoints
    from cluster.demo.real_pair import real_config
    from cluster.demo.turns import demo_turns
    from cluster.hub import fetched_model, pinned
    from cluster.peers.pools import LocalPeers
    from cluster.router.ingress import Ingress
    from cluster.router.tokenizer import CheckpointTokenizer
    from cluster.sessions import MemorySessions

    config = pinned(real_config())
    check_checkpoints(config)
    name, target = next(iter(config.targets.items()))
    loaded = LocalPeers.load(config, MemoryStates())
    verifier, drafter = loaded.engines
    recorder = RoundRecorder(verifier)
    peers = LocalPeers(config, {name: recorder}, {next(iter(config.drafters)): drafter})
    prompt = demo_turns(config, QUESTION).first
    request = build_request(prompt, max_new_tokens=TOKENS, speculation=Speculation.parse(SHAPE, "", None, None))
    try:
        await peers.start()
        events = [event async for event in LocalClient(Ingress(config, peers, MemorySessions())).send(request)]
    finally:
        await peers.close()
    del events
    tokenizer = CheckpointTokenizer(fetched_model(f"targets.{name}", target, weights=False).tokenizer_folder, "")
    shown = tokenizer.showing()

    def text(token: int) -> str:
        return shown.decode([int(token)])

    def worth(index: int) -> tuple[int, int]:
        tree, verdict = recorder.rounds[index]
        forks = sum((tree.parents == row).sum() > 1 for row in verdict.path)
        return len(verdict.path) if forks > 2 else 0, -index

    chosen = max(range(len(recorder.rounds)), key=worth)
    tree, verdict = recorder.rounds[chosen]
    before = "".join(text(token) for _, each in recorder.rounds[:chosen] for token in each.tokens)
    return DrawnRound(
        before[: -len(text(tree.tokens[0]))][-40:],
        tuple(text(token) for token in tree.tokens),
        tuple(int(row) for row in tree.parents),
        verdict.path,
        tuple(text(token) for token in verdict.tokens),
        f"round {chosen + 1} of SmolLM2-135M-Instruct's answer to {QUESTION!r}, with {SHAPE} of the drafter "
        f"{next(iter(config.drafters))}, temperature 0",
    )


def visible(token: str) -> str:
    """A token as it is drawn: spaces and line breaks as signs."""
    return token.replace(" ", "\N{OPEN BOX}").replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")


def places(parents: tuple[int, ...]) -> list[tuple[int, float]]:
    """Column and line of each row: the column is its depth, leaves have lines of their own, a parent is at its first
    child's.

    >>> places((-1, 0, 0, 1))
    [(0, 0.0), (1, 0.0), (1, 1.0), (2, 0.0)]
    """
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        children.setdefault(parent, []).append(row)
    found: dict[int, tuple[int, float]] = {}
    free = iter(range(len(parents)))

    def place(row: int, depth: int) -> float:
        lines = [place(child, depth + 1) for child in children.get(row, [])]
        found[row] = depth, lines[0] if lines else float(next(free))
        return found[row][1]

    place(0, 0)
    return [found[row] for row in range(len(parents))]


def svg(width: float, height: float, title: str, parts: Iterator[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" {FONT} font-size="13">\n<title>{escape(title)}</title>\n{body}\n</svg>\n'
    )


def label(x: float, y: float, text: str, colour: str = GREY, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}" '
        f'xml:space="preserve">{escape(text)}</text>'
    )


COLUMN, LINE, HIGH, TOP = 148.0, 34.0, 24.0, 72.0


def tree_svg(its: DrawnRound) -> str:
    """The tree of a round, from left to right; accepted rows and their edges are green and thick."""
    at = [(10 + column * COLUMN, TOP + line * LINE) for column, line in places(its.parents)]
    accepted = frozenset(its.path)

    def parts() -> Iterator[str]:
        yield label(10, 20, f"text so far  ... {visible(its.before[-28:].partition(' ')[2])}")
        guesses, kept = len(its.tokens) - 1, len(its.path) - 1
        yield label(10, 40, f"{guesses} guesses of the drafter; the target accepts {kept} and adds its own token", GREY)
        edges = [(row, parent) for row, parent in enumerate(its.parents) if parent >= 0]
        for row, parent in sorted(edges, key=lambda edge: edge[0] in accepted):  # accepted ones on top
            (x, y), (to_x, to_y) = at[parent], at[row]
            good = row in accepted
            x, middle = x + COLUMN - 40, to_x - 16
            yield (
                f'<path d="M{x:g} {y:g}H{middle:g}V{to_y:g}H{to_x:g}" fill="none" '
                f'stroke="{GREEN if good else GREY}" stroke-width="{2.5 if good else 1}"/>'
            )
        for row, ((x, y), token) in enumerate(zip(at, its.tokens, strict=True)):
            good = row in accepted
            colour = GREEN if good else GREY
            yield (
                f'<rect x="{x:g}" y="{y - HIGH / 2:g}" width="{COLUMN - 40:g}" height="{HIGH:g}" rx="4" fill="none" '
                f'stroke="{colour}" stroke-width="{2.5 if good else 1}"/>'
            )
            yield label(x + (COLUMN - 40) / 2, y + 4.5, visible(token), colour, "middle", "bold" if good else "normal")
        yield label(
            10, height - 14, f"emitted in one forward: {''.join(map(visible, its.emitted))}", GREEN, weight="bold"
        )

    height = max(y for _, y in at) + HIGH / 2 + 46
    width = max(x for x, _ in at) + COLUMN - 30
    return svg(width, height, "A draft tree with the path that the target accepted", parts())


@dataclass(frozen=True)
class Bar:
    """Tokens a second over those without speculation: the median and a 90 % interval."""

    name: str
    median: float
    low: float
    high: float


ARMS = ("(1,1,1,1)", "(3,2,1)", "dynamic(4,5,15)", "(3,2,2,1,1)", "auto")


def bars(page: Path) -> list[Bar]:
    """The column `over off` of a page's first table, of some fixed trees and of the policy."""
    lines = page.read_text().split("## costly target, temperature 0\n")[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    column = rows[0].index("over off")
    found = []
    for row in rows[2:]:
        if row[0] in ARMS:
            median, _, interval = row[column].partition(" ")
            low, high = interval.strip("()").split("-")
            found.append(Bar(row[0], float(median), float(low), float(high)))
    return found


PANELS = (("Intel Xeon, AMX", "speed.md"), ("AMD EPYC, AVX2", "speed-llama.md"))
LEFT, WIDE, SCALE = 150.0, 420.0, 4.5
"""SCALE: the value at the right end of the axis."""


def gains_svg() -> str:
    """Fixed trees and the policy on two machines, over decoding without speculation."""
    panels = [(name, bars(DOCS / page)) for name, page in PANELS]

    def x(value: float) -> float:
        return LEFT + WIDE * value / SCALE

    def parts() -> Iterator[str]:
        y = 20.0
        for name, its in panels:
            yield label(10, y, f"{name}, 2 cores: tokens/s over those without speculation", weight="bold")
            top = y + 10
            for each in its:
                y += 26
                colour = GREEN if each.name == "auto" else GREY if each.median >= 1 else RED
                weight = "bold" if each.name == "auto" else "normal"
                yield label(LEFT - 8, y + 5, each.name, colour, "end", weight)
                yield (
                    f'<rect x="{LEFT:g}" y="{y - 8:g}" width="{x(each.median) - LEFT:g}" height="16" '
                    f'fill="{colour}" fill-opacity="0.55"/>'
                )
                yield (
                    f'<path d="M{x(each.low):g} {y:g}H{x(each.high):g}M{x(each.low):g} {y - 4:g}v8'
                    f'M{x(each.high):g} {y - 4:g}v8" stroke="{colour}" stroke-width="1.5" fill="none"/>'
                )
                yield label(x(each.high) + 8, y + 5, f"{each.median:.2f}", colour, weight=weight)
            yield f'<path d="M{x(1):g} {top:g}V{y + 14:g}" stroke="{GREY}" stroke-dasharray="3 3"/>'
            y += 42

    height = len(panels) * (42 + 26 * len(ARMS)) + 10
    return svg(LEFT + WIDE + 70, height, "Speed of fixed trees and of the policy on two machines", parts())


def main() -> None:
    if "--record" in sys.argv[1:]:
        made = asyncio.run(recorded())
        ROUND.write_text(json.dumps(vars(made), indent=1, ensure_ascii=False) + "\n")
    TREE.write_text(tree_svg(DrawnRound.read(ROUND)))
    GAINS.write_text(gains_svg())


if __name__ == "__main__":
    main()
