"""HQQ's checkpoints: packed here as the format says, and by the library where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.errors import ModelError
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import ModelFiles

if TYPE_CHECKING:
    from pathlib import Path

    from octavo_engine.weights.checkpoint import Checkpoint

ROWS, COLUMNS = 24, 128
CONFIG = {"quant_method": "hqq", "skip_modules": ["lm_head"]}
PACKINGS = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def opened(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    files = ModelFiles("m", folder, "safetensors", {"quantization_config": CONFIG}, {})
    return open_checkpoint(files)


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def encoded(
    bits: int, axis: int = 1, group: int | None = 64
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A random matrix as HQQ's tensors, and its values."""
    generator = torch.Generator().manual_seed(bits)
    size = group or (COLUMNS if axis == 1 else ROWS)
    lines = (ROWS * COLUMNS // size, size) if axis == 1 else (size, ROWS * COLUMNS // size)
    factors = (lines[0], 1) if axis == 1 else (1, lines[1])
    q = torch.randint(0, 2**bits, lines, generator=generator)
    scale = torch.rand(factors, generator=generator).half() / 16 + 0.01
    zero = (torch.rand(factors, generator=generator) * 2**bits).half()
    per_word = 10 if bits == 3 else 8 // bits
    rows = -(-lines[0] // per_word)
    padded = torch.zeros((rows * per_word, lines[1]), dtype=torch.int64)
    padded[: lines[0]] = q
    words = torch.zeros((rows, lines[1]), dtype=torch.int64)
    for part in range(per_word):
        words |= padded[part * rows : (part + 1) * rows] << bits * (per_word - 1 - part)
    tensors = {
        "W_q": words.int() if bits == 3 else words.byte(),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor([ROWS, COLUMNS]),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "packing": text(PACKINGS[bits]),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
        "compute_dtype": text("torch.float16"),
        "stores_quant_config": torch.tensor(1, dtype=torch.uint8),
    }
    if group is not None:
        tensors["group_size"] = torch.tensor(group, dtype=torch.int32)
    values = (q.float() - zero.float()) * scale.float()
    return {f"w.{name}": tensor for name, tensor in tensors.items()}, values.view(ROWS, COLUMNS)


@pytest.mark.parametrize("group", [None, 32, 64])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_groups_along_the_input_keep_four_bits(
    tmp_path: Path, bits: int, group: int | None
) -> None:
    tensors, expected = encoded(bits, group=group)
    tensors |= {"w.bias": torch.ones(ROWS), "lm_head.weight": torch.ones(4, 8).half()}
    checkpoint = opened(tmp_path, tensors)
    assert set(checkpoint.names()) == {"w.weight", "w.bias", "lm_head.weight"}
    stored = checkpoint.read("w.weight", (ROWS, COLUMNS))
    assert stored.dtype == "Q4_1"
    bound = 2**-11 * float(expected.abs().max() * 2)  # of a minimum that is rounded to float16
    np.testing.assert_allclose(to_float32(stored), expected.numpy(), atol=bound)
    assert checkpoint.read("lm_head.weight", (4, 8)).dtype == "F16"


@pytest.mark.parametrize(
    ("bits", "axis", "group"), [(8, 1, 64), (4, 0, 64), (3, 0, 64), (4, 1, 48), (8, 0, None)]
)
def test_other_matrices_are_widened(
    tmp_path: Path, bits: int, axis: int, group: int | None
) -> None:
    tensors, expected = encoded(bits, axis, group)
    stored = opened(tmp_path, tensors).read("w.weight", (ROWS, COLUMNS))
    assert stored.dtype == "F32"
    np.testing.assert_array_equal(to_float32(stored), expected.numpy())


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("shape", torch.tensor([COLUMNS, ROWS]), r"does not say \[24, 128\]"),
        ("axis", torch.tensor(2, dtype=torch.int32), "must be 0 or 1"),
        ("group_size", torch.tensor(7, dtype=torch.int32), "does not divide 3072 values"),
        ("group_size", torch.tensor([64, 64], dtype=torch.int32), "must be one number"),
        ("packing", text("5bit_u8"), "must be one of"),
        ("view_as_float", torch.tensor(1, dtype=torch.uint8), "of this form are not read"),
        ("scale", torch.ones(3, 1), "it must be"),
        ("W_q", torch.ones(3, 64).byte(), "values of 4 bits"),
        ("zero", None, "is missing"),
    ],
)
def test_tensors_that_do_not_fit_name_themselves(
    tmp_path: Path, part: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors, _ = encoded(4)
    if tensor is None:
        del tensors[f"w.{part}"]
    else:
        tensors[f"w.{part}"] = tensor
    checkpoint = opened(tmp_path, tensors)
    with pytest.raises(ModelError, match=f"w.{part} .*{message}"):
        checkpoint.read("w.weight", (ROWS, COLUMNS))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_matrices_that_the_library_packs_have_the_values_it_unpacks(
    tmp_path: Path, bits: int, axis: int
) -> None:
    quantize: Any = pytest.importorskip(
        "hqq.core.quantize", reason="hqq compiles CUDA kernels when it is installed"
    )
    torch.set_num_threads(1)
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    config = quantize.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    packed = quantize.HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
    tensors = {f"w.{name}": tensor.contiguous() for name, tensor in packed.state_dict().items()}
    expected = packed.dequantize().detach()
    stored = opened(tmp_path, tensors).read("w.weight", (ROWS, COLUMNS))
    bound = 2**-10 * float(expected.abs().max())
    np.testing.assert_allclose(to_float32(stored), expected.numpy(), atol=bound)
