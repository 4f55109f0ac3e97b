"""What several router replicas say, together: who is routable, who waits, how revisions fare."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING

import pytest

from octavo_engine.protocol.state import TTFT_BOUNDS_S, EndpointState, RevisionState, State
from octavo_operator.decide.autoscale import LoadSignals
from octavo_operator.decide.flip import EngineFigures, FlipSignals
from octavo_operator.errors import ClusterUnavailable
from octavo_operator.metrics import OperatorMetrics
from octavo_operator.routers.poller import RouterDemand, RouterPoller, RouterUnreachable
from tests.fakes.clock import ManualClock
from tests.fakes.cluster import FakeCluster
from tests.fakes.operator import make_state

if TYPE_CHECKING:
    from octavo_operator.objects import kinds

POOL = "default/smollm2"


def make_demand(*names: str) -> tuple[RouterDemand, ManualClock]:
    clock = ManualClock()
    demand = RouterDemand(clock)
    demand.expect(names)
    return demand, clock


class TestRoutable:
    def test_all_replicas_must_have_it_as_ready(self):
        demand, _ = make_demand("a", "b")
        demand.learn("a", make_state(ready=("u",)))
        assert demand.holders("u") == (1, 1, 2, True)
        assert not demand.holders("u").are_all
        connecting = dataclasses.replace(
            make_state(replica="b"), endpoints=[EndpointState("u", POOL, "", "", "connecting")]
        )
        demand.learn("b", connecting)
        assert not demand.holders("u").are_all
        demand.learn("b", make_state(replica="b", ready=("u",)))
        assert demand.holders("u").are_all

    def test_a_replica_that_has_fallen_silent_is_no_witness(self):
        demand, clock = make_demand("a")
        demand.learn("a", make_state(ready=("u",)))
        clock.advance(5.1)
        assert not demand.holders("u").are_all
        demand.expect([])
        assert demand.holders("u").are_all

    def test_no_pod_is_routable_before_routers_are_known(self):
        assert not RouterDemand(ManualClock()).holders("u").are_all

    def test_answers_of_strangers_are_ignored(self):
        demand, _ = make_demand("a")
        assert demand.learn("b", make_state(ready=("u",))) == set()
        assert demand.holders("u") == (0, 0, 1, True)


class TestSignals:
    def test_demand_adds_up_and_engines_are_counted_once(self):
        demand, _ = make_demand("a", "b")
        for name, in_flight in (("a", 3), ("b", 4)):
            state = make_state(
                replica=name, held=1, queued_tokens=10, in_flight=in_flight,
                last_request_age_s=float(in_flight),
            )  # fmt: skip
            engine = EndpointState(
                "u", POOL, "r", "", "ready", in_flight=in_flight, queued_tokens=100, kv_usage=0.5
            )
            demand.learn(name, dataclasses.replace(state, endpoints=[engine]))
        assert demand.signals(POOL, serving=1) == LoadSignals(
            serving=1, queued_tokens=120, kv_usage=0.5, ttft_p95_s=None, in_flight=7, held=2,
            last_request_age_s=3.0, running=0, is_known=True, is_complete=True,
        )  # fmt: skip
        assert demand.in_flight(POOL) == {"u": 7}

    def test_the_load_of_prefill_pods_is_left_out(self):
        demand, _ = make_demand("a")
        state = make_state(in_flight=7, queued_tokens=0)
        engines = [
            EndpointState(
                uid, POOL, "r", "", "ready", in_flight=in_flight, queued_tokens=queued,
                kv_usage=usage, running=running,
            )
            for uid, in_flight, queued, usage, running in (
                ("u", 4, 100, 0.2, 1), ("p", 3, 900, 0.8, 5),
            )
        ]  # fmt: skip
        demand.learn("a", dataclasses.replace(state, endpoints=engines))
        signals = demand.signals(POOL, serving=1, without={"p"})
        assert (signals.queued_tokens, signals.kv_usage) == (100, 0.2)
        assert (signals.in_flight, signals.running) == (4, 1)

    def test_prefill_pods_have_what_is_left_of_the_prompts_there(self):
        demand, _ = make_demand("a", "b")
        for name, in_flight in (("a", 3), ("b", 4)):
            engines = [
                EndpointState("u", POOL, "r", "", "ready", in_flight=9, queued_tokens=5_000),
                EndpointState("p", POOL, "r", "", "ready", in_flight=in_flight, queued_tokens=900),
                EndpointState("gone", POOL, "r", "", "down", in_flight=0, queued_tokens=7_000),
            ]
            state = dataclasses.replace(make_state(replica=name), endpoints=engines)
            demand.learn(name, state)
        signals = demand.prefill_signals(POOL, serving=2, pods={"p", "gone"})
        assert signals == LoadSignals(
            serving=2, queued_tokens=900, in_flight=7, is_known=True, is_complete=True
        )

    def test_without_a_ready_prefill_pod_nothing_is_known_of_what_they_would_have_to_do(self):
        demand, clock = make_demand("a", "b")
        engine = EndpointState("p", POOL, "r", "", "connecting", queued_tokens=900)
        demand.learn("a", dataclasses.replace(make_state(), endpoints=[engine]))
        signals = demand.prefill_signals(POOL, serving=0, pods={"p"})
        assert signals == LoadSignals(is_known=True, is_complete=False)
        clock.advance(6.0)
        assert demand.prefill_signals(POOL, serving=0, pods={"p"}) == LoadSignals()

    def test_flips_read_each_ready_engine_once_as_it_reported_last(self):
        demand, clock = make_demand("a", "b")
        for name, computed, prompt_tokens in (("a", 500, 1000.0), ("b", 900, 3000.0)):
            engines = [
                EndpointState(
                    "e", POOL, "r", "", "ready", running=computed // 100, queued_tokens=7,
                    computed_tokens=computed, step_s=0.01, prompt_token_s=1e-4,
                ),
                EndpointState("late", POOL, "r", "", "connecting"),
                EndpointState("other", "default/other", "r", "", "ready"),
            ]  # fmt: skip
            state = make_state(replica=name, prompt_tokens=prompt_tokens)
            demand.learn(name, dataclasses.replace(state, endpoints=engines))
        signals = demand.flip_signals(POOL)
        assert signals.engines == {"e": EngineFigures(9, 7, 900, 1e-4, 0.01)}
        assert signals.prompt_tokens == 2000.0
        clock.advance(6.0)
        assert demand.flip_signals(POOL) == FlipSignals()

    def test_one_silent_router_makes_the_sums_partial(self):
        demand, clock = make_demand("a", "b")
        demand.learn("a", make_state(last_request_age_s=900.0))
        assert not demand.signals(POOL, serving=1).is_complete
        demand.learn("b", make_state(replica="b", in_flight=3))
        assert demand.signals(POOL, serving=1).is_complete
        clock.advance(4.0)
        demand.learn("a", make_state(last_request_age_s=900.0))
        clock.advance(2.0)
        partial = demand.signals(POOL, serving=1)
        assert (partial.is_known, partial.is_complete) == (True, False)

    def test_refusals_count_against_the_replicas_that_refused(self):
        demand, clock = make_demand("a")

        def seen(requests: int, refused: int, *, serving: int) -> float:
            demand.learn("a", make_state(revisions=(outcomes(requests),), refused=refused))
            return demand.signals(POOL, serving=serving).refused_share

        for _ in range(2):
            assert seen(0, 0, serving=2) == 0.0
            clock.advance(2.0)
        assert seen(40, 60, serving=2) == 1.5
        clock.advance(2.0)
        assert seen(80, 120, serving=2) == 1.5
        assert seen(80, 120, serving=4) == 0.0  # those were refused by two
        clock.advance(2.0)
        assert seen(120, 130, serving=4) == 0.25
        for _ in range(6):
            clock.advance(2.0)
            last = seen(120, 130, serving=4)
        assert last == 0.0  # long ago

    def test_what_engines_run_counts_once_and_not_after_they_went(self):
        demand, _ = make_demand("a", "b")
        for name, running in (("a", 2), ("b", 5)):
            engines = [
                EndpointState("u", POOL, "r", "", "ready", running=running, waiting=1),
                EndpointState("gone", POOL, "r", "", "down", running=7),
            ]
            state = dataclasses.replace(make_state(replica=name), endpoints=engines)
            demand.learn(name, state)
        assert demand.signals(POOL, serving=1).running == 6

    def test_silence_is_not_idleness(self):
        demand, clock = make_demand("a")
        demand.learn("a", make_state(last_request_age_s=9.0))
        clock.advance(6.0)
        assert demand.signals(POOL, serving=2) == LoadSignals(serving=2)


def outcomes(requests: int, errors: int = 0, slow: int = 0) -> RevisionState:
    buckets = [requests - slow] * len(TTFT_BOUNDS_S) + [requests]
    return RevisionState(
        "r", requests, errors, ttft_s_sum=1.0, ttft_count=requests, ttft_buckets=buckets
    )


class TestTallies:
    def test_counts_from_before_the_first_read_are_ignored(self):
        demand, _ = make_demand("a")
        demand.learn("a", make_state(revisions=(outcomes(1000, 900),)))
        assert demand.total(POOL, "r").requests == 0
        demand.learn("a", make_state(revisions=(outcomes(1010, 900),)))
        assert (demand.total(POOL, "r").requests, demand.total(POOL, "r").errors) == (10, 0)

    def test_a_revision_that_appears_under_our_eyes_counts_from_its_first_request(self):
        demand, _ = make_demand("a")
        demand.learn("a", make_state())
        demand.learn("a", make_state(revisions=(outcomes(7),)))
        assert demand.total(POOL, "r").requests == 7

    def test_a_restarted_replica_never_makes_a_counter_fall(self):
        demand, _ = make_demand("a", "b")
        for requests in (100, 150):
            demand.learn("a", make_state(revisions=(outcomes(requests),)))
        demand.learn("a", make_state(epoch="e2", revisions=(outcomes(3),)))
        demand.learn("a", make_state(epoch="e2", revisions=(outcomes(5),)))
        assert demand.total(POOL, "r").requests == 52

    def test_ttft_is_of_the_last_minute(self):
        demand, clock = make_demand("a")
        demand.learn("a", make_state())
        demand.learn("a", make_state(revisions=(outcomes(0),)))
        requests = 0
        for second in range(120):
            clock.advance(1.0)
            requests += 10
            slow = requests if second < 30 else 300
            demand.learn("a", make_state(revisions=(outcomes(requests, slow=slow),)))
        assert demand.signals(POOL, serving=1).ttft_p95_s == pytest.approx(0.0475)

    def test_requests_of_a_pool_without_revisions_are_counted_beside_refusals(self):
        """Neither tally may take the other's place."""
        demand, clock = make_demand("a")
        demand.learn("a", make_state())
        demand.signals(POOL, serving=1)  # as many as now, from now on
        for number in range(5):
            one = dataclasses.replace(outcomes(100 * number), revision="")
            demand.learn("a", make_state(revisions=(one,), refused=10 * number))
            clock.advance(1.0)
        assert demand.total(POOL, "").requests == 400
        assert demand.total(POOL, "").refused == 40
        assert demand.signals(POOL, serving=1).refused_share == pytest.approx(0.1)
        assert demand.signals(POOL, serving=1).ttft_p95_s == pytest.approx(0.0475)

    def test_adapters_on_trial_are_counted_apart_from_revisions(self):
        demand, _ = make_demand("a")
        for requests in (0, 5, 9):
            trial = dataclasses.replace(outcomes(requests, errors=requests), revision="next")
            state = make_state(revisions=(outcomes(2 * requests),), adapter_trials=[trial])
            demand.learn("a", state)
        totals = demand.adapter_totals(POOL, "law", "next")
        assert (totals.stable.requests, totals.canary.requests, totals.canary.errors) == (0, 9, 9)
        assert totals.is_reported
        assert demand.total(POOL, "r").requests == 18
        assert demand.total(POOL, "next").requests == 0
        demand.forget(POOL)
        assert demand.adapter_totals(POOL, "law", "next").canary.requests == 0

    def test_a_pool_that_is_gone_is_forgotten(self):
        demand, _ = make_demand("a")
        for requests in (0, 5):
            demand.learn("a", make_state(revisions=(outcomes(requests),)))
        demand.forget(POOL)
        assert demand.total(POOL, "r").requests == 0
        assert not demand._tallies
        assert not demand._last


