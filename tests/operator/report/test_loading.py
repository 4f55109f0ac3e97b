"""How far a model is on its way, for people: bytes, rate and rest, and never a storm of writes."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from octavo.fetch.progress import FetchProgress
from octavo_engine.protocol.loading import LoadProgress
from octavo_engine.protocol.state import EndpointState, ModelState
from octavo_operator.errors import ApiRefused, ClusterUnavailable
from octavo_operator.objects import kinds
from octavo_operator.objects.names import ENGINE_CONTAINER, FETCH_CONTAINER
from octavo_operator.report.loading import (
    LoadingState,
    fetched_so_far,
    found_model,
    last_facts,
    loaded,
)
from tests.fakes.clock import ManualClock
from tests.fakes.operator import OperatorBench, make_state

POOL = "default/smollm2"
URI = "hf://octavo/tiny"
DIGEST = "sha256:" + "a" * 64
FETCHING = {"name": FETCH_CONTAINER, "state": {"running": {}}}
LOADING = {"name": ENGINE_CONTAINER, "ready": False, "state": {"running": {}}}
COMPLETE = {
    "phase": "complete", "bytes": 4096, "total": 4096, "revision": "c0ffee", "digest": DIGEST,
}  # fmt: skip


class TestWords:
    def test_the_line_that_the_fetch_writes_is_understood(self):
        out, clock = io.StringIO(), ManualClock(0.0)
        progress = FetchProgress(URI, out=out, clock=clock)
        progress.begin("fetching", total=8 * 2**30, files=3)
        progress.add(2**30)
        clock.now += 2.0
        progress.report()
        assert fetched_so_far("p", out.getvalue()) == LoadingState(
            phase="Fetching",
            pod="p",
            percent=12,
            bytes_done=2**30,
            bytes_total=8 * 2**30,
            bytes_per_s=2**29,
            remaining_s=14,
            message="Fetching weights: 1.0 of 8.0 GiB at 512.0 MiB/s, 14 s left.",
        )

    def test_one_that_waits_for_another_says_so(self):
        line = json.dumps({"phase": "waiting", "bytes": 0, "total": None, "holder": "pod-b"})
        reported = fetched_so_far("p", line)
        assert reported.percent is None
        assert reported.message.startswith("Waiting for another pod")

    @pytest.mark.parametrize(
        "log",
        [
            "", "no json", '{"bytes": ', "[1, 2]", '{"bytes": "x", "total": {}}', '{"total": 0}',
            '{"bytes": -1, "total": 5}', '{"bytes": true, "total": NaN}', '{"total": Infinity}',
            "[" * 3000,
        ],
    )  # fmt: skip
    def test_a_log_may_hold_anything(self, log):
        reported = fetched_so_far("p", log)
        assert (reported.phase, reported.percent, reported.message) == ("Fetching", None, "")

    def test_numbers_stay_within_the_schema(self):
        line = '{"bytes": 1e40, "total": 1e30, "rate": 1e99, "eta_s": 1e12}'
        reported = fetched_so_far("p", line).to_status()
        assert (reported["percent"], reported["bytesDone"], reported["remainingSeconds"]) == (
            100, 2**53, 0,
        )  # fmt: skip

    def test_the_last_whole_line_counts(self):
        assert last_facts('{"bytes": 1}\n{"bytes": 2}\n{"byt') == {"bytes": 2}

    def test_a_share_of_the_weights(self):
        assert loaded("p", 0.426, None).to_status() == {
            "phase": "Loading", "pod": "p", "percent": 42,
            "message": "Loading weights: 42 %.",
        }  # fmt: skip
        assert loaded("p", None, None).to_status() == {"phase": "Loading", "pod": "p"}

    def test_weights_in_bytes(self):
        reported = LoadProgress("loading", int(1.2 * 2**30), int(3.9 * 2**30), 400 * 2**20)
        assert loaded("p", 0.3, reported).to_status() == {
            "phase": "Loading", "pod": "p", "percent": 30,
            "bytesDone": int(1.2 * 2**30), "bytesTotal": int(3.9 * 2**30),
            "bytesPerSecond": 400 * 2**20, "remainingSeconds": 7,
            "message": "Loading weights: 1.2 of 3.9 GiB at 400.0 MiB/s, 7 s left.",
        }  # fmt: skip

    def test_an_engine_that_fetches_by_itself_is_fetching(self):
        reported = loaded("p", 0.0, LoadProgress("fetching", 5, 0, 0)).to_status()
        assert reported == {
            "phase": "Fetching", "pod": "p", "percent": 0, "bytesDone": 5,
            "message": "Fetching weights: 0.0 KiB.",
        }  # fmt: skip


class TestModel:
    def pod(self, message: str, exit_code: int = 0) -> kinds.Object:
        ended = {"terminated": {"exitCode": exit_code, "message": message}}
        return {
            "metadata": {"name": "p", "uid": "u"},
            "status": {"initContainerStatuses": [{"name": FETCH_CONTAINER, "state": ended}]},
        }

    def test_what_the_fetch_found_is_told(self):
        assert found_model(URI, [self.pod(json.dumps(COMPLETE))], {}) == {
            "uri": URI, "revision": "c0ffee", "digest": DIGEST, "bytes": 4096,
        }  # fmt: skip

    def test_a_failed_fetch_found_nothing(self):
        assert found_model(URI, [self.pod(json.dumps(COMPLETE), 13)], {}) == {"uri": URI}

    def test_it_stays_known_without_pods_but_not_for_another_model(self):
        known = {"uri": URI, "digest": DIGEST}
        assert found_model(URI, [], known) == known
        assert found_model("hf://octavo/other", [], known) == {"uri": "hf://octavo/other"}


class TestStatus:
    def fetching(self) -> OperatorBench:
        bench = OperatorBench()
        bench.create(model={"uri": URI}, replicas=1)
        bench.reconcile()
        bench.workloads.sync()
        bench.workloads.set_status(self.pod(bench), {"initContainerStatuses": [FETCHING]})
        return bench

    def pod(self, bench: OperatorBench) -> kinds.Object:
        (pod,) = bench.cluster.all(kinds.POD)
        return pod

    def log(self, bench: OperatorBench, **facts: object) -> None:
        bench.cluster.logs[kinds.name_of(self.pod(bench))] = json.dumps(facts)

    def status(self, bench: OperatorBench) -> kinds.Object:
        status: kinds.Object = bench.deployment()["status"]
        return status

    def test_from_the_first_byte_to_serving(self):
        bench = self.fetching()
        self.log(bench, bytes=2**20, total=2**22, rate=2**18, eta_s=12.2)
        assert bench.reconcile().again_after_s == 5.0
        assert self.status(bench)["loading"] == {
            "phase": "Fetching",
            "pod": kinds.name_of(self.pod(bench)),
            "percent": 25,
            "bytesDone": 2**20,
            "bytesTotal": 2**22,
            "bytesPerSecond": 2**18,
            "remainingSeconds": 12,
            "message": "Fetching weights: 1.0 of 4.0 MiB at 256.0 KiB/s, 12 s left.",
        }
        ended = {"terminated": {"exitCode": 0, "message": json.dumps(COMPLETE)}}
        bench.workloads.set_status(
            self.pod(bench),
            {
                "initContainerStatuses": [{"name": FETCH_CONTAINER, "state": ended}],
                "containerStatuses": [LOADING],
            },
        )
        bench.demand.expect(["router-0"])
        uid = kinds.uid_of(self.pod(bench))
        reported = LoadProgress("loading", 2**20, 2**21, 2**20)
        engine = EndpointState(
            uid, POOL, "", "http://e", "connecting", loading=0.5, progress=reported
        )
        bench.demand.learn("router-0", replace(make_state(), endpoints=[engine]))
        assert bench.reconcile().again_after_s == 5.0
        assert self.status(bench)["loading"] == {
            "phase": "Loading", "pod": kinds.name_of(self.pod(bench)), "percent": 50,
            "bytesDone": 2**20, "bytesTotal": 2**21, "bytesPerSecond": 2**20,
            "remainingSeconds": 1,
            "message": "Loading weights: 1.0 of 2.0 MiB at 1.0 MiB/s, 1 s left.",
        }  # fmt: skip
        assert bench.conditions()["Ready"] == (
            "False", "LoadingModel",
            "0 of 1 replicas serve; loading weights: 1.0 of 2.0 MiB at 1.0 MiB/s, 1 s left.",
        )  # fmt: skip
        assert bench.conditions()["ModelReady"][2].startswith("Loading weights: 1.0 of 2.0 MiB")
        assert self.status(bench)["model"] == {
            "uri": URI, "revision": "c0ffee", "digest": DIGEST, "bytes": 4096,
        }  # fmt: skip
        ready = {**LOADING, "ready": True}
        bench.workloads.set_status(self.pod(bench), {"containerStatuses": [ready]})
        revision = self.status(bench)["revision"]
        served = ModelState("smollm2", "LlamaForCausalLM", "safetensors bfloat16")
        engine = EndpointState(
            uid, POOL, revision, "http://e", "ready", max_model_len=2048, model=served
        )
        bench.demand.learn("router-0", replace(make_state(), endpoints=[engine]))
        bench.settle()
        assert self.status(bench)["loading"] == {"phase": "Ready", "percent": 100}
        assert self.status(bench)["model"] == {
            "uri": URI, "revision": "c0ffee", "digest": DIGEST, "bytes": 4096,
            "maxModelLen": 2048, "id": "smollm2", "architecture": "LlamaForCausalLM",
            "format": "safetensors bfloat16",
        }  # fmt: skip
        bench.demand.expect(())  # what was told stays known when nobody tells any more
        bench.clock.now += 60.0
        bench.settle()
        assert self.status(bench)["model"]["format"] == "safetensors bfloat16"

    def test_it_is_told_every_five_seconds_however_often_it_is_looked_at(self):
        bench = self.fetching()
        before = len(bench.cluster.calls)
        for second in range(21):
            self.log(bench, bytes=second * 2**20, total=2**25, rate=2**20, eta_s=32 - second)
            bench.reconcile()
            bench.clock.now += 1.0
        calls = [call.verb for call in bench.cluster.calls[before:]]
        assert calls.count("log") == 5
        assert calls.count("apply_status") == 5
        assert self.status(bench)["loading"]["bytesDone"] == 20 * 2**20

    def test_without_the_right_it_asks_once_in_a_while_and_tells_the_phase(self):
        bench = self.fetching()
        name = kinds.name_of(self.pod(bench))
        bench.cluster.logs[name] = ApiRefused("pods is forbidden", status=403)
        for _ in range(60):
            assert not bench.reconcile().is_failed
            bench.clock.now += 5.0
        assert [call.verb for call in bench.cluster.calls].count("log") == 1
        assert self.status(bench)["loading"] == {"phase": "Fetching", "pod": name}
        bench.clock.now += 600.0
        self.log(bench, bytes=1, total=2)
        bench.reconcile()
        assert self.status(bench)["loading"]["percent"] == 50

    @pytest.mark.parametrize(
        "error", [ClusterUnavailable("kubelet"), ApiRefused("is waiting to start", status=400)]
    )
    def test_a_log_that_cannot_be_had_stops_nothing(self, error):
        bench = self.fetching()
        bench.cluster.logs[kinds.name_of(self.pod(bench))] = error
        assert not bench.reconcile().is_failed
        assert self.status(bench)["loading"]["phase"] == "Fetching"
        self.log(bench, bytes=1, total=4)
        bench.clock.now += 5.0
        bench.reconcile()
        assert self.status(bench)["loading"]["percent"] == 25
