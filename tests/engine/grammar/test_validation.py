"""Answers validated after they were generated, against an independent implementation."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.grammar.validation import verdict

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from([0.5, 2.0])
    | st.text("ab1", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)  # fmt: skip
small = st.integers(0, 3)


def with_keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    names = st.lists(st.sampled_from("abc"), unique=True, max_size=2)
    some = st.lists(inner, min_size=1, max_size=2)
    return st.fixed_dictionaries({}, optional={
        "type": st.sampled_from(["object", "array", "string", "integer", "number", "null"]),
        "not": inner, "if": inner, "then": inner, "else": inner, "anyOf": some, "oneOf": some,
        "allOf": some, "enum": st.lists(values, min_size=1, max_size=3), "const": values,
        "properties": members, "additionalProperties": inner, "required": names,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=1),
        "propertyNames": inner, "dependentSchemas": members,
        "dependentRequired": st.dictionaries(st.sampled_from("abc"), names, max_size=1),
        "items": inner, "prefixItems": some, "contains": inner, "minContains": small,
        "maxContains": small, "uniqueItems": st.booleans(), "minItems": small, "maxItems": small,
        "minLength": small, "maxLength": small, "pattern": st.sampled_from(["^a+$", "1", DECIMAL]),
        "minimum": small, "exclusiveMaximum": small, "multipleOf": st.sampled_from([2, 0.5]),
        "minProperties": small, "maxProperties": small,
    })  # fmt: skip


schemas: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.just({}), with_keywords, max_leaves=4
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(schema=schemas, value=values)
def test_verdicts_are_those_of_another_validator(schema: Any, value: Any) -> None:
    expected = jsonschema_rs.Draft202012Validator(schema).is_valid(value)
    assert verdict(json.dumps(value), schema) == expected


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("{", {}, False),
        ('"+"', {"pattern": DECIMAL}, False),
        ('"+1"', {"pattern": DECIMAL}, True),
        ('"ab"', {"pattern": "a(?=b)"}, None),
        ("null", {"type": "string", "nullable": True}, True),
        ("[1,2]", {"items": [{"type": "integer"}], "additionalItems": False}, False),
        ('{"a":1}', {"dependencies": {"a": ["b"]}}, False),
        ("1", {"$ref": "#"}, None),
        ("1", {"not": {"minimum": "x"}}, None),
        ("1", {"unevaluatedItems": False}, None),
        ("1", {"$ref": "https://example.org/s.json"}, None),
    ],
)
def test_what_is_valid_what_is_not_and_what_is_unknown(
    text: str, schema: Any, expected: bool | None
) -> None:
    assert verdict(text, schema) is expected


@pytest.mark.slow
def test_no_pattern_and_no_schema_takes_long() -> None:
    bombs: list[tuple[str, Any]] = [
        (json.dumps("a" * 5000 + "b"), {"pattern": "^(a+)+$"}),
        (json.dumps([1] * 2000), {"items": {"enum": list(range(2000, 4000))}, "not": {}}),
        ("1", {"anyOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}] * 50},
            "b": {"anyOf": [{"$ref": "#/$defs/c"}] * 50},
            "c": {"anyOf": [{"$ref": "#/$defs/d"}] * 50}, "d": {"anyOf": [{"const": 2}] * 50}}}),
    ]  # fmt: skip
    began_at = time.thread_time()
    for text, schema in bombs:
        assert verdict(text, schema) in (False, None)
    assert time.thread_time() - began_at < 5
