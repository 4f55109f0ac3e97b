"""Every reader of encoded bytes survives text that is no UTF-8 and nesting without end.

msgspec raises UnicodeDecodeError (before 0.23) and RecursionError for those, neither of them an
error of its own: a reader that catches only those is ended by such bytes. To json's readers the
same happens: RecursionError is no ValueError.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import msgspec
import pytest

from tests.tools.source_trees import parsed_source

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("common", "engine", "router", "operator", "octavo")
    for path in (ROOT / folder).rglob("*.py")
)
_OWN = {"MsgspecError", "DecodeError"}
_READERS = {"json.loads", "json.load", "msgspec.json.decode"}
_TAKES_NESTING = {"RecursionError", "Exception", "BaseException"}


def names_of(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {
        kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", "") for kind in kinds
    }


def narrow(module: ast.Module) -> list[int]:
    """Lines of handlers that let such bytes through."""
    return [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.ExceptHandler)
        and (names := names_of(node)) & _OWN
        and not (
            ("UnicodeDecodeError" in names or "ValueError" in names) and "RecursionError" in names
        )
    ]


def ended_by_nesting(module: ast.Module) -> list[int]:
    """Lines of `try` that read JSON and take errors, but not the one for too much nesting."""
    return [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Try)
        and node.handlers
        and not set().union(*map(names_of, node.handlers)) & _TAKES_NESTING
        and any(
            isinstance(each, ast.Call) and ast.unparse(each.func) in _READERS
            for statement in node.body
            for each in ast.walk(statement)
        )
    ]


def test_no_handler_catches_the_decoders_own_errors_alone() -> None:
    assert len(SOURCES) > 400
    named = [
        path for path in SOURCES if any(name in path.read_text(encoding="utf-8") for name in _OWN)
    ]
    assert not {str(path): lines for path in named if (lines := narrow(parsed_source(path)))}


def test_whoever_reads_json_and_takes_errors_takes_nesting_too() -> None:
    named = [path for path in SOURCES if "json." in path.read_text(encoding="utf-8")]
    assert len(named) > 50
    assert not {
        str(path): lines for path in named if (lines := ended_by_nesting(parsed_source(path)))
    }


def test_the_rule_finds_what_it_is_for() -> None:
    assert narrow(ast.parse("try: pass\nexcept msgspec.MsgspecError: pass")) == [2]
    assert narrow(
        ast.parse("try: pass\nexcept (msgspec.DecodeError, UnicodeDecodeError): pass")
    ) == [2]
    assert not narrow(ast.parse("try: pass\nexcept (ValueError, RecursionError): pass"))


@pytest.mark.parametrize("call", sorted(_READERS))
def test_the_rule_for_json_finds_what_it_is_for(call: str) -> None:
    assert ended_by_nesting(ast.parse(f"try: x = {call}(y)[0]\nexcept ValueError: pass")) == [1]
    assert ended_by_nesting(ast.parse(f"try: {call}(y)\nexcept (OSError, KeyError): pass")) == [1]
    assert not ended_by_nesting(ast.parse(f"try: {call}(y)\nexcept RecursionError: pass"))
    assert not ended_by_nesting(ast.parse(f"try: {call}(y)\nexcept Exception: pass"))
    assert not ended_by_nesting(ast.parse(f"try: {call}(y)\nfinally: pass"))


def test_the_decoder_raises_other_errors_than_its_own() -> None:
    with pytest.raises(RecursionError) as caught:
        msgspec.json.decode(b'{"a":' * 100_000)
    assert not isinstance(caught.value, msgspec.MsgspecError)
    with pytest.raises(ValueError, match=r"(?i)utf-8"):  # whichever version
        msgspec.json.decode(b'{"a":"\xa2"}')
    for text in ("[" * 3000, b"[" * 3000):
        with pytest.raises(RecursionError) as caught:
            json.loads(text)
        assert not isinstance(caught.value, ValueError)
