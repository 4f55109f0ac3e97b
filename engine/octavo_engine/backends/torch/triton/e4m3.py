"""Numbers rounded to 8-bit floats with 4 bits of exponent."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_e4m3(values):
    """float32, up to 448, to the nearest such number, ties to even; still float32. NOTE: rounded
    here, not by the cast: that one is the device's own, and cuts in the interpreter. Three bits of
    mantissa; below 2^-6 steps of 2^-9."""
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (values + 24576.0) - 24576.0
    is_small = tl.abs(values) < 0.015625
    return tl.where(is_small, small, bits.to(tl.float32, bitcast=True))
