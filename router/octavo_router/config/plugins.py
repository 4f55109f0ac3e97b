"""Routing policies of other packages: their names, as installed under an entry point group."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "octavo.routing_policies"


def installed_policies() -> dict[str, EntryPoint]:
    """By name; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}
