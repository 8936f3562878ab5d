"""Tries causal families of transformers as targets: each is served and certified here, or refused for a property.

python -m tests.families                write docs/families.md from tests/families.json
python -m tests.families --check        exit with 1 where docs/families.md is out of date
python -m tests.families --record NAME  try a family, or `all`, and write the result into tests/families.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from dendro.errors import BadRequest
from dendro.tree import DraftTree
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.support.tiny_families import FAMILIES, VOCABULARY, WINDOW, make_checkpoint
from verifier_service.engine import VerifierEngine
from verifier_service.models.families import FamilyError, Property
from verifier_service.options import VerifierOptions

DATA = Path(__file__).parent / "families.json"
PAGE = Path(__file__).parent.parent / "docs" / "families.md"

LENGTHS = (1, 7, 101)
"""Tokens of the texts: the last is longer than a page and than every window."""
GREEDY = 6
"""Tokens of a greedy answer."""
TOLERANCE = 1e-3
"""How far a row's float32 logits may be from the library's, as a share of their spread."""

HOW_TO_RECORD = "python -m tests.families --record {family}"


@dataclass(frozen=True, slots=True)
class Tried:
    """The result for a family."""

    refused: Property | None
    message: str = ""  # of the refusal


def try_family(family: str, folder: Path) -> Tried:
    """Make a tiny checkpoint in the folder and try to serve it. Raises AssertionError if it is served wrongly."""
    logging.set_verbosity_error()
    made = make_checkpoint(folder, family)
    try:
        engine = _engine(folder, torch.float32)
    except BadRequest as error:
        assert isinstance(error.__cause__, FamilyError), f"refused for no property: {error}"
        return Tried(error.__cause__.property, str(error))
    assert made, "it is served, though transformers makes no model of it"
    _has_the_librarys_logits(engine, folder)
    for each in (engine, _engine(folder, torch.bfloat16)):
        _certify_trees(each)
    return Tried(None)


def _engine(folder: Path, dtype: torch.dtype) -> VerifierEngine:
    limits = {"max_length": 192, "max_sessions": 1, "max_waiting": 0, "max_depth": 8, "prefill_chunk": 128}
    return VerifierEngine.load(folder, VerifierOptions(name="tiny", dtype=dtype, **limits))


def _text(length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()
    return ids


def _tree(root: int) -> DraftTree:
    return DraftTree.of([root, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 3, 2])


def _paths(ids: list[int]) -> list[list[int]]:
    """The texts that the rows of `_tree` end."""
    return [ids, [*ids, 3], [*ids, 4], [*ids, 3, 5], [*ids, 3, 5, 6], [*ids, 4, 7]]


def _has_the_librarys_logits(engine: VerifierEngine, folder: Path) -> None:
    """Assert that greedy answers are the library's, and that the logits of trees are the library's up to TOLERANCE."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def oracle(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids]), use_cache=False).logits[0, -1, :VOCABULARY].float()

    for length in LENGTHS:
        ids = _text(length)
        found = engine.logits_of(ids, _tree(ids[-1]))
        truth = torch.stack([oracle(path) for path in _paths(ids)])
        spread = (truth - truth.mean(-1, keepdim=True)).norm(dim=-1)
        off = float(((found - truth).norm(dim=-1) / spread).max())
        assert off < TOLERANCE, f"off by {off:.3g} of the logits' spread after {length} tokens"
        for _ in range(GREEDY):
            plain = engine.logits_of(ids, DraftTree.root_only(ids[-1]))[0]
            token = int(oracle(ids).argmax())
            assert int(plain.argmax()) == token, f"another token than the library's after {len(ids)}"
            ids.append(token)


def _certify_trees(engine: VerifierEngine) -> None:
    """Assert that a row of a tree has the bits of plain decoding if the engine announces `bitwise`."""
    for length in LENGTHS:
        ids = _text(length)
        found = engine.logits_of(ids, _tree(ids[-1]))
        for row, path in zip(found, _paths(ids), strict=True):
            plain = engine.logits_of(path, DraftTree.root_only(path[-1]))[0]
            assert torch.isfinite(plain).all()
            if engine._hello.exactness == "bitwise":
                assert torch.equal(row, plain), f"a row of a tree has other bits after {len(path)} tokens"


