"""The architecture as tests: what must hold of the tree itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tools.source_trees import parsed_source

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = (
    "common/octavo_common",
    "engine/octavo_engine",
    "router/octavo_router",
    "operator/octavo_operator",
    "octavo",
)
MAX_FUNCTION_LINES = 70  # aim for 60; what stands here may shrink, and leaves the table when it has
TRITON = "engine/octavo_engine/backends/torch/triton"
LONGER_WITH_REASON = {
    f"{TRITON}/attention.py:attend_kernel": "one Triton kernel",
    f"{TRITON}/attention.py:look_at": "the loop of three Triton kernels",
    f"{TRITON}/chunked.py:ssd_chunk_kernel": "one Triton kernel",
    f"{TRITON}/chunked_delta.py:delta_chunk_kernel": "one Triton kernel",
    f"{TRITON}/decode.py:walk_kernel": "one Triton kernel",
    f"{TRITON}/few.py:few_kernel": "one Triton kernel",
    f"{TRITON}/grouped.py:grouped_sum": "the loop of two Triton kernels",
    f"{TRITON}/heads.py:turn_and_store_kernel": "one Triton kernel",
    f"{TRITON}/latent.py:attend_kernel": "one Triton kernel",
    f"{TRITON}/texts.py:attend_texts_kernel": "one Triton kernel",
    f"{TRITON}/texts.py:look_at_text": "its loop",
    "router/octavo_router/app.py:__init__": "wires the router's parts together",
}


def sources() -> list[Path]:
    return [path for root in SOURCE_ROOTS for path in sorted((ROOT / root).rglob("*.py"))]


def test_the_operator_folder_is_no_package():
    """With `operator/__init__.py`, `import operator` finds our folder, not the standard library's
    module, and every Python that is started at the root dies in `import collections`."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_the_standard_library_imports_at_the_root():
    subprocess.run([sys.executable, "-c", "import collections, operator"], cwd=ROOT, check=True)


def test_tests_are_no_packages():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_each_module_opens_with_its_sentence():
    silent = [path for path in sources() if not ast.get_docstring(parsed_source(path))]
    assert silent == [], "say in one sentence what the module owns"


def test_no_function_outgrows_one_idea():
    """Length is counted by function: a limit for files only moves methods away from their class."""
    long = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in sources()
        for node in ast.walk(parsed_source(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }
    assert long == set(LONGER_WITH_REASON)


def modules() -> dict[str, ast.Module]:
    """All modules of the sources, by dotted name."""
    trees = {}
    for root in SOURCE_ROOTS:
        for path in (ROOT / root).rglob("*.py"):
            parts = path.relative_to((ROOT / root).parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            trees[name] = parsed_source(path)
    return trees


def imports_of(name: str, tree: ast.Module, known: Iterable[str]) -> set[str]:
    """The modules of ours that it names, for annotations too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in known else node.module for one in inner}
    return {one for one in found if one in known and one != name}


def test_no_module_imports_itself_over_others():
    """Annotations included: two files that name each other can only be understood together."""
    trees = modules()
    graph = {name: imports_of(name, tree, trees) for name, tree in trees.items()}
    order = TopologicalSorter(graph)
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_each_class_name_has_one_meaning():
    places: dict[str, list[str]] = {}
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_engine_package_costs_nothing_to_import():
    """Router and operator import the protocol; that must not bring numpy, let alone torch."""
    script = (
        "import sys, importlib, pkgutil, octavo_engine.protocol as protocol\n"
        "for module in pkgutil.iter_modules(protocol.__path__):\n"
        "    importlib.import_module(f'octavo_engine.protocol.{module.name}')\n"
        "print(sorted(m for m in ('numpy', 'torch', 'msgspec', 'starlette') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_the_cpu_engine_imports_no_torch():
    script = (
        "import sys\n"
        "import octavo_engine.core.build, octavo_engine.backends.native.backend\n"
        "import octavo_engine.server.app, octavo.cli\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_every_decision_record_is_linked_from_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for record in sorted((ROOT / "docs" / "adr").glob("*.md")):
        assert f"adr/{record.name}" in page, record.name


def test_every_dependency_is_explained():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in project["dependencies"]:
        name = requirement.split(">")[0].split(";")[0].strip()
        assert name in page, name
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in page, extra
