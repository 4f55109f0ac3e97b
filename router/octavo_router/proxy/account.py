"""What one request holds, and what it comes to: everything is given back and reported once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from octavo_router.flow.retry import NOT_RUN, Failure
from octavo_router.routing.outcome import AttemptResult, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_router.flow.admission import Ending, Ticket
    from octavo_router.metrics.histogram import Histogram
    from octavo_router.metrics.record import RequestRecord
    from octavo_router.proxy.heads import EndpointLines
    from octavo_router.residency.usage import Counts
    from octavo_router.routing.dispatcher import Lease
    from octavo_router.tracing import RouterTrace

_ENDINGS: Final[Mapping[str, Ending]] = {"ok": "whole", "client_gone": "left"}  # by outcome


class RequestAccount:
    """Times are monotonic seconds. Hot: one for each request."""

    __slots__ = (
        "attempt_at", "began_at", "first_at", "is_client_timed", "is_resuming", "itl", "last_at",
        "lease", "lines", "num_refusals", "num_repeats", "num_resumes", "num_unaccepted", "record",
        "ticket", "total_at", "trace", "wants_usage",
    )  # fmt: skip

    def __init__(
        self,
        record: RequestRecord,
        began_at: float,
        total_at: float,
        trace: RouterTrace | None = None,
    ) -> None:
        self.record = record
        self.began_at = began_at
        self.total_at = total_at  # when it must be over
        self.is_client_timed = False  # the client set that, and the engine gets what is left
        self.trace = trace
        self.ticket: Ticket | None = None  # of the gate
        self.wants_usage = False  # the client requested a stream's token counts
        self.num_repeats = 0  # that the budget allowed
        self.num_unaccepted = 0  # attempts in a row that no engine accepted
        self.num_refusals = 0  # of them, those that an engine refused
        self.num_resumes = 0  # continuations that an engine accepted
        self.is_resuming = False  # the attempt, or the next one that is accepted, is one
        self.itl: Histogram | None = None  # of streams
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
        if self.itl is not None and self.last_at:
            self.itl.observe(now - self.last_at)  # also over the gap of a resume
        self.last_at = now

    def end_attempt(self, result: AttemptResult, now: float) -> None:
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
        # Of an answer that is no stream the pieces come when all of them are there.
        if first_at is not None and record.output_tokens > 1 and record.is_stream:
            outcome.itl_s = (self.last_at - first_at) / (record.output_tokens - 1)
        lease.finish(outcome)

    def note_failure(self, failure: Failure) -> None:
        """Of the attempt, however it goes on."""
        if failure in NOT_RUN:
            self.num_unaccepted += 1
            self.num_refusals += failure is Failure.NOT_ACCEPTED
            return
        self.num_unaccepted = self.num_refusals = 0
        self.num_resumes += self.is_resuming
        self.is_resuming = False

    def start_over(self, result: AttemptResult, *, was_answered: bool) -> None:
        """The attempt is lost, and another one follows."""
        now = time.monotonic()
        self.end_attempt(result, now)
        if was_answered:  # what the client saw first is what it waited for
            self._note_first()
        else:
            self.last_at = 0.0
        self.first_at = None
        if self.trace is not None:
            self.trace.attempt_failed(result.value)

    def ask_again(self, now: float) -> None:
        """The same engine, which keeps its lease: nothing of an answer has come."""
        self.record.attempts += 1
        self.attempt_at = now
        self.first_at = None
        self.last_at = 0.0
        if self.trace is not None:
            self.trace.attempt_failed("not_fetched")

    def close(
        self,
        result: AttemptResult,
        outcome: str,
        now: float,
        usage: Counts,
        *,
        guess: tuple[int, int],
    ) -> None:
        """All is over. `guess`: prompt and output tokens, for what the engine did not tell."""
        record = self.record
        if usage[0] or usage[1]:
            record.prompt_tokens, record.output_tokens, record.cached_tokens = usage
        if self.first_at is not None:
            self._note_first()
            record.last_token_s = self.last_at - self.began_at
        record.outcome = outcome
        record.ended_at = now
        record.duration_s = now - self.began_at
        self.end_attempt(result, now)
        if self.ticket is not None:
            self.ticket.release(
                record.prompt_tokens or guess[0],
                record.output_tokens or guess[1],
                _ENDINGS.get(outcome, ""),
            )
        if self.trace is not None:
            self.trace.finish(record)

    def close_whole(self, now: float, usage: Counts, *, guess: int) -> None:
        """All is well and over: the answer came in one piece. `see_bytes` and `close` at once."""
        record, lease = self.record, self.lease
        prompt_tokens, output_tokens, cached_tokens = usage
        if prompt_tokens or output_tokens:
            record.prompt_tokens, record.output_tokens = prompt_tokens, output_tokens
            record.cached_tokens = cached_tokens
        total_s = now - self.began_at
        if record.ttft_s is None:
            record.ttft_s = total_s
        record.last_token_s = record.duration_s = total_s
        record.ended_at = now
        record.outcome = "ok"
        if lease is not None:
            self.lease = None
            attempt_s = now - self.attempt_at
            lease.finish(
                Outcome(
                    AttemptResult.OK,
                    attempt_s,
                    attempt_s,
                    cached_tokens,
                    prompt_tokens,
                    output_tokens,
                )
            )
        if self.ticket is not None:
            self.ticket.release(prompt_tokens or guess, output_tokens, "whole")
        if self.trace is not None:
            self.trace.finish(record)

    def _note_first(self) -> None:
        record = self.record
        if record.ttft_s is None and self.first_at is not None:
            record.ttft_s = self.first_at - self.began_at
