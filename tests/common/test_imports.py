"""The common package costs nothing to import, and needs nothing that is not in Python."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.source_trees import parsed_source

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "common" / "octavo_common"
# Imported by the function that needs it, in a process that has it.
OPTIONAL = {"opentelemetry"}


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of all modules that are imported anywhere below."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or ".").partition(".")[0])
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("**/*.py")), ids=lambda path: path.name)
def test_only_the_standard_library_is_imported(path):
    foreign = imported(parsed_source(path)) - sys.stdlib_module_names
    assert foreign <= OPTIONAL | {"octavo_common"}


def test_importing_all_of_it_brings_nothing_else():
    script = (
        "import sys, importlib, pkgutil, octavo_common as common\n"
        "for module in pkgutil.iter_modules(common.__path__):\n"
        "    importlib.import_module(f'octavo_common.{module.name}')\n"
        "heavy = ('numpy', 'torch', 'msgspec', 'aiohttp', 'opentelemetry', 'octavo_engine')\n"
        "print(sorted(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
