"""What a logit weighs in the draw, and how logits are ordered: the same numbers as csrc/cpu's."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mass_of(x, maximum, scale):
    """exp((x - maximum) * scale) in units of 2^-42, rounded to nearest, ties to even: int64."""
    t = (x - maximum) * scale
    t = tl.minimum(tl.where(t > -64.0, t, -64.0), 0.0)  # NaN and +inf, in rows that fail, too
    shifted = t * 1.44269504088896341 + 12582912.0  # 1.5 * 2^23: adding it rounds
    n = shifted - 12582912.0
    r = (t - n * 0.693359375) - n * -2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = (y * (r * r) + r) + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    units = y * ((exponent + (127 + 42)) << 23).to(tl.float32, bitcast=True)
    # From 2^23 on a float is whole anyway; below, adding 2^23 rounds.
    return tl.where(units < 8388608.0, (units + 8388608.0) - 8388608.0, units).to(tl.int64)


@triton.jit
def ordered(x):
    """x as an integer whose order is that of x; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def survives(x, ids, t, least, cut, last):
    key = ordered(x)
    return (t >= least) & ((key > cut) | ((key == cut) & (ids <= last)))
