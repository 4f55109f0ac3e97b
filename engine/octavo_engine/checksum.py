"""CRC-32 of bytes, which zlib computes too: `crc32(data, value=0)`.

The compiled part is many times as quick. Only simulated engines start without it.
"""

from __future__ import annotations

__all__ = ["crc32"]

try:
    from octavo_engine._native import crc32
except ImportError:
    from zlib import crc32
