"""How long a request's KV blocks are to be found after it ended."""

from __future__ import annotations

import msgspec

DEFAULT_PRIORITY = 50
MAX_PRIORITY = 100


class KVRetention(msgspec.Struct, frozen=True, omit_defaults=True):
    """Crosses the process boundary as msgpack."""

    ttl_s: float  # from its end; 0: what its session retained is given up
    priority: int = DEFAULT_PRIORITY  # where room is short, lower ones are given up first
    session: str = ""
    owner: str = ""  # the tenant whose limit it counts for
