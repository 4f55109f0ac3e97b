"""A checkpoint written as integers reads back as the numbers it was, to within their steps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.cli import main
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.errors import ModelError
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.quantize import quantize_folder, quantize_groups
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    folder = tmp_path / "model"
    folder.mkdir()
    tensors: dict[str, NDArray[Any]] = {
        "model.embed_tokens.weight": rng.standard_normal((40, 64)).astype(np.float16),
        "model.layers.0.mlp.up_proj.weight": rng.standard_normal((48, 64)).astype(np.float32),
        "model.layers.0.mlp.odd_proj.weight": rng.standard_normal((48, 40)).astype(np.float32),
        "model.norm.weight": np.ones(64, np.float32),
    }
    tensors["model.layers.0.mlp.up_proj.weight"][3, :32] = 0
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("to", "step"), [("int8", 1 / 127), ("int4", 1 / 7)])
def test_what_was_written_reads_back(model: Path, to: str, step: float) -> None:
    output = model.parent / to
    assert main(["quantize", str(model), "--to", to, "--output", str(output)]) == 0
    assert (output / "tokenizer.json").read_text() == "{}"
    before = load_file(model / "model.safetensors")
    load_file(output / "model.safetensors")  # a well-formed file to its own library
    checkpoint = open_checkpoint(resolve_model(str(output)))
    assert set(checkpoint.names()) == set(before)
    for name, values in before.items():
        stored = checkpoint.read(name, values.shape)
        got = to_float32(stored)
        if "up_proj" not in name:
            np.testing.assert_array_equal(got, values.astype(np.float32))
            continue
        assert stored.dtype == ("Q8_0" if to == "int8" else "Q4_1")
        largest = np.abs(values.reshape(48, 2, 32)).max(-1, keepdims=True)
        assert (np.abs(got - values).reshape(48, 2, 32) <= largest * step).all()
        np.testing.assert_array_equal(got[3, :32], 0)


def test_the_search_is_no_worse_than_rounding_between_the_ends() -> None:
    groups = np.random.default_rng(1).standard_normal((500, 32)).astype(np.float32)
    q, scales, zeros = quantize_groups(groups, 4)
    got = (q.astype(np.float32) - zeros[:, None]) * scales[:, None].astype(np.float32)
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    step = ((high - low) / 15)[:, None]
    plain = (np.rint(groups / step)) * step
    assert ((got - groups) ** 2).mean() < 0.95 * ((plain - groups) ** 2).mean()


def test_what_cannot_be_quantised_is_reported(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = resolve_model(str(model))
    with pytest.raises(ModelError, match="is not an empty folder"):
        quantize_folder(files, 4, model)
    quantize_folder(files, 4, model.parent / "out")
    with pytest.raises(ModelError, match="is quantised already"):
        quantize_folder(resolve_model(str(model.parent / "out")), 4, model.parent / "out2")
    assert main(["quantize", "demo://smollm2", "--to", "int4", "--output", "x"]) == 1
    assert "is a GGUF file; only safetensors can be quantised" in capsys.readouterr().err
