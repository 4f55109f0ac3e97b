"""Kinds that not every cluster has: found, observed, pruned, and done without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.cluster.api import Listing
from octavo_operator.metrics import OperatorMetrics
from octavo_operator.objects import kinds
from octavo_operator.settings import OPTIONAL_KINDS, POD_MONITOR, SERVICE_MONITOR
from octavo_operator.watch.informer import NEWEST, Informer
from tests.fakes.apiserver import ApiError
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import FakeCluster
from tests.fakes.live_operator import conditions, operator, until
from tests.fakes.operator import OperatorBench, make_deployment

if TYPE_CHECKING:
    from octavo_operator.objects.kinds import Kind, Object
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.slow

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
KEDA: Object = {"autoscaling": {"provider": "keda", "maxReplicas": 3,
                        "prometheusURL": "http://prometheus:9090"}}  # fmt: skip


class Bench(OperatorBench):
    """With the optional kinds listed, as at each resync."""

    def resync(self) -> None:
        self.intake = Informer(
            self.cluster,
            self.world,
            namespaces=(),
            wake=lambda key: None,
            served=self._served,
            metrics=OperatorMetrics(),
            clock=ManualClock(),
            rng=Random(1),
        )
        asyncio.run(self.intake.refresh_optional())

    def _served(self, capabilities: frozenset[str]) -> None:
        self.reconciler.settings = replace(self.reconciler.settings, capabilities=capabilities)

    def names(self, kind: Kind) -> list[str]:
        return [kinds.name_of(body) for body in self.cluster.all(kind)]


def serving(absent: tuple[Kind, ...] = (), **spec: Any) -> Bench:
    bench = Bench(FakeCluster(absent=frozenset(absent)))
    bench.resync()
    bench.create(**spec)
    bench.settle()
    return bench


def restarted(bench: Bench) -> Bench:
    again = Bench(bench.cluster, clock=bench.clock)
    again.resync()
    return again


def test_capabilities_are_named_as_settings_know_them():
    assert {kind.capability for kind in kinds.OWNED if kind.is_optional} == OPTIONAL_KINDS


def test_a_restart_writes_nothing_of_what_is_there():
    bench = restarted(serving(**KEDA))
    before = len(bench.cluster.writes)
    bench.settle()
    assert bench.cluster.writes[before:] == []


def test_what_is_no_longer_desired_is_deleted_also_after_a_restart():
    bench = serving(**KEDA)
    assert bench.names(kinds.SCALED_OBJECT) == ["smollm2"]
    bench = restarted(bench)
    bench.edit(autoscaling=None)
    bench.settle()
    assert bench.names(kinds.SCALED_OBJECT) == []
    assert bench.names(kinds.POD_MONITOR) == ["smollm2"]


def test_drift_is_repaired_at_the_next_resync():
    bench = serving()
    bench.cluster.remove(kinds.POD_MONITOR, "default", "smollm2")
    bench.resync()
    bench.settle()
    assert bench.names(kinds.POD_MONITOR) == ["smollm2"]
    change = {"spec": {"podMetricsEndpoints": [{"port": "x"}]}}
    bench.cluster.merge(kinds.POD_MONITOR, "default", "smollm2", change)
    bench.resync()
    bench.settle()
    found = bench.cluster.one(kinds.POD_MONITOR, "default", "smollm2")
    assert found["spec"]["podMetricsEndpoints"][0]["port"] != "x"


def test_a_kind_that_comes_is_used_and_the_one_it_replaces_is_pruned():
    bench = serving(absent=(kinds.POD_MONITOR,))
    assert bench.names(kinds.SERVICE_MONITOR) == ["smollm2"]
    bench.cluster.absent = frozenset()
    bench.resync()
    assert bench.reconciler.settings.capabilities >= {POD_MONITOR, SERVICE_MONITOR}
    bench.settle()
    assert bench.names(kinds.POD_MONITOR) == ["smollm2"]
    assert bench.names(kinds.SERVICE_MONITOR) == []


def test_a_kind_that_goes_keeps_no_engine_from_rolling_out():
    bench = serving()
    for name in bench.names(kinds.POD_MONITOR):
        bench.cluster.remove(kinds.POD_MONITOR, "default", name)
    bench.cluster.absent = frozenset((kinds.POD_MONITOR, kinds.SERVICE_MONITOR))
    bench.deliver()
    bench.world.replace(kinds.POD_MONITOR, Listing([], NEWEST))
    bench.edit(engine={"maxNumSeqs": 7})
    outcome = bench.reconcile()
    assert outcome.is_failed  # and so looked at again, later and later
    assert len(bench.engines()) == 2
    bench.resync()
    bench.settle()
    assert len(bench.engines()) == 1


def test_without_keda_the_status_says_so_until_it_is_installed():
    bench = serving(absent=(kinds.SCALED_OBJECT,), **KEDA)
    assert bench.conditions()["Accepted"][:2] == ("False", "Unsupported")
    bench.cluster.absent = frozenset()
    bench.resync()
    bench.settle()
    assert bench.conditions()["Accepted"][0] == "True"
    assert bench.names(kinds.SCALED_OBJECT) == ["smollm2"]


# --- the real one ------------------------------------------------------------------------------


def small_crd(kind: Kind) -> Object:
    """Takes any spec."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{kind.group}"},
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {"plural": kind.plural, "kind": kind.name, "listKind": f"{kind.name}List",
                      "singular": kind.name.lower()},
            "versions": [{
                "name": kind.version, "served": True, "storage": True,
                "schema": {"openAPIV3Schema": anything},
            }],
        },
    }  # fmt: skip


