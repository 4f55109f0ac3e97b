"""Only public addresses are connected to."""

from __future__ import annotations

import pytest

from octavo_engine.core.media.addresses import is_public


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255",
        "192.168.1.1", "100.64.0.1", "169.254.1.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
        "255.255.255.255", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1",
        "192.88.99.1",
        # of metadata services
        "169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "168.63.129.16",
        "fd00:ec2::254", "fd20:ce::254",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd12::1", "ff02::1",
        "ff0e::1", "2001:db8::1", "3fff::1", "100::1",
        # IPv4 addresses inside IPv6 ones
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:0:4136:e378::1",
        "::ffff:0:127.0.0.1",
        # no addresses
        "", "localhost", "127.1", "0x7f000001", "2130706433",
    ],
)  # fmt: skip
def test_all_others(address: str) -> None:
    assert not is_public(address)
