"""Batches of KV events as vLLM writes them, byte by byte: tests/data/vllm_kv_events.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).parents[1] / "data/vllm_kv_events.json"


class GoldenEvents(NamedTuple):
    """Maps are what it writes, arrays what it wrote before."""

    stored_map: bytes
    removed_map: bytes  # and all blocks cleared
    stored_array: bytes
    removed_array: bytes


def golden_events() -> GoldenEvents:
    reported = json.loads(_FILE.read_text(encoding="utf-8"))
    return GoldenEvents(**{name: bytes.fromhex(text) for name, text in reported.items()})
