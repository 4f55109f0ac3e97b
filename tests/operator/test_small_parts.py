"""Metrics, health, events, the write guard, comparison, the cache, the intake and the flags."""

from __future__ import annotations

import argparse
import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest
import yaml

from octavo_operator.cli import add_options, read_settings, read_values
from octavo_operator.cluster.api import Listing
from octavo_operator.cluster.guard import GuardedCluster, TokenBucket
from octavo_operator.decide.observed import DeploymentKey
from octavo_operator.errors import ApiRefused, ClusterUnavailable, SettingsInvalid
from octavo_operator.health import HealthServer, OperatorHealth
from octavo_operator.metrics import OperatorMetrics
from octavo_operator.objects import kinds
from octavo_operator.objects.compare import holds
from octavo_operator.report.events import EventRecorder
from octavo_operator.watch.informer import Informer
from octavo_operator.watch.namespaces import permitted
from octavo_operator.watch.work_queue import KeyOutcome
from octavo_operator.watch.world import WATCHED, World, are_synced
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import FakeCluster
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_operator.objects.kinds import Kind
    from tests.fakes.cluster import Call


class TestCompare:
    @pytest.mark.parametrize(
        ("found", "applied"),
        [
            ({"a": 1, "more": 2}, {"a": 1}),
            ({"cpu": "1"}, {"cpu": "1000m"}),
            ({"memory": "8Gi"}, {"memory": "8589934592"}),
            ({}, {"flag": False}),
            ({}, {"empty": {}}),
            ({"a": 1}, {"a": 1, "absent": None}),
            ([{"n": 1, "default": True}], [{"n": 1}]),
        ],
    )
    def test_what_the_server_adds_or_rewrites_is_no_drift(self, found, applied):
        assert holds(found, applied)

    @pytest.mark.parametrize(
        ("found", "applied"),
        [
            ({"a": 1}, {"a": 2}),
            ({}, {"a": 1}),
            ([1, 2], [1]),
            ([1], [1, 2]),
            ({"a": "1"}, {"a": "2"}),
            ({"flag": True}, {"flag": False}),
            ({"flag": True}, {"flag": 1.5}),
            ([1], []),
        ],
    )
    def test_what_others_changed_is(self, found, applied):
        assert not holds(found, applied)


def service(version: int, *, uid: str = "u", name: str = "s") -> kinds.Object:
    metadata = {
        "namespace": "d", "name": name, "uid": uid, "resourceVersion": str(version),
        "labels": {"octavo.dev/deployment": "m"}, "managedFields": ["long"],
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata}


class TestWorld:
    key = DeploymentKey("d", "m")

    def test_old_news_are_no_news(self):
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

    def test_nothing_is_left_of_what_went(self):
        world = World()
        for number in range(100):
            world.keep(kinds.SERVICE, service(number, name=f"s{number}"))
            world.drop(kinds.SERVICE, service(number, name=f"s{number}"))
        assert len(world) == 0
        assert not world._children
        assert not world._versions

    def test_what_is_nobodys_is_not_kept(self):
        world = World()
        stranger = service(1)
        stranger["metadata"]["labels"] = {}
        assert world.keep(kinds.SERVICE, stranger) is None
        assert len(world) == 0


class TestIntake:
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

    def test_a_namespace_that_refuses_keeps_no_other_from_being_heard(self, caplog):
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

    def test_where_all_refuse_nothing_is_taken_for_heard(self):
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

    def test_a_deletion_wakes_who_waits_for_its_names(self):
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


def test_events_come_once_a_minute_per_reason():
    cluster, clock = FakeCluster(), ManualClock()
    recorder = EventRecorder(cluster, clock=clock, now_text=lambda: f"{clock.now}")
    body = cluster.put(make_deployment())
    for _ in range(10):
        asyncio.run(recorder.record(body, "Warning", "OutOfMemory", "m"))
    asyncio.run(recorder.record(body, "Normal", "Created", "m"))
    assert len(cluster.all(kinds.EVENT)) == 2
    clock.advance(61)
    asyncio.run(recorder.record(body, "Warning", "OutOfMemory", "m"))
    assert len(cluster.all(kinds.EVENT)) == 3


def test_an_event_that_cannot_be_posted_is_only_logged():
    cluster, clock = FakeCluster(), ManualClock()
    body = cluster.put(make_deployment())

    def fail(call: object) -> None:
        raise ClusterUnavailable("away")

    cluster.before = fail
    recorder = EventRecorder(cluster, clock=clock, now_text=lambda: "t")
    asyncio.run(recorder.record(body, "Normal", "Created", "m"))
    assert cluster.all(kinds.EVENT) == []


def test_what_can_be_left_out_takes_nothing_that_is_not_there():
    clock = ManualClock()
    bucket = TokenBucket(per_second=10.0, burst=2, clock=clock)
    assert [bucket.try_take() for _ in range(4)] == [True, True, False, False]
    clock.advance(0.1)
    assert [bucket.try_take() for _ in range(2)] == [True, False]


def test_a_write_that_lasts_is_given_up_before_another_replica_may_begin():
    class Slow(FakeCluster):
        async def apply(self, body: kinds.Object) -> kinds.Object:
            await asyncio.sleep(60)
            return body

    clock = ManualClock()
    metrics = OperatorMetrics()
    guarded = GuardedCluster(
        Slow(),
        may_write=lambda: True,
        bucket=TokenBucket(per_second=10.0, burst=3, clock=clock),
        metrics=metrics,
        time_left_s=lambda: 0.01,
    )
    with pytest.raises(ClusterUnavailable, match="no answer while the Lease was surely ours"):
        asyncio.run(guarded.apply(make_deployment()))
    assert metrics.errors[("apply", "TimeoutError")] == 1


