"""Several faults of a configuration in one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def join_faults(faults: Sequence[str]) -> str:
    """One message for all that was found at once. One line, too: of a pod that ended, the last line
    is what its status shows."""
    if len(faults) == 1:
        return faults[0]
    listed = "; ".join(f"({number}) {fault}" for number, fault in enumerate(faults, start=1))
    return f"{len(faults)} settings cannot be used: {listed}"
