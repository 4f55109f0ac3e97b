"""Safetensors whose matrices are quantised, read through the layouts that config.json names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo_engine.weights.bitsandbytes import FOUR_BIT_PARTS, FOUR_BIT_TYPES, BitsAndBytes4
from octavo_engine.weights.by_module import ByModule, modules_of
from octavo_engine.weights.compressed_tensors import compressed_tensors_layout, read_block, refused
from octavo_engine.weights.four_bit_floats import Nvfp4
from octavo_engine.weights.hqq import HQQ_PARTS, Hqq
from octavo_engine.weights.layouts import (
    AWQ,
    GPTQ,
    AsBlocks,
    AwqGemv,
    BitsAndBytes8,
    Float8,
    TorchAo8,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TypeAlias

    from octavo_engine.weights.checkpoint import StoredTensor
    from octavo_engine.weights.layouts import Layout
    from octavo_engine.weights.safetensors import SafetensorsCheckpoint

    AnyLayout: TypeAlias = Layout | ByModule

_GPTQ_BITS = (2, 3, 4, 8)
_COMPANIONS = (
    ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_zero_point", ".weight_shape",
    ".weight_g_idx", ".input_scale", ".input_zero_point", ".weight_scale_inv",
    ".SCB", ".weight_format", ".weight_global_scale", ".input_global_scale", ".weight_scale_2",
    "._weight_scale", "._weight_zero_point", *FOUR_BIT_PARTS, *HQQ_PARTS,
)  # fmt: skip


class QuantizedCheckpoint:
    """A checkpoint's tensors under plain names, integer matrices as Q4_1 and Q8_0."""

    def __init__(self, inner: SafetensorsCheckpoint, layout: AnyLayout) -> None:
        self._inner = inner
        names = frozenset(inner.names())
        if isinstance(layout, ByModule):
            found = layout.find_all(inner)
        else:
            found = dict.fromkeys(modules_of(layout, names), layout)
        self._modules = {f"{module}.weight": (module, own) for module, own in found.items()}
        hidden = {
            module + part for module, own in found.items() for part in (*_COMPANIONS, own.suffix)
        }
        self._names = (names - hidden) | self._modules.keys()
        for kind in {id(own): own for own in found.values()}.values():
            if isinstance(kind, BitsAndBytes4):
                kind.log_size(inner, [module for module, own in found.items() if own is kind])

    def names(self) -> Iterable[str]:
        return self._names

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        place = self._modules.get(name)
        if place is None:
            return self._inner.read(name, shape)
        module, layout = place
        return layout.read(self._inner, name, module, shape)

    @property
    def total_bytes(self) -> int:
        return self._inner.total_bytes


def layouts_of(config: object) -> tuple[Layout, ...]:
    """Those that config.json's quantization_config names; ModelError if it is not read."""
    layout = layout_of(config)
    return layout.layouts if isinstance(layout, ByModule) else (layout,)


def layout_of(config: object) -> AnyLayout:
    """The layout that config.json's quantization_config describes; ModelError if it is not read."""
    if not isinstance(config, dict):
        raise refused(f"{config!r:.40}")
    method = config.get("quant_method")
    bits = config.get("bits", config.get("w_bit"))
    match method:
        case "gptq" if bits in _GPTQ_BITS:
            return AsBlocks(GPTQ(bits, 0 if config.get("checkpoint_format") == "gptq_v2" else 1))
        case "auto-round":
            return _auto_round(config)
        case "awq" if bits == 4:
            return _awq(config)
        case "bitsandbytes":
            return _bitsandbytes(config)
        case "fp8":
            return _float8(config)
        case "compressed-tensors":
            return compressed_tensors_layout(config)
        case "hqq":
            return Hqq()
        case "modelopt":
            return _modelopt(config)
        case "torchao":
            return _torchao(config)
    raise refused(f"quant_method {method!r:.40} with {bits!r:.20} bits")


def _awq(config: Mapping[str, Any]) -> Layout:
    match str(config.get("version", "gemm")).lower():
        case "gemm":
            return AsBlocks(AWQ())
        case "gemv":
            size = config.get("group_size", config.get("q_group_size", 128))
            if isinstance(size, int) and (size == -1 or size > 0):
                return AsBlocks(AwqGemv(max(size, 0)))
            raise refused(f"awq with group_size {size!r:.20}")
    raise refused(f"awq of version {config.get('version')!r:.20}; gemm and gemv are read")


def _auto_round(config: Mapping[str, Any]) -> AnyLayout:
    """AutoRound packs as GPTQ or AWQ do; modules that it left alone have plain weights."""
    bits, packing = config.get("bits"), config.get("packing_format", "auto_round:auto_gptq")
    if config.get("data_type", "int") != "int":
        raise refused(f"auto-round of data_type {config.get('data_type')!r:.20}")
    widths: tuple[int, ...] = ()
    if packing in ("auto_round:auto_awq", "auto_round:awq"):
        widths = (4,)
    elif packing in ("auto_round:auto_gptq", "auto_round:gptq"):
        widths = _GPTQ_BITS
    if bits not in widths:
        raise refused(f"auto-round of packing_format {packing!r:.40} with {bits!r:.20} bits")
    extra = config.get("extra_config")
    own = {
        str(name): module.get("bits", bits)
        for name, module in (extra.items() if isinstance(extra, dict) else ())
        if isinstance(module, dict)
    }
    if any(width not in (*widths, 16, 32) for width in own.values()):
        raise refused(f"auto-round with {bits!r:.20} bits and others in extra_config")
    layouts: dict[Any, Layout] = {
        width: AsBlocks(AWQ() if len(widths) == 1 else GPTQ(width, 1))
        for width in {bits, *own.values()}
        if width in widths
    }
    return ByModule(tuple(layouts.values()), lambda name: layouts.get(own.get(name, bits)))


def _bitsandbytes(config: Mapping[str, Any]) -> Layout:
    if config.get("load_in_8bit"):
        return AsBlocks(BitsAndBytes8(), scale=".SCB")
    kind = config.get("bnb_4bit_quant_type", "fp4")  # bitsandbytes' own default
    if config.get("load_in_4bit") and kind in FOUR_BIT_TYPES:
        return BitsAndBytes4(kind)
    raise refused(f"bitsandbytes with bnb_4bit_quant_type {kind!r:.20}")


def _float8(config: Mapping[str, Any]) -> Layout:
    block = config.get("weight_block_size")
    if block is None:
        return Float8(".weight_scale", None)
    return Float8(".weight_scale_inv", read_block(block))


def _modelopt(config: Mapping[str, Any]) -> Layout:
    """TensorRT Model Optimizer's."""
    match config.get("quant_algo"):
        case "FP8":
            return Float8(".weight_scale", None)
        case "NVFP4":
            return Nvfp4(".weight", ".weight_scale_2", divides=False)
    raise refused(f"modelopt with quant_algo {config.get('quant_algo')!r:.20}")


def _torchao(config: Mapping[str, Any]) -> Layout:
    """Weight-only ones, one for all modules. Each tensor subclass is parts under its own name."""
    kinds = config.get("quant_type")
    match kinds:
        case {"default": {"_type": "Int8WeightOnlyConfig"}, **others} if not others:
            return AsBlocks(TorchAo8(), scale="._weight_scale")
        case {"default": {"_type": "Float8WeightOnlyConfig"}, **others} if not others:
            return Float8("._weight_scale", None, suffix="._weight_qdata", input_dtype=None)
    raise refused(f"torchao with quant_type {kinds!r:.80}")
