"""What an answer must look like where tool calls are enforced, as schemas and structural tags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from octavo_engine.dialects.json_calls import ArgumentsOnly, JsonCalls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo_engine.dialects.events import Parser
    from octavo_engine.dialects.formats import CallTags, ToolFormat
    from octavo_engine.dialects.tools import Tool, Tools

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
PLAIN = JsonCalls(bare=True)  # [{"name": …, "parameters": …}, …], for models of any dialect


@dataclass(frozen=True, slots=True)
class Enforced:
    """A grammar in the words of a request, and the parser of what it makes."""

    kind: Literal["json_schema", "structural_tag"]
    value: dict[str, Any]
    reads: Literal["dialect", "plain", "arguments"]
    name: str = ""  # of the one function, where its arguments are all there is

    def parser(self, format: ToolFormat | None, tools: Tools) -> Parser:
        if self.reads == "arguments":
            return ArgumentsOnly(self.name)
        if self.reads == "plain" or format is None:
            return PLAIN.parser(tools)
        return format.syntax.parser(tools)


def one_named(tool: Tool) -> Enforced:
    """The answer is the arguments of this function."""
    return Enforced("json_schema", _schema(tool), "arguments", tool.name)


def at_least_one(tools: Sequence[Tool], format: ToolFormat | None, *, parallel: bool) -> Enforced:
    """The answer is calls and nothing else, in the model's own way where that is known."""
    if format is None or format.tags is None:
        return Enforced("json_schema", _plain_list(tools, parallel=parallel), "plain")
    shape = calls_shape(tools, format.tags, parallel=parallel)
    return Enforced("structural_tag", {"type": "structural_tag", "format": shape}, "dialect")


def strict_calls(
    tools: Sequence[Tool], format: ToolFormat | None, *, parallel: bool
) -> Enforced | None:
    """Free text; but once a call begins, its arguments follow the schema of its function.

    None: no function is strict, or calls of this dialect have no beginning that is recognised.
    """
    if format is None or format.tags is None or not format.tags.trigger:
        return None
    if not any(tool.strict for tool in tools):
        return None
    shape = {
        "type": "triggered_tags",
        "triggers": [format.tags.trigger],
        "tags": [_tag(tool, format.tags, free=not tool.strict) for tool in tools],
        "at_least_one": False,
        "stop_after_first": not parallel,
    }
    return Enforced("structural_tag", {"type": "structural_tag", "format": shape}, "dialect")


def calls_or(
    tools: Sequence[Tool], format: ToolFormat | None, answer: dict[str, Any], *, parallel: bool
) -> Enforced | None:
    """Calls, or an answer of this shape. None: the dialect's calls cannot be distinguished from
    it."""
    if format is None or format.tags is None:
        return None
    calls = calls_shape(tools, format.tags, parallel=parallel)
    shape = {"type": "or", "elements": [calls, answer]}
    return Enforced("structural_tag", {"type": "structural_tag", "format": shape}, "dialect")


def calls_shape(tools: Sequence[Tool], tags: CallTags, *, parallel: bool) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "type": "tags_with_separator",
        "tags": [_tag(tool, tags) for tool in tools],
        "separator": tags.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    before, after = tags.around
    if not before:
        return shape
    elements = [{"type": "const_string", "value": before}, shape]
    if after:
        elements.append({"type": "const_string", "value": after})
    return {"type": "sequence", "elements": elements}


def _tag(tool: Tool, tags: CallTags, *, free: bool = False) -> dict[str, Any]:
    schema = dict(ANY_OBJECT) if free else _schema(tool)
    return {
        "type": "tag",
        "begin": tags.begin.replace("NAME", tool.name),
        "content": {"type": "json_schema", "json_schema": schema},
        "end": tags.end,
    }


def _schema(tool: Tool) -> dict[str, Any]:
    """Arguments are an object, whatever else the schema leaves open."""
    schema = tool.parameters or dict(ANY_OBJECT)
    if "type" in schema or any(word in schema for word in ("$ref", "anyOf", "oneOf", "allOf")):
        return schema
    return {"type": "object", **schema}


def _plain_list(tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """A schema's references count from its root, so one that has some becomes a definition."""
    definitions: dict[str, Any] = {}
    items: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        schema = _schema(tool)
        if '"$ref"' in json.dumps(schema):
            place = f"arguments_{number}"
            definitions[place] = _moved(schema, f"#/$defs/{place}")
            schema = {"$ref": f"#/$defs/{place}"}
        items.append({
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        })  # fmt: skip
    result: dict[str, Any] = {
        "type": "array", "minItems": 1, "items": items[0] if len(items) == 1 else {"anyOf": items},
    }  # fmt: skip
    if not parallel:
        result["maxItems"] = 1
    if definitions:
        result["$defs"] = definitions
    return result


def _moved(value: Any, to: str) -> Any:
    """The schema with its references to its own root pointing to `to`."""
    if isinstance(value, dict):
        return {
            key: to + item[1:]
            if key == "$ref" and isinstance(item, str) and item.startswith("#")
            else _moved(item, to)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_moved(item, to) for item in value]
    return value
