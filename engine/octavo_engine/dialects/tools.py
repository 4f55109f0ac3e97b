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

    def argument_type(self, name: str) -> str | None:
        """The JSON type of one argument where the schema says a single one."""
        properties = self.parameters.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        kind = schema.get("type") if isinstance(schema, dict) else None
        if isinstance(kind, list):
            kinds = [each for each in kind if each != "null"]
            kind = kinds[0] if len(kinds) == 1 else None
        return kind if isinstance(kind, str) else None


@dataclass(frozen=True, slots=True)
class Tools:
    """All that a request offers."""

    tools: tuple[Tool, ...] = ()

    def __contains__(self, name: str) -> bool:
        return any(tool.name == name for tool in self.tools)

    def get(self, name: str) -> Tool | None:
        return next((tool for tool in self.tools if tool.name == name), None)
