"""Every story about the data path is told twice: on the long way, and on the express lane."""

from __future__ import annotations

import pytest

from tests.fakes import router_rig


@pytest.fixture(autouse=True, params=[False, True], ids=["long way", "express lane"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether requests that nothing happens to are carried by native code."""
    is_express: bool = request.param
    monkeypatch.setattr(router_rig, "ON_EXPRESS_LANE", is_express)
    return is_express
