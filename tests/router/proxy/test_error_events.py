"""What a router makes of an engine's error inside a stream, whatever bytes the engine sent."""

from __future__ import annotations

import pytest

from octavo_router.errors import Rejected
from octavo_router.proxy.events import error_events, error_events_of
from octavo_router.proxy.streams import end_of_plain

UNREADABLE = [b"no json", b"[1", b"[" * 3000, b'{"error":' * 3000]
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: body[:10].decode())
@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_read_is_told_as_our_own_error(body: bytes, path: str) -> None:
    error = Rejected(502, "upstream_error", "the engine failed")
    assert error_events_of(body, error, path, "r") == error_events(error, path, "r")


@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: body[:10].decode())
def test_a_last_event_that_cannot_be_read_is_no_error(body: bytes) -> None:
    whole = end_of_plain(b"data: {}\n\n")
    assert end_of_plain(b"data: " + body + b' "error"\n\n') == whole
    assert end_of_plain(b'data: {"error": {"code": 400}}\n\n') != whole
