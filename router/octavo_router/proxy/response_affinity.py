"""Answers that engines keep: which engine a response's id leads back to.

The router sends an engine its *place*, a short hash of its id, and the engine writes that into the
ids of what it keeps: `resp_` PLACE RANDOM. So every replica of the router finds the engine again
without remembering anything.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.endpoints import PLACE_DIGITS
from octavo_router.errors import Rejected

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.endpoints.registry import Registry

_ID: Final = re.compile(rf"resp_([0-9a-f]{{{PLACE_DIGITS}}})[0-9a-f]{{32,64}}")
_SAFE: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Within a string of JSON the closing quote would be escaped, so this can only be a key.
_PREVIOUS: Final = re.compile(rb'"previous_response_id"\s*:\s*"([\w-]{1,128})"')


def place_of(endpoint_id: str) -> str:
    return blake2b(endpoint_id.encode(), digest_size=PLACE_DIGITS // 2).hexdigest()


class ResponseAffinity:
    """Looks ids up among the endpoints that are there."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._version = -1
        self._by_place: dict[str, Endpoint] = {}

    def keeper(self, id_: str) -> Endpoint:
        """Raises Rejected: no engine here keeps it."""
        found = self._find(id_)
        if found is None:
            endpoints = self._registry.endpoints
            # What is no id would be another path there.
            if len(endpoints) == 1 and _SAFE.fullmatch(id_):  # it may have made the id without us
                return next(iter(endpoints.values()))
            raise Rejected(
                404, "response_not_found", f"Response with id '{id_[:128]}' not found.",
                param="response_id",
            )  # fmt: skip
        return found

    def subset_of(self, body: bytes) -> tuple[str, ...]:
        """The engine whose stored response the body continues; empty: any."""
        named = _PREVIOUS.search(body)
        endpoint = self._find(named[1].decode()) if named else None
        return (endpoint.spec.address.authority,) if endpoint is not None else ()

    def _find(self, id_: str) -> Endpoint | None:
        parts = _ID.fullmatch(id_)
        if parts is None:
            return None
        if self._version != self._registry.version:
            self._version = self._registry.version
            endpoints = self._registry.endpoints
            self._by_place = {place_of(one): endpoint for one, endpoint in endpoints.items()}
        return self._by_place.get(parts[1])
