"""numba as a translator of kernels from Python to LLVM's representation. Imported only while kernels are compiled.

For calls from Python, numba optimises every function by itself and makes machine code of it, and loads what it knows
of NumPy, strings and collections. A kernel needs none of that: it is optimised once, with all that it calls, and has
numbers and addresses only. What follows takes the unused parts away, which are more than half of numba's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from numba.core import typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.cpu import CPUContext
from numba.core.fastmathpass import rewrite_module
from numba.core.registry import cpu_target
from numba.core.typing import Context


class Translator(CompilerBase):
    """A compiler with only those of numba's passes that functions of numbers need."""

    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager("kernels")
        for each in (
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            untyped_passes.ReconstructSSA,
            typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis,
            typed_passes.IRLegalization,
            typed_passes.NativeLowering,
            typed_passes.NoPythonBackend,
        ):
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


INLINED = {
    "error_model": "numpy",
    "forceinline": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": Translator,
}
"""numba's options for the functions that kernels call: `called = njit(**INLINED)`."""


class _Library(JITCodeLibrary):
    """The translation of a function, not optimised, and without those that it calls."""

    def add_llvm_module(self, module: Any) -> None:
        self._final_module.link_in(module)

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # no code


class _Codegen(JITCPUCodegen):
    _library_class = _Library

    def set_env(self, name: str, environment: object) -> None:
        """Does nothing: what numba keeps for raising exceptions and for Python objects is used by no kernel."""


class _Types(Context):
    """numba's types of numbers, and functions of them."""

    def load_additional_registries(self) -> None:
        pass


class _Target(CPUContext):
    """numba's implementations of operations on numbers."""

    def init(self) -> None:
        super().init()
        self._internal_codegen = _Codegen("kernels")

    def load_additional_registries(self) -> None:
        from numba.core import optional  # noqa: F401
        from numba.cpython import builtins, iterators, numbers, rangeobj, tupleobj  # noqa: F401

    def post_lowering(self, module: Any, library: Any) -> None:
        if self.fastmath:
            rewrite_module(module, self.fastmath)

    def create_cpython_wrapper(self, *args: object, **kwargs: object) -> None:
        pass


@cache
def _contexts() -> tuple[_Types, _Target]:
    types = _Types()
    return types, _Target(types, "cpu")


@contextmanager
def translating() -> Iterator[None]:
    """Context in which modules with kernels are imported and translated. Afterwards numba's own contexts are in place
    again, for a process that uses numba for other things."""
    own, names = vars(cpu_target), ("_toplevel_typing_context", "_toplevel_target_context")
    before = {name: own[name] for name in names if name in own}
    own.update(zip(names, _contexts(), strict=True))
    try:
        yield
    finally:
        for name in names:
            del own[name]
        own.update(before)


def linked(library: Any) -> Any:
    """One module of LLVM's with a translated function and all that it calls."""
    module, seen, waiting = library._final_module, {library}, [*library._linking_libraries]
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting += other._linking_libraries
            module.link_in(other._get_module_for_linking(), preserve=True)
    module.verify()
    return module
