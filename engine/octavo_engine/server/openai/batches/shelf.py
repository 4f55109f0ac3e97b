"""What of files and batches outlives the server: a folder with a record beside each content."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from octavo_engine.errors import ConfigError, InvalidRequest
from octavo_engine.server.http.errors import HttpError
from octavo_engine.server.openai.batches.shapes import BatchObject, FileObject
from octavo_engine.server.openai.batches.storage import Storage, StoredFileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import IO

    from octavo_engine.server.limits import RequestLimits

T = TypeVar("T", bound=msgspec.Struct)


class FileRecord(msgspec.Struct, kw_only=True):
    """A file, and whose it is."""

    file: FileObject
    owner: str
    is_internal: bool = False  # the results of a message batch: no file that clients see


Api = Literal["openai", "anthropic"]


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, whose it is, and how long what it makes is kept."""

    batch: BatchObject
    owner: str
    keeps_s: int | None
    api: Api = "openai"  # whose clients made it and can see it
    num_unanswered: int = 0  # requests that were expired or cancelled, once it is over


class FileStore:
    """Of one server at a time. Belongs to the event loop, which waits for small writes only.

    files/ID.json and files/ID; batches/ID.json, and while one runs ID.input (the same file under
    another name, so that deleting the upload hurts nobody), ID.output and ID.errors.
    """

    def __init__(
        self,
        folder: str,
        limits: RequestLimits,
        now: Callable[[], float] = time.time,
        *,
        storage: Storage | None = None,
    ) -> None:
        """Raises ConfigError where the folder cannot be used, or another server has it."""
        self.storage = storage or Storage()
        self._files_folder = Path(folder) / "files"
        self._batches_folder = Path(folder) / "batches"
        self._limits = limits
        self.now = now
        try:
            for each in (self._files_folder, self._batches_folder):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(Path(folder) / "lock")
        except OSError as error:
            raise ConfigError(f"--files-dir {folder}: {error.strerror}") from None
        try:
            self.files = self._load(self._files_folder, FileRecord, lambda r: r.file.created_at)
            self.batches = self._load(
                self._batches_folder, BatchRecord, lambda r: r.batch.created_at
            )
            self._drop_remains()
            self._check_contents()
        except (ConfigError, OSError) as error:
            self._lock.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"--files-dir {folder}: {error.strerror}") from None

    def close(self) -> None:
        """Another server may have the folder."""
        self._lock.close()

    # ── files ──

    @property
    def num_bytes(self) -> int:
        return sum(record.file.bytes for record in self.files.values())

    def check_room(self, more: int) -> None:
        """Raises HttpError (413)."""
        if self.num_bytes + more > self._limits.max_stored_file_bytes:
            raise HttpError(
                413,
                f"the files here may take {self._limits.max_stored_file_bytes} bytes together; "
                "delete some",
                code="file_storage_full",
                headers=((b"connection", b"close"),),
            )

    def upload_path(self) -> Path:
        """Where a file can be written before it is one; in the same file system."""
        return self._files_folder / f"{secrets.token_hex(8)}.part"

    def keep(
        self, path: Path, *, file_id: str, name: str, purpose: Literal["batch", "batch_output"],
        owner: str, keeps_s: int | None, is_internal: bool = False,
    ) -> FileObject:  # fmt: skip
        """Makes a file of what was written there."""
        now = int(self.now())
        file = FileObject(
            id=file_id,
            bytes=self.storage.length(path),
            created_at=now,
            expires_at=None if keeps_s is None else now + keeps_s,
            filename=name,
            purpose=purpose,
        )
        record = FileRecord(file=file, owner=owner, is_internal=is_internal)
        self._write(self._files_folder / f"{file.id}.json", record)  # first: one alone is found out
        path.rename(self.content_path(file.id))
        self.files[file.id] = record
        return file

    def content_path(self, file_id: str) -> Path:
        return self._files_folder / file_id

    def file(self, file_id: str, owner: str) -> FileObject:
        """Raises HttpError (404) also for what is another's."""
        self.drop_expired()
        record = self.files.get(file_id)
        if record is None or record.owner != owner or record.is_internal:
            raise HttpError(
                404,
                f"No such File object: {file_id[:128]}",
                param="file_id",
                code="file_not_found",
            )
        return record.file

    def files_of(self, owner: str) -> list[FileObject]:
        """Oldest first."""
        self.drop_expired()
        return [
            record.file
            for record in self.files.values()
            if record.owner == owner and not record.is_internal
        ]

    def drop_file(self, file_id: str) -> None:
        self.files.pop(file_id, None)
        self.content_path(file_id).unlink(missing_ok=True)
        (self._files_folder / f"{file_id}.json").unlink(missing_ok=True)

    def drop_expired(self) -> None:
        now = self.now()
        for file_id, record in list(self.files.items()):
            if record.file.expires_at is not None and record.file.expires_at <= now:
                self.drop_file(file_id)

    # ── batches ──

    def work_path(self, batch: BatchObject, kind: Literal["input", "output", "errors"]) -> Path:
        return self._batches_folder / f"{batch.id}.{kind}"

    def begin(self, record: BatchRecord) -> None:
        """Takes hold of the input."""
        source = self.content_path(record.batch.input_file_id)
        target = self.work_path(record.batch, "input")
        try:
            os.link(source, target)
        except OSError:  # not every file system has second names
            shutil.copyfile(source, target)
        self.batches[record.batch.id] = record
        self.save(record)

    def begin_with(self, record: BatchRecord, source: Path) -> None:
        """The same with an input that is no file of a client's; it is moved."""
        source.rename(self.work_path(record.batch, "input"))
        self.batches[record.batch.id] = record
        self.save(record)

    def save(self, record: BatchRecord) -> None:
        self._write(self._batches_folder / f"{record.batch.id}.json", record)

    def drop_work(self, batch: BatchObject) -> None:
        """What only a running batch needs."""
        for kind in ("input", "output", "errors"):
            self.work_path(batch, kind).unlink(missing_ok=True)

    def batch(self, batch_id: str, owner: str, api: Api = "openai") -> BatchRecord:
        """Raises HttpError (404) also for what is another's."""
        record = self.batches.get(batch_id)
        if record is None or record.owner != owner or record.api != api:
            raise HttpError(
                404,
                f"No batch found with id '{batch_id[:128]}'.",
                param="batch_id",
                code="batch_not_found",
            )
        return record

    def batches_of(self, owner: str) -> list[BatchObject]:
        """Oldest first."""
        return [record.batch for record in self.records_of(owner, "openai")]

    def records_of(self, owner: str, api: Api) -> list[BatchRecord]:
        """Oldest first."""
        return [
            record
            for record in self.batches.values()
            if record.owner == owner and record.api == api
        ]

    def results_of(self, record: BatchRecord) -> list[Path]:
        """The files of answers and of errors of a batch that is over, as far as they are there."""
        self.drop_expired()
        ids = (record.batch.output_file_id, record.batch.error_file_id)
        return [self.content_path(id_) for id_ in ids if id_ is not None and id_ in self.files]

    def drop_batch(self, record: BatchRecord) -> None:
        """Forget one that is over; its results too, where only the batch leads to them."""
        batch = record.batch
        del self.batches[batch.id]
        (self._batches_folder / f"{batch.id}.json").unlink(missing_ok=True)
        if record.api == "anthropic":
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file_id is not None:
                    self.drop_file(file_id)

    def make_room_for_batch(self) -> None:
        """The oldest that are over are forgotten. Raises InvalidRequest where all still run."""
        while len(self.batches) >= self._limits.max_stored_batches:
            over = next((record for record in self.batches.values() if record.batch.is_over), None)
            if over is None:
                raise InvalidRequest(
                    f"{self._limits.max_stored_batches} batches run already; wait for one, or "
                    "cancel one"
                )
            self.drop_batch(over)

    # ── after a restart ──

    def _drop_remains(self) -> None:
        """Of uploads that never ended, and of what was lost half-way."""
        for id_ in [id_ for id_ in self.files if not self.content_path(id_).exists()]:
            self.drop_file(id_)
        for path in self._files_folder.iterdir():
            if path.suffix == ".part" or (path.suffix == "" and path.name not in self.files):
                path.unlink(missing_ok=True)
        running = {id_ for id_, record in self.batches.items() if not record.batch.is_over}
        for path in self._batches_folder.iterdir():
            if path.suffix == ".part" or (path.suffix != ".json" and path.stem not in running):
                path.unlink(missing_ok=True)

    def _check_contents(self) -> None:
        """Raises ConfigError for what these keys do not open: now, not when a client wants it."""
        for folder in (self._files_folder, self._batches_folder):
            for path in folder.iterdir():
                try:
                    self.storage.check(path)
                except StoredFileError as error:
                    raise ConfigError(f"--files-dir: {path}: {error}") from None

    # ── records ──

    def _load(self, folder: Path, kind: type[T], made_at: Callable[[T], int]) -> dict[str, T]:
        """Oldest first. Raises ConfigError that names a record which is none."""
        found: list[tuple[int, int, str, T]] = []
        for path in folder.glob("*.json"):
            if path.stat().st_size == 0:  # the machine stopped before the disk had it
                path.unlink()
                continue
            try:
                self.storage.check(path)
                with self.storage.read(path) as file:
                    record = msgspec.json.decode(file.read(), type=kind)
            except StoredFileError as error:
                raise ConfigError(f"--files-dir: {path}: {error}") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"--files-dir: {path} is not a valid record: {error}") from None
            found.append((made_at(record), path.stat().st_mtime_ns, path.stem, record))
        found.sort(key=lambda entry: entry[:3])
        return {id_: record for _, _, id_, record in found}

    def _write(self, path: Path, record: msgspec.Struct) -> None:
        """Whole or not at all where the process dies. Nothing waits for the disk: streams would
        too."""
        part = path.with_suffix(".part")
        with self.storage.write(part) as file:
            file.write(msgspec.json.encode(record))
        part.replace(path)


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def _locked(path: Path) -> IO[bytes]:
    """Raises ConfigError. The system lets go of it with the process."""
    file = open(path, "ab")  # noqa: SIM115  (held until the shelf is closed)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"--files-dir {path.parent}: another server uses it") from None
    return file
