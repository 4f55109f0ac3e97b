"""The public names: cheap to import, typed, and clear about a missing extension."""

import subprocess
import sys
from importlib import import_module

import pytest

import octavo
from octavo_engine.core.extension import require_extension
from octavo_engine.errors import ConfigError

NAMES = [
    "LLM", "AsyncEngine", "BeamSearchParams", "EngineConfig", "SamplingParams", "structured_output",
]  # fmt: skip


def in_new_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_each_public_name_is_the_engines_own(name):
    assert getattr(octavo, name).__name__ == name
    assert name in dir(octavo)


def test_the_version_is_the_distributions():
    assert octavo.__version__[0].isdigit()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'octavo' has no attribute 'Llm'"):
        octavo.Llm  # noqa: B018
    assert not hasattr(octavo, "torch")


def test_importing_costs_no_engine():
    code = "import octavo, sys; print([m for m in sys.modules if m.startswith('octavo_engine')])"
    assert in_new_python(code) == (0, "[]\n")


def test_settings_come_without_numpy_or_torch():
    code = (
        "from octavo import EngineConfig, SamplingParams; import sys;"
        "print([m for m in ('numpy', 'torch', 'tokenizers') if m in sys.modules])"
    )
    assert in_new_python(code) == (0, "[]\n")


def test_without_the_extension_import_works_and_the_first_engine_says_what_to_do():
    code = """
import sys
sys.modules["octavo_engine._native"] = None
from octavo import LLM
from octavo_engine.core.extension import require_extension
try:
    require_extension()
except ImportError as error:
    print(error)
LLM(device="sim").close()
"""
    returncode, text = in_new_python(code)
    assert returncode == 0, text
    assert "`pip install .`" in text and "C++20" in text and "compiler" in text


def test_a_missing_extension_is_an_import_error_and_the_operators_to_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo_engine._native", None)
    with pytest.raises(ImportError, match=r"pip install \.") as caught:
        require_extension()
    assert isinstance(caught.value, ConfigError)


def test_every_name_that_is_promised_exists():
    module = import_module("octavo")
    for name in module.__all__:
        assert getattr(module, name) is not None
