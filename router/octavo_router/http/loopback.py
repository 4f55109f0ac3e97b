"""Whether a request was made on this machine, by a program or by the router's own page."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Who sends one of these speaks for another client, who may be anywhere.
_RELAYED: Final = frozenset((b"forwarded", b"via", b"x-real-ip", b"true-client-ip"))
_RELAYED_PREFIXES: Final = (b"x-forwarded-", b"x-envoy-", b"cf-")


def is_made_here(client: str, fields: Sequence[tuple[bytes, bytes]]) -> bool:
    """`client` is the peer's address. Proxies on this machine are known by the fields they add."""
    if not is_loopback(client):
        return False
    host = next((value for name, value in fields if name == b"host"), b"")
    if host and not names_this_machine(host.decode("latin-1")):
        return False
    own = (b"http://" + host, b"https://" + host) if host else ()
    for name, value in fields:
        if name in _RELAYED or name.startswith(_RELAYED_PREFIXES):
            return False
        # A page in a browser here may come from anywhere, but for the one that this port serves.
        if name == b"origin" and value.lower() not in own:
            return False
        if name == b"sec-fetch-site" and value != b"same-origin":
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
