"""Compiles the kernels of a module with numba. Imported only while kernels are compiled."""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding
from numba import cfunc, types

from tree_kernels.machine_code import LIBRARY, Code, target_machine
from tree_kernels.translating import Translator, linked, translating

ARGUMENTS = {"i": types.int64, "f": types.float32}
TILES = "TILES"


def machine_code(module: str) -> Code:
    """The machine code of a module's kernels.

    The module has a table KERNELS of functions and their arguments, and may have TILES, a module of llvmlite's with
    functions that kernels call by their addresses.
    """
    logging.getLogger("numba").setLevel(logging.WARNING)  # numba logs its passes at DEBUG
    code = Code()
    for name, arguments, symbol, translated, machine in optimised(module):
        if name == TILES:
            code.shared = [function.name for function in translated.functions if not function.is_declaration]
        else:
            _check(name, translated, {*LIBRARY, *code.shared})
            code.kernels[name] = (symbol, arguments)
        code.objects.append(machine.emit_object(translated))
    return code


def optimised(module: str) -> Iterator[tuple[str, str, str, Any, Any]]:
    """Name, arguments, symbol, optimised LLVM module and target machine of each kernel of a module, its TILES first."""
    with _no_collections(), translating():
        found = importlib.import_module(module)
        if hasattr(found, TILES):
            parsed = binding.parse_assembly(str(found.TILES))
            parsed.verify()
            yield TILES, "", "", parsed, target_machine()
        for name, (function, arguments) in found.KERNELS.items():
            signature = types.void(*(ARGUMENTS[each] for each in arguments))
            made = cfunc(signature, error_model="numpy", pipeline_class=Translator)(function)
            translated, machine = linked(made._library), made._library.codegen._tm
            _optimise(translated, machine, made.native_name)
            yield name, arguments, made.native_name, translated, machine


@contextmanager
def _no_collections() -> Iterator[None]:
    """Context without garbage collection, which would take a quarter of the time: numba makes many objects, and each
    full collection also looks at all objects of torch and transformers."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
