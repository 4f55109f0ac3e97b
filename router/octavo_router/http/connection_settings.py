"""What the client connections of one process have in common, and how a reload changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_router.http.request_head import HeadParser

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from octavo_router.config.settings import LimitsConfig, TimeoutsConfig
    from octavo_router.http.client_connection import ClientConnection, RequestHandler
    from octavo_router.http.deadlines import DeadlineTick
    from octavo_router.http.request_head import HeadRules


class Shared:
    """What the connections of one process have in common."""

    __slots__ = (
        "_rules", "connections", "deadlines", "is_closing", "limits", "loop", "max_connections",
        "on_body", "parser", "service", "timeouts",
    )  # fmt: skip

    def __init__(
        self,
        service: RequestHandler,
        limits: LimitsConfig,
        timeouts: TimeoutsConfig,
        deadlines: DeadlineTick,
        loop: asyncio.AbstractEventLoop,
        *,
        max_connections: int | None = None,
        rules: HeadRules | None = None,
    ) -> None:
        self._rules = rules
        self.max_connections = max_connections or limits.max_connections
        self.service = service
        self.limits = limits
        self.timeouts = timeouts
        self.deadlines = deadlines
        self.loop = loop
        self.parser = HeadParser(limits, self._rules)
        self.connections: set[ClientConnection] = set()
        # A body begins that did not come with its head: of so many bytes, as far as is known.
        self.on_body: Callable[[int], None] = lambda num_bytes: None
        self.is_closing = False  # answers say so, and connections end with them

    def reconfigure(
        self, limits: LimitsConfig, timeouts: TimeoutsConfig, *, max_connections: int
    ) -> None:
        """Heads and waits from now on go by these, those of open connections too."""
        self.max_connections = max_connections
        self.limits = limits
        self.timeouts = timeouts
        self.parser = HeadParser(limits, self._rules)
        for connection in self.connections:
            connection.forget_head()
