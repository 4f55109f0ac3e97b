"""Families that other packages bring, by entry points of the group octavo.models."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import TypeVar

from octavo_engine.errors import ModelError

Registered = TypeVar("Registered")

GROUP = "octavo.models"  # the entry point's name is the architecture, its object a Family

logger = logging.getLogger(__name__)


def find_plugin(architecture: str, kind: type[Registered]) -> Registered | None:
    """What a package registers for the architecture; the package is imported only now.

    Raises ModelError where it cannot be loaded, or two packages register it.
    """
    found = importlib.metadata.entry_points(group=GROUP, name=architecture)
    if not found:
        return None
    packages = sorted(entry.dist.name if entry.dist else entry.value for entry in found)
    if len(packages) > 1:
        raise ModelError(
            f"architecture {architecture!r} is registered by several packages: "
            f"{', '.join(packages)}; uninstall all but one"
        )
    (entry,) = found
    try:
        family = entry.load()
    except Exception as error:  # the package's own code: it may raise anything
        raise ModelError(
            f"the package {packages[0]} registers architecture {architecture!r} but cannot be "
            f"loaded: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(family, kind):
        raise ModelError(
            f"the package {packages[0]} registers architecture {architecture!r} as {entry.value}, "
            f"which is not a {kind.__name__} of {kind.__module__}"
        )
    logger.info("The package %s serves architecture %s", packages[0], architecture)
    return family


def plugin_architectures() -> list[str]:
    """All that packages register."""
    return sorted({entry.name for entry in importlib.metadata.entry_points(group=GROUP)})
