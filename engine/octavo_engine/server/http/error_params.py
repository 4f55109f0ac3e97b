"""Errors of a chat that was made from another protocol's body, in the words of its client."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from octavo_engine.server.http.errors import rename

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from octavo_engine.errors import RequestError

_MESSAGE = re.compile(r"messages\[(\d+)\]")


def blame(
    error: RequestError,
    names: Mapping[str, str],
    places: Sequence[str],
    *,
    tool: Callable[[str], str],
) -> None:
    """`places` are the fields that the chat's messages came from; `names` has the other fields,
    and `tool` makes one of a field of the chat's tools."""
    before = error.param
    if before is None:
        return
    after = names.get(before, before)
    if met := _MESSAGE.match(before):
        number = int(met[1])
        place = places[number] if number < len(places) else names.get("messages", "messages")
        after = place + before[met.end() :]
    elif before.startswith("tools["):
        after = tool(before)
    rename(error, after)