def read() -> dict[str, Any]:
    """The recorded results: `served`, names of families; `refused`, the property's name by family."""
    data: dict[str, Any] = json.loads(DATA.read_text())
    return data


def record(families: Sequence[str]) -> None:
    """Try these families and write the results into the file."""
    data = read() if DATA.is_file() else {"served": [], "refused": {}}
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            found = try_family(family, Path(folder))
        served = {*data["served"]} - {family}
        data["refused"].pop(family, None)
        if found.refused is None:
            served.add(family)
        else:
            data["refused"][family] = found.refused.name
        data |= {"served": sorted(served), "refused": dict(sorted(data["refused"].items()))}
        DATA.write_text(json.dumps({"transformers": transformers.__version__} | data, indent=1) + "\n")


def written(data: dict[str, Any]) -> str:
    """The page of the recorded results."""
    served, refused = data["served"], data["refused"]
    by_property = {why: [family for family, found in refused.items() if found == why.name] for why in Property}
    lines = [
        "# Families that can be targets",
        "",
        "Written by `python -m tests.families` from `tests/families.json`. A family is a `model_type` of transformers;",
        f"version {data['transformers']} was tested. A target of a family that is not served is refused when it is",
        "loaded; the error names the property that is the reason. The check is of the checkpoint itself, not of its",
        "family's name: a checkpoint of a served family is refused where its settings give it such a property (rotary",
        "embeddings of type `dynamic` or `longrope`, for example), and one of a family in neither table is loaded if",
        "it passes.",
        "",
        f"## Served: {len(served)}",
        "",
        "For each of these a tiny checkpoint of random weights, with the family's default settings and every kind of",
        "its layers, is loaded by `tests/verifier_service/test_families.py`, which checks:",
        "",
        f"- float32 logits after texts of {', '.join(map(str, LENGTHS[:-1]))} and {LENGTHS[-1]} tokens, where windows",
        f"  are of {WINDOW} tokens, are those of transformers' forward of the whole text, off by less than {TOLERANCE}",
        f"  of their spread; {GREEDY} greedy tokens after each are the same;",
        "- where the verifier announces `bitwise`, rows of a tree have the bits of plain decoding, in float32 and",
        "  in bfloat16.",
        "",
        "Each is also loaded with every limit, scale, bias and switch of its configuration set, limits to numbers that",
        "few tokens reach (`tests/verifier_service/test_rare_limits.py`): float32 logits and greedy tokens are",
        "transformers'.",
        "",
        "Whether a verifier announces `bitwise` or `margin` depends on the processor, and is found when it is loaded.",
        "",
        *_columns(served, 4),
        "",
        f"## Refused: {len(refused)}",
        "",
        "| property | families | why |",
        "|---|---|---|",
        *(f"| `{why.name}` | {', '.join(found)} | {why} |" for why, found in by_property.items() if found),
        "",
        "Properties that no family has by default; a checkpoint's settings may give it one:",
        "",
        *(f"- `{why.name}`: {why}" for why, found in by_property.items() if not found),
    ]
    return "\n".join(lines) + "\n"


def _columns(names: Sequence[str], count: int) -> list[str]:
    """A table of names, sorted down its columns."""
    rows = -(-len(names) // count)
    cells = [
        [names[place] if place < len(names) else "" for place in range(row, rows * count, rows)] for row in range(rows)
    ]
    return ["| " * count + "|", "|---" * count + "|", *("| " + " | ".join(row) + " |" for row in cells)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--record", nargs="+", metavar="NAME", default=[])
    given = parser.parse_args()
    if given.record:
        record(FAMILIES if given.record == ["all"] else given.record)
    page = written(read())
    if given.check:
        return 0 if PAGE.is_file() and PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
