"""The engine pod: what runs, as whom, with which probes, and how it ends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from octavo_engine.protocol.endpoints import ENGINE_PORT
from octavo_engine.protocol.kubernetes import POD_UID_ENV, REVISION_LABEL, ROUTABLE_CONDITION
from octavo_operator.desired import (
    encryption,
    engine_access,
    group,
    kv_disk,
    kv_shared,
    kv_transfer,
)
from octavo_operator.desired.config_map import CONFIG_FILE
from octavo_operator.desired.engine_options import extra_arguments
from octavo_operator.desired.expansion import literal
from octavo_operator.desired.merge import overlay
from octavo_operator.desired.probes import PORT_NAME, probes
from octavo_operator.desired.revision import image_of
from octavo_operator.desired.security import container_security, pod_security
from octavo_operator.desired.weights import is_fetched, weights
from octavo_operator.objects import labels, names
from octavo_operator.objects.quantities import parse_quantity, whole

if TYPE_CHECKING:
    from octavo_operator.settings import OperatorSettings
    from octavo_operator.spec import EnvVar, LLMDeployment

CONFIG_MOUNT = "/etc/octavo"
TMP_SIZE = "2Gi"
# After the drain: for the preStop pause, closing streams, and the runtime's own delays.
GRACE_S = 15
DEFAULT_REQUESTS = {"cpu": "1", "memory": "2Gi"}


def pod_template(
    deployment: LLMDeployment, settings: OperatorSettings, revision: str
) -> dict[str, Any]:
    """With podTemplate laid over it."""
    template = overlay(_base(deployment, settings, revision), deployment.pod_template)
    if "serviceAccountName" not in template["spec"]:
        template["spec"]["serviceAccountName"] = names.service_account(deployment.name)
    if settings.images.pull_secrets and "imagePullSecrets" not in template["spec"]:
        secrets = [{"name": name} for name in settings.images.pull_secrets]
        template["spec"]["imagePullSecrets"] = secrets
    if deployment.is_prefill and deployment.prefill is not None:
        nodes = {**template["spec"].get("nodeSelector", {}), **deployment.prefill.node_selector}
        if nodes:
            template["spec"]["nodeSelector"] = nodes
    return template


def _base(deployment: LLMDeployment, settings: OperatorSettings, revision: str) -> dict[str, Any]:
    image, pull_policy = image_of(deployment, settings), settings.images.pull_policy
    parts = weights(deployment, image=image, pull_policy=pull_policy)
    config = {"name": names.config_map(deployment.name, revision, is_prefill=deployment.is_prefill)}
    selected = labels.revision(deployment.name, revision, deployment.component)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(settings.engine_user),
        "terminationGracePeriodSeconds": math.ceil(deployment.rollout.drain_timeout_s) + GRACE_S,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selected},
            }
        ],
        "containers": [_engine(deployment, settings, image, parts.mounts)],
        "volumes": [
            {"name": "config", "configMap": config},
            {"name": "tmp", "emptyDir": {"sizeLimit": TMP_SIZE}},
            *parts.volumes,
            *kv_disk.volumes(deployment),
            *kv_shared.volumes(deployment),
            *kv_transfer.volumes(deployment),
            *group.volumes(deployment),
            *encryption.volumes(deployment),
            *engine_access.volumes(settings),
        ],
    }
    if parts.init_containers:
        spec["initContainers"] = parts.init_containers
    if is_fetched(deployment) and deployment.cache.is_of_one_node:
        # The volume is where the first pod is: another one elsewhere would wait for it for ever.
        near = {
            "labelSelector": {"matchLabels": labels.engines(deployment.name)},
            "topologyKey": "kubernetes.io/hostname",
        }
        required = {"requiredDuringSchedulingIgnoredDuringExecution": [near]}
        spec["affinity"] = {"podAffinity": required}
    if settings.readiness_gate:
        spec["readinessGates"] = [{"conditionType": ROUTABLE_CONDITION}]
    metadata = {
        "labels": {
            **labels.common(deployment.name, deployment.component),
            REVISION_LABEL: revision,
            **kv_transfer.side_labels(deployment),
        },
        "annotations": {
            labels.MODEL_ANNOTATION: deployment.model.uri,
            **group.pod_annotations(deployment),
            **engine_access.pod_annotations(deployment, settings),
        },
    }
    return {"metadata": metadata, "spec": spec}


def _engine(
    deployment: LLMDeployment, settings: OperatorSettings, image: str, mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    resources = deployment.resources
    requests = {**({} if resources.limits else DEFAULT_REQUESTS), **resources.requests}
    on_node = _disk_of_node(deployment)
    if on_node is not None and "ephemeral-storage" not in resources.limits:
        # It fills the node's own disk: a pod without a request for it is evicted first.
        requests.setdefault("ephemeral-storage", on_node)
    container: dict[str, Any] = {
        "name": names.ENGINE_CONTAINER,
        "image": image,
        "imagePullPolicy": settings.images.pull_policy,
        "command": ["octavo", "serve"],
        "args": [
            f"--config={CONFIG_MOUNT}/{CONFIG_FILE}",
            *literal(extra_arguments(deployment)),
            *kv_transfer.arguments(deployment),
            *group.arguments(deployment),
            *encryption.arguments(deployment),
            *engine_access.arguments(settings),
        ],
        "env": [
            {"name": POD_UID_ENV, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            # Compilers and hubs keep caches at home; the root file system is read-only.
            {"name": "HOME", "value": "/tmp"},
            *kv_shared.variables(deployment),
            *kv_transfer.variables(deployment),
            *group.variables(deployment),
            *engine_access.variables(deployment, settings),
            *(_variable(variable) for variable in deployment.engine.env),
        ],
        "ports": [
            {"name": PORT_NAME, "containerPort": ENGINE_PORT},
            *kv_transfer.ports(deployment),
            *group.ports(deployment),
        ],
        "resources": _drop_empty({"requests": requests, "limits": dict(resources.limits)}),
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **probes(deployment, is_tls=bool(settings.engine_tls_secret)),
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_MOUNT, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *mounts,
            *kv_disk.mounts(deployment),
            *kv_shared.mounts(deployment),
            *kv_transfer.mounts(deployment),
            *group.mounts(deployment),
            *encryption.mounts(deployment),
            *engine_access.mounts(settings),
        ],
    }
    if settings.pre_stop_s:
        # Routers act on the deletion timestamp; this is for those that learn of it late.
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": settings.pre_stop_s}}}
    return container


def _disk_of_node(deployment: LLMDeployment) -> str | None:
    """What weights and KV blocks take there: a quantity."""
    has_weights = is_fetched(deployment) and deployment.cache.kind == "EmptyDir"
    size = deployment.cache.size if has_weights else None
    kv_bytes = kv_disk.node_bytes(deployment)
    if not kv_bytes:
        return size
    return str(kv_bytes + (0 if size is None else whole(parse_quantity(size))))


def _variable(variable: EnvVar) -> dict[str, Any]:
    if not variable.source:
        return {"name": variable.name, "value": variable.value}
    reference: dict[str, Any] = {"name": variable.source_name, "key": variable.source_key}
    if variable.optional:
        reference["optional"] = True
    return {"name": variable.name, "valueFrom": {variable.source: reference}}


def _drop_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}
