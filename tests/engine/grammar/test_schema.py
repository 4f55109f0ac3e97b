"""Which schemas are served: what comes out is valid, and what we cannot hold to is named."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.check import check
from octavo_engine.grammar.normal import (
    grammar_spec,
    json_schema_spec,
    regex_spec,
    structural_tag_spec,
)
from octavo_engine.grammar.schema import MAX_INTEGER
from octavo_engine.state.grammar import GrammarSpec
from tests.engine.grammar.validity import is_valid
from tests.engine.grammar.walking import accepts, begins, draw

NOT_ENFORCED: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "null"}},
    "if": {"if": {"type": "null"}, "then": {"const": 1}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "contains": {"type": "array", "contains": {"const": 1}},
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"minLength": 2}},
    "unevaluatedProperties": {"$ref": "#/$defs/o", "unevaluatedProperties": False},
    "pattern": {"type": "string", "pattern": "a(?=b)"},
    "oneOf": {"oneOf": [{"type": "string"}, {"minLength": 2, "type": "string"}]},
}  # fmt: skip


def around(part: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, part]}},
        "$defs": {"o": {"type": "object"}}, "required": ["a"],
    }  # fmt: skip


@pytest.mark.parametrize("keyword", NOT_ENFORCED)
def test_a_keyword_that_no_grammar_enforces_is_named_with_its_place(keyword: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(json_schema_spec(around(NOT_ENFORCED[keyword])))
    assert repr(keyword) in caught.value.message
    assert "/properties/a/anyOf/1" in caught.value.message
    assert "coerce" not in caught.value.message, "an option that no caller has"


@pytest.mark.parametrize("keyword", NOT_ENFORCED)
def test_a_relaxed_schema_goes_without_it_and_says_so(keyword: str) -> None:
    spec = json_schema_spec(around(NOT_ENFORCED[keyword]), relax=True)
    check(spec)
    assert spec.left_over == (keyword,)


@pytest.mark.parametrize("keyword", ["$dynamicRef", "$recursiveRef", "disallow", "divisibleBy"])
def test_keywords_of_other_drafts_are_refused_in_any_case(keyword: str) -> None:
    for relax in (False, True):
        with pytest.raises(InvalidRequest, match="anyOf/1") as caught:
            check(json_schema_spec(around({keyword: 2}), relax=relax))
        assert repr(keyword) in caught.value.message


COLOURS = {"enum": ["red", "green", "blue"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "binary"}, '"x"', "3"),
        ({"type": "string", "format": "uri-reference", "maxLength": 2}, '"x"', '"xyz"'),
        ({"type": "string", "contentEncoding": "base64"}, '"x"', "3"),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, "[1]",
         "[1,2]"),
        ({"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "null"}},
         "[1,null]", "[1,2]"),
        ({"type": "string", "nullable": True}, "null", "3"),
        ({"type": "array", "items": COLOURS, "uniqueItems": True}, '["blue","red"]',
         '["blue","blue"]'),
        ({"type": "array", "items": {"$ref": "#/$defs/c"}, "uniqueItems": True, "minItems": 2,
          "$defs": {"c": COLOURS}}, '["blue","red"]', '["blue"]'),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, "[true,false]",
         "[true,true]"),
        ({"type": "object", "propertyNames": COLOURS, "additionalProperties": {"type": "null"}},
         '{"red":null}', '{"pink":null}'),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, '{"a":1}', '{"A":1}'),
        ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, '{"a":1}',
         '{"b":1}'),
        ({"type": "object", "properties": {"a": {}}, "then": {"required": ["b"]}}, '{"a":1}', "3"),
        ({"enum": list(range(5000))}, "4999", "5000"),
        ({"anyOf": [{"const": i} for i in range(200)]}, "199", "200"),
    ],
)  # fmt: skip
def test_what_common_tools_emit_is_enforced(schema: Any, good: str, bad: str) -> None:
    spec = json_schema_spec(schema)
    assert spec.left_over == ()
    assert accepts(spec, good)
    assert not accepts(spec, bad)


def test_a_decimal_s_pattern_keeps_what_is_not_look_ahead() -> None:
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    spec = json_schema_spec({"type": "string", "pattern": pattern}, relax=True)
    assert spec.left_over == ("pattern",)
    assert accepts(spec, '"12.50"') and not accepts(spec, '"x"')


def test_a_schema_that_stands_in_many_places_counts_in_each() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(6):
        names = {"enum": [f"n{i}" for i in range(90)]}
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    with pytest.raises(InvalidRequest, match="8192"):
        json_schema_spec(schema)


def test_sets_are_written_out_as_far_as_there_is_room() -> None:
    few = {"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True}
    schema = {"type": "object", "properties": {f"p{i}": few for i in range(100)}}
    spec = json_schema_spec(schema, relax=True)
    assert spec.left_over == ("uniqueItems",) and len(spec.text) < 100_000


def test_a_large_set_has_no_more_items_than_values() -> None:
    schema = {"type": "array", "items": {"enum": list(range(20))}, "uniqueItems": True}
    spec = json_schema_spec(schema, relax=True)
    assert spec.left_over == ("uniqueItems",)
    assert not accepts(spec, "[" + ",".join(["1"] * 21) + "]")


def test_what_asserts_nothing_is_no_obstacle() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T", "description": "D", "examples": [1], "default": {"not": 1}, "x-own": 3,
        "discriminator": {"propertyName": "t"}, "deprecated": True,
        "type": "object", "unevaluatedProperties": True,
        "properties": {"not": {"type": "array", "items": {"type": "string"}, "uniqueItems": False}},
    }  # fmt: skip
    assert accepts(json_schema_spec(schema), '{"not":["a","a"]}')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"enum": list(range(9000))}, "enum"),
        ({"anyOf": [{"const": i} for i in range(257)]}, "branches"),
        ({"anyOf": []}, "anyOf"),
        ({"properties": []}, "properties"),
        ({"$ref": "https://example.org/s.json"}, "ref"),
        ({"$ref": "#/$defs/none"}, "none|exist"),
        ({"properties": {str(i): {} for i in range(9000)}}, "8192"),
        ({"const": "x" * 2_000_000}, "1048576"),
        ({"type": "strange"}, "strange"),
        ({"type": "string", "pattern": "(?<=a)b"}, "'pattern'"),
        (False, "false|empty|[Uu]nsat"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2, "type": "string"}]}, "oneOf"),
    ],
)
def test_schemas_beyond_limits_or_reason(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check(json_schema_spec(schema))


LEAST = -(2**63)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": LEAST}, {"enum": ["x", LEAST + 7]}, {"const": {"a": [LEAST]}},
        {"type": "integer", "minimum": LEAST, "maximum": LEAST + 9},
        {"type": "integer", "minimum": -1e300, "exclusiveMaximum": -1e300},
        {"allOf": [{"type": "integer", "minimum": LEAST}, {"maximum": LEAST}]},
        {"$ref": "#/x", "x": {"const": LEAST}}, {"$ref": "#/minimum", "minimum": {"const": LEAST}},
    ],
)  # fmt: skip
def test_numbers_that_the_compiler_dies_of_are_refused_before_it_sees_them(schema: Any) -> None:
    message = "number below -9000000000000000000"
    with pytest.raises(InvalidRequest, match=message):
        check(json_schema_spec(schema))
    content = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(InvalidRequest, match=message):
        check(structural_tag_spec({"type": "structural_tag", "format": content}))
    with pytest.raises(InvalidRequest, match=message):
        check(grammar_spec("start: %json " + json.dumps(schema)))


@pytest.mark.parametrize("high", [5, 2**63 - 1, 2**64 - 1])
def test_bounds_of_types_of_other_languages_are_served(high: int) -> None:
    both = {"type": "integer", "minimum": LEAST, "maximum": high, "default": LEAST}
    low = {"type": "integer", "exclusiveMinimum": LEAST - 1, "exclusiveMaximum": high}
    for schema in (both, low, {"type": "integer", "minimum": 0, "maximum": high}):
        assert accepts(json_schema_spec(schema), "4")
        assert not accepts(json_schema_spec(schema), str(high + 1))
    assert accepts(json_schema_spec(both), "-9000000000000000000")
    assert accepts(json_schema_spec({"const": 2**63 - 1}), str(2**63 - 1))
    check(grammar_spec('start: %json {"type": "integer", "minimum": -9000000000000000000}'))


def test_depth_is_limited_whatever_the_nesting() -> None:
    deep: Any = {}
    for _ in range(31):
        deep = {"items": deep}
    check(json_schema_spec(deep))
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest):
        check(json_schema_spec(deep))


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 17},
     "b": {"type": ["string", "null"], "maxLength": 3}}, "required": ["a"],
     "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"const": {"x": [1, "y"]}}, {"enum": ["p", 2, None, False]}]},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "number"}},
     "additionalProperties": False},
    {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "type": "array",
     "minItems": 2},
    {"$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer"},
     "next": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}}, "required": ["v", "next"],
     "additionalProperties": False}}, "$ref": "#/$defs/t"},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
     {"properties": {"b": {"type": "string", "maxLength": 2}}, "required": ["b"]}]},
    {"type": "integer", "multipleOf": 7, "exclusiveMinimum": 0, "maximum": 700},
    {"type": "string", "pattern": "^[a-c]{2,5}$", "minLength": 3},
    {"type": "object", "properties": {"t": {"oneOf": [{"type": "integer"}, {"type": "null"}]}},
     "minProperties": 1, "additionalProperties": False},
    {"type": "object"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_texts_drawn_are_valid(index: int) -> None:
    schema = SCHEMAS[index]
    spec = json_schema_spec(schema)
    texts = [text for seed in range(60) if (text := draw(spec, seed)) is not None]
    assert len(texts) >= 15
    for text in texts:
        assert is_valid(json.loads(text), schema), text


def test_the_validity_used_here_can_say_no() -> None:
    wrong: list[Any] = [{"a": 2}, [True], {"x": 1}, {"k1": "s"}, [1], {"v": 1}, {"a": 1}, 8, "dd",
                        {}, []]  # fmt: skip
    for schema, value in zip(SCHEMAS, wrong, strict=True):
        assert not is_valid(value, schema)


KEYWORDS = ["type", "properties", "items", "anyOf", "oneOf", "allOf", "$ref", "$defs", "enum",
            "const", "pattern", "minLength", "maxItems", "required", "additionalProperties",
            "not", "format", "multipleOf", "prefixItems", "minimum", "x-guidance"]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
    | st.sampled_from(["string", "object", "array", "integer", "#/$defs/a", "(a*)*", "\x00", "🙂"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(KEYWORDS) | st.text(max_size=3), inner, max_size=5),
    max_leaves=25,
)  # fmt: skip


def test_a_panic_of_the_compiler_is_a_refusal() -> None:
    # It cuts its message at byte 100, in the middle of a character.
    for number in range(3):
        schema = {"pattern": ["x" * number + "ก" * 60]}
        with pytest.raises(InvalidRequest):
            check(GrammarSpec(kind="json_schema", text=json.dumps(schema, ensure_ascii=False)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=5), strict=st.booleans())
def test_any_schema_is_served_or_refused(schema: dict[str, Any], strict: bool) -> None:
    try:
        check(json_schema_spec(schema, strict=strict))
    except InvalidRequest as error:
        assert error.message and error.param == "response_format"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tag=st.dictionaries(st.sampled_from(["format", "structures", "triggers", "type"]), JSON)
       | JSON.map(lambda value: {"format": value}))  # fmt: skip
def test_any_structural_tag_is_served_or_refused(tag: dict[str, Any]) -> None:
    try:
        check(structural_tag_spec(tag))
    except InvalidRequest as error:
        assert error.message


WORDS = ["start", ":", "|", "(", ")", "*", "{1,9}", '"a"', "/a/", "\n", "%json", "{}", "@x",
         "<[1]>", "[lazy]", "~", "&", "%import", "\\", "^", "$", "[", "]", "?"]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["regex", "lark", "choice", "json_schema", "structural_tag"]),
    text=st.text(max_size=40)
    | st.lists(st.sampled_from(WORDS), max_size=25).map("".join),
)  # fmt: skip
def test_any_text_is_served_or_refused(kind: Any, text: str) -> None:
    try:
        check(GrammarSpec(kind=kind, text=text))
    except InvalidRequest as error:
        assert error.message


@pytest.mark.parametrize(
    "pattern",
    ["(a|a)*", "(a*)*c", "(x+x+)+y", "a{1,1000000}", "(a{1,1000}){1,1000}", "(.*a){50}",
     "(a|b)*a(a|b){30}", "(" * 64 + "a" + "+)" * 64, "((a{0,99}){0,99}){0,99}", r"\p{L}{1,4000}"],
)  # fmt: skip
def test_regular_expressions_that_hang_others(pattern: str) -> None:
    with suppress(InvalidRequest):
        check(regex_spec(pattern))


@pytest.mark.parametrize(
    ("schema", "last", "beyond"),
    [
        ({"type": "integer"}, MAX_INTEGER, MAX_INTEGER + 1),
        ({"type": "integer"}, -MAX_INTEGER, -MAX_INTEGER - 1),
        ({"type": ["integer", "null"]}, MAX_INTEGER, MAX_INTEGER + 1),
        ({"type": "integer", "minimum": 5}, MAX_INTEGER, 4),
        ({"type": "integer", "exclusiveMaximum": 5}, 4, 5),
    ],
)
def test_a_whole_number_ends_also_where_its_schema_has_no_bound(
    schema: Any, last: int, beyond: int
) -> None:
    inside = {"type": "object", "properties": {"n": schema}, "required": ["n"]}
    assert accepts(json_schema_spec(schema), str(last))
    assert not accepts(json_schema_spec(schema), str(beyond))
    assert accepts(json_schema_spec(inside), f'{{"n":{last}}}')
    assert not begins(json_schema_spec(inside), '{"n":' + "1" * 30)


def test_multiples_have_as_many_digits_as_they_like() -> None:
    assert accepts(json_schema_spec({"type": "integer", "multipleOf": 5}), "5" * 30)
