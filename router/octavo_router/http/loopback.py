"""Whether a request was made on this machine, by a program and not by a page in a browser."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Whoever sends one of these speaks for somebody else, who may be anywhere. Or is a page.
_RELAYED: Final = frozenset(
    (b"forwarded", b"via", b"x-real-ip", b"origin", b"sec-fetch-site", b"true-client-ip")
)
_RELAYED_PREFIXES: Final = (b"x-forwarded-", b"x-envoy-", b"cf-")


def is_made_here(client: str, fields: Sequence[tuple[bytes, bytes]]) -> bool:
    """`client` is the peer's address. Proxies on this machine are known by the fields they add."""
    if not is_loopback(client):
        return False
    for name, value in fields:
        if name in _RELAYED or name.startswith(_RELAYED_PREFIXES):
            return False
        if name == b"host" and not names_this_machine(value.decode("latin-1")):
            return False
    return True


def is_loopback(address: str) -> bool:
    """Of an address, maybe with a port; names are none."""
    parsed = _address(address)
    return parsed is not None and parsed.is_loopback


def names_this_machine(host: str) -> bool:
    """A Host that no page elsewhere can have: an address, or a name that is never looked up.

    A page may have its own name lead to this machine, and its browser then asks here under that.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.rstrip(".").lower()
    return name == "localhost" or name.endswith(".localhost") or _address(name) is not None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    host = text.rsplit(":", 1)[0] if text.count(":") == 1 else text
    try:
        address = ipaddress.ip_address(host.partition("]")[0].removeprefix("["))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
