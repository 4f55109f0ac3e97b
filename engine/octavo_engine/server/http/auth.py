"""API keys: who may call what. Digests are compared in constant time, all of them, every time."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import TYPE_CHECKING, Literal

from octavo_engine.errors import ConfigError
from octavo_engine.server.http.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Iterable

Access = Literal["public", "key", "admin"]

_BEARER = ((b"www-authenticate", b"Bearer"),)
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


class KeyRing:
    """Knows digests only. Without any digest it asks for nothing, unless keys are required."""

    def __init__(self, keys: Iterable[str] = (), *, is_required: bool = False) -> None:
        self._digests = tuple({_digest(key): None for key in keys})
        self.is_required = is_required or bool(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def holds(self, key: str) -> bool:
        given = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(given, digest)
        return known


class Guard:
    """Decides by a route's access class. Its rings are replaced whole when a file changes."""

    def __init__(self, keys: KeyRing, admin_keys: KeyRing) -> None:
        self.keys = keys
        self.admin_keys = admin_keys

    def check(self, access: Access, authorization: str, api_key: str) -> None:
        """Raises HttpError (401, 403). Keys are opaque and are never logged.

        An admin key opens everything; while there are none, the others open admin routes too.
        """
        if access == "public":
            return
        wants_admin = access == "admin" and self.admin_keys.is_required
        if not wants_admin and not self.keys.is_required:
            return
        given = given_key(authorization, api_key)
        is_admin, is_known = self.admin_keys.holds(given), self.keys.holds(given)
        if is_admin or (is_known and not wants_admin):
            return
        if is_known:
            raise HttpError(
                403,
                "This route needs an admin key.",
                code="admin_key_required",
            )
        raise HttpError(
            401,
            "A valid API key is required: send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers=_BEARER,
        )


def parse_keys(text: str, source: str) -> list[str]:
    """The keys of a file: one a line, as they are or as `sha256:HEX`; # begins a comment line.

    Raises ConfigError.
    """
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{source}, line {number}: a key is printable ASCII without spaces")
        if key.startswith("sha256:") and not _DIGEST.fullmatch(key):
            raise ConfigError(f"{source}, line {number}: sha256: needs 64 hexadecimal digits")
        keys.append(key)
    return keys


def _digest(key: str) -> bytes:
    if given := _DIGEST.fullmatch(key):
        return bytes.fromhex(given[1])
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def given_key(authorization: str, api_key: str) -> str:
    """The key of a request; an empty one, which no ring holds, if there is none."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return "" if authorization else api_key.strip()
