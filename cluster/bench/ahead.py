"""`dendro bench ahead`: drafting time that is hidden because a drafter prepares trees while a verifier works.

The drafter has a machine of its own: what it takes to prepare each tree, to draft after a call and to verify is
measured one after another, in one process, and the way between both machines is added. The verifier asks for each tree
itself, so that a round has two messages, and begins it at once with a prepared tree that was sent before
(docs/design/drafting-ahead.md#sent-before-the-verdict). A policy then chooses between those rounds and plain ones,
whose tokens have no way to the drafter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from dendro.calls import DraftCall, Hello
from dendro.shapes import MAX_ROWS, TreeShape
from dendro.text import Sampling, Verdict
from dendro.tree import DraftTree
from tokenizers import Tokenizer

from cluster.arms import OFF_ARM, Arm
from cluster.bench.drafter import CPU, InlineDrafter
from cluster.config import TargetConfig
from cluster.demo.kinds import KINDS, kind_prompts
from cluster.demo.real_pair import REAL_DRAFTER, real_config
from cluster.hub import fetched_model
from cluster.measure.bench import Aim, Bench, Plot, ReportTable, models, option, seed, temperatures
from cluster.measure.in_process import DRAFTER_DTYPE, EngineText, verifier_of
from cluster.measure.measurement import Begin
from cluster.measure.report import Row
from cluster.measure.targets import COSTLY, target_config
from cluster.policies import ConservativeUCB, Experience
from cluster.policies.step_time import TargetSteps
from cluster.training.acceptance import PROMPT_TOKENS
from drafter_service.models import load_model
from drafter_service.prepared import PreparedText
from drafter_service.texts import DrafterText
from verifier_service.engine import VerifierEngine
from verifier_service.orders import MESSAGE_S

SMOLLM2 = "smollm2"
PAIRS = (COSTLY, SMOLLM2)
DRAFTER = "mamba2"
"""The drafter of the costly target, among the demo's models."""
SHAPES = tuple(map(TreeShape.parse, ("(1,1,1,1)", "(3,2,1)")))
WAYS_MS = (0.1, 0.5, 5.0, 50.0)
FAR_MS = 5.0
"""The way at which a hit's round is compared with one of the shortest way."""
ANSWERS, ANSWER_TOKENS = 16, 256
"""Answers of a simulated policy."""
TEXTS = 4
"""Texts that drafters have room for. One is drafted; prepared trees need slots of others."""


@dataclass(frozen=True, slots=True)
class AheadOptions:
    prompts: int = option("Prompts of each kind: code, prose, edits; at most 9.", 3, 1, least=1)
    tokens: int = option("New tokens of every answer.", 64, 16, least=1)
    pairs: tuple[str, ...] = option(f"Targets with their drafters: {', '.join(PAIRS)}.", PAIRS, (COSTLY,))
    temperatures: tuple[float, ...] = temperatures()
    seed: int = seed()
    models: Path = models()


# Measuring
@dataclass(frozen=True, slots=True)
class PreparedSpan:
    """When a prepared tree was begun and complete, in microseconds since the answer before it."""

    begin_us: float
    end_us: float
    chance: float  # estimate of the chance of the verdict that it is for


