"""Compiles the kernels of a module with numba. Imported only while kernels are compiled."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection
from typing import Any

from llvmlite import binding
from numba import cfunc, types

from tree_kernels.machine_code import LIBRARY, Code, link, target_machine

ARGUMENTS = {"i": types.int64, "f": types.float32}


def machine_code(module: str) -> Code:
    """The machine code of a module's kernels.

    The module has a table KERNELS of functions and their arguments, and may have TILES, a module of llvmlite's with
    functions that the kernels call.
    """
    logging.getLogger("numba").setLevel(logging.WARNING)  # it logs its passes at DEBUG
    found = importlib.import_module(module)
    code = Code()
    if hasattr(found, "TILES"):
        parsed = binding.parse_assembly(str(found.TILES))
        parsed.verify()
        code.objects.append(target_machine().emit_object(parsed))
        code.shared = [function.name for function in parsed.functions if not function.is_declaration]
        link(code)  # numba looks the symbols up
    for name, (function, arguments) in found.KERNELS.items():
        made = cfunc(types.void(*(ARGUMENTS[each] for each in arguments)), error_model="numpy")(function)
        # numba keeps no object code of a cfunc that it does not cache, so it is emitted once more.
        library = made._library
        _check(name, library._final_module, {*LIBRARY, *code.shared})
        code.objects.append(library._codegen._tm.emit_object(library._final_module))
        code.kernels[name] = (made.native_name, arguments)
    return code


def _check(kernel: str, module: Any, known: Collection[str]) -> None:
    """Raise ValueError for a kernel that calls functions which a process without numba does not have: it may raise an
    exception (a range with a variable step does), or allocates."""
    text = str(module)
    declared = {function.name for function in module.functions if function.is_declaration}
    called = {name for name in declared if text.count(f"@{name}(") + text.count(f"@{name},") > 1}
    if unknown := sorted(name for name in called - set(known) if not name.startswith("llvm.")):
        raise ValueError(f"the kernel {kernel} needs numba at run time: it uses {', '.join(unknown)}")
