"""Structural tags as a grammar: free text in which certain parts have a fixed shape.

Two notations are read: `{"type": "structural_tag", "format": …}` and the older one with
`structures` and `triggers`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import regex_to_lark

from octavo_engine.errors import InvalidRequest
from octavo_engine.grammar.ebnf import to_lark
from octavo_engine.grammar.enforceable import enforceable
from octavo_engine.grammar.numbers import check_grammar_numbers
from octavo_engine.grammar.references import check_references
from octavo_engine.grammar.schema import PARAM, check_schema, stripped, with_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.grammar.limits import GrammarLimits

_ANY = r"/(.|\n)*/"
_MAX_DEPTH = 16


def tags_source(
    tag: Any, specials: Mapping[str, int], limits: GrammarLimits, whitespace: str | None
) -> str:
    """The compiler's source text; `whitespace` is what may stand between tokens of JSON. Raises
    InvalidRequest that names the part."""
    if not isinstance(tag, dict):
        raise _refusal("must be a JSON object", "")
    if "format" in tag:
        shape = tag["format"]
    elif "structures" in tag:
        shape = _from_structures(tag)
    else:
        raise _refusal("needs a format, or structures and triggers", "")
    builder = _Builder(specials, limits, whitespace)
    start = builder.rule(shape, "format", 1)
    lark = "\n".join([f"start: {start}", *builder.rules])
    grammars = [{"name": "start", "lark_grammar": lark}, *builder.grammars]
    return json.dumps({"grammars": grammars})


class _Builder:
    """Collects rules under names of their own."""

    def __init__(
        self, specials: Mapping[str, int], limits: GrammarLimits, whitespace: str | None
    ) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._specials = sorted(specials.items(), key=lambda item: -len(item[0]))
        self._limits = limits
        self._ebnf_bytes = 0  # of all grammars so far
        self._whitespace = whitespace
        self._num_parts = 0

    def rule(self, shape: Any, where: str, depth: int) -> str:
        """The name of the rule that stands for a part."""
        self._num_parts += 1
        if self._num_parts > self._limits.max_tags or depth > _MAX_DEPTH:
            raise _refusal(
                f"has more than {self._limits.max_tags} parts or {_MAX_DEPTH} levels", where
            )
        if not isinstance(shape, dict):
            raise _refusal("needs an object with a type", where)
        match shape.get("type"):
            case "const_string":
                return self._add(self._literal(_text(shape, "value", where)))
            case "json_schema":
                return self._add(self._json(shape.get("json_schema"), where))
            case "regex":
                return self._add(self._regex(_text(shape, "pattern", where)))
            case "grammar":
                return self._add(self._grammar(_text(shape, "grammar", where)))
            case "any_text":
                return self._add(_ANY)
            case "sequence":
                return self._add(" ".join(self._all(shape, "elements", where, depth)))
            case "or":
                return self._add(" | ".join(self._all(shape, "elements", where, depth)))
            case "tag":
                return self._add(self._tag(shape, where, depth))
            case "triggered_tags":
                return self._triggered(shape, where, depth)
            case "tags_with_separator":
                return self._separated(shape, where, depth)
            case kind:
                raise _refusal(f"has the type {kind!r:.60}, which is not supported", where)

    def _add(self, body: str, flags: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{flags}: {body}")
        return name

    def _all(self, shape: dict[str, Any], key: str, where: str, depth: int) -> list[str]:
        return [
            self.rule(item, f"{where}.{key}[{index}]", depth + 1)
            for index, item in enumerate(_list(shape, key, where))
        ]

    def _tag(self, shape: dict[str, Any], where: str, depth: int, *, skip: str = "") -> str:
        begin, ends = _text(shape, "begin", where, empty=True), _ends(shape, where)
        content = shape.get("content")
        begin_body = self._literal(begin.removeprefix(skip))
        if isinstance(content, dict) and content.get("type") == "any_text":
            return f"{begin_body} ({' | '.join(self._until(end) for end in ends)})"
        inner = self.rule(content, f"{where}.content", depth + 1)
        return f"{begin_body} {inner} ({' | '.join(map(self._literal, ends))})"

    def _until(self, end: str) -> str:
        """Any text up to and with `end`, which does not occur before."""
        if not end:
            return _ANY
        before, rest = self._split_at_special(end)
        text = self._add(f"{_ANY} {json.dumps(before)}", "[lazy]") if before else _ANY
        return f"{text} {rest}" if rest else text

    def _triggered(self, shape: dict[str, Any], where: str, depth: int) -> str:
        triggers = _list(shape, "triggers", where)
        tags = _list(shape, "tags", where)
        bodies: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            place = f"{where}.tags[{index}]"
            if not isinstance(tag, dict):
                raise _refusal("needs an object", place)
            begin = _text(tag, "begin", place)
            trigger = next(
                (t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None
            )
            if trigger is None:
                raise _refusal("has a begin that starts with no trigger", place)
            body = self._add(self._tag(tag, place, depth + 1, skip=trigger))
            bodies.setdefault(trigger, []).append(body)
        # One lazy lexeme a trigger: it ends where the trigger does, and a tag must follow.
        alternatives = [
            f"{self._until(trigger)} ({' | '.join(rules)})" for trigger, rules in bodies.items()
        ]
        one = self._add(" | ".join(alternatives))
        at_least_one = shape.get("at_least_one") is True
        if shape.get("stop_after_first") is True:
            return one if at_least_one else self._add(f"{one} | {_ANY}")
        return self._add(f"{one}{'+' if at_least_one else '*'} {_ANY}")

    def _separated(self, shape: dict[str, Any], where: str, depth: int) -> str:
        tags = [
            self._add(self._tag(_object(tag, place), place, depth + 1))
            for index, tag in enumerate(_list(shape, "tags", where))
            for place in (f"{where}.tags[{index}]",)
        ]
        one = self._add(" | ".join(tags))
        if shape.get("stop_after_first") is True:
            body = one
        else:
            separator = self._literal(_text(shape, "separator", where, empty=True))
            body = f"{one} ({separator} {one})*"
        return self._add(body if shape.get("at_least_one") is True else f"({body})?")

    def _json(self, schema: Any, where: str) -> str:
        if not isinstance(schema, dict | bool):
            raise _refusal("needs a JSON schema", where)
        schema = enforceable(stripped(schema, close=False), relax=False).schema
        check_schema(schema, self._limits)
        check_references(schema)
        name = f"g{len(self.grammars)}"
        source = with_options(schema, self._whitespace)
        self.grammars.append({"name": name, "json_schema": source})
        return f"@{name}"

    def _regex(self, pattern: str) -> str:
        if len(pattern.encode("utf-8", "surrogatepass")) > self._limits.max_regex_bytes:
            raise _refusal("has a pattern that is too long", "")
        return f"/{regex_to_lark(pattern, 'dws')}/"

    def _grammar(self, text: str) -> str:
        self._ebnf_bytes += len(text)
        if self._ebnf_bytes > self._limits.max_ebnf_bytes:
            raise _refusal(f"has grammars of more than {self._limits.max_ebnf_bytes} bytes", "")
        check_grammar_numbers(text)
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": to_lark(text)})
        return f"@{name}"

    def _literal(self, text: str) -> str:
        if not text:
            return '""'
        before, rest = self._split_at_special(text)
        return f"{json.dumps(before, ensure_ascii=False) if before else ''} {rest}".strip()

    def _split_at_special(self, text: str) -> tuple[str, str]:
        """Plain text, and from the first control token on a rule's body."""
        found = [(text.find(word), word, token) for word, token in self._specials if word in text]
        if not found:
            return text, ""
        place, word, token = min(found, key=lambda item: item[0])
        rest = text[place + len(word) :]
        return text[:place], f"<[{token}]> {self._literal(rest) if rest else ''}".strip()


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "begin": _object(item, "structures").get("begin"),
            "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
            "end": item.get("end", ""),
        }
        for item in _list(tag, "structures", "")
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _ends(shape: dict[str, Any], where: str) -> list[str]:
    end = shape.get("end", "")
    ends = end if isinstance(end, list) else [end]
    if not ends or not all(isinstance(item, str) for item in ends):
        raise _refusal("needs a text as end", where)
    return ends


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refusal("needs an object", where)
    return value


def _list(shape: dict[str, Any], key: str, where: str) -> list[Any]:
    value = shape.get(key)
    if not isinstance(value, list) or not value:
        raise _refusal(f"needs a list as {key}", where)
    return value


def _text(shape: dict[str, Any], key: str, where: str, *, empty: bool = False) -> str:
    value = shape.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise _refusal(f"needs a text as {key}", where)
    return value


def _refusal(what: str, where: str) -> InvalidRequest:
    place = f" (at {where:.200})" if where else ""
    return InvalidRequest(f"the structural tag {what}{place}", param=PARAM)
