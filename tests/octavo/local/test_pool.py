"""The plan carried out with replicas that behave: capacity, canaries, crashes of new revisions."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from octavo.local import pool as pool_module
from octavo.local.home import Home
from octavo.local.launch import Launch, ThreadShare, launch_of
from octavo.local.pool import Pool
from octavo.local.router import NAME
from octavo.local.routing import router_config, upstreams
from octavo.local.screen import PlainScreen, render
from octavo.local.snapshot import PlatformSnapshot
from octavo_engine.protocol.loading import LoadProgress
from octavo_engine.protocol.state import EndpointState, PoolState, RevisionState, State
from octavo_operator.routers.poller import RouterDemand
from octavo_operator.spec import LLMDeployment
from octavo_router.config.load import load_config
from tests.fakes.clock import ManualClock

SHARE = ThreadShare(num_threads=1)
BUCKETS = [0, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40]


class FakeReplica:
    """Comes up when told to, leaves at once."""

    breaks: frozenset[str] = frozenset()  # revisions that never come up

    def __init__(self, id_: str, launch: Launch, **_: Any) -> None:
        self.id, self.launch = id_, launch
        self.state, self.detail, self.progress, self.loading = "held", "", 0.0, None
        self.port, self.pid, self.restarts, self.log = 0, 1, 0, id_
        self.url = f"http://{id_}"

    is_coming = property(lambda self: self.state in ("held", "starting", "ready"))
    is_leaving = property(lambda self: self.state in ("leaving", "gone"))
    is_listed = property(lambda self: self.state in ("ready", "leaving"))

    def start(self, share: ThreadShare) -> None:
        self.state = "starting"

    def look(self, share: ThreadShare) -> None:
        if self.state == "starting":
            self.state = "waiting" if self.launch.revision in self.breaks else "ready"
        elif self.state == "leaving":
            self.state = "gone"

    def leave(self) -> None:
        self.state = "leaving"

    def kill(self) -> None:
        self.state = "gone"


class Rig:
    """A pool, and the router that would know it."""

    def __init__(self, tmp_path, num_warm: int = 0, **spec: Any) -> None:
        self.home = Home(tmp_path)
        self.clock = ManualClock()
        self.demand = RouterDemand(self.clock)
        self.demand.expect([NAME])
        self.said: list[str] = []
        self.reported: list[RevisionState] = []
        self.trials: list[RevisionState] = []  # of adapters
        self.loaded: list[str] = []
        deployment, launch = self.requested(**spec)
        self.pool = Pool(
            deployment, launch, home=self.home, environ={}, demand=self.demand,
            notify=self.said.append, wake=lambda: None, clock=self.clock, num_warm=num_warm,
        )  # fmt: skip

    def requested(self, **spec: Any) -> tuple[LLMDeployment, Launch]:
        body = {
            "apiVersion": "octavo.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "m"},
            "spec": {"model": {"uri": "demo://smollm2"}, **spec},
        }
        deployment = LLMDeployment.parse(body)
        models = self.home.models
        return deployment, launch_of(deployment, models=models, references={}, environ={})

    def want(self, **spec: Any) -> str:
        deployment, launch = self.requested(**spec)
        self.pool.want(deployment, launch)
        return launch.revision

    def look(self, times: int = 1) -> None:
        """Each look, and what the router says after it."""
        for _ in range(times):
            self.pool.look(SHARE)
            endpoints = [
                EndpointState(
                    r.url, "default/m", r.launch.revision, r.url, "ready", adapters=self.loaded
                )
                for r in self.pool.replicas
                if r.state == "ready"
            ]
            reported = [PoolState("default/m", revisions=self.reported, adapter_trials=self.trials)]
            self.demand.learn(NAME, State("1", NAME, reported, endpoints))
            self.clock.advance(1.0)

    def serving(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for replica in self.pool.replicas:
            if replica.state == "ready":
                counts[replica.launch.revision] = counts.get(replica.launch.revision, 0) + 1
        return counts


@pytest.fixture(autouse=True)
def fake_replicas(monkeypatch):
    monkeypatch.setattr(pool_module, "LocalReplica", FakeReplica)
    monkeypatch.setattr(FakeReplica, "breaks", frozenset())


def args(seed: int) -> dict[str, Any]:
    return {"engine": {"args": {"seed": seed}}}


def test_a_rolling_change_never_serves_with_fewer(tmp_path):
    rig = Rig(tmp_path, replicas=3, **args(1))
    rig.look(4)
    assert (rig.pool.serving, rig.pool.is_done) == (3, True)
    new = rig.want(replicas=3, **args(2))
    while rig.serving() != {new: 3} or not rig.pool.is_done:
        rig.look()
        assert sum(rig.serving().values()) >= 3
        assert sum(not replica.is_leaving for replica in rig.pool.replicas) <= 4
        assert rig.clock.now < 1100


def test_a_revision_that_does_not_come_up_takes_nothing_away(tmp_path, monkeypatch):
    rig = Rig(tmp_path, replicas=2, **args(1))
    rig.look(4)
    (old,) = rig.serving()
    bad = rig.want(replicas=2, **args(2))
    monkeypatch.setattr(FakeReplica, "breaks", frozenset({bad}))
    rig.look(20)
    assert rig.serving() == {old: 2}
    rig.want(replicas=2, **args(1))
    rig.look(4)
    assert (rig.serving(), rig.pool.is_done, len(rig.pool.replicas)) == ({old: 2}, True, 2)


def test_suspended_deleted_and_back(tmp_path):
    rig = Rig(tmp_path, replicas=2)
    rig.look(4)
    rig.want(replicas=2, suspend=True)
    rig.look(4)
    assert (rig.pool.replicas, rig.pool.row().phase) == ([], "suspended")
    assert load_config(text=config(rig)).models == ()
    rig.want(replicas=1)
    rig.look(4)
    assert rig.pool.serving == 1
    rig.pool.delete()
    rig.look(4)
    assert rig.pool.is_gone


def test_a_warm_engine_is_unknown_to_the_router_until_it_is_wanted(tmp_path):
    rig = Rig(tmp_path, num_warm=1, replicas=1)
    rig.look(4)
    (warm,) = rig.pool.warm
    assert (warm.state, rig.pool.serving, rig.pool.has_warm) == ("ready", 1, True)
    assert warm.url not in upstreams([rig.pool])
    assert [row.state for row in rig.pool.row().replicas] == ["serving", "warm"]

    rig.want(replicas=2)
    rig.look()
    assert warm in rig.pool.replicas
    assert warm.url in upstreams([rig.pool])
    rig.look(3)
    assert (rig.pool.serving, rig.pool.is_done) == (2, True)
    assert [one.state for one in rig.pool.warm] == ["ready"], "another one took its place"
    assert warm not in rig.pool.warm


def test_what_is_wanted_comes_up_before_what_is_to_be_warm(tmp_path):
    rig = Rig(tmp_path, num_warm=2, replicas=1)
    rig.look()
    assert (len(rig.pool.replicas), rig.pool.warm) == (1, [])
    rig.look(2)
    assert len(rig.pool.warm) == 2


def test_from_zero_the_warm_engine_serves_after_one_look(tmp_path):
    rig = Rig(tmp_path, num_warm=1, replicas=0)
    rig.look(3)
    assert (rig.pool.replicas, rig.pool.has_warm) == ([], True)
    rig.want(replicas=1)
    rig.look()
    assert [one.is_listed for one in rig.pool.replicas] == [True]


def test_warm_engines_are_of_the_revision_that_is_wanted(tmp_path):
    rig = Rig(tmp_path, num_warm=1, replicas=1, **args(1))
    rig.look(4)
    (old,) = rig.pool.warm
    new = rig.want(replicas=1, **args(2))
    rig.look(8)
    assert rig.serving() == {new: 1}
    assert old.state == "gone"
    assert [one.launch.revision for one in rig.pool.warm] == [new]


def test_at_the_most_replicas_no_engine_is_kept_warm(tmp_path):
    rig = Rig(tmp_path, num_warm=2, autoscaling={"minReplicas": 1, "maxReplicas": 2})
    rig.look(4)
    assert (len(rig.pool.replicas), len(rig.pool.warm)) == (1, 1)
    rig.want(autoscaling={"minReplicas": 2, "maxReplicas": 2})
    rig.look(4)
    assert (len(rig.pool.replicas), len(rig.pool.warm)) == (2, 0)


@pytest.mark.parametrize("ends", ["suspend", "delete", "leave"])
def test_no_engine_stays_warm_of_what_has_ended(tmp_path, ends):
    rig = Rig(tmp_path, num_warm=1, replicas=1)
    rig.look(4)
    (warm,) = rig.pool.warm
    if ends == "suspend":
        rig.want(replicas=1, suspend=True)
    else:
        getattr(rig.pool, ends)()
    rig.look(4)
    assert (rig.pool.warm, warm.state) == ([], "gone")
    assert rig.pool.is_gone == (ends != "suspend")


def revision(name: str, requests: int, errors: int) -> RevisionState:
    return RevisionState(name, requests, errors, 4.0, 40, 4.0, 400, BUCKETS)


CANARY = {
    "strategy": "Canary",
    "canary": {"steps": [{"weight": 25, "pause": "5s"}], "analysis": {"minRequests": 10}},
}


@pytest.mark.parametrize("errors", [0, 30])
def test_a_canary_is_judged_by_what_the_router_counted(tmp_path, errors):
    rig = Rig(tmp_path, replicas=2, rollout=CANARY, **args(1))
    rig.look(4)
    (old,) = rig.serving()
    new = rig.want(replicas=2, rollout=CANARY, **args(2))
    rig.look(4)
    assert rig.pool.weights == {old: 75, new: 25}
    (model,) = load_config(text=config(rig)).models
    assert {each.revision: each.weight for each in model.backends} == {old: 75.0, new: 25.0}

    rig.reported = [revision(old, 100, 0), revision(new, 40, errors)]
    rig.look(30)
    assert rig.serving() == ({old: 2} if errors else {new: 2})
    assert rig.pool.row().phase == ("rolled back" if errors else "ready")
    if errors:
        assert "requests failed" in rig.pool.row().message


ADAPTERS = [
    {"name": "law", "uri": "file:///law"},
    {"name": "next", "uri": "file:///next",
     "canary": {"of": "law", "percent": 25, "pause": "5s", "analysis": {"minRequests": 10}}},
]  # fmt: skip


@pytest.mark.parametrize("errors", [0, 30])
def test_an_adapter_on_trial_is_judged_by_what_the_router_counted(tmp_path, errors):
    rig = Rig(tmp_path, adapters=ADAPTERS)
    rig.look(4)

    def routed() -> dict[str, tuple[str, float]]:
        (pool,) = load_config(text=config(rig)).routing.pools
        return {one.name: (one.canary_of, one.canary_percent) for one in pool.adapters}

    law, trial = rig.pool.row().adapters
    assert law.trial == ""
    assert trial.trial == "Waiting: No engine has loaded next; law has all requests."
    assert routed()["next"] == ("law", 25.0)
    rig.loaded = ["law", "next"]
    rig.look(8)
    assert "Running" in rig.pool.row().adapters[1].trial
    rig.trials = [revision("law", 100, 0), revision("next", 40, errors)]
    rig.look(3)
    trial = rig.pool.row().adapters[1]
    if errors:
        assert trial.trial.startswith("RolledBack: CanaryErrorRate")
        assert routed()["next"][0] == ""
        assert any("gets no more requests for law" in line for line in rig.said)
    else:
        assert trial.trial.startswith("Promoted: CanaryHealthy")
        assert routed()["next"] == ("law", 100.0)
        assert any("gets all requests for law" in line for line in rig.said)
    shown = PlatformSnapshot(1, "http://x", "ready", "", (rig.pool.row(),))
    assert PlatformSnapshot.from_json(shown.to_json()) == shown
    screen = StringIO()
    Console(file=screen, width=200).print(render(shown))
    assert f"adapter next: canary {trial.trial}" in screen.getvalue()


def config(rig: Rig, **more: Any) -> str:
    return router_config(
        [rig.pool],
        **{
            "host": "127.0.0.1",
            "port": 8080,
            "upstreams_file": "/x.yaml",
            "state_token": "t",
            **more,
        },
    )


def test_the_router_s_files_are_what_it_takes(tmp_path):
    routing = {"policy": "session", "holdTimeout": "7s"}
    rig = Rig(tmp_path, replicas=1, routing=routing)
    rig.look(3)
    reported = load_config(text=config(rig, keys=("a", "b")))

    assert (reported.server.port, reported.discovery.file) == (8080, "/x.yaml")
    assert reported.flow.hold_timeout_s == 7.0
    assert [(pool.name, pool.policy) for pool in reported.routing.pools] == [
        ("default/m", "session")
    ]
    assert [key.tenant for key in reported.flow.keys] == ["key-1", "key-2"]
    assert reported.discovery.engine_key == "a"
    assert f'"url": "{rig.pool.replicas[0].url}"' in upstreams([rig.pool])


def test_the_state_is_read_as_it_was_written(tmp_path):
    rig = Rig(tmp_path, replicas=2)
    rig.look(4)
    snapshot = PlatformSnapshot(1, "http://x", "ready", "", (rig.pool.row(),))

    assert snapshot.is_ready
    assert PlatformSnapshot.from_json(snapshot.to_json()) == snapshot
    with pytest.raises(ValueError, match="not the state"):
        PlatformSnapshot.from_json("{}")


def test_people_see_it(tmp_path, capsys):
    rig = Rig(tmp_path, replicas=1)
    rig.look(4)
    snapshot = PlatformSnapshot(1, "http://x", "ready", "a.yaml: bad", (rig.pool.row(),))
    console = Console(width=100, file=StringIO())
    console.print(render(snapshot))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO
    assert shown[0] == "http://x/v1  router ready"
    assert shown[2].split() == ["m", "1/1", "ready"]
    assert shown[3].split()[1:] == ["serving", "0", "0"]
    assert shown[-1].strip() == "kept the running state: a.yaml: bad"
    screen = PlainScreen()
    screen.show(snapshot)
    screen.show(snapshot)
    line = "Octavo serves at http://x/v1 · stop it with Ctrl-C or octavo down\n"
    assert capsys.readouterr().err == line


def test_a_replica_that_loads_says_how_far_it_is(tmp_path):
    rig = Rig(tmp_path, replicas=1)
    rig.look()
    (replica,) = rig.pool.replicas
    replica.state, replica.progress = "loading", 0.31
    replica.loading = LoadProgress("loading", int(1.2 * 2**30), int(3.9 * 2**30), 400 * 2**20)
    (row,) = rig.pool.row().replicas
    assert row.state == "loading 31%"
    assert row.detail == "loading weights: 1.2 of 3.9 GiB at 400.0 MiB/s, 7 s left"
    replica.loading = None
    (row,) = rig.pool.row().replicas
    assert (row.state, row.detail) == ("loading 31%", "")
