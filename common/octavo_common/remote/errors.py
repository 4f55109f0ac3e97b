"""Why a file could not be had: a reason the operator knows, and whether to try again."""

from __future__ import annotations

from enum import StrEnum

from octavo_common.errors import ModelError


class FetchReason(StrEnum):
    """As conditions show them."""

    UNAUTHORIZED = "ModelUnauthorized"
    NOT_FOUND = "ModelNotFound"
    REVISION_NOT_FOUND = "ModelRevisionNotFound"
    DIGEST_MISMATCH = "ModelDigestMismatch"
    DISK_FULL = "ModelDiskFull"
    UNREACHABLE = "ModelUnreachable"
    FAILED = "ModelFetchFailed"


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
