"""Which addresses a server may connect to for its clients: public ones only."""

from __future__ import annotations

import ipaddress

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
# Beside those that the standard library knows: relays and transitions that lead to addresses in
# them, examples, and what clouds answer their own machines at.
_REFUSED_V4 = tuple(
    map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32"))
)
_REFUSED_V6 = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2002::/16", "3fff::/20")))


def is_public(text: str) -> bool:
    """False too for private, loopback, link-local, multicast and reserved addresses, those of
    metadata services, and IPv6 addresses that stand for such an IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return not address.is_reserved and not any(address in net for net in _REFUSED_V4)
    return address in _GLOBAL_UNICAST and not any(address in net for net in _REFUSED_V6)
