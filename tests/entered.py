"""Lines of ours that one `dendro generate --local` runs through: of the whole command, and of its request alone.

    python tests/entered.py [PROJECT] [--request NAME] [--modules]

Runs the command of the checkout in PROJECT (default: this one, at any commit) under a profile function and notes every
function of ours that is entered or resumed, in all threads. The request is what is entered from the first call of the
function whose qualified name ends with NAME until it returns: engines are loaded before it, and stopped after it.
"""

from __future__ import annotations

import argparse
import dis
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType

COMMAND = ("generate", "def area(radius):", "--local", "--max-new-tokens", "48")
REQUEST = "Ingress.generate"
FOLDERS = ("cluster", "protos", "kernels", "drafter_service", "verifier_service")
OPTIMIZED = 0x1  # CO_OPTIMIZED: a function; bodies of classes and modules lack it


class Entered:
    """The functions below some folders that are entered while it is the profile function."""

    def __init__(self, folders: Iterable[Path], request: str) -> None:
        self._prefixes = tuple(f"{folder}{os.sep}" for folder in folders)
        self._request = request
        self._frame: FrameType | None = None  # of the request; a generator keeps one frame over all its steps
        self._requested = False
        self.command: set[CodeType] = set()
        self.request: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(self._prefixes) or not code.co_flags & OPTIMIZED or code.co_firstlineno < 2:
            return
        if event == "call":
            if not self._requested and code.co_qualname.endswith(self._request):
                self._frame, self._requested = frame, True
            self.command.add(code)
            if self._frame is not None:
                self.request.add(code)
        elif event == "return" and frame is self._frame and value is None and not suspended(frame):
            self._frame = None


def suspended(frame: FrameType) -> bool:
    """Whether a generator or coroutine that leaves its frame will go on in it."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "YIELD_VALUE"


def lines_of(codes: Iterable[CodeType]) -> dict[Path, int]:
    """The lines of these functions by file; without generated code."""
    lines = defaultdict[str, set[int]](set)
    for code in codes:
        last = max(line or 0 for *_, line in code.co_lines())
        lines[code.co_filename].update(range(code.co_firstlineno, last + 1))
    return {Path(name): len(found) for name, found in lines.items() if "_pb2" not in name}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", nargs="?", type=Path, default=Path(__file__).parents[1], metavar="PROJECT")
    parser.add_argument("--request", default=REQUEST, metavar="NAME", help=f"default: {REQUEST}")
    parser.add_argument("--modules", action="store_true", help="also print each module")
    given = parser.parse_args(arguments)
    project = given.project.resolve()
    sys.path[:0] = [str(project / part) for part in ("", "protos", "kernels")]
    os.chdir(project)
    from cluster.cli import app

    entered = Entered([project / folder for folder in FOLDERS], given.request)
    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        app(list(COMMAND), standalone_mode=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    for title, codes in (("the command", entered.command), ("its request", entered.request)):
        functions = lines_of(codes)
        files = {path: len(path.read_text().splitlines()) for path in functions}
        print(f"{title}: {sum(functions.values())} lines of functions entered, in {len(files)} modules", end="")
        print(f" of {sum(files.values())} lines")
        for path in sorted(files, key=lambda path: -files[path]) if given.modules else ():
            print(f"{files[path]:6} {functions[path]:6} {path.relative_to(project)}")


if __name__ == "__main__":
    main(sys.argv[1:])
