"""The quick checksum is zlib's, of any bytes at any place.

Red when: a constant of the folding, the order of its lanes or the bytes after the last whole lane
are wrong, or what came before is not carried on.
"""

import random
import zlib
from typing import Any, cast

import numpy as np
import pytest

from octavo_engine._native import crc32

DATA = random.Random(1).randbytes(5000)


@pytest.mark.parametrize("start", [0, 1, 7, 8, 15, 16, 17])
def test_every_length_has_zlibs_checksum(start):
    for length in [*range(300), 1023, 1024, 1025, 4000]:
        data = memoryview(DATA)[start : start + length]
        for before in (0, 1, 0x80000000, 0xFFFFFFFF, zlib.crc32(DATA[:start])):
            assert crc32(data, before) == zlib.crc32(data, before), (length, before)


def test_in_parts_it_is_the_same():
    chance = random.Random(2)
    for _ in range(200):
        cuts = sorted(chance.choices(range(len(DATA)), k=5))
        value = 0
        for start, end in zip([0, *cuts], [*cuts, len(DATA)], strict=True):
            value = crc32(DATA[start:end], value)
        assert value == zlib.crc32(DATA)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda d: np.frombuffer(d, "u1")])
def test_whatever_has_bytes_is_taken(kind):
    assert crc32(kind(DATA)) == zlib.crc32(DATA)


def test_what_has_none_or_only_with_gaps_is_refused():
    with pytest.raises(TypeError):
        crc32(cast("Any", "text"))
    with pytest.raises((BufferError, ValueError)):
        crc32(memoryview(DATA)[::2])
