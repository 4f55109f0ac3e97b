"""Which objects there are, what moves them, and what must leave them alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo_engine.protocol.kubernetes import ROUTING_ANNOTATION
from octavo_operator.desired import Traffic, check_autoscaler, desired_objects, revision_of
from octavo_operator.errors import SpecInvalid
from octavo_operator.settings import (
    OPTIONAL_KINDS,
    POD_MONITOR,
    SCALED_OBJECT,
    SERVICE_MONITOR,
    Images,
    OperatorSettings,
)
from tests.fakes.deployments import CPU_IMAGE, UID, make_deployment, with_images
from tests.fakes.random_specs import leaves, spec_schema

HUB = {"uri": "hf://org/name"}
EVERYTHING = with_images(OperatorSettings(capabilities=OPTIONAL_KINDS))


def objects(
    spec: dict[str, Any] | None = None,
    settings: OperatorSettings | None = None,
    traffic: Traffic | None = None,
) -> dict[str, dict[str, Any]]:
    """By kind; the headless Service is `Headless`."""
    found = desired_objects(make_deployment(spec), with_images(settings), traffic)
    return {
        "Headless" if body.get("spec", {}).get("clusterIP") == "None" else body["kind"]: body
        for body in found
    }


def routing(traffic: Traffic | None = None) -> dict[str, Any]:
    body = objects({"routing": {"holdTimeout": "90s"}}, None, traffic)["Service"]
    found: dict[str, Any] = json.loads(body["metadata"]["annotations"][ROUTING_ANNOTATION])
    return found


def revision(spec: dict[str, Any] | None = None, settings: OperatorSettings | None = None) -> str:
    return revision_of(make_deployment(spec), with_images(settings))


def test_every_prefix_of_the_order_is_safe():
    spec = {"model": HUB, "cache": {"kind": "PersistentVolumeClaim"}}
    kinds = [body["kind"] for body in desired_objects(make_deployment(spec), EVERYTHING)]
    assert kinds == [
        "ServiceAccount",
        "ConfigMap",
        "PersistentVolumeClaim",
        "Service",
        "Service",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "PodMonitor",
        "Deployment",
    ]


def test_deleting_the_owner_deletes_them_all():
    for body in desired_objects(make_deployment({"model": HUB}), EVERYTHING):
        (owner,) = body["metadata"]["ownerReferences"]
        assert owner["uid"] == UID
        assert owner["controller"] is True
        assert "namespace" not in owner


def test_replicas_are_the_specs():
    assert objects({"replicas": 3})["Deployment"]["spec"]["replicas"] == 3
    assert objects({"replicas": 3, "suspend": True})["Deployment"]["spec"]["replicas"] == 0
    assert objects(None, None, Traffic(replicas=7))["Deployment"]["spec"]["replicas"] == 7


def test_replicas_are_left_out_where_an_autoscaler_decides():
    scaling = {"maxReplicas": 4}
    assert "replicas" not in objects({"autoscaling": scaling})["Deployment"]["spec"]
    suspended = objects({"autoscaling": scaling, "suspend": True})
    assert suspended["Deployment"]["spec"]["replicas"] == 0
    prefill = {"prefill": {**KV, "autoscaling": scaling}}
    assert [body["spec"].get("replicas") for body in deployments(prefill)] == [None, 1]
    slept = deployments({**prefill, "suspend": True})
    assert [body["spec"].get("replicas") for body in slept] == [0, 0]


def deployments(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Of its prefill pods, and of the pods that answer."""
    return [body for body in made(spec) if body["kind"] == "Deployment"]


# --- revisions

