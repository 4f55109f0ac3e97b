"""Every test of the data path runs twice.

Once with connections that are made for the request, once with the default policy and connections
that were there before.
"""

from __future__ import annotations

import pytest

from octavo_router.proxy import exchange
from tests.fakes import router_rig


@pytest.fixture(autouse=True, params=[False, True], ids=["new", "kept"])
def connections(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an engine's connection is there when the first request comes."""
    monkeypatch.setattr(router_rig, "KEEPS_CONNECTIONS", request.param)
    monkeypatch.setattr(exchange, "_SUSPECT_S", 0.0)  # test_quarantine.py has them as they are
    monkeypatch.setattr(exchange, "_GONE_ON_S", 0.0)
