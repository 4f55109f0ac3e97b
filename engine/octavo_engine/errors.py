"""Everything that can go wrong, drawn once. Each error says whose fault it is and what to do.

OctavoError
├── ConfigError               the operator's settings: a flag, a file, memory that is not there
│   ├── ExtensionMissing        the compiled part was not built; an ImportError too
├── ModelError                the model's files: missing, truncated, hostile, unsupported
├── WorkerLost                another process of this engine ended or hangs; the core ends too
├── GatherFailed              the same, as a rank sees it that does not know which; rank 0 does
├── DeviceLost                the GPU answers nothing but errors; the core ends too
└── RequestError              the caller's request; carries status, code and the field's name
    ├── InvalidRequest          400
    ├── ContextLengthExceeded   400, both numbers
    ├── ModelUnknown            404
    ├── QueueFull               503, Retry-After
    ├── DeadlineExceeded        504
    ├── GenerationFailed        500: NaN in this request's logits; no other is touched
    └── EngineDead              503: the engine core is gone or hung; it is being restarted
"""

from __future__ import annotations

import errno
import os

from octavo_common.errors import DISK_FULL as DISK_FULL
from octavo_common.errors import ModelError as ModelError
from octavo_common.errors import OctavoError as OctavoError

_OF_THIS_MACHINE = DISK_FULL | frozenset((
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EROFS,
    errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG,
    errno.ELOOP, errno.EAGAIN, errno.ENOMEM,
))  # fmt: skip
_ADVICE = {
    errno.EMFILE: "; raise the limit (ulimit -n)",
    errno.EAGAIN: "; raise the limit of processes (ulimit -u, or pids of a container)",
    errno.ENOMEM: "; close other programs, or raise the memory limit",
}


def machine_fault(error: BaseException) -> str:
    """A file that may not be read, a disk that is full, a limit: for people to put right, wherever
    it is noticed, so one sentence and no traceback. Empty: it is no such thing."""
    if not isinstance(error, OSError) or error.errno not in _OF_THIS_MACHINE:
        return ""
    reason = os.strerror(error.errno) + _ADVICE.get(error.errno, "")
    return f"{error.filename}: {reason}" if error.filename else reason


def is_failure(error: BaseException) -> bool:
    """Whether a library failed at what it was given. A panic of a compiled one is no `Exception`;
    an interrupt or an exit may not be caught."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class ConfigError(OctavoError):
    """The settings cannot work; the message names the flag and the numbers."""


class ExtensionMissing(ConfigError, ImportError):
    """The compiled extension is not installed; the message says how to build it."""


class NoSuchModel(ConfigError, ModelError):
    """No model has the name that the settings give; the message repeats it. Another try will not
    help."""


class GatherFailed(OctavoError):
    """Not all ranks came to show what they computed."""


class WorkerLost(OctavoError):
    """One of the processes that compute a model together is gone; the message names its rank."""


class DeviceLost(OctavoError):
    """What one fault has left useless until the process ends: no request's fault."""


class RequestError(OctavoError):
    """The request cannot be served as it is. `param` names the field to blame, if one is."""

    status = 400
    type = "invalid_request_error"
    code: str | None = "invalid_request"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type, or out of range."""


class ContextLengthExceeded(RequestError):
    """The prompt does not fit; the message carries both numbers."""

    code = "context_length_exceeded"


class ModelUnknown(RequestError):
    """No model of that name is served here."""

    status = 404
    type = "not_found_error"
    code = "model_not_found"


class QueueFull(RequestError):
    """The server holds as many waiting requests as it may."""

    status = 503
    type = "overloaded_error"
    code = "queue_full"


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before it was done."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class GenerationFailed(RequestError):
    """The model produced numbers that are not numbers for this request."""

    status = 500
    type = "server_error"
    code = "model_error"


class EngineDead(RequestError):
    """The engine core died or hangs; what was in flight is lost, new requests may come back."""

    status = 503
    type = "server_error"
    code = "engine_dead"
