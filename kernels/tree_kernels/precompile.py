"""Compiles kernels into the cache: `python -m tree_kernels.precompile MODULE ...`.

It is started beside the processes that need the kernels, while they load. A process that needs a module before then
waits if the module is being compiled here, else compiles it itself.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from tree_kernels.kernel_cache import NoKernelsError, load_kernels


def main() -> None:
    for module in sys.argv[1:]:
        with suppress(NoKernelsError):  # the processes that need it log why
            load_kernels(module)


if __name__ == "__main__":
    main()
