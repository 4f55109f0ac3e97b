"""values.schema.json: what each setting may be, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from charts.sources.values_file import Setting

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def render(settings: Iterable[Setting]) -> str:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart octavo",
        **_object(settings),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _object(settings: Iterable[Setting]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {setting.name: _one(setting) for setting in settings},
    }


def _one(setting: Setting) -> dict[str, Any]:
    if setting.is_group:
        schema = _object(setting.children)
        if setting.path == "global":  # a parent chart's, too: others may share it
            schema["additionalProperties"] = True
        return schema
    if isinstance(setting.default, dict):
        found: dict[str, Any] = {"type": "object"}
    elif setting.default is None or "enum" in setting.schema:
        found = {}  # the schema says it
    else:
        found = {"type": _TYPES[type(setting.default)]}
    return {"description": setting.doc, **found, **setting.schema, "default": setting.default}
