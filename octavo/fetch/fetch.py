"""One fetch: look, lock, list, download, check, mark."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.fetch import local, parts
from octavo.fetch.download import Downloader
from octavo.fetch.errors import FetchError, FetchReason, Passing, of_disk
from octavo.fetch.folder import FolderLock, FolderMark, read_mark, write_mark
from octavo.fetch.transfer import RANGE_BYTES, Means, TransferPatience
from octavo_common.remote.credentials import Credentials
from octavo_common.remote.http import Http

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo.fetch.parts import StoredPart
    from octavo.fetch.progress import FetchProgress
    from octavo.fetch.source import ModelSource, SourceListing

SCHEMES = ("hf", "s3", "gs", "oci", "http", "https", "pvc", "file", "demo")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """The desired state."""

    uri: str
    folder: Path
    revision: str = ""  # of hf://
    digest: str = ""  # sha256:…; digest that the model must have
    stall_s: float = 30.0
    num_workers: int = 4
    range_bytes: int = RANGE_BYTES
    patience: TransferPatience = field(default_factory=TransferPatience)


def fetch(
    request: FetchRequest,
    progress: FetchProgress,
    *,
    environ: Mapping[str, str] = os.environ,
    sleep: Callable[[float], object] | None = None,
) -> FolderMark:
    """What lies in the folder now. Raises FetchError."""
    folder = request.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (mark := _finished(request)) is not None:
            return mark
        lock = FolderLock(
            folder, on_wait=lambda holder: progress.report(phase="waiting", holder=holder)
        )
        with lock:
            if (mark := _finished(request)) is not None:  # the other one has done it
                return mark
            progress.write_into(folder)
            return _fetch(request, progress, lock, environ, sleep)
    except OSError as error:
        raise of_disk(error, folder) from error


def open_source(request: FetchRequest, http: Http, environ: Mapping[str, str]) -> ModelSource:
    """Raises FetchError for what is no URI."""
    scheme, separator, location = request.uri.partition("://")
    if not separator or scheme not in SCHEMES or not location:
        known = ", ".join(f"{known}://" for known in SCHEMES)
        raise FetchError(
            FetchReason.FAILED, f"{request.uri[:200]} does not start with one of {known}"
        )
    if ".." in location.split("/"):
        raise FetchError(FetchReason.FAILED, f"{request.uri[:200]} must not have .. in its path")
    if request.revision and scheme != "hf":
        raise FetchError(FetchReason.FAILED, "--revision applies to hf:// only; name it in the URI")
    credentials = Credentials(environ)
    match scheme:
        case "hf":
            from octavo.fetch.hub import HuggingFaceHub

            return HuggingFaceHub(location, request.revision, http, credentials)
        case "s3":
            from octavo.fetch.s3 import S3

            return S3(location, http, credentials)
        case "gs":
            from octavo.fetch.gcs import Gcs

            return Gcs(location, http, credentials)
        case "oci":
            from octavo.fetch.oci import Oci

            return Oci(location, http, credentials)
        case "http" | "https":
            from octavo.fetch.web import Web

            return Web(request.uri, http, credentials)
        case "pvc":
            return local.claim(location)
        case "demo":
            from octavo.fetch.demo import ensure_demo

            return local.LocalFiles(ensure_demo(location))
        case _:
            return local.LocalFiles(Path(location))


def _finished(request: FetchRequest) -> FolderMark | None:
    """Complete already, and the requested model. Raises FetchError where it is something else."""
    mark = read_mark(request.folder)
    if mark is None:
        return None
    if not mark.is_of(request.uri, request.revision):
        raise FetchError(
            FetchReason.FAILED,
            f"{request.folder} holds {mark.uri} already; fetch into another folder",
        )
    if request.digest and request.digest not in (mark.digest, content_digest(mark.files)):
        raise _wrong_digest(request.digest, mark.digest)
    return mark


def _fetch(
    request: FetchRequest,
    progress: FetchProgress,
    lock: FolderLock,
    environ: Mapping[str, str],
    sleep: Callable[[float], object] | None,
) -> FolderMark:
    http = Http(stall_s=request.stall_s, environ=environ)
    source = open_source(request, http, environ)
    listing = _list(source, request.patience, sleep or time.sleep)
    sizes = [file.size for file in listing.files]
    total = sum(size for size in sizes if size is not None)
    progress.begin("fetching", total=total if None not in sizes else None, files=len(sizes))
    _check_room(request.folder, listing)
    means = Means(
        http=http, progress=progress, num_workers=request.num_workers,
        range_bytes=request.range_bytes, patience=request.patience, sleep=sleep,
    )  # fmt: skip
    downloader = Downloader(request.folder, means)
    stored = []
    for file in listing.files:
        lock.check()
        if (found := downloader.fetch(file)) is not None:
            stored.append(found)
        progress.file_done()
    lock.check()
    digest = listing.digest or content_digest(stored)
    if request.digest and request.digest not in (digest, content_digest(stored)):
        for each in stored:  # it must not pass for the requested model
            (request.folder / each.name).unlink(missing_ok=True)
        raise _wrong_digest(request.digest, digest)
    mark = FolderMark(
        uri=request.uri,
        asked_revision=request.revision,
        revision=listing.revision,
        digest=digest,
        files=tuple(stored),
    )
    write_mark(request.folder, mark)
    parts.remove(request.folder)
    return mark


def content_digest(files: Sequence[StoredPart]) -> str:
    """Of one file its own SHA-256; of several that of the lines that `sha256sum *` prints."""
    if len(files) == 1:
        return f"sha256:{files[0].sha256}"
    lines = [f"{file.sha256}  {file.name}\n" for file in sorted(files, key=lambda f: f.name)]
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def _list(
    source: ModelSource, patience: TransferPatience, sleep: Callable[[float], object]
) -> SourceListing:
    failures = 0
    while True:
        try:
            return source.find()
        except Passing as error:
            failures += 1
            if failures >= patience.num_failures:
                raise FetchError(error.reason, str(error)) from None
            sleep(patience.pause_s(failures, error.after_s))


def _check_room(folder: Path, listing: SourceListing) -> None:
    """Better now than after an hour."""
    missing = sum(
        file.size
        for file in listing.files
        if file.size is not None and not (folder / file.name).exists()
    )
    free = shutil.disk_usage(folder).free + _parts_bytes(folder)
    if missing > free:
        raise FetchError(
            FetchReason.DISK_FULL,
            f"the model needs {missing / 2**30:.2f} GiB more, and {folder} has "
            f"{free / 2**30:.2f} GiB left; use a larger volume",
        )


def _parts_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob(f"{parts.FOLDER}/*.part"))


def _wrong_digest(expected: str, found: str) -> FetchError:
    return FetchError(
        FetchReason.DIGEST_MISMATCH,
        f"the model's digest is {found}, not {expected}; correct spec.model.digest if it is meant",
    )