def test_a_bucket_lets_a_burst_through_and_then_a_stream():
    clock = ManualClock()
    bucket = TokenBucket(per_second=10.0, burst=3, clock=clock)
    assert [bucket.take() for _ in range(5)] == [0.0, 0.0, 0.0, 0.1, 0.2]
    clock.advance(10.0)
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.1]


class TestHealth:
    def answer(
        self, request: str, *, age_s: float = 1.0, is_synced: bool = True, tried_s: float = 0.0
    ) -> bytes:
        metrics = OperatorMetrics()
        metrics.reconciled(KeyOutcome().name, 0.02)
        look = OperatorHealth(age_s, 100.0, is_synced, is_leading=True, tried_age_s=tried_s)
        return HealthServer(lambda: look, metrics).answer(request.encode())

    @pytest.mark.parametrize(
        ("request_line", "age_s", "is_synced", "status"),
        [
            ("GET /healthz HTTP/1.1\r\n\r\n", 1.0, False, 200),
            ("GET /healthz HTTP/1.1\r\n\r\n", 101.0, True, 200),
            ("GET /readyz HTTP/1.1\r\n\r\n", 101.0, True, 503),
            ("GET /readyz?x=1 HTTP/1.1\r\n\r\n", 1.0, True, 200),
            ("GET /readyz HTTP/1.1\r\n\r\n", 1.0, False, 503),
            ("GET /metrics HTTP/1.1\r\n\r\n", 1.0, True, 200),
            ("POST /healthz HTTP/1.1\r\n\r\n", 1.0, True, 405),
            ("GET /etc/passwd HTTP/1.1\r\n\r\n", 1.0, True, 404),
            ("\r\n\r\n", 1.0, True, 405),
        ],
    )
    def test_each_path(self, request_line, age_s, is_synced, status):
        answer = self.answer(request_line, age_s=age_s, is_synced=is_synced)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())

    def test_an_api_server_that_is_away_is_no_reason_to_be_restarted(self):
        """What is learnt would be lost, and the back-off of restarts would outlast the outage."""
        request = "GET /healthz HTTP/1.1\r\n\r\n"
        assert self.answer(request, age_s=9000.0, tried_s=99.0).startswith(b"HTTP/1.1 200 ")
        assert self.answer(request, age_s=9000.0, tried_s=101.0).startswith(b"HTTP/1.1 503 ")

    def test_metrics_are_what_prometheus_reads(self):
        from prometheus_client.parser import text_string_to_metric_families

        body = self.answer("GET /metrics HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")[2].decode()
        families = {f.name: f for f in text_string_to_metric_families(body)}
        done = [
            s.value
            for s in families["octavo_operator_reconciles"].samples
            if s.labels == {"outcome": "done"}
        ]
        assert done == [1.0]
        assert families["octavo_operator_reconcile_seconds"].type == "histogram"

    def test_over_a_socket(self):
        async def story() -> bytes:
            look = OperatorHealth(1.0, 100.0, is_synced=True, is_leading=False)
            server = await HealthServer(lambda: look, OperatorMetrics()).start("127.0.0.1", 0)
            async with server:
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = await reader.read()
                writer.close()
                return answer

        assert b'"alive": true' in asyncio.run(story())


class TestFlags:
    def read(self, tmp_path, *argv: str, **environment: str):
        parser = argparse.ArgumentParser()
        add_options(parser)
        file = tmp_path / "config"
        file.write_text(
            yaml.safe_dump(
                {
                    "current-context": "a",
                    "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {"server": "https://x"}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        args = parser.parse_args([*argv, f"--kubeconfig={file}"])
        return read_settings(read_values(args, environment), environment)

    def test_defaults(self, tmp_path):
        _, settings, run = self.read(tmp_path)
        assert settings.namespaces == ()
        assert (run.port, run.num_workers, run.resync_s) == (8090, 8, 300)
        assert run.lease is not None

    def test_a_flag_wins_over_the_environment(self, tmp_path):
        environment = {"OCTAVO_OPERATOR_NAMESPACES": "a,b", "OCTAVO_OPERATOR_WORKERS": "3"}
        _, settings, run = self.read(tmp_path, "--workers=4", **environment)
        assert settings.namespaces == ("a", "b")
        assert run.num_workers == 4

    def test_lists_are_separated_by_commas(self, tmp_path):
        _, settings, run = self.read(
            tmp_path, "--image-pull-secrets=one, two", "--deployment=octavo-operator"
        )
        assert settings.images.pull_secrets == ("one", "two")
        assert run.deployment == "octavo-operator"

    def test_variables_of_a_service_are_not_ours(self, tmp_path):
        environment = {
            "OCTAVO_OPERATOR_PORT": "tcp://10.0.0.1:8090",
            "OCTAVO_OPERATOR_SERVICE_HOST": "10.0.0.1",
            "OCTAVO_OPERATOR_PORT_8090_TCP": "tcp://10.0.0.1:8090",
        }
        assert self.read(tmp_path, **environment)[2].port == 8090

    @pytest.mark.parametrize(
        ("argv", "environment", "problem"),
        [
            (["--port=high"], {}, "--port must be a whole number from 0 to 65535; got high"),
            (["--readiness-gate=maybe"], {}, "--readiness-gate must be true or false"),
            (["--pull-policy=Often"], {}, "--pull-policy must be Always, IfNotPresent or Never"),
            (["--image-pull-secrets=A b"], {}, "must be names of Secrets; got A b"),
            (["--monitor-labels=a"], {}, "--monitor-labels must be key=value"),
            ([], {"OCTAVO_OPERATOR_NAMESPACE": "a"}, "no flag has that name"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path, argv, environment, problem):
        with pytest.raises(SettingsInvalid, match=problem):
            self.read(tmp_path, *argv, **environment)
