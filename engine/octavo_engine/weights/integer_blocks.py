"""Integers and 8-bit floats with scales, however a checkpoint laid them out, as blocks.

Those of integers are GGUF's: Q4_1 for 4 bits, Q8_0 for 8; csrc/cpu/quants.h describes those of
floats. A scale of float16 or bfloat16 is kept as it is wherever float16 can hold it; a zero point
becomes the minimum -zero * scale, rounded to float16: exact for the symmetric 8, off by 2^-11 of
itself at most for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 32


def unpack_words(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """The numbers in the last axis's words, lowest bits first: that axis grows by 32 / bits."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = words.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return fields.astype(np.uint8).reshape(*words.shape[:-1], -1)


def unpack_bits(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """The same of numbers that may lie across two words, as those of 3 bits do."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    fields = stream.reshape(*words.shape[:-1], -1, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0]


def pack_words(values: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """The other way round; the last axis fills whole words."""
    per_word = 32 // bits
    fields = values.reshape(*values.shape[:-1], -1, per_word).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words: NDArray[np.uint32] = np.bitwise_or.reduce(fields << shifts, axis=-1)
    return words.view(np.int32)


def q4_1_blocks(
    q: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[Any]
) -> NDArray[np.uint8]:
    """(q - zero) * scale. q is [rows, columns] from 0 to 15, the others [rows, groups]."""
    blocks = q.reshape(len(q), -1, BLOCK)
    half_scales = scales.astype(np.float16)
    minima = (-zeros.astype(np.float32) * half_scales.astype(np.float32)).astype(np.float16)
    per_group = blocks.shape[1] // scales.shape[1]
    head = np.stack([half_scales, minima], axis=-1).view(np.uint8).repeat(per_group, axis=1)
    nibbles = blocks[..., :16] | blocks[..., 16:] << 4
    return np.concatenate([head, nibbles], axis=-1).reshape(-1)


def q8_0_blocks(q: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """q * scale, shapes as above."""
    blocks = np.ascontiguousarray(q).view(np.uint8).reshape(len(q), -1, BLOCK)
    per_group = blocks.shape[1] // scales.shape[1]
    head = scales.astype(np.float16)[..., None].view(np.uint8).repeat(per_group, axis=1)
    return np.concatenate([head, blocks], axis=-1).reshape(-1)


def nvfp4_blocks(
    packed: NDArray[np.uint8], scales: NDArray[np.uint8], factor: np.float32
) -> NDArray[np.uint8]:
    """value * scale * factor. packed has two codes in a byte [rows, columns / 2], scales are bits
    of e4m3 [rows, columns / 16]."""
    codes = packed.reshape(len(packed), -1, BLOCK // 2)
    pairs = scales.reshape(len(packed), -1, 2)
    head = np.broadcast_to(np.array([factor], "<f4").view(np.uint8), (*codes.shape[:2], 4))
    return np.concatenate([head, pairs, codes], axis=-1).reshape(-1)


def f8_e4m3_blocks(values: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """value * scale. values are the floats' bits [rows, columns], scales [rows, blocks]."""
    blocks = np.ascontiguousarray(values).reshape(len(values), -1, BLOCK)
    head = np.ascontiguousarray(scales, np.float32)[..., None].view(np.uint8)
    return np.concatenate([head, blocks], axis=-1).reshape(-1)
