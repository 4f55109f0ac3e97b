"""All faults of what checks itself and stops at the first: flags, and the resources of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

E = TypeVar("E", bound=Exception)


def all_faults(
    kind: type[E],
    attempt: Callable[[], object],
    is_ours: Callable[[E], bool],
    leave_out: Callable[[E], bool],
) -> list[str]:
    """What a fault names is left out and the rest tried again, until nothing is left to leave out.

    `is_ours`: the fault concerns what was left out, and so may be of our making: it is not
    reported. `leave_out`: whether there was anything to leave out."""
    faults: list[str] = []
    while True:
        try:
            attempt()
        except kind as error:
            if not is_ours(error):
                faults.append(str(error))
            if not leave_out(error):
                return faults
        else:
            return faults
