"""What every source of models is: a list of files, and how each is read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from octavo.fetch.errors import FetchError, FetchReason
from octavo_engine.weights.gguf_parts import all_parts, missing_parts, models_among, part_name
from octavo_engine.weights.hub import IGNORED, MODEL

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping
    from pathlib import Path

    from octavo_common.remote.http import Sign

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+ -]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MD5 = re.compile(r"[0-9a-f]{32}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a model. Its name becomes a path, and has been checked."""

    name: str
    url: str = ""
    path: Path | None = None  # on this machine already
    size: int | None = None
    sha256: str = ""
    md5: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    sign: Sign | None = None
    hint: str = ""  # which credentials would help
    is_optional: bool = False  # 404 is fine

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise FetchError(
                FetchReason.FAILED,
                f"{self.name[:100]!r} is not a plain file name; it is not written",
            )
        if self.sha256 and not _SHA256.fullmatch(self.sha256):
            raise FetchError(
                FetchReason.FAILED, f"{self.name}: its source names a digest that is none"
            )
        if self.md5 and not _MD5.fullmatch(self.md5):
            raise FetchError(
                FetchReason.FAILED, f"{self.name}: its source names an MD5 that is none"
            )


@dataclass(frozen=True, slots=True)
class SourceListing:
    """All files of a model at one revision."""

    files: tuple[RemoteFile, ...]
    revision: str = ""  # what the source calls this very state, such as a commit
    digest: str = ""  # sha256:… that the source itself gives to the whole


class ModelSource(Protocol):
    def find(self) -> SourceListing:
        """Raises FetchError."""


def choose(names: Iterable[str], where: str) -> list[str]:
    """Those a model needs: safetensors with all that belongs to them, else the one .gguf, with all
    its parts. Never pickles, never code. Raises FetchError."""
    known = sorted(name for name in names if "/" not in name)
    wanted = [
        name
        for name in known
        if any(fnmatchcase(name, pattern) for pattern in MODEL)
        and not any(fnmatchcase(name, pattern) for pattern in IGNORED)
    ]
    if any(name.endswith(".safetensors") for name in wanted):
        return wanted
    ggufs = [name for name in known if name.endswith(".gguf")]
    models = models_among(ggufs)
    if len(models) == 1:
        return parts_of(models[0], ggufs, where)
    if models:
        shown = ", ".join(models[:20])
        raise FetchError(
            FetchReason.FAILED,
            f"{where} has several .gguf files; name one of them in the URI: {shown}",
        )
    if any(name.endswith(_PICKLES) for name in known):
        raise FetchError(
            FetchReason.FAILED,
            f"{where} has pickled weights only, which can run code and are never read: convert "
            "them to safetensors",
        )
    if not known:
        raise FetchError(FetchReason.NOT_FOUND, f"{where} has no files; check the address")
    raise FetchError(FetchReason.FAILED, f"{where} has neither *.safetensors nor a .gguf file")


def parts_of(name: str, names: Container[str], where: str) -> list[str]:
    """The file, or all parts of the model that it is a part of, which are among `names`. Raises
    FetchError."""
    parts = all_parts(name)
    missing = [part for part in parts if part not in names]
    if not missing:
        return list(parts)
    if len(parts) == 1:
        raise FetchError(FetchReason.NOT_FOUND, f"{where} has no file {name}; check the address")
    raise FetchError(FetchReason.NOT_FOUND, missing_parts(missing, len(parts), where))


def common_prefix(path: str) -> str:
    """With which the names of all parts of the model begin that this file belongs to."""
    part = part_name(path)
    return path if part is None else f"{part.stem}-"


def is_single(path: str) -> bool:
    """Whether a URI names one file rather than a folder."""
    return path.endswith((".gguf", ".safetensors"))
