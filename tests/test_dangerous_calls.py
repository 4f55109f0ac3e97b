"""No source that is shipped deserialises objects, evaluates text, or skips the checks of TLS."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tools.source_trees import parsed_source

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SHIPPED = ("common", "engine", "router", "operator", "octavo", "charts", "images", "release")
# Modules whose loaders run code that their input names.
DESERIALISERS = frozenset(
    ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
)
EVALUATORS = frozenset(("eval", "exec", "compile", "__import__"))
# Calls by their dotted name, whoever the object is.
BANNED = frozenset(
    ("os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load",
     "tempfile.mktemp", "ssl._create_unverified_context")
)  # fmt: skip
BANNED_KEYWORDS = {"shell": True, "allow_pickle": True, "verify": False, "autoescape": False}
# Where it is right, and why.
ALLOWED = {
    # A server that requires no certificate of its clients.
    ("engine/octavo_engine/server/http/tls.py", "CERT_NONE"),
    # A kubeconfig with insecure-skip-tls-verify, on the user's own machine.
    ("operator/octavo_operator/cluster/kube_config.py", "CERT_NONE"),
}
_WORDS = [
    name.split(".")
    for name in (*DESERIALISERS, *(f"{name}(" for name in EVALUATORS), *BANNED, *BANNED_KEYWORDS)
] + [["CERT_NONE"]]
# `compile` has two meanings: torch's and the regular expressions' are attributes, not the builtin.


def dangers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of everything dangerous in a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [each.name for each in names if _root(each.name) in DESERIALISERS]
            case ast.ImportFrom(module=str(module)):
                found = [module] if _root(module) in DESERIALISERS else []
            case ast.Call():
                found = list(_of_call(node))
            case ast.Attribute(attr="CERT_NONE"):
                found = ["CERT_NONE"]
            case _:
                found = []
        for what in found:
            yield getattr(node, "lineno", 0), what


def _of_call(call: ast.Call) -> Iterator[str]:
    name = _dotted(call.func)
    if name in EVALUATORS | BANNED:
        yield name
    for keyword in call.keywords:
        value = getattr(keyword.value, "value", None)  # of a constant
        if keyword.arg in BANNED_KEYWORDS and value is BANNED_KEYWORDS[keyword.arg]:
            yield f"{keyword.arg}={value}"


def _dotted(function: ast.expr) -> str:
    """`name` or `module.name`; nothing that is banned has more parts."""
    match function:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
    return ""


def may_be_dangerous(text: str) -> bool:
    """Whether it has all words of one danger: most sources need not be parsed."""
    return any(all(word in text for word in words) for words in _WORDS)


def _root(module: str) -> str:
    return module.partition(".")[0]


def sources() -> list[Path]:
    return sorted(path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("import torch, dill.session", "dill.session"),
        ("from marshal import loads", "marshal"),
        ("def f(text):\n    return eval(text)", "eval"),
        ("import os\nos.system('true')", "os.system"),
        ("run('ls', shell=True)", "shell=True"),
        ("np.load(f, allow_pickle=True)", "allow_pickle=True"),
        ("get(url, verify=False)", "verify=False"),
        ("context.verify_mode = ssl.CERT_NONE", "CERT_NONE"),
    ],
)
def test_dangerous_code_is_found(source: str, what: str):
    assert [found for _, found in dangers(ast.parse(source))] == [what]
    assert may_be_dangerous(source)


def test_harmless_code_is_not():
    source = (
        "import re, ast\nre.compile('a')\nast.literal_eval('1')\nmodel.eval()\nrun(shell=False)"
    )
    assert list(dangers(ast.parse(source))) == []


def test_no_source_that_is_shipped_does_any_of_it():
    paths = sources()
    assert len(paths) > 500
    found = {
        (path.relative_to(ROOT).as_posix(), what)
        for path in paths
        if may_be_dangerous(path.read_text(encoding="utf-8"))
        for _, what in dangers(parsed_source(path))
    }
    assert found == ALLOWED  # an exception that is no longer needed goes, too
