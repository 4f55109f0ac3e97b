"""Runs the batches of a server beside everything else it does, and again after a restart."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest, machine_fault
from octavo_engine.server.http.errors import NO_SPACE, machine_error
from octavo_engine.server.openai.batches.lines import (
    CANCELLED,
    EXPIRED,
    URLS,
    BadLine,
    BatchTask,
    FinishedLine,
    LineReader,
    cancelled,
    done_so_far,
    expired,
    unanswered,
)
from octavo_engine.server.openai.batches.run import run
from octavo_engine.server.openai.batches.shapes import BatchError, BatchErrors, BatchObject
from octavo_engine.server.openai.batches.shelf import BatchRecord, new_file_id

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path
    from typing import Literal

    from starlette.types import ASGIApp

    from octavo_engine.server.limits import RequestLimits
    from octavo_engine.server.openai.batches.shapes import BatchRequest
    from octavo_engine.server.openai.batches.shelf import FileStore

logger = logging.getLogger("octavo.server.batches")

MAX_SHOWN_ERRORS = 100  # of a file whose lines are no requests
_BROKEN = "The server could not read or write."
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
_MAX_WINDOW_H = 7 * 24
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


class BatchRunner:
    """Belongs to the event loop. Each batch that is not over has a task."""

    def __init__(
        self, shelf: FileStore, app: ASGIApp, limits: RequestLimits, concurrency: int
    ) -> None:
        self.shelf = shelf
        self._app = app  # checks no key: that of the batch's maker was checked
        self._limits = limits
        self._concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False

    def start(self) -> None:
        """Goes on with what an earlier server left."""
        for record in list(self.shelf.batches.values()):
            if record.batch.status == "cancelling":
                self._end_cancelled(record)
            elif not record.batch.is_over:
                self._begin(record)

    async def stop(self) -> None:
        """What is not answered stays for the next server."""
        self._is_stopping = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.shelf.close()

    def create(self, request: BatchRequest, owner: str) -> BatchObject:
        """Raises RequestError."""
        hours = _check(request)
        file = self.shelf.file(request.input_file_id, owner)
        if file.purpose != "batch":
            raise InvalidRequest(
                "input_file_id must be a file that was uploaded with the purpose batch",
                param="input_file_id",
            )
        self.shelf.make_room_for_batch()
        now = int(self.shelf.now())
        after = request.output_expires_after
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + hours * 3600,
            metadata=request.metadata,
        )
        keeps_s = None if after is None else after.seconds
        record = BatchRecord(batch=batch, owner=owner, keeps_s=keeps_s)
        self.shelf.begin(record)
        self._begin(record)
        return batch

    def start_batch(self, record: BatchRecord, source: Path) -> None:
        """With an input that was checked, and is no file of a client's; it is moved."""
        self.shelf.begin_with(record, source)
        self._begin(record)

    def cancel(self, record: BatchRecord) -> None:
        """What runs of it is aborted; what is answered is kept. One that is over stays so."""
        if not record.batch.is_over and record.batch.status != "cancelling":
            self._turn(record, "cancelling")
            self._tasks[record.batch.id].cancel()

    # ── one batch ──

    def _begin(self, record: BatchRecord) -> None:
        self._spawn(record, self._work(record), lambda _: self._ended(record))

    def _spawn(
        self, record: BatchRecord, work: Coroutine[Any, Any, None],
        ended: Callable[[asyncio.Task[None]], None],
    ) -> None:  # fmt: skip
        task = asyncio.create_task(work, name=f"octavo-{record.batch.id}")
        self._tasks[record.batch.id] = task
        task.add_done_callback(ended)

    def _ended(self, record: BatchRecord) -> None:
        """Also where it was cancelled before its first step."""
        del self._tasks[record.batch.id]
        if record.batch.status == "cancelling":
            self._end_cancelled(record)

    def _end_cancelled(self, record: BatchRecord) -> None:
        if record.api == "openai":  # its clients see in the counts what was not answered
            self._finish(record, "cancelled")
            return
        if self._is_stopping:
            return  # the next server does it

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[record.batch.id]

        self._spawn(record, self._write_cancelled(record), ended)

    async def _write_cancelled(self, record: BatchRecord) -> None:
        try:
            if not (record.batch.output_file_id or record.batch.error_file_id):
                await asyncio.to_thread(self._write_unanswered, record, CANCELLED)
            self._finish(record, "cancelled")
        except (OSError, ValueError) as error:
            self._break(record, error)

    async def _work(self, record: BatchRecord) -> None:
        batch = record.batch
        left_s = batch.expires_at - self.shelf.now()
        try:
            if batch.output_file_id or batch.error_file_id:  # its answers are becoming files
                is_late = batch.status == "in_progress" and left_s <= 0
                self._finish(record, "expired" if is_late else "completed")
                return
            try:
                async with asyncio.timeout(max(left_s, 0.0)):
                    await self._answer(record)
            except TimeoutError:
                await asyncio.to_thread(self._write_unanswered, record, EXPIRED)
                self._finish(record, "expired")
            else:
                if not batch.is_over and batch.status != "cancelling":
                    self._finish(record, "completed")
        except (OSError, ValueError) as error:  # a full disk, say: nobody else's work is harmed
            self._break(record, error)

    async def _answer(self, record: BatchRecord) -> None:
        batch, storage = record.batch, self.shelf.storage
        source = self.shelf.work_path(batch, "input")
        if batch.status == "validating":
            limit = self._limits.max_batch_requests
            total, errors = await asyncio.to_thread(self._checked, source, batch.endpoint, limit)
            if errors:
                self._fail(record, errors)
                return
            batch.request_counts.total = total
            self._turn(record, "in_progress")
        good, bad = await asyncio.to_thread(self._done, batch)
        # Here, not in the thread: one that outlives its batch's time must not count any more.
        batch.request_counts.completed, batch.request_counts.failed = len(good.ids), len(bad.ids)
        done = FinishedLine(good.ids | bad.ids)
        with (
            storage.read(source) as lines,
            storage.append(self.shelf.work_path(batch, "output")) as output,
            storage.append(self.shelf.work_path(batch, "errors")) as errors_file,
        ):

            def write(line: bytes, is_good: bool) -> None:
                file = output if is_good else errors_file
                file.write(line)
                file.flush()  # what is answered stays answered, whatever happens next
                if is_good:
                    batch.request_counts.completed += 1
                else:
                    batch.request_counts.failed += 1

            entries = LineReader(done, endpoint=batch.endpoint).read(lines)
            await run(
                self._app, entries, write, concurrency=self._concurrency, places=self._places,
                max_tries=None, is_background=True,
            )  # fmt: skip

    def _checked(self, path: Path, endpoint: str, limit: int) -> tuple[int, list[BatchError]]:
        """How many requests there are, and what is wrong with lines. Not on the event loop."""
        total, errors = 0, list[BatchError]()
        with self.shelf.storage.read(path) as lines:
            for entry in LineReader(endpoint=endpoint).read(lines):
                total += 1
                if isinstance(entry, BadLine) and len(errors) < MAX_SHOWN_ERRORS:
                    message = f"line {entry.number}: {entry.problem}"
                    errors.append(_error("invalid_line", message, entry.number))
        if not total:
            return 0, [_error("empty_file", "The file has no requests.")]
        if total > limit:
            message = f"The file has {total} requests; {limit} is the most that a batch may have."
            return total, [_error("too_many_requests", message)]
        return total, errors

    def _done(self, batch: BatchObject) -> tuple[FinishedLine, FinishedLine]:
        """What an earlier server has answered, well and with an error."""
        good, bad = FinishedLine(), FinishedLine()
        if (path := self.shelf.work_path(batch, "output")).exists():
            good = done_so_far(path, self.shelf.storage)
        if (path := self.shelf.work_path(batch, "errors")).exists():
            bad = done_so_far(path, self.shelf.storage)
        return good, bad

    def _write_unanswered(self, record: BatchRecord, code: str) -> None:
        """A line for each request without an answer."""
        line_of = expired if code == EXPIRED else cancelled
        batch, storage = record.batch, self.shelf.storage
        if batch.status == "validating":
            return
        good, bad = self._done(batch)
        done, failed = FinishedLine(good.ids | bad.ids), len(bad.ids)
        with (
            storage.read(self.shelf.work_path(batch, "input")) as lines,
            storage.append(self.shelf.work_path(batch, "errors")) as errors,
        ):
            for entry in LineReader(done, endpoint=batch.endpoint).read(lines):
                if isinstance(entry, BatchTask):
                    errors.write(line_of(entry))
                    failed += 1
        batch.request_counts.completed, batch.request_counts.failed = len(good.ids), failed
        record.num_unanswered = unanswered(self.shelf.work_path(batch, "errors"), storage)

    def _finish(
        self, record: BatchRecord, status: Literal["completed", "expired", "cancelled"]
    ) -> None:
        """Its answers become files. Each part can be done again after a crash in the midst."""
        batch = record.batch
        output, errors = (
            self.shelf.work_path(batch, "output"),
            self.shelf.work_path(batch, "errors"),
        )
        if batch.output_file_id is None and batch.error_file_id is None:
            batch.output_file_id = new_file_id() if _size(output) else None
            batch.error_file_id = new_file_id() if _size(errors) else None
        if status == "completed" and batch.status != "finalizing":
            self._turn(record, "finalizing")
        else:
            self.shelf.save(record)
        for path, file_id, kind in (
            (output, batch.output_file_id, "output"),
            (errors, batch.error_file_id, "errors"),
        ):
            if file_id is not None and path.exists():
                self.shelf.keep(
                    path, file_id=file_id, name=f"{batch.id}_{kind}.jsonl", purpose="batch_output",
                    owner=record.owner, keeps_s=record.keeps_s,
                    is_internal=record.api == "anthropic",
                )  # fmt: skip
        self._turn(record, status)
        self.shelf.drop_work(batch)

    def _break(self, record: BatchRecord, error: OSError | ValueError) -> None:
        """Ends a batch whose files could not be read or written."""
        fields: dict[str, object] = {"batch": record.batch.id}
        if problem := machine_fault(error):
            logger.error("A batch failed", extra=fields | {"error": problem})
        else:
            logger.exception("Unhandled error in batch", extra=fields)
        is_full = machine_error(error).code == "disk_full"
        code, text = ("disk_full", NO_SPACE) if is_full else ("internal_error", _BROKEN)
        self._fail(record, [_error(code, text)])

    def _fail(self, record: BatchRecord, errors: list[BatchError]) -> None:
        record.batch.errors = BatchErrors(object="list", data=errors)
        self.shelf.drop_work(record.batch)  # first: on a full disk the record needs the room
        try:
            self._turn(record, "failed")
        except OSError as error:  # clients see how it ended until the server ends
            logger.error(
                "The state of a batch could not be stored",
                extra={"batch": record.batch.id, "error": error.strerror},
            )

    def _turn(self, record: BatchRecord, status: Any) -> None:
        """Into another status, with its time; on disk too."""
        batch = record.batch
        batch.status = status
        setattr(batch, f"{status}_at", int(self.shelf.now()))
        self.shelf.save(record)
        logger.info("Batch status changed", extra={"batch": batch.id, "status": status})


