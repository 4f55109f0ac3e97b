"""Rewriting heads between client and engine: bytes in, bytes out, nothing parsed twice."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from octavo_engine.protocol.endpoints import (
    EXPLAIN_HEADER,
    PLACE_HEADER,
    POD_UID_HEADER,
    RESUME_HEADER,
    SERVED_BY_HEADER,
    STREAM_HEADER,
    TIMEOUT_HEADER,
)
from octavo_router.http import responses
from octavo_router.proxy.response_affinity import place_of

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.http.request_head import RequestHead
    from octavo_router.http.response_head import ResponseHead
    from octavo_router.routing.decision import Decision

STREAM_TOKENS: Final = f"{STREAM_HEADER}: tokens\r\n".encode()
RESUMED: Final = f"{RESUME_HEADER}: 1\r\n".encode()

_MAX_EXPLANATION: Final = 4096
_JOIN = b"".join


class EndpointLines:
    """What a head holds because of the endpoint. Made once for each."""

    __slots__ = (
        "authority", "extra", "hides_authorization", "host", "is_keyed", "place", "prefix",
        "served_by",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, *, engine_key: str, passes_keys: bool) -> None:
        spec = endpoint.spec
        key = spec.key or ("" if spec.is_foreign else engine_key)
        self.prefix = spec.address.prefix.encode()
        self.authority = spec.address.authority
        self.host = b" HTTP/1.1\r\nhost: " + self.authority.encode() + b"\r\n"
        extra = ""
        if spec.pod_uid:
            extra += f"{POD_UID_HEADER}: {spec.pod_uid}\r\n"
        if key:
            extra += f"authorization: Bearer {key}\r\n"
        self.extra = extra.encode()
        self.place = f"{PLACE_HEADER}: {place_of(spec.id)}\r\n".encode()
        self.is_keyed = bool(key) or spec.is_foreign  # what clients show is not for it
        self.hides_authorization = self.is_keyed or not passes_keys
        self.served_by = f"\r\n{SERVED_BY_HEADER}: {self.authority}\r\n".encode()


def request_bytes(
    head: RequestHead,
    lines: EndpointLines,
    request_id: bytes,
    body: bytes,
    *,
    forward: bytes,
    internal: bytes = b"",
) -> bytes:
    """The whole request for an endpoint. `forward`: the client's lines; `internal`: our own."""
    return _JOIN(
        (
            head.verb,
            lines.prefix,
            head.target,
            lines.host,
            forward,
            b"" if lines.hides_authorization else head.authorization,
            lines.extra,
            internal,
            responses.REQUEST_ID,
            request_id,
            b"\r\ncontent-length: %d\r\n\r\n" % len(body),
            body,
        )
    )


def time_left(seconds: float) -> bytes:
    """What is left of the time that the client gave, as a line for an endpoint."""
    return f"{TIMEOUT_HEADER}: {max(1, int(seconds * 1000.0))}\r\n".encode()


def answer_head(
    head: ResponseHead,
    lines: EndpointLines,
    request_id: bytes,
    framing: bytes,
    explanation: bytes = b"",
    body: bytes = b"",
) -> bytes:
    """The head of the answer for the client. `framing`: how its body ends, and the connection."""
    return _JOIN(
        (
            responses.STATUS_LINES.get(head.status)
            or responses.status_line(head.status, head.reason),
            responses.REQUEST_ID,
            request_id,
            lines.served_by,
            explanation,
            head.forward,
            framing,
            b"\r\n",
            body,
        )
    )


def with_traceparent(forward: bytes, parent: str) -> bytes:
    """The client's lines with our span as the parent instead of its own."""
    kept = [
        line
        for line in forward.split(b"\r\n")
        if line and not line.lower().startswith(b"traceparent:")
    ]
    return b"\r\n".join([*kept, b"traceparent: " + parent.encode(), b""])


def explanation(decision: Decision) -> bytes:
    """The decision as a header line, for clients that request it."""
    facts = decision.details or {
        "endpoint": decision.endpoint.id,
        "policy": decision.policy,
        "reason": decision.reason,
        "matched_tokens": decision.matched_tokens,
    }
    if decision.prompt_at:
        facts = {**facts, "prompt_computed_at": decision.prompt_at}
    text = json.dumps(facts, separators=(",", ":"), default=str)
    if len(text) > _MAX_EXPLANATION:
        facts = {key: value for key, value in facts.items() if not isinstance(value, list | dict)}
        text = json.dumps({**facts, "is_shortened": True}, separators=(",", ":"), default=str)
    return f"{EXPLAIN_HEADER}: {text[:_MAX_EXPLANATION]}\r\n".encode("ascii", "replace")
