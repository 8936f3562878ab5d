"""A pickle that must not be loaded."""

from __future__ import annotations


class UnsafePickle:
    """Runs code when unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('code of a checkpoint has run')",))
