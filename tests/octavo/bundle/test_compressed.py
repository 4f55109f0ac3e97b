"""gzip in blocks, against Python's own."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import zlib

import pytest

from octavo.bundle import compressed

BLOCK = 2**22


def written(content: bytes) -> tuple[bytes, str]:
    target = io.BytesIO()
    digest = compressed.write_gzip(io.BytesIO(content), target)
    return target.getvalue(), digest


def text(size: int) -> bytes:
    """As compressible as sources are."""
    words = [random.Random(n).randbytes(6).hex() for n in range(500)]
    chosen = random.Random(0).choices(words, k=size // 8)
    return " ".join(chosen).encode()[:size]


CONTENTS = {
    "empty": b"",
    "one byte": b"x",
    "one block": bytes(BLOCK),
    "one byte more": text(BLOCK + 1),
    "not compressible": random.Random(1).randbytes(2 * BLOCK + 7),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_it_is_one_member_of_the_content(content: bytes):
    data, digest = written(content)
    assert gzip.decompress(data) == content
    assert digest == f"sha256:{hashlib.sha256(content).hexdigest()}"


def test_the_bytes_do_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch):
    content = text(3 * BLOCK + 5)
    several = written(content)
    for count in (1, 7):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert written(content) == several


def test_blocks_hardly_cost_anything():
    content = text(2 * BLOCK)
    whole = len(gzip.compress(content, 6, mtime=0))
    assert whole <= len(written(content)[0]) < 1.01 * whole


def test_a_damaged_byte_is_found():
    data = bytearray(written(text(BLOCK))[0])
    data[len(data) // 2] ^= 1
    with pytest.raises((gzip.BadGzipFile, OSError, zlib.error)):
        gzip.decompress(bytes(data))
