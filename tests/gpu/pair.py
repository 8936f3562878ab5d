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
from tests.gpu.deep_target import write_deep
from tests.gpu.step import DRY, require_device, write_result

SIZES = (512, 1280, 5, 4) if DRY else (4096, 14336, 32, 8)
"""Width, hidden units, layers and heads of keys."""
PROMPTS, PROMPT_TOKENS, TOKENS = (2, 64, 16) if DRY else (6, 128, 96)
DRAFTER = "mamba2"
ARMS = ["(1)", "(1,1)", "(1,1,1,1)", "(3,2,1)", "(4,2,2,1)", "beam(6,4)"]


def configuration(folder: Path, models: Path) -> dict[str, object]:
    """Both on the device, if there is one; without the prefix cache, as the prompts repeat."""
    shared = {"dtype": "bfloat16", "threads": 4}

    def on_device(gpu: float) -> dict[str, object]:
        return {"resources": {"cpu": 1.0, "gpu": 0.0 if DRY else gpu}}

    return {
        "targets": {"deep": {"checkpoint": str(folder), "max_sessions": 4, **shared, **on_device(0.9)}},
        "drafters": {DRAFTER: {"checkpoint": str(models / DRAFTER), **shared, **on_device(0.1)}},
        "speculation": {"proposers": ["lookup"], "arms": ["off", *(f"{DRAFTER}:{shape}" for shape in ARMS)]},
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


def main() -> None:
    require_device()
    memory = Path("/dev/shm")
    models, began = demo_models(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() and not DRY else None) as name:
        folder = Path(name)
        parameters = write_deep(models / "target", folder / "deep", *SIZES)
        (folder / "pair.yaml").write_text(yaml.safe_dump(configuration(folder / "deep", models)))
        prompts = held_out_prompts(PROMPTS, PROMPT_TOKENS, models=models)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": each.text}) + "\n" for each in prompts))
        print(f"{parameters / 1e9:.2f} billion parameters, written in {time.perf_counter() - began:.1f} s", flush=True)
        bench = ["-m", "cluster.cli", "bench", "speed", str(folder / "pair.yaml"), "--local", "--alone"]
        bench += ["--prompt-file", str(folder / "prompts.jsonl"), "--prompts", str(PROMPTS), "--tokens", str(TOKENS)]
        bench += ["--repetitions", "1", "--json", str(folder / "found.json")]
        ran = subprocess.run([sys.executable, *bench])
        report = json.loads((folder / "found.json").read_text()) if (folder / "found.json").is_file() else {}
    rows = report.get("rows", ())
    for row in rows:
        print(*(f"{each:>11}" for each in line_of(row)), flush=True)
    policy = " and ".join(f"{over_off(row):.2f}" for row in rows if row["name"] == "auto")
    write_result(
        f"policy over off {policy}", parameters=parameters, rows=rows, differences=report.get("differences", [])
    )
    sys.exit(ran.returncode)


main()
