"""The samples before a real API server: accepted, and so is all that is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from octavo_operator.desired import desired_objects
from octavo_operator.spec import LLMDeployment
from tests.fakes.deployments import SAMPLES, sample_bodies, with_images

if TYPE_CHECKING:
    from tests.fakes.apiserver import ApiServer

pytestmark = pytest.mark.cluster

BODIES = sample_bodies()
BUILT_IN = with_images()  # a cluster without Prometheus' and KEDA's kinds
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/warn": "restricted",
}
USES = (
    "minimal", "cpu", "gpu", "quantized", "several-models", "autoscaled", "canary", "private",
    "pvc-weights", "vision", "speech", "hearing", "prefill", "group",
)  # fmt: skip


@pytest.fixture(scope="module")
def restricted(apiserver: ApiServer) -> str:
    return apiserver.make_namespace(labels=RESTRICTED)


def placed(name: str, namespace: str) -> dict[str, Any]:
    body = BODIES[name]
    return {**body, "metadata": {**body["metadata"], "namespace": namespace}}


def test_each_use_has_a_sample():
    assert set(USES) <= {path.stem for path in SAMPLES.glob("*.yaml")}
    for path in SAMPLES.glob("*.yaml"):
        assert path.read_text("utf-8").startswith("# "), f"{path.name} does not say what it is for"


@pytest.mark.parametrize("name", BODIES)
def test_sample_is_accepted_and_stored_as_it_was_meant(
    name: str, apiserver: ApiServer, namespace: str
):
    apiserver.warnings.clear()
    body = placed(name, namespace)
    apiserver.create(body, dry_run=True)
    stored = apiserver.create(body)
    assert apiserver.warnings == []
    defaulted = LLMDeployment.parse(stored)
    raw = {**body, "metadata": {**body["metadata"], **identity(stored)}}
    assert defaulted == LLMDeployment.parse(raw)


# Between them they have every kind of object and every way to get at a model.
@pytest.mark.parametrize(
    "name",
    ["minimal", "private", "shared-cache", "autoscaled-hpa", "pvc-weights", "prefill", "group"],
)
def test_its_objects_are_accepted_where_pods_are_restricted(
    name: str, apiserver: ApiServer, restricted: str
):
    owner = apiserver.create(placed(name, restricted))
    apiserver.warnings.clear()
    objects = desired_objects(LLMDeployment.parse(owner), BUILT_IN)
    first, second, third = (
        [apiserver.apply(body, manager="octavo-operator", force=False) for body in objects]
        for _ in range(3)
    )
    assert apiserver.warnings == []
    assert specs(second) == specs(first)
    # Once the server has brought it into its own form, the same again is stored no more.
    assert versions(third) == versions(second)


def test_nothing_is_owned_that_was_not_written(apiserver: ApiServer, namespace: str):
    owner = apiserver.create(placed("autoscaled", namespace))
    objects = desired_objects(LLMDeployment.parse(owner), BUILT_IN)
    deployment = next(body for body in objects if body["kind"] == "Deployment")
    stored = apiserver.apply(deployment, manager="octavo-operator")
    (entry,) = stored["metadata"]["managedFields"]
    assert entry["manager"] == "octavo-operator"
    assert "f:replicas" not in entry["fieldsV1"]["f:spec"]


def test_the_scale_subresource_writes_replicas(apiserver: ApiServer, namespace: str):
    stored = apiserver.create(placed("cpu", namespace))
    status = {"status": {"replicas": 2, "selector": "octavo.dev/deployment=smollm2-hub"}}
    apiserver.patch(stored, status, subresource="status")
    scale = apiserver.patch(stored, {"spec": {"replicas": 5}}, subresource="scale")
    assert scale["spec"]["replicas"] == 5
    assert scale["status"] == {"replicas": 2, "selector": "octavo.dev/deployment=smollm2-hub"}
    assert apiserver.get(stored)["spec"]["replicas"] == 5


def test_the_status_is_no_business_of_those_who_write_the_spec(
    apiserver: ApiServer, namespace: str
):
    stored = apiserver.create({**placed("minimal", namespace), "status": {"replicas": 7}})
    assert "status" not in stored


def test_conditions_are_merged_by_type(apiserver: ApiServer, namespace: str):
    body = placed("minimal", namespace)
    stored = apiserver.create(body)
    for manager, kind in (("one", "Ready"), ("two", "Degraded")):
        path = apiserver.path_of(stored) + "/status"
        patch = {**{key: body[key] for key in ("apiVersion", "kind")}, "metadata": names(stored)}
        patch["status"] = {"conditions": [condition(kind)]}
        apiserver.request(
            "PATCH", path, patch, content_type="application/apply-patch+yaml",
            fieldManager=manager, force="true",
        )  # fmt: skip
    found = apiserver.get(stored)["status"]["conditions"]
    assert [entry["type"] for entry in found] == ["Ready", "Degraded"]


def condition(kind: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": "True",
        "reason": "Serving",
        "message": "It serves.",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def names(stored: dict[str, Any]) -> dict[str, Any]:
    return {key: stored["metadata"][key] for key in ("name", "namespace")}


def identity(stored: dict[str, Any]) -> dict[str, Any]:
    return {key: stored["metadata"][key] for key in ("uid", "generation")}


def specs(objects: list[dict[str, Any]]) -> list[Any]:
    return [body.get("spec", body.get("data")) for body in objects]


def versions(objects: list[dict[str, Any]]) -> list[str]:
    return [body["metadata"]["resourceVersion"] for body in objects]


def test_samples_are_plain_yaml():
    for path in SAMPLES.glob("*.yaml"):
        assert list(yaml.safe_load_all(path.read_text("utf-8")))
