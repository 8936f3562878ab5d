"""Tests row independence with other instructions of a library.

python -m tests.support.capabilities NAME VALUE FOLDER

NAME is an environment variable that this process was started with: ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA or MKL_CBWR.
The process first prints what the library reports that it uses. Where that is not VALUE, it prints NOT RUN and exits
with NOT_RUN. Else it runs the tests, and a small local certify of a target with experts, made in FOLDER; it exits with
0 if all pass.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

NOT_RUN = 75
TESTS = Path(__file__).parents[1]

CHECKS = (
    "kernels/test_elementwise.py",
    "kernels/test_linear.py",
    "kernels/test_tree_scan.py::test_a_tree_scan_in_order_equals_each_path_separately_bit_for_bit",
    "verifier_service/test_experts.py::test_every_kind_of_experts_has_the_librarys_sums_and_independent_rows",
    "verifier_service/test_experts.py::test_every_familys_rows_are_independent",
    "verifier_service/test_states.py::test_every_familys_rows_are_independent",
)
ISA_NAMES = {  # oneDNN's reports, by the value of the variable
    "AVX2": "Intel AVX2",
    "AVX512_CORE": "Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions",
    "AVX512_CORE_BF16": "Intel AVX-512 with Intel DL Boost and bfloat16 support",
    "AVX512_CORE_AMX": "Intel AVX-512 with float16, Intel DL Boost and bfloat16 support and Intel AMX",
}
PROBES = {
    # torch reports the value of the variable; on a processor without these instructions its first loop crashes.
    "ATEN_CPU_CAPABILITY": "import torch; torch.sigmoid(torch.zeros(4096)); "
    "print('reports', torch.backends.cpu.get_cpu_capability())",
    "ONEDNN_MAX_CPU_ISA": "import torch; torch.nn.functional.gelu(torch.randn(64, 64))",
    "MKL_CBWR": "import torch; torch.randn(64, 64) @ torch.randn(64, 64)",
}


def reported(name: str) -> str:
    """What the library reports that it uses, in a new process with this one's environment; empty without a report."""
    loud = {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
    probe = subprocess.run([sys.executable, "-c", PROBES[name]], env=os.environ | loud, capture_output=True, text=True)
    pattern = {
        "ATEN_CPU_CAPABILITY": r"^reports (.+)$",
        "ONEDNN_MAX_CPU_ISA": r"info,cpu,isa:(.+)$",
        "MKL_CBWR": r" CNR:(\S+) ",
    }[name]
    found = re.search(pattern, probe.stdout + probe.stderr, re.MULTILINE)
    return found[1].strip() if found else ""


def honoured(name: str, value: str, report: str) -> bool:
    """Whether the library reports that it uses what the value asks for."""
    expected = ISA_NAMES[value] if name == "ONEDNN_MAX_CPU_ISA" else value
    return report.casefold() == expected.casefold()


def certified(folder: Path) -> bool:
    """Whether a local cluster keeps every promise of `dendro certify`; its target has experts, in float32."""
    from cluster.certify.command import CertifySize, run_certify
    from cluster.config import DEMO_MODELS, pair_config
    from tests.support.tiny_experts import make_checkpoint

    make_checkpoint(folder, "mixtral", vocab_size=4096)
    shutil.copy(DEMO_MODELS / "target" / "tokenizer.json", folder)
    config = pair_config(folder, [DEMO_MODELS / "mamba2"])
    targets = {name: target.model_copy(update={"dtype": "float32"}) for name, target in config.targets.items()}
    size = CertifySize(
        greedy_prompts=1,
        greedy_tokens=16,
        prompts=1,
        tokens=12,
        draws=4_000,
        far_draws=60,
        own_prompts=1,
        own_tokens=12,
        stop_draws=1,
        combinations=2,
    )
    found = asyncio.run(
        run_certify(config.model_copy(update={"targets": targets}), None, True, size, lambda *_: lambda: None, print)
    )
    return all(promise.kept is True for promise in found)


def main(name: str, value: str, folder: Path) -> int:
    report = reported(name)
    if not honoured(name, value, report):
        print(f"NOT RUN: {name}={value} is not honoured here; the library reports {report or 'nothing'}")
        return NOT_RUN
    print(f"RUN: {name}={value}; the library reports {report}", flush=True)
    import pytest

    status = pytest.main(["-q", "-p", "no:cacheprovider", *(str(TESTS / check) for check in CHECKS)])
    return int(status) or int(not certified(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
