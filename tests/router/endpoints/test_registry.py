"""The registry: sources that replace their own, states from two sides, lists that are cached."""

from octavo_router.endpoints.endpoint import Address
from octavo_router.endpoints.registry import Registry
from tests.fakes.endpoints import FakeIndex, make_spec


def ready(registry, *specs, source="static"):
    added = registry.replace(source, list(specs)).added
    for endpoint in added:
        registry.report(endpoint, "ready")
    return added


def ids(endpoints):
    return [endpoint.id for endpoint in endpoints]


def test_replace_tells_what_changed():
    registry = Registry()
    first, second = ready(registry, make_spec(0), make_spec(1))
    moved = make_spec(1, labels=(("zone", "b"),))
    changes = registry.replace("static", [moved, make_spec(2)])
    assert ids(changes.added) == ["pod-2"]
    assert changes.removed == [first]
    assert changes.updated == [second]
    assert second.spec is moved
    assert first.state == "down"
    assert not any(registry.replace("static", [moved, make_spec(2)]))


def test_each_source_speaks_for_its_own_only():
    registry = Registry()
    ready(registry, make_spec(0), source="a")
    ready(registry, make_spec(1), make_spec(0), source="b")
    registry.replace("a", [])
    assert sorted(registry.endpoints) == ["pod-0", "pod-1"]  # b still knows both
    registry.replace("b", [])
    assert registry.endpoints == {}
    assert registry.pools == []


def test_only_ready_ones_are_routable():
    registry = Registry()
    first, second = ready(registry, make_spec(0), make_spec(1))
    assert registry.routable("pool") == [first, second]
    registry.report(first, "down", "no stream")
    assert registry.routable("pool") == [second]
    assert first.reason == "no stream"
    assert registry.routable("nowhere") == []


def test_the_list_is_one_object_until_something_changes():
    registry = Registry()
    (first,) = ready(registry, make_spec(0))
    before = registry.candidates("pool")
    registry.report(first, "ready")
    assert registry.candidates("pool") is before
    registry.report(first, "draining")
    assert registry.candidates("pool") is not before


def test_a_terminating_pod_gets_nothing_new_whatever_it_says():
    registry = Registry()
    first, second = ready(registry, make_spec(0), make_spec(1))
    registry.replace("static", [make_spec(0, is_terminating=True), make_spec(1)])
    assert first.state == "draining"
    registry.report(first, "ready")
    assert registry.routable("pool") == [second]
    assert first.reason == "it is being deleted"


def test_prefill_engines_answer_nobody():
    registry = Registry()
    ready(registry, make_spec(0, role="prefill"), make_spec(1, role="decode"))
    assert ids(registry.routable("pool")) == ["pod-1"]


def test_revisions_are_told_apart():
    registry = Registry()
    ready(registry, make_spec(0, revision="r1"), make_spec(1, revision="r2"))
    assert ids(registry.routable("pool", "r2")) == ["pod-1"]
    assert ids(registry.routable("pool")) == ["pod-0", "pod-1"]
    assert registry.routable("pool", "r3") == []


def test_an_address_that_was_taken_over_is_not_the_old_pod_any_more():
    registry = Registry()
    address = Address("10.0.0.1", 8000)
    (old,) = ready(registry, make_spec(0, address=address, pod_uid="uid-old"))
    old_spec = old.spec
    new_spec = make_spec(1, address=address, pod_uid="uid-new")
    registry.replace("static", [old_spec, new_spec])
    assert old.state == "down"
    assert "pod-1" in old.reason
    registry.replace("static", [new_spec])  # the late DELETE takes nothing from the new one
    assert ids(registry.pool("pool")) == ["pod-1"]


def test_ejection_and_signals_do_not_overwrite_each_other():
    registry = Registry()
    first, second = ready(registry, make_spec(0), make_spec(1))
    registry.eject(first, "5 failures")
    registry.report(first, "ready")
    assert first.state == "ejected"
    registry.report(first, "down", "gone silent")
    assert first.state == "down"
    registry.report(first, "ready")
    assert first.state == "ejected"
    registry.readmit(first)
    assert first.state == "ready"
    assert registry.routable("pool") == [first, second]


def test_when_nobody_else_is_left_ejected_ones_serve():
    registry = Registry()
    first, second = ready(registry, make_spec(0), make_spec(1))
    registry.eject(first, "5 failures")
    assert not registry.candidates("pool").is_panic
    registry.report(second, "down")
    assert registry.candidates("pool").is_panic
    assert registry.routable("pool") == [first]


def test_slots_of_the_index_come_and_go_with_endpoints():
    index = FakeIndex()
    registry = Registry(index)
    first, second = ready(registry, make_spec(0), make_spec(1))
    assert registry.candidates("pool").slots == [first.slot, second.slot]
    assert set(index.held) == {first.slot, second.slot}
    registry.replace("static", [make_spec(1)])
    assert set(index.held) == {second.slot}
    assert first.slot == -1


def test_subscribers_hear_each_change_until_they_leave():
    registry = Registry()
    heard = []
    leave = registry.subscribe(lambda change: heard.append((change.kind, change.endpoint.id)))
    (first,) = ready(registry, make_spec(0))
    registry.report(first, "ready")  # nothing new
    registry.report(first, "draining")
    registry.replace("static", [])
    assert heard == [
        ("added", "pod-0"),
        ("state", "pod-0"),
        ("state", "pod-0"),
        ("removed", "pod-0"),
    ]
    leave()
    ready(registry, make_spec(1))
    assert len(heard) == 4


def test_late_news_of_one_that_is_gone_changes_nothing():
    registry = Registry()
    (first,) = ready(registry, make_spec(0))
    registry.replace("static", [])
    version = registry.version
    registry.report(first, "ready")
    assert registry.version == version
    assert registry.routable("pool") == []


def test_a_pool_may_change_its_members():
    registry = Registry()
    (first,) = ready(registry, make_spec(0))
    registry.replace("static", [make_spec(0, pool="other")])
    assert registry.pools == ["other"]
    assert registry.routable("other") == [first]
