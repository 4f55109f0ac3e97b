"""values.yaml as a tree: each setting with its default, its sentence and what `@schema` adds.

The comments above a key belong to it: `# -- text`, then any number of `# text`, and `# @schema {…}`
with JSON Schema keywords that the default alone cannot tell.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUES = Path("charts/octavo/values.yaml")
_TEXT = "# -- "
_SCHEMA = "# @schema "


class ValuesInvalid(Exception):
    """A setting of values.yaml is not described as it must be."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of values.yaml. One with a sentence is a value; one without is only a group."""

    path: str
    default: Any
    doc: str
    schema: dict[str, Any]
    children: tuple[Setting, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_group(self) -> bool:
        return bool(self.children)


def read(path: Path = VALUES) -> tuple[Setting, ...]:
    """Raises ValuesInvalid."""
    text = path.read_text(encoding="utf-8")
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    return tuple(_settings(node, text.splitlines(), ""))


def leaves(settings: tuple[Setting, ...]) -> Iterator[Setting]:
    """Those that are set, in the file's order."""
    for setting in settings:
        if setting.is_group:
            yield from leaves(setting.children)
        else:
            yield setting


def _settings(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[Setting]:
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        doc, schema = _comments(path, lines, key.start_mark.line)
        children: tuple[Setting, ...] = ()
        # A map without its own sentence is a group; one with a sentence is a value as a whole.
        if isinstance(value, yaml.MappingNode) and value.value and not doc:
            children = tuple(_settings(value, lines, f"{path}."))
        elif not doc:
            raise ValuesInvalid(f"{path}: has no comment that begins with '{_TEXT}'")
        yield Setting(path, _plain(value), doc, schema, children)


def _comments(path: str, lines: list[str], line: int) -> tuple[str, dict[str, Any]]:
    above: list[str] = []
    while line and lines[line - 1].strip().startswith("#"):
        line -= 1
        above.insert(0, lines[line].strip())
    texts = [text.removeprefix(_TEXT) for text in above if text.startswith(_TEXT)]
    schemas = [text.removeprefix(_SCHEMA) for text in above if text.startswith(_SCHEMA)]
    try:
        schema = json.loads(schemas[0]) if schemas else {}
    except ValueError as error:
        raise ValuesInvalid(f"{path}: @schema is no JSON: {error}") from None
    return " ".join(texts), schema


def _plain(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))
