"""Sources as syntax trees, each parsed once in a process: many rules read the same files."""

from __future__ import annotations

import ast
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@cache
def parsed_source(path: Path) -> ast.Module:
    """Not to be changed: others read it too."""
    return ast.parse(path.read_text(encoding="utf-8"))
