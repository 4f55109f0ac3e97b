"""Every reader of encoded bytes survives text that is no UTF-8 and nesting without end.

msgspec raises UnicodeDecodeError (before 0.23) and RecursionError for those, neither of them an
error of its own: a reader that catches only those is ended by such bytes.
"""

from __future__ import annotations

import ast
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


def names_of(handler: ast.ExceptHandler) -> set[str]:
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


def test_no_handler_catches_the_decoders_own_errors_alone() -> None:
    assert len(SOURCES) > 400
    named = [
        path for path in SOURCES if any(name in path.read_text(encoding="utf-8") for name in _OWN)
    ]
    assert not {str(path): lines for path in named if (lines := narrow(parsed_source(path)))}


def test_the_rule_finds_what_it_is_for() -> None:
    assert narrow(ast.parse("try: pass\nexcept msgspec.MsgspecError: pass")) == [2]
    assert narrow(
        ast.parse("try: pass\nexcept (msgspec.DecodeError, UnicodeDecodeError): pass")
    ) == [2]
    assert not narrow(ast.parse("try: pass\nexcept (ValueError, RecursionError): pass"))


def test_the_decoder_raises_other_errors_than_its_own() -> None:
    with pytest.raises(RecursionError) as caught:
        msgspec.json.decode(b'{"a":' * 100_000)
    assert not isinstance(caught.value, msgspec.MsgspecError)
    with pytest.raises(ValueError, match=r"(?i)utf-8"):  # whichever version
        msgspec.json.decode(b'{"a":"\xa2"}')
