"""Sets the environment that our processes set before they import torch (see CONTRIBUTING.md)."""

import os
from importlib.util import find_spec

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

if find_spec("hypothesis") is not None:  # a GPU machine may lack it
    from hypothesis import settings

    settings.register_profile("dendro", settings(), deadline=None)  # no test fails because the machine is busy
    settings.load_profile("dendro")
