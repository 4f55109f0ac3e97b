"""Header fields as bytes: which characters they may have, and which fields stay inside."""

from __future__ import annotations

from typing import Final

from octavo_engine.protocol.endpoints import INTERNAL_HEADERS

TOKEN: Final = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Never in a head; a tab may stand in a value, CR and LF are looked at by themselves.
CONTROLS: Final = bytes(code for code in (*range(32), 127) if code != 9)

ADMIN_KEY_HEADER: Final = "x-octavo-admin-key"
# What a trusted key may say to an engine: the router itself goes by none of it.
TRUSTED: Final = frozenset((b"x-data-parallel-rank",))
# What only a trusted hop may say. From a client it would choose endpoints, tenants or addresses.
_INTERNAL: Final = frozenset(
    (
        *(name.encode() for name in INTERNAL_HEADERS), *TRUSTED,
        b"forwarded", b"x-real-ip", b"x-request-priority", b"x-tenant", b"x-served-by",
        b"x-smg-target-worker", b"x-worker-instance-id", b"x-llm-d-model-name-rewrite",
        b"x-inference-pod", b"x-inference-namespace", b"x-inference-port",
    )
)  # fmt: skip


def is_internal(name: bytes) -> bool:
    """A field that a client may send and nobody will believe. `name` is in lower case."""
    if not name.startswith(b"x-"):
        return name == b"forwarded"
    return (
        name in _INTERNAL
        or name.startswith((b"x-forwarded-", b"x-octavo-", b"x-gateway-destination-endpoint"))
        or name.endswith(b"-endpoint")
    )


def list_items(value: bytes) -> list[bytes]:
    """The items of a comma-separated list, in lower case, without the empty ones."""
    return [item for part in value.lower().split(b",") if (item := part.strip(b" \t"))]
