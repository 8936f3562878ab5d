"""Target and drafter on one GPU, with the router and the policy: tokens a second with trees over those without.

The target has the shape of a Llama of 6.8 billion parameters and computes the function of the demo's
(`deep_target.py`), so the drafter's guesses are as right as on the demo's texts. All runs in one process: no Ray, gRPC
between peers, or Redis.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from cluster.config import demo_models
from cluster.demo.prompts import held_out_prompts
from tests.gpu.deep_target import write_deep, write_deep_drafter
from tests.gpu.step import DRY, require_device, write_result

SIZES = (768, 1280, 5, 4) if DRY else (4096, 14336, 32, 8)
"""Width, hidden units, layers and heads of keys of the target."""
DRAFTER_SIZES = (2, 3) if DRY else (4, 24)
"""How many times as wide as the demo's drafter, and layers."""
PROMPTS, PROMPT_TOKENS, TOKENS = (2, 64, 16) if DRY else (4, 128, 64)
ARMS = ["(1)", "(1,1,1,1)", "(3,2,1)", "beam(6,4)"]


def configuration(target: Path, drafter: Path) -> dict[str, object]:
    """Both on the device, if there is one; without the prefix cache, as the prompts repeat."""
    shared = {"dtype": "bfloat16", "threads": 4}

    def on_device(gpu: float) -> dict[str, object]:
        return {"resources": {"cpu": 1.0, "gpu": 0.0 if DRY else gpu}}

    return {
        "targets": {"deep": {"checkpoint": str(target), "max_sessions": 4, **shared, **on_device(0.9)}},
        "drafters": {"mamba2": {"checkpoint": str(drafter), **shared, **on_device(0.1)}},
        "speculation": {"proposers": ["lookup"], "arms": ["off", *(f"mamba2:{shape}" for shape in ARMS)]},
    }


def over_off(row: dict[str, Any]) -> float:
    ratios: dict[str, dict[str, float]] = row.get("ratio_over") or {}
    return ratios.get("off", {}).get("median", 1.0)


def line_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Arm, temperature, tokens a second of decoding, ratio to `off`, tokens and milliseconds of a round."""
    parts = row["round_ms"]
    times = (f"{parts[part]:.2f}" for part in ("draft", "verify", "queue", "hop", "total")) if parts else ()
    speed = f"{row['decode_tokens_per_second']:.1f}", f"x{over_off(row):.2f}", f"{row['emitted_per_round']:.2f}"
    return row["name"], f"T={row['temperature']:g}", *speed, *times


def measured(folder: Path, name: str, drafter: Path) -> dict[str, Any]:
    """Rows and differences of `bench speed` with a drafter."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(configuration(folder / "deep", drafter)))
    bench = ["-m", "cluster.cli", "bench", "speed", str(folder / f"{name}.yaml"), "--local", "--alone"]
    bench += ["--prompt-file", str(folder / "prompts.jsonl"), "--prompts", str(PROMPTS), "--tokens", str(TOKENS)]
    out = folder / f"{name}.json"
    subprocess.run([sys.executable, *bench, "--repetitions", "1", "--json", str(out)])
    report = json.loads(out.read_text()) if out.is_file() else {}
    rows = report.get("rows", [])
    print(f"{name} drafter", flush=True)
    for row in rows:
        print(*(f"{each:>11}" for each in line_of(row)), flush=True)
    return {"rows": rows, "differences": report.get("differences", [])}


def main() -> None:
    require_device()
    memory = Path("/dev/shm")
    models, began = demo_models(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() and not DRY else None) as name:
        folder = Path(name)
        parameters = write_deep(models / "target", folder / "deep", *SIZES)
        drafted = write_deep_drafter(models / "mamba2", folder / "drafter", *DRAFTER_SIZES)
        drafters = {"large": folder / "drafter", "small": models / "mamba2"}
        prompts = held_out_prompts(PROMPTS, PROMPT_TOKENS, models=models)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": each.text}) + "\n" for each in prompts))
        took = time.perf_counter() - began
        print(f"{parameters / 1e9:.2f} and {drafted / 1e9:.3f} billion parameters, written in {took:.1f} s", flush=True)
        found = {}
        for drafter, checkpoint in drafters.items():
            found[drafter] = measured(folder, drafter, checkpoint)
            policy = [over_off(row) for row in found[drafter]["rows"] if row["name"] == "auto"]
            summary = f"policy over off with the {drafter} drafter {' and '.join(f'{each:.2f}' for each in policy)}"
            write_result(summary, parameters=parameters, drafter_parameters=drafted, found=found)
    sys.exit(any(not report["rows"] or report["differences"] for report in found.values()))


main()
