"""Machine code of kernels: what a file holds of it, and how it becomes functions of this process."""

from __future__ import annotations

import ctypes
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import IO, Any, NamedTuple

from llvmlite import binding

TYPES: dict[str, Any] = {"i": ctypes.c_int64, "f": ctypes.c_float}
CONTENTS = "contents.json"
LIBRARY = ("sched_yield", "sem_post", "sem_wait")
"""Functions of the C library that kernels may call."""


@dataclass(slots=True)
class Code:
    """Object files, and where the kernels are in them."""

    objects: list[bytes] = field(default_factory=list)  # a later object may call functions of earlier objects
    shared: list[str] = field(default_factory=list)  # symbols of the first object's functions, which the others call
    kernels: dict[str, tuple[str, str]] = field(default_factory=dict)  # symbol and arguments by the kernel's name

    def write(self, file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(CONTENTS, json.dumps([len(self.objects), self.shared, self.kernels]))
            for number, content in enumerate(self.objects):
                archive.writestr(f"{number}.o", content)

    @classmethod
    def read(cls, file: IO[bytes]) -> Code:
        """Content of a file that `write` wrote."""
        with zipfile.ZipFile(file) as archive:
            count, shared, kernels = json.loads(archive.read(CONTENTS))
            objects = [archive.read(f"{number}.o") for number in range(count)]
        return cls(objects, shared, {name: (symbol, arguments) for name, (symbol, arguments) in kernels.items()})


class Kernels(NamedTuple):
    """Kernels in this process's memory."""

    functions: Mapping[str, Callable[..., None]]  # key: name of the kernel; a call holds no interpreter lock
    addresses: Mapping[str, int]  # addresses of the shared functions, by symbol

    def address(self, kernel: str) -> int:
        """Address of a kernel's code."""
        found: int = ctypes.cast(self.functions[kernel], ctypes.c_void_p).value  # type: ignore[arg-type, assignment]
        return found

    def locked(self, kernel: str) -> Callable[..., None]:
        """A kernel whose calls keep the interpreter lock: for one so short that waiting for the lock takes longer."""
        arguments = self.functions[kernel].argtypes  # type: ignore[attr-defined]
        return ctypes.PYFUNCTYPE(None, *arguments)(self.address(kernel))


@cache
def target_machine() -> Any:
    """This processor, for generating code."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features().flatten()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, opt=3, jit=True)


def link(code: Code) -> Kernels:
    """Load the kernels into this process's memory, where they stay until it ends."""
    engine = _engine()
    addresses = {}
    for number, content in enumerate(code.objects):
        engine.add_object_file(binding.ObjectFileRef.from_data(content))
        if not number:
            engine.finalize_object()
            for symbol in code.shared:
                addresses[symbol] = engine.get_function_address(symbol)
                binding.add_symbol(symbol, addresses[symbol])
    engine.finalize_object()
    functions = {
        name: ctypes.CFUNCTYPE(None, *(TYPES[each] for each in arguments))(engine.get_function_address(symbol))
        for name, (symbol, arguments) in code.kernels.items()
    }
    return Kernels(functions, addresses)


@cache
def _engine() -> Any:
    process = ctypes.CDLL(None)
    for name in LIBRARY:
        address = ctypes.cast(getattr(process, name), ctypes.c_void_p).value
        binding.add_symbol(name, address)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine())
