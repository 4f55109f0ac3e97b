"""The endpoint-load-metrics header: load as ORCA has it, for balancers that ask in each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from octavo_engine.server.http.exchange import Exchange, Header
    from octavo_engine.server.service import Service

ASKS = b"endpoint-load-metrics-format"
ANSWERS = b"endpoint-load-metrics"


def load_headers(exchange: Exchange, service: Service) -> list[Header]:
    """One where the client asks for a format that is known."""
    format = exchange.header(ASKS).strip().upper()
    if not format:
        return []
    stats = service.engine.stats
    total = stats.kv_blocks_total
    metrics = {
        "kv_cache_usage_perc": round(stats.kv_blocks_used / total, 4) if total else 0.0,
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
    }
    match format:
        case "TEXT":
            value_text = ", ".join(
                f"named_metrics.{name}={value}" for name, value in metrics.items()
            )
        case "JSON":
            value_text = msgspec.json.encode({"named_metrics": metrics}).decode()
        case _:  # a hint that we do not know is no reason to refuse an answer
            return []
    return [(ANSWERS, f"{format} {value_text}".encode())]
