"""Prints the code of kernels: `python -m tree_kernels.printing MODULE [NAME] [--assembly]`.

It prints LLVM's representation after optimisation, or with --assembly the instructions for this processor.
"""

from __future__ import annotations

import argparse

from tree_kernels.compiling import optimised


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the code of a module's kernels as they are compiled here.")
    parser.add_argument("module", help="for example tree_kernels.ranking.loops")
    parser.add_argument("name", nargs="?", help="a kernel's name in KERNELS, or TILES; default: all")
    parser.add_argument("--assembly", action="store_true", help="instructions in place of LLVM's representation")
    given = parser.parse_args()
    for name, _, _, module, machine in optimised(given.module):
        if given.name in (None, name):
            print(machine.emit_assembly(module) if given.assembly else str(module))


if __name__ == "__main__":
    main()
