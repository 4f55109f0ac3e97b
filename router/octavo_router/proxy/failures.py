"""The error a client gets when no engine could answer it, and how each loss counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from octavo_router.errors import Rejected
from octavo_router.flow.retry import Failure
from octavo_router.http.upstream_connection import Loss
from octavo_router.proxy.resume import ENGINE_DEAD
from octavo_router.routing.outcome import AttemptResult

if TYPE_CHECKING:
    from collections.abc import Mapping

FAILURE_OF: Final[Mapping[Loss, Failure]] = {
    Loss.REFUSED: Failure.CONNECT,
    Loss.UNREACHABLE: Failure.CONNECT,
    Loss.NO_SOCKET: Failure.NO_SOCKET,
    Loss.CLOSED: Failure.LOST,
    Loss.BROKEN: Failure.LOST,
    Loss.GARBAGE: Failure.BAD_ANSWER,
}

RESULT_OF: Final[Mapping[Failure, AttemptResult]] = {
    Failure.CONNECT: AttemptResult.CONNECT_FAILED,
    Failure.NO_SOCKET: AttemptResult.CLIENT_GONE,  # the lack is ours
    Failure.RESET_BEFORE_SENT: AttemptResult.CONNECT_FAILED,
    Failure.NOT_ACCEPTED: AttemptResult.REFUSED,
    Failure.GIVEN_BACK: AttemptResult.LEFT,
    Failure.REJECTED: AttemptResult.REJECTED,
    Failure.ERROR_5XX: AttemptResult.ERROR_5XX,
    Failure.NO_HEADERS: AttemptResult.TIMEOUT,
    Failure.LOST: AttemptResult.BROKEN,
    Failure.LEFT: AttemptResult.LEFT,
    Failure.STALLED: AttemptResult.TIMEOUT,
    Failure.BAD_ANSWER: AttemptResult.BAD_ANSWER,
    Failure.DEADLINE: AttemptResult.EXPIRED,
    Failure.CLIENT_GONE: AttemptResult.CLIENT_GONE,
}

_TIMEOUT_ERROR: Final = "timeout_error"
_ENGINE_FAULTS: Final = frozenset(("internal_error", "model_error", "unreadable"))  # codes
DEADLINE_EXCEEDED: Final = "deadline_exceeded"
WRONG_POD: Final = 421  # the address belongs to another pod by now
NOT_ACCEPTED: Final = (WRONG_POD, 429, 503)  # statuses of a request that no engine has begun with
# Codes of a 503 that is not for lack of room: it says nothing about other engines.
_GIVES_BACK: Final = frozenset((ENGINE_DEAD, "engine_stalled", "server_shutdown", "draining"))
NO_ENDPOINT_RETRY_S: Final = 5.0


def failure_on(status: int, code: str = "") -> Failure | None:
    """What an engine's status means, where something may be done about it."""
    if status == 503 and code in _GIVES_BACK:
        return Failure.GIVEN_BACK
    if status == 504 and code == DEADLINE_EXCEEDED:
        return None  # another engine would be late too
    if status in NOT_ACCEPTED:
        return Failure.NOT_ACCEPTED
    return Failure.ERROR_5XX if status >= 500 else None


def code_of(body: bytes) -> str:
    """Of an error object; nothing where there is none. Anthropic's has types only, and one of them
    says as much as a code."""
    try:
        error = json.loads(body)["error"]
        code = error.get("code", DEADLINE_EXCEEDED if error["type"] == _TIMEOUT_ERROR else "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    return code if isinstance(code, str) else ""


def verdict_on(status: int, body: bytes = b"") -> tuple[AttemptResult, str]:
    """How an answer that was passed on counts, and its name in the log. That the client's own
    deadline passed is no fault of the engine's, which says so with a code."""
    if status == 504 and code_of(body) == DEADLINE_EXCEEDED:
        return AttemptResult.REJECTED, "deadline"
    if status < 400:
        return AttemptResult.OK, "ok"
    if status in NOT_ACCEPTED:
        return AttemptResult.REFUSED, "refused"
    return (
        (AttemptResult.REJECTED, "rejected")
        if status < 500
        else (AttemptResult.ERROR_5XX, "upstream_error")
    )


def verdict_on_event(code: str) -> tuple[AttemptResult, str]:
    """The same for an error that an engine put at the end of a stream."""
    if code in _ENGINE_FAULTS:
        return AttemptResult.ERROR_5XX, "upstream_error"
    return AttemptResult.REJECTED, "deadline" if code == DEADLINE_EXCEEDED else "rejected"


def refused_for(failure: Failure) -> Rejected:
    """From a closed catalogue: nothing that an engine wrote gets in here."""
    match failure:
        case Failure.CONNECT | Failure.NO_SOCKET | Failure.RESET_BEFORE_SENT:
            return Rejected(
                503, "upstream_unreachable", "No engine could be reached.",
                retry_after_s=NO_ENDPOINT_RETRY_S,
            )  # fmt: skip
        case Failure.NOT_ACCEPTED | Failure.GIVEN_BACK:
            return Rejected(503, "overloaded", "All engines are at capacity.", retry_after_s=1.0)
        case Failure.NO_HEADERS:
            return Rejected(
                504, "upstream_timeout", "The engine did not start its response in time."
            )
        case Failure.STALLED:
            return Rejected(
                504, "upstream_stalled", "The engine stopped sending in the middle of its response."
            )
        case Failure.DEADLINE:
            return Rejected(504, "deadline_exceeded", "The request exceeded its deadline.")
        case Failure.LOST | Failure.LEFT:
            return Rejected(
                502, "upstream_lost", "The connection to the engine was lost during its response."
            )
        case _:
            return Rejected(502, "upstream_bad_answer", "The engine sent an invalid response.")


def no_endpoint(pool: str) -> Rejected:
    return Rejected(
        503,
        "no_endpoints",
        f"No engine is available for {pool}.",
        retry_after_s=NO_ENDPOINT_RETRY_S,
    )
