"""Encryption of what is kept on disk: AES-256-GCM, by keys from a file.

Every file has a key of its own, derived from one of ours and a random salt, so that its pieces can
be numbered from 0 and no nonce is ever used twice. A file says by which key it was written; the
first key of the key file writes, and all of them read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

FLAG = "--encryption-key-file"
KEY_BYTES = 32
ID_BYTES = 8
SALT_BYTES = 16
HEAD_BYTES = ID_BYTES + SALT_BYTES
TAG_BYTES = 16  # that a sealed piece is longer than its content
_DAMAGED = "it is damaged, or was changed"
_ADVICE = "one key a line, each of 32 bytes in base64: openssl rand -base64 32"


class UnknownKey(Exception):
    """A file was written by a key that is not in the key file."""

    def __init__(self, key_id: bytes) -> None:
        super().__init__(f"it is encrypted with the key {key_id.hex()}, which {FLAG} does not have")


class DamagedPiece(Exception):
    """A piece is not what was written there."""


class FileCipher:
    """Of one file, or of one run of pieces in it. Whoever writes numbers each piece once."""

    def __init__(self, head: bytes, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.head = head  # to be put before the pieces
        self._aead = AESGCM(hmac.digest(key, b"octavo file" + head[ID_BYTES:], "sha256"))

    def seal(self, number: int, content: Buffer, context: bytes = b"") -> bytes:
        """`context`: what is readable beside it and must not be changed either."""
        return self._aead.encrypt(_nonce(number), memoryview(content), context)

    def open(self, number: int, sealed: Buffer, context: bytes = b"") -> bytes:
        """Raises DamagedPiece."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(_nonce(number), memoryview(sealed), context)
        except (InvalidTag, ValueError):
            raise DamagedPiece(_DAMAGED) from None

    def open_into(self, target: Buffer, number: int, sealed: Buffer, context: bytes = b"") -> None:
        """`target`: as long as the content. Raises DamagedPiece, and what is there is undefined."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(_nonce(number), memoryview(sealed), context, memoryview(target))
        except (InvalidTag, ValueError):
            raise DamagedPiece(_DAMAGED) from None


class EncryptionKeys:
    """The keys of a key file."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = {key_id(key): key for key in keys}
        self._writes = key_id(keys[0])

    def new_cipher(self) -> FileCipher:
        head = self._writes + os.urandom(SALT_BYTES)
        return FileCipher(head, self._keys[self._writes])

    def cipher_of(self, head: bytes) -> FileCipher:
        """For what begins so. Raises UnknownKey."""
        key = self._keys.get(head[:ID_BYTES])
        if key is None:
            raise UnknownKey(head[:ID_BYTES])
        return FileCipher(head, key)


def key_id(key: bytes) -> bytes:
    """What files show of their key; it tells nothing about it."""
    return hashlib.blake2b(key, digest_size=ID_BYTES, person=b"octavo key id").digest()


def read_encryption_keys(path: str | None) -> EncryptionKeys | None:
    """None without a path. Raises ConfigError."""
    if path is None:
        return None
    try:
        with open(path, encoding="ascii") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{FLAG} {path}: {reason}; it must have {_ADVICE}") from None
    keys = [
        _read_key(path, number, line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not keys:
        raise ConfigError(f"{FLAG} {path} has no key; it must have {_ADVICE}")
    try:
        import cryptography  # noqa: F401  (an extra: said here, not at the first file)
    except ImportError:
        raise ConfigError(
            f"{FLAG} needs the package cryptography: pip install cryptography"
        ) from None
    return EncryptionKeys(keys)


def _read_key(path: str, number: int, line: str) -> bytes:
    try:
        key = base64.b64decode(line, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"{FLAG} {path}: line {number} is not a key; it must have {_ADVICE}")
    return key


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
