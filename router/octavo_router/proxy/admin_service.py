"""What the administrators' listener serves: the router's own routes, and no engine's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from octavo_router.errors import Rejected
from octavo_router.proxy.head_facts import own_route
from octavo_router.proxy.local_response import LocalResponse

if TYPE_CHECKING:
    from octavo_router.http.client_connection import ClientConnection
    from octavo_router.http.messages import Handler
    from octavo_router.http.request_head import RequestHead


class AdminService:
    """A `ClientConnection`'s service. Keeps no record of requests: scrapes are many."""

    def __init__(self, routes: dict[tuple[str, str], Handler]) -> None:
        self._routes = routes
        self._id_prefix = f"adm-{os.urandom(5).hex()}-"
        self._num_ids = 0

    def new_request_id(self) -> str:
        self._num_ids += 1
        return f"{self._id_prefix}{self._num_ids:x}"

    def check(self, connection: ClientConnection, head: RequestHead) -> None:
        if any(name == b"origin" for name, _ in head.fields):
            raise Rejected(
                403, "forbidden", "This listener does not accept requests from browser pages."
            )
        connection.context, _ = own_route(self._routes, head)

    def handle(self, connection: ClientConnection, head: RequestHead, body: bytes) -> None:
        request_id = head.request_id or self.new_request_id()
        handler: Handler = connection.context
        LocalResponse(connection, head, request_id, is_admin=True).start(handler, body)

    def refused(self, connection: ClientConnection, error: Rejected, request_id: str) -> None:
        """Nobody counts it."""
