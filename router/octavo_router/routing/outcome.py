"""How an attempt at an endpoint ended, as far as routing and health need to know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_FAILURES = ("connect_failed", "broken", "timeout", "bad_answer", "error_5xx")


class AttemptResult(StrEnum):
    """The first thing that decided the attempt."""

    OK = "ok"
    CLIENT_GONE = "client_gone"  # nobody's fault
    EXPIRED = "expired"  # the request's own time was over; a fault only where nobody is answered
    REFUSED = "refused"  # the engine said 503 or 429: full, not broken
    REJECTED = "rejected"  # another 4xx: the request's fault
    CONNECT_FAILED = "connect_failed"
    LEFT = "left"  # said in mid-answer that it must go: its leaving is known, and no failure
    BROKEN = "broken"  # died in mid-answer
    TIMEOUT = "timeout"  # no headers, first token or next token in time
    BAD_ANSWER = "bad_answer"  # not HTTP, or 200 without an answer
    ERROR_5XX = "error_5xx"

    is_failure: bool  # it speaks against the endpoint
    is_verdict: bool  # it says anything about the endpoint at all
    label: str  # its value: reading that of a member is a call into Python, too

    def __init__(self, value: str) -> None:
        # Once here, not once per request: hashing a member is a call into Python.
        self.label = value
        self.is_failure = value in _FAILURES
        self.is_verdict = self.is_failure or value == "ok"


@dataclass(slots=True)
class Outcome:
    """What an attempt came to. Numbers that were never learnt stay None or 0."""

    result: AttemptResult
    ttft_s: float | None = None  # from placing to the first token
    duration_s: float = 0.0
    cached_tokens: int | None = None  # as the engine reported
    prompt_tokens: int = 0
    output_tokens: int = 0
    itl_s: float | None = None  # mean time between tokens


OK = Outcome(AttemptResult.OK)
CLIENT_GONE = Outcome(AttemptResult.CLIENT_GONE)
