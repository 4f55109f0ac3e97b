"""JSON schemas as the compiler may get them: keywords, depth, number; and strictness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.numbers import check_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo_engine.grammar.limits import GrammarLimits

PARAM = "response_format"

# Keywords that assert something which no grammar holds an answer to. Other unknown ones are
# annotations, as JSON Schema has it.
UNSUPPORTED = frozenset(
    {
        "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies",
        "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
        "unevaluatedProperties", "unevaluatedItems",
    }
)  # fmt: skip
# Of old drafts and of schemas that are put together while they are read: refused in any case.
_UNKNOWN = frozenset({"$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy"})
# Values with which such a keyword asserts nothing.
_HARMLESS: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentSchemas": ({},),
    "dependentRequired": ({},),
    "not": (False,),
}
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties")
MAX_INTEGER = 9 * 10**18  # of numbers that a schema leaves open; they fit 64 bits
_OPTIONS = "x-guidance"  # the compiler's own settings: not for requests


def check_schema(schema: object, limits: GrammarLimits = DEFAULT_LIMITS) -> None:
    """Raises InvalidRequest that names keyword and place."""
    num_nodes = 0
    pending: list[tuple[object, str, int]] = [(schema, "", 1)]
    while pending:
        node, where, depth = pending.pop()
        num_nodes += 1
        if num_nodes > limits.max_schema_nodes:
            raise refusal_at(f"has more than {limits.max_schema_nodes} parts", "")
        if depth > limits.max_schema_depth:
            raise refusal_at(f"is nested more than {limits.max_schema_depth} deep", where)
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise refusal_at(f"has {type(node).__name__} where a schema must be", where)
        _check_keywords(node, where, limits)
        pending += [(child, f"{where}/{place}", depth + 1) for place, child in _children(node)]
    check_numbers(schema)


def stripped(schema: Any, *, close: bool) -> Any:
    """The schema without keywords that assert nothing; with `close`, objects that list their
    properties have no others."""
    return _rebuilt(schema, close=close, depth=0)


def bounded(schema: Any) -> Any:
    """The schema with bounds on whole numbers that have none: small models can write digits for
    ever. `check_schema` has seen it, so it ends."""
    if not isinstance(schema, dict):
        return schema
    kept = dict(schema)
    replace_children(kept, lambda child, _: bounded(child))
    kinds = kept.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds:
        return kept
    if any(word in kept for word in ("const", "enum", "multipleOf")):
        return kept
    low = kept.get("minimum", kept.get("exclusiveMinimum"))
    high = kept.get("maximum", kept.get("exclusiveMaximum"))
    # A bound of the schema's own beyond ours leaves the other side open.
    if low is None and (high is None or _is_below(-MAX_INTEGER, high)):
        kept["minimum"] = -MAX_INTEGER
    if high is None and (low is None or _is_below(low, MAX_INTEGER)):
        kept["maximum"] = MAX_INTEGER
    # The compiler cannot count to the ends of 64 bits, which types of other languages bring.
    if _is_below(low, -MAX_INTEGER) and _is_below(-MAX_INTEGER, kept.get("maximum", high)):
        kept.pop("exclusiveMinimum", None)
        kept["minimum"] = -MAX_INTEGER
    if _is_below(MAX_INTEGER, high) and _is_below(kept.get("minimum", low), MAX_INTEGER):
        kept.pop("exclusiveMaximum", None)
        kept["maximum"] = MAX_INTEGER
    return kept


def with_options(schema: Any, whitespace: str | None) -> dict[str, Any]:
    """The schema, its whole numbers bounded, with the compiler's settings at its root."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    options: dict[str, Any] = {
        "whitespace_flexible": whitespace is not None,
        "coerce_one_of": False,
        "lenient": False,
    }
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    return {**bounded(schema), "x-guidance": options}


def _is_below(low: object, high: object) -> bool:
    """False for what is no number: the compiler will say so."""
    return isinstance(low, int | float) and isinstance(high, int | float) and low < high


def _check_keywords(node: dict[Any, Any], where: str, limits: GrammarLimits) -> None:
    for keyword, value in node.items():
        if keyword in UNSUPPORTED or keyword in _UNKNOWN:
            raise refusal_at(f"uses the keyword {keyword!r}, which is not supported", where)
        if keyword == _OPTIONS:
            raise refusal_at(f"may not have {_OPTIONS!r}", where)
        if keyword == "enum" and (not isinstance(value, list) or len(value) > limits.max_enum):
            raise refusal_at(f"needs a list of at most {limits.max_enum} values as enum", where)
        if keyword in _LISTS and keyword != "prefixItems":
            if not isinstance(value, list) or not value:
                raise refusal_at(f"needs a list of schemas as {keyword}", where)
            if len(value) > limits.max_branches:
                raise refusal_at(
                    f"has more than {limits.max_branches} branches in {keyword}", where
                )
        if keyword in _MAPS and not isinstance(value, dict):
            raise refusal_at(f"needs an object as {keyword}", where)
        if keyword == "prefixItems" and not isinstance(value, list):
            raise refusal_at("needs a list of schemas as prefixItems", where)
        if keyword == "$ref" and not (isinstance(value, str) and value.startswith("#")):
            raise refusal_at("has a $ref that does not begin with '#'", where)


def _is_harmless(keyword: str, value: object) -> bool:
    return any(value is known or value == known == {} for known in _HARMLESS.get(keyword, ()))


def _children(node: dict[Any, Any]) -> Iterator[tuple[str, object]]:
    for keyword in _LISTS:
        for index, child in enumerate(node.get(keyword, ())):
            yield f"{keyword}/{index}", child
    for keyword in _MAPS:
        for name, child in node.get(keyword, {}).items():
            yield f"{keyword}/{name}", child
    for keyword in _SINGLE:
        if keyword in node:
            yield keyword, node[keyword]


def _rebuilt(node: Any, *, close: bool, depth: int) -> Any:
    if not isinstance(node, dict) or depth > DEFAULT_LIMITS.max_schema_depth:
        return node  # `check_schema` will say what is wrong with it

    def child(value: Any, place: str) -> Any:
        # Closing each part of an allOf would let none have the properties of the others.
        return _rebuilt(value, close=close and not place.startswith("allOf/"), depth=depth + 1)

    kept = {
        key: value
        for key, value in node.items()
        if key != _OPTIONS and not _is_harmless(key, value)
    }
    replace_children(kept, child)
    is_whole = not any(key in kept for key in ("allOf", "anyOf", "oneOf", "$ref"))
    says_more = "additionalProperties" in kept or "patternProperties" in kept
    if close and is_whole and not says_more and isinstance(kept.get("properties"), dict):
        kept["additionalProperties"] = False
    return kept


def replace_children(kept: dict[str, Any], child: Callable[[Any, str], Any]) -> None:
    """`child` is given a schema directly inside this one and its place."""
    for key in _LISTS:
        if isinstance(kept.get(key), list):
            kept[key] = [child(value, f"{key}/{at}") for at, value in enumerate(kept[key])]
    for key in _MAPS:
        if isinstance(kept.get(key), dict):
            kept[key] = {name: child(value, f"{key}/{name}") for name, value in kept[key].items()}
    for key in _SINGLE:
        if key in kept:
            kept[key] = child(kept[key], key)


def refusal_at(what: str, where: str) -> InvalidRequest:
    place = f" (at {where:.200})" if where else ""
    return InvalidRequest(f"the JSON schema {what}{place}", param=PARAM)
