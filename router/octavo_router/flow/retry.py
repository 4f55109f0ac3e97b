"""May this failure be tried again, where, and as what? Pure: facts in, verdict out.

    what happened                                       verdict
    the deadline passed, or the client is gone          give up
    4xx, a grammar that cannot be met                   give up: the request's own fault
    a second engine died of it                          give up: flow.quarantine
    not sent: refused, reset, no connection             retry elsewhere, at most max_attempts
    "not accepted": 503, 429, 421                       retry elsewhere, max_refusals times
    given back: it drains, hangs or died, and said so   retry elsewhere, at most max_attempts
    sent, then silence or a loss, tokens are known      resume elsewhere, at most max_resumes
    sent, then a 5xx, tokens are known                  resume elsewhere, once: then it is its own
    sent, then silence or a loss, nothing is known      give up: it may have run

An accepted request is never sent again as a new one: it would run twice. A generation whose tokens
(none so far is an answer too) this router has followed may be *resumed*: the old attempt is
cancelled first and fenced, and the new one continues behind the tokens that are there. Both kinds
spend the same budget, but for what an engine's end takes along (flow.budget.Losses). What was
already sent to the client forbids a retry, not a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_router.config.settings import RetryConfig


class Failure(StrEnum):
    """What went wrong with an attempt."""

    CONNECT = "connect"  # refused, unreachable, or no connection in time: nothing was sent
    NO_SOCKET = "no_socket"  # this machine had none for it: nothing was sent
    RESET_BEFORE_SENT = "reset_before_sent"  # a kept connection that was closed as we began
    NOT_ACCEPTED = "not_accepted"  # the engine said so: 503, 429, 421
    GIVEN_BACK = "given_back"  # a 503 of an engine that drains, hangs or died: nothing was answered
    REJECTED = "rejected"  # another 4xx
    ERROR_5XX = "error_5xx"  # 500 and others: it may have run
    NO_HEADERS = "no_headers"  # sent; no answer began in time
    LOST = "lost"  # sent; the connection broke before or within the answer
    LEFT = "left"  # the engine said within its answer that it must go
    STALLED = "stalled"  # the answer stopped without ending
    BAD_ANSWER = "bad_answer"  # garbage, or 200 without an answer, or tokens out of order
    DEADLINE = "deadline"  # the request's own
    CLIENT_GONE = "client_gone"


class Action(StrEnum):
    RETRY = "retry"  # the same request, as new, at another endpoint
    RESUME = "resume"  # cancel the old attempt, continue behind its tokens at another endpoint
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The facts about a request whose latest attempt failed."""

    failure: Failure
    attempts: int = 1  # in a row that no engine accepted, this one included
    refusals: int = 0  # of them "not accepted", this one included
    resumes: int = 0  # continuations that an engine accepted
    was_answered: bool = False  # a byte of an answer went to the client
    is_resumable: bool = False  # its tokens are known, and its engines can continue them
    is_suspect: bool = False  # two engines died of it, see flow.quarantine
    retry_after_s: float | None = None  # as the engine said
    time_left_s: float = float("inf")  # to the request's deadline


@dataclass(frozen=True, slots=True)
class RetryVerdict:
    action: Action
    reason: str  # a word for metrics and headers
    delay_s: float | None = 0.0  # before the same endpoint, if there is no other; None: not at all


def decide(attempt: Attempt, config: RetryConfig) -> RetryVerdict:
    """What to do next, as far as the request itself is concerned; the budget has its own say."""
    match attempt.failure:
        case Failure.CLIENT_GONE:
            return _give_up("client_gone")
        case Failure.DEADLINE:
            return _give_up("deadline")
        case Failure.REJECTED:
            return _give_up("rejected")
    if attempt.is_suspect:
        return _give_up("quarantined")
    if attempt.time_left_s <= 0.0:
        return _give_up("deadline")
    if attempt.failure in NOT_RUN:
        return _retry(attempt, config)
    return _resume(attempt, config)


# No engine has begun with it, or what it had is gone and was shown to nobody.
NOT_RUN = frozenset(
    {
        Failure.CONNECT, Failure.NO_SOCKET, Failure.RESET_BEFORE_SENT, Failure.NOT_ACCEPTED,
        Failure.GIVEN_BACK,
    }
)  # fmt: skip
# It came to nothing because its engine ends, as far as anybody can tell.
ENDS = frozenset({Failure.LOST, Failure.LEFT, Failure.GIVEN_BACK})
# It came to nothing because nothing came: the engine hangs, or is slow.
SILENCES = frozenset({Failure.NO_HEADERS, Failure.STALLED})


def _retry(attempt: Attempt, config: RetryConfig) -> RetryVerdict:
    if attempt.attempts >= config.max_attempts:
        return _give_up("attempts_exhausted")
    # What has begun can only be continued; finding no engine for that is no second continuation.
    has_begun = attempt.was_answered or attempt.resumes > 0
    if has_begun and not attempt.is_resumable:
        return _give_up("may_have_run")
    action = Action.RESUME if has_begun else Action.RETRY
    if attempt.failure not in (Failure.NOT_ACCEPTED, Failure.GIVEN_BACK):
        return RetryVerdict(action, attempt.failure.value)
    if attempt.refusals > config.max_refusals:
        return _give_up("refused_elsewhere")
    wait_s = attempt.retry_after_s
    if wait_s is None or wait_s >= attempt.time_left_s:
        return RetryVerdict(action, attempt.failure.value, None)
    return RetryVerdict(action, attempt.failure.value, max(wait_s, 0.0))


def _resume(attempt: Attempt, config: RetryConfig) -> RetryVerdict:
    if not attempt.is_resumable:
        return _give_up("may_have_run")
    if attempt.failure is Failure.ERROR_5XX and attempt.resumes > 0:
        return _give_up("failed_elsewhere")  # two engines say the same of it
    if attempt.resumes >= config.max_resumes:
        return _give_up("resumes_exhausted")
    return RetryVerdict(Action.RESUME, attempt.failure.value)


def _give_up(reason: str) -> RetryVerdict:
    return RetryVerdict(Action.GIVE_UP, reason)
