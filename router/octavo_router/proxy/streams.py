"""How a stream ended: whether that is the end of an answer, and what it used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from octavo_router.flow.retry import Failure
from octavo_router.proxy.failures import verdict_on_event
from octavo_router.proxy.resume import BAD_STREAM, ENGINE_DEAD
from octavo_router.proxy.stream_form import DONE
from octavo_router.residency.usage import NO_USAGE
from octavo_router.routing.outcome import AttemptResult

if TYPE_CHECKING:
    from octavo_router.proxy.events import EventRelay
    from octavo_router.proxy.resume import StreamMemory
    from octavo_router.residency.api import FindUsage
    from octavo_router.residency.usage import Counts


class End(NamedTuple):
    """Of a stream whose engine has nothing more to say."""

    result: AttemptResult
    outcome: str
    rest: bytes = b""  # that the client still lacks


_WHOLE: Final = End(AttemptResult.OK, "ok")
_REJECTED: Final = End(AttemptResult.REJECTED, "rejected")
_FAILED: Final = End(AttemptResult.ERROR_5XX, "upstream_error")
_ALL_BUT_DONE: Final = End(AttemptResult.OK, "ok", DONE)


def end_of(memory: StreamMemory | None, relay: EventRelay | None) -> End | Failure:
    """The connection ended as it should; did the answer?"""
    if memory is None:
        if relay is None or not relay.tail:  # a 200 without one event is no answer
            return Failure.BAD_ANSWER
        return end_of_plain(relay.tail)
    if memory.failed_with:  # the engine gave it up, and the client has the error
        return End(*verdict_on_event(memory.failed_with))
    if memory.is_over:
        return _WHOLE
    return _ALL_BUT_DONE if memory.missing else Failure.LOST


def end_of_plain(tail: bytes) -> End:
    """Of a stream that passed unread: its last event may be an error, which the client has got."""
    if b'"error"' not in tail:  # nearly all
        return _WHOLE
    lines = [line for line in tail.splitlines() if line.startswith(b"data:")]
    while lines and lines[-1][5:].strip() == b"[DONE]":
        lines.pop()
    try:
        event = json.loads(lines[-1][5:]) if lines else None
    except (ValueError, RecursionError):
        return _WHOLE
    if not isinstance(event, dict):
        return _WHOLE
    error = event.get("error")
    if event.get("type") != "error" and not isinstance(error, dict):
        return _WHOLE
    words = error if isinstance(error, dict) else event
    code, kind = words.get("code"), words.get("type")
    is_clients = kind in ("invalid_request_error", "BadRequestError")
    if type(code) is int:
        is_clients = 400 <= code < 500
    return _REJECTED if is_clients else _FAILED


def loss_of(memory: StreamMemory) -> Failure:
    """What its `lost_with` means."""
    if memory.lost_with == BAD_STREAM:
        return Failure.BAD_ANSWER
    return Failure.LOST if memory.lost_with == ENGINE_DEAD else Failure.LEFT


def was_seen(memory: StreamMemory | None, relay: EventRelay | None) -> bool:
    """The client has a part of it; signs of life are none."""
    if memory is not None:
        return not memory.is_untouched
    return relay is not None and bool(relay.tail)


def usage_of(
    memory: StreamMemory | None, relay: EventRelay | None, find_usage: FindUsage
) -> tuple[Counts, int]:
    """As far as it was reported, and an estimate of the output tokens where it was not."""
    if memory is not None:
        return memory.usage, 0
    if relay is not None:
        return find_usage(relay.tail), relay.num_events
    return NO_USAGE, 0
