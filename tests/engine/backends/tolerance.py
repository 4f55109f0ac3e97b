"""How far two computations of the same logits may lie apart, and why. Defined here only.

Errors are root mean squares, as shares of the logits' own standard deviation: single logits near
zero have no relative precision of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from octavo_engine.config import KVCacheDType

# Two float32 computations that sum in different orders over a few layers; the logits are 1 to 10.
FLOAT32: dict[str, Any] = {"rtol": 2e-5, "atol": 5e-5}

# bf16 keeps 8 bits: a rounded value is off by up to 2^-9, 0.1 % in the mean. Weights, inputs of
# linears, keys and values are rounded, some ten times a layer, and errors of random sign add up as
# the root of their number: 1 to 2 % after the two to four layers of the tiny models.
BF16_AGAINST_FLOAT32 = 0.03

# Both round the same values, so what is left is the order of sums, and now and then a value on the
# edge between two bf16 numbers that falls to the other side: about 0.25 % at worst.
BF16_AGAINST_ROUNDED_REFERENCE = 0.005

# Integer weights that are the file's own: activations keep 15 bits within each group of 32, which
# costs nothing beside the keys and values, still in bf16: a third of what bf16 throughout costs.
INTEGERS_AGAINST_FLOAT32 = 0.01

# The same with activations of 8 bits: each is off by up to half a 127th of its group's largest one,
# 0.6 % of a usual one in the mean, before each of some 120 products.
INTEGERS_WITH_8_BITS = 0.05

# Weights rounded to steps of 1/127 of a group's largest value, or to 16 between its ends: off by
# 0.7 % and 9 % of the weights' deviation in the mean, and a few layers add that up. These models'
# random weights have no redundancy that would hide it.
INT8_AGAINST_FLOAT32 = 0.05
INT4_AGAINST_FLOAT32 = 0.5

# Keys and values alone in fewer bits, the rest in float32. bf16 has 8 significant bits and costs
# 0.75 % at worst; e4m3 has 4, so 16 times that at most, and e5m2 3, 32 times. int8's steps are
# 1/127 of a row's largest value: near it 7 bits, fewer far below. Real models, less even than
# random ones, lose less: benchmarks/perplexity.py.
KV_AGAINST_FLOAT32: dict[KVCacheDType, float] = {
    "bfloat16": 0.01,
    "int8": 0.025,
    "fp8_e4m3": 0.1,
    "fp8_e5m2": 0.2,
}


def error(logits: NDArray[np.float32], truth: NDArray[np.float32]) -> float:
    """The root mean square of the difference, as a share of the truth's standard deviation."""
    difference = logits.astype(np.float64) - truth
    return float(np.sqrt(np.mean(difference**2)) / np.std(truth))
