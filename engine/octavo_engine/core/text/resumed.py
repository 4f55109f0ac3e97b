"""What a client already has of an answer that another engine began."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """One answer as far as its client has it. It is replayed without output and continues there."""

    token_ids: list[int] = field(default_factory=list)
    ended: bool = False  # its client has its end too: nothing is left to send
    # How many tokens came at once, where that matters to what is made of them; else empty.
    pieces: tuple[int, ...] = ()
