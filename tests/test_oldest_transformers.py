"""With the oldest transformers that pyproject.toml allows, all our modules can be imported, and targets have the same
logits as with the installed one.

That release and its dependencies are installed into a folder that comes first on the path. Torch is the installed one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from dendro.tree import DraftTree

from tests.support import tiny_hybrids, tiny_models
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

ROOT = Path(__file__).parents[1]
OURS = (
    "protos/dendro",
    "kernels/tree_kernels",
    "kernels/tree_layers",
    "drafter_service",
    "verifier_service",
    "cluster",
)

LOADED = """
import importlib, sys
import transformers
assert transformers.__version__ == sys.argv[1], transformers.__version__
for name in sys.argv[3:]:
    importlib.import_module(name)
from pathlib import Path
import torch
from tests.test_oldest_transformers import logits_of
for family, expected in torch.load(Path(sys.argv[2]) / "logits.pt").items():
    assert (logits_of(Path(sys.argv[2]) / family) - expected).abs().max() < 1e-4, family
print("loaded")
"""
HYBRIDS = ("mamba2", "bamba", "mamba_in_llama", "granitemoehybrid", "jamba")


def logits_of(folder):
    """A target's logits of a small tree."""
    engine = VerifierEngine.load(
        folder, VerifierOptions(name="tiny", dtype=torch.float32, max_length=64, max_sessions=1)
    )
    return engine.logits_of([5, 6, 7], DraftTree.of([7, 8, 9], [-1, 0, 0])).as_subclass(torch.Tensor)


def oldest_release() -> str:
    """The lower bound of transformers in pyproject.toml, with three numbers."""
    serve = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    bound = next(found for each in serve if (found := re.match(r"transformers>=([\d.]+)", each)))
    return ".".join([*bound[1].split("."), "0", "0"][:3])


def modules() -> list[str]:
    """All our modules but `__main__`."""
    found = []
    for folder in OURS:
        root = (ROOT / folder).parent if folder.count("/") else ROOT
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = file.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
            if not name.endswith("__main__"):
                found.append(name)
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_modules_import_and_targets_have_the_same_logits_with_the_oldest_transformers(tmp_path):
    version = oldest_release()
    oldest = tmp_path / "oldest"
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", oldest, f"transformers=={version}"],
        capture_output=True,
        text=True,
    )
    if fetched.returncode:
        pytest.skip(f"transformers {version} cannot be fetched here: {fetched.stderr.strip()[-200:]}")
    tiny_models.make_checkpoint(
        tmp_path / "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    for family in HYBRIDS:
        tiny_hybrids.make_checkpoint(tmp_path / family, family)
    torch.save({family: logits_of(tmp_path / family) for family in ("llama", *HYBRIDS)}, tmp_path / "logits.pt")
    paths = [oldest, *(ROOT / each for each in (".", "protos", "kernels"))]
    ran = subprocess.run(
        [sys.executable, "-c", LOADED, version, str(tmp_path), *modules()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip().endswith("loaded"), ran.stderr[-3000:]
