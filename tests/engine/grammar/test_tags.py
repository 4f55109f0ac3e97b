"""Structural tags: free text, and parts of a fixed shape where a trigger begins one."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.check import check, compiler_source
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.normal import structural_tag_spec
from octavo_engine.grammar.vocabulary import Vocabulary
from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer
from tests.engine.grammar.walking import accepts, begins

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def spec_of(form: dict[str, Any]):
    return structural_tag_spec({"type": "structural_tag", "format": form})


JSON = {"type": "json_schema", "json_schema": NUMBER}
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=a>", "schema": NUMBER, "end": "</function>"},
        {"begin": "<function=b>", "schema": {"type": "object"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}

LONG = 'start: "a"\n//' + "x" * 9000


def test_the_older_notation() -> None:
    spec = structural_tag_spec(OLD)
    for good in ["", "no call", "<f", 'see <function=a>{"n":1}</function> and <b>',
                 '<function=a>{"n":1}</function><function=b>{"x":[]}</function>']:  # fmt: skip
        assert accepts(spec, good), good
    for bad in ["<function=c>", '<function=a>{"m"', '<function=a>{"n":1}x']:
        assert not begins(spec, bad), bad
    assert not accepts(spec, '<function=a>{"n":1}')


@pytest.mark.parametrize(
    ("flags", "good", "bad"),
    [
        ({}, ["", "x", 'x<t>{"n":1}</t>y<t>{"n":2}</t>'], []),
        ({"at_least_one": True}, ['x<t>{"n":1}</t>y'], ["", "x"]),
        ({"stop_after_first": True}, ["x", 'x<t>{"n":1}</t>'], ['<t>{"n":1}</t>x']),
        ({"at_least_one": True, "stop_after_first": True}, ['x<t>{"n":1}</t>'], ["x", ""]),
    ],
)
def test_triggered_tags(flags: dict[str, bool], good: list[str], bad: list[str]) -> None:
    spec = spec_of(
        {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tag("<t>", JSON, "</t>")], **flags}
    )
    assert all(accepts(spec, text) for text in good)
    assert not any(accepts(spec, text) for text in bad)
    assert not begins(spec, "<t>x")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (tag("<a>", {"type": "any_text"}, "</a>"), ["<a></a>", "<a>x<b></a>"],
         ["<a>x", "<a></a>x"]),
        (tag("<a>", {"type": "regex", "pattern": "[0-9/]+"}, ["!", "?"]), ["<a>1/2!", "<a>3?"],
         ["<a>!"]),
        (tag("", {"type": "const_string", "value": 'q"\\'}, ""), ['q"\\'], ["q"]),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, JSON]},
         ['a{"n": 3}'], ["a", '{"n":3}']),
        ({"type": "or", "elements": [{"type": "const_string", "value": "a"},
          {"type": "grammar", "grammar": 'root ::= "b" root | "c"'}]}, ["a", "c", "bbc"],
         ["b", "ac"]),
        ({"type": "tags_with_separator", "separator": ",", "at_least_one": True,
          "tags": [tag("[", JSON, "]"), tag("(", {"type": "const_string", "value": "x"}, ")")]},
         ['[{"n":1}]', '(x),(x),[{"n":2}]'], ["", "(x)(x)", "(x),"]),
        ({"type": "tags_with_separator", "separator": "", "tags": [tag("(", JSON, ")")]},
         ["", '({"n":1})({"n":1})'], ["x"]),
        ({"type": "sequence", "elements": [tag("<think>", {"type": "any_text"}, "</think>"), JSON]},
         ['<think>if <x></think>{"n":1}'], ['<think>{"n":1}', '{"n":1}']),
    ],
)  # fmt: skip
def test_formats(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    spec = spec_of(form)
    for text in good:
        assert accepts(spec, text), text
    for text in bad:
        assert not accepts(spec, text), text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "format"),
        ({"format": {"type": "odd"}}, "'odd'"),
        ({"format": tag("<", {"type": "json_schema"}, ">")}, "schema"),
        ({"format": tag("<", {"type": "json_schema", "json_schema": {"not": {}}}, ">")}, "'not'"),
        ({"format": {"type": "sequence", "elements": []}}, r"format\)"),
        ({"format": {"type": "triggered_tags", "triggers": ["<x"], "tags": [tag("<y", JSON, "")]}},
         r"tags\[0\]"),
        ({"structures": [{"begin": "a", "schema": {}}], "triggers": []}, "triggers"),
        ({"format": {"type": "or", "elements": [{"type": "grammar", "grammar": LONG}] * 4}},
         "32768 bytes"),
        ({"structures": [3], "triggers": ["a"]}, "object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check(structural_tag_spec(given))


def test_nesting_has_an_end() -> None:
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(40):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(InvalidRequest, match="levels"):
        check(spec_of(form))


class WithControl(ByteTokenizer):
    """Token 300 is a control token that spells <tool>."""

    special_ids = frozenset((256, 257, 300))

    def token_bytes(self, token_id: int) -> bytes:
        return b"<tool>" if token_id == 300 else super().token_bytes(token_id)


def test_a_control_token_that_a_tag_spells_is_meant() -> None:
    vocabulary = Vocabulary(WithControl(301), vocab_size=301)
    form = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [tag("<tool>f", JSON, ".")]}
    source = compiler_source(spec_of(form), vocabulary.specials, DEFAULT_LIMITS)
    matcher = LLMatcher(vocabulary.compiler_tokenizer, source, log_level=0)
    ids = [*b"hi ", 300, *b'f{"n":1}.', *b" bye"]
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    matcher = LLMatcher(vocabulary.compiler_tokenizer, source, log_level=0)
    assert matcher.try_consume_tokens([300, *b"g"]) == 1
