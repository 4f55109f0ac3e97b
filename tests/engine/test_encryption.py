"""Keys from a file, and the cipher of each file that is encrypted by them."""

from __future__ import annotations

import base64
import os

import pytest

from octavo_engine.encryption import (
    HEAD_BYTES,
    DamagedPiece,
    EncryptionKeys,
    UnknownKey,
    key_id,
    read_encryption_keys,
)
from octavo_engine.errors import ConfigError

OLD, NEW = b"o" * 32, b"n" * 32


def text_of(*keys: bytes) -> str:
    return "".join(f"{base64.b64encode(key).decode()}\n" for key in keys)


def test_what_is_sealed_opens_in_its_place_only():
    encryption = EncryptionKeys([OLD])
    cipher = encryption.new_cipher()
    sealed = cipher.seal(0, b"a prompt", b"context")
    assert b"a prompt" not in sealed + cipher.head
    again = encryption.cipher_of(cipher.head)
    assert again.open(0, sealed, b"context") == b"a prompt"
    for number, data, context in (
        (1, sealed, b"context"), (0, sealed, b""), (0, sealed[:-1], b"context"), (0, b"", b""),
        (0, bytes([sealed[0] ^ 1]) + sealed[1:], b"context"),
    ):  # fmt: skip
        with pytest.raises(DamagedPiece):
            again.open(number, data, context)


def test_every_file_has_a_key_of_its_own():
    """So that pieces of two files with one number, and so one nonce, show nothing together."""
    one, other = EncryptionKeys([OLD]).new_cipher(), EncryptionKeys([OLD]).new_cipher()
    assert one.seal(0, b"same") != other.seal(0, b"same")
    with pytest.raises(DamagedPiece):
        other.open(0, one.seal(0, b"same"))


def test_the_first_key_writes_and_all_of_them_read():
    before = EncryptionKeys([OLD]).new_cipher()
    rotated = EncryptionKeys([NEW, OLD])
    assert rotated.cipher_of(before.head).open(0, before.seal(0, b"x")) == b"x"
    after = rotated.new_cipher()
    assert after.head.startswith(key_id(NEW)) and len(after.head) == HEAD_BYTES
    with pytest.raises(UnknownKey, match=key_id(NEW).hex()):
        EncryptionKeys([OLD]).cipher_of(after.head)


def test_a_key_file_has_one_key_a_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"{text_of(NEW)}\n  {text_of(OLD)}")
    encryption = read_encryption_keys(str(path))
    assert encryption is not None and encryption.new_cipher().head.startswith(key_id(NEW))
    encryption.cipher_of(key_id(OLD) + os.urandom(16))
    assert read_encryption_keys(None) is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no key"),
        (b"\n \n", "has no key"),
        (text_of(b"short").encode(), "line 1 is not a key"),
        (text_of(OLD).encode() + b"secret\n", "line 2 is not a key"),
        (b"\xff" * 32, "it is not text"),
        (None, "No such file"),
    ],
)
def test_a_key_file_that_has_no_keys_is_refused_with_advice(tmp_path, content, sentence):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence) as refused:
        read_encryption_keys(str(path))
    assert "openssl rand -base64 32" in str(refused.value) and "secret" not in str(refused.value)
