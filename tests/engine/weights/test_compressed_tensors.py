"""compressed-tensors checkpoints: several layouts in one, by targets; floats of four bits; and
files that the format's own library packs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo_engine._native import Packed, Team
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

ROWS, COLUMNS = 24, 128
LEVELS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]

WEIGHTS: dict[str, dict[str, Any]] = {
    "pack-quantized": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32},
    "pack-quantized uneven": {
        "type": "int", "num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False
    },
    "int-quantized": {"type": "int", "num_bits": 8, "strategy": "channel"},
    "float-quantized": {"type": "float", "num_bits": 8, "strategy": "channel"},
    "nvfp4-pack-quantized": {
        "type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16
    },
    "mxfp4-pack-quantized": {
        "type": "float", "num_bits": 4, "strategy": "group", "group_size": 32,
        "scale_dtype": "torch.uint8",
    },
}  # fmt: skip


def group(kind: str, *targets: str, **more: Any) -> dict[str, Any]:
    return {"format": kind.split()[0], "targets": list(targets), "weights": WEIGHTS[kind], **more}


def mixed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        **more,
    }


def opened(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    files = ModelFiles("m", folder, "safetensors", {"quantization_config": config}, {})
    return open_checkpoint(files)


def eight_bits(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A matrix's values, and its tensors in int-quantized."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8, generator=generator)
    scales = torch.arange(1, ROWS + 1)[:, None] / 256
    return q * scales, {"weight": q, "weight_scale": scales}


def four_bits(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator)
    scales = torch.arange(1, ROWS + 1)[:, None] / 64
    words = sum(q[:, i::8] << 4 * i for i in range(8))
    assert isinstance(words, torch.Tensor)
    signed = torch.where(words >= 2**31, words - 2**32, words).int()
    return (q - 8) * scales, {"weight_packed": signed, "weight_scale": scales}


def floats(seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """The e2m1 values of a matrix, and their bytes."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator)
    values = torch.tensor([*LEVELS, *(-level for level in LEVELS)])[bits]
    return values, {"weight_packed": (bits[:, 0::2] | bits[:, 1::2] << 4).byte()}, bits


def test_each_module_has_the_layout_of_the_group_that_targets_it(tmp_path: Path) -> None:
    made = {
        "model.layers.0.mlp.up_proj": eight_bits(0),
        "model.layers.0.mlp.down_proj": four_bits(1),
        "model.layers.0.self_attn.q_proj": four_bits(2),
        "model.layers.1.self_attn.q_proj": eight_bits(3),
    }
    tensors = {
        f"{module}.{part}": t for module, (_, own) in made.items() for part, t in own.items()
    }
    tensors["lm_head.weight"] = torch.ones((4, 8)).half()
    config = mixed(
        group("int-quantized", "Linear"),
        group("pack-quantized", r"re:.*\.self_attn\..*", "model.layers.0.mlp.down_proj"),
        group("int-quantized", "model.layers.1.self_attn.q_proj", input_activations={}),
        ignore=["lm_head"],
    )
    checkpoint = opened(tmp_path, tensors, config)
    assert set(checkpoint.names()) == {"lm_head.weight", *(f"{module}.weight" for module in made)}
    inputs = {}
    for module, (values, _) in made.items():
        stored = checkpoint.read(f"{module}.weight", (ROWS, COLUMNS))
        np.testing.assert_array_equal(to_float32(stored), values.numpy())
        inputs[module] = stored.input_dtype
    assert [module for module, dtype in inputs.items() if dtype == "int8"] == [
        "model.layers.1.self_attn.q_proj"
    ]
    assert checkpoint.read("lm_head.weight", (4, 8)).dtype == "F16"


@pytest.mark.parametrize(
    "groups",
    [
        [group("int-quantized", "other"), group("pack-quantized", "re:.*other")],
        [group("pack-quantized", "w"), group("int-quantized", "Linear")],
    ],
)
def test_quantised_values_that_no_group_describes_are_an_error(
    tmp_path: Path, groups: list[dict[str, Any]]
) -> None:
    _, own = eight_bits(0)
    tensors = {f"w.{part}": tensor for part, tensor in own.items()}
    with pytest.raises(ModelError, match="does not say how w is quantised"):
        opened(tmp_path, tensors, mixed(*groups))


