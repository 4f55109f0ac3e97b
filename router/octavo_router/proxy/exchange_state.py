"""The states of one proxied request's attempt, from admission to the end of its response."""

from __future__ import annotations

from enum import Enum


class ExchangeState(Enum):
    """Each member carries what the exchange needs to know of it: attributes, for the hot path."""

    WAITING = "waiting", False  # for room, an endpoint, or a pause before a retry
    CONNECTING = "connecting", False
    AWAITING_HEAD = "awaiting_head", False  # the request was sent
    COLLECTING = "collecting", True  # the body is buffered until it is complete
    RELAYING_EVENTS = "relaying_events", True
    PASSING_THROUGH = "passing_through", True  # the body is too large to be buffered
    CLOSED = "closed", False

    def __init__(self, _name: str, is_receiving: bool) -> None:
        self.is_receiving = is_receiving  # the engine's response has a head, and has not ended

    @property
    def is_closed(self) -> bool:
        return self is ExchangeState.CLOSED
