"""Pages of Anthropic's lists: limit, after_id and before_id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    T = TypeVar("T")

MAX_LISTED, LISTED = 1000, 20


def page_of(
    items: Sequence[T], id_of: Callable[[T], str], what: str, *, limit: int | None,
    after_id: str | None, before_id: str | None,
) -> tuple[Sequence[T], bool]:  # fmt: skip
    """Items behind `after_id` or before `before_id`, and whether there are more that way.

    Raises InvalidRequest.
    """
    limit = LISTED if limit is None else limit
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidRequest(
            f"limit must be between 1 and {MAX_LISTED}; got {limit}", param="limit"
        )
    ids = [id_of(item) for item in items]
    if before_id is not None:
        items = items[: _place(ids, "before_id", before_id, what)]
        return items[-limit:], len(items) > limit
    if after_id is not None:
        items = items[_place(ids, "after_id", after_id, what) + 1 :]
    return items[:limit], len(items) > limit


def _place(ids: list[str], field: str, id_: str, what: str) -> int:
    if id_ not in ids:
        raise InvalidRequest(f"{field}: no {what} has the id {id_[:128]}", param=field)
    return ids.index(id_)
