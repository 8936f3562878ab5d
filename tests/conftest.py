"""Sets the environment that our processes set before they import torch (see CONTRIBUTING.md)."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
