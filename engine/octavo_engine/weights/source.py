"""From a model reference to files on this machine: a folder, a .gguf, the hub, a demo model."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo_engine.errors import ModelError, NoSuchModel
from octavo_engine.weights.demo import locate_demo
from octavo_engine.weights.gguf_config import gguf_config, gguf_generation_config
from octavo_engine.weights.gguf_parts import models_among, open_gguf
from octavo_engine.weights.json_file import read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from octavo_engine.weights.gguf import GGUFFile

logger = logging.getLogger(__name__)

_SCHEMES = "a folder, a .gguf file, file://PATH, hf://ORG/NAME[@REV], ORG/NAME, demo://NAME"
_LONGEST = 4096  # characters; no path may be longer


@dataclass(frozen=True)
class ModelFiles:
    """A model's files and what they say about it."""

    reference: str
    path: Path  # a folder, or a .gguf file: the first, where a model is split into several
    kind: Literal["safetensors", "gguf"]
    config: dict[str, Any]  # shaped like Hugging Face's config.json, also for GGUF
    generation_config: dict[str, Any]
    gguf: GGUFFile | None = field(default=None, repr=False, compare=False)
    download_dir: str | None = None  # where the Hub's files are, if not in its own cache

    @property
    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """The tokenizer's source where there is no tokenizer.json."""
        return None if self.gguf is None else self.gguf.metadata

    def with_overrides(self, overrides: Mapping[str, Any]) -> ModelFiles:
        """The same files with these fields in place of those of config.json."""
        return dataclasses.replace(self, config=self.config | dict(overrides))

    def with_tokenizer(self, reference: str) -> ModelFiles:
        """The files of the tokenizer that the user named instead of the model's own."""
        path = _fetch(reference, revision=None, download_dir=self.download_dir, tokenizer_only=True)
        gguf = open_gguf(path) if path.suffix == ".gguf" else None
        kind: Literal["safetensors", "gguf"] = "safetensors" if gguf is None else "gguf"
        return dataclasses.replace(self, reference=reference, path=path, kind=kind, gguf=gguf)


def resolve_model(
    reference: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    with_code: bool = False,
) -> ModelFiles:
    """The model's files, fetched if need be; raises ModelError that says what was looked for.

    `progress(bytes_done, bytes_total)` follows a download, which has the repository's Python only
    `with_code`.
    """
    path = _fetch(
        reference,
        revision=revision,
        download_dir=download_dir,
        progress=progress,
        with_code=with_code,
    )
    try:
        files = _described(reference, path)
    except OSError as error:
        raise ModelError(
            f"{error.filename or path} cannot be read: {error.strerror or error}; check who may "
            "read the model's folder and its files"
        ) from None
    return dataclasses.replace(files, download_dir=download_dir)


def locate(reference: str) -> Path:
    """The folder or file of demo://NAME or file://PATH. Raises ModelError."""
    return _fetch(reference, revision=None)


def _described(reference: str, path: Path) -> ModelFiles:
    """The files at a path, and what they say. Raises ModelError and OSError."""
    if path.is_file():
        return _of_gguf(reference, path)
    config_file = path / "config.json"
    if not config_file.exists():
        return _folder_of_gguf(reference, path)
    config = read_json_object(config_file)
    return ModelFiles(reference, path, "safetensors", config, _generation_config(path))


def _of_gguf(reference: str, path: Path) -> ModelFiles:
    gguf = open_gguf(path)
    config, generation = gguf_config(gguf), gguf_generation_config(gguf)
    return ModelFiles(reference, gguf.path, "gguf", config, generation, gguf)


def _folder_of_gguf(reference: str, folder: Path) -> ModelFiles:
    found = sorted(folder.glob("*.gguf"))
    if not found:
        os.listdir(folder)  # glob passes over what may not be read
        raise ModelError(f"{folder} is not a model: it has neither config.json nor a .gguf file")
    names = models_among(path.name for path in found)
    if len(names) > 1:
        shown = ", ".join(names[:20])
        raise ModelError(f"{folder} has several .gguf files; name one of them: {shown}")
    return _of_gguf(reference, found[0])


def _generation_config(folder: Path) -> dict[str, Any]:
    """Defaults only: a model without them, or with broken ones, is as good as any other."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        return read_json_object(path)
    except ModelError as error:
        logger.warning("Went on without the model's sampling defaults: %s", error)
        return {}


def _fetch(
    reference: str,
    *,
    revision: str | None,
    download_dir: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    tokenizer_only: bool = False,
    with_code: bool = False,
) -> Path:
    """A folder or a file that exists."""
    if not reference or "\0" in reference or len(reference) > _LONGEST:
        raise ModelError(f"model reference {reference[:80]!r} is not one of: {_SCHEMES}")
    scheme, separator, rest = reference.partition("://")
    if separator and scheme == "file":
        return _local(rest)
    if separator and scheme == "demo":
        return locate_demo(rest)
    name = rest if separator else reference
    if (separator and scheme == "hf") or (not separator and _is_of_hub(name)):
        from octavo_engine.weights.hub import download

        return download(
            name,
            revision,
            download_dir=download_dir,
            progress=progress,
            tokenizer_only=tokenizer_only,
            with_code=with_code,
        )
    if not separator:
        return _local(reference)
    raise ModelError(f"{reference}: unknown scheme {scheme}://; a model is {_SCHEMES}")


def _is_of_hub(reference: str) -> bool:
    # A folder wins over a hub repository of the same name: what is here needs no network.
    if _exists(Path(reference).expanduser()):
        return False
    from octavo_engine.weights.hub import is_repository

    return is_repository(reference)


def _local(reference: str) -> Path:
    path = Path(reference).expanduser()
    if not _exists(path):
        raise NoSuchModel(
            f"{path} does not exist (looked for a folder or file at {path.absolute()}); "
            f"a model is {_SCHEMES}"
        )
    if path.is_dir():
        return path
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(
            f"{path} is a pickle, which can run code and is never read: convert it to safetensors"
        )
    if path.suffix not in (".gguf", ".json"):
        raise ModelError(
            f"{path} is not a .gguf file; of safetensors weights, name the folder "
            f"({path.parent.absolute()})"
        )
    return path


def _exists(path: Path) -> bool:
    """False also for names that no file can have, and where we may not look."""
    try:
        return path.exists()
    except OSError:
        return False