SAME_POD = [
    {"replicas": 5},
    {"suspend": True},
    {"routing": {"policy": "session", "holdTimeout": "1m"}},
    {"rollout": {"maxSurge": 2, "maxUnavailable": 1, "progressDeadline": "1h"}},
    {"rollout": {"strategy": "Canary"}},
    {"autoscaling": {"maxReplicas": 3}},
    {"cache": {"accessMode": "ReadWriteMany"}},
]
ADAPTER = {"name": "law", "uri": "hf://org/law"}
KV = {"secretRef": {"name": "kv"}}
PREFILL_SCALING = (
    "minReplicas", "maxReplicas", "targets.queuedTokens", "targets.inFlight",
    "behavior.scaleUp.window", "behavior.scaleUp.step", "behavior.scaleDown.window",
    "behavior.scaleDown.step",
)  # fmt: skip
GROUP = {"size": 3, "secretRef": {"name": "between"}}
WITH_LORA = [
    {"adapters": [ADAPTER]},
    {"lora": {}, "adapters": [ADAPTER]},
    {"lora": {"maxLoras": 16, "maxRank": 64}},
    {"adapters": [ADAPTER, {"name": "tax", "uri": "file:///tax", "pinned": True}]},
]
ANOTHER_POD = [
    {"model": {"uri": "demo://other"}},
    {"model": {"uri": "demo://smollm2", "aliases": ["b"]}},
    {"engine": {"dtype": "float32"}},
    {"engine": {"args": {"max-queue": 2}}},
    {"engine": {"image": "other:1"}},
    {"resources": {"limits": {"memory": "4Gi"}}},
    {"rollout": {"drainTimeout": "10s"}},
    {"rollout": {"drainTimeout": "0s"}},
    {"podTemplate": {"metadata": {"annotations": {"restarted-at": "now"}}}},
    {"prefill": KV},
    {"group": GROUP},
]


@pytest.mark.parametrize("spec", SAME_POD, ids=str)
def test_what_no_pod_notices_restarts_none(spec: dict[str, Any]):
    assert revision(spec) == revision()


@pytest.mark.parametrize("spec", WITH_LORA, ids=str)
def test_which_adapters_there_are_is_in_no_revision(spec: dict[str, Any]):
    assert revision(spec) == revision({"lora": {}}) != revision()
    assert objects(spec)["Deployment"] == objects({"lora": {}})["Deployment"]


def test_routers_learn_of_adapters_from_the_annotation():
    spec = {"adapters": [ADAPTER, {"name": "tax", "uri": "file:///tax", "pinned": True}]}
    text = objects(spec)["Service"]["metadata"]["annotations"]["octavo.dev/routing"]
    routing = json.loads(text)
    assert routing["adapters"] == [
        {"name": "law", "uri": "hf://org/law"}, {"name": "tax", "uri": "/tax", "pinned": True},
    ]  # fmt: skip
    assert routing["adapterSlots"] == 64
    text = objects(_canary(of="tax", percent=5))["Service"]["metadata"]["annotations"]
    *_, canary = json.loads(text["octavo.dev/routing"])["adapters"]
    assert canary == {
        "name": "next", "uri": "/next", "pinned": True, "canary": {"of": "tax", "percent": 5},
    }  # fmt: skip
    plain = objects()["Service"]["metadata"]["annotations"]["octavo.dev/routing"]
    assert "adapter" not in plain


@pytest.mark.parametrize("spec", ANOTHER_POD, ids=str)
def test_what_a_pod_notices_is_another_revision(spec: dict[str, Any]):
    assert revision(spec) != revision()


def test_what_the_operator_adds_by_itself_is_in_no_revision():
    assert revision(None, EVERYTHING) == revision()
    assert revision(None, OperatorSettings(network_policy=False)) == revision()
    assert revision(None, OperatorSettings(pre_stop_s=6)) == revision()
    assert revision(None, OperatorSettings(images=Images(pull_policy="Always"))) == revision()
    assert revision(None, OperatorSettings(images=Images(cpu="other:1"))) != revision()


def test_what_is_written_as_it_would_be_by_itself_is_the_same_revision():
    """The API server fills in defaults, and a later schema has more of them."""
    written = {
        "engine": {"device": "cpu", "dtype": "auto", "prefixCaching": True, "image": CPU_IMAGE},
        "rollout": {"drainTimeout": "2m"},
        "cache": {"kind": "EmptyDir", "size": "20Gi", "accessMode": "ReadWriteOnce"},
        "podTemplate": {},
    }
    assert revision(written) == revision()
    assert revision({"model": HUB, **written}) == revision({"model": HUB})


