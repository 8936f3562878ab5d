"""Acceptance heads (SpecDec++): a trained head on a drafter that predicts the chance of each candidate to be the text's
next token.

A head is one safetensors file: tensors, and facts under a key of the header. Only `read_head` reads it, only
`write_head` writes it. `dendro train head` makes it. The formulas are in `kernels/tree_kernels/acceptance_head`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from dendro.errors import BadRequest
from dendro.tree import RANKED
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tree_kernels.acceptance_head import HeadWeights, head_outputs, log_chances, row_law, row_numbers
from tree_kernels.acceptance_head.constants import LAW_NUMBERS, OUTPUTS

from drafter_service.confidence import CANDIDATES
from drafter_service.models import DrafterModel

HEAD_FILE = "acceptance_head.safetensors"
FACTS = "dendro_acceptance_head"
"""Key of the file's header that holds the facts, as JSON."""
VERSION = 1
MOST_BLOCKS, MOST_DEPTHS, WIDEST = 16, 64, 1 << 16
"""Upper bounds of a head's blocks, depths and width."""


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Sizes of a head, and the drafter that it was trained for. Raises BadRequest for values that no head can have."""

    version: int
    drafter: str  # SHA-256 over the drafter's configuration and weights
    width: int  # the drafter's model width
    vocabulary: int  # the drafter's vocabulary size
    blocks: int  # D, residual blocks
    tied: bool  # True if all blocks share one set of parameters
    depths: int  # tree depths with a calibration of their own
    candidates: int = RANKED  # K

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise BadRequest("version", f"is {self.version}; this release reads {VERSION}")
        for name, most in (("width", WIDEST), ("vocabulary", 1 << 31), ("depths", MOST_DEPTHS)):
            _check_whole(name, getattr(self, name), 1, most)
        _check_whole("blocks", self.blocks, 0, MOST_BLOCKS)
        _check_whole("candidates", self.candidates, CANDIDATES, CANDIDATES)
        if not isinstance(self.drafter, str) or not isinstance(self.tied, bool):
            raise BadRequest("drafter", "must be a text, and `tied` must be true or false")

    @property
    def sets(self) -> int:
        """Number of stored parameter sets of blocks; 1 for tied blocks."""
        return min(self.blocks, 1) if self.tied else self.blocks

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor in the file, by name."""
        width, numbers = self.width, self.candidates - 1 + LAW_NUMBERS
        shapes: dict[str, tuple[int, ...]] = {name: (width,) for name in ("hidden_scale", "token_scale", "bias")}
        shapes |= {"numbers": (numbers, width), "output": (OUTPUTS, width), "output_bias": (OUTPUTS,)}
        shapes["calibration"] = (self.depths, OUTPUTS)
        for number in range(self.sets):
            shapes |= {f"blocks.{number}.weight": (width, width), f"blocks.{number}.bias": (width,)}
        return shapes


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(name, f"must be a whole number from {least} to {most}, got {value!r:.100}")


class AcceptanceHead:
    """Predicts the chance of each candidate to be the text's next token, in plain PyTorch. The compiled form is
    `HeadCalls` of the kernels."""

    def __init__(self, facts: HeadFacts, weights: HeadWeights) -> None:
        self.facts = facts
        self.weights = weights

    def chances(
        self,
        model: DrafterModel,
        hidden: Tensor,
        logits: Tensor,
        ids: Tensor,
        scores: Tensor,
        temperature: float,
        depth: Tensor,
    ) -> Tensor:
        """Log chances of candidates, [rows, k], at most 0, never increasing along a row.

        hidden [rows, d] the drafter's hidden rows   logits [rows, V] of the tokens that may be guessed
        ids, scores [rows, k] of the candidates   depth [rows] int64, 0 for a root
        """
        temperatures = torch.full((len(hidden),), temperature, device=hidden.device)
        law = row_law(logits, ids[:, 0], temperatures)
        candidates = self.facts.candidates
        numbers = row_numbers(scores, law, temperatures, depth, candidates)
        outputs = head_outputs(self.weights, model.normed(hidden), model.embed(ids[:, 0]).float(), numbers)
        return log_chances(outputs, self.weights.calibration, scores, depth, candidates)


def read_head(path: Path, device: torch.device) -> AcceptanceHead:
    """Read a head. Raises BadRequest for a file that is missing or damaged, naming the field of its facts."""
    if not path.is_file():
        raise BadRequest("head", f"there is no file {path}; `dendro train head` makes one")
    try:
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(FACTS)
            if header is None:
                raise BadRequest("head", f"{path} is not an acceptance head: its header has no {FACTS}")
            facts = _facts(path, header)
            names = set(file.keys())
            for name, shape in facts.shapes.items():
                found = list(file.get_slice(name).get_shape()) if name in names else "missing"
                if found != list(shape):
                    raise BadRequest("head", f"{path}: the shape of {name} is {found}, the header says {list(shape)}")
            tensors = {name: file.get_tensor(name).to(device, torch.float32) for name in facts.shapes}
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise BadRequest("head", f"{path} cannot be read: {error}") from error
    if broken := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise BadRequest("head", f"{path}: {broken[0]} has numbers that are not finite")
    return AcceptanceHead(facts, weights_of(facts, tensors))


def weights_of(facts: HeadFacts, tensors: Mapping[str, Tensor]) -> HeadWeights:
    """Arrange a file's tensors as weights. Tied blocks share their tensors."""
    sets = [(tensors[f"blocks.{number}.weight"], tensors[f"blocks.{number}.bias"]) for number in range(facts.sets)]
    blocks = tuple(sets[0] if facts.tied else sets[number] for number in range(facts.blocks))
    names = ("hidden_scale", "token_scale", "numbers", "bias", "output", "output_bias", "calibration")
    return HeadWeights(blocks=blocks, **{name: tensors[name] for name in names})


def _facts(path: Path, header: str) -> HeadFacts:
    try:
        entries = json.loads(header)
    except ValueError as error:
        raise BadRequest("head", f"{path}: its {FACTS} are not JSON: {error}") from error
    known = {field.name for field in fields(HeadFacts)}
    if not isinstance(entries, dict) or set(entries) != known:
        raise BadRequest("head", f"{path}: its {FACTS} must have exactly {', '.join(sorted(known))}")
    try:
        return HeadFacts(**entries)
    except BadRequest as error:
        raise BadRequest(f"head.{error.field}", f"{path}: {error.reason}") from error


def write_head(path: Path, facts: HeadFacts, tensors: Mapping[str, Tensor]) -> None:
    """Write a head. Matrices of blocks are stored in bfloat16, exactly if their numbers were rounded to it before.
    Raises what safetensors raises."""
    stored = {
        name: tensors[name].detach().cpu().to(torch.bfloat16 if _is_matrix(name) else torch.float32).contiguous()
        for name in facts.shapes
    }
    save_file(stored, path, {FACTS: json.dumps(asdict(facts), sort_keys=True)})
    path.chmod(0o644)


def _is_matrix(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(".weight")


def check_head(facts: HeadFacts, model: DrafterModel, fingerprint: str) -> None:
    """Raise BadRequest, naming the field, for a head of another drafter.

    fingerprint: SHA-256 over the drafter's configuration and weights
    """
    for name, own, its in (
        ("width", facts.width, model.hidden_size),
        ("vocabulary", facts.vocabulary, model.vocabulary),
        ("drafter", facts.drafter, fingerprint),
    ):
        if own != its:
            raise BadRequest(
                f"head.{name}",
                f"the head was trained for another drafter: its {name} is {own!s:.16}, this drafter's is {its!s:.16}",
            )
