"""Where an adapter lies that a request names and nobody loaded."""

from __future__ import annotations

import re
import threading
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.weights.adapter import CONFIG_NAME
from octavo_engine.weights.hub import adapter_folders, download_adapter, parse_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo_engine.server.settings import ServerSettings

GROUP = "octavo.adapter_resolvers"
LISTED_S = 60.0
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


class HubResolver:
    """Finds adapters in listed repositories of the Hugging Face Hub: ORG/NAME, or a folder within.

    No other repository is contacted, and the folders of one are listed at most once in `LISTED_S`,
    however many names clients make up.
    """

    def __init__(
        self, repositories: Sequence[str], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError."""
        self._now = now
        self._revisions = dict(map(_parse_repository, repositories))
        self._listed: dict[str, tuple[float, set[str] | None]] = {}
        self._listing = threading.Lock()

    def __call__(self, name: str, /) -> str | None:
        """Raises ModelError."""
        if _NAME.fullmatch(name) is None:
            return None
        repository = "/".join(name.split("/", 2)[:2])
        folder = name[len(repository) + 1 :]
        if repository not in self._revisions:
            return None
        folders, revision = self._folders(repository), self._revisions[repository]
        if folders is None:
            return _cached(repository, revision, folder)
        return str(download_adapter(repository, revision, folder)) if folder in folders else None

    def _folders(self, repository: str) -> set[str] | None:
        with self._listing:
            listed_at, folders = self._listed.get(repository, (float("-inf"), None))
            if self._now() - listed_at >= LISTED_S:
                folders = adapter_folders(repository, self._revisions[repository])
                self._listed[repository] = self._now(), folders
            return folders


def _cached(repository: str, revision: str | None, folder: str) -> str | None:
    """Where the Hub's cache has it, with HF_HUB_OFFLINE."""
    try:
        path = download_adapter(repository, revision, folder)
    except ModelError:
        return None
    return str(path) if (path / CONFIG_NAME).is_file() else None


def _parse_repository(text: str) -> tuple[str, str | None]:
    """Its name and revision. Raises ConfigError."""
    try:
        repository, file, revision = parse_name(text)
    except ModelError:
        file, repository, revision = "?", "", None
    if file:
        raise ConfigError(
            f"--lora-resolver-hub takes ORG/NAME or ORG/NAME@REVISION; got {text:.80}"
        )
    return repository, revision


def make_resolvers(settings: ServerSettings, *, takes_adapters: bool) -> list[AdapterResolver]:
    """In the order in which they search: the folder first, then the hub. Raises ConfigError."""
    for flag, is_set in (
        ("--lora-resolver-dir", settings.lora_resolver_dir),
        ("--lora-resolver-hub", settings.lora_resolver_hub),
        ("--lora-resolvers", settings.lora_resolvers),
    ):
        if is_set and not takes_adapters:
            raise ConfigError(f"{flag} needs --enable-lora")
    resolvers: list[AdapterResolver] = []
    if settings.lora_resolver_dir:
        resolvers.append(FolderResolver(settings.lora_resolver_dir))
    if settings.lora_resolver_hub:
        resolvers.append(HubResolver(settings.lora_resolver_hub))
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
