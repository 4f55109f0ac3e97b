"""Models on this machine: file://, and the volume of a pvc:// that is mounted."""

from __future__ import annotations

from pathlib import Path

from octavo.fetch.errors import FetchError, FetchReason
from octavo.fetch.source import RemoteFile, SourceListing, choose, parts_of
from octavo_engine.weights.gguf_parts import part_paths

CLAIM_MOUNT = Path("/var/lib/octavo/claim")  # where the operator mounts spec.model's claim


class LocalFiles:
    """A folder, or one .gguf with all its parts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self) -> SourceListing:
        path = self._path
        try:
            if path.is_dir():
                names = [each.name for each in path.iterdir() if each.is_file()]
                return SourceListing(tuple(_file(path / name) for name in choose(names, str(path))))
            if path.is_file():
                names = [each.name for each in part_paths(path) if each.is_file()]
                names = parts_of(path.name, names, str(path.parent))
                return SourceListing(tuple(_file(path.with_name(name)) for name in names))
        except PermissionError:
            raise FetchError(
                FetchReason.UNAUTHORIZED, f"{path} may not be read by this user"
            ) from None
        raise FetchError(FetchReason.NOT_FOUND, f"{path} does not exist; check the path")


def claim(location: str) -> LocalFiles:
    """`CLAIM/PATH`: only the path matters where the claim is mounted."""
    inside = location.partition("/")[2]
    path = CLAIM_MOUNT / inside
    if ".." in Path(inside).parts or not CLAIM_MOUNT.is_dir():
        raise FetchError(
            FetchReason.NOT_FOUND,
            f"pvc://{location}: no claim is mounted at {CLAIM_MOUNT}; on this machine use file://",
        )
    return LocalFiles(path)


def _file(path: Path) -> RemoteFile:
    return RemoteFile(path.name, path=path, size=path.stat().st_size)
