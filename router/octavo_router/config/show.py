"""The configuration as others see it: JSON without secrets, a difference, documentation."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, NamedTuple

from octavo_router.config.load import ENV_PREFIX, SECRET, types_of, walk
from octavo_router.config.settings import RouterConfig


class Difference(NamedTuple):
    """One setting that a reload changes."""

    path: str
    before: Any
    after: Any
    needs_restart: bool


# Read once, when sockets and processes are made.
RESTART_ONLY = (
    "server.host",
    "server.port",
    "server.workers",
    "server.tls_cert",
    "server.tls_key",
    "server.tls_client_ca",
    "server.allow",
    "server.admin_host",
    "server.admin_port",
    "server.log_format",
    "server.replica",
    "server.console",
    "server.debug_endpoints",
    "discovery.file",
    "discovery.kubernetes.",
    "discovery.zone",
    "discovery.engine_key",
    "discovery.tls_",
    "discovery.file_interval_s",
    "discovery.dns_interval_s",
    "discovery.poll_interval_s",
    "routing.max_keys_per_endpoint",
    "routing.num_decisions",
    "routing.seed",
    "epp.",
    "tracing.",
)


def dump(part: Any) -> Any:
    """JSON-able, with secrets hidden."""
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return {
            field.name: SECRET
            if field.metadata.get("is_secret") and getattr(part, field.name)
            else dump(getattr(part, field.name))
            for field in dataclasses.fields(part)
        }
    if isinstance(part, tuple):
        return [dump(item) for item in part]
    return part


def differences(before: RouterConfig, after: RouterConfig) -> list[Difference]:
    """What changed, setting by setting; secrets are compared, not shown."""
    found = []
    for path, _, _ in walk(RouterConfig):
        old, new = _at(before, path), _at(after, path)
        if old != new:
            name = ".".join(path)
            found.append(Difference(name, dump(old), dump(new), name.startswith(RESTART_ONLY)))
    return found


def reference() -> str:
    """The tables of docs/router.md: every setting with its default, unit, flag and sentence."""
    parts: dict[str, list[str]] = {}
    for path, field, type_ in walk(RouterConfig):
        parts.setdefault(".".join(path[:-1]), []).append(_row(path[-1], field))
        item = _item_type(type_)
        if item is not None:
            _item_rows(parts, f"{'.'.join(path)}[]", item)
    lines = []
    for part, rows in parts.items():
        lines += [f"### `{part}`" if part else "### Top level", ""]
        lines += ["| setting | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _item_rows(parts: dict[str, list[str]], name: str, kind: type) -> None:
    types = types_of(kind)
    for field in dataclasses.fields(kind):
        parts.setdefault(name, []).append(_row(field.name, field))
        item = _item_type(types[field.name])
        if item is not None:
            _item_rows(parts, f"{name}.{field.name}[]", item)


def _item_type(type_: Any) -> type | None:
    if typing.get_origin(type_) is not tuple:
        return None
    item = typing.get_args(type_)[0]
    return typing.cast("type", item) if dataclasses.is_dataclass(item) else None


def _row(name: str, field: dataclasses.Field[Any]) -> str:
    meta = field.metadata
    unit = f" {meta['unit']}" if meta.get("unit") else ""
    match field.default:
        case ():
            default = "none"
        case tuple() as items:
            default = ", ".join(f"`{item}`" for item in items)
        case "":
            default = "none"
        case bool() as flag:
            default = f"`{str(flag).lower()}`"
        case float() as number:
            default = f"`{number:g}`{unit}"
        case value:
            default = f"`{value}`{unit}"
    doc = meta["doc"]
    if meta.get("choices"):
        doc += " One of " + ", ".join(f"`{choice}`" for choice in meta["choices"] if choice) + "."
    if meta.get("flag"):
        variable = ENV_PREFIX + meta["flag"].upper().replace("-", "_")
        doc += f" `--{meta['flag']}`, `{variable}`."
    return f"| `{name}` | {default} | {doc} |"


def _at(part: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        part = getattr(part, name)
    return part
