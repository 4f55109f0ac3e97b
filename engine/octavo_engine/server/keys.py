"""API keys: who may call. Digests are compared in constant time, all of them, every time."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from octavo_engine.server.http_errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Iterable


class KeyRing:
    """Knows digests only; an empty ring lets everybody in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, authorization: str) -> None:
        """Raises HttpError (401). The scheme is Bearer; the key is opaque and is never logged."""
        if not self._digests:
            return
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(given, digest)
        if not known or scheme.lower() != "bearer":
            raise HttpError(
                401,
                "A valid API key is required: send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                type="authentication_error",
                headers=((b"www-authenticate", b"Bearer"),),
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()
