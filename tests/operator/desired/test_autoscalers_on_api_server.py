"""What scales in our stead must be taken by who reads it: Kubernetes' HPA and KEDA's ScaledObject.

Every corner that a spec may reach goes to a real API server: its own validation of autoscaling/v2,
and the schema that KEDA publishes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from octavo_operator.desired.autoscaler import autoscalers
from octavo_operator.objects import kinds
from octavo_operator.settings import SCALED_OBJECT, OperatorSettings
from octavo_operator.spec import LLMDeployment
from tests.apiserver.keda import scaled_object_crd
from tests.fakes.apiserver import ApiError
from tests.fakes.deployments import with_images
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_operator.objects.kinds import Object
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.cluster

WITH_KEDA = with_images(OperatorSettings(capabilities=frozenset((SCALED_OBJECT,))))
PROMETHEUS = {"provider": "keda", "prometheusURL": "http://prometheus.monitoring:9090"}
CORNERS: dict[str, Object] = {
    "defaults": {"maxReplicas": 3},
    "least": {
        "minReplicas": 1, "maxReplicas": 1,
        "targets": {"queuedTokens": 1, "kvUsage": 0.05, "inFlight": 1},
        "behavior": {"scaleUp": {"window": "0s", "step": 1}, "scaleDown": {"window": "0s",
                                                                           "step": "1%"}},
    },
    "most": {
        "minReplicas": 1000, "maxReplicas": 1000,
        "targets": {"queuedTokens": 1_000_000_000, "kvUsage": 1, "inFlight": 1_000_000},
        "behavior": {"scaleUp": {"window": "1h", "step": 1000},
                     "scaleDown": {"window": "1h", "step": "100%"}},
    },
    "fractions": {
        "maxReplicas": 7, "targets": {"kvUsage": 0.3333333, "queuedTokens": 4000},
        "behavior": {"scaleUp": {"window": "1500ms"}},
    },
}  # fmt: skip


def scaler(scaling: Object, namespace: str, name: str = "smollm2") -> Object:
    body = make_deployment(name, namespace, autoscaling=scaling)
    body["metadata"]["uid"] = "8a0b6f7e-0000-4000-8000-000000000000"
    (found,) = autoscalers(LLMDeployment.parse(body), WITH_KEDA)
    return found


@pytest.mark.parametrize("corner", CORNERS)
def test_kubernetes_takes_every_hpa_and_stores_it_as_written(
    apiserver: ApiServer, namespace: str, corner: str
):
    # The spec itself first: what CEL lets through is what this is about.
    spec = {**CORNERS[corner], "provider": "hpa"}
    apiserver.create(make_deployment(namespace=namespace, autoscaling=spec))
    apiserver.warnings.clear()
    body = scaler(spec, namespace)
    stored = apiserver.apply(body, manager="octavo-operator")
    assert apiserver.warnings == []
    assert is_within(body["spec"], stored["spec"])
    assert [metric["type"] for metric in stored["spec"]["metrics"]] == ["Pods"] * len(
        body["spec"]["metrics"]
    )
    again = apiserver.apply(body, manager="octavo-operator")
    assert again["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]


def test_the_hpa_finds_what_it_scales_and_the_pods_behind_it(apiserver: ApiServer, namespace: str):
    """As its controller does: the target's scale, whose selector it lists pods and metrics by."""
    spec = {"maxReplicas": 3, "provider": "hpa"}
    owner = apiserver.create(make_deployment(namespace=namespace, autoscaling=spec))
    target = scaler(spec, namespace)["spec"]["scaleTargetRef"]
    named = {key: target[key] for key in ("apiVersion", "kind")}
    found = {**named, "metadata": {"namespace": namespace, "name": target["name"]}}
    selector = "octavo.dev/deployment=smollm2"
    apiserver.patch(owner, {"status": {"replicas": 1, "selector": selector}}, subresource="status")
    scale = apiserver.request("GET", f"{apiserver.path_of(found)}/scale")
    assert (scale["apiVersion"], scale["kind"]) == ("autoscaling/v1", "Scale")
    assert scale["status"] == {"replicas": 1, "selector": selector}
    scale["spec"]["replicas"] = 3  # it writes with PUT
    apiserver.request("PUT", f"{apiserver.path_of(found)}/scale", scale)
    assert apiserver.get(owner)["spec"]["replicas"] == 3


