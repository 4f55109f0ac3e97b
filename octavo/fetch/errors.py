"""What ends a fetch: the errors of its parts, and an exit code for scripts."""

from __future__ import annotations

from octavo_common.errors import DISK_FULL
from octavo_common.remote.errors import FetchError as FetchError
from octavo_common.remote.errors import FetchReason as FetchReason
from octavo_common.remote.errors import Passing as Passing
from octavo_common.remote.errors import of_status as of_status

EXIT_CODES = {
    FetchReason.FAILED: 1,
    FetchReason.UNAUTHORIZED: 10,
    FetchReason.NOT_FOUND: 11,
    FetchReason.REVISION_NOT_FOUND: 12,
    FetchReason.DIGEST_MISMATCH: 13,
    FetchReason.DISK_FULL: 14,
    FetchReason.UNREACHABLE: 15,
}


class Changed(FetchError):
    """The file at the source is not the one that was begun."""

    def __init__(self, name: str) -> None:
        super().__init__(
            FetchReason.FAILED, f"{name} changed at its source while it was fetched; fetch it again"
        )


def of_disk(error: OSError, folder: object) -> FetchError:
    if error.errno in DISK_FULL:
        return FetchError(
            FetchReason.DISK_FULL,
            f"the disk under {folder} is full; free some space or use a larger volume, and the "
            "fetch goes on where it was",
        )
    return FetchError(FetchReason.FAILED, f"{folder} cannot be written: {error.strerror or error}")
