"""Does an object still say what we applied? The server may add; it must not differ."""

from __future__ import annotations

import re
from typing import Any

from octavo_operator.objects.quantities import parse_quantity

_QUANTITY = re.compile(r"[0-9.]+([munkMGTPE]|[KMGTPE]i|e[0-9]+)?")


def holds(found: Any, applied: Any) -> bool:
    """Whether every field of `applied` has the same value in `found`, defaults aside."""
    # Plain dicts, for that is what JSON makes: a reconcile compares some hundred fields.
    if isinstance(applied, dict):
        if not isinstance(found, dict):
            return not applied and found is None  # {} is often not stored
        return all(
            holds(found.get(key), value) for key, value in applied.items() if value is not None
        )
    if isinstance(applied, list | tuple):
        if not applied:
            return not found
        if not isinstance(found, list) or len(found) != len(applied):
            return False
        return all(holds(there, here) for there, here in zip(found, applied, strict=True))
    if found == applied:
        return True
    if found is None:  # zero values are often not stored
        return applied in (False, 0, "")
    return _same_quantity(found, applied)


def _same_quantity(found: object, applied: object) -> bool:
    """1000m is stored as 1."""
    texts = (str(found), str(applied))
    if isinstance(found, bool) or isinstance(applied, bool):
        return False
    if not all(_QUANTITY.fullmatch(text) for text in texts):
        return False
    try:
        return parse_quantity(texts[0]) == parse_quantity(texts[1])
    except ValueError:
        return False
