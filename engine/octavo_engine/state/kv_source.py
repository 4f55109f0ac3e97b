"""Where KV blocks of a request lie, and where this engine serves its own."""

from __future__ import annotations

import msgspec


class KVSource(msgspec.Struct, frozen=True):
    """An engine that serves KV blocks. Crosses the process boundary as msgpack."""

    host: str
    port: int
    engine_id: str = ""
    is_computing: bool = False  # the prompt, now: its blocks are fetched as they come
