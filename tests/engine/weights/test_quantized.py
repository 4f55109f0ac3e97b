"""GPTQ, AWQ and compressed-tensors checkpoints, packed here as those formats say, read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import save_file

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.errors import ModelError
from octavo_engine.weights.open import open_checkpoint
from octavo_engine.weights.source import ModelFiles

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.weights.checkpoint import Checkpoint

ROWS, COLUMNS, GROUP = 24, 128, 64
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(values: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Numbers of the last axis into 32-bit words, the first in the lowest bits."""
    per_word = 32 // bits
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // per_word), np.uint32)
    for i in range(per_word):
        packed |= values[..., i::per_word].astype(np.uint32) << np.uint32(bits * i)
    return packed.view(np.int32)


def random_matrix(bits: int, *, groups: int = COLUMNS // GROUP) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(bits)
    return {
        "q": rng.integers(0, 2**bits, (ROWS, COLUMNS)),
        "zeros": rng.integers(1, 2**bits, (ROWS, groups)),
        "scales": rng.uniform(0.01, 0.1, (ROWS, groups)).astype(np.float16),
    }


def values(m: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """(q - zero) * scale in exact arithmetic, but for the product that is kept in float16."""
    per_group = COLUMNS // m["scales"].shape[1]
    scales = m["scales"].astype(np.float32)
    minima = (-m["zeros"] * scales).astype(np.float16).astype(np.float32)
    scales, minima = (v.repeat(per_group, axis=1) for v in (scales, minima))
    result: NDArray[np.float32] = m["q"].astype(np.float32) * scales + minima
    return result


def opened(folder: Path, tensors: dict[str, NDArray[Any]], config: Any) -> Checkpoint:
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    files = ModelFiles("m", folder, "safetensors", {"quantization_config": config}, {})
    return open_checkpoint(files)


def gptq(m: dict[str, NDArray[Any]], bits: int, stored_zeros: NDArray[Any]) -> dict[str, Any]:
    return {
        "w.qweight": words(m["q"], bits).T,
        "w.qzeros": words(stored_zeros.T, bits),
        "w.scales": m["scales"].T,
        "w.g_idx": np.arange(COLUMNS, dtype=np.int32) // GROUP,
    }


def read(checkpoint: Checkpoint) -> NDArray[np.float32]:
    return to_float32(checkpoint.read("w.weight", (ROWS, COLUMNS)))


@pytest.mark.parametrize(("version", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_of_four_bits(tmp_path: Path, version: str, offset: int) -> None:
    m = random_matrix(4)
    config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": version}
    checkpoint = opened(tmp_path, gptq(m, 4, m["zeros"] - offset), config)
    assert set(checkpoint.names()) == {"w.weight"}
    np.testing.assert_array_equal(read(checkpoint), values(m))


def test_symmetric_weights_are_exact(tmp_path: Path) -> None:
    m = random_matrix(4)
    m["zeros"] = np.full_like(m["zeros"], 8)
    config = {"quant_method": "gptq", "bits": 4}
    got = read(opened(tmp_path, gptq(m, 4, m["zeros"] - 1), config))
    scales = m["scales"].astype(np.float32).repeat(GROUP, axis=1)
    np.testing.assert_array_equal(got, (m["q"] - 8).astype(np.float32) * scales)


def test_gptq_of_eight_bits(tmp_path: Path) -> None:
    m = random_matrix(8)
    m["zeros"] = np.full_like(m["zeros"], 128)
    config = {"quant_method": "gptq", "bits": 8}
    np.testing.assert_array_equal(
        read(opened(tmp_path, gptq(m, 8, m["zeros"] - 1), config)), values(m)
    )


def in_bits(values: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Each line's numbers as one stream of bits, the lowest bit of the first number in front."""
    lines = []
    for line in values.tolist():
        number = sum(int(value) << bits * i for i, value in enumerate(line))
        lines.append(np.frombuffer(number.to_bytes(len(line) * bits // 8, "little"), np.int32))
    return np.stack(lines)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_gptq_of_two_and_three_bits(tmp_path: Path, bits: int, method: str) -> None:
    """Rows and groups that fill whole words: 32 rows of 3 bits take 3 words."""
    rows = 32
    rng = np.random.default_rng(bits)
    q, zeros = rng.integers(0, 2**bits, (rows, COLUMNS)), rng.integers(1, 2**bits, (rows, 2))
    scales = rng.uniform(0.01, 0.1, (rows, 2)).astype(np.float16)
    m: dict[str, NDArray[Any]] = {"q": q, "zeros": zeros, "scales": scales}
    tensors = {
        "w.qweight": in_bits(q, bits).T,
        "w.qzeros": in_bits((zeros - 1).T, bits),
        "w.scales": m["scales"].T,
        "w.g_idx": np.arange(COLUMNS, dtype=np.int32) // GROUP,
    }
    checkpoint = opened(tmp_path, tensors, {"quant_method": method, "bits": bits})
    stored = checkpoint.read("w.weight", (rows, COLUMNS))
    assert stored.dtype == "Q4_1"
    np.testing.assert_array_equal(to_float32(stored), values(m))


def test_modules_of_auto_round_may_have_bits_of_their_own(tmp_path: Path) -> None:
    four, eight = random_matrix(4), random_matrix(8)
    eight["zeros"][:] = 128
    tensors = {
        **gptq(four, 4, four["zeros"] - 1),
        **{
            name.replace("w.", "big."): tensor
            for name, tensor in gptq(eight, 8, eight["zeros"] - 1).items()
        },
        "small.weight": np.ones((4, 8), np.float16),
    }
    extra = {"big": {"bits": 8}, "small": {"bits": 16}}
    config = {"quant_method": "auto-round", "bits": 4, "extra_config": extra}
    checkpoint = opened(tmp_path, tensors, config)
    np.testing.assert_array_equal(read(checkpoint), values(four))
    stored = checkpoint.read("big.weight", (ROWS, COLUMNS))
    assert stored.dtype == "Q8_0"
    scales = eight["scales"].astype(np.float32).repeat(GROUP, axis=1)
    np.testing.assert_array_equal(
        to_float32(stored), (eight["q"].astype(np.float32) - 128) * scales
    )
    assert checkpoint.read("small.weight", (4, 8)).dtype == "F16"


def test_words_that_values_of_three_bits_do_not_fill_name_themselves(tmp_path: Path) -> None:
    tensors = {"w.qweight": np.ones((4, 24), np.int32), "w.qzeros": np.ones((1, 3), np.int32)}
    checkpoint = opened(tmp_path, tensors, {"quant_method": "gptq", "bits": 3})
    with pytest.raises(ModelError, match=r"w.qweight .* 4 words in a line, .* do not fill"):
        read(checkpoint)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "bits": 4, "version": "gemm"},
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
    ],
)
def test_awq(tmp_path: Path, config: dict[str, Any]) -> None:
    m = random_matrix(4)

    def packed(matrix: NDArray[Any]) -> NDArray[np.int32]:
        eights = matrix.reshape(len(matrix), -1, 8)[..., AWQ_ORDER]
        return words(eights.reshape(matrix.shape), 4)

    tensors = {
        "w.qweight": packed(m["q"].T),
        "w.qzeros": packed(m["zeros"].T),
        "w.scales": m["scales"].T,
        "w.bias": np.ones(ROWS, np.float16),
        "norm.weight": np.ones(4, np.float16),
    }
    checkpoint = opened(tmp_path, tensors, config)
    assert set(checkpoint.names()) == {"w.weight", "w.bias", "norm.weight"}
    np.testing.assert_array_equal(read(checkpoint), values(m))
    assert checkpoint.read("norm.weight", (4,)).dtype == "F16"


@pytest.mark.parametrize("group", [GROUP, -1])
def test_awq_for_single_rows(tmp_path: Path, group: int) -> None:
    """Words go along the rows, and those of scales and zero points are filled up."""
    m = random_matrix(4, groups=COLUMNS // GROUP if group > 0 else 1)

    def filled(matrix: NDArray[Any]) -> NDArray[Any]:
        return np.pad(matrix, [(0, 0), (0, 32 - matrix.shape[1])], constant_values=7)

    tensors = {
        "w.qweight": words(m["q"], 4),
        "w.qzeros": words(filled(m["zeros"]), 4),
        "w.scales": filled(m["scales"]),
    }
    config = {"quant_method": "awq", "bits": 4, "version": "GEMV", "group_size": group}
    checkpoint = opened(tmp_path, tensors, config)
    assert set(checkpoint.names()) == {"w.weight"}
    np.testing.assert_array_equal(read(checkpoint), values(m))


def compressed(kind: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int"}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_pack_quantized_of_four_bits(tmp_path: Path, is_symmetric: bool) -> None:
    m = random_matrix(4)
    tensors = {"w.weight_packed": words(m["q"], 4), "w.weight_scale": m["scales"]}
    tensors["w.weight_shape"] = np.array([ROWS, COLUMNS])
    if is_symmetric:
        m["zeros"] = np.full_like(m["zeros"], 8)
    else:
        tensors["w.weight_zero_point"] = words(m["zeros"].T, 4).T
    checkpoint = opened(tmp_path, tensors, compressed("pack-quantized", 4))
    assert set(checkpoint.names()) == {"w.weight"}
    np.testing.assert_array_equal(read(checkpoint), values(m))


def test_int_quantized(tmp_path: Path) -> None:
    m = random_matrix(8, groups=1)
    m["zeros"] = np.full_like(m["zeros"], 128)
    tensors = {"w.weight": (m["q"] - 128).astype(np.int8), "w.weight_scale": m["scales"]}
    tensors["head.weight"] = np.ones((4, 8), np.float16)
    checkpoint = opened(tmp_path, tensors, compressed("int-quantized", 8))
    np.testing.assert_array_equal(read(checkpoint), values(m))
    assert checkpoint.read("head.weight", (4, 8)).dtype == "F16"


@pytest.mark.parametrize(
    "config",
    [
        "gptq",
        {},
        {"quant_method": "gptq", "bits": 5},
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2"},
        {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"w": {"bits": 5}}},
        {"quant_method": "awq", "bits": 4, "version": "gemv_fast"},
        {"quant_method": "awq", "bits": 4, "version": "gemv", "group_size": "all"},
        {"quant_method": "fp8", "weight_block_size": [128, 8]},
        {"quant_method": "fp8", "weight_block_size": "8"},
        {"quant_method": "fp4"},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        compressed("float-quantized", 8),  # whose integers are no floats
        compressed("pack-quantized", 3),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ModelError, match=r"quantization_config: .* is not supported; there are"):
        opened(tmp_path, {"w": np.ones(1, np.float32)}, config)


def test_tensors_that_do_not_fit_name_themselves(tmp_path: Path) -> None:
    m = random_matrix(4)
    config = {"quant_method": "gptq", "bits": 4}
    good = gptq(m, 4, m["zeros"] - 1)

    def refused(message: str, **changes: Any) -> None:
        tensors = good | {f"w.{name}": tensor for name, tensor in changes.items()}
        checkpoint = opened(tmp_path, {k: v for k, v in tensors.items() if v is not None}, config)
        with pytest.raises(ModelError, match=message):
            read(checkpoint)

    refused("w.scales is missing", scales=None)
    refused("w.qzeros .* has dtype F32; it must be I32", qzeros=np.ones((2, 3), np.float32))
    refused("w.scales .* has shape .*; it must have 2 sizes", scales=np.ones(3, np.float16))
    refused("g_idx .* as many columns into each group", g_idx=np.zeros(COLUMNS, np.int32))
    refused("has zero points of shape", qzeros=np.ones((1, 3), np.int32))
    refused("has 5 groups of columns for", g_idx=np.zeros(5, np.int32))
    refused(r"has scales of shape \[24, 5\]", scales=np.ones((5, 24), np.float16), g_idx=None)
    refused("has shape .*; the model's config asks", qweight=np.ones((16, 20), np.int32))


@pytest.mark.parametrize("kind", ["desc_act", "actorder"])
def test_columns_that_were_sorted_into_groups_come_back_in_their_order(
    tmp_path: Path, kind: str
) -> None:
    m = random_matrix(4)
    m["zeros"] = np.full_like(m["zeros"], 8)
    groups = np.random.default_rng(0).permutation(COLUMNS).astype(np.int32) // GROUP
    scales = m["scales"].astype(np.float32)[:, groups]
    if kind == "desc_act":
        tensors = gptq(m, 4, m["zeros"] - 1) | {"w.g_idx": groups}
        config: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "desc_act": True}
    else:
        tensors = {"w.weight_packed": words(m["q"], 4), "w.weight_scale": m["scales"]}
        tensors["w.weight_g_idx"] = groups
        config = compressed("pack-quantized", 4)
    checkpoint = opened(tmp_path, tensors, config)
    np.testing.assert_array_equal(read(checkpoint), (m["q"] - 8).astype(np.float32) * scales)
    stored = checkpoint.read("w.weight", (ROWS, COLUMNS))
    assert stored.column_map is not None and sorted(stored.column_map) == list(range(COLUMNS))


def test_groups_in_their_order_need_no_map(tmp_path: Path) -> None:
    m = random_matrix(4)
    tensors = {"w.weight_packed": words(m["q"], 4), "w.weight_scale": m["scales"]}
    tensors["w.weight_g_idx"] = np.full(COLUMNS, -1, np.int32)  # made ready, and not used
    m["zeros"] = np.full_like(m["zeros"], 8)
    stored = opened(tmp_path, tensors, compressed("pack-quantized", 4)).read("w.weight", (24, 128))
    assert stored.column_map is None
    np.testing.assert_array_equal(to_float32(stored), values(m))


def float8(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
    """Tensors, quantization_config, and what torch makes of them."""
    rows, columns = 40, 160
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn((rows, columns), generator=generator).to(torch.float8_e4m3fn)
    stored.view(torch.uint8)[0, :4] = torch.tensor([0x01, 0x87, 0x7E, 0x80])  # the odd ones
    if kind in ("blocks", "blocks in words"):
        scales = torch.rand((2, 5), generator=generator)
        whole = scales.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)
        config: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
        if kind == "blocks":
            tensors = {"w.weight": stored, "w.weight_scale_inv": scales}
            return tensors, config, stored.float() * whole
    config = compressed("float-quantized", 8)
    config["config_groups"]["group_0"]["weights"]["type"] = "float"
    if kind == "blocks in words":
        config["config_groups"]["group_0"]["weights"]["block_structure"] = "32x32"
        return {"w.weight": stored, "w.weight_scale": scales}, config, stored.float() * whole
    if kind == "rows":
        scales = torch.rand((rows, 1), generator=generator).bfloat16()
    else:
        scales, config = torch.tensor(0.37), {"quant_method": "fp8"}
    tensors = {"w.weight": stored, "w.weight_scale": scales, "w.input_scale": torch.ones(1)}
    return tensors, config, stored.float() * scales.float()


@pytest.mark.parametrize("kind", ["matrix", "rows", "blocks", "blocks in words"])
def test_floats_of_eight_bits(tmp_path: Path, kind: str) -> None:
    tensors, config, expected = float8(kind)
    tensors["head.weight"] = torch.ones((4, 8))
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    files = ModelFiles("m", tmp_path, "safetensors", {"quantization_config": config}, {})
    checkpoint = open_checkpoint(files)
    assert set(checkpoint.names()) == {"w.weight", "head.weight"}
    stored = checkpoint.read("w.weight", (40, 160))
    np.testing.assert_array_equal(to_float32(stored), expected.numpy())
    assert stored.input_dtype == "fp8"
    assert checkpoint.read("head.weight", (4, 8)).dtype == "F32"
    with pytest.raises(ModelError, match="the model's config asks for"):
        checkpoint.read("w.weight", (160, 40))


def test_scales_that_fit_no_block_name_themselves(tmp_path: Path) -> None:
    tensors, config, _ = float8("blocks")
    tensors["w.weight_scale_inv"] = torch.ones((2, 4))
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    files = ModelFiles("m", tmp_path, "safetensors", {"quantization_config": config}, {})
    with pytest.raises(ModelError, match=r"weight_scale_inv .* does not make scales for 40 x 160"):
        open_checkpoint(files).read("w.weight", (40, 160))


def test_floats_that_are_none_name_themselves(tmp_path: Path) -> None:
    tensors, config, _ = float8("matrix")
    tensors["w.weight"].view(torch.uint8)[3, 5] = 0xFF
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    files = ModelFiles("m", tmp_path, "safetensors", {"quantization_config": config}, {})
    with pytest.raises(ModelError, match="has values that are not numbers"):
        open_checkpoint(files).read("w.weight", (40, 160))


def test_integers_say_whether_inputs_are_rounded_too(tmp_path: Path) -> None:
    m = random_matrix(8, groups=1)
    tensors = {"w.weight": (m["q"] - 128).astype(np.int8), "w.weight_scale": m["scales"]}
    config = compressed("int-quantized", 8)
    assert opened(tmp_path, tensors, config).read("w.weight", (24, 128)).input_dtype is None
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}
    assert opened(tmp_path, tensors, config).read("w.weight", (24, 128)).input_dtype == "int8"
