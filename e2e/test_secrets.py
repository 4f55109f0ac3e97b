"""Keys at every door of the platform; no secret of this run is in anything that was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import yaml

from e2e import written
from e2e.helm import NAMESPACE
from e2e.kubectl import Kubectl
from e2e.models import Model, simulated
from e2e.test_cluster import pod
from tests.fakes.canary import Canaries

if TYPE_CHECKING:
    from e2e.conftest import Platform

LABELS = {"octavo.dev/deployment": "talks"}
SECRETS = "canaries"  # name of the Secret in both namespaces
DOORS = ("apiKeys", "adminKey", "engineKey", "stateToken")
TENANT, ADMIN, ENGINE, STATE, WRONG = (
    written.CANARIES.new(whose)
    for whose in ("a tenant's key", "the admin key", "the engines' key", "the state token",
                  "a key that opens nothing")
)  # fmt: skip


def secret(**values: str) -> dict[str, object]:
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRETS}, "stringData": values,
    }  # fmt: skip


def test_no_secret_of_this_run_is_in_logs_events_objects_or_metrics(
    platform: Platform, space: Kubectl
) -> None:
    system = Kubectl(platform.node, NAMESPACE)
    keys = yaml.safe_dump({"keys": [{"tenant": "t", "key": TENANT}]})
    system.apply(secret(keys=keys, adminKey=ADMIN, engineKey=ENGINE, stateToken=STATE))
    platform.helm.upgrade(
        *(f"router.{door}.existingSecret={SECRETS}" for door in DOORS),
        "router.apiKeys.secretKey=keys",
        *(f"router.{door}.secretKey={door}" for door in DOORS[1:]),
        "monitoring.scrapeAnnotations=false", "router.logLevel=debug", "operator.logLevel=debug",
    )  # fmt: skip
    space.apply(secret(key=ENGINE))
    reference = {"secretKeyRef": {"name": SECRETS, "key": "key"}}
    env = [{"name": "OCTAVO_API_KEY", "valueFrom": reference}]
    model = Model(space, simulated("guarded", engine={"env": env}))
    model.await_settled()
    for key, status in ((TENANT, 200), (WRONG, 401), (ENGINE, 401)):
        assert status_of(platform, model.name, key) == status
    with httpx.Client(base_url=platform.base_url.removesuffix("/v1")) as client:
        metrics = client.get("/metrics", headers={"authorization": f"Bearer {ADMIN}"})
        assert metrics.status_code == 200
        assert client.get("/metrics").status_code == 403  # admin_key_required
    assert written.CANARIES.find({"metrics": metrics.text}) == []
    assert written.FOUND + written.search(system) + written.search(space) == []


def status_of(platform: Platform, model: str, key: str) -> int:
    body = {"model": model, "max_tokens": 4, "prompt": f"Count on from {written.PROMPT}."}
    headers = {"authorization": f"Bearer {key}"}
    url = f"{platform.base_url}/completions"
    return httpx.post(url, json=body, headers=headers, timeout=60).status_code


def test_the_search_finds_what_logs_and_objects_have(space: Kubectl) -> None:
    canaries = Canaries()
    logged, kept = canaries.new("a secret that is logged"), canaries.new("a secret in an object")
    space.apply(
        pod("talks", "engine-cpu", command=["octavo", logged], labels=LABELS),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"k": kept}},
    )
    space.wait("pod/talks", "jsonpath={.status.phase}=Failed")  # there is no such command
    found = " ".join(written.search(space, canaries))
    assert "logged in logs of" in found and "an object in objects" in found
