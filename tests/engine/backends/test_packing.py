"""Which form a matrix takes in memory, and that a file's own integers reach it as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from octavo_engine import _native
from octavo_engine.backends.native.loader import NativeLoader
from octavo_engine.backends.native.packing import choose_packings
from octavo_engine.backends.registry import build_backend
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError
from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.source import ModelFiles
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.tolerance import BF16_AGAINST_FLOAT32, error
from tests.engine.models.tiny import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.backends.native.packing import Packing
    from octavo_engine.config import Device, DType, Quantization


class Tensors:
    """A checkpoint in memory."""

    def __init__(self, **tensors: StoredTensor) -> None:
        self._tensors = {f"{name}.weight": tensor for name, tensor in tensors.items()}

    def names(self) -> Iterable[str]:
        return self._tensors

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        assert self._tensors[name].shape == shape
        return self._tensors[name]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self._tensors.values())


def numbers(rows: int, columns: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def stored(dtype: str, rows: int = 20, columns: int = 64, seed: int = 0) -> StoredTensor:
    values = numbers(rows, columns, seed)
    if dtype == "F32":
        return StoredTensor("w", dtype, values.shape, values.view(np.uint8).reshape(-1))
    data = quantize(values, GGMLQuantizationType[dtype]).reshape(-1)
    return StoredTensor("w", dtype, values.shape, data)


def decoded(tensor: StoredTensor) -> NDArray[np.float32]:
    values: Any = dequantize(tensor.data, GGMLQuantizationType[tensor.dtype])
    return np.asarray(values, np.float32).reshape(tensor.shape)


@pytest.mark.parametrize(
    ("stored_types", "dtype", "quantization", "is_vocabulary", "packings"),
    [
        ("Q8_0", "bf16", "auto", False, "q8"),
        ("Q4_0", "bf16", "auto", False, "q4_0"),
        ("Q4_1 Q4_0", "bf16", "auto", True, "q4 q4_0"),
        ("Q4_1 Q8_0", "bf16", "auto", False, "q4 q8"),
        ("Q4_K Q4_K Q6_K", "bf16", "auto", False, "q4_k q4_k q6_k"),
        ("Q2_K Q3_K Q4_K Q5_K", "bf16", "auto", False, "q2_k q3_k q4_k q5_k"),
        ("Q2_K Q3_K Q4_K Q5_K Q6_K", "bf16", "auto", False, "bf16 bf16 bf16 bf16 bf16"),
        ("Q4_K F16 Q6_K", "bf16", "auto", False, "bf16 bf16 bf16"),
        ("BF16", "bf16", "auto", False, "bf16"),
        ("Q4_1", "f32", "auto", False, "f32"),
        ("Q4_1", "bf16", "none", False, "bf16"),
        ("BF16", "bf16", "int8", False, "q8"),
        ("Q4_K Q6_K", "bf16", "int8", False, "q8 q8"),
        ("BF16", "bf16", "int4", False, "q4"),
        ("BF16", "bf16", "int4", True, "q8"),
        ("Q4_K Q6_K", "bf16", "int4", False, "q4_k q4"),
        ("Q6_K", "bf16", "int4", True, "q8"),
        ("BF16", "f32", "int8", True, "q8"),
    ],
)
def test_what_was_asked_for_and_what_the_file_has(
    stored_types: str,
    dtype: Dtype,
    quantization: Quantization,
    is_vocabulary: bool,
    packings: str,
) -> None:
    types = stored_types.split()
    sizes = [32] * len(types)
    got = choose_packings(types, sizes, dtype, quantization, is_vocabulary=is_vocabulary)
    assert got == packings.split()


def test_forms_change_where_a_panel_begins_only() -> None:
    def packings(*sizes: int) -> list[Packing]:
        types = ["Q4_K", "Q6_K", "Q6_K"][: len(sizes)]
        return choose_packings(types, sizes, "bf16", "auto", is_vocabulary=False)

    assert packings(32, 5, 5) == ["q4_k", "q6_k", "q6_k"]
    assert packings(33, 5, 5) == ["bf16", "bf16", "bf16"]
    types = ["Q4_K", "Q8_0"]
    assert choose_packings(types, [5, 5], "bf16", "int4", is_vocabulary=False) == ["q4", "q4"]


@pytest.mark.parametrize(("dtype", "packing"), [("Q8_0", "q8"), ("Q4_0", "q4_0"), ("Q4_1", "q4")])
def test_a_files_own_integers_lose_nothing(dtype: str, packing: Packing) -> None:
    parts = {name: stored(dtype, rows, seed=rows) for name, rows in (("q", 20), ("k", 5))}
    loader = NativeLoader(Tensors(**parts), _native.Team(1), "bf16")
    weight = loader.linear(["q", "k"], 64, [20, 5]).weight
    assert weight.dtype == packing
    expected = np.concatenate([decoded(tensor) for tensor in parts.values()])
    np.testing.assert_array_equal(weight.unpack(), expected)


def test_a_merged_matrix_of_different_forms_loses_nothing() -> None:
    parts = {name: stored(dtype, 32) for name, dtype in (("q", "Q4_1"), ("k", "Q5_0"))}
    parts["v"] = stored("Q8_0", 9)
    loader = NativeLoader(Tensors(**parts), _native.Team(1), "bf16")
    weight = loader.linear(["q", "k", "v"], 64, [32, 32, 9]).weight
    assert weight.dtype == "q4+q5_0+q8"
    expected = np.concatenate([decoded(tensor) for tensor in parts.values()])
    np.testing.assert_array_equal(weight.unpack(), expected)


def test_rows_that_the_file_permutes() -> None:
    plain = stored("Q4_1")
    order = np.random.default_rng(1).permutation(20).astype(np.int32)
    moved = StoredTensor("w", plain.dtype, plain.shape, plain.data, row_map=order)
    weight = NativeLoader(Tensors(w=moved), _native.Team(1), "bf16").linear("w", 64, 20).weight
    np.testing.assert_array_equal(weight.unpack(), decoded(plain)[order])


@pytest.mark.parametrize(
    ("quantization", "head", "body"), [("int4", "q8", "q4"), ("int8", "q8", "q8")]
)
def test_a_checkpoint_of_numbers_is_quantised(
    quantization: Quantization, head: Packing, body: Packing
) -> None:
    tensors = Tensors(embed=stored("F32"), lm_head=stored("F32"), w=stored("F32"))
    loader = NativeLoader(tensors, _native.Team(1), "bf16", quantization=quantization)
    table = loader.embedding("embed", 20, 64)
    assert (table.dtype, loader.tied(table).weight.dtype) == (head, head)
    assert loader.linear("lm_head", 64, 20).weight.dtype == head
    weight = loader.linear("w", 64, 20).weight
    assert weight.dtype == body
    off = np.abs(weight.unpack() - numbers(20, 64, 0)).max()
    assert off < (0.02 if body == "q8" else 0.3)


@pytest.mark.parametrize("device", ["torch", "cuda"])
def test_devices_that_compute_no_integers_say_so(device: Device, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32}
    config |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    files = ModelFiles("m", tmp_path, "safetensors", config, {})
    with pytest.raises(ConfigError, match="--quantization int8 is computed by --device cpu only"):
        build_backend(EngineConfig(device=device, quantization="int8"), files)


def test_a_compressed_checkpoint_is_computed_as_it_is_stored(tmp_path: Path) -> None:
    """Its 4-bit matrices stay integers here, and the float32 reference decodes them: they agree."""
    model = tiny_model("qwen3")
    tensors: dict[str, NDArray[Any]] = {}
    for name, tensor in model.tensors.items():
        values = np.asarray(tensor.float().numpy())
        if not name.endswith("proj.weight"):
            tensors[name] = values
            continue
        groups = values.reshape(len(values), -1, 32)
        scales = (np.abs(groups).max(-1) / 7).astype(np.float16)
        q = np.rint(groups / scales[..., None].astype(np.float32)).clip(-8, 7) + 8
        eights = q.reshape(len(values), -1, 8).astype(np.uint32)
        words = (eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1).astype(np.uint32)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.weight_packed": words.view(np.int32)}
        tensors |= {f"{module}.weight_scale": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    scheme: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    scheme |= {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}
    config = model.config | {"quantization_config": scheme}
    files = ModelFiles("m", tmp_path, "safetensors", config, {})

    truth = logits(files, "torch", "float32")
    kept, rounded = (logits(files, "cpu", "bfloat16", how) for how in ("auto", "none"))
    # Embedding, head, keys and values are still bf16 in both.
    assert error(kept, truth) < error(rounded, truth) < BF16_AGAINST_FLOAT32


def test_what_8_bit_floats_lose_as_integers_is_little_beside_what_they_have_lost(
    tmp_path: Path,
) -> None:
    model = tiny_model("qwen3")
    original = {name: tensor.float() for name, tensor in model.tensors.items()}
    tensors = dict(original)
    for name, values in original.items():
        if name.endswith("proj.weight"):
            scale = values.abs().amax(1, keepdim=True) / 448
            tensors[name] = (values / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
    scheme: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    scheme |= {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
    files = []
    for folder, stored_tensors, more in (
        (tmp_path / "original", original, {}),
        (tmp_path / "floats8", tensors, {"quantization_config": scheme}),
    ):
        folder.mkdir()
        save_torch_file(stored_tensors, folder / "model.safetensors")
        files.append(ModelFiles("m", folder, "safetensors", model.config | more, {}))
    before, truth = (logits(of, "torch", "float32") for of in files)
    kept = logits(files[1], "cpu", "bfloat16")
    assert error(kept, truth) < error(truth, before) / 2
    assert error(kept, before) < error(truth, before) * 1.1


def logits(
    files: ModelFiles, device: Device, dtype: DType, quantization: Quantization = "auto"
) -> NDArray[np.float32]:
    settings = EngineConfig(
        device=device, dtype=dtype, quantization=quantization, num_threads=1, max_model_len=160
    )
    backend: Any = build_backend(settings, files)
    return run_alone(backend, random_tokens(80))
