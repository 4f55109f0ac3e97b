"""The CRD as a schema should be: described, bounded, closed, and the parser's twin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest

from octavo_operator.spec import LLMDeployment, autoscaling, cache, engine, pod_template, traffic
from octavo_operator.spec import fields as fields_module
from octavo_operator.spec.engine import RESERVED_ARGS
from octavo_operator.spec.prefill import SHARED_ARGS
from tests.fakes.quick_yaml import read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

CRD = Path(__file__).parents[3] / "crds" / "llmdeployments.octavo.dev.yaml"


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    loaded: dict[str, Any] = read_yaml(CRD.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def schema(crd: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from walk(field, f"{path}.{name}" if path else name)
    if isinstance(schema.get("items"), dict):
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


def at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    return dict(walk(schema))[path]


def test_every_field_is_described(schema: dict[str, Any]):
    silent = [
        path
        for path, field in walk(schema)
        if not field.get("description") and path != "metadata" and not path.endswith(("[]", "{}"))
    ]
    assert silent == []


def test_every_string_list_and_map_is_bounded(schema: dict[str, Any]):
    loose = []
    for path, field in walk(schema):
        is_text = field.get("type") == "string" or field.get("x-kubernetes-int-or-string")
        if is_text and "enum" not in field and "maxLength" not in field:
            loose.append(path)
        if field.get("type") == "array" and "maxItems" not in field:
            loose.append(path)
        if "additionalProperties" in field and "maxProperties" not in field:
            loose.append(path)
    assert loose == []


def test_nothing_unknown_is_kept(schema: dict[str, Any]):
    kept = [path for path, field in walk(schema) if "x-kubernetes-preserve-unknown-fields" in field]
    assert kept == []


def test_lists_say_how_they_are_merged(schema: dict[str, Any]):
    vague = [
        path
        for path, field in walk(schema)
        if field.get("type") == "array" and "x-kubernetes-list-type" not in field
    ]
    assert vague == []
    conditions = at(schema, "status.conditions")
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_people_find_it(crd: dict[str, Any]):
    assert crd["spec"]["names"]["shortNames"] == ["llmd"]
    assert crd["spec"]["names"]["categories"] == ["all", "octavo"]
    version = crd["spec"]["versions"][0]
    assert version["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns[:6] == ["Ready", "Reason", "Replicas", "Routable", "Loading", "Prefill"]


@pytest.mark.parametrize(
    ("path", "choices"),
    [
        ("spec.engine.device", engine.Device),
        ("spec.engine.dtype", engine.DType),
        ("spec.engine.quantization", engine.Quantization),
        ("spec.engine.executor", engine.Executor),
        ("spec.routing.policy", traffic.Policy),
        ("spec.rollout.strategy", traffic.Strategy),
        ("spec.autoscaling.provider", autoscaling.Provider),
        ("spec.cache.kind", cache.CacheKind),
        ("spec.cache.accessMode", cache.AccessMode),
    ],
)
def test_choices_are_the_parsers(path: str, choices: Any, schema: dict[str, Any]):
    assert set(at(schema, path)["enum"]) == set(get_args(choices))


def test_the_overlay_has_the_fields_that_merging_knows(schema: dict[str, Any]):
    pod = at(schema, "spec.podTemplate.spec")["properties"]
    assert set(pod) == set(pod_template.POD_FIELDS)
    container = pod["containers"]["items"]["properties"]
    assert set(container) == set(pod_template.CONTAINER_FIELDS)
    assert set(pod["initContainers"]["items"]["properties"]) <= set(container)


def test_each_reserved_argument_is_in_the_rule(schema: dict[str, Any]):
    rules = at(schema, "spec.engine.args")["x-kubernetes-validations"]
    ours = at(schema, "spec.prefill.args")["x-kubernetes-validations"]
    for name in RESERVED_ARGS:
        assert f"'{name}'" in rules[1]["rule"]
        assert f"'{name}'" in ours[1]["rule"]
    for name in (*SHARED_ARGS, "data-parallel-size"):
        assert f"'{name}'" in ours[2]["rule"]


def test_the_parser_reads_every_field_and_no_other(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """What the schema lets in and nobody reads would be silently without effect."""
    read: dict[str, set[str]] = {}
    end = fields_module.FieldReader.end

    def noting_end(self: fields_module.FieldReader) -> None:
        read.setdefault(re.sub(r"\[\d+\]", "[]", self.path), set()).update(self._known)
        end(self)

    monkeypatch.setattr(fields_module.FieldReader, "end", noting_end)
    for body in (EVERYTHING, GROUPED):
        LLMDeployment.parse(body)
    spec = at(schema, "spec")
    overlay = "spec.podTemplate.spec"  # its own test above
    expected = {
        path: set(field["properties"])
        for path, field in walk(spec, "spec")
        if "properties" in field and not path.startswith(overlay)
    }
    assert {path: names for path, names in read.items() if path in expected} == expected


EVERYTHING = {
    "apiVersion": "octavo.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "everything", "namespace": "x"},
    "spec": {
        "model": {"uri": "hf://org/name", "secretRef": {"name": "hub"}},
        "engine": {
            "env": [
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}},
                {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}},
            ],
            "kvTiers": {
                "hostMemory": "1Gi",
                "disk": {"size": "1Gi"},
                "shared": {"uri": "s3://kv", "secretRef": {"name": "kv-keys"}},
            },
            "encryption": {"secretRef": {"name": "keys"}},
        },
        "prefill": {
            "secretRef": {"name": "kv"},
            "resources": {"limits": {"cpu": "1"}},
            "autoscaling": {"maxReplicas": 2},
            "flip": {"targets": {"ttft": "1s", "tpot": "50ms"}},
        },
        "lora": {"maxLoras": 4},
        "adapters": [
            {"name": "law", "uri": "hf://org/law"},
            {"name": "next", "uri": "hf://org/next", "canary": {"of": "law"}},
        ],
        "rollout": {"strategy": "Canary", "canary": {"steps": [{"weight": 5}]}},
        "autoscaling": {
            "maxReplicas": 2,
            "targets": {"inFlight": 4},
            "scaleToZero": {"after": "5m"},
        },
    },
}
# What cannot be combined with all of that.
GROUPED = {
    **EVERYTHING,
    "spec": {
        "model": {"uri": "demo://smollm2"},
        "group": {"size": 2, "secretRef": {"name": "between"}},
    },
}
