"""What the running servers say of themselves: their models, and the requests that they have."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from octavo_engine.protocol import metric_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TIMEOUT_S = 2.0
_MAX_BYTES = 8 * 2**20
_SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """None: it does not say, as where it wants an API key."""

    models: tuple[str, ...] | None
    running: int | None
    waiting: int | None
    kv_usage: float | None  # a share, the highest of its cores

    @property
    def text(self) -> str:
        """As a column of a table."""
        if self.running is None or self.waiting is None:
            return "unknown"
        waiting = f", {self.waiting} waiting" if self.waiting else ""
        kv = f", KV {self.kv_usage:.0%}" if self.kv_usage is not None else ""
        return f"{self.running} running{waiting}{kv}"


def loads_of(urls: Sequence[str], environ: Mapping[str, str]) -> list[ReportedLoad | None]:
    """Of all at once; None for one that does not answer."""
    key = environ.get("OCTAVO_API_KEY", "")
    with ThreadPoolExecutor(max_workers=max(1, min(len(urls), 16))) as pool:
        return list(pool.map(lambda url: _load_of(url, key), urls))


def _load_of(url: str, key: str) -> ReportedLoad | None:
    try:
        metrics = _get(f"{url}/metrics", key)
        listed = _get(f"{url}/v1/models", key)
    except (OSError, http.client.HTTPException):
        return None
    samples: dict[str, list[float]] = {}
    for name, text in _SAMPLE.findall(metrics or ""):
        with suppress(ValueError):
            if isfinite(value := float(text)):
                samples.setdefault(name, []).append(value)
    usage = samples.get(metric_names.KV_CACHE_USAGE_PERC)
    return ReportedLoad(
        _names(listed),
        _total(samples.get(metric_names.NUM_REQUESTS_RUNNING)),
        _total(samples.get(metric_names.NUM_REQUESTS_WAITING)),
        max(usage) if usage else None,
    )


def _get(url: str, key: str) -> str | None:
    """None where it refuses. Never through a proxy: the servers are on this machine."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as found:
            text: str = found.read(_MAX_BYTES).decode(errors="replace")
            return text
    except urllib.error.HTTPError as error:
        error.close()
        return None


def _total(values: list[float] | None) -> int | None:
    return None if values is None else int(sum(values))


def _names(listed: str | None) -> tuple[str, ...] | None:
    try:
        return tuple(str(model["id"]) for model in json.loads(listed or "")["data"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
