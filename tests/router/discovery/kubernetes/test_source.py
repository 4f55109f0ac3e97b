"""Kubernetes as the source of endpoints, against an API server that also fails."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router.discovery.kubernetes.account import at_url
from octavo_router.discovery.kubernetes.source import KubernetesSource
from octavo_router.discovery.kubernetes.watch import WatchSettings
from octavo_router.discovery.source import Claim, Found, PoolRoute
from octavo_router.endpoints.endpoint import Address, EndpointSpec
from octavo_router.metrics import DiscoveryCounts
from tests.fakes.clock import ManualClock
from tests.fakes.facts import run, until
from tests.fakes.kube_watch import KubeWatch, endpoint_slice, pod, service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

FAST = WatchSettings(backoff_min_s=0.002, backoff_max_s=0.02)
CLAIM = Claim("2026-01-01T00:00:00Z", "default")
ROUTING = {"names": ["smollm2"], "policy": "prefix-load", "weights": {"r1": 90}, "port": 8001}


@dataclass
class Published:
    """What the source published."""

    counts: DiscoveryCounts = field(default_factory=DiscoveryCounts)
    history: list[Found] = field(default_factory=list)

    @property
    def specs(self) -> dict[str, EndpointSpec]:
        return {spec.id: spec for spec in self.history[-1].specs} if self.history else {}


@asynccontextmanager
async def watching(
    api: KubeWatch,
    *namespaces: str,
    settings: WatchSettings = FAST,
    now: Callable[[], float] = time.monotonic,
    reads_zones: bool = False,
    **more: Any,
) -> AsyncIterator[Published]:
    reported = Published()
    account = at_url(api.url, namespace="default", **more)
    source = KubernetesSource(
        account, namespaces, counts=reported.counts, settings=settings, now=now,
        reads_zones=reads_zones,
    )  # fmt: skip
    task = asyncio.create_task(source.run(reported.history.append))
    try:
        yield reported
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def has_more(reported: Published, seen: int) -> bool:
    return len(reported.history) > seen


def test_engines_are_found_by_their_labels_and_pools_by_their_services():
    async def story() -> None:
        async with KubeWatch() as api:
            api.put("services", service("smollm2", ROUTING, deployment="smollm2"))
            api.put("pods", pod("a", ip="10.0.0.1"))
            api.put("pods", pod("b", ip="10.0.0.2", revision="r2", ready=False))
            api.put("pods", pod("no-address-yet", ip=""))
            api.put("pods", pod("done", ip="10.0.0.4", phase="Succeeded"))
            async with watching(api) as reported:
                await until(lambda: bool(reported.history))
                assert reported.history[-1].pools == (
                    PoolRoute(
                        "default/smollm2", ("smollm2",), "prefix-load", {"r1": 90.0}, claim=CLAIM
                    ),
                )
                assert reported.specs == {
                    "uid-a": EndpointSpec(
                        "uid-a", Address("10.0.0.1", 8001), "default/smollm2", revision="r1",
                        kind="octavo", pod_uid="uid-a",
                        labels=(("namespace", "default"), ("pod", "a")),
                    ),
                    "uid-b": EndpointSpec(
                        "uid-b", Address("10.0.0.2", 8001), "default/smollm2", revision="r2",
                        kind="octavo", pod_uid="uid-b",
                        labels=(("namespace", "default"), ("pod", "b")), is_ready=False,
                    ),
                }  # fmt: skip

    run(story())


def test_prefill_pods_compute_prompts_for_the_pool_and_strangers_are_not_taken():
    async def story() -> None:
        async with KubeWatch() as api, watching(api) as reported:
            api.put("pods", pod("a"))
            api.put("pods", pod("p", ip="10.0.0.2", component="prefill"))
            api.put("pods", pod("x", ip="10.0.0.3", component="notebook"))
            api.put("pods", pod("w", ip="10.0.0.4", component="worker"))  # of a group
            await until(lambda: len(reported.specs) == 2)
            prefill = reported.specs["uid-p"]
            assert (prefill.role, prefill.pool, prefill.revision) == (
                "prefill", "default/smollm2", "r1",
            )  # fmt: skip
            assert reported.specs["uid-a"].role == "both"

    run(story())


def test_pods_that_change_sides_are_where_their_label_says_whatever_their_component():
    async def story() -> None:
        async with KubeWatch() as api, watching(api) as reported:
            flipped = pod("a")
            flipped["metadata"]["labels"]["octavo.dev/side"] = "prefill"
            back = pod("p", ip="10.0.0.2", component="prefill")
            back["metadata"]["labels"]["octavo.dev/side"] = "decode"
            api.put("pods", flipped)
            api.put("pods", back)
            await until(lambda: len(reported.specs) == 2)
            assert (reported.specs["uid-a"].role, reported.specs["uid-p"].role) == (
                "prefill", "both",
            )  # fmt: skip
            assert all(spec.is_moved for spec in reported.specs.values())
            flipped["metadata"]["labels"]["octavo.dev/side"] = "decode"
            api.put("pods", flipped)
            await until(lambda: reported.specs["uid-a"].role == "both")

    run(story())


def test_a_pod_that_is_being_deleted_is_terminating_at_once_and_gone_when_deleted():
    async def story() -> None:
        async with KubeWatch() as api:
            api.put("pods", pod("a"))
            async with watching(api) as reported:
                await until(lambda: "uid-a" in reported.specs)
                api.put("pods", pod("a", terminating=True))
                await until(lambda: reported.specs["uid-a"].is_terminating)
                api.delete("pods", "a")
                await until(lambda: reported.specs == {})

    run(story())


def test_a_service_of_engines_that_compute_prompts_belongs_to_another_ones_pool():
    def one(address: str) -> dict[str, Any]:
        return {"addresses": [address], "conditions": {"ready": True}}

    async def story() -> None:
        async with KubeWatch() as api, watching(api) as reported:
            api.put("services", service("vllm", {"names": ["m"], "policy": "prefill-decode"}))
            api.put("services", service("vllm-prefill", {"prefillFor": "vllm"}))
            api.put("services", service("confused", {"prefillFor": "vllm", "names": ["m"]}))
            api.put("endpointslices", endpoint_slice("vllm-x", "vllm", [one("10.0.0.1")]))
            api.put(
                "endpointslices",
                endpoint_slice("vllm-prefill-x", "vllm-prefill", [one("10.0.0.2")]),
            )
            api.put("endpointslices", endpoint_slice("confused-x", "confused", [one("10.0.0.3")]))
            await until(lambda: len(reported.specs) == 2)
            found = {(spec.address.host, spec.pool, spec.role) for spec in reported.specs.values()}
            assert found == {
                ("10.0.0.1", "default/vllm", "both"),
                ("10.0.0.2", "default/vllm", "prefill"),
            }
            assert reported.history[-1].pools == (
                PoolRoute("default/vllm", ("m",), "prefill-decode", {}, claim=CLAIM),
            )

    run(story())


def test_a_plain_service_is_served_by_its_endpoint_slices():
    async def story() -> None:
        ready = {
            "addresses": ["10.1.0.1"],
            "conditions": {"ready": True},
            "targetRef": {"kind": "Pod", "name": "v-0", "uid": "uid-v-0"},
            "zone": "north",
        }
        leaving = {
            "addresses": ["10.1.0.2"],
            "conditions": {"ready": False, "terminating": True},
        }
        async with KubeWatch() as api, watching(api) as reported:
            api.put("services", service("vllm", {"names": ["llama"]}))
            api.put("services", service("unrelated", None))
            api.put("endpointslices", endpoint_slice("vllm-x", "vllm", [ready, leaving]))
            api.put("endpointslices", endpoint_slice("vllm-y", "vllm", None))
            api.put("endpointslices", endpoint_slice("unrelated-x", "unrelated", [ready]))
            await until(lambda: len(reported.specs) == 2)
            assert reported.specs["uid-v-0"].address == Address("10.1.0.1", 8000)
            assert reported.specs["uid-v-0"].pool == "default/vllm"
            assert reported.specs["uid-v-0"].kind is None
            assert reported.specs["uid-v-0"].zone == "north"
            other = reported.specs["default/vllm/10.1.0.2:8000"]
            assert (other.is_terminating, other.is_ready) == (True, False)

    run(story())


def test_the_port_is_the_one_that_the_annotation_names():
    async def story() -> None:
        ports = [{"name": "metrics", "port": 9000}, {"name": "api", "port": 8080}]
        at = [{"addresses": ["10.1.0.1"]}]
        async with KubeWatch() as api, watching(api) as reported:
            api.put("services", service("v", {"port": "api"}))
            api.put("endpointslices", endpoint_slice("v-x", "v", at, ports=ports))
            await until(lambda: "default/v/10.1.0.1:8080" in reported.specs)
            api.put("services", service("v", {}))  # none is named http: the first
            await until(lambda: "default/v/10.1.0.1:9000" in reported.specs)
            api.put("services", service("v", {"port": "absent"}))
            await until(lambda: reported.specs == {})

    run(story())


def in_zone(pod_name: str, zone: str | None) -> dict[str, Any]:
    return {
        "addresses": ["10.0.0.1"],
        "targetRef": {"kind": "Pod", "name": pod_name, "uid": f"uid-{pod_name}"},
        "zone": zone,
    }


def test_zones_of_pods_are_in_their_labels_or_in_slices():
    async def story() -> None:
        async with KubeWatch() as api:
            api.put("services", service("smollm2", ROUTING, deployment="smollm2"))
            labelled = pod("a", ip="10.0.0.1")
            labelled["metadata"]["labels"]["topology.kubernetes.io/zone"] = "north"
            api.put("pods", labelled)
            for name in "bc":
                api.put("pods", pod(name, ip=f"10.0.0.{ord(name)}"))
            parts = [in_zone("b", "south"), in_zone("c", None), in_zone("gone", "south")]
            api.put("endpointslices", endpoint_slice("s-x", "smollm2-engines", parts))
            async with watching(api, reads_zones=True) as reported:
                await until(lambda: any(spec.zone == "south" for spec in reported.specs.values()))
                zones = {uid: spec.zone for uid, spec in reported.specs.items()}
                assert zones == {"uid-a": "north", "uid-b": "south", "uid-c": ""}
                # A pod that is in no slice for a moment has not moved.
                api.put("endpointslices", endpoint_slice("s-x", "smollm2-engines", None))
                api.put("pods", pod("d", ip="10.0.0.4"))
                await until(lambda: "uid-d" in reported.specs)
                assert reported.specs["uid-b"].zone == "south"

    run(story())


def test_where_slices_may_not_be_read_zones_are_not_known_and_all_else_is():
    async def story() -> None:
        async with KubeWatch(denied={"endpointslices"}) as api:
            api.put("services", service("smollm2", ROUTING, deployment="smollm2"))
            api.put("pods", pod("a"))
            async with watching(api, reads_zones=True) as reported:
                await until(lambda: "uid-a" in reported.specs)
                assert reported.specs["uid-a"].zone == ""
                api.put("pods", pod("b", ip="10.0.0.2"))
                await until(lambda: "uid-b" in reported.specs)

    run(story())


def test_slices_are_not_asked_for_where_nobody_needs_them():
    async def story() -> None:
        async with KubeWatch(denied={"endpointslices"}) as api:
            api.put("services", service("smollm2", ROUTING, deployment="smollm2"))
            api.put("pods", pod("a"))
            async with watching(api) as reported:
                await until(lambda: "uid-a" in reported.specs)
                assert not any("endpointslices" in request for request in api.requests)

    run(story())


def test_a_bad_annotation_changes_nothing_but_its_own_service():
    async def story() -> None:
        async with KubeWatch() as api:
            api.put("services", service("bad", "{", deployment="other"))
            api.put("services", service("worse", {"weights": {"r": -1}}, deployment="third"))
            api.put("services", service("good", ROUTING, deployment="smollm2"))
            async with watching(api) as reported:
                await until(lambda: bool(reported.history))
                assert [route.pool for route in reported.history[-1].pools] == ["default/smollm2"]

    run(story())


def test_long_lists_come_in_pages():
    async def story() -> None:
        async with KubeWatch(page_limit=3) as api:
            for i in range(10):
                api.put("pods", pod(f"p{i}", ip=f"10.0.0.{i}"))
            async with watching(api) as reported:
                await until(lambda: len(reported.specs) == 10)
                assert sum("pods" in r and "continue=" in r for r in api.requests) == 3

    run(story())


def test_after_a_cut_the_world_is_listed_again():
    async def story() -> None:
        async with KubeWatch() as api:
            api.put("pods", pod("a"))
            async with watching(api) as reported:
                await until(lambda: "uid-a" in reported.specs)
                await api.stop()  # nobody tells the router what happens meanwhile
                api.delete("pods", "a")
                api.put("pods", pod("b", ip="10.0.0.2"))
                api.compact()
                assert "uid-a" in reported.specs  # what was known stands
                await api.start()
                await until(lambda: list(reported.specs) == ["uid-b"])
                assert reported.counts.relists >= 1

    run(story())


def test_a_version_that_is_too_old_means_a_new_list():
    async def story() -> None:
        async with KubeWatch() as api:
            api.put("pods", pod("a"))
            async with watching(api) as reported:
                await until(lambda: "uid-a" in reported.specs and api.num_watches == 2)
                api.frozen = True
                api.put("pods", pod("b", ip="10.0.0.2"))
                api.compact()
                api.frozen = False
                api.cut()
                await until(lambda: "uid-b" in reported.specs)

    run(story())


def test_a_watch_that_freezes_is_given_up():
    async def story() -> None:
        settings = WatchSettings(
            watch_s=0.02, grace_s=0.02, backoff_min_s=0.002, backoff_max_s=0.01
        )
        async with KubeWatch(frozen=True) as api:
            api.put("pods", pod("a"))
            async with watching(api, settings=settings) as reported:
                await until(lambda: "uid-a" in reported.specs)
                api.put("pods", pod("b", ip="10.0.0.2"))  # no watch tells of it
                await until(lambda: "uid-b" in reported.specs)

    run(story())


def test_a_watch_that_ends_as_agreed_goes_on_where_it_was():
    async def story() -> None:
        settings = WatchSettings(backoff_min_s=0.002, min_watch_s=0.0)
        async with KubeWatch() as api:
            api.put("pods", pod("a"))
            async with watching(api, settings=settings) as reported:
                await until(lambda: api.num_watches == 2)
                api.put("pods", pod("b", ip="10.0.0.2"))
                api.bookmark("pods")
                told_at = reported.counts.heard_at
                await until(
                    lambda: "uid-b" in reported.specs and reported.counts.heard_at != told_at
                )
                api.end_watches()
                await until(lambda: api.num_watches == 4)
                resumed = [r for r in api.requests if "pods" in r and "watch=1" in r][-1]
                assert f"resourceVersion={api.version}" in resumed
                api.put("pods", pod("c", ip="10.0.0.3"))
                await until(lambda: "uid-c" in reported.specs)
                assert sum("pods?limit" in r for r in api.requests) == 1

    run(story())


def test_a_reused_name_or_address_is_another_endpoint():
    async def story() -> None:
        async with KubeWatch() as api, watching(api) as reported:
            api.put("pods", pod("a", uid="u1"))
            await until(lambda: "u1" in reported.specs)
            api.delete("pods", "a")
            api.put("pods", pod("a", uid="u2"))
            await until(lambda: list(reported.specs) == ["u2"])

    run(story())


def test_a_late_end_of_what_was_replaced_leaves_its_successor():
    async def story() -> None:
        async with KubeWatch() as api, watching(api) as reported:
            api.put("pods", pod("a", uid="u1"))
            await until(lambda: "u1" in reported.specs)
            api.put("pods", pod("a", uid="u2"))
            api.delete_late("pods", pod("a", uid="u1"))
            api.put("pods", pod("b", uid="u3", ip="10.0.0.2"))
            await until(lambda: "u3" in reported.specs)
            assert sorted(reported.specs) == ["u2", "u3"]
            api.delete("pods", "a")
            await until(lambda: list(reported.specs) == ["u3"])

    run(story())


@pytest.mark.slow
def test_readiness_that_flaps_is_not_followed_up():
    async def story() -> None:
        clock = ManualClock()
        async with KubeWatch() as api:
            api.put("pods", pod("a"))
            async with watching(api, now=clock) as reported:
                await until(lambda: "uid-a" in reported.specs)
                for _ in range(4):
                    api.put("pods", pod("a", ready=False))
                    await until(lambda: not reported.specs["uid-a"].is_ready)
                    api.put("pods", pod("a", ready=True))
                    await until(partial(has_more, reported, len(reported.history)))
                assert not reported.specs["uid-a"].is_ready
                clock.advance(1.0)  # in which it stayed ready
                await until(lambda: reported.specs["uid-a"].is_ready)

    run(story())


def test_all_namespaces_or_those_that_are_named():
    async def story() -> None:
        async with KubeWatch() as api:
            for namespace in ("one", "two", "three"):
                api.put("pods", pod("a", uid=namespace, namespace=namespace))
            async with watching(api, "one", "two") as reported:
                await until(lambda: set(reported.specs) == {"one", "two"})
            async with watching(api, "*") as reported:
                await until(lambda: set(reported.specs) == {"one", "two", "three"})

    run(story())


def test_the_token_is_read_again_for_each_request(tmp_path):
    async def story() -> None:
        token = tmp_path / "token"
        token.write_text("old")
        async with KubeWatch(token="new") as api:
            api.put("pods", pod("a"))
            async with watching(api, token_file=str(token)) as reported:
                await until(lambda: reported.counts.errors > 0)
                assert reported.history == []
                token.write_text("new\n")
                await until(lambda: "uid-a" in reported.specs)

    run(story())


def test_a_namespace_that_may_not_be_read_keeps_no_other_from_being_served():
    """With a deleted namespace goes its Role: a router that starts then is refused there."""

    async def story() -> None:
        async with KubeWatch(denied_namespaces={"gone"}) as api:
            api.put("pods", pod("a"))
            api.put("pods", pod("b", namespace="gone"))
            async with watching(api, "default", "gone") as reported:
                await until(lambda: "uid-a" in reported.specs)
                assert "uid-b" not in reported.specs
                api.denied_namespaces.clear()
                await until(lambda: "uid-b" in reported.specs)

    run(story())


def test_where_no_namespace_may_be_read_nothing_is_known():
    async def story() -> None:
        async with KubeWatch(denied_namespaces={"default"}) as api, watching(api) as reported:
            await until(lambda: reported.counts.errors > 2)
            assert reported.history == []

    run(story())
