"""The target as its own drafter: the drafter service as it is, with the target for a model.

Every guess of its first rank must be what the target emits, at every temperature. A drafter that keys its noise in
another way than the verifier does keeps all answers right and loses half of its acceptance: only this shows it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from dendro.calls import Hello
from dendro.state import MemoryStates
from dendro.tree import DraftTree
from torch import Tensor
from tree_kernels.state_step.reference import Slots
from tree_layers.states import States, StateShape

from drafter_service.engine import DrafterEngine, slots_for
from drafter_service.runner import Runner
from verifier_service.engine import VerifierEngine

SESSIONS, CHUNK = 2, 64


class OwnModel:
    """A verifier's target in the form of a drafter's model. Its memory of a text is the text: a count, and the tokens.

    Slow, a target's forward for every row: for checks of a few answers.
    """

    def __init__(self, verifier: VerifierEngine, vocabulary: int, longest: int) -> None:
        self._verifier = verifier
        self.vocabulary = vocabulary
        self.shapes = [StateShape((1 + longest,), (1, 1))]

    def step(self, tokens: Tensor, states: States, source: Tensor, target: Slots) -> Tensor:
        return self.chain(tokens[:, None], torch.ones_like(tokens), states, source, target)[:, 0]

    def chain(self, tokens: Tensor, lengths: Tensor, states: States, source: Tensor, target: Slots) -> Tensor:
        read = states.recurrent[0].index_select(0, source)[:, None].repeat(1, tokens.shape[1], 1)
        for row, length in enumerate(lengths.tolist()):
            held = int(read[row, 0, 0])
            for time in range(tokens.shape[1]):
                count = min(time + 1, length)
                read[row, time, 0] = held + count
                read[row, time, 1 + held : 1 + held + count] = tokens[row, :count].float()
        states.recurrent[0][target] = read[:, -1]
        states.conv[0][target] = 0
        return read

    def logits(self, hidden: Tensor) -> Tensor:
        texts = [row[1 : 1 + int(row[0])].long().tolist() for row in hidden]
        return torch.cat([self._verifier.logits_of(text, DraftTree.root_only(text[-1])) for text in texts])


def own_drafter(verifier: VerifierEngine, hello: Hello) -> DrafterEngine:
    """The drafter service around the target of a verifier that says `hello` of itself. Not started yet."""
    model = OwnModel(verifier, hello.vocabulary, hello.max_length + hello.max_depth)
    said = replace(hello, dtype="float32", exactness="", end_ids=())
    runner = Runner(model, slots_for(SESSIONS, hello.max_rows, hello.max_depth), torch.float32, torch.device("cpu"))
    return DrafterEngine(said, runner, MemoryStates(), SESSIONS, CHUNK, threads=1)
