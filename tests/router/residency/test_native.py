"""Which form of the hot path is taken, and what is said when it is the slow one."""

import sys
from types import ModuleType

from octavo_engine.protocol.route_keys import VERSION
from octavo_router.residency import native, scan


def test_the_compiled_hot_path_is_taken_where_it_is():
    hot_path = native.load()
    assert (hot_path.is_native, hot_path.problem) == (True, "")
    assert type(hot_path.scan(b"{}", 0)).__module__ == "octavo_router._fast"


def test_without_it_the_slow_twin_serves_and_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo_router._fast", None)
    hot_path = native.load()
    assert not hot_path.is_native
    assert "octavo_router._fast cannot be imported" in hot_path.problem
    assert isinstance(hot_path.scan(b"{}", 0), scan.PyScan)


def test_keys_of_another_version_are_not_mixed_in(monkeypatch):
    stale = ModuleType("octavo_router._fast")
    vars(stale)["ROUTE_KEYS_VERSION"] = VERSION + b"x"
    monkeypatch.setitem(sys.modules, "octavo_router._fast", stale)
    hot_path = native.load()
    assert not hot_path.is_native
    assert "build it again" in hot_path.problem
