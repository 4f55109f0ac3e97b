"""EBNF as other engines write it (`root ::= …`), translated to Lark's notation."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.limits import DEFAULT_LIMITS

PARAM = "response_format"
_MAX_NESTING = 64
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def to_lark(text: str) -> str:
    """The grammar in Lark's notation; what is in it already comes back as it is.

    A long one is refused unread: translating takes the square of its length.
    """
    if len(text) > DEFAULT_LIMITS.max_ebnf_bytes:
        raise InvalidRequest(
            f"the grammar has more than {DEFAULT_LIMITS.max_ebnf_bytes} bytes", param=PARAM
        )
    if is_lark_syntax(text):
        return text
    _check_nesting(text)
    try:
        return any_to_lark(_ESCAPE.sub(_plain, text))
    except (ValueError, IndexError, RecursionError) as error:
        raise _refusal(error) from None
    except Exception as error:  # the translator raises its own and bare ones
        raise _refusal(error) from None


def _plain(match: re.Match[str]) -> str:
    """Numbered characters as themselves, unless they mean something where they stand."""
    code = match[1] or match[2] or match[3]
    if code is None:
        return match[0]
    number = int(code, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise InvalidRequest(f"the grammar has no character {match[0]}", param=PARAM)
    character = chr(number)
    if number < 0x20 or character in '"\\[]^-/\x7f':
        return f"\\x{number:02x}"
    return character


def _check_nesting(text: str) -> None:
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth > _MAX_NESTING:
            raise InvalidRequest(
                f"the grammar has more than {_MAX_NESTING} groups within groups", param=PARAM
            )


def _refusal(error: Exception) -> InvalidRequest:
    if isinstance(error, InvalidRequest):
        return error
    return InvalidRequest(f"the grammar cannot be read as EBNF: {error}"[:500], param=PARAM)
