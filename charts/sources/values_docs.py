"""The table of all values in docs/chart.md."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from charts.sources import values_file

if TYPE_CHECKING:
    from charts.sources.values_file import Setting

BEGIN = "<!-- values: made from values.yaml by `python -m charts.sources` -->"
END = "<!-- end of values -->"


def render(settings: tuple[Setting, ...]) -> str:
    """One table for each key at the top."""
    parts = []
    top = [setting for setting in settings if not setting.is_group]
    if top:
        parts.append("\n".join(["### Top level", "", *_table(top)]))
    for setting in settings:
        if setting.is_group:
            rows = _table(list(values_file.leaves((setting,))))
            parts.append("\n".join([f"### `{setting.name}`", "", *rows]))
    return "\n\n".join(parts)


def put_into(text: str, settings: tuple[Setting, ...]) -> str:
    """docs/chart.md with its tables renewed."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    return f"{head}{BEGIN}\n\n{render(settings)}\n\n{END}{tail}"


def _table(settings: list[Setting]) -> list[str]:
    return ["| value | default | meaning |", "|---|---|---|", *map(_row, settings)]


def _row(setting: Setting) -> str:
    doc = setting.doc.replace("|", "\\|")
    if choices := setting.schema.get("enum"):
        doc += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    return f"| `{setting.path}` | {_default(setting)} | {doc} |"


def _default(setting: Setting) -> str:
    if setting.default in ("", None, [], {}):
        return "none"
    text = json.dumps(setting.default, ensure_ascii=False)
    return f"`{text.strip(chr(34))}`"
