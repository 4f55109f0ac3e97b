"""From watches and lists to the cache and the queue."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest

from octavo_operator.errors import ApiRefused
from octavo_operator.metrics import OperatorMetrics
from octavo_operator.objects import kinds
from octavo_operator.watch.informer import Informer
from octavo_operator.watch.namespaces import permitted
from octavo_operator.watch.world import WATCHED, World, are_synced
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import FakeCluster
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_operator.decide.observed import DeploymentKey
    from octavo_operator.objects.kinds import Kind
    from tests.fakes.cluster import Call


class TestInformer:
    def make(
        self, cluster: FakeCluster, namespaces: tuple[str, ...] = ()
    ) -> tuple[Informer, list[DeploymentKey], World]:
        world = World()
        woken: list[DeploymentKey] = []
        intake = Informer(
            cluster,
            world,
            namespaces=namespaces,
            wake=woken.append,
            metrics=OperatorMetrics(),
            clock=ManualClock(),
            rng=Random(1),
        )
        return intake, woken, world

    def test_filling_wakes_each_resource_once(self):
        cluster = FakeCluster()
        cluster.put(make_deployment("a"))
        cluster.put(make_deployment("b"))
        intake, woken, _ = self.make(cluster)
        asyncio.run(intake.fill())
        assert sorted(woken) == [("default", "a"), ("default", "b")]
        for body in cluster.all(kinds.LLM_DEPLOYMENT):
            intake.event(kinds.LLM_DEPLOYMENT, None, body)
        assert len(woken) == 2

    def test_a_listing_by_a_watch_is_followed_by_one_of_our_own(self):
        """The watch does not say what vanished while it was away."""
        cluster = FakeCluster()
        cluster.put(make_deployment("a"))
        cluster.put(make_deployment("b"))
        intake, woken, world = self.make(cluster)
        asyncio.run(intake.fill())
        cluster.remove(kinds.LLM_DEPLOYMENT, "default", "a")
        intake.event(kinds.LLM_DEPLOYMENT, None, cluster.one(kinds.LLM_DEPLOYMENT, "default", "b"))
        assert intake._relisted == {kinds.LLM_DEPLOYMENT}
        asyncio.run(intake.refresh(kinds.LLM_DEPLOYMENT))
        assert world.all_keys() == [("default", "b")]
        assert woken[-1] == ("default", "a")

    def test_a_namespace_that_refuses_blocks_no_other(self, caplog):
        """Such as one that was deleted, and its Role with it."""
        cluster = FakeCluster()
        for namespace in ("gone", "here"):
            cluster.put(make_deployment("a", namespace))
        intake, _, world = self.make(cluster, ("gone", "here"))
        cluster.before = refuse_in("gone")
        asyncio.run(intake.fill())
        assert world.all_keys() == [("here", "a")]
        assert are_synced(world, WATCHED)
        cluster.put(make_deployment("b", "here"))
        caplog.clear()
        asyncio.run(intake.refresh(kinds.LLM_DEPLOYMENT))
        assert world.all_keys() == [("here", "a"), ("here", "b")]
        assert caplog.records == []  # it was said once
        cluster.before = lambda call: None
        asyncio.run(intake.refresh(kinds.LLM_DEPLOYMENT))
        assert ("gone", "a") in world.all_keys()

    def test_what_is_known_of_a_namespace_stays_while_it_refuses(self):
        """Its names are not free because somebody edits a Role."""
        cluster = FakeCluster()
        cluster.put(make_deployment("a", "gone"))
        intake, _, world = self.make(cluster, ("gone", "here"))
        asyncio.run(intake.fill())
        cluster.before = refuse_in("gone")
        asyncio.run(intake.refresh(kinds.LLM_DEPLOYMENT))
        assert world.all_keys() == [("gone", "a")]

    def test_where_all_namespaces_refuse_no_kind_counts_as_synced(self):
        cluster = FakeCluster()
        intake, _, world = self.make(cluster, ("gone",))
        cluster.before = refuse_in("gone")
        with pytest.raises(ApiRefused):
            asyncio.run(intake.refresh(kinds.POD))
        assert not world.synced

    def test_only_namespaces_that_refuse_nothing_are_watched(self):
        cluster = FakeCluster()
        cluster.before = refuse_in("gone", kind=kinds.POD)
        found = asyncio.run(permitted(cluster, ("gone", "here")))
        assert found == ("here",)

    def test_a_deletion_wakes_the_rivals_for_its_names(self):
        cluster = FakeCluster()
        owner = cluster.put(make_deployment("owner"))
        same = {"uri": "demo://x", "servedName": "owner"}
        cluster.put(make_deployment("late", "elsewhere", model=same))
        cluster.put(make_deployment("other"))
        intake, woken, _ = self.make(cluster)
        asyncio.run(intake.fill())
        woken.clear()
        intake.event(kinds.LLM_DEPLOYMENT, "DELETED", owner)
        assert woken == [("elsewhere", "late"), ("default", "owner")]

    def test_with_a_crd_go_all_its_resources(self):
        cluster = FakeCluster()
        cluster.put(make_deployment("a"))
        intake, _, world = self.make(cluster)
        asyncio.run(intake.fill())
        cluster.absent = frozenset((kinds.LLM_DEPLOYMENT,))
        asyncio.run(intake.refresh(kinds.LLM_DEPLOYMENT))
        assert world.all_keys() == []


def refuse_in(namespace: str, kind: Kind | None = None) -> Callable[[Call], None]:
    def refuse(call: Call) -> None:
        if call.namespace == namespace and kind in (None, call.kind):
            raise ApiRefused("forbidden", status=403)

    return refuse
