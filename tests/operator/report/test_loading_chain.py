"""From an engine that loads, through a router that asks it, to the words in the status."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from octavo_engine.protocol.loading import LoadProgress
from octavo_engine.protocol.state import State
from octavo_operator.objects import kinds
from octavo_operator.objects.names import ENGINE_CONTAINER
from octavo_router.admin.state import StateReporter
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.flow.admin import AdminAccess
from octavo_router.flow.admission import AdmissionDemand
from tests.fakes.engine import FakeEngine
from tests.fakes.facts import until
from tests.fakes.listening import Listening, listening
from tests.fakes.operator import OperatorBench
from tests.fakes.server import running

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

POOL = "default/smollm2"
LOADING = {"name": ENGINE_CONTAINER, "ready": False, "state": {"running": {}}}


def started_pod(bench: OperatorBench) -> kinds.Object:
    """Its engine runs, and is not ready."""
    bench.create(replicas=1)
    bench.reconcile()
    bench.workloads.sync()
    (pod,) = bench.pods()
    bench.workloads.set_status(pod, {"containerStatuses": [LOADING]})
    return pod


def told_by(router: Listening) -> bytes:
    """The state page as it goes over the wire."""
    reporter = StateReporter(
        router.registry, lambda pool: AdmissionDemand(0, 0, 0), router.metrics,
        replica="router-0", admin=AdminAccess(), epoch="e1", known_pools=list,
    )  # fmt: skip
    return msgspec.json.encode(reporter.state())


def ask_router(port: int, uid: str, revision: str, *, fact: Callable[[Any], bool]) -> State:
    """What a router says of the engine at `port`, once it is as awaited."""

    async def ask() -> State:
        spec = EndpointSpec(uid, Address("127.0.0.1", port), POOL, revision=revision, kind="octavo")
        async with listening() as router:
            (endpoint,) = router.add(spec)
            await until(lambda: fact(endpoint))
            return msgspec.json.decode(told_by(router), type=State)

    return asyncio.run(ask())


def test_bytes_of_a_loading_engine_arrive_in_the_status():
    bench = OperatorBench()
    pod = started_pod(bench)
    uid, revision = kinds.uid_of(pod), bench.deployment()["status"]["revision"]
    bench.demand.expect(["router-0"])
    engine = FakeEngine(
        state="loading",
        progress=0.3,
        loading=LoadProgress("loading", int(1.2 * 2**30), int(3.9 * 2**30), 400 * 2**20),
    )
    with running(engine) as server:
        state = ask_router(server.port, uid, revision, fact=lambda e: e.progress is not None)
        bench.demand.learn("router-0", state)
        bench.reconcile()
        status = bench.deployment()["status"]
        assert status["loading"] == {
            "phase": "Loading", "pod": kinds.name_of(pod), "percent": 30,
            "bytesDone": int(1.2 * 2**30), "bytesTotal": int(3.9 * 2**30),
            "bytesPerSecond": 400 * 2**20, "remainingSeconds": 7,
            "message": "Loading weights: 1.2 of 3.9 GiB at 400.0 MiB/s, 7 s left.",
        }  # fmt: skip
        assert bench.conditions()["Ready"] == (
            "False", "LoadingModel",
            "0 of 1 replicas serve; loading weights: 1.2 of 3.9 GiB at 400.0 MiB/s, 7 s left.",
        )  # fmt: skip

        engine.state, engine.loading = "ready", None
        state = ask_router(server.port, uid, revision, fact=lambda e: e.model is not None)
    bench.demand.learn("router-0", state)
    bench.workloads.set_status(pod, {"containerStatuses": [{**LOADING, "ready": True}]})
    bench.reconcile()
    status = bench.deployment()["status"]
    assert status["loading"] == {"phase": "Ready", "percent": 100}
    assert status["model"] == {
        "uri": "demo://smollm2", "id": "fake", "architecture": "FakeForCausalLM",
        "format": "safetensors bfloat16", "maxModelLen": 256,
    }  # fmt: skip


def test_a_router_and_an_engine_of_before_still_tell_the_share():
    bench = OperatorBench()
    pod = started_pod(bench)
    bench.demand.expect(["router-0"])
    old = {
        "id": kinds.uid_of(pod), "pool": POOL, "revision": "", "url": "http://e",
        "state": "connecting", "loading": 0.5,
    }  # fmt: skip
    page = {"epoch": "e1", "replica": "router-0", "pools": [], "endpoints": [old]}
    bench.demand.learn("router-0", msgspec.json.decode(msgspec.json.encode(page), type=State))
    bench.reconcile()
    loading = bench.deployment()["status"]["loading"]
    assert (loading["percent"], loading["message"]) == (50, "Loading weights: 50 %.")


def test_of_two_engines_the_one_that_is_further_is_told_in_full():
    bench = OperatorBench()
    bench.create(replicas=2)
    bench.reconcile()
    bench.workloads.sync()
    for pod in bench.pods():
        bench.workloads.set_status(pod, {"containerStatuses": [LOADING]})
    bench.demand.expect(["router-0"])
    endpoints = [
        {"id": kinds.uid_of(pod), "pool": POOL, "revision": "", "url": "http://e",
         "state": "connecting", "loading": share,
         "progress": {"phase": "loading", "bytes_done": int(share * 2**21), "bytes_total": 2**21}}
        for pod, share in zip(bench.pods(), (0.25, 0.75), strict=True)
    ]  # fmt: skip
    page = {"epoch": "e1", "replica": "router-0", "pools": [], "endpoints": endpoints}
    bench.demand.learn("router-0", msgspec.json.decode(msgspec.json.encode(page), type=State))
    bench.reconcile()
    loading = bench.deployment()["status"]["loading"]
    assert loading["pod"] == kinds.name_of(bench.pods()[1])
    assert loading["message"] == "Loading weights: 1.5 of 2.0 MiB."
