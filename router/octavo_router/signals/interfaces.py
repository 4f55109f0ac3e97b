"""What signals need of the others: an index to write to, and someone who keeps states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo_router.endpoints.endpoint import Endpoint, State


class ResidencySink(Protocol):
    """The part of ResidencyIndex that signals write."""

    def add_slot(self) -> int: ...

    def drop_slot(self, slot: int, /) -> None: ...

    def apply(self, slot: int, stored: bytes, evicted: bytes, /) -> None:
        """Keys reported by an engine, in protocol.stream's packing; `evicted` goes first."""

    def clear(self, slot: int, /) -> None:
        """Nothing is known any more."""


class StateSink(Protocol):
    """Takes what was found out about an endpoint."""

    def __call__(self, endpoint: Endpoint, state: State, reason: str) -> None: ...


class States(Protocol):
    """The part of the registry that signals tell."""

    def report(self, endpoint: Endpoint, state: State, reason: str = "") -> None: ...

    def changed(self, endpoint: Endpoint) -> None:
        """Its names, adapters or limits are others."""
