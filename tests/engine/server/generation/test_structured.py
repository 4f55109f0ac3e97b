"""The fields that ask for a language of answers, and the one form that they come down to."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_engine.errors import RequestError
from octavo_engine.server.generation.structured import as_shape, grammar_of, wants_grammar
from octavo_engine.server.openai.schemas import SamplingFields
from tests.engine.grammar.walking import accepts

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"],
}  # fmt: skip


def kind_of(**fields: Any) -> str | None:
    request = SamplingFields(**fields)
    assert wants_grammar(request)
    spec = grammar_of(request)
    return None if spec is None else spec.kind


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (None, {"type": "text"}),
        ("json_schema", {"type": "json_object"}),
        ("json_schema", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        ("structural_tag", TAG),
        ("structural_tag", {"type": "structural_tag", "format": {
            "type": "const_string", "value": "yes"}}),
    ],
)  # fmt: skip
def test_response_formats(kind, value):
    assert kind_of(response_format=value) == kind


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (None, {}),
        ("json_schema", {"json": SCHEMA}),
        ("json_schema", {"json": '{"type": "integer"}'}),
        ("json_schema", {"json_object": True}),
        ("regex", {"regex": "[a-z]+"}),
        ("choice", {"choice": ["yes", "no"]}),
        ("lark", {"grammar": 'root ::= "a" | "b"'}),
        ("structural_tag", {"structural_tag": TAG}),
    ],
)
def test_structured_outputs(kind, value):
    assert kind_of(structured_outputs=value) == kind


def test_options_and_what_must_come_before():
    requested = SamplingFields(
        structured_outputs={
            "json": SCHEMA, "disable_any_whitespace": True, "disable_additional_properties": True,
        }
    )  # fmt: skip
    spec = grammar_of(requested, after="</think>")

    assert spec is not None
    assert (spec.any_whitespace, spec.after) == (False, "</think>")
    assert '"additionalProperties":false' in spec.text


def test_equal_wishes_are_equal_grammars():
    first = grammar_of(SamplingFields(structured_outputs={"json": SCHEMA}))
    named = {"name": "other name", "schema": SCHEMA}
    other = SamplingFields(response_format={"type": "json_schema", "json_schema": named})
    second = grammar_of(other)

    assert first == second


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": "json"}),
        ("response_format", {"response_format": {}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema", {"response_format": {
            "type": "json_schema", "json_schema": {"name": "x"}}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "nonsense"}}}}),
        ("response_format", {"response_format": {"type": "structural_tag"}}),
        ("structured_outputs", {"structured_outputs": []}),
        ("structured_outputs", {"structured_outputs": {"json": None}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs", {"structured_outputs": {"regex": "("}}),
        ("structured_outputs", {"structured_outputs": {"choice": []}}),
        ("structured_outputs", {"structured_outputs": {"grammar": "root ::= ("}}),
        ("structured_outputs", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs.whitespace_pattern", {"structured_outputs": {
            "json": SCHEMA, "whitespace_pattern": ""}}),
        ("structured_outputs.whitespace_pattern", {"structured_outputs": {
            "regex": "a", "whitespace_pattern": " "}}),
        ("structured_outputs.whitespace_pattern", {"structured_outputs": {
            "json": SCHEMA, "whitespace_pattern": " ", "disable_any_whitespace": True}}),
        ("structured_outputs", {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a"},
                                "response_format": {"type": "json_object"}}),
        ("guided_json", {"guided_json": SCHEMA}),
        ("guided_choice", {"guided_choice": ["a"]}),
    ],
)  # fmt: skip
def test_what_is_no_language_is_refused_by_name(param, fields):
    with pytest.raises(RequestError) as refused:
        grammar_of(SamplingFields(**fields))

    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"regex": "[a-z]"}, {"type": "regex", "pattern": "[a-z]"}),
        ({"json": {"type": "integer"}},
         {"type": "json_schema", "json_schema": {"type": "integer"}}),
        ({"choice": ["a", "b"]}, {"type": "or", "elements": [
            {"type": "const_string", "value": "a"}, {"type": "const_string", "value": "b"}]}),
    ],
)  # fmt: skip
def test_a_grammar_as_a_part_of_a_larger_one(fields, shape):
    spec = grammar_of(SamplingFields(structured_outputs=fields))

    assert spec is not None and as_shape(spec) == shape


def test_what_may_stand_between_tokens_is_the_callers_to_say():
    requested = {"json": SCHEMA, "whitespace_pattern": "\n?"}
    spec = grammar_of(SamplingFields(structured_outputs=requested))

    assert spec is not None
    assert accepts(spec, '{\n"a":\n1}') and accepts(spec, '{"a":1}')
    assert not accepts(spec, '{"a": 1}')
