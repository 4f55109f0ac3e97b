"""Specs out of the CRD's own schema: valid ones, nearly valid ones, and nonsense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.fakes.apiserver import CRD_FILE
from tests.fakes.quick_yaml import read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHORT = st.text(max_size=8)
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | _SHORT
    | st.sampled_from(["", "\0", "hf://", "10%", "1h", "9" * 40, "a" * 300, "{{x}}", "$(id)"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_SHORT, inner, max_size=3),
    max_leaves=8,
)
# Values that mean something somewhere; a leaf gets its own and its neighbours'.
WORDS = [
    "", "a", "A-1", "no good", "hf://org/name", "hf://org/name@v1", "s3://bucket/x", "pvc://claim/a",
    "file:///m", "demo://smollm2", "https://host/x", "oci://host/name:1", "ftp://x", "hf://x",
    "sha256:" + "0" * 64, "0s", "1ms", "9s", "90s", "5m", "1h30m", "31m", "24h", "1.5h", "99999h",
    "-5s", "0%", "25%", "100%", "101%", "1", "500m", "2Gi", "2GB", "1e3", "/var/models", "../x",
    "http://prometheus:9090", "nvidia.com/gpu", "cpu", "max-queue", "no-dtype",
]  # fmt: skip
NUMBERS = [-1, 0, 1, 2, 5, 15, 16, 99, 100, 1000, 1001, 2**31, 0.02, 0.5, 1.5, 100.5]
# Right ones, by the name of the leaf: two in three draws, or hardly a spec would be accepted.
_DURATIONS = ["10s", "90s", "5m", "1h"]
GOOD: dict[str, list[Any]] = {
    "uri": ["hf://org/name", "s3://bucket/x", "pvc://claim/a", "file:///m", "demo://smollm2"],
    "revision": ["v1.0", "main"],
    "digest": ["sha256:" + "0" * 64],
    "servedName": ["a", "Org/Name"],
    "aliases": ["b", "c", "d"],
    "name": ["a", "hub", "b-1"],
    "key": ["key"],
    "image": ["host/a/b:1"],
    "value": ["x", ""],
    "args": ["64", 64, "true"],
    "kvCacheMemory": ["2Gi", 10**9],
    "hostMemory": ["1Gi", 10**9],
    "size": ["1Gi", "500G"],
    "requests": ["1", "500m", 1, "2Gi"],
    "limits": [2, "2", "4Gi"],
    "maxSurge": [1, 2, "25%"],
    "maxUnavailable": [0, 1, "10%"],
    "step": [1, "50%"],
    "storageClassName": ["fast"],
    "existingClaim": ["mine"],
    "hostPath": ["/var/models"],
    "prometheusURL": ["http://prometheus:9090"],
    **dict.fromkeys(("startupTimeout", "holdTimeout", "drainTimeout", "pause"), _DURATIONS),
    **dict.fromkeys(("progressDeadline", "window", "after"), _DURATIONS[1:]),
    "ttft": ["500ms", "90s"],
}
KEYS = ["cpu", "memory", "max-queue", "vllm-metrics", "nvidia.com/gpu"]
# What has to be there for any other field of the same object to mean something.
_BEGINNINGS: dict[str, dict[str, Any]] = {
    "env": {"name": "A"},
    "adapters": {"name": "lora", "uri": "hf://org/lora"},
    "steps": {"weight": 5},
    "autoscaling": {"maxReplicas": 4},
    "secretKeyRef": {"name": "a", "key": "b"},
    "configMapKeyRef": {"name": "a", "key": "b"},
}


def spec_schema() -> dict[str, Any]:
    """Of the fields that are Octavo's own; those of podTemplate are the core API's."""
    schema = _whole_schema()
    fields = {name: field for name, field in schema["properties"].items() if name != "podTemplate"}
    return {**schema, "properties": fields}


def template_fields() -> Iterator[str]:
    """Paths of what podTemplate may lay over; what is within is merged as it is."""
    parts = _whole_schema()["properties"]["podTemplate"]["properties"]
    return (f"{part}.{name}" for part, field in parts.items() for name in field["properties"])


def _whole_schema() -> dict[str, Any]:
    crd = read_yaml(CRD_FILE.read_text(encoding="utf-8"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert isinstance(schema, dict)
    return schema


def leaves(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of everything that can be set; an item of a list is at `[]`, of a map at `{}`."""
    if "properties" in schema:
        for name, field in schema["properties"].items():
            yield from leaves(field, (*path, name))
    elif "items" in schema:
        yield from leaves(schema["items"], (*path, "[]"))
    elif "additionalProperties" in schema:
        yield (*path, "{}")
    else:
        yield path


def values(schema: dict[str, Any], path: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """For one leaf: right ones, and any of its type, often at its bounds."""
    name = next(part for part in reversed(path) if part not in ("[]", "{}"))
    anything = _any_value(schema, path)
    good = st.sampled_from(GOOD[name]) if name in GOOD else anything
    return st.integers(0, 2).flatmap(lambda draw: good if draw else anything)


def _any_value(schema: dict[str, Any], path: tuple[str, ...]) -> st.SearchStrategy[Any]:
    field = schema
    for name in path:
        if name in ("[]", "{}"):
            field = field["items" if name == "[]" else "additionalProperties"]
        else:
            field = field["properties"][name]
    if "enum" in field:
        return st.sampled_from([*field["enum"] * 3, "x"])
    if field.get("x-kubernetes-int-or-string"):
        return st.sampled_from([*WORDS, *(n for n in NUMBERS if isinstance(n, int))])
    match field["type"]:
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            least, most = field.get("minimum", 0), field.get("maximum", 1000)
            inside = [least, most, *(n for n in NUMBERS if least <= n <= most)]
            return st.sampled_from([*inside * 3, least - 1, most + 1, *NUMBERS])
        case _:
            return st.sampled_from(WORDS)


def specs(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A minimal spec with a few leaves set."""
    paths = list(leaves(schema))
    change = st.sampled_from(paths).flatmap(
        lambda path: st.tuples(
            st.just(path), st.sampled_from(KEYS * 4 + WORDS), values(schema, path)
        )
    )
    return st.lists(change, max_size=5).map(_with_changes)


def _with_changes(changes: list[tuple[tuple[str, ...], str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = {"model": {"uri": "hf://org/name"}}
    for path, key, value in changes:
        _set(spec, path, key, value)
    return spec


def _set(target: dict[str, Any], path: tuple[str, ...], key: str, value: Any) -> None:
    name, *rest = path
    if not rest:
        target[name] = value
    elif rest == ["{}"]:
        target.setdefault(name, {})[key] = value
    elif rest == ["[]"]:
        target.setdefault(name, []).append(value)
    elif rest[0] == "[]":
        items = target.setdefault(name, [])
        if not items:
            items.append(dict(_BEGINNINGS.get(name, {})))
        _set(items[0], tuple(rest[1:]), key, value)
    else:
        inner = target.setdefault(name, dict(_BEGINNINGS.get(name, {})))
        if name == "canary":
            target["strategy"] = "Canary"
        _set(inner, tuple(rest), key, value)
