"""Why a model could not be fetched: a reason the operator knows, and an exit code for scripts."""

from __future__ import annotations

from enum import StrEnum

from octavo_engine.errors import DISK_FULL, ModelError


class FetchReason(StrEnum):
    """As conditions show them."""

    UNAUTHORIZED = "ModelUnauthorized"
    NOT_FOUND = "ModelNotFound"
    REVISION_NOT_FOUND = "ModelRevisionNotFound"
    DIGEST_MISMATCH = "ModelDigestMismatch"
    DISK_FULL = "ModelDiskFull"
    UNREACHABLE = "ModelUnreachable"
    FAILED = "ModelFetchFailed"


EXIT_CODES = {
    FetchReason.FAILED: 1,
    FetchReason.UNAUTHORIZED: 10,
    FetchReason.NOT_FOUND: 11,
    FetchReason.REVISION_NOT_FOUND: 12,
    FetchReason.DIGEST_MISMATCH: 13,
    FetchReason.DISK_FULL: 14,
    FetchReason.UNREACHABLE: 15,
}


class FetchError(ModelError):
    """One sentence with what to do."""

    def __init__(self, reason: FetchReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Passing(FetchError):
    """May be well in a moment; tried again until patience ends."""

    def __init__(self, message: str, *, after_s: float | None = None) -> None:
        super().__init__(FetchReason.UNREACHABLE, message)
        self.after_s = after_s


class Changed(FetchError):
    """The file at the source is not the one that was begun."""

    def __init__(self, name: str) -> None:
        super().__init__(
            FetchReason.FAILED, f"{name} changed at its source while it was fetched; fetch it again"
        )


def of_status(
    status: int, what: str, *, hint: str = "", after_s: float | None = None
) -> FetchError:
    """What an HTTP status means. `hint` says which credentials would help."""
    if status in (401, 403, 407):
        return FetchError(
            FetchReason.UNAUTHORIZED,
            f"{what}: its source answers {status}; {hint or 'check the access'}",
        )
    if status in (404, 410):
        return FetchError(
            FetchReason.NOT_FOUND, f"{what} does not exist ({status}); check the address"
        )
    if status in (408, 425, 429) or status >= 500:
        return Passing(f"{what}: its source answers {status}; try again later", after_s=after_s)
    return FetchError(FetchReason.FAILED, f"{what}: its source answers {status}")


def of_disk(error: OSError, folder: object) -> FetchError:
    if error.errno in DISK_FULL:
        return FetchError(
            FetchReason.DISK_FULL,
            f"the disk under {folder} is full; free some space or use a larger volume, and the "
            "fetch goes on where it was",
        )
    return FetchError(FetchReason.FAILED, f"{folder} cannot be written: {error.strerror or error}")
