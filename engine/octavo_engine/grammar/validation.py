"""Whether a value is valid under a JSON schema: for the keywords that no grammar enforces.

Texts meet patterns in the grammar compiler's automata, whose time is linear and bounded: a pattern
comes from the same stranger as the text. Formats are annotations here.
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

from octavo_engine.errors import is_failure
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.patterns import without_lookahead
from octavo_engine.grammar.references import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_STEPS = 200_000  # keywords and values of lists that are looked at for one answer


class Undecided(Exception):
    """A keyword that is not known here, or too much work."""


def verdict(text: str, schema: Any) -> bool | None:
    """Whether an answer is valid; None: it is not known."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    try:
        return _Validation(schema).holds(value, schema)
    except (Undecided, RecursionError):
        return None
    except (TypeError, AttributeError, ValueError, OverflowError):
        return None  # a part of the schema that is none, where the grammar did not need it


class _Validation:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._patterns: dict[str, LLMatcher] = {}

    @cached_property
    def _bytes(self) -> LLTokenizer:
        return LLTokenizer("byte")

    def holds(self, value: Any, schema: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict) or any(key in schema for key in _UNKNOWN):
            raise Undecided
        if value is None and schema.get("nullable") is True:
            return True
        self._count(len(schema))
        for keyword, given in schema.items():
            rule = _RULES.get(keyword)
            if rule is not None and not rule(self, value, given, schema):
                return False
        return True

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise Undecided

    def matches(self, text: str, pattern: str) -> bool:
        """As a search, as JSON Schema has it. Raises Undecided."""
        parts = without_lookahead(pattern)
        if parts is not None:
            ahead = all(
                self._matches(text, f"^(?:{one.inner})") is not one.is_negative
                for one in parts.lookaheads
            )
            return ahead and self._matches(text, parts.plain)
        return self._matches(text, pattern)

    def _matches(self, text: str, pattern: str) -> bool:
        matcher = self._patterns.get(pattern)
        try:
            if matcher is None:
                source = json.dumps({"type": "string", "pattern": pattern})
                matcher = self._patterns[pattern] = LLMatcher(
                    self._bytes, LLMatcher.grammar_from_json_schema(source),
                    limits=DEFAULT_LIMITS.parser_limits(), log_level=0,
                )  # fmt: skip
            walk = matcher.deep_copy()
            spelled = list(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass"))
            whole = walk.try_consume_tokens(spelled) == len(spelled) and walk.is_accepting()
        except BaseException as error:
            if not is_failure(error):
                raise
            raise Undecided from None
        if walk.is_error() and not whole and matcher.is_error():
            raise Undecided
        return whole

    # ── any value ──

    def reference(self, value: Any, given: Any, schema: Any) -> bool:
        target = resolve(self._root, given) if isinstance(given, str) else None
        if target is None:
            raise Undecided
        return self.holds(value, target)

    def type(self, value: Any, given: Any, schema: Any) -> bool:
        kinds = given if isinstance(given, list) else [given]
        return any(_is_type(value, kind) for kind in kinds)

    def enum(self, value: Any, given: Any, schema: Any) -> bool:
        self._count(len(given))
        return _key(value) in map(_key, given)

    def const(self, value: Any, given: Any, schema: Any) -> bool:
        return _key(value) == _key(given)

    def all_of(self, value: Any, given: Any, schema: Any) -> bool:
        return all(self.holds(value, child) for child in given)

    def any_of(self, value: Any, given: Any, schema: Any) -> bool:
        return any(self.holds(value, child) for child in given)

    def one_of(self, value: Any, given: Any, schema: Any) -> bool:
        return sum(self.holds(value, child) for child in given) == 1

    def no(self, value: Any, given: Any, schema: Any) -> bool:
        return not self.holds(value, given)

    def if_(self, value: Any, given: Any, schema: Any) -> bool:
        keyword = "then" if self.holds(value, given) else "else"
        return self.holds(value, schema.get(keyword, True))

    # ── numbers and texts ──

    def multiple(self, value: Any, given: Any, schema: Any) -> bool:
        if not _is_number(value) or not given:
            return True
        quotient = value / given
        return math.isfinite(quotient) and abs(quotient - round(quotient)) < 1e-9

    def pattern(self, value: Any, given: Any, schema: Any) -> bool:
        return not isinstance(value, str) or self.matches(value, str(given))

    # ── arrays ──

    def items(self, value: Any, given: Any, schema: Any) -> bool:
        if not isinstance(value, list):
            return True
        if isinstance(given, list):  # drafts before 2020
            rest = schema.get("additionalItems", True)
            return self._first(value, given) and all(
                self.holds(item, rest) for item in value[len(given) :]
            )
        return all(self.holds(item, given) for item in value[len(schema.get("prefixItems", ())) :])

    def prefix_items(self, value: Any, given: Any, schema: Any) -> bool:
        return not isinstance(value, list) or self._first(value, given)

    def _first(self, value: list[Any], given: list[Any]) -> bool:
        return all(self.holds(item, child) for item, child in zip(value, given, strict=False))

    def contains(self, value: Any, given: Any, schema: Any) -> bool:
        if not isinstance(value, list):
            return True
        number = sum(self.holds(item, given) for item in value)
        low, high = schema.get("minContains", 1), schema.get("maxContains", math.inf)
        return bool(low <= number <= high)

    def unique(self, value: Any, given: Any, schema: Any) -> bool:
        if not given or not isinstance(value, list):
            return True
        return len(set(map(_key, value))) == len(value)

    # ── objects ──

    def properties(self, value: Any, given: Any, schema: Any) -> bool:
        return not isinstance(value, dict) or all(
            self.holds(value[name], child) for name, child in given.items() if name in value
        )

    def pattern_properties(self, value: Any, given: Any, schema: Any) -> bool:
        return not isinstance(value, dict) or all(
            self.holds(item, child)
            for pattern, child in given.items()
            for name, item in value.items()
            if self.matches(name, pattern)
        )

    def additional(self, value: Any, given: Any, schema: Any) -> bool:
        if not isinstance(value, dict):
            return True
        own, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        return all(
            self.holds(item, given)
            for name, item in value.items()
            if name not in own and not any(self.matches(name, pattern) for pattern in patterns)
        )

    def names(self, value: Any, given: Any, schema: Any) -> bool:
        return not isinstance(value, dict) or all(self.holds(name, given) for name in value)

    def required(self, value: Any, given: Any, schema: Any) -> bool:
        return not isinstance(value, dict) or all(name in value for name in given)

    def dependencies(self, value: Any, given: Any, schema: Any) -> bool:
        if not isinstance(value, dict):
            return True
        return all(
            self.required(value, rule, schema)
            if isinstance(rule, list)
            else self.holds(value, rule)
            for name, rule in given.items()
            if name in value
        )


def _key(value: Any) -> str:
    """Equal for values that JSON Schema holds equal: 1 and 1.0, but not 1 and true."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: dict[Any, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),
}


def _is_type(value: Any, kind: Any) -> bool:
    test = _TYPES.get(kind) if isinstance(kind, str) else None
    if test is None:
        raise Undecided
    return test(value)


def _sized(kind: type, limit: Callable[[int, Any], bool]) -> Callable[..., bool]:
    return lambda _, value, given, schema: (
        not isinstance(value, kind) or limit(len(value), given)  # type: ignore[arg-type]
    )


def _bounded(limit: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    return lambda _, value, given, schema: not _is_number(value) or limit(value, given)


_UNKNOWN = (
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "extends",
    "disallow", "divisibleBy",
)  # fmt: skip
_V = _Validation
_RULES: dict[str, Callable[..., bool]] = {
    "$ref": _V.reference, "type": _V.type, "enum": _V.enum, "const": _V.const,
    "allOf": _V.all_of, "anyOf": _V.any_of, "oneOf": _V.one_of, "not": _V.no, "if": _V.if_,
    "minimum": _bounded(lambda value, given: value >= given),
    "maximum": _bounded(lambda value, given: value <= given),
    "exclusiveMinimum": _bounded(lambda value, given: value > given),
    "exclusiveMaximum": _bounded(lambda value, given: value < given),
    "multipleOf": _V.multiple, "pattern": _V.pattern,
    "minLength": _sized(str, lambda size, given: size >= given),
    "maxLength": _sized(str, lambda size, given: size <= given),
    "items": _V.items, "prefixItems": _V.prefix_items, "contains": _V.contains,
    "minItems": _sized(list, lambda size, given: size >= given),
    "maxItems": _sized(list, lambda size, given: size <= given),
    "uniqueItems": _V.unique, "properties": _V.properties,
    "patternProperties": _V.pattern_properties, "additionalProperties": _V.additional,
    "propertyNames": _V.names, "required": _V.required,
    "dependentRequired": _V.dependencies, "dependentSchemas": _V.dependencies,
    "dependencies": _V.dependencies,
    "minProperties": _sized(dict, lambda size, given: size >= given),
    "maxProperties": _sized(dict, lambda size, given: size <= given),
}  # fmt: skip
