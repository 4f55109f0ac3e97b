"""Refuses at the door what would not compile: syntax, limits, unsupported keywords."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLMatcher

from octavo_engine.errors import InvalidRequest, is_failure
from octavo_engine.grammar.limits import DEFAULT_LIMITS, GrammarLimits
from octavo_engine.grammar.panics import explained
from octavo_engine.grammar.schema import PARAM
from octavo_engine.grammar.source import source_of

if TYPE_CHECKING:
    from octavo_engine.state.grammar import GrammarSpec


def check(spec: GrammarSpec, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
    """Raises InvalidRequest. Needs no tokenizer; takes milliseconds, a second for the most hostile,
    with the GIL released."""
    _check_text(spec.text, "the grammar")
    _check_text(spec.whitespace, "whitespace_pattern")
    if spec.after is not None:
        _check_text(spec.after, "after")
        if not 0 < len(spec.after.encode()) <= limits.max_after_bytes:
            raise InvalidRequest(
                f"after must have 1 to {limits.max_after_bytes} bytes", param=PARAM
            )
    source = compiler_source(spec, {}, limits)
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            source, limits=limits.parser_limits()
        )
    except BaseException as error:
        if not is_failure(error):
            raise
        raise refusal("the compiler failed on it") from None
    if is_error:
        raise refusal(messages[0] if messages else "")


def compiler_source(spec: GrammarSpec, specials: dict[str, int], limits: GrammarLimits) -> str:
    """As `source_of`, with the compiler's own complaints as ours."""
    try:
        return source_of(spec, specials, limits)
    except InvalidRequest:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise refusal(str(error)) from None


def refusal(reason: str) -> InvalidRequest:
    """A compiler's message as a caller's error."""
    return InvalidRequest(f"the grammar cannot be used: {explained(reason)}", param=PARAM)


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} is not valid Unicode", param=PARAM) from None