def test_a_revision_has_a_deployment_and_a_file_of_its_own():
    found = objects()
    name = f"smollm2-{revision()}"
    assert found["Deployment"]["metadata"]["name"] == name
    assert found["ConfigMap"]["metadata"]["name"] == name
    assert found["ConfigMap"]["immutable"] is True
    selector = found["Deployment"]["spec"]["selector"]["matchLabels"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    assert selector["octavo.dev/revision"] == revision()


def test_every_leaf_of_the_spec_changes_something():
    """A field that moves no object would be silently without effect. The exceptions are decisions
    that the reconciler takes itself, from the spec."""
    decided_elsewhere = {
        "rollout.strategy", "rollout.maxSurge",
        "rollout.canary.steps.[].weight", "rollout.canary.steps.[].pause",
        "adapters.[].canary.pause", "autoscaling.targets.ttft",
    }  # fmt: skip
    decided_elsewhere |= {
        f"{canary}.analysis.{name}"
        for canary in ("rollout.canary", "adapters.[].canary")
        for name in ("maxErrorRate", "maxTTFTp95Ratio", "maxITLRatio", "minRequests")
    }
    decided_elsewhere |= {f"prefill.autoscaling.{name}" for name in PREFILL_SCALING}
    decided_elsewhere |= {
        "prefill.flip.minPrefill", "prefill.flip.minDecode",
        "prefill.flip.targets.ttft", "prefill.flip.targets.tpot",
    }  # fmt: skip
    all_leaves = {".".join(path) for path in leaves(spec_schema())}
    moved = {leaf for leaf, (before, after) in CHANGES.items() if made(before) != made(after)}
    assert moved == set(CHANGES)
    assert all_leaves == moved | decided_elsewhere


def made(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return desired_objects(make_deployment({"model": HUB, **spec}), EVERYTHING)


def _engine(name: str, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {"engine": {name: value}}


def _model(**fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {"model": {**HUB, **fields}}


def _env(before: dict[str, Any], after: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return tuple({"engine": {"env": [{"name": "A", **one}]}} for one in (before, after))  # type: ignore[return-value]  # two


def _from(kind: str, **fields: Any) -> dict[str, Any]:
    return {"valueFrom": {kind: {"name": "a", "key": "b", **fields}}}


def _references(kind: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    changes: dict[str, Any] = {"name": "x", "key": "y", "optional": True}
    return {
        f"engine.env.[].valueFrom.{kind}.{name}": _env(_from(kind), _from(kind, **{name: value}))
        for name, value in changes.items()
    }


def _claim(**fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    kind = {"kind": "PersistentVolumeClaim"}
    return {"cache": kind}, {"cache": {**kind, **fields}}


def _hpa(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"provider": "hpa", "maxReplicas": 4, **fields}}


def _keda(**fields: Any) -> dict[str, Any]:
    url = "http://prometheus:9090"
    scaling = {"provider": "keda", "maxReplicas": 4, "prometheusURL": url, **fields}
    return {"autoscaling": scaling}


def _scale(direction: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return _hpa(), _hpa(behavior={direction: fields})


def _prefill(**changed: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"prefill": KV}, {"prefill": {**KV, **changed}}


def _canary(**fields: Any) -> dict[str, Any]:
    canary = {"name": "next", "uri": "file:///next", "canary": fields}
    return {"adapters": [ADAPTER, {**ADAPTER, "name": "tax"}, canary]}


PREFILL_LEAVES: dict[str, dict[str, Any]] = {
    "replicas": {"replicas": 2},
    "secretRef.name": {"secretRef": {"name": "other"}},
    "resources.requests.{}": {"resources": {"requests": {"cpu": "2"}}},
    "resources.limits.{}": {"resources": {"limits": {"cpu": "2"}}},
    "maxNumSeqs": {"maxNumSeqs": 2},
    "maxNumBatchedTokens": {"maxNumBatchedTokens": 4096},
    "kvCacheMemory": {"kvCacheMemory": "1Gi"},
    "args.{}": {"args": {"max-queue": 2}},
    "nodeSelector.{}": {"nodeSelector": {"pool": "prefill"}},
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"prefill.{leaf}": _prefill(**changed) for leaf, changed in PREFILL_LEAVES.items()},
    "group.size": ({"group": GROUP}, {"group": {**GROUP, "size": 4}}),
    "group.secretRef.name": (
        {"group": GROUP},
        {"group": {**GROUP, "secretRef": {"name": "other"}}},
    ),
    "lora.maxLoras": ({"lora": {}}, {"lora": {"maxLoras": 4}}),
    "lora.maxCpuLoras": ({"lora": {}}, {"lora": {"maxCpuLoras": 99}}),
    "lora.maxRank": ({"lora": {}}, {"lora": {"maxRank": 8}}),
    "adapters.[].name": ({"adapters": [ADAPTER]}, {"adapters": [{**ADAPTER, "name": "b"}]}),
    "adapters.[].uri": ({"adapters": [ADAPTER]}, {"adapters": [{**ADAPTER, "uri": "hf://a/b"}]}),
    "adapters.[].pinned": ({"adapters": [ADAPTER]}, {"adapters": [{**ADAPTER, "pinned": True}]}),
    "adapters.[].canary.of": (_canary(of="law"), _canary(of="tax")),
    "adapters.[].canary.percent": (_canary(of="law"), _canary(of="law", percent=50)),
    "model.uri": ({}, {"model": {"uri": "hf://org/other"}}),
    "model.revision": _model(revision="v1"),
    "model.digest": _model(digest="sha256:" + "0" * 64),
    "model.servedName": _model(servedName="a"),
    "model.aliases.[]": _model(aliases=["a"]),
    "model.secretRef.name": _model(secretRef={"name": "hub"}),
    "engine.device": _engine("device", "sim"),
    "engine.dtype": _engine("dtype", "float32"),
    "engine.quantization": _engine("quantization", "int8"),
    "engine.maxModelLen": _engine("maxModelLen", 1024),
    "engine.maxNumSeqs": _engine("maxNumSeqs", 8),
    "engine.maxNumBatchedTokens": _engine("maxNumBatchedTokens", 512),
    "engine.kvCacheMemory": _engine("kvCacheMemory", "1Gi"),
    "engine.kvTiers.hostMemory": _engine("kvTiers", {"hostMemory": "1Gi"}),
    "engine.kvTiers.disk.size": _engine("kvTiers", {"disk": {"size": "1Gi"}}),
    "engine.kvTiers.disk.existingClaim": _engine("kvTiers", {"disk": {"existingClaim": "kv"}}),
    "engine.kvTiers.shared.size": _engine(
        "kvTiers", {"shared": {"existingClaim": "kv", "size": "1Gi"}}
    ),
    "engine.kvTiers.shared.existingClaim": _engine("kvTiers", {"shared": {"existingClaim": "kv"}}),
    "engine.kvTiers.shared.uri": _engine("kvTiers", {"shared": {"uri": "s3://kv/a"}}),
    "engine.kvTiers.shared.secretRef.name": _engine(
        "kvTiers", {"shared": {"uri": "s3://kv/a", "secretRef": {"name": "keys"}}}
    ),
    "engine.encryption.secretRef.name": (
        {"engine": {"encryption": {"secretRef": {"name": "a"}}}},
        {"engine": {"encryption": {"secretRef": {"name": "b"}}}},
    ),
    "engine.prefixCaching": _engine("prefixCaching", False),
    "engine.tensorParallelSize": (
        {"engine": {"executor": "mp"}},
        {"engine": {"executor": "mp", "tensorParallelSize": 2}},
    ),
    "engine.expertParallel": (
        {"engine": {"executor": "mp", "tensorParallelSize": 2}},
        {"engine": {"executor": "mp", "tensorParallelSize": 2, "expertParallel": True}},
    ),
    "engine.pipelineParallelSize": (
        {"engine": {"executor": "mp"}},
        {"engine": {"executor": "mp", "pipelineParallelSize": 2}},
    ),
    "engine.dataParallelSize": _engine("dataParallelSize", 2),
    "engine.executor": _engine("executor", "mp"),
    "engine.startupTimeout": _engine("startupTimeout", "1m"),
    "engine.image": _engine("image", "a:1"),
    "engine.args.{}": _engine("args", {"max-queue": 2}),
    "engine.env.[].name": ({}, {"engine": {"env": [{"name": "B"}]}}),
    "engine.env.[].value": _env({"value": "1"}, {"value": "2"}),
    **_references("secretKeyRef"),
    **_references("configMapKeyRef"),
    "replicas": ({}, {"replicas": 2}),
    "resources.requests.{}": ({}, {"resources": {"requests": {"cpu": "2"}}}),
    "resources.limits.{}": ({}, {"resources": {"limits": {"cpu": "2"}}}),
    "routing.policy": ({}, {"routing": {"policy": "session"}}),
    "routing.holdTimeout": ({}, {"routing": {"holdTimeout": "1m"}}),
    "rollout.maxUnavailable": ({}, {"rollout": {"maxUnavailable": 2}}),
    "rollout.drainTimeout": ({}, {"rollout": {"drainTimeout": "1m"}}),
    "rollout.progressDeadline": ({}, {"rollout": {"progressDeadline": "1h"}}),
    "autoscaling.minReplicas": (_hpa(), _hpa(minReplicas=2)),
    "autoscaling.maxReplicas": (_hpa(), _hpa(maxReplicas=5)),
    "autoscaling.provider": (_hpa(), _keda()),
    "autoscaling.targets.queuedTokens": (_hpa(), _hpa(targets={"queuedTokens": 5})),
    "autoscaling.targets.kvUsage": (_hpa(), _hpa(targets={"kvUsage": 0.5})),
    "autoscaling.targets.inFlight": (_hpa(), _hpa(targets={"inFlight": 5})),
    "autoscaling.behavior.scaleUp.window": _scale("scaleUp", window="1m"),
    "autoscaling.behavior.scaleUp.step": _scale("scaleUp", step=2),
    "autoscaling.behavior.scaleDown.window": _scale("scaleDown", window="1m"),
    "autoscaling.behavior.scaleDown.step": _scale("scaleDown", step=2),
    "autoscaling.scaleToZero.after": (_keda(), _keda(scaleToZero={"after": "5m"})),
    "autoscaling.prometheusURL": (_keda(), _keda(prometheusURL="http://other:9090")),
    "cache.kind": ({}, {"cache": {"kind": "PersistentVolumeClaim"}}),
    "cache.size": ({}, {"cache": {"size": "1Gi"}}),
    "cache.storageClassName": _claim(storageClassName="fast"),
    "cache.accessMode": _claim(accessMode="ReadWriteMany"),
    "cache.existingClaim": _claim(existingClaim="mine"),
    "cache.hostPath": (
        {"cache": {"kind": "HostPath", "hostPath": "/a"}},
        {"cache": {"kind": "HostPath", "hostPath": "/b"}},
    ),
    "suspend": ({}, {"suspend": True}),
}


# --- routing


def test_routers_are_told_how_to_serve_it():
    assert routing() == {
        "names": ["smollm2"],
        "policy": "prefix-load",
        "holdSeconds": 90,
        "port": 8000,
        "scaledToZero": False,
    }


def test_weights_and_sleep_are_of_the_moment():
    reported = routing(Traffic(weights={"a": 90, "b": 10}, scaled_to_zero=True))
    assert reported["weights"] == {"a": 90, "b": 10}
    assert reported["scaledToZero"] is True


# --- the rest


def test_a_cache_of_nothing_needs_no_claim():
    kinds = objects({"cache": {"kind": "PersistentVolumeClaim"}})  # demo:// is in the image
    assert "PersistentVolumeClaim" not in kinds


def test_a_claim_of_somebody_else_is_not_made():
    cache = {"kind": "PersistentVolumeClaim", "existingClaim": "mine"}
    assert "PersistentVolumeClaim" not in objects({"model": HUB, "cache": cache})


def test_engines_are_scraped_once():
    assert "PodMonitor" in objects(None, EVERYTHING)
    assert "ServiceMonitor" not in objects(None, EVERYTHING)
    only_services = OperatorSettings(capabilities=frozenset((SERVICE_MONITOR,)))
    monitor = objects(None, only_services)["ServiceMonitor"]
    headless = objects(None, only_services)["Headless"]
    service = objects(None, only_services)["Service"]
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    assert selected <= headless["metadata"]["labels"].items()
    assert not selected <= service["metadata"]["labels"].items()
    assert not {"PodMonitor", "ServiceMonitor"} & set(objects())


def test_monitors_carry_what_prometheus_selects_by():
    settings = OperatorSettings(
        capabilities=frozenset((POD_MONITOR,)), monitor_labels={"release": "prometheus"}
    )
    assert objects(None, settings)["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"


def test_a_node_can_always_be_drained():
    assert objects()["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    spec = {"rollout": {"maxUnavailable": "25%"}}
    assert objects(spec)["PodDisruptionBudget"]["spec"]["maxUnavailable"] == "25%"


def test_weights_that_are_there_need_no_network():
    assert "egress" not in objects()["NetworkPolicy"]["spec"]
    assert "egress" not in objects({"model": {"uri": "pvc://a"}})["NetworkPolicy"]["spec"]
    hub = objects({"model": HUB})["NetworkPolicy"]["spec"]["egress"]
    blocked = [block["ipBlock"]["except"] for block in hub[1]["to"]]
    assert "169.254.0.0/16" in blocked[0]
    assert blocked[1] == ["fe80::/10", "fd00:ec2::/32"], "link-local, and AWS' metadata"
    assert "NetworkPolicy" not in objects(None, OperatorSettings(network_policy=False))


def test_names_are_found_where_openshift_has_them_too():
    dns = objects({"model": HUB})["NetworkPolicy"]["spec"]["egress"][0]["ports"]
    assert {(each["port"], each["protocol"]) for each in dns} == {
        (53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "reached"),
    [
        ({"uri": "gs://bucket/m"}, {"169.254.169.254/32:80", "169.254.169.252/32:988"}),
        ({"uri": "s3://bucket/m"}, {"169.254.170.23/32:80", "fd00:ec2::23/128:80"}),
        ({"uri": "gs://bucket/m", "secretRef": {"name": "key"}}, set()),
        (HUB, set()),
    ],
)
def test_a_pods_own_identity_is_asked_for_where_no_secret_proves_it(
    model: dict[str, Any], reached: set[str]
):
    rules = objects({"model": model})["NetworkPolicy"]["spec"]["egress"][2:]
    found = {f"{r['to'][0]['ipBlock']['cidr']}:{r['ports'][0]['port']}" for r in rules}
    assert found == reached


def test_the_bucket_of_kv_blocks_is_reached_as_one_of_weights():
    def egress(**shared: Any) -> list[dict[str, Any]]:
        spec = {"engine": {"kvTiers": {"shared": shared}}}
        rules: list[dict[str, Any]] = objects(spec)["NetworkPolicy"]["spec"].get("egress", [])
        return rules

    assert egress(existingClaim="kv") == []
    with_role = egress(uri="s3://kv/a")
    assert (
        with_role == objects({"model": {"uri": "s3://bucket/m"}})["NetworkPolicy"]["spec"]["egress"]
    )
    assert egress(uri="s3://kv/a", secretRef={"name": "keys"}) == with_role[:2]


def test_gateways_reach_engines_where_they_are_named():
    """With an InferencePool the gateway sends requests to engines itself."""
    gateway = {"namespaceSelector": {"matchLabels": {"a": "gateways"}}}
    policy = objects(None, OperatorSettings(engine_clients=(gateway,)))["NetworkPolicy"]
    assert gateway in policy["spec"]["ingress"][0]["from"]
    assert gateway not in objects()["NetworkPolicy"]["spec"]["ingress"][0]["from"]


def test_an_autoscaler_scales_the_llmdeployment_itself():
    target = objects(_hpa())["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "name": "smollm2",
    }


def test_nobody_wakes_what_is_suspended():
    assert "HorizontalPodAutoscaler" not in objects({**_hpa(), "suspend": True})


def test_keda_is_refused_where_it_is_not():
    with pytest.raises(SpecInvalid, match="keda needs KEDA in the cluster") as refused:
        check_autoscaler(make_deployment(_keda()), OperatorSettings())
    assert refused.value.reason == "Unsupported"
    assert "ScaledObject" not in objects(_keda())  # it may have gone under a running model
    assert "ScaledObject" in objects(
        _keda(), OperatorSettings(capabilities=frozenset((SCALED_OBJECT,)))
    )


def test_kv_blocks_go_from_prefill_pods_to_pods_that_answer_and_nowhere_else():
    spec = {"model": {"uri": "demo://smollm2"}, "prefill": KV}
    policy = objects(spec)["NetworkPolicy"]["spec"]
    (http, kv) = policy["ingress"]
    answering = {"octavo.dev/deployment": "smollm2", "app.kubernetes.io/component": "engine"}
    assert kv == {
        "from": [{"podSelector": {"matchLabels": answering}}],
        "ports": [{"port": 14579, "protocol": "TCP"}],
    }
    assert {port["port"] for port in http["ports"]} == {"http"}
    assert policy["egress"] == [
        {
            "to": [
                {"podSelector": {
                    "matchLabels": {**answering, "app.kubernetes.io/component": "prefill"}
                }}
            ],
            "ports": [{"port": 14579, "protocol": "TCP"}],
        }
    ]  # fmt: skip
    assert (
        answering.items() <= objects(spec)["Deployment"]["spec"]["selector"]["matchLabels"].items()
    )


def test_pods_that_change_sides_reach_each_others_kv_blocks_and_carry_their_side():
    flips = {**KV, "flip": {"targets": {"ttft": "1s", "tpot": "50ms"}}}
    spec = {"model": {"uri": "demo://smollm2"}, "prefill": flips}
    policy = objects(spec)["NetworkPolicy"]["spec"]
    all_pods = [{"podSelector": {"matchLabels": {"octavo.dev/deployment": "smollm2"}}}]
    kv_port = [{"port": 14579, "protocol": "TCP"}]
    assert policy["ingress"][1] == {"from": all_pods, "ports": kv_port}
    assert policy["egress"] == [{"to": all_pods, "ports": kv_port}]
    templates = [body["spec"]["template"]["metadata"]["labels"] for body in deployments(spec)]
    assert [labels["octavo.dev/side"] for labels in templates] == ["prefill", "decode"]
    selectors = [body["spec"]["selector"]["matchLabels"] for body in deployments(spec)]
    assert not any("octavo.dev/side" in selector for selector in selectors)


def test_other_targets_are_for_pods_that_run_and_the_field_itself_for_new_ones():
    def named(**flip: Any) -> str:
        found = {"prefill": {**KV, **flip}}
        return str(deployments(found)[0]["metadata"]["labels"]["octavo.dev/revision"])

    targets = {"targets": {"ttft": "1s", "tpot": "50ms"}}
    assert named(flip=targets) != named()
    others = {"targets": {"ttft": "9s", "tpot": "9ms"}, "minPrefill": 1, "minDecode": 2}
    assert named(flip=others) == named(flip=targets)


def test_clients_and_scalers_count_the_pods_that_answer():
    found = {body["metadata"]["name"]: body for body in made({"prefill": KV}) if
             body["kind"] == "Service"}  # fmt: skip
    assert found["smollm2"]["spec"]["selector"]["app.kubernetes.io/component"] == "engine"
    routing = json.loads(found["smollm2"]["metadata"]["annotations"]["octavo.dev/routing"])
    assert routing["policy"] == "prefill-decode"
    keda = {"provider": "keda", "maxReplicas": 3, "prometheusURL": "http://p:9090"}
    scaled = objects({"prefill": KV, "autoscaling": keda}, EVERYTHING)["ScaledObject"]["spec"]
    assert all(
        'app_kubernetes_io_component="engine"' in trigger["metadata"]["query"]
        for trigger in scaled["triggers"]
    )


def test_routers_reach_the_pods_of_groups_that_serve():
    """What is between the pods of a group is in test_group.py."""
    spec = {"group": GROUP}
    policy = objects(spec)["NetworkPolicy"]["spec"]
    (http,) = policy["ingress"]
    assert http["ports"] == [{"port": "http", "protocol": "TCP"}]
    leaders = {"octavo.dev/deployment": "smollm2", "app.kubernetes.io/component": "engine"}
    for body in made(spec):
        if body["kind"] == "Service":
            assert body["spec"]["selector"] == leaders
