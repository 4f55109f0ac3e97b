"""Integers of packed weights as floats, without the units that convert: those are few, and with
weights of 4 bits they were what a product waited for.

An integer that is put into the lowest bits of a large power of two adds itself to it, and what is
not wanted is subtracted again, exactly. NVIDIA's assembly does so for two 16-bit floats at once;
where it is not there (AMD, the interpreter, float32) the compiler converts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# By dtype: the upper byte of the power of two whose last bit is worth one, and one itself.
_POWERS = {torch.bfloat16: (0x43, 0x3F80), torch.float16: (0x64, 0x3C00)}
# The power, and 8 more, negative.
_LESS = {torch.bfloat16: (0xC300, 0xC308), torch.float16: (0xE400, 0xE408)}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}

_NIBBLES = """
{{
    .reg .b32 low, high, one, less;
    mov.b32 one, {one};
    mov.b32 less, {less};
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, {power}, 0x4140;
    prmt.b32 $1, low, {power}, 0x4342;
    prmt.b32 $2, high, {power}, 0x4140;
    prmt.b32 $3, high, {power}, 0x4342;
    fma.rn.{name}x2 $0, $0, one, less;
    fma.rn.{name}x2 $1, $1, one, less;
    fma.rn.{name}x2 $2, $2, one, less;
    fma.rn.{name}x2 $3, $3, one, less;
}}
"""
# Bytes do not fit beside a bfloat16's power: they go by float32, as 2^23 + 128 + the integer.
_BYTES = """
{{
    .reg .b32 word, a, b, c, d;
    xor.b32 word, $2, 0x80808080;
    prmt.b32 a, word, 0x4B000000, 0x7540;
    prmt.b32 b, word, 0x4B000000, 0x7541;
    prmt.b32 c, word, 0x4B000000, 0x7542;
    prmt.b32 d, word, 0x4B000000, 0x7543;
    add.rn.f32 a, a, 0fCB000080;
    add.rn.f32 b, b, 0fCB000080;
    add.rn.f32 c, c, 0fCB000080;
    add.rn.f32 d, d, 0fCB000080;
    cvt.rn.{name}x2.f32 $0, b, a;
    cvt.rn.{name}x2.f32 $1, d, c;
}}
"""


def assembly(bits: int, dtype: torch.dtype, *, has_minima: bool, is_nvidia: bool) -> str:
    """What `nibbles` and `bytes_of` take as ASM; empty: the compiler converts."""
    if not is_nvidia or dtype not in _NAMES:
        return ""
    if bits == 8:
        return _BYTES.format(name=_NAMES[dtype])
    power, one = _POWERS[dtype]
    less = _LESS[dtype][0 if has_minima else 1]
    return _NIBBLES.format(
        name=_NAMES[dtype],
        power=f"0x{power * 0x01010101:08X}",
        one=f"0x{one * 0x00010001:08X}",
        less=f"0x{less * 0x00010001:08X}",
    )


@triton.jit
def nibbles(packed, LIKE: tl.constexpr, HAS_MINIMA: tl.constexpr, ASM: tl.constexpr):
    """The lower and the upper four bits of bytes, as floats; without minima less 8."""
    if ASM != "":
        if tl.bfloat16 == LIKE:
            low, high = tl.inline_asm_elementwise(
                ASM, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=4,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                ASM, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True,
                pack=4,
            )  # fmt: skip
    else:
        low, high = packed & 15, (packed >> 4) & 15
        if not HAS_MINIMA:
            low, high = low - 8, high - 8
        low, high = low.to(LIKE), high.to(LIKE)
    return low, high


@triton.jit
def bytes_of(packed, LIKE: tl.constexpr, ASM: tl.constexpr):
    """Signed bytes as floats."""
    if ASM != "":
        if tl.bfloat16 == LIKE:
            values = tl.inline_asm_elementwise(
                ASM, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            values = tl.inline_asm_elementwise(
                ASM, "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4
            )
    else:
        values = packed.to(LIKE)
    return values
