"""What a caller already has of an answer that another engine began."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """One answer, as far as it was told. It is replayed in silence and goes on from there."""

    token_ids: list[int] = field(default_factory=list)
    ended: bool = False  # its end was told too: there is nothing left to say of it
