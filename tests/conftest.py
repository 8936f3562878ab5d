"""What every process of ours sets before it imports torch, for the tests as well (see CONTRIBUTING.md)."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
