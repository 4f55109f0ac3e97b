"""What one request leaves behind. Metrics, access log and traces read the same, so they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# How an answer with a good status may have ended without it being anybody's fault here.
_NO_FAULT: Final = frozenset(("", "ok", "rejected", "client_gone"))


@dataclass(slots=True)
class RequestRecord:
    """Filled in by the proxy as the request goes along; handed over once, when it is over."""

    request_id: str = ""
    method: str = "POST"
    route: str = ""  # from the closed set of paths; "other" for any that is not known
    client: str = ""  # the peer's address
    model: str = ""  # as the client named it; a label only once it is known to be served
    is_known_model: bool = False
    pool: str = ""
    revision: str = ""
    trial: str = ""  # the adapter that is on trial, or compared with one that is
    tenant: str = ""
    endpoint: str = ""  # the one that answered, or the last that was tried
    endpoint_id: str = ""
    policy: str = ""
    status: int = 0  # as the client saw it; 0: it went away before
    code: str = ""  # of the error object, where the router made one
    outcome: str = ""  # ok | client_gone | refused | broken | timeout | ...
    is_stream: bool = False
    ended_at: float = 0.0  # monotonic
    duration_s: float = 0.0
    queue_s: float = 0.0
    pick_s: float = 0.0
    ttft_s: float | None = None
    last_token_s: float | None = None  # since arrival
    request_bytes: int = 0
    response_bytes: int = 0
    prompt_tokens: int = 0  # as the engine counted; 0: it did not say
    output_tokens: int = 0
    cached_tokens: int | None = None  # as the engine reported
    predicted_tokens: int = 0
    attempts: int = 0
    resumes: int = 0
    traceparent: str = ""

    @property
    def is_error(self) -> bool:
        """The service's fault: what canary analysis and the access log's error mode look for.

        An answer that broke after its status was sent is one, whatever that status says.
        """
        return self.status >= 500 or (self.status < 400 and self.outcome not in _NO_FAULT)

    @property
    def verdict(self) -> str:
        """ok | rejected | failed | gone: a label, to separate broken streams from whole ones."""
        if self.is_error:
            return "failed"
        if self.outcome == "client_gone":
            return "gone"
        return "ok" if self.status < 400 and self.outcome != "rejected" else "rejected"
