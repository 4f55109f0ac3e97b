"""Every story about the data path is told twice.

Once on the long way over the loop's sockets, and once on the express lane over native ones.
"""

from __future__ import annotations

import pytest

from octavo_router.proxy import exchange
from tests.fakes import router_rig


@pytest.fixture(autouse=True, params=[False, True], ids=["long way", "express lane"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether native code carries requests that nothing happens to, and what sockets carry."""
    is_express: bool = request.param
    monkeypatch.setattr(router_rig, "ON_EXPRESS_LANE", is_express)
    monkeypatch.setattr(router_rig, "ON_SOCKETS_OF_THE_LOOP", not is_express)
    monkeypatch.setattr(exchange, "_SUSPECT_S", 0.0)  # told of in test_quarantine.py
    monkeypatch.setattr(exchange, "_GONE_ON_S", 0.0)
    return is_express
