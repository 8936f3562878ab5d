"""The target as its own drafter: the unchanged drafter service with the target as its model.

Every first-ranked guess must be the token that the target emits, at every temperature. A drafter that keys its noise
differently from the verifier leaves all answers right and loses half of its acceptance; only this check detects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from dendro.calls import Hello
from dendro.state import Arrays, MemoryStates
from dendro.tree import DraftTree
from torch import Tensor

from drafter_service.engine import DrafterEngine, node_slots, text_slots
from drafter_service.options import DrafterOptions
from drafter_service.plan import EMPTY_TEXT, NO_NODE, Chains, Level, TextFold
from drafter_service.runner import DraftRunner
from verifier_service.engine import VerifierEngine

SESSIONS, CHUNK = 2, 64


class TokenMemory:
    """A drafter memory whose state of a text or node is its tokens. A hidden row is their number, then the tokens."""

    layout = "tokens-v1"
    node_bytes = 0

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._texts: dict[int, list[int]] = {EMPTY_TEXT: []}
        self._nodes: dict[int, list[int]] = {}

    def text_bytes(self, longest: int) -> int:
        return 8 * longest

    def save(self, text: int, tokens: int) -> Arrays:
        return {"tokens": np.array(self._texts[text], np.int64)}

    def check(self, arrays: Arrays, tokens: int) -> None:
        if set(arrays) != {"tokens"}:
            raise ValueError(f"the arrays are {sorted(arrays)}, not ['tokens']")

    def load(self, text: int, arrays: Arrays) -> None:
        self._texts[text] = arrays["tokens"].tolist()

    def chain(self, rows: Chains) -> Tensor:
        read = torch.zeros(*rows.tokens.shape, 1 + self._longest, dtype=torch.int64)
        for row, (kept, length) in enumerate(zip(rows.kept.tolist(), rows.lengths.tolist(), strict=True)):
            before, new = self._texts[int(rows.source[row])], rows.tokens[row].tolist()
            for time in range(length):
                self._write_row(read[row, time], before + new[: time + 1])
            self._texts[int(rows.target[row])] = before + new[:kept]
            if len(rows.roots):
                self._nodes[int(rows.roots[row])] = before + new[:length]
        return read

    def level(self, rows: Level) -> Tensor:
        read = torch.zeros(len(rows.tokens), 1 + self._longest, dtype=torch.int64)
        arrays = (rows.tokens, rows.parents, rows.slots, rows.text_of_rows)
        each = zip(*(array.tolist() for array in arrays), strict=True)
        for row, (token, parent, slot, text) in enumerate(each):
            above = self._texts[text] if parent == NO_NODE else self._nodes[parent]
            self._nodes[slot] = [*above, token]
            self._write_row(read[row], self._nodes[slot])
        return read

    def fold(self, folds: Sequence[TextFold]) -> None:
        for fold in folds:
            self._texts[fold.target] = self._nodes[fold.path[-1]]

    def _write_row(self, row: Tensor, text: list[int]) -> None:
        row[0] = len(text)
        row[1 : 1 + len(text)] = torch.tensor(text)


class OwnModel:
    """A verifier's target with the interface of a drafter's model.

    Slow, one forward of the target per row: for checks of a few answers.
    """

    form = "eager"
    draft_ids = None

    def __init__(self, verifier: VerifierEngine, vocabulary: int, longest: int) -> None:
        self._verifier = verifier
        self.vocabulary = vocabulary
        self.max_length = longest
        self.hidden_size = 1 + longest

    def memory(self, texts: int, nodes: int) -> TokenMemory:
        return TokenMemory(self.max_length)

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden.float()

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[..., None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        texts = [row[1 : 1 + int(row[0])].tolist() for row in hidden]
        return torch.cat([self._verifier.logits_of(text, DraftTree.root_only(text[-1])) for text in texts])


def own_drafter(verifier: VerifierEngine, hello: Hello) -> DrafterEngine:
    """The drafter service around the target of a verifier with this hello; not started."""
    model = OwnModel(verifier, hello.vocabulary, hello.max_length + hello.max_depth)
    drafter_hello = replace(hello, dtype="float32", exactness="", end_ids=())
    nodes = node_slots(hello.max_rows, hello.max_depth)
    runner = DraftRunner(model, text_slots(SESSIONS), nodes, torch.device("cpu"))
    options = DrafterOptions(name=hello.model, max_sessions=SESSIONS, prefill_chunk=CHUNK)
    return DrafterEngine(drafter_hello, runner, MemoryStates(), options)
