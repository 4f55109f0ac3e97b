"""The replicas of one LLMDeployment: the operator's plan, carried out with processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.local.fetching import Fetching
from octavo.local.replica import LocalReplica
from octavo.local.snapshot import AdapterRow, PoolRow, ReplicaRow
from octavo_operator.decide import autoscale, canary
from octavo_operator.decide.adapter_trials import TrialDecision, decide_trials
from octavo_operator.decide.adapters import TakenAdapter
from octavo_operator.decide.canary import CanaryBaseline, CanaryState, CanaryVerdict
from octavo_operator.decide.plan import Target, plan_capacity
from octavo_operator.decide.rollout import RevisionReplica, group_replicas, victims
from octavo_operator.objects import names
from octavo_operator.report.adapters import find_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo.local.home import Home
    from octavo.local.launch import Launch, ThreadShare
    from octavo_operator.routers.poller import RouterDemand
    from octavo_operator.spec import AdapterSpec, LLMDeployment

AUTOSCALE_S = 5.0


class Pool:
    """Level-triggered as the operator is: each look computes the next step from what is."""

    def __init__(
        self,
        deployment: LLMDeployment,
        launch: Launch,
        *,
        home: Home,
        environ: Mapping[str, str],
        demand: RouterDemand,
        notify: Callable[[str], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
        num_warm: int = 0,
    ) -> None:
        self.deployment = deployment
        self.replicas: list[LocalReplica] = []
        self.warm: list[LocalReplica] = []  # loaded, and unknown to the router until wanted
        self.num_warm = num_warm
        self.weights: dict[str, int] = {}  # percent by revision, while a canary runs
        self.is_deleted = False
        self.is_done = False
        self.waiting_for = ""
        self._home = home
        self._environ = environ
        self._demand = demand
        self._notify = notify
        self._wake = wake
        self._clock = clock
        self._launches = {launch.revision: launch}
        self._fetches: dict[str, Fetching] = {}
        self._revision = launch.revision
        self._targets: dict[str, int] = {}
        self._canary = CanaryState()
        self._baseline: CanaryBaseline | None = None
        self._trials = TrialDecision()  # of adapters
        self._scaled: int | None = None
        self._scaled_at = float("-inf")
        self._history = autoscale.ScaleHistory()
        self._num_started = 0

    @property
    def name(self) -> str:
        return self.deployment.pool

    @property
    def is_asleep(self) -> bool:
        """Scaled to zero: requests are held until an engine is up again."""
        return not self.wanted and not self.deployment.suspend and not self.is_deleted

    @property
    def wanted(self) -> int:
        if self.is_deleted:
            return 0
        if self.deployment.autoscaling is None or self.deployment.suspend:
            return self.deployment.wanted_replicas
        if self._scaled is None:
            return self.deployment.autoscaling.clamp(self.deployment.replicas)
        return self._scaled

    @property
    def adapters(self) -> tuple[AdapterSpec, ...]:
        """As the router is to be given them."""
        return tuple(self._trials.routed(one) for one in self.deployment.adapters)

    @property
    def keys(self) -> tuple[str, ...]:
        """Those its engines want to see one of."""
        return self._launches[self._revision].keys

    @property
    def serving(self) -> int:
        return sum(self._is_routable(replica) for replica in self.replicas)

    @property
    def is_gone(self) -> bool:
        return self.is_deleted and not self.replicas and not self.warm

    @property
    def has_warm(self) -> bool:
        """The next engine that is wanted is there at once."""
        return any(replica.state == "ready" for replica in self.warm)

    def want(self, deployment: LLMDeployment, launch: Launch) -> None:
        """Another spec; what runs moves over step by step."""
        if deployment.autoscaling != self.deployment.autoscaling:
            self._scaled, self._history = None, autoscale.ScaleHistory()
        if launch.revision != self._revision:
            self._notify(f"{deployment.name} rolls over to revision {launch.revision}")
        self.deployment, self.is_deleted = deployment, False
        self._launches[launch.revision] = launch
        self._revision = launch.revision

    def delete(self) -> None:
        self.is_deleted = True

    def leave(self) -> None:
        """All engines finish what is under way, and end."""
        self.delete()
        for replica in (*self.replicas, *self.warm):
            replica.leave()

    def look(self, share: ThreadShare) -> None:
        """One step towards what is wanted."""
        self.replicas, self.warm = _present(self.replicas, share), _present(self.warm, share)
        self._scale()
        self._judge_adapters()
        seen = self._seen()
        capacity = plan_capacity(
            Target(self._revision, self.wanted, self.deployment.rollout),
            group_replicas(self._targets, seen),
            self._canary,
            verdict=self._verdict(),
            now=self._clock(),
        )
        for detail in capacity.details:
            self._notify(f"{self.deployment.name}: {detail}")
        self._canary, self.weights = capacity.state, capacity.weights
        self._targets.update(capacity.step.targets)
        for revision in capacity.step.vanished:
            self._targets.pop(revision, None)
            if revision != self._revision:
                self._launches.pop(revision, None)
                if (fetching := self._fetches.pop(revision, None)) is not None:
                    fetching.kill()
        self.is_done, self.waiting_for = capacity.step.is_done, capacity.step.waiting_for
        self._carry_out(seen)
        self._keep_warm()
        for replica in (*self.replicas, *self.warm):
            if replica.state == "held" and self._has_weights(replica.launch):
                replica.start(share)

    def kill(self) -> None:
        for replica in (*self.replicas, *self.warm):
            replica.kill()
        for fetching in self._fetches.values():
            fetching.kill()

    def row(self) -> PoolRow:
        """For people and for `octavo status`."""
        in_flight = self._demand.in_flight(self.name)
        rows = tuple(
            ReplicaRow(
                id=replica.id,
                revision=replica.launch.revision,
                state=self._state_text(replica),
                pid=replica.pid,
                port=replica.port,
                in_flight=in_flight.get(replica.url, 0),
                restarts=replica.restarts,
                detail=self._detail(replica),
                log=str(replica.log),
            )
            for replica in (*self.replicas, *self.warm)
        )
        return PoolRow(
            name=self.name,
            model=self.deployment.model.uri,
            served_names=self.deployment.model.names,
            revision=self._revision,
            wanted=self.wanted,
            serving=self.serving,
            phase=self._phase(),
            message=self._message(),
            replicas=rows,
            adapters=self._adapter_rows(),
        )

    def _adapter_rows(self) -> tuple[AdapterRow, ...]:
        ids = {replica.url: replica.id for replica in self.replicas}
        taken = [TakenAdapter(adapter) for adapter in self.deployment.adapters]
        reports = find_reports(
            taken,
            self._demand.adapter_states(self.name),
            {
                name: tuple(sorted(ids[url] for url in urls if url in ids))
                for name, urls in self._demand.adapter_holders(self.name).items()
            },
            has_engine=bool(self.serving),
        )
        trials = {one.name: f"{one.phase}: {one.message}" for one in self._trials.trials}
        return tuple(
            AdapterRow(name, report.phase, report.pods, report.message, trials.get(name, ""))
            for name, report in reports.items()
        )

    # -- what is

    def _seen(self) -> list[RevisionReplica]:
        in_flight = self._demand.in_flight(self.name)
        return [
            RevisionReplica(
                id=replica.id,
                revision=replica.launch.revision,
                ready=replica.state == "ready",
                routable=self._is_routable(replica),
                in_flight=in_flight.get(replica.url, 0),
                is_leaving=replica.is_leaving,
            )
            for replica in self.replicas
        ]

    def _is_routable(self, replica: LocalReplica) -> bool:
        return replica.state == "ready" and self._demand.holders(replica.url).are_all

    def _verdict(self) -> CanaryVerdict:
        totals = self._demand.canary_totals(self.name, self._canary)
        trial = canary.judge_trial(self.deployment.rollout, self._canary, totals, self._baseline)
        self._baseline = trial.baseline
        return trial.verdict

    def _judge_adapters(self) -> None:
        adapters = self.deployment.adapters
        self._trials = decide_trials(
            adapters,
            self._trials.trials,
            self._trials.baselines,
            {
                one.name: self._demand.adapter_totals(self.name, one.canary.of, one.name)
                for one in adapters
                if one.canary is not None
            },
            self._demand.adapter_holders(self.name).keys(),
            now=self._clock(),
        )
        for event in self._trials.events:
            self._notify(f"{self.deployment.name}: {event.text}")

    def _scale(self) -> None:
        rules = self.deployment.autoscaling
        now = self._clock()
        if rules is None or self.is_deleted or self.deployment.suspend:
            return
        signals = self._demand.signals(self.name, serving=self.serving)
        if now - self._scaled_at < AUTOSCALE_S and not (signals.held and not self.wanted):
            return
        self._scaled_at = now
        before = self.wanted
        decision = autoscale.decide(rules, signals, before, self._history, now)
        self._history, self._scaled = decision.history, decision.replicas
        if decision.replicas != before:
            self._notify(
                f"{self.deployment.name}: {before} → {decision.replicas} replicas, "
                f"{decision.reason}: {decision.message}"
            )

    # -- what is done about it

    def _carry_out(self, seen: list[RevisionReplica]) -> None:
        by_id = {replica.id: replica for replica in self.replicas}
        for revision, target in sorted(self._targets.items()):
            own = [each for each in seen if each.revision == revision]
            staying = sum(not each.is_leaving for each in own)
            for victim in victims(own, staying - target):
                by_id[victim.id].leave()
            for _ in range(target - staying):
                self.replicas.append(self._take_warm(revision) or self._new(revision))

    def _take_warm(self, revision: str) -> LocalReplica | None:
        """The one that has come farthest."""
        there = [one for one in self.warm if one.launch.revision == revision and one.is_coming]
        if not there:
            return None
        taken = min(there, key=lambda one: one.state != "ready")
        self.warm.remove(taken)
        self._notify(f"{taken.id} was warm and is taken")
        return taken

    @property
    def _wanted_warm(self) -> int:
        """No more than could be taken: at the most replicas that autoscaling may want, none."""
        if self.is_deleted or self.deployment.suspend:
            return 0
        rules = self.deployment.autoscaling
        return (
            self.num_warm if rules is None else min(self.num_warm, rules.max_replicas - self.wanted)
        )

    def _keep_warm(self) -> None:
        """As many as are to be warm, of the revision that is wanted, once what is wanted is up."""
        wanted = self._wanted_warm
        staying = [one for one in self.warm if not one.is_leaving]
        fitting = [one for one in staying if one.launch.revision == self._revision][:wanted]
        for replica in staying:
            if replica not in fitting:
                replica.leave()
        if self.is_done:
            self.warm += [self._new(self._revision) for _ in range(wanted - len(fitting))]

    def _new(self, revision: str) -> LocalReplica:
        self._num_started += 1
        base = names.base(self.deployment.name)
        return LocalReplica(
            f"{base}-{revision[:5]}-{self._num_started}",
            self._launches[revision],
            home=self._home,
            environ=self._environ,
            notify=self._notify,
            wake=self._wake,
            clock=self._clock,
        )

    def _has_weights(self, launch: Launch) -> bool:
        if not launch.fetch:
            return True
        fetching = self._fetches.get(launch.revision)
        if fetching is None:
            log = self._home.logs / f"{names.base(self.deployment.name)}-fetch.log"
            fetching = self._fetches[launch.revision] = Fetching(
                launch, log, environ=self._environ, notify=self._notify, clock=self._clock
            )
        fetching.look()
        return fetching.is_done

    # -- rows for people

    def _phase(self) -> str:
        if self.is_deleted:
            return "leaving"
        if self.deployment.suspend:
            return "suspended"
        if self.is_asleep:
            return "asleep"
        if self._canary.rejected == self._revision:
            return "rolled back"
        if self._canary.revision:
            return "canary"
        if self.is_done:
            return "ready"
        return "rolling" if len(self._targets) > 1 else "starting"

    def _message(self) -> str:
        if self._canary.message:
            return self._canary.message
        problems = [
            replica.detail for replica in self.replicas if replica.state in ("waiting", "failed")
        ]
        return problems[0] if problems else self.waiting_for

    def _state_text(self, replica: LocalReplica) -> str:
        if replica.state == "ready" and replica in self.warm:
            return "warm"
        if replica.state == "ready":
            return "serving" if self._is_routable(replica) else "ready"
        if replica.state == "loading":
            return f"loading {replica.progress:.0%}"
        return "fetching" if replica.state == "held" else replica.state

    def _detail(self, replica: LocalReplica) -> str:
        fetching = self._fetches.get(replica.launch.revision)
        if replica.state == "held" and fetching is not None:
            return fetching.detail
        if replica.state == "loading" and replica.loading is not None:
            return str(replica.loading)
        return replica.detail


def _present(replicas: list[LocalReplica], share: ThreadShare) -> list[LocalReplica]:
    """Those that are left after a look at each."""
    for replica in replicas:
        replica.look(share)
    return [replica for replica in replicas if replica.state != "gone"]
