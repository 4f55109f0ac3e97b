"""bitsandbytes' checkpoints of 8 and 4 bits: packed here as the format says, and by the library."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.registry import build_backend
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ModelError
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import ModelFiles
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.models.tiny import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.weights.checkpoint import Checkpoint

ROWS, COLUMNS, BLOCK, NESTED_BLOCK = 24, 96, 64, 16
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def four_bits(kind: str) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}


def opened(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    files = ModelFiles("m", folder, "safetensors", {"quantization_config": config}, {})
    return open_checkpoint(files)


def encoded(
    kind: str, dtype: str, *, is_nested: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A random matrix as 4-bit tensors, and its values one by one."""
    rng = np.random.default_rng(0)
    count = ROWS * COLUMNS
    levels = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    indices = rng.integers(0, 16, count)
    absmax = rng.uniform(0.5, 2, count // BLOCK).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": dtype}
    state["shape"] = [ROWS, COLUMNS]
    tensors: dict[str, NDArray[Any]] = {"quant_map": levels}
    if is_nested:
        nested_levels = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        stored = rng.integers(0, 256, len(absmax)).astype(np.uint8)
        scales = rng.uniform(0.5, 2, -(-len(absmax) // NESTED_BLOCK)).astype(np.float32)
        tensors |= {"nested_quant_map": nested_levels, "nested_absmax": scales, "absmax": stored}
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_offset": 1.25, "nested_dtype": dtype}
        absmax = np.array(
            [
                nested_levels[index] * scales[i // NESTED_BLOCK] + np.float32(1.25)
                for i, index in enumerate(stored)
            ]
        )
    else:
        tensors["absmax"] = absmax
    values = [levels[index] * absmax[i // BLOCK] for i, index in enumerate(indices)]
    pairs = indices.reshape(-1, 2)
    tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8)[:, None]
    text = json.dumps(state).encode()
    tensors[f"quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8).copy()
    named = {f"w.weight.{name}": torch.from_numpy(tensor) for name, tensor in tensors.items()}
    named["w.weight"] = named.pop("w.weight.weight")
    expected = torch.from_numpy(np.array(values, np.float32)).reshape(ROWS, COLUMNS)
    return named, expected.to(getattr(torch, dtype)).float()


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_have_the_dtype_they_came_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, dtype: str, is_nested: bool
) -> None:
    tensors, expected = encoded(kind, dtype, is_nested=is_nested)
    tensors |= {"w.bias": torch.ones(ROWS), "norm.weight": torch.ones(4)}
    with caplog.at_level(logging.INFO):
        checkpoint = opened(tmp_path, tensors, four_bits(kind))
    assert set(checkpoint.names()) == {"w.weight", "w.bias", "norm.weight"}
    assert "1 bitsandbytes matrices of 4 bits are widened" in caplog.text
    stored = checkpoint.read("w.weight", (ROWS, COLUMNS))
    assert stored.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(to_float32(stored), expected.numpy())


def test_eight_bits_are_kept(tmp_path: Path) -> None:
    """SCB / 127 is rounded to float16, which holds these scales exactly."""
    q = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8)
    scales = torch.arange(1, ROWS + 1) / 256
    tensors = {"w.weight": q, "w.SCB": scales * 127, "w.weight_format": torch.tensor(0).byte()}
    tensors["head.weight"] = torch.ones((4, 8)).half()
    checkpoint = opened(tmp_path, tensors, INT8)
    assert set(checkpoint.names()) == {"w.weight", "head.weight"}
    stored = checkpoint.read("w.weight", (ROWS, COLUMNS))
    assert stored.dtype == "Q8_0"
    np.testing.assert_array_equal(to_float32(stored), (q * scales[:, None]).numpy())
    assert checkpoint.read("head.weight", (4, 8)).dtype == "F16"


def state(**changes: Any) -> torch.Tensor:
    fields = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": [ROWS, COLUMNS]}
    text = json.dumps({**fields, "nested_blocksize": NESTED_BLOCK, **changes}).encode()
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("quant_map", torch.ones(15), "quant_map .* has 15 levels; there must be 16"),
        ("nested_quant_map", torch.ones(2), "nested_quant_map .* there must be 256"),
        ("nested_absmax", torch.ones(9), "nested_absmax .* has 9 scales for 36 blocks"),
        ("absmax", torch.ones(33).byte(), "absmax .* has 33 blocks; there must be 36"),
        ("absmax", torch.ones(36), "absmax .* has dtype F32; it must be U8"),
        ("quant_map", None, "quant_map is missing"),
        ("", torch.ones((3, 1)).byte(), "w.weight .* has 3 bytes for 2304 values"),
    ],
)
def test_parts_that_do_not_fit_name_themselves(
    tmp_path: Path, part: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors, _ = encoded("nf4", "float32", is_nested=True)
    name = f"w.weight.{part}" if part else "w.weight"
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    checkpoint = opened(tmp_path, tensors, four_bits("nf4"))
    with pytest.raises(ModelError, match=message):
        checkpoint.read("w.weight", (ROWS, COLUMNS))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"},
        {"shape": [2]},
        {"shape": [-1, 2]},
        {"blocksize": 0},
        {"nested_blocksize": "4"},
        {"nested_blocksize": 2**40},
        {"nested_offset": float("nan")},
    ],
)
def test_broken_states_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    tensors, _ = encoded("nf4", "float32", is_nested=True)
    tensors["w.weight.quant_state.bitsandbytes__nf4"] = state(**changes)
    with pytest.raises(ModelError, match=r"bitsandbytes__nf4 .* does not describe 4-bit values"):
        opened(tmp_path, tensors, four_bits("nf4"))


def test_shapes_and_kinds_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors, _ = encoded("nf4", "float32", is_nested=False)
    checkpoint = opened(tmp_path, tensors, four_bits("nf4"))
    with pytest.raises(ModelError, match="the model's config asks for"):
        checkpoint.read("w.weight", (COLUMNS, ROWS))
    for config in (four_bits("int4"), {"quant_method": "bitsandbytes"}):
        with pytest.raises(ModelError, match=r"quantization_config: bitsandbytes .* not supported"):
            opened(tmp_path, tensors, config)


def logits(files: ModelFiles, device: Any, dtype: Any, quantization: Any) -> NDArray[np.float32]:
    settings = EngineConfig(
        device=device, dtype=dtype, quantization=quantization, num_threads=1, max_model_len=160
    )
    backend: Any = build_backend(settings, files)
    return run_alone(backend, random_tokens(80))


def written_by_the_library(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A tiny model's tensors with matrices that bitsandbytes packed, and as it unpacks them."""
    functional = pytest.importorskip("bitsandbytes.functional")
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tiny_model("qwen3").tensors.items():
        values = tensor.bfloat16()
        packed[name] = plain[name] = values
        if not name.endswith("proj.weight"):
            continue
        if kind == "int8":
            integers, rows, _ = functional.int8_vectorwise_quant(values.half())
            packed |= {name: integers, name.replace(".weight", ".SCB"): rows}
            plain[name] = functional.int8_vectorwise_dequant(integers, rows)
            continue
        quantised, quant_state = functional.quantize_4bit(
            values, blocksize=64, quant_type=kind.split()[0], compress_statistics="double" in kind
        )
        packed[name] = quantised
        parts = quant_state.as_dict(packed=True)
        packed |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        # On a CPU, version 0.50 unpacks rows wrongly that a block's size does not divide.
        quant_state.shape = torch.Size((values.numel() // 64, 64))
        unpacked = functional.dequantize_4bit(quantised, quant_state)
        plain[name] = unpacked.reshape(values.shape)
    return packed, plain


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "nf4 double", "fp4", "fp4 double", "int8"])
def test_files_of_the_library_give_the_logits_of_what_it_unpacks(tmp_path: Path, kind: str) -> None:
    packed, plain = written_by_the_library(kind)
    config = tiny_model("qwen3").config
    scheme = INT8 if kind == "int8" else four_bits(kind.split()[0])
    files = []
    for folder, tensors, more in (
        (tmp_path / "packed", packed, {"quantization_config": scheme}),
        (tmp_path / "plain", plain, {}),
    ):
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
                  folder / "model.safetensors")  # fmt: skip
        files.append(ModelFiles("m", folder, "safetensors", config | more, {}))
    for device, dtype in (("torch", "float32"), ("cpu", "bfloat16")):
        got, expected = (logits(of, device, dtype, "none") for of in files)
        if kind == "int8":  # whose scales are rounded to float16: 2^-11 of themselves at most
            bound = 2e-3 if dtype == "float32" else 2e-2
            assert np.abs(got - expected).max() < bound * np.abs(expected).max()
        else:
            np.testing.assert_array_equal(got, expected)