def _check(request: BatchRequest) -> int:
    """The hours that the batch may take. Raises InvalidRequest."""
    if request.endpoint not in URLS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(URLS)}", param="endpoint")
    window = _WINDOW.fullmatch(request.completion_window)
    hours = int(window[1]) if window else 0
    if not 1 <= hours <= _MAX_WINDOW_H:
        raise InvalidRequest(
            f"completion_window must be a number of hours such as 24h, {_MAX_WINDOW_H}h at most",
            param="completion_window",
        )
    metadata = request.metadata or {}
    if len(metadata) > _MAX_METADATA or any(
        len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS
        for key, value in metadata.items()
    ):
        raise InvalidRequest(
            f"metadata must be at most {_MAX_METADATA} entries of at most {_MAX_KEY_CHARS} "
            f"characters to {_MAX_VALUE_CHARS}",
            param="metadata",
        )
    after = request.output_expires_after
    if after is not None:
        check_expiry(after.seconds, "output_expires_after.seconds")
    return hours


def check_expiry(seconds: int, param: str) -> None:
    """Raises InvalidRequest. OpenAI's bounds."""
    if not 3600 <= seconds <= 2592000:
        raise InvalidRequest(
            f"{param} must be between 3600 and 2592000; got {seconds}", param=param
        )


def _error(code: str, message: str, line: int | None = None) -> BatchError:
    return BatchError(code=code, message=message, param=None, line=line)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
