"""Files that auto-round, autoawq, gptqmodel, hqq and torchao wrote (tests/data/quantized/write.py):
each matrix is what the library unpacks, and a model of them gives the logits of those matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.registry import build_backend
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ModelError
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import ModelFiles
from tests.engine.backends.driver import run_alone

if TYPE_CHECKING:
    from numpy.typing import NDArray

FOLDER = Path(__file__).parents[2] / "data" / "quantized"
FILES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
# Of a matrix's largest value. auto-round, autoawq and hqq round each value to float16, torchao to
# bfloat16, gptqmodel its scales too; we keep a scale, or a minimum, in float16. A step of 8 bits is
# 0.0079.
BOUNDS = {"auto": 2**-9, "autoawq": 2**-9, "hqq": 2**-9, "torchao": 2**-8, "gptqmodel": 0.006}


def files_of(name: str) -> ModelFiles:
    config = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    return ModelFiles(name, FOLDER / name, "safetensors", config, {})


def unpacked_by_the_library(name: str) -> dict[str, NDArray[np.float32]]:
    with np.load(FOLDER / name / "dequantized.npz") as arrays:
        return {name: np.ascontiguousarray(arrays[name], np.float32) for name in arrays.files}


def test_each_library_has_written_files() -> None:
    assert {name.split("-")[0] for name in FILES} == BOUNDS.keys()


@pytest.mark.parametrize("name", FILES)
def test_matrices_are_what_the_library_unpacks(name: str) -> None:
    checkpoint = open_checkpoint(files_of(name))
    expected = unpacked_by_the_library(name)
    assert len(expected) == 7
    for module, values in expected.items():
        stored = checkpoint.read(f"{module}.weight", values.shape)
        assert stored.dtype in {"Q4_1", "Q8_0", "F8_E4M3"}  # in their size
        bound = BOUNDS[name.split("-")[0]] * float(np.abs(values).max())
        np.testing.assert_allclose(to_float32(stored), values, atol=bound, err_msg=module)


@pytest.mark.parametrize("name", FILES)
def test_models_give_the_logits_of_what_the_library_unpacks(name: str, tmp_path: Path) -> None:
    packed = files_of(name)
    tensors = {
        f"{module}.weight": values for module, values in unpacked_by_the_library(name).items()
    }
    checkpoint = open_checkpoint(packed)
    for own in set(checkpoint.names()) - tensors.keys():
        shape = (64, 64) if own.endswith("embed_tokens.weight") else (64,)
        tensors[own] = to_float32(checkpoint.read(own, shape)).reshape(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**packed.config, "dtype": "float32"}
    del config["quantization_config"]
    plain = ModelFiles("plain", tmp_path, "safetensors", config, {})
    expected = logits(plain, "torch", "float32")
    for device, dtype, bound in (("torch", "float32", 1e-2), ("cpu", "float32", 3e-2)):
        error = logits(packed, device, dtype) - expected
        assert np.sqrt(np.mean(error**2) / np.var(expected)) < bound, device


def logits(files: ModelFiles, device: Any, dtype: Any) -> NDArray[np.float32]:
    settings = EngineConfig(
        device=device, dtype=dtype, quantization="none", num_threads=1, max_model_len=128
    )
    backend: Any = build_backend(settings, files)
    tokens = torch.randint(3, 64, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    return run_alone(backend, tokens)


@pytest.mark.parametrize(
    "kinds",
    [
        None,
        {"default": {"_type": "Int4WeightOnlyConfig"}},
        {"default": {"_type": "Int8WeightOnlyConfig"}, "lm_head": None},
    ],
)
def test_other_kinds_of_torchao_are_refused(kinds: object) -> None:
    files = files_of("torchao-int8")
    scheme = {"quant_method": "torchao", "quant_type": kinds}
    config = {**files.config, "quantization_config": scheme}
    with pytest.raises(ModelError, match="torchao with quant_type"):
        open_checkpoint(ModelFiles("m", files.path, "safetensors", config, {}))


def test_zero_points_of_torchao_must_be_0(tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(FOLDER / "torchao-int8" / "model.safetensors")
    module = "model.layers.0.mlp.up_proj"
    tensors[f"{module}._weight_zero_point"] = torch.ones((96, 1), dtype=torch.int8)
    safetensors.torch.save_file(
        {name: tensor for name, tensor in tensors.items() if name.startswith(module)},
        tmp_path / "model.safetensors",
    )
    files = ModelFiles("m", tmp_path, "safetensors", files_of("torchao-int8").config, {})
    with pytest.raises(ModelError, match="8-bit integers with zero points"):
        open_checkpoint(files).read(f"{module}.weight", (96, 64))
