"""What counts as made on this machine: programs here, and the page the router serves itself."""

from __future__ import annotations

import pytest

from octavo_router.http.loopback import is_made_here

HOST = (b"host", b"localhost:8080")
SAME = (b"sec-fetch-site", b"same-origin")


@pytest.mark.parametrize(
    "fields",
    [
        (HOST,),
        (HOST, (b"origin", b"http://localhost:8080"), SAME),
        (SAME, (b"origin", b"https://127.0.0.1:8443"), (b"host", b"127.0.0.1:8443")),
    ],
)
def test_programs_and_the_page_of_this_port_do(fields: tuple[tuple[bytes, bytes], ...]) -> None:
    assert is_made_here("127.0.0.1:5000", fields)
    assert is_made_here("::1", fields)
    assert not is_made_here("10.0.0.1", fields)


@pytest.mark.parametrize(
    "fields",
    [
        (HOST, (b"origin", b"https://evil.example")),
        (HOST, (b"origin", b"http://localhost:3000")),  # another program's page on this machine
        (HOST, (b"origin", b"http://localhost")),
        (HOST, (b"origin", b"null")),
        (HOST, (b"sec-fetch-site", b"cross-site")),
        (HOST, (b"sec-fetch-site", b"same-site")),
        (HOST, (b"sec-fetch-site", b"none")),
        ((b"origin", b"http://"),),
        # A name of somebody else's that leads here.
        ((b"host", b"evil.example"), (b"origin", b"http://evil.example"), SAME),
        (HOST, SAME, (b"x-forwarded-for", b"10.0.0.1")),
    ],
)
def test_other_pages_and_proxies_do_not(fields: tuple[tuple[bytes, bytes], ...]) -> None:
    assert not is_made_here("127.0.0.1:5000", fields)