def test_the_corners_are_the_edge(apiserver: ApiServer, namespace: str):
    """One step further the API server refuses: these tests could fail."""
    body = scaler({**CORNERS["most"], "provider": "hpa"}, namespace)
    body["spec"]["behavior"]["scaleUp"]["stabilizationWindowSeconds"] = 3601
    with pytest.raises(ApiError, match="stabilizationWindowSeconds"):
        apiserver.apply(body)


# --- KEDA -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keda(apiserver: ApiServer) -> Iterator[ApiServer]:
    """With KEDA's own ScaledObject; without it again afterwards."""
    file = scaled_object_crd()
    if file is None:
        pytest.skip("KEDA's Go module cannot be had here")
    apiserver.install(file)
    yield apiserver
    kind = kinds.SCALED_OBJECT
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    apiserver.request("DELETE", f"{path}/{kind.plural}.{kind.group}")
    with contextlib.suppress(ApiError):
        while True:  # until it is served no more: others count on a cluster without it
            apiserver.request("GET", f"/apis/{kind.api_version}/{kind.plural}")


@pytest.mark.parametrize("to_zero", [None, {"after": "10s"}, {"after": "24h"}])
@pytest.mark.parametrize("corner", CORNERS)
def test_keda_takes_every_scaled_object(
    keda: ApiServer, namespace: str, corner: str, to_zero: Object | None
):
    spec = {**CORNERS[corner], **PROMETHEUS}
    if to_zero is not None:
        spec["scaleToZero"] = to_zero
    keda.create(make_deployment(namespace=namespace, autoscaling=spec))
    keda.warnings.clear()
    body = scaler(spec, namespace)
    stored = keda.apply(body, manager="octavo-operator")
    assert keda.warnings == []
    assert is_within(body["spec"], stored["spec"])
    again = keda.apply(body, manager="octavo-operator")
    assert again["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]
    check_as_keda_does(stored["spec"])
    # KEDA makes an HPA of it: behaviour and bounds must pass there as well.
    keda.apply(hpa_of(stored, namespace), manager="keda", dry_run=True)


def test_a_field_that_keda_does_not_know_is_refused(keda: ApiServer, namespace: str):
    body = scaler({"maxReplicas": 3, **PROMETHEUS}, namespace)
    body["spec"]["triggers"][0]["metadata"]["threshold"] = 8192  # a number: metadata is text
    with pytest.raises(ApiError, match="threshold"):
        keda.apply(body)
    body = scaler({"maxReplicas": 3, **PROMETHEUS}, namespace)
    body["spec"]["idleReplicas"] = 0
    with pytest.raises(ApiError, match="idleReplicas"):
        keda.apply(body)


def check_as_keda_does(spec: Object) -> None:
    """Of what its webhook and controller check beyond the schema, all that concerns our fields:
    CheckReplicaCountBoundsAreValid (scaledobject_types.go), ValidateTriggers
    (scaletriggers_types.go), prometheusMetadata (prometheus_scaler.go)."""
    assert spec["minReplicaCount"] <= spec["maxReplicaCount"]
    if "idleReplicaCount" in spec:
        assert spec["idleReplicaCount"] < spec["minReplicaCount"]
    assert spec["triggers"]
    for trigger in spec["triggers"]:
        assert trigger["type"] == "prometheus"
        assert trigger["metricType"] in ("AverageValue", "Value")
        metadata = trigger["metadata"]
        assert metadata.keys() <= {"serverAddress", "query", "threshold", "activationThreshold"}
        assert metadata["serverAddress"] and metadata["query"]
        assert float(metadata["threshold"]) > 0


def hpa_of(scaled: Object, namespace: str) -> Object:
    spec = scaled["spec"]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "keda-hpa-smollm2", "namespace": namespace},
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": f"s{index}-prometheus"},
                        "target": {
                            "type": trigger["metricType"],
                            "averageValue": trigger["metadata"]["threshold"],
                        },
                    },
                }
                for index, trigger in enumerate(spec["triggers"])
            ],
        },
    }  # fmt: skip


def is_within(ours: Any, theirs: Any) -> bool:
    """What we wrote is stored letter by letter; the server may have added to it."""
    if isinstance(ours, dict):
        return all(name in theirs and is_within(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(is_within, ours, theirs))
    return bool(ours == theirs)
