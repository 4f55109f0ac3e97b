"""Models of other packages: the example of examples/, installed by pip and run; and broken ones."""

from __future__ import annotations

import functools
import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import pytest

from octavo_engine.backends.registry import build_backend
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.families import FAMILIES, find_family
from octavo_engine.weights.source import resolve_model
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.backends.driver import LogitsBackend

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt_neo_plugin"


@functools.cache
def installed(target: Path) -> Path:
    """As a user installs it, but into a folder; built from a copy, for building leaves files."""
    source = shutil.copytree(EXAMPLE, target.parent / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
               "--no-build-isolation", "--target", str(target), str(source)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("plugin") / "packages")


@pytest.fixture
def on_path(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(package))
    yield
    sys.modules.pop("octavo_gpt_neo", None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A folder that transformers wrote, and its logits of 90 tokens."""
    import torch
    import transformers

    config = transformers.GPTNeoConfig(
        vocab_size=256, hidden_size=64, num_layers=2, num_heads=4, window_size=24,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=512,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.GPTNeoForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(0.05 * torch.randn(parameter.shape))
        logits = model(torch.tensor([random_tokens(90)])).logits[0].numpy()
    folder = tmp_path_factory.mktemp("gpt-neo")
    model.save_pretrained(folder)
    return folder, logits


@pytest.mark.slow
@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("device", ["cpu", "torch"])
def test_the_example_runs_and_equals_transformers(
    checkpoint: tuple[Path, np.ndarray], device: Literal["cpu", "torch"]
) -> None:
    folder, truth = checkpoint
    files = resolve_model(str(folder))
    config = ModelConfig.from_hf(files.config)
    assert [layer.window for layer in config.layers] == [None, 24]
    engine = EngineConfig(model=str(folder), device=device, dtype="float32", max_model_len=512)
    backend = build_backend(engine, files)
    logits = run_alone(cast("LogitsBackend", backend), random_tokens(90), chunks=[30, 1, 40, 1])
    np.testing.assert_allclose(logits, truth, **FLOAT32)


@pytest.mark.slow
@pytest.mark.usefixtures("on_path")
def test_its_name_is_among_the_known_ones_and_its_errors_name_the_field() -> None:
    with pytest.raises(ModelError, match="GPTNeoForCausalLM"):
        find_family("RwkvForCausalLM")
    assert "GPTNeoForCausalLM" not in FAMILIES
    config = {
        "architectures": ["GPTNeoForCausalLM"], "vocab_size": 10, "hidden_size": 64,
        "num_layers": 1, "num_heads": 4, "attention_layers": ["sideways"],
    }  # fmt: skip
    with pytest.raises(ModelError, match="attention_layers must be a list of global and local"):
        ModelConfig.from_hf(config)


def test_without_the_package_the_architecture_is_not_known() -> None:
    with pytest.raises(ModelError, match="'GPTNeoForCausalLM' is not supported"):
        find_family("GPTNeoForCausalLM")


def distribution(folder: Path, name: str, points: str, module: str = "") -> None:
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[octavo.models]\n{points}\n")
    (folder / f"{name}.py").write_text(module)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise RuntimeError('no licence')", "broken_one registers .* RuntimeError: no licence"),
        ("", "broken_one registers .* AttributeError"),
        ("FAMILY = 3", "broken_one registers .* is not a Family"),
    ],
)
def test_a_broken_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    distribution(tmp_path, "broken_one", "OddForCausalLM = broken_one:FAMILY", module)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    sys.modules.pop("broken_one", None)
    with pytest.raises(ModelError, match=message):
        find_family("OddForCausalLM")
    sys.modules.pop("broken_one", None)


def test_two_packages_for_one_architecture_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first_one", "second_one"):
        distribution(tmp_path, name, f"TwiceForCausalLM = {name}:FAMILY")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(ModelError, match="first_one, second_one; uninstall all but one"):
        find_family("TwiceForCausalLM")
