"""`python -m octavo.measure.formats_page` in a checkout: writes the table of formats and backends
in docs/weight-formats.md, from the layouts of checkpoints and the packings of each backend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.measure.weight_formats import BITS, DEVICE_BITS
from octavo_engine.backends.native.packing import choose_packings
from octavo_engine.weights.gguf_types import READABLE
from octavo_engine.weights.quantized import layouts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path("docs/weight-formats.md")
BEGIN = "<!-- Made by `python -m octavo.measure.formats_page`. -->\n"
END = "<!-- End of what is made. -->\n"


def _compressed(kind: str, bits: int, *, is_float: bool = False) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float" if is_float else "int"}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# A quantization_config of each format of safetensors.
CONFIGS: dict[str, dict[str, Any]] = {
    **{
        f"GPTQ, {bits} bits": {"quant_method": "gptq", "bits": bits} for bits in (2, 3, 4, 8)
    },
    "AWQ `gemm`": {"quant_method": "awq", "bits": 4},
    "AWQ `gemv`": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "AutoRound, 4 bits": {"quant_method": "auto-round", "bits": 4},
    "HQQ": {"quant_method": "hqq"},
    "bitsandbytes int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bitsandbytes nf4, fp4": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"
    },
    "torchao int8": {
        "quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}
    },
    "torchao float8": {
        "quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}
    },
    "FP8": {"quant_method": "fp8"},
    "compressed-tensors pack-quantized, 4 bits": _compressed("pack-quantized", 4),
    "compressed-tensors pack-quantized, 8 bits": _compressed("pack-quantized", 8),
    "compressed-tensors int-quantized": _compressed("int-quantized", 8),
    "compressed-tensors float-quantized": _compressed("float-quantized", 8, is_float=True),
    "compressed-tensors NVFP4": _compressed("nvfp4-pack-quantized", 4, is_float=True),
    "compressed-tensors MXFP4": _compressed("mxfp4-pack-quantized", 4, is_float=True),
    "Model Optimizer FP8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "Model Optimizer NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}  # fmt: skip


def table() -> str:
    """Bits of a weight in each backend's memory, scales included."""
    head = (
        "| format | CPU (`cpu`) | reference (`torch`) | GPU (`cuda`) |\n| --- | --- | --- | --- |\n"
    )
    return head + "".join(f"| {' | '.join(row)} |\n" for row in _rows())


def written(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _rows() -> Iterator[tuple[str, ...]]:
    for name, config in CONFIGS.items():
        kinds = {kind: None for layout in layouts_of(config) for kind in layout.stored_types}
        yield _row(name, tuple(kinds))
    for kind in READABLE:
        yield _row(f"GGUF {kind}", (kind,))


def _row(name: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
    return name, _either(map(_on_cpu, kinds)), "16 or 32", _either(map(_on_gpu, kinds))


def _either(cells: Iterator[str]) -> str:
    return " or ".join(dict.fromkeys(cells))


def _on_cpu(kind: str) -> str:
    (packing,) = choose_packings([kind], [1], "bf16", "auto", is_vocabulary=False)
    return "16 or 32" if packing == "bf16" else f"{BITS[packing]:g} (`{packing}`)"


def _on_gpu(kind: str) -> str:
    if kind == "F8_E4M3":
        return "8 where the GPU has FP8, else 16"
    return f"{DEVICE_BITS[kind]:g}" if kind in DEVICE_BITS else "16 or 32"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
