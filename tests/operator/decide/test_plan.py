"""Plans: what is applied, scaled and deleted; and a machine that edits, judges and kills."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo_operator.decide.canary import CanaryState, CanaryVerdict
from octavo_operator.decide.observed import Observed
from octavo_operator.decide.plan import (
    CapacityPlan,
    Target,
    fingerprint,
    marked,
    plan_capacity,
    plan_changes,
    with_replicas,
)
from octavo_operator.decide.rollout import (
    RevisionGroup,
    RevisionReplica,
    RolloutStep,
    group_replicas,
)
from octavo_operator.objects import kinds
from octavo_operator.spec.traffic import CanarySpec, CanaryStep, RolloutSpec
from tests.fakes.effort import num_examples
from tests.fakes.replica_sets import resized

OWNER = {"apiVersion": "octavo.dev/v1alpha1", "kind": "LLMDeployment", "name": "m", "uid": "own"}
MINE = {"app.kubernetes.io/managed-by": "octavo-operator"}


def make_object(kind: kinds.Kind, name: str, **more) -> kinds.Object:
    metadata = {
        "namespace": "d", "name": name, "uid": f"uid-{name}", "resourceVersion": "1",
        "labels": dict(MINE), "ownerReferences": [{**OWNER, "controller": True}],
    }  # fmt: skip
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **more}


def make_engine(revision: str, replicas: int) -> kinds.Object:
    body = make_object(kinds.DEPLOYMENT, f"m-{revision}", spec={"replicas": replicas})
    labels = {"octavo.dev/revision": revision, "app.kubernetes.io/component": "engine"}
    body["metadata"]["labels"] |= labels
    return body


def observe(*bodies: kinds.Object) -> Observed:
    return Observed({(kinds.kind_of(body), kinds.name_of(body)): body for body in bodies})


def plan(desired, observed, step: RolloutStep, *, revision: str = "b", replicas=()):
    capacity = CapacityPlan(step, CanaryState())
    return plan_changes(
        desired, observed, capacity, owner_uid="own", owner_name="m", revision=revision,
        replicas=replicas,
    )  # fmt: skip


def test_what_is_as_applied_is_left_alone():
    service = make_object(kinds.SERVICE, "s", spec={"a": 1})
    assert plan([service], observe(marked(service)), RolloutStep({}, (), True)).is_empty


def test_a_field_that_went_from_the_desired_is_noticed_by_the_fingerprint():
    old = marked(make_object(kinds.SERVICE, "s", spec={"a": 1, "b": 2}))
    new = make_object(kinds.SERVICE, "s", spec={"a": 1})
    assert [b["spec"] for b in plan([new], observe(old), RolloutStep({}, (), True)).apply] == [
        {"a": 1}
    ]


def test_the_number_of_replicas_is_no_part_of_the_fingerprint():
    engine = make_engine("a", 1)
    assert fingerprint(engine) == fingerprint(with_replicas(engine, 7))


def test_a_new_revision_starts_with_its_target_and_the_old_one_shrinks_by_an_order():
    step = RolloutStep({"b": 1, "a": 2}, (), False)
    found = plan([make_engine("b", 9)], observe(make_engine("a", 3)), step)
    assert [body["spec"]["replicas"] for body in found.apply] == [1]
    assert [(o.revision, o.was, o.replicas) for o in found.scale] == [("a", 3, 2)]
    assert found.details == ("Created Deployment m-b", "Scaled revision a from 3 to 2")


def test_a_revision_without_a_target_is_not_created():
    assert plan([make_engine("b", 9)], observe(), RolloutStep({}, (), False)).is_empty


def test_increases_come_before_decreases():
    step = RolloutStep({"a": 1, "b": 3}, (), False)
    found = plan([], observe(make_engine("a", 3), make_engine("b", 1)), step)
    assert [order.revision for order in found.scale] == ["b", "a"]


def test_who_leaves_is_named():
    replicas = [
        RevisionReplica("x", "a", ready=True, routable=True, in_flight=3),
        RevisionReplica("y", "a", ready=True, routable=True),
    ]
    found = plan(
        [], observe(make_engine("a", 2)), RolloutStep({"a": 1}, (), False), replicas=replicas
    )
    assert found.scale[0].leaving == ("y",)


def test_what_nobody_wants_goes_but_data_and_strangers_stay():
    claim = make_object(kinds.VOLUME_CLAIM, "weights")
    theirs = make_object(kinds.SERVICE, "theirs")
    theirs["metadata"]["labels"] = {}
    other = make_object(kinds.SERVICE, "other")
    other["metadata"]["ownerReferences"][0]["uid"] = "somebody"
    monitor = make_object(kinds.POD_MONITOR, "m")
    found = plan([], observe(claim, theirs, other, monitor), RolloutStep({}, (), True))
    assert [kinds.name_of(body) for body in found.delete] == ["m"]


def test_what_belongs_to_a_revision_goes_with_it():
    old = make_object(kinds.CONFIG_MAP, "m-a")
    old["metadata"]["labels"]["octavo.dev/revision"] = "a"
    observed = observe(make_engine("a", 0), make_engine("b", 1), old)
    assert plan([], observed, RolloutStep({}, (), True)).is_empty
    found = plan([], observed, RolloutStep({}, ("a",), True))
    assert [body["kind"] for body in found.delete] == ["Deployment", "ConfigMap"]


GOOD = CanaryVerdict("advance", "CanaryHealthy", "")
BAD = CanaryVerdict("reject", "CanaryErrorRate", "")
WAIT = CanaryVerdict("hold", "CanaryWaitingForTraffic", "")


class PlanMachine(RuleBasedStateMachine):
    """Edits, reverts, verdicts, strategies, failing pods, and an operator that dies anywhere:
    also between a decision about the canary and its writing down."""

    @initialize(replicas=st.integers(1, 5), surge=st.integers(0, 2), unavailable=st.integers(0, 2))
    def begin(self, replicas: int, surge: int, unavailable: int) -> None:
        self.replicas, self.surge, self.unavailable = replicas, surge, unavailable
        self.revision, self.num_revisions, self.strategy = "r0", 1, "Canary"
        self.now = 1.0
        self.state = CanaryState()
        self.targets: dict[str, int] = {}
        self.pods: list[list[object]] = []

    def target(self) -> Target:
        steps = (CanaryStep(10, 5.0), CanaryStep(50, 5.0))
        rollout = RolloutSpec(
            strategy="Canary" if self.strategy == "Canary" else "Rolling",
            max_surge=self.surge,
            max_unavailable=self.unavailable,
            canary=CanarySpec(steps=steps),
        )
        return Target(self.revision, self.replicas, rollout)

    def groups(self) -> list[RevisionGroup]:
        replicas = [
            RevisionReplica(str(i), str(revision), ready=bool(ok), routable=bool(ok))
            for i, (revision, ok) in enumerate(self.pods)
        ]
        return group_replicas(self.targets, replicas)

    def serving(self) -> int:
        return sum(group.serving for group in self.groups())

    @rule(verdict=st.sampled_from((GOOD, GOOD, WAIT, BAD)), writes=st.integers(0, 5))
    def operate(self, verdict: CanaryVerdict, writes: int) -> None:
        target, before = self.target(), self.serving()
        found = plan_capacity(target, self.groups(), self.state, verdict=verdict, now=self.now)
        if writes == 0:
            return
        self.state = found.state  # the status comes first
        for number, (revision, count) in enumerate(found.step.targets.items()):
            if number + 1 >= writes:
                return
            total, grows = sum(self.targets.values()), count > self.targets.get(revision, 0)
            self.targets[revision] = count
            if grows:
                assert sum(self.targets.values()) <= max(target.limits.most, total)
            assert self.serving() >= min(before, target.limits.least_serving)
        for revision in found.step.vanished:
            assert not any(pod[0] == revision for pod in self.pods)
            del self.targets[revision]

    @rule()
    def replica_sets_obey(self) -> None:
        self.pods = resized(self.pods, self.targets)

    @rule()
    def all_become_routable(self) -> None:
        self.pods = [[revision, True] for revision, _ in self.pods]

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def one_fails(self, data: st.DataObject) -> None:
        self.pods[data.draw(st.integers(0, len(self.pods) - 1))][1] = False

    @rule()
    def edit(self) -> None:
        self.revision, self.num_revisions = f"r{self.num_revisions}", self.num_revisions + 1

    @rule(data=st.data())
    def revert(self, data: st.DataObject) -> None:
        self.revision = f"r{data.draw(st.integers(0, self.num_revisions - 1))}"

    @rule(replicas=st.integers(0, 5))
    def scale(self, replicas: int) -> None:
        self.replicas = replicas

    @rule(strategy=st.sampled_from(("Canary", "Rolling")))
    def change_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    @rule(seconds=st.sampled_from((1.0, 10.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def lose_the_status(self) -> None:
        self.state = CanaryState()

    def teardown(self) -> None:
        """Left alone with a healthy canary it ends with one revision, whole, and nothing else."""
        if not hasattr(self, "targets"):
            return
        for _ in range(150):
            found = plan_capacity(
                self.target(), self.groups(), self.state, verdict=GOOD, now=self.now
            )
            self.state = found.state
            self.targets |= found.step.targets
            for revision in found.step.vanished:
                del self.targets[revision]
            self.replica_sets_obey()
            self.all_become_routable()
            self.now += 10.0
        expected = self.state.stable
        # A trial waits for replicas that serve somebody.
        is_waiting = not self.replicas and self.state.revision == self.revision
        assert expected == self.revision or self.state.rejected == self.revision or is_waiting
        wanted = {expected: self.replicas} if self.replicas else {}
        assert {name: count for name, count in self.targets.items() if count} == wanted
        assert len(self.pods) == self.replicas


PlanMachine.TestCase.settings = settings(
    max_examples=num_examples(120, 50), stateful_step_count=25, deadline=None, derandomize=True
)
TestPlanMachine = PlanMachine.TestCase