@dataclass(frozen=True, slots=True)
class AheadRound:
    """A round of a drafter that had the time to prepare all trees."""

    emitted: int
    verify_us: float
    draft_us: float  # time of drafting the tree after its call
    steps_us: tuple[float, ...]  # microseconds from the last answer to the end of each step of preparing
    spans: tuple[PreparedSpan, ...]
    used: int | None  # place of the span whose tree is this round's; None: none is

    def busy_us(self, free_us: float) -> float:
        """The rest of the step that runs when the call comes, after so much time since the answer before it."""
        return next((end for end in self.steps_us if end >= free_us), free_us) - free_us

    def hits(self, free_us: float) -> bool:
        """Whether the round's tree has been begun by then."""
        return self.used is not None and self.spans[self.used].begin_us < free_us

    def wait_us(self, free_us: float) -> float:
        """How long the call then waits for its tree."""
        busy_us = self.busy_us(free_us)
        if self.used is None or not self.hits(free_us):
            return busy_us + self.draft_us
        return max(busy_us, self.spans[self.used].end_us - free_us)

    def sent_us(self, free_us: float, ways_us: float) -> float | None:
        """When the round's tree was complete and sent, if that was before the call and pays; else None. ways_us: there
        and back"""
        if self.used is None or self.spans[self.used].end_us > free_us:
            return None
        pays = self.spans[self.used].chance * ways_us >= 1e6 * MESSAGE_S
        return self.spans[self.used].end_us if pays else None

    def prepared_us(self, free_us: float) -> tuple[float, float]:
        """Time spent on all prepared trees by then, and time spent on the tree that is used."""
        spent = [max(0.0, min(span.end_us, free_us) - span.begin_us) for span in self.spans]
        return sum(spent), spent[self.used] if self.used is not None else 0.0


class SteppedDrafter(InlineDrafter):
    """A drafter whose steps between two calls are timed."""

    def __init__(self, checkpoint: Path, prepares: bool) -> None:
        model, _ = load_model(checkpoint, getattr(torch, DRAFTER_DTYPE), CPU)
        super().__init__(model, TEXTS, prepares=prepares)

    @torch.inference_mode()
    def prepare(self, session: DrafterText) -> tuple[list[float], dict[PreparedText, PreparedSpan]]:
        """Prepare all trees. Returns when each step ended, and the span of each tree."""
        began_s, ends, spans = time.perf_counter(), [0.0], dict[PreparedText, PreparedSpan]()
        while self._works():
            ends.append(1e6 * (time.perf_counter() - began_s))
            for prepared in self.scheduler.prepared_of(session):
                if prepared not in spans or spans[prepared].end_us == ends[-2]:
                    begin_us = spans[prepared].begin_us if prepared in spans else ends[-2]
                    spans[prepared] = PreparedSpan(begin_us, ends[-1], prepared.outcome.chance)
        return ends[1:], spans

    def close(self, session: DrafterText) -> None:
        self.scheduler.forget(session.opening)
        self.runner.forget(session.number)
        self.scheduler.closed.clear()

    def _works(self) -> bool:
        """One step of an idle engine, with noise that is wanted before trees are; False if there was nothing to do."""
        if self.step() is not None:
            return True
        wanted = self.scheduler.noise_wanted
        waits = bool(wanted)
        for session in list(wanted):
            if self.runner.prepare(session, wanted[session]):
                return True
            del wanted[session]
        return waits


async def recorded(
    verifier: VerifierEngine,
    drafters: Sequence[SteppedDrafter],
    ids: Sequence[int],
    sampling: Sampling,
    shape: TreeShape,
    tokens: int,
) -> list[AheadRound]:
    """The rounds of one answer. drafters: one that prepares trees, one that does not. Raises RuntimeError where their
    trees differ."""
    text, begin = EngineText(ids, sampling), len(ids)
    await text.open(verifier, tokens + MAX_ROWS)
    sessions = [drafter.open(text) for drafter in drafters]
    found, before = [], (list[float](), dict[PreparedText, PreparedSpan]())
    while len(text.text) < begin + tokens:
        steps, spans = before
        call, of = DraftCall(text.update(), shape), list(spans)
        new = text.text.ids[text.held :]
        used = next((place for place, each in enumerate(of) if each.guessed == new and each.complete), None)
        prepared, asked = [drafter.answer([call]) for drafter in drafters]
        (tree,), (plain,) = prepared.trees, asked.trees
        if not (tree.tokens.tolist() == plain.tokens.tolist() and (tree.values == plain.values).all()):
            raise RuntimeError("a prepared tree differs from that of its call")
        before = drafters[0].prepare(sessions[0])
        drafters[1].prepare(sessions[1])  # computes noise alone
        verdict = await text.verify(verifier, tree)
        if len(text.text) > begin:  # no tree is prepared before the first round
            own = tuple(spans[each] for each in of)
            draft_us = 1e6 * asked.seconds
            found.append(AheadRound(len(verdict.tokens), verdict.verify_us, draft_us, tuple(steps), own, used))
        text.grow(verdict.tokens)
    await text.close(verifier)
    for drafter, session in zip(drafters, sessions, strict=True):
        drafter.close(session)
    return found


