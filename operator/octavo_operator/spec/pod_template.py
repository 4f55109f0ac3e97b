"""spec.podTemplate: what the user lays over the engine pods. Checked for shape, kept as it is.

The API server's schema knows every field of it; here is what merging relies on, and what no overlay
may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo_operator.errors import SpecInvalid
from octavo_operator.objects import labels
from octavo_operator.spec.fields import FieldReader, show

# Fields of the pod that may be laid over. Others would break a promise of ours (hostNetwork,
# readinessGates, restartPolicy, …) or bring back what `restricted` forbids.
POD_FIELDS = (
    "affinity", "automountServiceAccountToken", "containers", "dnsConfig", "dnsPolicy",
    "hostAliases", "imagePullSecrets", "initContainers", "nodeSelector", "priorityClassName",
    "resourceClaims", "runtimeClassName", "schedulerName", "securityContext", "serviceAccountName",
    "tolerations", "topologySpreadConstraints", "volumes",
)  # fmt: skip
CONTAINER_FIELDS = (
    "args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe",
    "name", "ports", "readinessProbe", "resources", "restartPolicy", "securityContext",
    "startupProbe", "volumeMounts", "workingDir",
)  # fmt: skip

# Lists whose items are identified by a field: an overlay's item is merged into its namesake.
MERGE_KEYS: Mapping[str, str] = {
    "claims": "name",
    "containers": "name",
    "env": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
# Name the gang of a pod: coscheduling of scheduler-plugins, now and before, and Volcano.
GANG_KEYS = frozenset(
    (
        "scheduling.x-k8s.io/pod-group", "pod-group.scheduling.sigs.k8s.io",
        "scheduling.k8s.io/group-name",
    )
)  # fmt: skip
MAX_DEPTH = 16
MAX_ITEMS = 256


def read_pod_template(fields: FieldReader) -> Mapping[str, Any]:
    metadata, spec = fields.section("metadata"), fields.section("spec")
    fields.end()
    merged: dict[str, Any] = {}
    for part in ("labels", "annotations"):
        values = metadata.mapping(part, _text, most=64)
        for key in values:
            if labels.is_reserved(key):
                raise metadata.fail(part, f"must not set {key}, which is the operator's")
        if values:
            merged.setdefault("metadata", {})[part] = values
    metadata.end()
    pod = {name: value for name in POD_FIELDS if (value := spec.raw(name)) is not None}
    spec.end()
    if pod:
        checked = _check(pod, spec.path, "", MAX_DEPTH)
        for part in ("containers", "initContainers"):
            for index, container in enumerate(checked.get(part, ())):
                own = spec.inside(container, f"{spec.path}.{part}[{index}]")
                for name in CONTAINER_FIELDS:
                    own.raw(name)
                own.end()
        merged["spec"] = checked
    return merged


def _check(value: Any, path: str, name: str, depth: int) -> Any:
    """A copy of plain JSON values, whose keyed lists have their keys. Nulls are left out but in a
    securityContext, where they remove what the operator sets."""
    if depth == 0:
        raise SpecInvalid(path, f"is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        if len(value) > MAX_ITEMS or not all(isinstance(key, str) for key in value):
            raise SpecInvalid(path, f"must have at most {MAX_ITEMS} string keys")
        return {
            key: _check(item, f"{path}.{key[:80]}", key, depth - 1)
            for key, item in value.items()
            if item is not None or name == "securityContext"
        }
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return _check_list(value, path, name, depth)
    if name in MERGE_KEYS or not isinstance(value, str | int | float | bool):
        expected = "a list" if name in MERGE_KEYS else "a JSON value"
        raise SpecInvalid(path, f"must be {expected}; got {show(value)}")
    return value


def _check_list(value: Any, path: str, name: str, depth: int) -> list[Any]:
    if len(value) > MAX_ITEMS:
        raise SpecInvalid(path, f"must have at most {MAX_ITEMS} items; got {len(value)}")
    items = [_check(item, f"{path}[{index}]", "", depth - 1) for index, item in enumerate(value)]
    key = MERGE_KEYS.get(name)
    if key is None:
        return items
    seen: list[Any] = []
    for index, item in enumerate(items):
        found = item.get(key) if isinstance(item, Mapping) else None
        if not isinstance(found, str | int) or found == "":
            raise SpecInvalid(f"{path}[{index}]", f"must be an object with {key}; got {show(item)}")
        if found in seen:
            raise SpecInvalid(f"{path}[{index}].{key}", f"is there twice: {show(found)}")
        seen.append(found)
    return items


def _text(value: object, path: str) -> str:
    if not isinstance(value, str) or len(value) > 65536:
        raise SpecInvalid(path, f"must be a string; got {show(value)} (quote numbers and booleans)")
    return value
