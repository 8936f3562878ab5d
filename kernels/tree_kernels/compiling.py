"""Compiles the kernels of a module with numba. Imported only while kernels are compiled."""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding
from numba import cfunc, config, types
from numba.core.registry import cpu_target

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
        with _translated_only():
            made = cfunc(types.void(*(ARGUMENTS[each] for each in arguments)), error_model="numpy")(function)
        library = made._library
        _optimise(library._final_module, library._codegen._tm, made.native_name)
        _check(name, library._final_module, {*LIBRARY, *code.shared})
        code.objects.append(library._codegen._tm.emit_object(library._final_module))
        code.kernels[name] = (made.native_name, arguments)
    return code


class _NoEngine:
    """Takes the place of numba's engine, which makes machine code of every function that a kernel calls."""

    def __init__(self) -> None:
        self._environment = ctypes.c_void_p()  # numba writes a function's environment here; no kernel reads it

    def get_global_value_address(self, name: str) -> int:
        return ctypes.addressof(self._environment)

    def add_module(self, module: object) -> None:
        pass

    def finalize_object(self) -> None:
        pass

    def is_symbol_defined(self, name: str) -> bool:
        return False


@contextmanager
def _translated_only() -> Iterator[None]:
    """Makes numba neither optimise functions nor make machine code of them: it would do so for each function that a
    kernel calls, and again for the kernel, where all of these are inlined."""
    codegen = cpu_target.target_context.codegen()
    before = config.OPT, codegen._opt_level, codegen._loopvect, codegen._engine
    config.OPT, codegen._opt_level, codegen._loopvect, codegen._engine = type(config.OPT)(0), 0, False, _NoEngine()
    try:
        yield
    finally:
        config.OPT, codegen._opt_level, codegen._loopvect, codegen._engine = before


def _optimise(module: Any, machine: Any, kernel: str) -> None:
    """LLVM's optimisations of a kernel with all that it calls, which nothing else can call afterwards."""
    for function in module.functions:
        if not function.is_declaration and function.name != kernel:
            function.linkage = "internal"
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)


def _check(kernel: str, module: Any, known: Collection[str]) -> None:
    """Raise ValueError for a kernel that calls functions which a process without numba does not have: it may raise an
    exception (a range with a variable step does), or allocates."""
    text = str(module)
    declared = {function.name for function in module.functions if function.is_declaration}
    called = {name for name in declared if text.count(f"@{name}(") + text.count(f"@{name},") > 1}
    if unknown := sorted(name for name in called - set(known) if not name.startswith("llvm.")):
        raise ValueError(f"the kernel {kernel} needs numba at run time: it uses {', '.join(unknown)}")
