"""Files of KV blocks, on disk and in a shared store: a run of them behind a header that names and
checks each. All pages of a file have one size: those of blocks and of states lie in different ones.

    magic | number of blocks | checksum of the header's rest | bytes of a page | key of the engine
    names of all blocks | checksums of all pages | pages, end to end

The key separates engines whose bytes differ for the same tokens. Numbers are little-endian.
Encrypted, with `--encryption-key-file`, names are secret too, since they are digests of tokens:

    magic | number of blocks | checksum of the header's rest | head of the cipher
    sealed: bytes of a page, key of the engine, names of all blocks | sealed pages, end to end
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from octavo_engine.checksum import crc32
from octavo_engine.encryption import HEAD_BYTES, TAG_BYTES, DamagedPiece, UnknownKey
from octavo_engine.tiers.page import NAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    from numpy.typing import NDArray

    from octavo_engine.encryption import EncryptionKeys, FileCipher
    from octavo_engine.tiers.page import BlockName, Page, PageSizes

KEY_BYTES = 16
_MAGIC = b"OctavKV1"  # with the version
_SEALED_MAGIC = b"OctavKE1"  # of encrypted files
_HEAD = struct.Struct("<8sII")
_REST = struct.Struct(f"<Q{KEY_BYTES}s")
_MAX_BLOCKS = 1 << 16


class TierFileError(ValueError):
    """A file is torn, damaged or of another engine; the message says what is wrong."""


class NoKeyForFile(Exception):
    """A file is in order as far as can be seen, and encrypted by a key that is not ours."""


class RunBytes(Protocol):
    """A file's content, wherever it lies."""

    num_bytes: int

    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        """Fill it. Raises OSError, and TierFileError where the file ends before."""


class BlockPlace(NamedTuple):
    """Where a page lies in its file, and its checksum; where that is encrypted, its number."""

    offset: int
    check: int


class RunHeader(NamedTuple):
    """What a file holds, and how its pages are read."""

    page_bytes: int
    places: dict[BlockName, BlockPlace]
    cipher: FileCipher | None


def write_run(
    file: BinaryIO,
    key: bytes,
    names: Sequence[BlockName],
    pages: Sequence[Page],
    encryption: EncryptionKeys | None = None,
) -> int:
    """Header and pages. Returns the bytes written."""
    rest = [_REST.pack(pages[0].nbytes, key), *names]
    if encryption is None:
        cipher = None
        rest += [struct.pack("<I", crc32(page.data)) for page in pages]
        body = b"".join(rest)
    else:
        cipher = encryption.new_cipher()
        body = cipher.head + cipher.seal(0, b"".join(rest), _context(len(names)))
    magic = _MAGIC if cipher is None else _SEALED_MAGIC
    num_bytes = file.write(_HEAD.pack(magic, len(names), crc32(body)) + body)
    for number, page in enumerate(pages, 1):
        num_bytes += file.write(page.data if cipher is None else cipher.seal(number, page.data))
    return num_bytes


def read_header(
    file: RunBytes, key: bytes, sizes: PageSizes, encryption: EncryptionKeys | None = None
) -> RunHeader:
    """Raises OSError, TierFileError unless all of it is there and of this engine, and
    NoKeyForFile."""
    head = _read(file, 0, _HEAD.size)
    magic, count, checksum = _HEAD.unpack(head)
    if magic not in (_MAGIC, _SEALED_MAGIC) or not 1 <= count <= _MAX_BLOCKS:
        raise TierFileError("it is no file of KV blocks of this version")
    is_sealed = magic == _SEALED_MAGIC
    size = _REST.size + count * NAME_BYTES + (HEAD_BYTES + TAG_BYTES if is_sealed else 4 * count)
    body = _read(file, _HEAD.size, size)
    if crc32(body) != checksum:
        raise TierFileError("the header is damaged")
    cipher = None
    if is_sealed:
        cipher, body = _open_body(body, count, encryption)
    elif encryption is not None:
        raise TierFileError("it is not encrypted")
    page_bytes, its_key = _REST.unpack_from(body)
    names_end = _REST.size + count * NAME_BYTES
    starts = range(_REST.size, names_end, NAME_BYTES)
    names = [body[start : start + NAME_BYTES] for start in starts]
    if its_key != key or any(sizes.of(name) != page_bytes for name in names):
        raise TierFileError("it belongs to another model or build")
    first, step = _HEAD.size + size, page_bytes + (TAG_BYTES if is_sealed else 0)
    if file.num_bytes != first + count * step:
        raise TierFileError("blocks are cut off")
    checks = range(1, count + 1) if is_sealed else struct.unpack_from(f"<{count}I", body, names_end)
    places = {name: BlockPlace(first + i * step, checks[i]) for i, name in enumerate(names)}
    return RunHeader(page_bytes, places, cipher)


def read_page(
    file: RunBytes, place: BlockPlace, page_bytes: int, cipher: FileCipher | None = None
) -> Page:
    """One block's bytes. Raises OSError, and TierFileError if they are not what was written."""
    page = np.empty(page_bytes, np.uint8)
    if cipher is not None:
        sealed = np.empty(page_bytes + TAG_BYTES, np.uint8)
        file.read_into(sealed, place.offset)
        try:
            cipher.open_into(page.data, place.check, sealed.data)  # which checks it
        except DamagedPiece as error:
            raise TierFileError(f"a block cannot be decrypted: {error}") from None
        return page
    file.read_into(page, place.offset)
    if crc32(page.data) != place.check:
        raise TierFileError("the checksum of a block is wrong")
    return page


def stored_bytes(page_bytes: int, cipher: FileCipher | None) -> int:
    """What a page takes in its file."""
    return page_bytes if cipher is None else page_bytes + TAG_BYTES


def _read(file: RunBytes, offset: int, num_bytes: int) -> bytes:
    if offset + num_bytes > file.num_bytes:
        raise TierFileError("the header is cut off")
    target = np.empty(num_bytes, np.uint8)
    file.read_into(target, offset)
    return target.tobytes()


def _open_body(
    body: bytes, count: int, encryption: EncryptionKeys | None
) -> tuple[FileCipher, bytes]:
    if encryption is None:
        raise NoKeyForFile("it is encrypted, and there is no --encryption-key-file")
    try:
        cipher = encryption.cipher_of(body[:HEAD_BYTES])
        return cipher, cipher.open(0, body[HEAD_BYTES:], _context(count))
    except UnknownKey as error:
        raise NoKeyForFile(str(error)) from None
    except DamagedPiece as error:
        raise TierFileError(f"the header cannot be decrypted: {error}") from None


def _context(count: int) -> bytes:
    return _SEALED_MAGIC + count.to_bytes(4, "little")
