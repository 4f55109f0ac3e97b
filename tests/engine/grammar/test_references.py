"""Schemas that refer to themselves: values must be able to end, and patterns must not add up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.check import check
from octavo_engine.grammar.normal import json_schema_spec, structural_tag_spec
from octavo_engine.grammar.references import MAX_LEVELS, MAX_PATTERNS
from tests.engine.grammar.walking import accepts


def object_of(**members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": list(members)}


ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "itself": ({"$ref": "#"}, "/"),
    "in a circle": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "/",
    ),
    "a required member": (object_of(x={"$ref": "#"}), "/properties/x"),
    "an optional member": (
        {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}}, "/properties/x",
    ),
    "an item that must be": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "/items"),
    "a first item": (
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "/prefixItems/0",
    ),
    "every alternative": (
        {"anyOf": [{"$ref": "#"}, object_of(x={"$ref": "#"})]}, "/anyOf/0",
    ),
    "a part of all": ({"allOf": [{"type": "object"}, {"$ref": "#"}]}, "/allOf/1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_whose_values_never_end_is_refused_before_anything_runs(name: str) -> None:
    schema, where = ENDLESS[name]
    with pytest.raises(InvalidRequest, match="without an end") as caught:
        check(json_schema_spec(schema))
    assert f"(at {where})" in caught.value.message


def test_the_same_in_a_structural_tag() -> None:
    shape = {"type": "json_schema", "json_schema": {"$ref": "#"}}
    with pytest.raises(InvalidRequest, match="without an end"):
        check(structural_tag_spec({"type": "structural_tag", "format": shape}))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"next": {"$ref": "#"}}}, '{"next":{}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
        ({"anyOf": [{"type": "null"}, object_of(x={"$ref": "#"})]}, '{"x":null}'),
        ({**object_of(x={"$ref": "#"}), "type": ["object", "null"]}, '{"x":null}'),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}}},
         "3"),
    ],
)  # fmt: skip
def test_a_schema_that_refers_to_itself_with_a_way_out_is_served(schema: Any, text: str) -> None:
    assert accepts(json_schema_spec(schema), text)


def test_a_long_chain_of_references_is_followed() -> None:
    links = {f"a{i}": object_of(x={"$ref": f"#/$defs/a{i + 1}"}) for i in range(120)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**links, "a120": {"type": "null"}}}
    check(json_schema_spec(schema))


@pytest.mark.parametrize("is_circle", [False, True])
def test_a_chain_too_long_for_the_compiler_s_stack_is_refused(is_circle: bool) -> None:
    count = MAX_LEVELS // 3 + 2
    links = {
        f"a{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}},
                            {"type": "null"}]}
        for i in range(count)
    }  # fmt: skip
    end = {"$ref": "#/$defs/a0"} if is_circle else {"type": "null"}
    schema = {"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"anyOf": [end, {}]}}}
    with pytest.raises(InvalidRequest, match="levels"):
        check(json_schema_spec(schema))


def test_many_definitions_side_by_side_are_no_chain() -> None:
    names = [f"a{i}" for i in range(600)]
    schema = object_of(**{name: {"$ref": f"#/$defs/{name}"} for name in names})
    links = {name: {"$ref": "#/$defs/end"} for name in names}
    check(json_schema_spec(schema | {"$defs": links | {"end": object_of(x={"type": "null"})}}))


@pytest.mark.parametrize("is_referred", [False, True])
def test_patterns_that_one_text_must_match_are_few(is_referred: bool) -> None:
    patterns = [{"type": "string", "pattern": f"[a-z]*x[a-z]{{{n}}}"} for n in range(10, 26)]
    schema: dict[str, Any] = {"allOf": patterns}
    if is_referred:
        names = [f"p{n}" for n in range(16)]
        schema = {
            "$defs": dict(zip(names, patterns, strict=True)),
            "allOf": [{"$ref": f"#/$defs/{name}"} for name in names],
        }
    began_at = time.thread_time()
    with pytest.raises(InvalidRequest, match=f"more than {MAX_PATTERNS} patterns"):
        check(json_schema_spec(schema))
    assert time.thread_time() - began_at < 1
