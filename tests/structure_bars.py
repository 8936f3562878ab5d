"""What hostile structures cost their neighbours: `python -m tests.structure_bars` prints a table; about five minutes.

The cluster of the bundled models runs in this process (`--local`), its verifier, drafter and router included, so that
every stall of one is seen by all. Beside each hostile request, asked again as long as the row is measured, a neighbour
of another tenant generates; its gaps and its time a token are compared with those beside a harmless structured request.
Then real schemas are answered by each way of speculation, and memory and the end of the process are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from dendro.answer import build_request
from dendro.errors import DendroError
from dendro.structure import Structure
from dendro.text import Finish, Tokens

from cluster.api.local import LocalClient
from cluster.config import demo_config
from cluster.garbage import freeze_loaded
from cluster.router.ingress import Ingress
from cluster.running import local_ingress
from tests.support.random_schemas import random_schema

PROMPT = "config = json.loads("
NEIGHBOUR = "def main(arguments):\n"
WAYS = ("off", "(3,2,1)", "auto")
GAP_S, RATIO, END_S, MEMORY = 0.25, 1.5, 5.0, 1.2
"""The bars."""

AMBIGUOUS = 'start: e\ne: e e | e e e | e e e e | A\nA: "a"\n'
NESTED = 'start: s\ns: s s | s s s | "a" | "a" s\n'
PATTERNS = {"type": "string", "allOf": [{"pattern": f".*a.{{{each}}}.*"} for each in range(20)]}
OBJECTS = {
    "anyOf": [
        {"type": "object", "properties": {f"p{place}_{number}": {"type": "integer"} for place in range(24)}}
        for number in range(40)
    ]
}
RULES = [f"r{each}" for each in range(900)]
"""Our own: each rule may begin with two others, so that one token makes thousands of items."""
BRANCHING = f"start: {' | '.join(RULES)}\n" + "\n".join(
    f'{name}: ({RULES[(at + 1) % 900]} | {RULES[at * 7 % 900]}) "a" | "a" start' for at, name in enumerate(RULES)
)
HARMLESS = Structure.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 200})
HOSTILE: dict[str, tuple[Structure, ...]] = {
    "e: e e | e e e | e e e e, 80 tokens": (Structure.grammar(AMBIGUOUS),),
    "20 allOf patterns, twice": (
        Structure.json_schema(PATTERNS),
        Structure.json_schema(PATTERNS | {"title": "again"}),
    ),
    "s: s s | s s s": (Structure.grammar(NESTED),),
    "anyOf of 40 objects": (Structure.json_schema(OBJECTS),),
    "900 rules that branch": (Structure.grammar(BRANCHING),),
}


def memory_mib() -> float:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Neighbour:
    """Answers of another tenant, one after another: the times of their tokens."""

    def __init__(self, router: Ingress) -> None:
        self.router = router
        self.gaps_s: list[float] = []
        self.tokens = 0
        self.seconds = 0.0

    async def answer(self, number: int) -> None:
        request = build_request(NEIGHBOUR, max_new_tokens=48, temperature=1.0, seed=number, ignore_end=True)
        first = last = None
        async for event in self.router.generate(request, "neighbour"):
            if count := len(event.chunk.token_ids):
                now = time.perf_counter()
                if last is not None:
                    self.gaps_s.append(now - last)
                    self.tokens += count
                first, last = first if first is not None else now, now
        assert first is not None and last is not None
        self.seconds += last - first


async def attack(router: Ingress, structures: Sequence[Structure], ends: dict[str, int]) -> None:
    """Ask again and again: a new answer, and a resume with 80 tokens."""
    number = 0
    while True:
        structure = structures[number % len(structures)]
        text = structure.texts[0] + (" " * (number // len(structures)) if structure.form == "json_schema" else "")
        if structure.form == "grammar":
            text += f"\n// {number}"  # not compiled before
        asked = Structure(structure.form, (text,))
        request = build_request(PROMPT, structure=asked, max_new_tokens=200, temperature=1.0, seed=number)
        if number % 2:
            name, served = next(iter(router._served.items()))
            ids, held = served.tokenizer.encode(PROMPT, True), served.tokenizer.encode("a", False) * 80
            before = Tokens()
            before.extend(ids)
            request.resume.token_ids.extend(held)
            request.resume.prompt_tokens, request.resume.prompt_digest = len(ids), before.digest()
            request.resume.target = router._admission._targets[name]
            request.resume.seed = number
        number += 1
        try:
            async for _ in router.generate(request, "hostile"):
                pass
            ends["completed"] = ends.get("completed", 0) + 1
        except DendroError as error:
            end = type(error).__name__
            if end not in ends:
                print(f"  {end}: {str(error)[:150]}", file=sys.stderr)
            ends[end] = ends.get(end, 0) + 1
        await asyncio.sleep(0)


async def beside(router: Ingress, structures: Sequence[Structure], answers: int) -> tuple[Neighbour, dict[str, int]]:
    ends: dict[str, int] = {}
    attackers = [asyncio.ensure_future(attack(router, structures, ends)) for _ in range(2)]
    neighbour = Neighbour(router)
    await asyncio.sleep(0.5)
    for number in range(answers):
        await neighbour.answer(number)
    for each in attackers:
        each.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    return neighbour, ends


def definitions() -> list[dict[str, Any]]:
    """Kubernetes' definitions with what they refer to, those that fit a request; where the package is installed."""
    found = find_spec("kubernetes_validate")
    if found is None or found.origin is None:
        return []
    folder = Path(found.origin).parent / "kubernetes-json-schema"
    newest = max(folder.glob("v*-local"), key=lambda path: [int(each) for each in path.name[1:-6].split(".")])
    parts = json.loads((newest / "_definitions.json").read_text())["$defs"]

    def inlined(value: Any, properties: bool = False) -> Any:
        if isinstance(value, list):
            return [inlined(each) for each in value]
        if not isinstance(value, dict):
            return value
        if not properties and isinstance(value.get("$ref"), str):
            return {"$ref": f"#/$defs/{value['$ref'].split('/')[-1]}"}
        return {
            key: inlined(each, key == "properties" and not properties)
            for key, each in value.items()
            if properties or (key not in ("description", "default") and not key.startswith("x-kubernetes"))
        }

    def named(value: Any) -> list[str]:
        if isinstance(value, dict):
            here = [value["$ref"].split("/")[-1]] if isinstance(value.get("$ref"), str) else []
            return here + [name for each in value.values() for name in named(each)]
        return [name for each in value for name in named(each)] if isinstance(value, list) else []

    made = []
    for name in sorted(parts):
        needed, waiting = {name}, [name]
        while waiting:
            for other in named(parts[waiting.pop()]):
                if other not in needed:
                    needed.add(other)
                    waiting.append(other)
        schema = {"$ref": f"#/$defs/{name}", "$defs": {each: inlined(parts[each]) for each in sorted(needed)}}
        if len(json.dumps(schema)) < 60_000:
            made.append(schema)
    return made


