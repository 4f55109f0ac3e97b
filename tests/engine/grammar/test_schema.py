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
from octavo_engine.grammar.normal import json_schema_spec, regex_spec, structural_tag_spec
from octavo_engine.grammar.schema import MAX_INTEGER, UNSUPPORTED
from octavo_engine.state.grammar import GrammarSpec
from tests.engine.grammar.validity import is_valid
from tests.engine.grammar.walking import accepts, begins, draw

VALUES: dict[str, Any] = {
    "not": {}, "if": {}, "then": {}, "else": {}, "dependentSchemas": {}, "dependencies": {},
    "contains": {}, "minContains": 1, "propertyNames": {"minLength": 2}, "uniqueItems": True,
}  # fmt: skip


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
def test_an_unsupported_keyword_is_named_with_its_place(keyword: str) -> None:
    bad = {keyword: VALUES.get(keyword, 1)}
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, bad]}}}
    with pytest.raises(InvalidRequest) as caught:
        check(json_schema_spec(schema))
    assert repr(keyword) in caught.value.message
    assert "/properties/a/anyOf/1" in caught.value.message


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
        ({"type": "array", "items": [{}]}, "prefixItems"),
        ({"enum": list(range(257))}, "enum"),
        ({"anyOf": [{"const": i} for i in range(17)]}, "17|branches"),
        ({"anyOf": []}, "anyOf"),
        ({"properties": []}, "properties"),
        ({"$ref": "https://example.org/s.json"}, "ref"),
        ({"$ref": "#/$defs/none"}, "none|exist"),
        ({"properties": {str(i): {} for i in range(600)}}, "512"),
        ({"const": "x" * 70_000}, "65536"),
        ({"type": "strange"}, "strange"),
        ({"type": "string", "format": "odd"}, "odd"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look"),
        (False, "false|empty|[Uu]nsat"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2, "type": "string"}]}, "oneOf"),
    ],
)
def test_schemas_beyond_limits_or_reason(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check(json_schema_spec(schema))


def test_depth_is_limited_whatever_the_nesting() -> None:
    deep: Any = {}
    for _ in range(15):
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
