"""What was tried for one request, and whether, where and when it may be tried again.

Made at a request's first failure: most have none.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from octavo_router.flow.retry import ENDS, SILENCES, Action, Attempt, decide
from octavo_router.proxy.failures import RESULT_OF

if TYPE_CHECKING:
    from collections.abc import Collection

    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.flow.retry import Failure
    from octavo_router.proxy.account import RequestAccount
    from octavo_router.proxy.interfaces import ExchangeHost
    from octavo_router.proxy.paths import ProxiedPath
    from octavo_router.proxy.resume import StreamMemory
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.routing.request import RouteRequest

_MAX_PAUSE_S: Final = 5.0  # an engine that wants more is passed on: its client knows when to come


class NextAttempt(NamedTuple):
    """Another attempt."""

    exclude: Collection[Endpoint]
    pause_s: float  # before it, as its engine requires


class RetryState:
    """Of one request. Forgets nothing: an endpoint that failed is tried again only as the last."""

    __slots__ = ("_account", "_path", "_proxy", "_request", "_tried")

    def __init__(
        self, proxy: ExchangeHost, path: ProxiedPath, request: RouteRequest, account: RequestAccount
    ) -> None:
        self._proxy = proxy
        self._path = path
        self._request = request
        self._account = account
        self._tried: list[Endpoint] = []

    def next(
        self,
        failure: Failure,
        memory: StreamMemory | None,
        *,
        was_answered: bool,
        retry_after: bytes = b"",
        is_suspect: bool = False,
        pause_s: float = 0.0,
    ) -> NextAttempt | None:
        """Tries again where that is safe and affordable; None: the client gets an error.

        The attempt has failed, and its connection is closed. Given back where another follows.
        """
        proxy, account = self._proxy, self._account
        lease = account.lease
        account.note_failure(failure)
        verdict = decide(
            Attempt(
                failure,
                attempts=account.num_unaccepted,
                refusals=account.num_refusals,
                resumes=account.num_resumes,
                was_answered=was_answered,
                is_resumable=self._is_resumable(memory, was_answered),
                is_suspect=is_suspect,
                retry_after_s=float(retry_after) if retry_after.isdigit() else None,
                time_left_s=account.total_at - time.monotonic(),
            ),
            proxy.retry,
        )
        if verdict.action is Action.GIVE_UP:
            return None
        is_resume = verdict.action is Action.RESUME
        if lease is not None:
            self._tried.append(lease.endpoint)
        exclude, is_alone = self._passed_over(was_answered)
        if is_alone and (verdict.delay_s is None or verdict.delay_s > _MAX_PAUSE_S):
            return None
        is_end = failure in ENDS or (failure in SILENCES and _hangs(lease))
        if not (is_end and proxy.is_end_of(lease)):
            if proxy.budget.take(self._request.tenant):
                return None
            account.num_repeats += 1
        if is_resume and not account.is_resuming:
            account.record.resumes += 1
            account.is_resuming = True
        account.start_over(RESULT_OF[failure], was_answered=was_answered)
        if memory is not None:
            memory.start_over()
        return NextAttempt(exclude, max(pause_s, verdict.delay_s or 0.0 if is_alone else 0.0))

    def exclude(self, *, was_answered: bool) -> Collection[Endpoint]:
        """Which endpoints are not tried next."""
        return self._passed_over(was_answered)[0]

    def _passed_over(self, was_answered: bool) -> tuple[Collection[Endpoint], bool]:
        return self._proxy.passed_over(self._request, self._tried, was_answered=was_answered)

    def _is_resumable(self, memory: StreamMemory | None, was_answered: bool) -> bool:
        """Its engine understands that the same generation goes on, or starts again unseen."""
        lease = self._account.lease
        if lease is None or lease.endpoint.kind != "octavo" or not self._path.resumes:
            return False
        if memory is None:
            return not was_answered
        return memory.is_untouched or memory.can_resume


def _hangs(lease: Lease | None) -> bool:
    """Its engine says nothing at all any more, or that it makes no progress: it is not slow."""
    if lease is None or lease.endpoint.kind != "octavo":
        return False
    return lease.endpoint.reported_state not in ("ready", "draining")
