"""What requests ask for, in one normal form: equal constraints become equal specs."""

from __future__ import annotations

import json
import re
from typing import Any

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.ebnf import to_lark
from octavo_engine.grammar.enforceable import enforceable
from octavo_engine.grammar.limits import DEFAULT_LIMITS
from octavo_engine.grammar.schema import PARAM, stripped
from octavo_engine.state.grammar import GrammarSpec


def json_schema_spec(
    schema: dict[str, Any] | bool | str,
    *,
    strict: bool = False,
    relax: bool = False,
    any_whitespace: bool = True,
    whitespace: str = "",
    after: str | None = None,
) -> GrammarSpec:
    """`strict`: objects that list their properties have no others unless the schema says so.

    `relax`: keywords that no grammar enforces are left out and named in the spec; otherwise they
    are refused.
    """
    if isinstance(schema, str):
        schema = _parsed(schema)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(
            f"a JSON schema is an object or a boolean; got {type(schema).__name__}", param=PARAM
        )
    _check_size(_dumped(schema))
    found = enforceable(stripped(schema, close=strict), relax=relax)
    return GrammarSpec(
        kind="json_schema", text=_dumped(found.schema), any_whitespace=any_whitespace,
        whitespace=whitespace, after=after, left_over=found.left_over,
    )  # fmt: skip


def json_object_spec(
    *, any_whitespace: bool = True, whitespace: str = "", after: str | None = None
) -> GrammarSpec:
    """Any JSON object."""
    return json_schema_spec(
        {"type": "object"}, any_whitespace=any_whitespace, whitespace=whitespace, after=after
    )


def regex_spec(pattern: str, *, after: str | None = None) -> GrammarSpec:
    """All of the answer matches, so anchors at the ends say nothing."""
    pattern = _text(pattern, "a regular expression").removeprefix("^")
    if re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern):
        pattern = pattern[:-1]
    return GrammarSpec(kind="regex", text=pattern, after=after)


def choice_spec(choices: list[str] | tuple[str, ...], *, after: str | None = None) -> GrammarSpec:
    """One of some texts."""
    if not isinstance(choices, list | tuple) or not choices:
        raise InvalidRequest("choice must be a list of texts, one at least", param=PARAM)
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequest("each choice must be a text that is not empty", param=PARAM)
    return GrammarSpec(kind="choice", text=_dumped(list(dict.fromkeys(choices))), after=after)


def grammar_spec(text: str, *, after: str | None = None) -> GrammarSpec:
    """A grammar in Lark's notation or in EBNF as llama.cpp (GBNF), xgrammar and others have it."""
    return GrammarSpec(kind="lark", text=to_lark(_text(text, "a grammar")), after=after)


def anything_spec() -> GrammarSpec:
    """Any answer, control tokens included: for what constrains only the text before it."""
    return GrammarSpec(kind="lark", text="start: <[*]>*")


def structural_tag_spec(tag: dict[str, Any] | str, *, after: str | None = None) -> GrammarSpec:
    """Free text with structured parts: `{format}`, or the older `{structures, triggers}`."""
    if isinstance(tag, str):
        tag = _parsed(tag)
    if not isinstance(tag, dict):
        raise InvalidRequest("a structural tag must be a JSON object", param=PARAM)
    return GrammarSpec(kind="structural_tag", text=_dumped(tag), after=after)


def _check_size(text: str) -> None:
    limit = DEFAULT_LIMITS.max_schema_bytes
    if len(text) > limit:
        raise InvalidRequest(f"the JSON schema has more than {limit} bytes", param=PARAM)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{what} must be a text that is not empty", param=PARAM)
    return value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not valid JSON: {error}", param=PARAM) from None


def _dumped(value: object) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not valid JSON: {error}", param=PARAM) from None
