"""The cache of watched objects."""

from __future__ import annotations

from octavo_operator.cluster.api import Listing
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.objects import kinds
from octavo_operator.watch.world import World


def service(version: int, *, uid: str = "u", name: str = "s") -> kinds.Object:
    metadata = {
        "namespace": "d", "name": name, "uid": uid, "resourceVersion": str(version),
        "labels": {"octavo.dev/deployment": "m"}, "managedFields": ["long"],
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata}


class TestWorld:
    key = DeploymentKey("d", "m")

    def test_a_version_that_is_not_newer_is_ignored(self):
        world = World()
        assert world.keep(kinds.SERVICE, service(5)) == self.key
        assert world.keep(kinds.SERVICE, service(5)) is None
        assert world.keep(kinds.SERVICE, service(4)) is None
        assert world.keep(kinds.SERVICE, service(6)) == self.key

    def test_an_old_deletion_does_not_undo_a_new_creation(self):
        world = World()
        world.keep(kinds.SERVICE, service(5, uid="new"))
        assert world.drop(kinds.SERVICE, service(4, uid="old")) is None
        assert len(world) == 1

    def test_a_list_takes_away_what_it_lacks_but_not_what_is_newer(self):
        world = World()
        world.keep(kinds.SERVICE, service(5, name="old"))
        world.keep(kinds.SERVICE, service(50, name="new"))
        assert world.replace(kinds.SERVICE, Listing([], 10)) == {self.key}
        assert [name for _, name in world.observe(self.key).children] == ["new"]

    def test_a_list_of_one_namespace_says_nothing_of_others(self):
        world = World()
        world.keep(kinds.SERVICE, service(5))
        assert world.replace(kinds.SERVICE, Listing([], 99), namespace="other") == set()
        assert len(world) == 1

    def test_a_dropped_object_leaves_no_trace(self):
        world = World()
        for number in range(100):
            world.keep(kinds.SERVICE, service(number, name=f"s{number}"))
            world.drop(kinds.SERVICE, service(number, name=f"s{number}"))
        assert len(world) == 0
        assert not world._children
        assert not world._versions

    def test_an_object_without_our_label_is_not_kept(self):
        world = World()
        stranger = service(1)
        stranger["metadata"]["labels"] = {}
        assert world.keep(kinds.SERVICE, stranger) is None
        assert len(world) == 0
