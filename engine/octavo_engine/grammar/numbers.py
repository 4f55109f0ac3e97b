"""Numbers that the compiler cannot take: it dies of whole ones near the least of 64 bits.

For a range of whole numbers it makes a regular expression, and where the upper end is within some
hundreds of -2**63 its arithmetic overflows and recurses until the stack ends: no exception, the
process is gone. Lower ends alone do no harm, and are what types of other languages bring.
"""

from __future__ import annotations

import re
from typing import Any, Final

from octavo_engine.errors import InvalidRequest

LEAST_UPPER_END: Final = -9 * 10**18
_PARAM: Final = "response_format"
_UPPER_ENDS: Final = ("maximum", "exclusiveMaximum")
_LOWER_ENDS: Final = ("minimum", "exclusiveMinimum")
_NUMBER: Final = re.compile(r"-\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def check_numbers(schema: Any) -> None:
    """All of it, for a reference may point anywhere. Raises InvalidRequest."""
    pending: list[tuple[Any, bool]] = [(schema, False)]
    while pending:
        node, is_value = pending.pop()
        if isinstance(node, dict):
            for key, child in node.items():
                if key not in _LOWER_ENDS or isinstance(child, dict | list):
                    is_upper = is_value or key in ("const", "enum", *_UPPER_ENDS)
                    pending.append((child, is_upper))
        elif isinstance(node, list):
            pending += [(child, is_value) for child in node]
        elif is_value and isinstance(node, int | float) and node < LEAST_UPPER_END:
            raise _refusal()


def check_grammar_numbers(text: str) -> None:
    """Of the schemas inside a grammar in Lark's notation. Raises InvalidRequest."""
    if "%json" in text and any(float(number) < LEAST_UPPER_END for number in _NUMBER.findall(text)):
        raise _refusal()


def _refusal() -> InvalidRequest:
    return InvalidRequest(
        f"the JSON schema has a number below {LEAST_UPPER_END} as a value or as an upper bound; "
        "leave the bound out, or take a greater number",
        param=_PARAM,
    )
