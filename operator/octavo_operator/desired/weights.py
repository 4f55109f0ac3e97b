"""Where a pod finds its model: volumes, mounts, and the init step that fetches what is missing."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_operator.desired.expansion import literal
from octavo_operator.desired.security import container_security
from octavo_operator.objects import names

if TYPE_CHECKING:
    from octavo_operator.spec import LLMDeployment, ModelSpec

CACHE_VOLUME = "weights"
CACHE_MOUNT = "/var/lib/octavo/models"
CLAIM_VOLUME = "model"
CLAIM_MOUNT = "/var/lib/octavo/claim"
CREDENTIALS_VOLUME = "model-credentials"
CREDENTIALS_MOUNT = "/run/octavo/credentials"
# Fetching streams to disk; hashing and TLS need little more.
FETCH_RESOURCES = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "2", "memory": "1Gi"},
}


class Weights(NamedTuple):
    """What a pod needs for its model."""

    path: str  # as the engine gets it
    volumes: list[dict[str, Any]]
    mounts: list[dict[str, Any]]  # of the engine: it only reads
    init_containers: list[dict[str, Any]]


def is_fetched(deployment: LLMDeployment) -> bool:
    """Whether an init step brings the model into a cache."""
    return deployment.model.is_fetched and deployment.device != "sim"


def weights(deployment: LLMDeployment, *, image: str, pull_policy: str) -> Weights:
    model = deployment.model
    if deployment.device == "sim" or model.scheme in ("demo", "file"):
        path = model.location if model.scheme == "file" else model.uri
        return Weights(path, [], [], [])
    if model.claim:
        source = {"claimName": model.claim, "readOnly": True}
        volume = {"name": CLAIM_VOLUME, "persistentVolumeClaim": source}
        mount = {"name": CLAIM_VOLUME, "mountPath": CLAIM_MOUNT, "readOnly": True}
        inside = model.location.partition("/")[2]
        return Weights(posixpath.join(CLAIM_MOUNT, inside).rstrip("/"), [volume], [mount], [])
    folder = f"{CACHE_MOUNT}/{model_folder(model)}"
    volumes = [{"name": CACHE_VOLUME, **cache_source(deployment)}]
    mounts = [{"name": CACHE_VOLUME, "mountPath": CACHE_MOUNT, "readOnly": True}]
    if model.secret:
        secret = {"secretName": model.secret, "defaultMode": 0o440}
        volumes.append({"name": CREDENTIALS_VOLUME, "secret": secret})
    init = _fetch_container(model, folder, image=image, pull_policy=pull_policy)
    return Weights(folder, volumes, mounts, [init])


def fetch_arguments(model: ModelSpec, folder: str) -> list[str]:
    """Of `octavo fetch`: brings the model into `folder`, or finds it there complete."""
    arguments = [model.uri, f"--to={folder}"]
    if model.revision:
        arguments.append(f"--revision={model.revision}")
    if model.digest:
        arguments.append(f"--digest={model.digest}")
    return arguments


def model_folder(model: ModelSpec) -> str:
    """The same for all LLMDeployments of one model, so that a shared cache is shared."""
    identity = f"{model.uri}\n{model.revision}\n{model.digest}"
    last = re.sub(r"[^a-z0-9.-]+", "-", model.location.rstrip("/").rpartition("/")[2].lower())
    return f"{last.strip('.-')[:40] or 'model'}-{names.short_hash(identity.encode(), 10)}"


def cache_source(deployment: LLMDeployment) -> dict[str, Any]:
    """The volume that fetched weights lie in."""
    cache = deployment.cache
    match cache.kind:
        case "HostPath":
            return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
        case "PersistentVolumeClaim":
            claim = cache.existing_claim or names.cache_claim(deployment.name)
            return {"persistentVolumeClaim": {"claimName": claim}}
        case _:
            return {"emptyDir": {"sizeLimit": cache.size}}


def _fetch_container(
    model: ModelSpec, folder: str, *, image: str, pull_policy: str
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": names.FETCH_CONTAINER,
        "image": image,
        "imagePullPolicy": pull_policy,
        "command": ["octavo", "fetch"],
        "args": literal(fetch_arguments(model, folder)),
        "env": [
            {"name": "HOME", "value": "/tmp"},
            # NOTE: images built on NVIDIA's request all GPUs, and where its runtime is the default
            # this step would get them: those of other pods.
            {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
        ],
        "resources": FETCH_RESOURCES,
        "securityContext": container_security(),
        # The last lines say why a fetch failed; the pod's status carries them to the conditions.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": CACHE_VOLUME, "mountPath": CACHE_MOUNT},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if model.secret:
        # NOTE: the init step alone sees them, as files: a Secret's keys do not become variables,
        # which would let it set PATH or a proxy, and child processes inherit.
        container["env"].append({"name": "OCTAVO_CREDENTIALS", "value": CREDENTIALS_MOUNT})
        container["volumeMounts"].append(
            {"name": CREDENTIALS_VOLUME, "mountPath": CREDENTIALS_MOUNT, "readOnly": True}
        )
    return container
