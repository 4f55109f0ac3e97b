"""Every field does something: from each leaf of the CRD to what it changes, and back.

What a spec leads to is looked at in six parts: the revision of its pods, the objects that are
applied (what routers read is among them), how a rollout goes on, what becomes of adapters on trial,
how replicas follow demand, and which pods change sides.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from octavo_engine.protocol.sides import EngineLoad, SideDemand, decide_sides
from octavo_engine.protocol.state import TTFT_BOUNDS_S
from octavo_operator.decide import canary
from octavo_operator.decide.adapter_trials import decide_trials
from octavo_operator.decide.autoscale import LoadSignals, ScaleHistory, decide
from octavo_operator.decide.canary import CanaryState, CanaryTotals, Sample
from octavo_operator.decide.plan import Target, plan_capacity
from octavo_operator.decide.rollout import RevisionGroup
from octavo_operator.desired import desired_objects, revision_of
from octavo_operator.settings import OPTIONAL_KINDS, OperatorSettings
from tests.fakes.deployments import make_deployment, with_images
from tests.fakes.random_specs import leaves, spec_schema, template_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from octavo_operator.decide.plan import CapacityPlan
    from octavo_operator.spec import AdapterSpec, AutoscalingSpec, RolloutSpec
    from octavo_operator.spec.prefill import FlipSpec

SETTINGS = with_images(OperatorSettings(capabilities=OPTIONAL_KINDS))
BASE: dict[str, Any] = {"model": {"uri": "hf://org/name"}, "replicas": 4}
KEY_REF = {"name": "a", "key": "b"}
# What has to stand beside a leaf for it to mean something; of a leaf's the longest counts.
AROUND: dict[str, dict[str, Any]] = {
    "engine.kvTiers.shared.size": {"engine": {"kvTiers": {"shared": {"existingClaim": "kv"}}}},
    "engine.kvTiers.shared.secretRef": {"engine": {"kvTiers": {"shared": {"uri": "s3://kv"}}}},
    "engine.env": {"engine": {"env": [{"name": "A", "value": "1"}]}},
    "engine.tensorParallelSize": {"engine": {"executor": "mp"}},
    "engine.expertParallel": {"engine": {"executor": "mp", "tensorParallelSize": 2}},
    "engine.pipelineParallelSize": {"engine": {"executor": "mp"}},
    "engine.env.[].valueFrom": {"engine": {"env": [{"name": "A"}]}},
    "engine.env.[].valueFrom.secretKeyRef": {
        "engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": KEY_REF}}]}
    },
    "engine.env.[].valueFrom.configMapKeyRef": {
        "engine": {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": KEY_REF}}]}
    },
    "rollout.canary": {"rollout": {"strategy": "Canary", "canary": {"steps": [{"weight": 20}]}}},
    "autoscaling": {"autoscaling": {"maxReplicas": 8, "targets": {"queuedTokens": 1000}}},
    "autoscaling.targets": {"autoscaling": {"maxReplicas": 8}},
    "autoscaling.prometheusURL": {
        "autoscaling": {"maxReplicas": 8, "provider": "keda", "targets": {"inFlight": 8}}
    },
    "adapters": {"adapters": [{"name": "a", "uri": "hf://a/b"}]},
    "adapters.[].canary": {
        "adapters": [
            {"name": "b", "uri": "hf://a/b", "canary": {"of": "a"}},
            {"name": "a", "uri": "hf://a/a"},
            {"name": "c", "uri": "hf://a/c"},
        ]
    },
    "prefill": {"prefill": {"secretRef": {"name": "kv"}}},
    "prefill.autoscaling": {
        "prefill": {
            "secretRef": {"name": "kv"},
            "autoscaling": {"maxReplicas": 8, "targets": {"queuedTokens": 1000}},
        }
    },
    "prefill.autoscaling.targets": {
        "prefill": {"secretRef": {"name": "kv"}, "autoscaling": {"maxReplicas": 8}}
    },
    "prefill.flip": {
        "prefill": {
            "secretRef": {"name": "kv"},
            "flip": {"targets": {"ttft": "500ms", "tpot": "10ms"}},
        }
    },
    "group": {"group": {"size": 2, "secretRef": {"name": "between"}}},
    "cache.kind": {"cache": {"accessMode": "ReadWriteMany"}},
    "cache.size": {"cache": {"kind": "PersistentVolumeClaim", "accessMode": "ReadWriteMany"}},
    "cache.storageClassName": {
        "cache": {"kind": "PersistentVolumeClaim", "accessMode": "ReadWriteMany"}
    },
    "cache.accessMode": {"cache": {"kind": "PersistentVolumeClaim"}, "replicas": 1},
    "cache.existingClaim": {"cache": {"kind": "PersistentVolumeClaim"}},
    "cache.hostPath": {"cache": {"kind": "HostPath"}},
}
# Leaf → two of its values, and what differs between them.
PODS, OBJECTS, PLAN, SCALE = "revision objects", "objects", "rollout", "autoscaling"
TRIAL = "trials"
PREFILL, SIDES = "prefill-autoscaling", "sides"
CHANGES: dict[str, tuple[str, Any, Any]] = {
    "model.uri": (PODS, "hf://org/name", "hf://org/other"),
    "model.revision": (PODS, "main", "v1.0"),
    "model.digest": (PODS, "sha256:" + "0" * 64, "sha256:" + "1" * 64),
    "model.servedName": (PODS, "a", "b"),
    "model.aliases.[]": (PODS, "a", "b"),
    "model.secretRef.name": (PODS, "a", "b"),
    "engine.device": (PODS, "cpu", "sim"),
    "engine.dtype": (PODS, "auto", "float32"),
    "engine.quantization": (PODS, "none", "int8"),
    "engine.maxModelLen": (PODS, 1024, 2048),
    "engine.maxNumSeqs": (PODS, 16, 32),
    "engine.maxNumBatchedTokens": (PODS, 1024, 2048),
    "engine.kvCacheMemory": (PODS, "1Gi", "2Gi"),
    "engine.kvTiers.hostMemory": (PODS, "1Gi", "2Gi"),
    "engine.kvTiers.disk.size": (PODS, "1Gi", "2Gi"),
    "engine.kvTiers.disk.existingClaim": (PODS, "a", "b"),
    "engine.kvTiers.shared.size": (PODS, "1Gi", "2Gi"),
    "engine.kvTiers.shared.existingClaim": (PODS, "a", "b"),
    "engine.kvTiers.shared.uri": (PODS, "s3://kv/a", "s3://kv/b"),
    "engine.kvTiers.shared.secretRef.name": (PODS, "a", "b"),
    "engine.encryption.secretRef.name": (PODS, "a", "b"),
    "engine.prefixCaching": (PODS, True, False),
    "engine.tensorParallelSize": (PODS, 1, 2),
    "engine.expertParallel": (PODS, False, True),
    "engine.pipelineParallelSize": (PODS, 1, 2),
    "engine.dataParallelSize": (PODS, 1, 2),
    "engine.executor": (PODS, "uni", "mp"),
    "engine.startupTimeout": (PODS, "5m", "10m"),
    "engine.image": (PODS, "host/a:1", "host/a:2"),
    "engine.args.{}": (PODS, 64, 65),
    "engine.env.[].name": (PODS, "A", "B"),
    "engine.env.[].value": (PODS, "1", "2"),
    "engine.env.[].valueFrom.secretKeyRef.name": (PODS, "a", "c"),
    "engine.env.[].valueFrom.secretKeyRef.key": (PODS, "b", "c"),
    "engine.env.[].valueFrom.secretKeyRef.optional": (PODS, True, False),
    "engine.env.[].valueFrom.configMapKeyRef.name": (PODS, "a", "c"),
    "engine.env.[].valueFrom.configMapKeyRef.key": (PODS, "b", "c"),
    "engine.env.[].valueFrom.configMapKeyRef.optional": (PODS, True, False),
    "lora.maxLoras": (PODS, 8, 16),
    "lora.maxCpuLoras": (PODS, 32, 33),
    "lora.maxRank": (PODS, 16, 64),
    "adapters.[].name": (OBJECTS, "a", "b"),  # and no other pods
    "adapters.[].uri": (OBJECTS, "hf://a/b", "file:///adapters/c"),
    "adapters.[].pinned": (OBJECTS, False, True),
    "adapters.[].canary.of": (OBJECTS, "a", "c"),
    "adapters.[].canary.percent": (OBJECTS, 10, 20),
    "adapters.[].canary.pause": (TRIAL, "60s", "5m"),
    "adapters.[].canary.analysis.maxErrorRate": (TRIAL, 0.01, 0.5),
    "adapters.[].canary.analysis.maxTTFTp95Ratio": (TRIAL, 1.5, 3),
    "adapters.[].canary.analysis.maxITLRatio": (TRIAL, 1.5, 3),
    "adapters.[].canary.analysis.minRequests": (TRIAL, 50, 500),
    "replicas": (OBJECTS, 4, 5),
    "resources.requests.{}": (PODS, "1Gi", "2Gi"),
    "resources.limits.{}": (PODS, "1Gi", "2Gi"),
    "routing.policy": (OBJECTS, "prefix-load", "session"),
    "routing.holdTimeout": (OBJECTS, "10s", "20s"),
    "rollout.strategy": (PLAN, "Rolling", "Recreate"),
    "rollout.maxSurge": (PLAN, 1, "50%"),
    "rollout.maxUnavailable": (PLAN, 0, 1),
    "rollout.drainTimeout": (PODS, "60s", "90s"),
    "rollout.progressDeadline": (OBJECTS, "5m", "10m"),
    "rollout.canary.steps.[].weight": (PLAN, 20, 50),
    "rollout.canary.steps.[].pause": (PLAN, "60s", "5m"),
    "rollout.canary.analysis.maxErrorRate": (PLAN, 0.01, 0.5),
    "rollout.canary.analysis.maxTTFTp95Ratio": (PLAN, 1.5, 3),
    "rollout.canary.analysis.maxITLRatio": (PLAN, 1.5, 3),
    "rollout.canary.analysis.minRequests": (PLAN, 50, 500),
    "autoscaling.minReplicas": (SCALE, 1, 3),
    "autoscaling.maxReplicas": (SCALE, 8, 5),
    "autoscaling.provider": ("objects autoscaling", "octavo", "hpa"),
    "autoscaling.targets.queuedTokens": (SCALE, 1000, 3000),
    "autoscaling.targets.kvUsage": (SCALE, 0.3, 0.9),
    "autoscaling.targets.inFlight": (SCALE, 5, 15),
    "autoscaling.targets.ttft": (SCALE, "1s", "3s"),
    "autoscaling.behavior.scaleUp.window": (SCALE, "0s", "30s"),
    "autoscaling.behavior.scaleUp.step": (SCALE, 1, "100%"),
    "autoscaling.behavior.scaleDown.window": (SCALE, "0s", "1m"),
    "autoscaling.behavior.scaleDown.step": (SCALE, 1, "100%"),
    "autoscaling.scaleToZero.after": (SCALE, "1m", "5m"),
    "autoscaling.prometheusURL": (OBJECTS, "http://a:9090", "http://b:9090"),
    "cache.kind": (PODS, "PersistentVolumeClaim", "EmptyDir"),
    "cache.size": (OBJECTS, "1Gi", "2Gi"),
    "cache.storageClassName": (OBJECTS, "slow", "fast"),
    "cache.accessMode": (OBJECTS, "ReadWriteOnce", "ReadWriteMany"),
    "cache.existingClaim": (PODS, "mine", "yours"),
    "cache.hostPath": (PODS, "/var/models", "/srv/models"),
    "prefill.replicas": (OBJECTS, 1, 2),  # and no other pods
    "prefill.autoscaling.minReplicas": (PREFILL, 1, 3),
    "prefill.autoscaling.maxReplicas": (PREFILL, 8, 5),
    "prefill.autoscaling.targets.queuedTokens": (PREFILL, 1000, 3000),
    "prefill.autoscaling.targets.inFlight": (PREFILL, 5, 15),
    "prefill.autoscaling.behavior.scaleUp.window": (PREFILL, "0s", "30s"),
    "prefill.autoscaling.behavior.scaleUp.step": (PREFILL, 1, "100%"),
    "prefill.autoscaling.behavior.scaleDown.window": (PREFILL, "0s", "1m"),
    "prefill.autoscaling.behavior.scaleDown.step": (PREFILL, 1, "100%"),
    "prefill.flip.targets.ttft": (SIDES, "500ms", "60ms"),
    "prefill.flip.targets.tpot": (SIDES, "10ms", "1s"),
    "prefill.flip.minPrefill": (SIDES, 0, 3),
    "prefill.flip.minDecode": (SIDES, 1, 4),
    "prefill.secretRef.name": (PODS, "kv", "other"),
    "prefill.resources.requests.{}": (PODS, "1Gi", "2Gi"),
    "prefill.resources.limits.{}": (PODS, "1Gi", "2Gi"),
    "prefill.maxNumSeqs": (PODS, 16, 32),
    "prefill.maxNumBatchedTokens": (PODS, 1024, 2048),
    "prefill.kvCacheMemory": (PODS, "1Gi", "2Gi"),
    "prefill.args.{}": (PODS, 64, 65),
    "prefill.nodeSelector.{}": (PODS, "a", "b"),
    "group.size": (PODS, 2, 3),
    "group.secretRef.name": (PODS, "between", "other"),
    "suspend": (OBJECTS, False, True),
    "podTemplate.metadata.labels": (PODS, {"a": "b"}, {"a": "c"}),
    "podTemplate.metadata.annotations": (PODS, {"a": "b"}, {"a": "c"}),
    "podTemplate.spec.affinity": (
        PODS, {"nodeAffinity": {}},
        {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a"}]}},
    ),
    "podTemplate.spec.automountServiceAccountToken": (PODS, False, True),
    "podTemplate.spec.containers": (
        PODS, [{"name": "a", "image": "b"}], [{"name": "a", "image": "c"}],
    ),
    "podTemplate.spec.dnsConfig": (PODS, {"searches": ["a"]}, {"searches": ["b"]}),
    "podTemplate.spec.dnsPolicy": (PODS, "Default", "None"),
    "podTemplate.spec.hostAliases": (
        PODS, [{"ip": "10.0.0.1", "hostnames": ["a"]}], [{"ip": "10.0.0.1", "hostnames": ["b"]}],
    ),
    "podTemplate.spec.imagePullSecrets": (PODS, [{"name": "a"}], [{"name": "b"}]),
    "podTemplate.spec.initContainers": (
        PODS, [{"name": "a", "image": "b"}], [{"name": "a", "image": "c"}],
    ),
    "podTemplate.spec.nodeSelector": (PODS, {"a": "b"}, {"a": "c"}),
    "podTemplate.spec.priorityClassName": (PODS, "a", "b"),
    "podTemplate.spec.resourceClaims": (
        PODS, [{"name": "a", "resourceClaimName": "b"}], [{"name": "a", "resourceClaimName": "c"}],
    ),
    "podTemplate.spec.runtimeClassName": (PODS, "a", "b"),
    "podTemplate.spec.schedulerName": (PODS, "a", "b"),
    "podTemplate.spec.securityContext": (PODS, {"fsGroup": 1}, {"fsGroup": 2}),
    "podTemplate.spec.serviceAccountName": (PODS, "a", "b"),
    "podTemplate.spec.tolerations": (PODS, [{"key": "a"}], [{"key": "b"}]),
    "podTemplate.spec.topologySpreadConstraints": (
        PODS, [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway"}],
        [{"maxSkew": 2, "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway"}],
    ),
    "podTemplate.spec.volumes": (
        PODS, [{"name": "a", "emptyDir": {}}], [{"name": "a", "hostPath": {"path": "/a"}}],
    ),
}  # fmt: skip


def test_the_table_has_every_leaf_and_no_other():
    known = {".".join(path) for path in leaves(spec_schema())}
    known |= {f"podTemplate.{path}" for path in template_fields()}
    assert known == CHANGES.keys()


@pytest.mark.parametrize("leaf", CHANGES)
def test_a_leaf_changes_what_it_is_for_and_back(leaf: str):
    parts, first, second = CHANGES[leaf]
    before = consequences(placed(leaf, first))
    after = consequences(placed(leaf, second))
    assert {part for part, value in before.items() if after[part] != value} == set(parts.split())
    assert consequences(placed(leaf, first)) == before


def placed(leaf: str, value: Any, base: dict[str, Any] = BASE) -> dict[str, Any]:
    """A spec with this value there, and around it what it needs."""
    beside = max((name for name in AROUND if leaf.startswith(name)), key=len, default="")
    spec = copy.deepcopy(base | AROUND.get(beside, {}))
    at: Any = spec
    *path, last = leaf.split(".")
    for name, following in pairwise([*path, last]):
        if name == "[]":
            at = at[0]
            continue
        at = at.setdefault(name, [{}] if following == "[]" else {})
    if last == "[]":
        at[:] = [value]
    else:
        at["memory" if "resources" in path else "max-queue" if last == "{}" else last] = value
    return spec


def consequences(spec: dict[str, Any]) -> dict[str, str]:
    deployment = make_deployment(spec)
    scaling, prefill = deployment.autoscaling, deployment.prefill
    prefill_scaling = None if prefill is None else prefill.autoscaling
    return {
        "revision": revision_of(deployment, SETTINGS),
        "objects": json.dumps(desired_objects(deployment, SETTINGS)),
        "rollout": "\n".join(next_steps(deployment.rollout)),
        SCALE: "" if scaling is None else "\n".join(replicas_of_a_day(scaling)),
        PREFILL: ("" if prefill_scaling is None else "\n".join(replicas_of_a_day(prefill_scaling))),
        TRIAL: "\n".join(ends_of_trials(deployment.adapters)),
        SIDES: "" if prefill is None or prefill.flip is None else sides(prefill.flip),
    }


def sides(rules: FlipSpec) -> str:
    """Of four engines that answer, under prompts that delay them."""
    loads = [EngineLoad(f"e{i}", False, 15, 0, 4e-5, 0.011) for i in range(4)]
    demand = SideDemand(24_000.0, 1200.0)
    change = decide_sides(loads, demand, rules.targets, rules.limits, since_change_s=60.0)
    return "" if change is None else str(change.to_prompts)


def next_steps(rollout: RolloutSpec) -> Iterator[str]:
    """From four engines of the old revision to the new one, however it fares."""
    wish = Target("new", 4, rollout)
    yield reported(plan_capacity(wish, [RevisionGroup("old", 4, 4, 4)], CanaryState(stable="old")))
    both = [RevisionGroup("old", 4, 4, 4), RevisionGroup("new", 4, 4, 4)]
    trial = CanaryState(stable="old", revision="new", step_started_at=1.0)
    yield reported(plan_capacity(wish, both, trial, now=100.0))
    for fared in (sample(), sample(errors=5), sample(ttft_s=0.2), sample(itl_s=0.1)):
        verdict = canary.judge(rollout.canary.analysis, sample(), fared)
        yield reported(plan_capacity(wish, both, trial, verdict=verdict, now=100.0))


def ends_of_trials(adapters: Sequence[AdapterSpec]) -> Iterator[str]:
    """However the adapter on trial fares, at once and after some time."""
    names = [adapter.name for adapter in adapters]
    for fared in (sample(), sample(errors=5), sample(ttft_s=0.2), sample(itl_s=0.1)):
        begun = decide_trials(adapters, (), {}, {}, names, now=1.0)
        totals = dict.fromkeys(names, CanaryTotals(sample(), fared, is_reported=True))
        for now in (2.0, 100.0):
            after = decide_trials(adapters, begun.trials, begun.baselines, totals, names, now=now)
            yield str([trial.phase for trial in after.trials])


def reported(plan: CapacityPlan) -> str:
    """Without its words: those alone change nothing."""
    return f"{plan.step.targets} {plan.weights} {replace(plan.state, message='')}"


def sample(errors: int = 0, ttft_s: float = 0.1, itl_s: float = 0.05) -> Sample:
    buckets = (*(100 if ttft_s <= bound else 0 for bound in TTFT_BOUNDS_S), 100)
    return Sample(100, errors, ttft_s * 100, 100, itl_s * 100, 100, buckets)


def replicas_of_a_day(rules: AutoscalingSpec) -> Iterator[str]:
    """Two minutes of work for some engines, and then nobody."""
    if rules.provider != "octavo":
        return
    memory, replicas = ScaleHistory(), 2
    for now in range(0, 900, 5):
        is_busy = now <= 120
        signals = LoadSignals(
            is_known=True,
            is_complete=True,
            serving=replicas,
            queued_tokens=6000 * is_busy,
            kv_usage=0.9 * is_busy,
            ttft_p95_s=3.0 if is_busy else None,
            in_flight=30 * is_busy,
            held=0,
            last_request_age_s=max(0.0, now - 120.0),
        )
        decision = decide(rules, signals, replicas, memory, float(now))
        memory, replicas = decision.history, decision.replicas
        yield f"{now} {replicas}"
