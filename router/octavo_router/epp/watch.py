"""One placed request as the quarantine sees it: where it is, and whether its engine died."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from octavo_router.routing.outcome import AttemptResult

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.flow.quarantine import Quarantine

_ANSWERS: Final = (AttemptResult.OK, AttemptResult.REJECTED, AttemptResult.ERROR_5XX)
_DEAD: Final = ("down", "connecting")


class PickerWatch:
    """What a gateway reports of a lost answer does not tell a dead engine from a client that left.
    The engine's own state does: its signals end with it."""

    __slots__ = ("_endpoint", "_quarantine", "_sent_at", "digest", "key")

    def __init__(self, quarantine: Quarantine, key: int) -> None:
        self.key = key
        self.digest = ""  # of a body that an engine died of
        self._quarantine = quarantine
        self._endpoint: Endpoint | None = None
        self._sent_at = 0.0

    def begin(self, endpoint: Endpoint) -> None:
        self._endpoint, self._sent_at = endpoint, time.monotonic()
        self._quarantine.begin(self.key, endpoint.id)

    def first_bytes(self) -> None:
        """It has not killed the engine by beginning. One that was lost has to get to its end."""
        self._quarantine.answered(self.key, is_further=False)

    def end(self, result: AttemptResult) -> bool:
        """Whether it is refused from now on."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return False
        quarantine, key = self._quarantine, self.key
        if result in _ANSWERS:
            quarantine.answered(key)
            return False
        if endpoint.state not in _DEAD:
            quarantine.end(key, endpoint.id)
            return False
        was_refused = quarantine.refusal(key) is not None
        is_refused = quarantine.lost(key, endpoint, self._sent_at, is_said=False)
        quarantine.end(key, endpoint.id)
        return is_refused and not was_refused
