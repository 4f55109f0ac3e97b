"""How the files of a `FileStore` lie on disk: as they are, or encrypted.

An encrypted file is a magic number and records, so that lines can be added to it:

    0 | head of a cipher              every time the file is opened to be written
    length | sealed piece             each of whole writes, numbered from 0 behind its cipher's head

A write is there as a whole or not at all. Lengths are four bytes, little-endian.
"""

from __future__ import annotations

import io
import os
import struct
from typing import IO, TYPE_CHECKING

from octavo_engine.encryption import HEAD_BYTES, TAG_BYTES, DamagedPiece, UnknownKey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Buffer

    from octavo_engine.encryption import EncryptionKeys, FileCipher

_MAGIC = b"OctavEF1"
_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 1 << 18  # of content that is sealed at once, where writes are small


class StoredFileError(OSError):
    """A file is not what was written there, or there is no key for it; says so in a sentence."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message


class Storage:
    """Files by path. The content of an encrypted one is never on disk in clear."""

    def __init__(self, encryption: EncryptionKeys | None = None) -> None:
        self._encryption = encryption

    def read(self, path: Path) -> IO[bytes]:
        """Raises OSError; reading from it may raise StoredFileError."""
        if self._encryption is None:
            return path.open("rb")
        return io.BufferedReader(_SealedReader(path.open("rb"), self._encryption), _PIECE_BYTES)

    def write(self, path: Path) -> IO[bytes]:
        """Anew. Each `flush` is one piece."""
        if self._encryption is None:
            return path.open("wb")
        return _SealedWriter(path.open("wb"), self._encryption)

    def append(self, path: Path) -> IO[bytes]:
        """To what whole writes left there: see `drop_half`."""
        if self._encryption is None:
            return path.open("ab")
        return _SealedWriter(path.open("ab"), self._encryption)

    def length(self, path: Path) -> int:
        """Bytes of its content."""
        if self._encryption is None:
            return path.stat().st_size
        with path.open("rb") as file:
            return sum(size - TAG_BYTES for _, size in _records(file) if size)

    def drop_half(self, path: Path) -> None:
        """What a process that was killed wrote last may lack its end."""
        if self._encryption is None:
            _drop_half_line(path)
            return
        with path.open("r+b") as file:
            end = 0
            for at, size in _records(file, is_whole=False):
                end = at + (size or HEAD_BYTES)
            file.truncate(end)

    def check(self, path: Path) -> None:
        """Raises StoredFileError where the file cannot be read with these keys: a look at its
        first bytes."""
        with path.open("rb") as file:
            begins = file.read(len(_MAGIC))
            is_sealed = begins == _MAGIC
            if self._encryption is None and is_sealed:
                raise StoredFileError("it is encrypted; start with --encryption-key-file")
            if self._encryption is None or not begins:
                return
            if not is_sealed:
                raise StoredFileError(
                    "it is not encrypted, and --encryption-key-file is given; begin with a new "
                    "folder, or delete the file"
                )
            head = file.read(_LENGTH.size + HEAD_BYTES)[_LENGTH.size :]
            if len(head) == HEAD_BYTES:
                _cipher(self._encryption, head)


class _SealedWriter(io.BytesIO):
    """Gathers writes, seals them together."""

    def __init__(self, file: IO[bytes], encryption: EncryptionKeys) -> None:
        super().__init__()
        self._file, self._encryption = file, encryption
        self._cipher: FileCipher | None = None
        self._number = 0
        self._written = 0  # of the content, before what is gathered

    def write(self, data: Buffer) -> int:
        count = super().write(data)
        if super().tell() >= _PIECE_BYTES:
            self._seal()
        return count

    def tell(self) -> int:
        return self._written + super().tell()

    def flush(self) -> None:
        if not self.closed:
            self._seal()
            self._file.flush()

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
        finally:
            super().close()
            self._file.close()

    def _seal(self) -> None:
        size = super().tell()
        if not size:
            return
        parts = []
        if self._cipher is None:
            self._cipher = self._encryption.new_cipher()
            if not self._file.tell():
                parts.append(_MAGIC)
            parts += [_LENGTH.pack(0), self._cipher.head]
        sealed = self._cipher.seal(self._number, self.getbuffer()[:size])
        self._file.write(b"".join([*parts, _LENGTH.pack(len(sealed)), sealed]))
        self._number += 1
        self._written += size
        self.seek(0)


class _SealedReader(io.RawIOBase):
    """The content, piece by piece."""

    def __init__(self, file: IO[bytes], encryption: EncryptionKeys) -> None:
        self._file = file
        self._pieces = _opened(file, encryption)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Buffer) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        into = memoryview(target)
        count = min(len(into), len(self._rest))
        into[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _opened(file: IO[bytes], encryption: EncryptionKeys) -> Iterator[bytes]:
    """Raises StoredFileError."""
    cipher: FileCipher | None = None
    number = 0
    for at, size in _records(file):
        file.seek(at)
        body = file.read(size or HEAD_BYTES)
        if not size:
            cipher, number = _cipher(encryption, body), 0
            continue
        if cipher is None:
            raise StoredFileError("it has no key's name")
        try:
            yield cipher.open(number, body)
        except DamagedPiece as error:
            raise StoredFileError(str(error)) from None
        number += 1


def _records(file: IO[bytes], *, is_whole: bool = True) -> Iterator[tuple[int, int]]:
    """(where it begins, its length; 0: a cipher's head) of all that are whole. Raises
    StoredFileError for what is no such file, and `is_whole` where the last one is cut off."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not end:
        return
    if (magic := file.read(len(_MAGIC))) != _MAGIC:
        if not is_whole and _MAGIC.startswith(magic):
            return
        raise StoredFileError("it is not an encrypted file")
    at = len(_MAGIC)
    while at < end:
        file.seek(at)
        length = file.read(_LENGTH.size)
        at += _LENGTH.size
        size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 1 << 32
        if at + (size or HEAD_BYTES) > end:
            if is_whole:
                raise StoredFileError("its end is cut off")
            return
        yield at, size
        at += size or HEAD_BYTES


def _cipher(encryption: EncryptionKeys, head: bytes) -> FileCipher:
    try:
        return encryption.cipher_of(head)
    except UnknownKey as error:
        raise StoredFileError(str(error)) from None


def _drop_half_line(path: Path) -> None:
    """The request of such a line is answered again."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        file.truncate(end)
