"""The tools of a request, as far as a parser must know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # a JSON schema; empty: it takes anything
    strict: bool = False  # its arguments must follow the schema, whatever the model would write

    def argument_types(self, name: str) -> frozenset[str]:
        """The JSON types that one argument may have; empty: the schema leaves it open."""
        properties = self.parameters.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        return _types(schema, self.parameters, 0)


_MAX_DEPTH = 8
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
          dict: "object", type(None): "null"}  # fmt: skip


def _types(schema: Any, root: dict[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    match schema:
        case {"$ref": str(pointer)}:
            return _types(_referred(pointer, root), root, depth + 1)
        case {"type": str(kind)}:
            return frozenset((kind, "null") if schema.get("nullable") is True else (kind,))
        case {"type": [*kinds]}:
            return frozenset(kind for kind in kinds if isinstance(kind, str))
        case {"const": value}:
            return frozenset((_TYPES[type(value)],))
        case {"enum": [*values]}:
            return frozenset(_TYPES[type(value)] for value in values)
        case {"anyOf": [*parts]} | {"oneOf": [*parts]}:
            found = [_types(part, root, depth + 1) for part in parts]
            return frozenset().union(*found) if all(found) else frozenset()
        case {"allOf": [*parts]}:
            found = [types for part in parts if (types := _types(part, root, depth + 1))]
            return found[0].intersection(*found) if found else frozenset()
    return frozenset()


def _referred(pointer: str, root: dict[str, Any]) -> Any:
    """What a reference within the schema stands for; None: nothing that is here."""
    value: Any = root if pointer.startswith("#") else None
    for name in pointer.removeprefix("#").split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True, slots=True)
class Tools:
    """All that a request offers."""

    tools: tuple[Tool, ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(tool.name == name for tool in self.tools)

    def get(self, name: str) -> Tool | None:
        return next((tool for tool in self.tools if tool.name == name), None)