class TestWakes:
    def test_only_changes_wake(self):
        demand, _ = make_demand("a")
        assert demand.learn("a", make_state(ready=("u",))) == {POOL}
        assert demand.learn("a", make_state(ready=("u",), busy={"u": 9})) == set()
        assert demand.learn("a", make_state(ready=("u", "v"))) == {POOL}
        assert demand.learn("a", make_state(ready=("u", "v"), held=1)) == {POOL}
        assert demand.learn("a", make_state(ready=("u", "v"), held=7)) == set()
        assert demand.learn("a", make_state(ready=("u", "v"))) == {POOL}


def router_pod(name: str, *, ready: str = "True", ip: str = "10.0.0.7") -> kinds.Object:
    labels = {"app.kubernetes.io/component": "router"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "octavo-system", "name": name, "labels": labels},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
    }


class TestPoller:
    def poll(
        self, cluster: FakeCluster, answers: dict[str, object]
    ) -> tuple[RouterDemand, list[str]]:
        demand = RouterDemand(ManualClock())
        woken: list[str] = []
        requested: list[str] = []

        async def fetch(url: str) -> bytes:
            requested.append(url)
            answer = answers.get(url)
            if isinstance(answer, State):
                return json.dumps(dataclasses.asdict(answer)).encode()
            if isinstance(answer, bytes):
                return answer
            raise TimeoutError

        poller = RouterPoller(
            cluster,
            demand,
            namespace="octavo-system",
            fetch=fetch,
            wake=woken.append,
            metrics=OperatorMetrics(),
            clock=ManualClock(),
        )
        asyncio.run(poller.poll())
        self.requested = requested
        return demand, woken

    def test_every_ready_router_is_asked_and_its_pools_are_woken(self):
        cluster = FakeCluster()
        cluster.put(router_pod("a", ip="10.0.0.1"))
        cluster.put(router_pod("b", ip="fd00::2"))
        cluster.put(router_pod("c", ready="False"))
        one, two = (f"http://{host}:8080/octavo/v1/state" for host in ("10.0.0.1", "[fd00::2]"))
        demand, woken = self.poll(cluster, {one: make_state(ready=("u",)), two: b"junk"})
        assert sorted(self.requested) == [one, two]
        assert woken == [POOL]
        assert demand.holders("u") == (1, 1, 2, True)
        assert demand.num_answering == 1

    def test_a_router_that_tells_nothing_is_complained_about_once_a_minute(self, caplog):
        cluster, clock, metrics = FakeCluster(), ManualClock(), OperatorMetrics()
        cluster.put(router_pod("a"))
        problems: list[Exception] = []

        async def fetch(url: str) -> bytes:
            raise problems[0]

        poller = RouterPoller(
            cluster, RouterDemand(clock), namespace="octavo-system", fetch=fetch,
            wake=lambda pool: None,
            metrics=metrics, clock=clock, scheme="https",
        )  # fmt: skip

        def complaints(problem: Exception) -> list[tuple[str, str]]:
            problems[:] = [problem]
            caplog.clear()
            asyncio.run(poller.poll())
            return [(record.reason, record.problem) for record in caplog.records]

        refusal = RouterUnreachable("unauthorized", "https://10.0.0.7:8080 answered 401")
        assert complaints(refusal) == [("unauthorized", "https://10.0.0.7:8080 answered 401")]
        assert caplog.records[0].router == "a"
        assert "--router-token" in caplog.records[0].advice
        clock.advance(59.0)
        assert complaints(refusal) == []
        silence = "https://10.0.0.7:8080/octavo/v1/state did not answer in time"
        assert complaints(TimeoutError()) == [("unreachable", silence)]
        clock.advance(1.0)
        assert len(complaints(refusal)) == 1
        assert metrics.router_errors == {"unauthorized": 3, "unreachable": 1}
        assert 'octavo_operator_router_errors_total{reason="unauthorized"} 3' in metrics.render()

    def test_an_api_server_that_is_away_changes_no_opinion(self):
        cluster = FakeCluster()

        def fail(call: object) -> None:
            raise ClusterUnavailable("away")

        cluster.before = fail
        demand, _ = self.poll(cluster, {})
        assert not demand.holders("u").are_all
