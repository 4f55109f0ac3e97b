"""Whether a value is valid under a schema: the part of JSON Schema that tests here use, read off
the specification."""

from __future__ import annotations

import re
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,),
    "null": (type(None),), "number": (int, float), "integer": (int,),
}  # fmt: skip


def is_valid(value: Any, schema: Any, root: Any = None) -> bool:
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if (reference := schema.get("$ref")) is not None:
        target = root
        for part in reference.split("/")[1:]:
            target = target[part]
        if not is_valid(value, target, root):
            return False
    types = schema.get("type")
    if types is not None:
        names = [types] if isinstance(types, str) else types
        if not any(_is_type(value, name) for name in names):
            return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "enum" in schema and not any(_same(value, item) for item in schema["enum"]):
        return False
    matches = [is_valid(value, part, root) for part in schema.get("anyOf", [True])]
    ones = [is_valid(value, part, root) for part in schema.get("oneOf", [True])]
    alls = [is_valid(value, part, root) for part in schema.get("allOf", [])]
    if not any(matches) or sum(ones) != 1 or not all(alls):
        return False
    if isinstance(value, dict):
        return _is_object(value, schema, root)
    if isinstance(value, list):
        return _is_array(value, schema, root)
    if isinstance(value, str):
        return bool(
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9)
            and re.search(schema.get("pattern", ""), value) is not None
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _is_number(value, schema)
    return True


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _is_object(value: dict[str, Any], schema: Any, root: Any) -> bool:
    properties = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    if any(name not in value for name in schema.get("required", [])):
        return False
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", 10**9):
        return False
    for name, item in value.items():
        rules = [properties[name]] if name in properties else []
        rules += [rule for pattern, rule in patterns.items() if re.search(pattern, name)]
        if not all(is_valid(item, rule, root) for rule in rules or
                   [schema.get("additionalProperties", True)]):  # fmt: skip
            return False
    return True


def _is_array(value: list[Any], schema: Any, root: Any) -> bool:
    first = schema.get("prefixItems", [])
    rest = schema.get("items", True)
    return bool(
        schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)
        and all(is_valid(item, rule, root) for item, rule in zip(value, first, strict=False))
        and all(is_valid(item, rest, root) for item in value[len(first) :])
    )


def _is_number(value: float, schema: Any) -> bool:
    infinity = float("inf")
    return bool(
        schema.get("minimum", -infinity) <= value <= schema.get("maximum", infinity)
        and schema.get("exclusiveMinimum", -infinity) < value
        and value < schema.get("exclusiveMaximum", infinity)
        and value % schema.get("multipleOf", value or 1) == 0
    )
