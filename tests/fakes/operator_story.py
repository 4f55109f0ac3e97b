"""One life of an LLMDeployment on a real API server, and what it must come to, faults or none."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from octavo_operator.objects import kinds
from tests.fakes.live_operator import engines, live, until
from tests.fakes.operator import make_deployment

if TYPE_CHECKING:
    from tests.fakes.apiserver import ApiServer

# Written by the server, or another in each namespace (a fingerprint is of the namespace too).
_OF_THE_SERVER = frozenset(
    ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "clusterIP",
     "clusterIPs", "status", "octavo.dev/fingerprint")
)  # fmt: skip
CHILDREN = tuple(kind for kind in kinds.OWNED if not kind.is_optional)


async def live_through(server: ApiServer, namespace: str, *, within_s: float = 90.0) -> None:
    """Created with two replicas, edited while it is scaled to three, and the edit taken back."""
    deployment = make_deployment(namespace=namespace, replicas=2)
    await asyncio.to_thread(server.create, deployment)
    await _until_serving(server, namespace, replicas=2, max_num_seqs=None, within_s=within_s)
    for change, replicas, max_num_seqs in (
        ({"engine": {"maxNumSeqs": 7}, "replicas": 3}, 3, 7),
        ({"engine": {"maxNumSeqs": None}}, 3, None),
    ):
        await asyncio.to_thread(server.patch, deployment, {"spec": change})
        await _until_serving(
            server, namespace, replicas=replicas, max_num_seqs=max_num_seqs, within_s=within_s
        )


async def _until_serving(
    server: ApiServer, namespace: str, *, replicas: int, max_num_seqs: int | None, within_s: float
) -> None:
    def is_serving() -> bool:
        live(server, namespace)
        if not is_settled(server.get(make_deployment(namespace=namespace))):
            return False
        return _engines_are(server, namespace, replicas, max_num_seqs)

    await until(is_serving, within_s=within_s, every_s=0.5)


def is_settled(body: kinds.Object) -> bool:
    """Its status is about its spec, and says that all is there and serves."""
    found = {c["type"]: (c["status"], c["reason"]) for c in body["status"]["conditions"]}
    return (
        body["status"]["observedGeneration"] == body["metadata"]["generation"]
        and found["Ready"] == ("True", "Serving")
        and found["Progressing"][0] == "False"
    )


def _engines_are(
    server: ApiServer, namespace: str, replicas: int, max_num_seqs: int | None
) -> bool:
    found = engines(server, namespace)
    if [body["spec"]["replicas"] for body in found] != [replicas]:
        return False
    name = found[0]["metadata"]["name"]
    config = next(
        body
        for body in server.list("v1", "ConfigMap", namespace)
        if body["metadata"]["name"] == name
    )
    has_it = "max-num-seqs = 7" in config["data"]["engine.toml"]
    return has_it == (max_num_seqs is not None)


def snapshot(server: ApiServer, namespace: str) -> dict[str, Any]:
    """Every child object as anybody would describe it; asserts that each has one owner."""
    owner = server.get(make_deployment(namespace=namespace))["metadata"]["uid"]
    found = {}
    for kind in CHILDREN:
        for body in server.list(kind.api_version, kind.name, namespace):
            if not kinds.labels_of(body).get("octavo.dev/deployment"):
                continue
            owners = [each["uid"] for each in body["metadata"].get("ownerReferences", [])]
            assert owners == [owner], f"{kind.name} {kinds.name_of(body)} is owned by {owners}"
            text = json.dumps(_plain(body)).replace(namespace, "NS").replace(owner, "OWNER")
            found[f"{kind.name}/{kinds.name_of(body)}"] = json.loads(text)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in _OF_THE_SERVER}
    return [_plain(item) for item in value] if isinstance(value, list) else value