async def plain_us(verifier: VerifierEngine, ids: Sequence[int], sampling: Sampling, tokens: int) -> list[float]:
    """Time of each step of an answer without trees, in microseconds."""
    text, found = EngineText(ids, sampling), list[float]()
    await text.open(verifier, tokens + MAX_ROWS)
    for _ in range(tokens):
        verdict = await text.verify(verifier, DraftTree.root_only(text.text.ids[-1]))
        text.grow(verdict.tokens)
        found.append(verdict.verify_us)
    await text.close(verifier)
    return found


# Rows of the report
@dataclass(frozen=True, slots=True)
class FarRound:
    """A round whose drafter is on another machine."""

    of: AheadRound
    free_us: float  # the drafter's time between its tree and the next call
    waited_us: float  # time from the verdict before the round to its beginning

    @property
    def took_us(self) -> float:
        return self.waited_us + self.of.verify_us


def far_rounds(rounds: Sequence[AheadRound], way_us: float) -> list[FarRound]:
    """These rounds after the first, with a way of so many microseconds between drafter and verifier.

    The drafter is free from its answer to the next call: while the tree travels, is verified, and the call travels. A
    tree that is complete by then was sent before the call, and the round begins as soon as verdict and tree are there.
    """
    answered_us, begun_us, found = 0.0, way_us, list[FarRound]()
    for before, each in zip(rounds, rounds[1:], strict=False):
        verdict_us = begun_us + before.verify_us
        free_us = verdict_us + way_us - answered_us
        sent_us, last_us = each.sent_us(free_us, 2 * way_us), answered_us
        answered_us = verdict_us + way_us + each.wait_us(free_us)
        begun_us = answered_us + way_us
        if sent_us is not None:
            begun_us = max(verdict_us, min(begun_us, last_us + sent_us + way_us))
        found.append(FarRound(each, free_us, begun_us - verdict_us))
    return found


def simulated(rounds: Sequence[AheadRound], way_ms: float) -> Row:
    """What rounds come to with a way of so many milliseconds between drafter and verifier, against the same rounds
    without prepared trees. Hidden is drafting time that no round waits for, beside the way there and back."""
    ways_us, far = 2e3 * way_ms, far_rounds(rounds, 1e3 * way_ms)
    hits = [each for each in far if each.of.hits(each.free_us)]
    waits = sum(max(0.0, each.waited_us - ways_us) for each in far)
    plain = sum(each.of.draft_us for each in far)
    spent, used = (sum(part) for part in zip(*(each.of.prepared_us(each.free_us) for each in far), strict=True))
    took, without = (sum(each.took_us for each in far), sum(ways_us + each.of.verify_us for each in far) + plain)
    hit_rate, hidden = len(hits) / len(far), 1 - waits / plain
    return {
        "way_ms": way_ms,
        "hit_rate": hit_rate,
        "at_once": sum(not each.waited_us for each in far) / len(far),
        "hidden": hidden,
        "hidden_over_hits": hidden / hit_rate if hits else None,
        "thrown_away": 1 - used / spent if spent else None,
        "round_ms": took / len(far) / 1e3,
        "hit_round_ms": sum(each.took_us for each in hits) / len(hits) / 1e3 if hits else None,
        "without_ms": without / len(far) / 1e3,
        "over_without": without / took,
    }


