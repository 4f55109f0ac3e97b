"""A spec as the compiler's own source text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.numbers import check_grammar_numbers
from octavo_engine.grammar.references import check_references
from octavo_engine.grammar.schema import PARAM, check_schema, with_options
from octavo_engine.grammar.tags import tags_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.grammar.limits import GrammarLimits
    from octavo_engine.state.grammar import GrammarSpec

# White space between JSON's tokens: a blank or tab, or the end of a line and any indentation. More
# would be tokens that say nothing, and small models can write them for ever.
WHITESPACE = r"([\x20\x09]|\x0D?\x0A(\x20{0,32}|\x09{0,16}))?"
_SPECIAL_IN_REGEX = frozenset("\\.+*?()|[]{}^$#&-~/")


def source_of(
    spec: GrammarSpec,
    specials: Mapping[str, int] | None = None,
    limits: GrammarLimits = DEFAULT_LIMITS,
) -> str:
    """Raises InvalidRequest where the spec is beyond the limits. `specials` are control tokens by
    their text: a structural tag that spells one means the token."""
    match spec.kind:
        case "json_schema":
            _check_size(spec.text, limits.max_schema_bytes, "the JSON schema")
            schema = parsed(spec.text)
            check_schema(schema, limits)
            check_references(schema)
            _check_size(spec.whitespace, limits.max_regex_bytes, "whitespace_pattern")
            whitespace = WHITESPACE if spec.any_whitespace else None
            return LLMatcher.grammar_from_json_schema(
                json.dumps(with_options(schema, spec.whitespace or whitespace))
            )
        case "regex":
            _check_size(spec.text, limits.max_regex_bytes, "the regular expression")
            return LLMatcher.grammar_from_lark(f"start: /{lark_regex(spec.text)}/")
        case "choice":
            _check_size(spec.text, limits.max_schema_bytes, "choice")
            return LLMatcher.grammar_from_regex(_any_of(parsed(spec.text), limits))
        case "lark":
            _check_size(spec.text, limits.max_grammar_bytes, "the grammar")
            check_grammar_numbers(spec.text)
            return LLMatcher.grammar_from_lark(spec.text)
        case "structural_tag":
            _check_size(spec.text, limits.max_schema_bytes, "the structural tag")
            whitespace = WHITESPACE if spec.any_whitespace else None
            return tags_source(parsed(spec.text), specials or {}, limits, whitespace)


def lark_regex(pattern: str) -> str:
    r"""For use between slashes. \d, \w and \s mean ASCII, as in most engines: \d{4}
    is not meant to match other scripts' digits."""
    return regex_to_lark(pattern, "dws")


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not valid JSON: {error}", param=PARAM) from None


def _any_of(choices: object, limits: GrammarLimits) -> str:
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise InvalidRequest("choice must be a list of texts that are not empty", param=PARAM)
    if not 1 <= len(choices) <= limits.max_choices:
        raise InvalidRequest(f"choice has 1 to {limits.max_choices} texts", param=PARAM)
    return "|".join(map(_escaped, choices))


def _escaped(text: str) -> str:
    return "".join("\\" + c if c in _SPECIAL_IN_REGEX else c for c in text)


def _check_size(text: str, limit: int, what: str) -> None:
    if len(text) > limit or len(text.encode("utf-8", "surrogatepass")) > limit:
        raise InvalidRequest(f"{what} has more than {limit} bytes", param=PARAM)
