"""Functions that numba's kernels need beside numba: arrays and kernels at addresses, rounding, atomic counters.

Imported only while kernels are compiled. Addresses are int64 numbers.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F32, I16, I32, I64, HALF = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType()


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


floats, doubles, words, halves, longs = (
    _pointer_to(kind) for kind in (types.float32, types.float64, types.uint32, types.uint16, types.int64)
)
"""The array of float32, float64, uint32, uint16 or int64 numbers at an address."""


@intrinsic
def bits_of(typingctx: Any, number: Any) -> Any:
    """A float32's bits as uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], I32)

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """The float32 that has these uint32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.uint32), generate


@intrinsic
def half_bits(typingctx: Any, number: Any) -> Any:
    """The uint16 bits of the nearest float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], HALF), I16)

    return types.uint16(types.float32), generate


@intrinsic
def half_value(typingctx: Any, bits: Any) -> Any:
    """The float32 equal to the float16 with these uint16 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], HALF), F32)

    return types.float32(types.uint16), generate


@intrinsic
def fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address atomically; returns its value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], I64.as_pointer()), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    """The int64 at an address, read anew: other threads may change it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def atomic_store(typingctx: Any, address: Any, number: Any) -> Any:
    """Write an int64. Threads that read it see all that this one wrote before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tells the processor that this thread waits for another one's write."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name, module = "llvm.x86.sse2.pause", builder.module
        builder.call(module.globals.get(name) or ir.Function(module, ir.FunctionType(ir.VoidType(), []), name), [])
        return context.get_dummy_value()

    return types.void(), generate


CONTROL = "llvm.x86.sse.stmxcsr", "llvm.x86.sse.ldmxcsr"
"""LLVM's names of the instructions that read and write this thread's control word of floating point."""


def _controlled(builder: Any, name: str, place: Any) -> None:
    module, pointer = builder.module, I32.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer])
    builder.call(module.globals.get(name) or ir.Function(module, kind, name), [place])


@intrinsic
def control_word(typingctx: Any) -> Any:
    """This thread's control word of floating point, as uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.alloca(I32)
        _controlled(builder, CONTROL[0], place)
        return builder.load(place)

    return types.uint32(), generate


@intrinsic
def set_control_word(typingctx: Any, word: Any) -> Any:
    """Set the processor's control word of vector arithmetic (MXCSR)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.alloca(I32)
        builder.store(arguments[0], place)
        _controlled(builder, CONTROL[1], place)
        return context.get_dummy_value()

    return types.void(types.uint32), generate


@intrinsic
def fused_multiply_add(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def call_kernel(typingctx: Any, function: Any, call: Any, thread: Any) -> Any:
    """Calls the kernel of two int64 arguments at the address `function`."""
    return types.void(types.int64, types.int64, types.int64), _call


@intrinsic
def call_words(typingctx: Any, function: Any, words: Any) -> Any:
    """Calls the kernel at the address `function` whose only argument is the address of its words."""
    return types.void(types.int64, types.int64), _call


def _call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [I64] * (len(arguments) - 1))
    builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
    return context.get_dummy_value()