def at_ways(rounds: Sequence[AheadRound]) -> list[Row]:
    """`simulated` at each way, and by how much a hit's round is longer there than at the shortest way."""
    rows = [simulated(rounds, way_ms) for way_ms in WAYS_MS]
    near = rows[0]["hit_round_ms"]
    return [row | {"hit_over_near": row["hit_round_ms"] / near if near else None} for row in rows]


def policy_over_off(
    rounds: Mapping[TreeShape, Sequence[AheadRound]], off_us: float, way_ms: float, target: Hello
) -> float:
    """Tokens per second of a policy that chooses between these shapes and `off`, over those of `off`, in ANSWERS
    answers after a router's start. A tree after a round of another arm is not prepared. off_us: time of a plain round
    """
    far = {Arm(DRAFTER, shape): far_rounds(each, 1e3 * way_ms) for shape, each in rounds.items()}
    experience, places, spent_us, emitted = Experience(), Counter[Arm](), 0.0, 0
    experience.concurrency.learn_target(TargetSteps.of(target))
    for _ in range(ANSWERS):
        policy, last, ends = ConservativeUCB([OFF_ARM, *far], experience), OFF_ARM, emitted + ANSWER_TOKENS
        while emitted < ends:
            arm = policy.choose()
            took_us = verify_us = off_us
            draft_us, length = 0.0, 1
            if not arm.off:
                each = far[arm][places[arm] % len(far[arm])]
                places[arm] += 1
                verify_us, length, draft_us = each.of.verify_us, each.of.emitted, each.of.draft_us
                took_us = verify_us + 2e3 * way_ms + draft_us
                if arm == last:
                    took_us, draft_us = each.took_us, max(0.0, each.waited_us - 2e3 * way_ms)
            chain = DraftTree.of(range(arm.rows), range(-1, arm.rows - 1))
            tree = replace(chain, draft_us=round(draft_us))
            ranks = (0,) * (length - 1)
            path = tuple(range(length))
            verdict = Verdict((1,) * length, path, ranks, None, length, verify_us=round(verify_us), step_rows=arm.rows)
            policy.learn(arm, tree, verdict)
            experience.learn_time(arm, tree, verdict, took_us, last_maker=last.maker)
            spent_us, emitted, last = spent_us + took_us, emitted + length, arm
    return emitted * off_us / spent_us


def pair_of(name: str, folder: Path) -> tuple[TargetConfig, Path, Tokenizer]:
    """A target, its drafter's folder and its tokenizer. Raises CheckpointError where its package is not installed."""
    if name == SMOLLM2:
        config, drafter = real_config(), REAL_DRAFTER
        target = config.targets[SMOLLM2]
    else:
        target, drafter = target_config(folder, name).targets[name], folder / DRAFTER
    return fetched_model(f"targets.{name}", target), drafter, Tokenizer.from_file(str(drafter / "tokenizer.json"))


async def measure(options: AheadOptions, begin: Begin) -> dict[str, Any]:
    answers = len(KINDS) * options.prompts * len(options.temperatures) * len(SHAPES)
    step = begin("answers", len(options.pairs) * answers)
    found: dict[str, list[Row]] = {"simulated": [], "policy": []}
    for name in options.pairs:
        target, checkpoint, tokenizer = pair_of(name, options.models)
        given = [kind_prompts(kind, options.prompts, PROMPT_TOKENS, tokenizer, options.models) for kind in KINDS]
        ids = [prompt.token_ids for own in given for prompt in own]
        drafters = [SteppedDrafter(checkpoint, prepares) for prepares in (True, False)]
        async with verifier_of(name, target, PROMPT_TOKENS + options.tokens + 2 * MAX_ROWS) as verifier:
            for temperature in options.temperatures:
                seeds = range(options.seed, options.seed + len(ids))
                asked = [
                    (each, Sampling(temperature=temperature, seed=seed)) for each, seed in zip(ids, seeds, strict=True)
                ]
                off_us = median([us for each in asked for us in await plain_us(verifier, *each, options.tokens)])
                of_shapes: dict[TreeShape, list[AheadRound]] = {shape: [] for shape in SHAPES}
                head = {"pair": name, "temperature": temperature}
                for shape, rounds in of_shapes.items():
                    for each in asked:
                        rounds += await recorded(verifier, drafters, *each, shape, options.tokens)
                        step()
                    found["simulated"] += [head | {"shape": str(shape)} | row for row in at_ways(rounds)]
                for way_ms in WAYS_MS:
                    over_off = policy_over_off(of_shapes, off_us, way_ms, await verifier.hello())
                    row = {"way_ms": way_ms, "off_ms": off_us / 1e3, "over_off": over_off}
                    found["policy"].append(head | row)
    return {"plan": {"tokens": options.tokens, "prompts": len(KINDS) * options.prompts}, "threads": 2, **found}


