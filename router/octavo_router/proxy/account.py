"""What one request holds, and what it comes to: everything is given back and reported once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo_router.routing.outcome import Outcome, Result

if TYPE_CHECKING:
    from octavo_router.flow.gate import Ticket
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.proxy.heads import EndpointLines
    from octavo_router.proxy.usage import Usage
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.tracing import RequestTrace


class Account:
    """Times are monotonic seconds. Hot: one for each request."""

    __slots__ = (
        "attempt_at", "began_at", "first_at", "last_at", "lease", "lines", "num_refusals",
        "num_repeats", "record", "ticket", "trace",
    )  # fmt: skip

    def __init__(
        self, record: RequestRecord, began_at: float, trace: RequestTrace | None = None
    ) -> None:
        self.record = record
        self.began_at = began_at
        self.trace = trace
        self.ticket: Ticket | None = None  # of the gate
        self.num_refusals = 0  # attempts that engines did not accept
        self.num_repeats = 0  # that the budget allowed
        # of the attempt
        self.lease: Lease | None = None
        self.lines: EndpointLines  # from the first attempt on
        self.attempt_at = 0.0
        self.first_at: float | None = None  # the answer's first bytes
        self.last_at = 0.0

    def begin_attempt(self, lease: Lease, lines: EndpointLines, now: float) -> None:
        self.lease = lease
        self.lines = lines
        self.attempt_at = now
        record = self.record
        record.attempts += 1
        record.pick_s += time.monotonic() - now
        record.endpoint_id = lease.endpoint.spec.id
        record.endpoint = lines.authority
        record.policy = lease.decision.policy
        record.predicted_tokens = lease.decision.matched_tokens

    def see_bytes(self, now: float) -> None:
        """Of the answer. Hot path: once per read from an engine."""
        if self.first_at is None:
            self.first_at = now
            if self.lease is not None:
                self.lease.first_token()
        self.last_at = now

    def end_attempt(self, result: Result, now: float) -> None:
        lease, self.lease = self.lease, None
        if lease is None:
            return
        record, first_at, at = self.record, self.first_at, self.attempt_at
        outcome = Outcome(
            result,
            None if first_at is None else first_at - at,
            now - at,
            record.cached_tokens,
            record.prompt_tokens,
            record.output_tokens,
        )
        if first_at is not None and record.output_tokens > 1:
            outcome.itl_s = (self.last_at - first_at) / (record.output_tokens - 1)
        lease.finish(outcome)

    def start_over(self, result: Result, *, was_answered: bool) -> None:
        """The attempt is lost, and another one follows."""
        now = time.monotonic()
        self.end_attempt(result, now)
        if was_answered:  # what the client saw first is what it waited for
            self._note_first()
        self.first_at = None
        if self.trace is not None:
            self.trace.attempt_failed(result.value)

    def close(
        self, result: Result, outcome: str, now: float, usage: Usage, *, guess: tuple[int, int]
    ) -> None:
        """All is over. `guess`: prompt and output tokens, for what the engine did not tell."""
        record = self.record
        if usage.prompt_tokens or usage.output_tokens:
            record.prompt_tokens, record.output_tokens, record.cached_tokens = usage
        if self.first_at is not None:
            self._note_first()
            record.last_token_s = self.last_at - self.began_at
        record.outcome = outcome
        record.duration_s = now - self.began_at
        self.end_attempt(result, now)
        if self.ticket is not None:
            self.ticket.release(record.prompt_tokens or guess[0], record.output_tokens or guess[1])
        if self.trace is not None:
            self.trace.finish(record)

    def _note_first(self) -> None:
        record = self.record
        if record.ttft_s is None and self.first_at is not None:
            record.ttft_s = self.first_at - self.began_at
