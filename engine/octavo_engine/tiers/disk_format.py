"""The files of the disk tier: a run of KV blocks behind a header that names and checks each.

    magic | number of blocks | checksum of the header's rest | bytes of a page | key of the engine
    names of all blocks | checksums of all pages | pages, end to end

The key separates engines whose bytes differ for the same tokens. Numbers are little-endian.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from octavo_engine.tiers.page import NAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    from octavo_engine.tiers.page import BlockName, Page

KEY_BYTES = 16
_MAGIC = b"OctavKV1"  # with the version
_HEAD = struct.Struct("<8sII")
_REST = struct.Struct(f"<Q{KEY_BYTES}s")
_MAX_BLOCKS = 1 << 16


class TierFileError(ValueError):
    """A file is torn, damaged or of another engine; the message says what is wrong."""


class BlockPlace(NamedTuple):
    """Where a page lies in its file, and its checksum."""

    offset: int
    checksum: int


def write_run(file: BinaryIO, key: bytes, names: Sequence[BlockName], pages: Sequence[Page]) -> int:
    """Header and pages. Returns the bytes written."""
    rest = [_REST.pack(pages[0].nbytes, key), *names]
    rest += [struct.pack("<I", zlib.crc32(page.data)) for page in pages]
    body = b"".join(rest)
    header = _HEAD.pack(_MAGIC, len(names), zlib.crc32(body)) + body
    file.write(header)
    for page in pages:
        file.write(page.data)
    return len(header) + sum(page.nbytes for page in pages)


def read_header(file: BinaryIO, key: bytes, page_bytes: int) -> dict[BlockName, BlockPlace]:
    """What a file holds. Raises TierFileError unless all of it is there and of this engine."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise TierFileError("the header is cut off")
    magic, count, checksum = _HEAD.unpack(head)
    if magic != _MAGIC or not 1 <= count <= _MAX_BLOCKS:
        raise TierFileError("it is no file of KV blocks of this version")
    size = _REST.size + count * (NAME_BYTES + 4)
    body = file.read(size)
    if len(body) < size:
        raise TierFileError("the header is cut off")
    if zlib.crc32(body) != checksum:
        raise TierFileError("the header is damaged")
    if _REST.unpack_from(body) != (page_bytes, key):
        raise TierFileError("it belongs to another model or build")
    first = _HEAD.size + len(body)
    if os.fstat(file.fileno()).st_size != first + count * page_bytes:
        raise TierFileError("blocks are cut off")
    names_end = _REST.size + count * NAME_BYTES
    checksums = struct.unpack_from(f"<{count}I", body, names_end)
    return {
        body[start : start + NAME_BYTES]: BlockPlace(first + i * page_bytes, checksums[i])
        for i, start in enumerate(range(_REST.size, names_end, NAME_BYTES))
    }


def read_page(file: BinaryIO, place: BlockPlace, page_bytes: int) -> Page:
    """One block's bytes. Raises TierFileError if they are not what was written."""
    page = np.empty(page_bytes, np.uint8)
    if os.preadv(file.fileno(), [page.data], place.offset) != page_bytes:
        raise TierFileError("blocks are cut off")
    if zlib.crc32(page.data) != place.checksum:
        raise TierFileError("the checksum of a block is wrong")
    return page
