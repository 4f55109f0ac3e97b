"""Where an adapter lies that a request names and nobody loaded."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo_engine.errors import ConfigError
from octavo_engine.weights.adapter import CONFIG_NAME

if TYPE_CHECKING:
    from octavo_engine.server.settings import ServerSettings

GROUP = "octavo.adapter_resolvers"
# Folders within folders, none of which begins with a dot.
_NAME = re.compile(r"[\w-][\w.@=+-]*(?:/[\w-][\w.@=+-]*)*")


class AdapterResolver(Protocol):
    """What a package registers as an entry point: a function."""

    def __call__(self, name: str, /) -> str | None:
        """The folder of the adapter that is to be served as `name`; None: it knows none.

        It runs in a thread and may take its time, to download for example; the request waits. The
        name is whatever a client wrote.
        """


class FolderResolver:
    """Finds adapters under one folder, by their path within it."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve()

    def __call__(self, name: str, /) -> str | None:
        if _NAME.fullmatch(name) is None:
            return None
        try:
            folder = (self._root / name).resolve()
            is_there = folder.is_relative_to(self._root) and (folder / CONFIG_NAME).is_file()
        except (OSError, RuntimeError):  # too long, or links that lead in a circle
            return None
        return str(folder) if is_there else None


def make_resolvers(settings: ServerSettings, *, takes_adapters: bool) -> list[AdapterResolver]:
    """In the order in which they search: the folder first. Raises ConfigError."""
    if not takes_adapters and (settings.lora_resolver_dir or settings.lora_resolvers):
        raise ConfigError("--lora-resolver-dir and --lora-resolvers need --enable-lora")
    resolvers: list[AdapterResolver] = []
    if settings.lora_resolver_dir:
        resolvers.append(FolderResolver(settings.lora_resolver_dir))
    installed = {point.name: point for point in entry_points(group=GROUP)}
    for name in settings.lora_resolvers:
        if name not in installed:
            there = ", ".join(sorted(installed)) or "none"
            raise ConfigError(f"--lora-resolvers {name}: no package has it; installed: {there}")
        point = installed[name]
        try:
            resolvers.append(point.load())
        except Exception as error:  # the package's own code: anything may happen
            raise ConfigError(
                f"--lora-resolvers {name} ({point.value}) cannot be imported: {error!r}"
            ) from error
    return resolvers
