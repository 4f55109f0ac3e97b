"""A placed request until its answer is over: its lease, its ticket, its record, given back once."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from octavo_router.epp.usage_tail import UsageTail
from octavo_router.routing.outcome import CLIENT_GONE, OK, AttemptResult, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_router.epp.watch import PickerWatch
    from octavo_router.flow.admission import Ending, Ticket
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.residency.usage import PyUsage
    from octavo_router.routing.dispatcher import Dispatcher, Lease

_ENDINGS: Final[Mapping[AttemptResult, Ending]] = {
    AttemptResult.OK: "whole",
    AttemptResult.CLIENT_GONE: "left",
}


class Placed:
    """Follows one request at the endpoint that was picked, or at the one that served instead."""

    __slots__ = (
        "_began_at",
        "_dispatcher",
        "_failure",
        "_last_at",
        "_num_bytes",
        "_placed_at",
        "_prompt",
        "_record",
        "_tail",
        "_ttft_s",
        "is_over",
        "lease",
        "sees_body",
        "status",
        "ticket",
        "was_quarantined",
        "watch",
    )  # fmt: skip

    def __init__(
        self,
        dispatcher: Dispatcher,
        lease: Lease,
        ticket: Ticket | None,
        record: RequestRecord,
        began_at: float,
        watch: PickerWatch,
        prompt: Lease | None = None,  # of the engine that computes it, if it is another one
    ) -> None:
        self.lease: Lease | None = lease
        self._prompt = prompt
        self.ticket = ticket
        self.watch = watch
        self.was_quarantined = False  # by its end
        self.is_over = False
        self.sees_body = False  # the answer's bytes come by
        self.status = 0  # of the answer; 0: none yet
        self._dispatcher = dispatcher
        self._failure: AttemptResult | None = None
        self._record = record
        self._tail = UsageTail()
        self._began_at = began_at
        self._placed_at = time.monotonic()
        watch.begin(lease.endpoint)
        self._ttft_s: float | None = None
        self._last_at = 0.0
        self._num_bytes = 0

    def served_by(self, authority: str) -> None:
        """Who answered. The gateway went to a fallback when it is not who was picked."""
        lease = self.lease
        if lease is None or not authority or lease.endpoint.spec.address.authority == authority:
            return
        # Whoever was picked could not be reached, or failed: that speaks against it.
        lease.finish(Outcome(AttemptResult.CONNECT_FAILED))
        self.was_quarantined |= self.watch.end(AttemptResult.CONNECT_FAILED)
        request = replace(lease.request, subset=(authority,), explain=False)
        self.lease = self._dispatcher.place(request)
        self._record.attempts += 1
        self._record.endpoint = authority
        self._record.endpoint_id = self.lease.endpoint.id if self.lease is not None else ""
        if self.lease is not None:
            self.watch.begin(self.lease.endpoint)

    def begin_answer(self, status: int, failure: AttemptResult | None, *, sees_body: bool) -> None:
        """`failure`: why the gateway answers in an engine's place."""
        self.status = status
        self._failure = failure
        self.sees_body = sees_body
        if not sees_body:  # the best sign that there will be
            self._first_token()

    def piece(self, data: bytes) -> None:
        """Hot path: once per piece of the answer."""
        if not data:
            return
        self._last_at = time.monotonic()
        if self._ttft_s is None:
            self._ttft_s = self._last_at - self._placed_at
            if self.status < 400:
                self.watch.first_bytes()
            self._first_token()
        self._num_bytes += len(data)
        self._tail.feed(data)

    def end(self, *, is_whole: bool) -> None:
        """The answer is over, or no more of it will come. The first call counts."""
        if self.is_over:
            return
        self.is_over = True
        self._end_prompt(CLIENT_GONE)
        now = time.monotonic()
        record = self._record
        outcome = Outcome(self._result(is_whole=is_whole), duration_s=now - self._placed_at)
        usage = self._tail.usage
        outcome.prompt_tokens = record.prompt_tokens = usage.prompt_tokens
        outcome.output_tokens = record.output_tokens = usage.output_tokens
        outcome.cached_tokens = record.cached_tokens = usage.cached_tokens
        if record.is_stream and self._ttft_s is not None:
            outcome.ttft_s = self._ttft_s
            record.ttft_s = self._placed_at - self._began_at + self._ttft_s
            record.last_token_s = self._last_at - self._began_at
            if usage.output_tokens > 1:
                streamed_s = self._last_at - self._placed_at - self._ttft_s
                outcome.itl_s = streamed_s / (usage.output_tokens - 1)
        if self.lease is not None:
            self.lease.finish(outcome)
        self.was_quarantined |= self.watch.end(outcome.result)
        if self.ticket is not None:
            self._release(self.ticket, usage, _ENDINGS.get(outcome.result, ""))
        record.status = self.status
        record.outcome = outcome.result.value
        record.duration_s = now - self._began_at
        record.response_bytes = self._num_bytes

    def _first_token(self) -> None:
        if self.lease is not None:
            self.lease.first_token()
        if self._prompt is not None and self.status < 400:
            self._prompt.first_token()  # it is in that engine's cache
            self._end_prompt(OK)

    def _end_prompt(self, outcome: Outcome) -> None:
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            prompt.finish(outcome)

    def _release(self, ticket: Ticket, usage: PyUsage, ending: Ending) -> None:
        """An answer whose counts are unknown costs its tenant what was expected of it."""
        if self.status == 200 and not self.sees_body:
            ticket.release(ticket.estimated_tokens)
        else:
            ticket.release(usage.prompt_tokens, usage.output_tokens, ending)

    def _result(self, *, is_whole: bool) -> AttemptResult:
        status = self.status
        if not status or not (is_whole or not self.sees_body):
            return AttemptResult.CLIENT_GONE
        if self._failure is not None:
            return self._failure
        if status in (429, 503):
            return AttemptResult.REFUSED
        if status >= 500:
            return AttemptResult.ERROR_5XX
        if status >= 400:
            return AttemptResult.REJECTED
        if self.sees_body and not self._num_bytes and self.lease is not None and status == 200:
            return AttemptResult.BAD_ANSWER
        return AttemptResult.OK
