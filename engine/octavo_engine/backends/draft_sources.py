"""All that can draft for a model, as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo_engine.backends.draft_part import DraftHeadPart, DraftPart
    from octavo_engine.backends.head_files import HeadsPart


class DraftSources(NamedTuple):
    """What drafts, of which one is given at most."""

    model: DraftPart | None = None
    head: DraftHeadPart | None = None
    heads: HeadsPart | None = None

    @property
    def is_any(self) -> bool:
        return any(part is not None for part in self)
