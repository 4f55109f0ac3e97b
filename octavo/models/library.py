"""The models on this machine: what a name means, where its files are, how they come and go."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from octavo.fetch.folder import FolderLock, read_mark
from octavo.models.catalogue import catalogue, find_model, unknown_name
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.weights.demo import DEMO_MODELS, demo_folder, locate_demo
from octavo_engine.weights.hub import is_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from octavo.fetch.progress import FetchProgress
    from octavo.local.home import Home
    from octavo.models.catalogue import CatalogueModel

_DEMO, _HUB = "demo://", "hf://"


@dataclass(frozen=True, slots=True)
class ModelName:
    """What was typed, as an address. Equal addresses have equal names."""

    name: str
    uri: str
    entry: CatalogueModel | None = None


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model whose files are all here."""

    name: str
    uri: str
    path: Path
    num_bytes: int
    fetched_at: float  # seconds since 1970


def parse_model_name(text: str) -> ModelName:
    """Of a short name, ORG/NAME, or a URI. Raises ConfigError that names what is near."""
    if (entry := find_model(text)) is not None:
        return ModelName(entry.name, entry.uri, entry)
    uri = text if "://" in text else f"{_HUB}{text}"
    if uri.startswith(_HUB) and not is_repository(uri.removeprefix(_HUB)):
        raise ConfigError(f"{unknown_name(text)} ORG/NAME nor a URI such as hf://ORG/NAME")
    listed = next((model for model in catalogue() if model.uri == uri), None)
    if listed is not None:
        return ModelName(listed.name, listed.uri, listed)
    return ModelName(uri.removeprefix(_HUB), uri)


class ModelLibrary:
    """Folders under $OCTAVO_HOME, one for each model; demo models where `octavo fetch` has them."""

    def __init__(self, home: Home) -> None:
        self._root = home.models / "library"

    def find(self, model: ModelName) -> StoredModel | None:
        """None where it is not here, or not whole."""
        if model.uri.startswith(_DEMO):
            return _stored_demo(model)
        folder = self._folder(model)
        mark = read_mark(folder)
        if mark is None or mark.uri != model.uri:
            return None
        size = sum(file.size for file in mark.files)
        return StoredModel(model.name, model.uri, folder, size, folder.stat().st_mtime)

    def stored(self) -> list[StoredModel]:
        """By name."""
        names = [ModelName(model.name, model.uri) for model in catalogue()]
        known = {name.name for name in names}
        if self._root.is_dir():
            for folder in self._root.iterdir():
                name, mark = unquote(folder.name), read_mark(folder)
                if mark is not None and name not in known:
                    names.append(ModelName(name, mark.uri))
        found = (self.find(name) for name in names)
        return sorted((each for each in found if each is not None), key=lambda each: each.name)

    def pull(self, model: ModelName, progress: FetchProgress) -> StoredModel:
        """Fetches what is missing. Raises FetchError."""
        from octavo.fetch.demo import ensure_demo
        from octavo.fetch.fetch import FetchRequest, fetch

        if model.uri.startswith(_DEMO):
            progress.report(phase="fetching")
            ensure_demo(model.uri.removeprefix(_DEMO))
        else:
            fetch(FetchRequest(uri=model.uri, folder=self._folder(model)), progress)
        stored = self.find(model)
        if stored is None:
            raise ModelError(f"{model.name} was removed while it was fetched; pull it again")
        return stored

    def remove(self, model: ModelName, *, on_wait: Callable[[str], None]) -> int:
        """The number of bytes that were freed. Raises ConfigError where there is nothing to
        remove, or the files belong to a package."""
        if model.uri.startswith(_DEMO):
            folder = demo_folder(model.uri.removeprefix(_DEMO))
            if not folder.exists() and (stored := self.find(model)) is not None:
                package = DEMO_MODELS[model.uri.removeprefix(_DEMO)].package
                raise ConfigError(
                    f"{model.name} is part of an installed package ({stored.path}): remove it with "
                    f"pip uninstall {package}"
                )
        else:
            folder = self._folder(model)
        if not folder.exists():
            raise ConfigError(f"{model.name} is not on this machine; octavo list shows what is")
        size = _size_of(folder)
        if model.uri.startswith(_DEMO):
            shutil.rmtree(folder)
            return size
        with FolderLock(folder, on_wait=on_wait):  # not under a fetch that writes into it
            shutil.rmtree(folder)
        return size

    def _folder(self, model: ModelName) -> Path:
        return self._root / quote(model.name, safe=":@+")


def _stored_demo(model: ModelName) -> StoredModel | None:
    try:
        path = locate_demo(model.uri.removeprefix(_DEMO))
    except ModelError:
        return None
    return StoredModel(model.name, model.uri, path, _size_of(path), path.stat().st_mtime)


def _size_of(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