AHEAD = Bench(
    "ahead",
    "Measure how much drafting time is hidden because a drafter prepares trees while a verifier works, simulated from "
    "measured times for a drafter on a machine of its own.",
    "Under a minute: one prompt of each kind, short answers, the bundled pair.",
    AheadOptions,
    measure,
    facts=(
        f"{{prompts}} held-out prompts of {PROMPT_TOKENS} tokens (code, prose, edits), answers of {{tokens}} tokens",
        "Hit rate: rounds whose tree had been begun when it was asked for. At once: rounds that wait for no tree: it "
        "was there by the verdict. Hidden: the share of drafting time that no round waits for, beside the way there "
        "and back. Thrown away: the share of the time of prepared trees that were not used",
        "Every step is measured with nothing beside it; a round has two messages, and waits for none where a prepared "
        "tree was sent before",
        f"Policy: it chooses among both shapes and off, over the first {ANSWERS} answers of {ANSWER_TOKENS} tokens "
        "after a router's start; a round of off has no way to the drafter",
    ),
    tables=(
        ReportTable(
            "{pair}: the drafter has a machine of its own",
            "simulated",
            "shape; T = temperature:g; way, ms = way_ms:g; hit rate = hit_rate:.2f; at once = at_once:.2f; hidden = "
            "hidden:.2f; hidden over hit rate = hidden_over_hits:.2f; thrown away = thrown_away:.2f; round, ms = "
            "round_ms:.2f; of hits = hit_round_ms:.2f; over that of the shortest way = hit_over_near:.2f; without = "
            "without_ms:.2f; speed over without = over_without:.2f",
        ),
        ReportTable(
            "A policy that chooses between these shapes and off",
            "policy",
            "pair; T = temperature:g; way, ms = way_ms:g; round of off, ms = off_ms:.2f; policy over off = "
            "over_off:.2f",
        ),
    ),
    aims=(
        Aim(
            "drafting time hidden over the hit rate, {pair}, way of {way_ms:g} ms",
            "simulated",
            "hidden_over_hits",
            least=0.8,
            why="{shape}, temperature {temperature:g}",
        ),
        Aim(
            f"a hit's round at a way of {FAR_MS:g} ms over that at {WAYS_MS[0]:g} ms, {{pair}}",
            "simulated",
            "hit_over_near",
            most=1.1,
            where=lambda row: row["way_ms"] == FAR_MS,
            why="{shape}, temperature {temperature:g}",
        ),
        Aim(
            "policy over off, {pair}, way of {way_ms:g} ms",
            "policy",
            "over_off",
            least=0.98,
            why="temperature {temperature:g}",
        ),
    ),
    plots=(
        Plot(
            "simulated",
            "way, ms = way_ms",
            "speed over without = over_without",
            line="{shape}, T {temperature:g}",
            panel="{pair}",
            log="x",
        ),
    ),
    code=("cluster/bench/ahead.py", "drafter_service/prepared.py", "drafter_service/scheduler.py"),
)
