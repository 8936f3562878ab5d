"""The processor's vector registers, for which kernels are compiled."""

from __future__ import annotations

from functools import cache

NEEDED = ("avx2", "f16c", "fma")


@cache
def processor() -> tuple[str, tuple[str, ...]]:
    """The processor's name in LLVM, and its features."""
    from llvmlite import binding

    return binding.get_host_cpu_name(), tuple(sorted(k for k, has in binding.get_host_cpu_features().items() if has))


def why_not_vectors() -> str:
    """Reason why kernels cannot be compiled for this processor; empty if they can."""
    missing = sorted(set(NEEDED) - set(processor()[1]))
    return f"this processor has no {', '.join(missing)}" if missing else ""


@cache
def lanes() -> int:
    """float32 numbers in a vector register, of those that torch uses: ATEN_CPU_CAPABILITY=avx2 sets the smaller."""
    import torch  # imported here: `kernel_cache.kept` is for processes without torch

    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def has_dots() -> bool:
    """True if this processor has dot products of pairs of bfloat16 in its largest registers."""
    return lanes() == 16 and "avx512bf16" in processor()[1]


@cache
def has_matrix_tiles() -> bool:
    """True if this processor multiplies matrix tiles of bfloat16 (AMX), and the system lets this process use them."""
    if not writes_matrix_tiles():
        return False
    import torch  # asks the system, once for a process

    return bool(torch.cpu._init_amx())


def writes_matrix_tiles() -> bool:
    """True if kernels for this processor have matrix tiles of bfloat16."""
    return lanes() == 16 and {"amx-tile", "amx-bf16"} <= set(processor()[1])


def panel() -> int:
    """Outputs of a panel of packed weights."""
    return 2 * lanes()