@pytest.mark.parametrize(
    "config",
    [
        mixed(),
        mixed(group("int-quantized", "re:(")),
        mixed(group("int-quantized") | {"targets": None}),
        mixed(group("int-quantized", "Linear") | {"format": "marlin-24"}),
        mixed(group("int-quantized", "Linear") | {"weights": None}),
        {"quant_method": "modelopt", "quant_algo": "W4A8"},
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"quantization_config: .* is not supported; there are"):
        opened(tmp_path, {"w": torch.ones(1)}, config)


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt"])
def test_nvfp4_keeps_its_size(tmp_path: Path, method: str) -> None:
    values, own, _ = floats(0)
    scales = torch.linspace(0.01, 440, ROWS * COLUMNS // 16).view(ROWS, -1).to(torch.float8_e4m3fn)
    whole = scales.float().repeat_interleave(16, dim=1)
    if method == "modelopt":
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        own = {"weight": own["weight_packed"], "weight_scale_2": torch.tensor(0.25)}
        expected = values * whole * 0.25
    else:
        config = mixed(group("nvfp4-pack-quantized", "Linear"))
        own |= {"weight_global_scale": torch.tensor([8.0])}
        expected = values * whole / 8
    own |= {"weight_scale": scales}
    checkpoint = opened(tmp_path, {f"w.{part}": t for part, t in own.items()}, config)
    assert set(checkpoint.names()) == {"w.weight"}
    stored = checkpoint.read("w.weight", (ROWS, COLUMNS))
    packed = Packed(ROWS, COLUMNS, "nvfp4")
    packed.pack(Team(1), 0, stored.data, stored.dtype, ROWS)
    assert packed.nbytes == 32 * (COLUMNS * 4.5 / 8 + 4)  # whole panels of 16 rows
    np.testing.assert_array_equal(packed.unpack(), expected.numpy())
    np.testing.assert_array_equal(to_float32(stored), expected.numpy())


def test_nvfp4_of_half_a_group_is_refused(tmp_path: Path) -> None:
    own = {
        "weight_packed": torch.zeros(ROWS, 24).byte(),
        "weight_scale": torch.ones(ROWS, 3).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1),
    }
    config = mixed(group("nvfp4-pack-quantized", "Linear"))
    checkpoint = opened(tmp_path, {f"w.{part}": t for part, t in own.items()}, config)
    with pytest.raises(ModelError, match="48 columns; NVFP4 is read of multiples of 32"):
        checkpoint.read("w.weight", (ROWS, 48))


def test_mxfp4_keeps_its_size(tmp_path: Path) -> None:
    values, own, _ = floats(1)
    exponents = torch.randint(118, 133, (ROWS, COLUMNS // 32)).byte()
    own |= {"weight_scale": exponents}
    config = mixed(group("mxfp4-pack-quantized", "Linear"))
    checkpoint = opened(tmp_path, {f"w.{part}": t for part, t in own.items()}, config)
    stored = checkpoint.read("w.weight", (ROWS, COLUMNS))
    assert stored.dtype == "MXFP4"
    whole = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, dim=1)
    np.testing.assert_array_equal(to_float32(stored), (values * whole).numpy())


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("nvfp4", {"weight_scale": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "w.weight_scale"),
        (
            "nvfp4",
            {"weight_scale": torch.full((ROWS, 8), torch.nan).to(torch.float8_e4m3fn)},
            "not numbers",
        ),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "must be one number above 0"),
        ("nvfp4", {"weight_global_scale": torch.ones(2)}, "must be one number above 0"),
        ("nvfp4", {"weight_packed": torch.zeros(2, 2).byte()}, "two values in a byte"),
        ("mxfp4", {"weight_scale": torch.full((ROWS, 4), 255).byte()}, "not numbers"),
        ("mxfp4", {"weight_scale": torch.ones(ROWS, 5).byte()}, "w.weight_scale"),
    ],
)
def test_tensors_that_do_not_fit_name_themselves(
    tmp_path: Path, kind: str, changes: dict[str, torch.Tensor], message: str
) -> None:
    _, own, _ = floats(0)
    if kind == "nvfp4":
        own |= {
            "weight_scale": torch.ones(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.ones(1),
        }
    config = mixed(group(f"{kind}-pack-quantized", "Linear"))
    tensors = {f"w.{part}": tensor for part, tensor in (own | changes).items()}
    checkpoint = opened(tmp_path, tensors, config)
    with pytest.raises(ModelError, match=message):
        checkpoint.read("w.weight", (ROWS, COLUMNS))


def by_the_library(kind: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix as compressed-tensors packs it, and as it unpacks that."""
    base = pytest.importorskip("compressed_tensors.compressors.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    args = quantization.QuantizationArgs(**WEIGHTS[kind])
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    parts = weight.view(len(weight), -1, args.group_size or weight.shape[1])
    tensors = {"weight": weight}
    global_scale = None
    if kind.startswith("nvfp4"):
        global_scale = helpers.generate_gparam(weight.min(), weight.max())
        tensors["weight_global_scale"] = global_scale
    scale, zero = helpers.calculate_qparams(
        parts.amin(-1), parts.amax(-1), args, global_scale=global_scale
    )
    if args.type == "int":  # as the files of bfloat16 models have them
        scale = scale.bfloat16().float()
    tensors |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = base.BaseCompressor.get_value_from_registry(kind.split()[0])
    packed = compressor.compress(tensors, scheme)
    if global_scale is None:
        return packed, compressor.decompress(packed, scheme)["weight"].float()
    # `decompress` rounds to bfloat16.
    fp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    values = fp4.unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape).float()
    stored = packed["weight_scale"].float()
    unpacked = forward.dequantize(values, stored, args=args, global_scale=global_scale)
    return packed, unpacked.float()


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHTS)
def test_matrices_that_the_library_packs_have_the_values_it_unpacks(
    tmp_path: Path, kind: str
) -> None:
    torch.set_num_threads(1)
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    packed, expected = by_the_library(kind, weight)
    tensors = {f"w.{part}": tensor.contiguous() for part, tensor in packed.items()}
    checkpoint = opened(tmp_path, tensors, mixed(group(kind, "Linear")))
    got = to_float32(checkpoint.read("w.weight", (ROWS, COLUMNS)))
    # Minima of groups that are not symmetric are rounded to float16.
    bound = 2e-3 if "uneven" in kind else 1e-6
    np.testing.assert_allclose(got, expected.numpy(), atol=bound * float(expected.abs().max()))


def logits(files: ModelFiles, device: Any, dtype: Any) -> NDArray[np.float32]:
    settings = EngineConfig(
        device=device, dtype=dtype, quantization="none", num_threads=1, max_model_len=160
    )
    backend: Any = build_backend(settings, files)
    return run_alone(backend, random_tokens(80))


@pytest.mark.slow
def test_a_model_that_the_library_packs_by_parts_gives_the_logits_of_what_it_unpacks(
    tmp_path: Path,
) -> None:
    """Attention in 4-bit integers, gates and up-projections in NVFP4, what follows in MXFP4."""
    torch.set_num_threads(1)
    kinds = {"self_attn": "pack-quantized", "gate_proj": "nvfp4-pack-quantized",
             "up_proj": "nvfp4-pack-quantized", "down_proj": "mxfp4-pack-quantized"}  # fmt: skip
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tiny_model("qwen3").tensors.items():
        packed[name] = plain[name] = tensor
        kind = next((kind for part, kind in kinds.items() if part in name), None)
        if kind is not None and name.endswith("proj.weight"):
            parts, plain[name] = by_the_library(kind, packed.pop(name))
            packed |= {name.replace("weight", part, 1): own for part, own in parts.items()}
    scheme = mixed(
        group("nvfp4-pack-quantized", r"re:.*(gate|up)_proj"),
        group("pack-quantized", "Linear"),
        group("mxfp4-pack-quantized", r"re:.*down_proj$"),
        ignore=["lm_head"],
    )
    files = []
    for folder, tensors, more in (
        (tmp_path / "packed", packed, {"quantization_config": scheme}),
        (tmp_path / "plain", plain, {}),
    ):
        folder.mkdir()
        save_file({name: t.contiguous() for name, t in tensors.items()},
                  folder / "model.safetensors")  # fmt: skip
        config = tiny_model("qwen3").config
        files.append(ModelFiles("m", folder, "safetensors", config | more, {}))
    exact, expected = (logits(of, "torch", "float32") for of in files)
    np.testing.assert_allclose(exact, expected, rtol=2e-5, atol=5e-5)
    rounded = logits(files[0], "cpu", "bfloat16")  # 4-bit kernels round what they multiply
    assert np.sqrt(np.mean((rounded - expected) ** 2) / np.var(expected)) < 3e-2
