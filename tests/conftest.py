"""Sets the environment that our processes set before they import torch and gRPC (see CONTRIBUTING.md)."""

import os
from importlib.util import find_spec

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

if find_spec("hypothesis") is not None:  # a GPU machine may lack it
    from hypothesis import settings

    settings.register_profile("dendro", settings(), deadline=None)  # no test fails because the machine is busy
    settings.load_profile("dendro")


def pytest_sessionstart(session):
    """Compile the kernels once, before any test: a machine that runs the tests for the first time has none."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        return  # a worker of pytest-xdist, whose controller did it; or a few tests, which compile what they need
    from tree_kernels import matmul, row_functions, tree_levels
    from tree_kernels.mamba_level.cpu import why_not_compiled

    matmul.why_not_packed()
    row_functions.why_not_compiled()
    for kind in ("mamba", "mamba2"):
        why_not_compiled(kind)
    tree_levels.why_not_compiled()


@pytest.fixture
def opened_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds wait for their drafter's opening, so that an answer of a tiny target has trees."""
    from tests.support.opened_drafters import wait_for_openings

    wait_for_openings(monkeypatch)
