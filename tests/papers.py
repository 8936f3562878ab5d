"""Writes the configurations and prompts with which the papers' comparisons are measured at the size of the bundled
models (docs/papers.md).

    python -m tests.papers FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from cluster.config import DEMO_MODELS
from cluster.demo.kinds import KINDS, kind_prompts
from cluster.measure.targets import COSTLY, MAMBA2, target_config

PROMPTS, PROMPT_TOKENS = 8, 128
"""Prompts of each kind, and their tokens."""
ALL = ("(1,1,1,1,1)", "(3,2,1)", "dynamic(4,5,15)")
"""A chain, and a static and a dynamic tree of 15 guesses: arms of each drafter."""
OF_MAMBA2 = ("(1,1)", "(1,1,1,1,1,1,1,1)", "until(0.5,8)", "(3,2,2,1,1)")
"""Further arms of the Mamba-2 drafter: chains of other lengths, one that stops, and the tree of Mamba Drafters."""


def arms(drafter: str) -> list[str]:
    """The arms of a drafter by their full names."""
    return [f"{drafter}:{shape}" for shape in (*ALL, *(OF_MAMBA2 if drafter == "mamba2" else ()))]


def configuration(target: str, drafters: tuple[str, ...]) -> dict[str, object]:
    """A costly target with these drafters, whose policy chooses among their arms."""
    (served,) = target_config(DEMO_MODELS, target).targets.values()
    return {
        "targets": {
            target: {
                "checkpoint": str(served.checkpoint),
                "dtype": served.dtype,
                "threads": served.threads,
                "share_prefixes": False,
            }
        },
        "drafters": {name: {"checkpoint": str(DEMO_MODELS / name)} for name in drafters},
        "speculation": {"proposers": [], "arms": ["off", *(arm for name in drafters for arm in arms(name))]},
    }


def write(folder: Path) -> None:
    """Write `transformer.yaml`, `state-space.yaml` and `prompts.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, target, drafters in (
        ("transformer", COSTLY, ("mamba2", "mamba", "llama")),
        ("state-space", MAMBA2, ("mamba2",)),
    ):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(configuration(target, drafters), sort_keys=False))
    lines = [
        json.dumps({"category": kind, "text": prompt.text})
        for kind in KINDS
        for prompt in kind_prompts(kind, PROMPTS, PROMPT_TOKENS)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
