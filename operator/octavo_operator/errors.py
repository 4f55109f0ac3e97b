"""The operator's exceptions: whose fault each one is, and what follows from it.

OperatorError
├── SpecInvalid            the user's: becomes a condition; no retry until the spec changes
├── SettingsInvalid        the administrator: the operator does not start
├── NameConflict           an object with a child's name is not ours: a condition; never touched
└── ClusterError           the API server's answer, or its absence
    ├── NotFound           404
    ├── Conflict           409: read again, compute again
    ├── Gone               410: list again
    ├── Refused            400, 403, 413, 422: its message is for the user
    └── ClusterUnavailable 401, 429, 5xx, time-outs, no connection: back off and retry
"""

from __future__ import annotations

from typing import Literal

# Why a spec is not accepted: the reason of condition Accepted.
SpecReason = Literal["SpecInvalid", "Unsupported", "UnsupportedVersion", "ServedNameConflict"]


class OperatorError(Exception):
    """Everything this package raises on purpose."""


class SpecInvalid(OperatorError):
    """A field that cannot be served as it is. `field` is its path, such as spec.model.uri.

    `Unsupported`: well-formed, but nothing can carry it out yet. `UnsupportedVersion`: a field or
    value that this operator does not know, as a newer version's resource may have.
    `ServedNameConflict`: the model name belongs to another LLMDeployment.
    """

    def __init__(self, field: str, problem: str, *, reason: SpecReason = "SpecInvalid") -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem
        self.reason: SpecReason = reason


class SettingsInvalid(OperatorError):
    """The operator's own settings."""


class NameConflict(OperatorError):
    """An object that has the name of a child and another owner."""

    def __init__(self, kind: str, name: str, owner: str) -> None:
        held = f"belongs to {owner}" if owner else "has no owner"
        super().__init__(
            f"{kind} {name} exists and {held}; delete or rename it, or rename this LLMDeployment"
        )
        self.kind = kind
        self.name = name


class ClusterError(OperatorError):
    """The API server's message."""

    def __init__(self, message: str, *, status: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status  # of HTTP; None: no answer
        self.reason = reason  # of the Status object, such as AlreadyExists


class NotFound(ClusterError):
    """There is no such object, or no such kind."""


class Conflict(ClusterError):
    """The object has changed, or exists already, or another manager owns a field."""


class Gone(ClusterError):
    """The resource version or continue token is too old."""


class ApiRefused(ClusterError):
    """The request itself is at fault: schema, admission, quota, permission."""


class ClusterUnavailable(ClusterError):
    """No useful answer now; there will be one later."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        reason: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status, reason=reason)
        self.retry_after_s = retry_after_s
