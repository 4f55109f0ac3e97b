"""The checksum of files and messages: zlib's CRC-32, which the CPU extension computes several times
as fast."""

try:
    from octavo_engine._native import crc32
except ImportError:  # a GPU needs no extension
    from zlib import crc32

__all__ = ["crc32"]
