"""The responses that this process keeps, for as long and as many as configured. No disk."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from octavo_engine.server.limits import RequestLimits
    from octavo_engine.server.openai.responses.log import EventLog
    from octavo_engine.server.openai.responses.shapes import ResponseObject
    from octavo_engine.server.openai.schemas import ChatMessageBody


@dataclass(slots=True)
class StoredTurn:
    """A response and what is needed to go on from it."""

    response: ResponseObject
    owner: bytes  # of the API key; no other key sees it
    input_items: list[dict[str, Any]]
    messages: Sequence[ChatMessageBody]  # all that was said, the answer included once it is there
    task: asyncio.Task[None] | None = None  # of one that runs in the background
    log: EventLog | None = None  # of one that does and can be streamed
    num_bytes: int = 0
    expires_at: float = 0.0

    @property
    def is_running(self) -> bool:
        return self.response.status in ("queued", "in_progress")


class ResponseStore:
    """The oldest go first; what still runs stays. Belongs to the event loop."""

    def __init__(self, limits: RequestLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._kept: OrderedDict[str, StoredTurn] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: StoredTurn) -> bool:
        """A new one, or one that has changed; false if it is too large to be kept at all.

        A conversation counts in full with each of its responses, though they share its messages:
        so it never takes more than is counted.
        """
        self.drop(stored.response.id)
        parts = (stored.response, stored.input_items, stored.messages)
        stored.num_bytes = sum(len(msgspec.json.encode(part)) for part in parts)
        if stored.log is not None:
            stored.num_bytes += stored.log.num_bytes
        if stored.num_bytes > self._limits.max_stored_response_bytes:
            return False
        stored.expires_at = self._now() + self._limits.response_ttl_s
        self._kept[stored.response.id] = stored
        self.num_bytes += stored.num_bytes
        self._make_room()
        return True

    def get(self, id_: str, owner: bytes) -> StoredTurn | None:
        self._make_room()
        stored = self._kept.get(id_)
        return stored if stored is not None and stored.owner == owner else None

    def drop(self, id_: str) -> None:
        stored = self._kept.pop(id_, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes

    def _make_room(self) -> None:
        limits, now = self._limits, self._now()
        for id_, stored in list(self._kept.items()):
            is_over = (
                len(self._kept) > limits.max_stored_responses
                or self.num_bytes > limits.max_stored_response_bytes
            )
            if not is_over and stored.expires_at > now:
                return
            if not stored.is_running:
                self.drop(id_)
