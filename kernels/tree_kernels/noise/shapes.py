"""The arguments of the kernel: which word of its call holds what. Every word is an int64; an address is one too."""

from __future__ import annotations

(
    BLOCKS,  # [COUNT] int64: a token's number // 4
    COUNT,
    POSITION,
    SAMPLE,  # sample index
    TAG,  # the counter's last word
    KEY0,
    KEY1,
    UNIFORMS,  # [COUNT, 4] float64; the result
) = range(8)
CALL_WORDS = 8
