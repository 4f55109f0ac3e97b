"""Wishes become specs of one form, and what a spec stands for is the language that was meant."""

from __future__ import annotations

import json
import re

import pytest

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.check import check
from octavo_engine.grammar.normal import (
    choice_spec,
    grammar_spec,
    json_object_spec,
    json_schema_spec,
    regex_spec,
    structural_tag_spec,
)
from tests.engine.grammar.walking import accepts, begins, draw

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}


def test_equal_wishes_are_equal_specs() -> None:
    as_text = json_schema_spec(json.dumps(PERSON, indent=4))
    assert as_text == json_schema_spec(PERSON) and hash(as_text) == hash(json_schema_spec(PERSON))
    assert json_schema_spec(PERSON) != json_schema_spec(PERSON, strict=True)
    assert choice_spec(["a", "b", "a"]) == choice_spec(("a", "b"))
    assert json_schema_spec(PERSON | {"x-guidance": {"lenient": True}}) == json_schema_spec(PERSON)
    assert regex_spec("^a$") == regex_spec("a")


def test_strict_closes_objects_that_list_their_properties() -> None:
    extra = '{"name":"a","age":1,"more":2}'
    assert accepts(json_schema_spec(PERSON), extra)
    assert not accepts(json_schema_spec(PERSON, strict=True), extra)
    assert accepts(json_schema_spec(PERSON, strict=True), extra.replace(',"more":2', ""))
    said = {**PERSON, "additionalProperties": {"type": "integer"}}
    assert accepts(json_schema_spec(said, strict=True), extra)
    inner = {"type": "array", "items": PERSON}
    assert not accepts(json_schema_spec(inner, strict=True), f"[{extra}]")
    parts = {"allOf": [{"properties": {"a": {"type": "integer"}}},
                       {"properties": {"b": {"type": "integer"}}}], "type": "object"}  # fmt: skip
    assert accepts(json_schema_spec(parts, strict=True), '{"a":1,"b":2}')


def test_white_space_is_bounded_or_absent() -> None:
    spec = json_object_spec()
    assert accepts(spec, '{\n  "a" : [ 1,\t2 ]\r\n}')
    assert accepts(spec, '{"a": {\r\n\t\t"b" :1}}')
    assert accepts(spec, '{"a":\n' + " " * 32 + "1}")
    assert not begins(spec, '{"a":\n' + " " * 33)
    assert not begins(spec, '{"a":  ') and not begins(spec, '{"a":\n\n')
    assert not begins(spec, " ")
    tight = json_object_spec(any_whitespace=False)
    assert accepts(tight, '{"a":[1,2]}') and not begins(tight, "{ ")


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"\d{2}-[a-c]+", ["12-abc", "12-", "1-a", "१२-a", "12-abcd"]),
        (r"^(yes|no)$", ["yes", "no", "yesno", ""]),
        (r"a\$", ["a$", "a"]),
        (r"a\\$", ["a\\", "a$"]),
        (r"[\s/]x", [" x", "/x", "x"]),
        (r"(?i)ok", ["OK", "ok", "k"]),
        (r"é+\.", ["éé.", "e."]),
    ],
)
def test_a_regular_expression_matches_the_whole_answer(pattern: str, texts: list[str]) -> None:
    for text in texts:
        wanted = re.fullmatch(pattern, text, re.ASCII | re.IGNORECASE if "(?i)" in pattern
                              else re.ASCII) is not None  # fmt: skip
        assert accepts(regex_spec(pattern), text) == wanted, text


@pytest.mark.parametrize("pattern", ["[a-f0-9]{8}", r"(foo|ba[rz]){1,3}!?", r"\w+@\w+\.com"])
def test_texts_drawn_from_a_regular_expression_match_it(pattern: str) -> None:
    drawn = [draw(regex_spec(pattern), seed) for seed in range(30)]
    texts = [text for text in drawn if text is not None]
    assert len(texts) > 10 and all(re.fullmatch(pattern, text) for text in texts)


def test_choices_are_taken_literally() -> None:
    choices = [
        "a.b",
        "a|b",
        "(",
        "\\d",
        "x/y",
        "é🙂",
        'say "hi"',
        "line\nbreak",
        "a.bc",
        "^$",
        "#~&-",
    ]
    spec = choice_spec(choices)
    assert all(accepts(spec, choice) for choice in choices)
    assert not any(accepts(spec, text) for text in ["axb", "a", "5", "", "a.bcd"])


EBNF = r"""
# a sum
root ::= term (" + " term)*
term ::= [0-9]+ | "(" root ")" | "\u0078" | [^\x00-\x7f]
"""
LARK = 'start: term (" + " term)*\nterm: /[0-9]+/ | "(" start ")" | "x"'


@pytest.mark.parametrize("text", [EBNF, LARK])
def test_grammars_of_either_notation(text: str) -> None:
    spec = grammar_spec(text)
    for good in ["1", "1 + x", "(1 + (2 + 33)) + 4"]:
        assert accepts(spec, good), good
    for bad in ["", "1 +", "(1", "1+2", "y"]:
        assert not accepts(spec, bad), bad


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_schema_spec("{"),
        lambda: json_schema_spec(3),  # type: ignore[arg-type]
        lambda: json_schema_spec({"const": float("nan")}),
        lambda: regex_spec(""),
        lambda: choice_spec([]),
        lambda: choice_spec(["a", ""]),
        lambda: choice_spec([1]),  # type: ignore[list-item]
        lambda: grammar_spec("root ::= ("),
        lambda: grammar_spec("root ::= missing"),
        lambda: grammar_spec('root ::= "\\ud800"'),
        lambda: grammar_spec("root ::= " + "(" * 500),
        lambda: grammar_spec("\\"),
        lambda: grammar_spec("".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + "r5000 ::= 1"),
        lambda: structural_tag_spec("[]"),
        lambda: structural_tag_spec([]),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_spec_is_refused_in_words(make) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == "response_format" and len(caught.value.message) > 10


def test_what_comes_before_is_checked_too() -> None:
    check(json_object_spec(after="</think>"))
    for after in ("x" * 257, "\ud800"):
        with pytest.raises(InvalidRequest, match="after"):
            check(json_object_spec(after=after))
