"""The texts that users read, and the private words that must not occur in them."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING

from octavo.cli import COMMANDS
from octavo.commands.bench import KINDS
from octavo.options.flags import ENGINE_FLAGS, SERVER_FLAGS
from octavo_engine.server.http.errors import CATALOGUE
from tests.docs.pages import DOCS, ROOT, prose

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Whole words and phrases, in any case, and across line ends.
WORDS = (
    "anybody", "asked for", "asked of", "how it does", "in company", "in no hurry", "in vain",
    "makes no sense", "news", "nobody", "somebody", "says", "stands", "telling", "tells",
    "thoughts", "told", "whoever",
)  # fmt: skip
PAGES = tuple(sorted(page.stem for page in DOCS.glob("*.md")))
SOURCES = ("engine/octavo_engine/server", "router/octavo_router", "operator/octavo_operator")
_PATTERN = re.compile(
    r"\b(" + "|".join(word.replace(" ", r"\s+") for word in WORDS) + r")\b", re.IGNORECASE
)
_CODE_SPAN = re.compile(r"``.+?``|`[^`\n]+`")


def words_in(text: str) -> list[str]:
    """The private words in a text, each once, in alphabetical order."""
    return sorted({" ".join(found.lower().split()) for found in _PATTERN.findall(text)})


@cache
def texts() -> dict[str, Callable[[], str]]:
    """Everything that users read, by its path or name."""
    found: dict[str, Callable[[], str]] = {}
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"):
        found[path.name] = partial(_prose_without_code, path)
    for page in PAGES:
        found[f"docs/{page}.md"] = partial(_prose_without_code, DOCS / f"{page}.md")
    found["octavo.options.flags"] = _help_of_flags
    for command in COMMANDS:
        found[f"octavo {command} --help"] = partial(help_of, command)
    found["octavo --help"] = lambda: "\n".join(COMMANDS.values())
    found["octavo_engine.server.http.errors.CATALOGUE"] = lambda: repr(CATALOGUE)
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            found[str(path.relative_to(ROOT))] = partial(_raised_text, path)
    return found


def help_of(command: str) -> str:
    """A command's --help, with that of its sub-commands."""
    main = import_module(f"octavo.commands.{command.replace('-', '_')}").main
    output = io.StringIO()
    for sub in ([], *([kind] for kind in KINDS)) if command == "bench" else ([],):
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main(f"octavo {command}", [*sub, "--help=all"])
    return output.getvalue()


def raised_strings(source: str) -> list[str]:
    """String literals in the raise statements of a module; f-strings without their fields."""
    strings = []
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Raise) and statement.exc is not None:
            strings += [
                node.value
                for node in ast.walk(statement.exc)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    return strings


def _help_of_flags() -> str:
    return "\n".join(flag.help for flag in (*ENGINE_FLAGS, *SERVER_FLAGS))


@cache
def _raised_text(path: Path) -> str:
    return "\n".join(raised_strings(path.read_text(encoding="utf-8")))


def _prose_without_code(page: Path) -> str:
    return _CODE_SPAN.sub("", prose(page))
