"""The reference of all fields as one Markdown page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HEAD = {
    "LLMDeployment": """# LLMDeployment

<!-- Made from crds/llmdeployments.octavo.dev.yaml by `python -m octavo_operator.crd`. -->

One `LLMDeployment` is one served model. The API server checks what is written here, fills in
defaults and refuses the rest with a sentence about what to write instead. `kubectl explain
llmd.spec` shows the same texts; `manifests/samples/` has one example for each use;
`crds/llmdeployment.schema.json` lets editors complete and check. A field marked *required* has no
default; any other one without a default may be left out.
""",
    "LLMAdapter": """# LLMAdapter

<!-- Made from crds/llmadapters.octavo.dev.yaml by `python -m octavo_operator.crd`. -->

One `LLMAdapter` is one LoRA adapter of the model that an `LLMDeployment` serves, for a team that
may not edit the `LLMDeployment` itself. It is loaded and unloaded while the pods run:
[LoRA adapters on a platform](adapters-platform.md) describes how. A field marked *required* has no
default; any other one without a default may be left out.
""",
}
_STATUS = """Written by the operator, never by users."""
# Fields of the core API: explained there, listed here.
_OVERLAY = "spec.podTemplate.spec"


def reference_page(crd: Mapping[str, Any]) -> str:
    spec = crd["spec"]
    version = next(version for version in spec["versions"] if version["storage"])
    schema = version["schema"]["openAPIV3Schema"]
    names = spec["names"]
    parts = " and ".join(f"`{part}`" for part in version["subresources"])
    lines = [
        _HEAD[names["kind"]],
        f"Group `{spec['group']}`, version `{version['name']}`, kind `{names['kind']}`, short name "
        f"`{names['shortNames'][0]}`; sub-resource{'s' * (' and ' in parts)} {parts}.",
    ]
    lines += [f"- {rule}" for rule in _rules(schema)]
    for part in ("spec", "status"):
        properties = schema["properties"][part]
        lines += ["", f"## {part}", "", _STATUS if part == "status" else properties["description"]]
        lines += _section(part, properties)
    return "\n".join(lines).rstrip() + "\n"


def _section(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """One table for an object, then one section for each object in it."""
    properties: Mapping[str, Any] = schema["properties"]
    required = schema.get("required", ())
    yield ""
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in properties.items():
        default = "*required*" if name in required else _default(field)
        meaning = field["description"].replace("|", "\\|")
        yield f"| `{name}` | {_type(field)} | {default} | {meaning} |"
    rules = [*_rules(schema)]
    rules += [f"`{name}` {rule}" for name, field in properties.items() for rule in _own(field)]
    if rules:
        yield ""
        yield "Rules:"
        yield from (f"- {rule}" for rule in rules)
    for name, field in properties.items():
        inner, suffix = (field["items"], "[]") if "items" in field else (field, "")
        if "properties" not in inner:
            continue
        inner_path = f"{path}.{name}{suffix}"
        yield ""
        yield f"{'#' * min(3 + inner_path.count('.') - 1, 5)} {inner_path}"
        if inner_path == _OVERLAY:
            fields = ", ".join(f"`{known}`" for known in inner["properties"])
            yield ""
            yield f"{inner['description']} As in the core API's pod: {fields}."
            continue
        yield from _section(inner_path, inner)


def _rules(schema: Mapping[str, Any]) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield f"{rule['message']}."


def _own(field: Mapping[str, Any]) -> Iterator[str]:
    """Rules of a field that gets no section of its own, and of the items of a list."""
    if "properties" not in field:
        yield from _rules(field)
    items = field.get("items", {})
    if "properties" not in items:
        yield from _rules(items)


def _type(field: Mapping[str, Any]) -> str:
    if field.get("x-kubernetes-int-or-string"):
        kind = "quantity" if "KMGTPE" in field.get("pattern", "") else "integer or string"
    elif "enum" in field:
        kind = " \\| ".join(f"`{value}`" for value in field["enum"])
    elif "items" in field:
        kind = f"list of {_type(field['items'])}s"
    elif "additionalProperties" in field:
        kind = f"map of {_type(field['additionalProperties'])}"
    elif any("duration(" in rule["rule"] for rule in field.get("x-kubernetes-validations", ())):
        kind = "duration"
    else:
        kind = str(field["type"])
    least, most = field.get("minimum"), field.get("maximum")
    return f"{kind}, {least:g} to {most:.16g}" if least is not None else kind


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field or field["default"] == {}:
        return ""
    if "properties" in field:  # the fields have their own
        return ""
    default = field["default"]
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"
