"""The CRD's schema as JSON Schema 2020-12, for editors and for checks without a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# What the API server adds to the schema of every object.
_METADATA = {
    "description": "As of every Kubernetes object: name, namespace, labels, annotations.",
    "type": "object",
}
_RULES = "x-kubernetes-validations"


def json_schema(crd: Mapping[str, Any]) -> dict[str, Any]:
    """Of the one version that is stored. CEL rules become sentences of the description."""
    spec = crd["spec"]
    version = next(version for version in spec["versions"] if version["storage"])
    schema = _convert(version["schema"]["openAPIV3Schema"])
    properties = schema["properties"]
    properties["apiVersion"]["const"] = f"{spec['group']}/{version['name']}"
    properties["kind"]["const"] = spec["names"]["kind"]
    properties["metadata"] = _METADATA
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": spec["names"]["kind"],
        **schema,
    }


def _convert(schema: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: _convert(item) for name, item in value.items()}
        elif key in ("items", "additionalProperties"):
            out[key] = _convert(value)
        elif key == "format" and value in ("int32", "int64"):
            continue  # JSON Schema has one kind of integer
        elif not key.startswith("x-kubernetes-") and key not in ("nullable", "anyOf"):
            out[key] = value
    if schema.get("x-kubernetes-int-or-string"):
        out["type"] = ["integer", "string"]
    if schema.get("nullable"):
        out["type"] = [out["type"], "null"]
    if "properties" in out:
        out["additionalProperties"] = False  # the API server refuses what it does not know
    rules = [rule["message"] for rule in schema.get(_RULES, ())]
    if rules:
        out["description"] = " ".join([out.get("description", ""), *map(_sentence, rules)]).strip()
    return out


def _sentence(message: str) -> str:
    return f"{message[:1].upper()}{message[1:]}."
