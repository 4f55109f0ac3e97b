"""A secret that hosts share: read from a file, and proved to each other without being sent.

Both sides send a nonce, and prove the secret for both nonces and their own side, so that neither
can repeat what the other sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from octavo_engine.errors import ConfigError

MIN_SECRET_BYTES = 16
NONCE_BYTES = 16

Nonce: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * NONCE_BYTES}}}$")]
Proof: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def read_secret(path: str, setting: str) -> bytes:
    """Without the white space around it. `setting` names the file in errors. Raises ConfigError."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror or error}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{setting} {path} must have at least {MIN_SECRET_BYTES} bytes; it has {len(secret)}"
        )
    return secret


def new_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def proof(secret: bytes, side: str, client_nonce: str, server_nonce: str) -> str:
    """That `side` of a protocol knows the secret, for these two nonces only."""
    text = f"octavo {side} {client_nonce} {server_nonce}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def proves(given: str, secret: bytes, side: str, client_nonce: str, server_nonce: str) -> bool:
    wanted = proof(secret, side, client_nonce, server_nonce)
    return hmac.compare_digest(given.encode(), wanted.encode())