@pytest.mark.cluster
def test_on_a_real_server_kinds_come_are_used_and_pruned_and_go(apiserver, namespace, tmp_path):
    optional = (kinds.POD_MONITOR, kinds.SERVICE_MONITOR, kinds.SCALED_OBJECT)

    def install(server: ApiServer, kind: Kind) -> None:
        file = tmp_path / f"{kind.plural}.json"
        file.write_text(json.dumps(small_crd(kind)))
        server.install(file)

    def names(server: ApiServer, kind: Kind, namespace: str) -> list[str]:
        try:
            return [kinds.name_of(o) for o in server.list(kind.api_version, kind.name, namespace)]
        except (ApiError, KeyError):
            return ["not served"]

    def remove(server: ApiServer, kind: Kind) -> None:
        server.request("DELETE", f"{CRDS}/{kind.plural}.{kind.group}")

    async def story(server: ApiServer) -> None:
        deployment = make_deployment(namespace=namespace, **KEDA)

        def is_accepted() -> bool:
            return conditions(server, namespace)["Accepted"][0] == "True"

        def are(monitors: list[str], services: list[str], scalers: list[str]) -> bool:
            wanted = (monitors, services, scalers)
            return tuple(names(server, kind, namespace) for kind in optional) == wanted

        async with operator(server, namespace, lease=None, resync_s=0.5) as found:
            server.create(deployment)
            await until(lambda: conditions(server, namespace)["Accepted"][1] == "Unsupported")
            await asyncio.to_thread(install, server, kinds.SERVICE_MONITOR)
            await asyncio.to_thread(install, server, kinds.SCALED_OBJECT)
            await until(is_accepted)
            await until(lambda: are(["not served"], ["smollm2"], ["smollm2"]))
            await asyncio.to_thread(install, server, kinds.POD_MONITOR)
            await until(lambda: are(["smollm2"], [], ["smollm2"]))
            writes = writes_of(found)
            await asyncio.sleep(1.2)  # two resyncs
            assert writes_of(found) == writes
            assert found.metrics.bugs == 0
        async with operator(server, namespace, lease=None, resync_s=0.5) as found:
            await until(lambda: found.metrics.num_reconciles)
            await asyncio.sleep(0.7)
            assert writes_of(found) == 0  # also after a restart
            server.patch(
                deployment, {"spec": {"autoscaling": {"provider": "hpa", "prometheusURL": None}}}
            )
            await until(lambda: are(["smollm2"], [], []))
            hpa = kinds.POD_AUTOSCALER
            assert names(server, hpa, namespace) == ["smollm2"]
            server.patch(deployment, {"spec": {"autoscaling": None}})
            await until(lambda: names(server, hpa, namespace) == [])
            await asyncio.to_thread(remove, server, optional[0])
            await until(lambda: are(["not served"], ["smollm2"], []))
            assert found.metrics.bugs == 0

    try:
        asyncio.run(story(apiserver))
    finally:  # others count on a cluster without these kinds
        for kind in optional:
            with contextlib.suppress(ApiError):
                remove(apiserver, kind)
        for kind in optional:
            while names(apiserver, kind, namespace) != ["not served"]:
                time.sleep(0.02)


def writes_of(found: Any) -> int:
    return sum(n for (verb, _), n in found.metrics.calls.items() if verb not in ("get", "list"))
