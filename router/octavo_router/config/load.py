"""Fills the configuration: flag > environment > file > default. Knows the fields only as data.

A file is YAML, shaped like the tree in settings.py. Fields with a flag can be set on the command
line (`--queue-timeout 10`) and in the environment (`OCTAVO_ROUTER_QUEUE_TIMEOUT`). An unknown field
is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from typing import Any, Final, NamedTuple

from octavo_router.config.check import nearest
from octavo_router.config.settings import RouterConfig, UpstreamConfig
from octavo_router.errors import ConfigInvalid

if typing.TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ENV_PREFIX = "OCTAVO_ROUTER_"
SECRET = "(hidden)"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class ConfigFlag(NamedTuple):
    """A field that the command line and the environment may set."""

    name: str  # without the dashes
    path: tuple[str, ...]
    type: Any
    doc: str
    default: Any

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper().replace("-", "_")


def load_config(
    *,
    text: str = "",
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> RouterConfig:
    """The configuration. `text` is the file's; `flags` those that were given, by name without
    dashes, as strings or already as values. Raises ConfigInvalid with all faults that are found."""
    reader = _Reader()
    tree = _parse_yaml(text)
    _put_flags(tree, flags or {}, environment or {}, reader)
    try:
        result = reader.build(RouterConfig, tree, "")
    except ConfigInvalid as error:
        known = [fault for fault in error.faults if _part_of(fault.field) not in reader.doubtful]
        reader.faults += known
    if reader.faults:
        raise ConfigInvalid.of(reader.faults)
    assert isinstance(result, RouterConfig)
    return result


def _put_flags(
    tree: dict[str, Any], flags: Mapping[str, Any], environment: Mapping[str, str], reader: _Reader
) -> None:
    """Flags over variables over what the tree has."""
    by_name = {flag.name: flag for flag in all_flags()}
    for flag in by_name.values():
        value = environment.get(flag.variable)
        # Kubernetes sets OCTAVO_ROUTER_PORT=tcp://… for a Service of the name octavo-router.
        if value is not None and not value.startswith("tcp://"):
            _put(tree, flag.path, reader.from_text(value, flag, flag.variable))
    for name, value in flags.items():
        if value is None:
            continue
        if name not in by_name:
            reader.fault(f"--{name}", f"there is no such flag{nearest(name, by_name)}")
            continue
        flag = by_name[name]
        if isinstance(value, str):
            value = reader.from_text(value, flag, f"--{name}")
        _put(tree, flag.path, value)


def _part_of(field: str) -> str:
    """server of server.port, models of models[0]."""
    return re.split(r"[.\[]", field, maxsplit=1)[0]


def all_flags() -> list[ConfigFlag]:
    """Every field with a flag, in the order of the tree."""
    return [
        ConfigFlag(field.metadata["flag"], path, type_, field.metadata["doc"], field.default)
        for path, field, type_ in walk(RouterConfig)
        if field.metadata.get("flag")
    ]


def walk(
    kind: type, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dataclasses.Field[Any], Any]]:
    """All fields below a part of the tree that are not parts themselves."""
    types = types_of(kind)
    for field in dataclasses.fields(kind):
        type_ = types[field.name]
        here = (*path, field.name)
        if dataclasses.is_dataclass(type_):
            yield from walk(typing.cast("type", type_), here)
        else:
            yield here, field, type_


@functools.cache
def types_of(kind: type) -> dict[str, Any]:
    """The types of a part's fields; kept, because working them out takes a while."""
    return typing.get_type_hints(kind)


def parse_part(text: str, name: str, kind: type[Any]) -> tuple[Any, ...]:
    """A file that holds one list of the tree (`keys`, `upstreams`) under its name."""
    tree = _parse_yaml(text)
    reader = _Reader()
    for key in tree:
        if key != name:
            reader.fault(str(key), f"is not known here{nearest(str(key), (name,))}")
    items = reader.items(tree.get(name) or [], kind, name)
    if reader.faults:
        raise ConfigInvalid.of(reader.faults)
    assert isinstance(items, tuple)
    return items


def _parse_yaml(text: str) -> dict[str, Any]:
    if not text:
        return {}
    import yaml  # a router without a file starts sooner

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigInvalid(
            "file", f"{line}is not valid YAML: {getattr(error, 'problem', error)}"
        ) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigInvalid("file", f"must be a mapping; got {_kind_of(tree)}")
    return tree


_UNREADABLE: Final = object()  # a value with a fault, which has been recorded


class _Reader:
    """Builds parts of the tree, and goes on after a fault to find the others."""

    def __init__(self) -> None:
        self.faults: list[ConfigInvalid] = []
        # Parts where a field has its default instead of what was given: what follows is not known.
        self.doubtful: set[str] = set()

    def fault(self, where: str, problem: str, part: str = "") -> Any:
        self.faults.append(ConfigInvalid(where, problem))
        self.doubtful.add(part or _part_of(where))
        return _UNREADABLE

    def build(self, kind: type, tree: object, path: str) -> Any:
        """Fields that cannot be read have their defaults."""
        if not isinstance(tree, dict):
            return self.fault(path or "file", f"must be a mapping; got {_kind_of(tree)}")
        types = types_of(kind)
        known = {field.name for field in dataclasses.fields(kind)}
        values = {}
        for name, value in tree.items():
            where = f"{path}.{name}" if path else str(name)
            if name not in known:
                self.fault(where, f"there is no such setting{nearest(str(name), known)}")
            elif (read := self._value(value, types[name], where)) is not _UNREADABLE:
                values[name] = read
        return kind(**values)

    def items(self, value: Any, type_: Any, where: str) -> Any:
        if type_ is UpstreamConfig and isinstance(value, list):
            value = [{"url": item} if isinstance(item, str) else item for item in value]
        if not isinstance(value, list | tuple):
            return self.fault(where, f"must be a list; got {_kind_of(value)}")
        read = [self._value(item, type_, f"{where}[{n}]") for n, item in enumerate(value)]
        return tuple(item for item in read if item is not _UNREADABLE)

    def from_text(self, text: str, flag: ConfigFlag, where: str) -> Any:
        """A value from the command line or the environment; lists are separated by commas."""
        type_, part = flag.type, flag.path[0]
        if typing.get_origin(type_) is tuple:
            return [item.strip() for item in text.split(",") if item.strip()]
        if type_ is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            return self.fault(where, f"must be true or false; got {text!r}", part)
        try:
            return type_(text)
        except ValueError:
            return self.fault(where, f"must be {_NAMES[type_]}; got {text!r}", part)

    def _value(self, value: Any, type_: Any, where: str) -> Any:
        if value is _UNREADABLE:
            return value
        if dataclasses.is_dataclass(type_):
            return self.build(typing.cast("type", type_), {} if value is None else value, where)
        if typing.get_origin(type_) is tuple:
            return self.items(value, typing.get_args(type_)[0], where)
        if type_ is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not type_:
            return self.fault(where, f"must be {_NAMES[type_]}; got {_kind_of(value)} {value!r}")
        return value


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int() | float():
            return "the number"
        case str():
            return "the text"
        case dict():
            return "a mapping"
        case _:
            return "a list"


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        below = tree.get(name)
        if below is None:
            below = tree[name] = {}
        elif not isinstance(below, dict):
            return  # building the tree will say what is wrong with it
        tree = below
    tree[path[-1]] = value
