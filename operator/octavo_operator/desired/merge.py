"""Lays one object over another as a strategic merge patch would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_operator.spec.pod_template import MERGE_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping

# Items that have one source beside their key: another source takes its place.
_ONE_SOURCE = frozenset(("env", "volumes"))


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Objects are merged, lists with a key item by item; all else is replaced, by null removed."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(below, dict):
            merged[name] = overlay(below, value)
        elif isinstance(value, list) and isinstance(below, list) and name in MERGE_KEYS:
            merged[name] = _overlay_items(name, below, value)
        else:
            merged[name] = value
    return merged


def _overlay_items(
    name: str, base: list[dict[str, Any]], over: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """In the order of `base`; what it does not have comes after, in the order of `over`."""
    key = MERGE_KEYS[name]
    left = {item[key]: item for item in over}
    merged = []
    for item in base:
        found = left.pop(item[key], {})
        has_other_source = (
            name in _ONE_SOURCE and found and not (item.keys() & found.keys()) - {key}
        )
        merged.append(found if has_other_source else overlay(item, found))
    return merged + list(left.values())
