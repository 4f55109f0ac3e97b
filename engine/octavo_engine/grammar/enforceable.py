"""A JSON schema as far as a grammar can hold an answer to it, and the keywords that are left over.

First what means the same in keywords that the compiler knows; then, where the caller allows it,
keywords that no grammar can hold an answer to are taken out: every valid answer stays possible.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

from llguidance import LLMatcher

from octavo_engine.errors import is_failure
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.patterns import without_lookahead
from octavo_engine.grammar.references import resolve
from octavo_engine.grammar.schema import UNSUPPORTED, refusal_at, replace_children

# Formats that have a grammar. All others are annotations, as JSON Schema has it.
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_ANNOTATIONS = ("contentEncoding", "contentMediaType", "contentSchema")
# Keywords that are read only beside another one.
_COMPANIONS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
# What a schema of plain values may have beside them.
_BESIDE_VALUES = {"enum", "const", "type", "title", "description", "default", "examples"}
_APPLICATORS = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "dependencies")
_MAX_ORDERS = 2048  # of the members of all sets, each an array of its own
_MAX_ORDERS_BYTES = 32 << 10


class Enforceable(NamedTuple):
    """`left_over`: keywords that an answer must be validated for, in alphabetical order."""

    schema: Any
    left_over: tuple[str, ...]


def enforceable(schema: Any, *, relax: bool) -> Enforceable:
    """Without `relax` what no grammar enforces raises InvalidRequest by keyword and place."""
    rewriting = _Rewriting(schema, relax=relax)
    result = rewriting.node(schema, "", 1)
    if rewriting.one_of and _overlaps(result):
        rewriting.leave("oneOf", rewriting.one_of[0] if len(rewriting.one_of) == 1 else "")
        result = _as_any_of(result)
    return Enforceable(result, tuple(sorted(rewriting.left_over)))


class _Rewriting:
    def __init__(self, root: Any, *, relax: bool) -> None:
        self._root = root
        self._relax = relax
        self.left_over: set[str] = set()
        self.one_of: list[str] = []  # places
        self._num_nodes = 0
        self._num_orders = 0

    def leave(self, keyword: str, where: str) -> None:
        if not self._relax:
            raise refusal_at(
                f"uses the keyword {keyword!r} in a way that cannot be enforced", where
            )
        self.left_over.add(keyword)

    def node(self, node: Any, where: str, depth: int) -> Any:
        if not isinstance(node, dict) or depth > DEFAULT_LIMITS.max_schema_depth:
            return node  # `check_schema` says what is wrong with it
        self._num_nodes += 1  # one schema may come to stand in many places
        if self._num_nodes > DEFAULT_LIMITS.max_schema_nodes:
            raise refusal_at(f"has more than {DEFAULT_LIMITS.max_schema_nodes} parts", "")
        kept = dict(node)
        for step in (self._annotations, self._items, self._closed, self._names, self._set):
            step(kept, where)
        self._pattern(kept, where)
        for keyword in [key for key in kept if key in UNSUPPORTED]:
            if keyword not in _COMPANIONS:
                self.leave(keyword, where)
            del kept[keyword]
        if isinstance(kept.get("oneOf"), list):
            self.one_of.append(where)
        replace_children(kept, lambda child, place: self.node(child, f"{where}/{place}", depth + 1))
        if kept.pop("nullable", False) is True:
            return {"anyOf": [kept, {"type": "null"}]}
        return kept

    def _annotations(self, kept: dict[str, Any], where: str) -> None:
        given = kept.get("format")
        if isinstance(given, str) and given not in FORMATS:
            del kept["format"]
        for keyword in _ANNOTATIONS:
            kept.pop(keyword, None)
        for keyword, beside in _COMPANIONS.items():
            if beside not in kept:
                kept.pop(keyword, None)
        if "then" not in kept and "else" not in kept:
            kept.pop("if", None)

    def _items(self, kept: dict[str, Any], where: str) -> None:
        """A list of items, as drafts before 2020 have it, and what follows them."""
        rest = kept.pop("additionalItems", True)
        if isinstance(kept.get("items"), list):
            kept["prefixItems"] = kept.pop("items")
            if rest is not True:
                kept["items"] = rest

    def _closed(self, kept: dict[str, Any], where: str) -> None:
        """Where no other schema applies to the same value, what it leaves unevaluated is what its
        own keywords leave over."""
        if any(keyword in kept for keyword in _APPLICATORS):
            return
        for keyword, own in (
            ("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items"),
        ):  # fmt: skip
            if keyword in kept and "contains" not in kept:
                rest = kept.pop(keyword)
                kept.setdefault(own, rest)

    def _names(self, kept: dict[str, Any], where: str) -> None:
        """Names out of a list, or after a pattern, of members that have one schema."""
        rule = self._resolved(kept.get("propertyNames"))
        if not isinstance(rule, dict) or "properties" in kept or "patternProperties" in kept:
            return
        rest = kept.get("additionalProperties", {})
        names = self._values(rule)
        if names is not None and all(isinstance(name, str) for name in names):
            kept["properties"] = dict.fromkeys(names, rest) if rest is not False else {}
        elif isinstance(rule.get("pattern"), str) and set(rule) <= {"pattern", "type", "title"}:
            kept["patternProperties"] = {rule["pattern"]: rest}
        else:
            return
        del kept["propertyNames"]
        kept["additionalProperties"] = False

    def _set(self, kept: dict[str, Any], where: str) -> None:
        """Distinct items out of few values: each order of them, written out."""
        if kept.get("uniqueItems") is not True:
            return
        low, high = kept.get("minItems", 0), kept.get("maxItems")
        if high in (0, 1):
            del kept["uniqueItems"]
            return
        values = None if "prefixItems" in kept else self._values(kept.get("items"))
        kinds = kept.get("type")
        if values is None or kinds not in ("array", ["array"]) or not isinstance(low, int):
            return
        most = min(high, len(values)) if isinstance(high, int) else len(values)
        kept["maxItems"] = most
        orders = list(
            itertools.islice(
                (order for size in range(max(low, 0), most + 1)
                 for order in itertools.permutations(values, size)),
                _MAX_ORDERS + 1,
            )
        )  # fmt: skip
        self._num_orders += len(orders)
        is_short = self._num_orders <= _MAX_ORDERS and len(json.dumps(orders)) <= _MAX_ORDERS_BYTES
        if orders and is_short:
            for keyword in ("type", "items", "minItems", "maxItems", "uniqueItems"):
                kept.pop(keyword, None)
            kept["enum"] = [list(order) for order in orders]

    def _pattern(self, kept: dict[str, Any], where: str) -> None:
        pattern = kept.get("pattern")
        if not isinstance(pattern, str) or not _is_beyond(pattern):
            return
        self.leave("pattern", where)
        parts = without_lookahead(pattern)
        if parts is not None and not _is_beyond(parts.plain):
            kept["pattern"] = parts.plain
        else:
            del kept["pattern"]

    def _values(self, schema: Any) -> list[Any] | None:
        """The different values of a schema that lists them."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict) or not set(schema) <= _BESIDE_VALUES:
            return None
        given = schema.get("enum")
        if given is None:
            if "const" in schema:
                given = [schema["const"]]
            elif schema.get("type") == "boolean":
                given = [False, True]
        if not isinstance(given, list):
            return None
        return list({json.dumps(value, sort_keys=True): value for value in given}.values())

    def _resolved(self, schema: Any) -> Any:
        for _ in range(8):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            if not set(schema) <= _BESIDE_VALUES | {"$ref"}:
                break
            schema = resolve(self._root, schema["$ref"])
        return schema


def _is_beyond(pattern: str) -> bool:
    """Whether the compiler reads the pattern but has no automaton for it."""
    message = _complaint({"type": "string", "pattern": pattern})
    return any(word in message for word in ("look-around", "lookarounds", "backreferences"))


def _overlaps(schema: Any) -> bool:
    return isinstance(schema, dict) and "coerce_one_of" in _complaint(schema)


def _complaint(schema: dict[str, Any]) -> str:
    options = {"coerce_one_of": False, "lenient": False}
    try:
        source = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options}))
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            source, limits=DEFAULT_LIMITS.parser_limits()
        )
    except BaseException as error:
        if not is_failure(error):
            raise
        return ""  # `check` refuses it
    return str(messages[0]) if is_error and messages else ""


def _as_any_of(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    kept = dict(node)
    replace_children(kept, lambda child, _: _as_any_of(child))
    branches = kept.pop("oneOf", None)
    if branches is not None:
        if "anyOf" in kept:
            kept["allOf"] = [*kept.get("allOf", ()), {"anyOf": branches}]
        else:
            kept["anyOf"] = branches
    return kept
