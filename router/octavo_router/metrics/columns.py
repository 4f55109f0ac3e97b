"""Records sorted out by kind, and each kind read column by column: loops that run per request."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = list[list[Any]]  # the records, then the columns


class Sorter:
    """For one class with slots. Compiled twin: csrc/router/bundle.cpp."""

    def __init__(self, type_: type, kind: Sequence[str], columns: Sequence[str], /) -> None:
        self._kind = attrgetter(*kind)
        self._columns = [attrgetter(name) for name in columns]

    def sort_out(self, records: list[Any], /) -> list[Row]:
        """One row for each kind, in the order in which they came first."""
        groups: dict[object, list[Any]] = {}
        for record in records:
            groups.setdefault(self._kind(record), []).append(record)
        return [
            [group, *([column(record) for record in group] for column in self._columns)]
            for group in groups.values()
        ]
