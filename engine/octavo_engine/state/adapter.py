"""LoRA adapters as requests and steps know them: by the digest of their content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

PackedAdapter: TypeAlias = Any  # a backend's own


class AdapterRef(msgspec.Struct, frozen=True):
    """Which adapter a request wants. Crosses the process boundary as msgpack."""

    name: str  # that clients call it by; two names may have one content
    path: str  # the folder it is read from where it is not in memory
    digest: str  # of its settings and weights


class AdapterLoaded(msgspec.Struct, frozen=True):
    """An adapter is in the host's memory; the answer to a load command."""

    load_id: str
    digest: str
    rank: int  # the highest of its layers
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class HeldAdapter:
    """An adapter in the host's memory, in the form that its backend computes with."""

    digest: str
    rank: int
    num_bytes: int
    packed: PackedAdapter


class AdapterPlacement(NamedTuple):
    """From this step on a slot of the backend holds this adapter."""

    slot: int
    adapter: HeldAdapter
