"""Bodies, queries and answers of /v1/files and /v1/batches, in OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip


class FileForm(msgspec.Struct, kw_only=True):
    """An upload."""

    file: bytes
    purpose: str  # batch: nothing else here reads files
    expires_after_anchor: str | None = msgspec.field(default=None, name="expires_after[anchor]")
    expires_after_seconds: str | None = msgspec.field(default=None, name="expires_after[seconds]")


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FilesQuery(msgspec.Struct, kw_only=True):
    purpose: str | None = None
    limit: int | None = None
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # id of the last file that was seen


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """When the files that a batch makes are deleted."""

    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True):
    """What to do with a file of requests."""

    input_file_id: str
    endpoint: str  # that of every line
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("failed", "completed", "expired", "cancelled")


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchesQuery(msgspec.Struct, kw_only=True):
    limit: int | None = None
    after: str | None = None  # id of the last batch that was seen