def tool(number: int) -> dict[str, Any]:
    """A call of one of several tools, in the form that published clients send."""
    random = Random(number)
    tools = [
        {
            "type": "object",
            "properties": {
                "name": {"const": f"tool_{each}"},
                "arguments": random_schema(Random(number * 100 + each)),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for each in range(random.randint(2, 20))
    ]
    return {"anyOf": tools}


def real_schemas(count: int) -> list[dict[str, Any]]:
    kubernetes = definitions()
    kinds = [
        [random_schema(Random(each)) for each in range(count // 3)],
        kubernetes[:: max(1, len(kubernetes) // (count // 3))],
        [tool(each) for each in range(count // 3)],
    ]
    return [each for kind in kinds for each in kind][:count]


async def schemas_row(router: Ingress, count: int) -> str:
    """None that completes without limits may be refused or end early; all ways give the same tokens."""
    client = LocalClient(router)
    ends: dict[str, int] = {}
    differ = 0
    for number, schema in enumerate(real_schemas(count)):
        structure = Structure.json_schema(schema)
        found = set()
        for way in (WAYS[0], WAYS[1 + number % 2]):
            try:
                done = await client.generate_text(
                    PROMPT, structure=structure, max_new_tokens=64, temperature=float(number % 2), seed=number,
                    speculation=way,
                )  # fmt: skip
                found.add((done.token_ids, str(done.complete.finish)))
                end = "ended" if done.complete.finish is not Finish.LENGTH else "length"
            except DendroError as error:
                found.add(str(error))
                end = "limit" if any(each in str(error) for each in ("items", "CPU", "MiB", "size")) else "unsupported"
                if end == "limit":
                    print("  refused:", str(error)[:160], file=sys.stderr)
            ends[end] = ends.get(end, 0) + 1
        differ += len(found) > 1
    return f"{count} schemas, 2 ways: {ends}; differing answers: {differ} (bars: 0 at a limit, 0 differ)"


END = """
import asyncio, time
from tests import structure_bars as bars
from dendro.grammars import Grammars
from dendro.structure import Structure
async def main():
    made = Grammars(lambda: {each: bytes([each]) for each in range(256)}, 256)
    task = asyncio.ensure_future(made.compiled(Structure.json_schema(bars.PATTERNS)))
    await asyncio.sleep(0.3)
    print(time.time(), flush=True)
asyncio.run(main())
"""


def end_s() -> float:
    """Seconds from the end of a program that compiles a hostile structure to the end of its process."""
    done = subprocess.run([sys.executable, "-c", END], check=True, capture_output=True, text=True, timeout=120)
    return time.time() - float(done.stdout)


async def measure(answers: int, schemas: int, pause_s: float) -> None:
    async with local_ingress(demo_config()) as router:
        freeze_loaded()
        await Neighbour(router).answer(0)
        base, _ = await beside(router, [HARMLESS], answers)
        harmless_s = base.seconds / base.tokens
        memory = memory_mib()
        print(f"| beside | longest gap, s (at most {GAP_S}) | ms a token | over harmless (at most {RATIO}) | it ends |")
        print("|---|---|---|---|---|")
        print(f"| a harmless structure | {max(base.gaps_s):.3f} | {1e3 * harmless_s:.2f} | 1 | |")
        for name, structures in HOSTILE.items():
            found, ends = await beside(router, structures, answers)
            each_s = found.seconds / found.tokens
            counted = ", ".join(f"{count} {end}" for end, count in ends.items())
            print(
                f"| {name} | {max(found.gaps_s):.3f} | {1e3 * each_s:.2f} | {each_s / harmless_s:.2f} | {counted} |",
                flush=True,
            )
        await asyncio.sleep(pause_s)
        print(f"\nmemory after {pause_s:g} s: {memory_mib() / memory:.2f} of before (bar: {MEMORY})", flush=True)
        if schemas:
            print(await schemas_row(router, schemas), flush=True)
    print(f"a process ends {end_s():.2f} s after its program (bar: {END_S})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=12, help="of the neighbour, in each row")
    parser.add_argument("--schemas", type=int, default=300, help="real ones; 0: none")
    parser.add_argument("--pause", type=float, default=60.0, help="seconds before memory is measured")
    given = parser.parse_args()
    asyncio.run(measure(given.answers, given.schemas, given.pause))


if __name__ == "__main__":
    main()
