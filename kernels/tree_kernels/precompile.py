"""Compiles kernels into the cache: `python -m tree_kernels.precompile MODULE ...`.

For the time in which the processes that need them start. One of them that needs a module meanwhile waits for the
module, or compiles one whose turn has not come.
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
