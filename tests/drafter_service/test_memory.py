"""Memories of texts and trees against straight chains: whatever form nodes have, a model reads every path the same.

Several texts share every forward, at different depths. Trees are random; texts go through them in full, in part, by the
root alone and not at all, leave them, and are read on in chains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_drafters import FAMILIES, VOCABULARY, make_drafter

from drafter_service.models import DrafterModel, load_model
from drafter_service.models.memory import DrafterMemory
from drafter_service.plan import EMPTY_TEXT, NO_NODE, Chains, Level, TextFold

TEXTS, NODES = 4, 64


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DrafterModel:
    return load_model(checkpoint_of(request.param, tmp_path_factory), torch.float32, torch.device("cpu"))[0]


def checkpoint_of(family: str, folders: pytest.TempPathFactory) -> Path:
    folder = folders.mktemp(family)
    make_drafter(folder, family)
    return folder


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def read(model: DrafterModel, text: list[int]) -> tuple[torch.Tensor, DrafterMemory]:
    """Logits after a text, by one chain over a memory of its own, and that memory, which has the text in slot 1."""
    memory = model.memory(texts=2, nodes=1)
    rows = Chains(np.array([text]), ints(len(text)), ints(0), ints(EMPTY_TEXT), ints(1), ints())
    return model.logits(memory.chain(rows)[0, -1:])[0], memory


@dataclass
class Story:
    """A text, the tree that hangs off it, and what is known of both."""

    slot: int
    ids: list[int]
    covers: int = 0
    tokens: list[int] = field(default_factory=list)  # of the tree's nodes
    slots: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    level: list[int] = field(default_factory=list)  # the newest nodes

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        return [*(self.path(self.parents[node]) if self.parents[node] >= 0 else []), node]

    def text(self, node: int) -> list[int]:
        return self.ids[: self.covers] + [self.tokens[each] for each in self.path(node)]

    def grow(self, rng: np.random.Generator, free: list[int], widest: int) -> None:
        """The root, or children of nodes of the newest level."""
        above = [int(node) for node in rng.choice(self.level, rng.integers(1, widest + 1))] if self.slots else [-1]
        self.level = list(range(len(self.slots), len(self.slots) + len(above)))
        self.parents += above
        self.tokens += rng.integers(0, VOCABULARY, len(above)).tolist() if self.level[0] else [self.ids[self.covers]]
        self.slots += [free.pop(int(rng.integers(0, len(free)))) for _ in above]


def level_of(stories: list[Story]) -> Level:
    most = max(len(story.slots) for story in stories)
    nodes = np.full((len(stories), most), NO_NODE)
    lines = np.zeros((len(stories), most, most), np.bool_)
    for tree, story in enumerate(stories):
        first = most - len(story.slots)
        nodes[tree, first:] = story.slots
        for node in range(len(story.slots)):
            lines[tree, first + node, [first + each for each in story.path(node)]] = True
    rows = [(story, node) for story in stories for node in story.level]
    return Level(
        tokens=ints(*(story.tokens[node] for story, node in rows)),
        parents=ints(*(story.slots[story.parents[node]] if node else NO_NODE for story, node in rows)),
        positions=ints(*(len(story.text(node)) - 1 for story, node in rows)),
        counts=ints(*(len(story.level) for story in stories)),
        texts=ints(*(story.slot for story in stories)),
        starts=ints(*(story.covers for story in stories)),
        nodes=nodes,
        lines=lines,
    )


def chains_of(stories: list[Story], lengths: list[int], roots: list[int]) -> Chains:
    tokens = np.zeros((len(stories), max(lengths)), np.int64)
    for row, (story, length) in enumerate(zip(stories, lengths, strict=True)):
        tokens[row, :length] = story.ids[story.covers : story.covers + length]
    source = ints(*(story.slot if story.covers else EMPTY_TEXT for story in stories))
    target = ints(*(story.slot for story in stories))
    return Chains(tokens, ints(*lengths), ints(*(story.covers for story in stories)), source, target, ints(*roots))


def compare_text(model: DrafterModel, memory: DrafterMemory, story: Story) -> None:
    saved = memory.save(story.slot, story.covers)
    straight = read(model, story.ids[: story.covers])[1].save(1, story.covers)
    assert saved.keys() == straight.keys()
    for name in saved:
        error = np.linalg.norm(saved[name] - straight[name])
        assert error <= 1e-5 * np.linalg.norm(straight[name]), (name, story.covers)


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_every_node_is_its_path_read_straight_and_every_fold_the_text_read_straight(model, seed):
    """A text that is let lie may have its tree thrown away, or grown again. A chain may end in a root."""
    rng = np.random.default_rng(seed)
    memory = model.memory(TEXTS, NODES)
    stories = [Story(slot, rng.integers(0, VOCABULARY, rng.integers(1, 20)).tolist()) for slot in range(1, TEXTS)]
    for _ in range(12):
        free = list(range(1, NODES))
        for story in stories:
            story.ids += rng.integers(0, VOCABULARY, 3 if story.covers == len(story.ids) else 1).tolist()
            story.tokens, story.slots, story.parents, story.level = [], [], [], []
        late = [story for story in stories if len(story.ids) - story.covers > 1]
        if late:
            rooted = bool(rng.random() < 0.7)
            lengths = [len(story.ids) - story.covers - (not rooted) for story in late]
            hidden = memory.chain(chains_of(late, lengths, [free.pop() for _ in late] if rooted else []))
            for story, length, row in zip(late, lengths, hidden, strict=True):
                torch.testing.assert_close(
                    model.logits(row[length - 1 : length])[0], read(model, story.ids[: story.covers + length])[0],
                    atol=1e-4, rtol=0,
                )  # fmt: skip
                story.covers += length - rooted
                compare_text(model, memory, story)
        for _ in range(rng.integers(1, 6)):  # not all take part in every level: so their depths come apart
            growing = [story for story in stories if rng.random() < 0.8] or stories
            for story in growing:
                story.grow(rng, free, 3)
            logits = model.logits(memory.level(level_of(growing)))
            nodes = [(story, node) for story in growing for node in story.level]
            for (story, node), found in zip(nodes, logits, strict=True):
                torch.testing.assert_close(found, read(model, story.text(node))[0], atol=1e-4, rtol=0)
        folds = []
        for story in stories:
            if not story.slots or rng.random() < 0.2:
                continue
            path = story.path(int(rng.integers(0, len(story.slots))))
            source = story.slot if story.covers else EMPTY_TEXT
            folds.append(TextFold(story.covers, source, story.slot, tuple(story.slots[node] for node in path)))
            story.ids[story.covers :] = [story.tokens[node] for node in path]
            story.covers = len(story.ids)
        if folds:
            memory.fold(folds)
        for story in stories:
            if story.covers:
                compare_text(model, memory, story)


def test_a_tree_of_mamba2_holds_inputs_and_no_state(tmp_path_factory):
    """Of a layer: what the convolution takes in, x, B and dt, in float32. A state of this tiny model is twice that."""
    model, _ = load_model(checkpoint_of("mamba2", tmp_path_factory), torch.float32, torch.device("cpu"))
    heads, width, size, groups, layers, taps = 4, 16, 8, 2, 2, 4
    x, B = heads * width, groups * size
    few, many = model.memory(texts=3, nodes=1), model.memory(texts=3, nodes=1 + 64)
    assert many.node_bytes == layers * 4 * ((x + 2 * B) + x + B + heads)
    assert many.text_bytes(10) == layers * 4 * (x * size + (taps - 1) * (x + 2 * B))
    assert few.text_bytes(10_000) == many.text_bytes(10)
    assert held(many) - held(few) == 64 * many.node_bytes
    assert many.node_bytes * 4 < many.text_bytes(10)


def held(memory: DrafterMemory) -> int:
    """Bytes of all tensors that a memory has, however deep they are kept, each storage once."""
    found: dict[int, int] = {}
    seen: set[int] = set()

    def walk(thing: object) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, list | tuple):
            for each in thing:
                walk(each)
        elif type(thing).__name__ in ("InputMemory", "NodeStates", "States"):
            for name, each in vars(thing).items():
                if name != "_model":
                    walk(each)

    walk(memory)
    return sum(found.values())
