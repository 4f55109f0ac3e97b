"""In which form an engine holds a model's weights, and in which type it multiplies them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.backends.native.packing import Packing, choose_packings

if TYPE_CHECKING:
    from octavo_engine.backends.native.graph import Dtype
    from octavo_engine.config import EngineConfig, Quantization
    from octavo_engine.weights.source import ModelFiles

BITS: dict[Packing, float] = {  # of a weight as the file has it, scales included
    "f32": 32, "bf16": 16, "q8": 8.5, "q4": 5, "q4_0": 4.5, "q5_0": 5.5, "q5_1": 6,
    "q2_k": 2.625, "q3_k": 3.4375, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625,
    "iq4_nl": 4.5, "iq4_xs": 4.25, "mxfp4": 4.25, "nvfp4": 4.5,
}  # fmt: skip
DEVICE_BITS = {"Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5}  # GGUF's types that stay so on a GPU
SCALE_BITS = 16  # of a group's scale on a GPU, and of its minimum


class Held(NamedTuple):
    """Of the layers' matrices, and of the head."""

    body_bits: float  # of a weight, scales included
    head_bits: float
    form: str  # of most weights, as people say it
    multiplied_in: str  # a type of `Limits.gemm_gflop_s`


def held_by_cpu(config: EngineConfig, files: ModelFiles) -> Held:
    """What the native engine packs them into."""
    dtype: Dtype = "f32" if config.dtype == "float32" else "bf16"
    body_types, head_types = _stored_types(config, files)
    body = _packings(body_types, dtype, config.quantization, is_vocabulary=False)
    head = _packings(head_types, dtype, config.quantization, is_vocabulary=True)
    match max(body, key=body.__getitem__):
        case "f32":
            form = "float32"
        case "bf16":
            form = "bf16"
        case packing:
            form = f"{next(filter(str.isdigit, packing))}-bit"
    multiplied_in = form if form in ("float32", "bf16") else "int8"
    return Held(_mean_bits(body), _mean_bits(head), form, multiplied_in)


def held_by_gpu(config: EngineConfig, files: ModelFiles, *, has_fp8: bool) -> Held:
    """What stays quantised on a GPU, docs/gpu.md's table in numbers; all else has 16 bits."""
    wide = Held(32, 32, "float32", "float32") if config.dtype == "float32" else _SIXTEEN
    if config.quantization == "none" or config.load_format == "dummy":
        return wide
    if files.gguf is not None:
        body, head = _gguf_types(files)
        bits = _mean_device_bits(body, wide.body_bits)
        own_head = bool(head["output.weight"])
        head_bits = (
            _mean_device_bits(head["output.weight"], wide.head_bits) if own_head else wide.head_bits
        )
        most = max(body, key=body.__getitem__)
        form = f"{most[1]}-bit" if most in DEVICE_BITS else wide.form
        return Held(bits, head_bits, form, wide.multiplied_in)
    return _of_checkpoint(files.config.get("quantization_config"), wide, has_fp8=has_fp8)


_SIXTEEN = Held(16, 16, "bf16", "bf16")


def _of_checkpoint(quantization: Any, wide: Held, *, has_fp8: bool) -> Held:
    scheme = _Scheme.read(quantization)
    rounds_inputs = wide.multiplied_in != "float32"  # float32 is chosen to avoid rounding
    if scheme is None:
        return wide
    keeps_floats = scheme.bits == 8 and has_fp8 and rounds_inputs
    if scheme.is_float and not keeps_floats:
        return wide
    if scheme.is_float:
        return Held(8, wide.head_bits, "fp8", "fp8")
    if scheme.rounds_inputs and rounds_inputs:
        return Held(8, wide.head_bits, "8-bit", "int8")
    scales = SCALE_BITS * (1 if scheme.is_symmetric else 2)
    bits = scheme.bits + (scales / scheme.group_size if scheme.group_size > 0 else 0)
    return Held(bits, wide.head_bits, f"{scheme.bits}-bit", wide.multiplied_in)


class _Scheme(NamedTuple):
    """What quantization_config says of most matrices."""

    bits: int
    group_size: int  # 0: a whole row
    is_symmetric: bool
    is_float: bool
    rounds_inputs: bool

    @property
    def stored_type(self) -> str:
        if self.is_float and self.bits == 4:
            return "NVFP4" if self.group_size == 16 else "MXFP4"
        return "F8_E4M3" if self.is_float else {8: "Q8_0", 4: "Q4_1"}[self.bits]

    @classmethod
    def read(cls, quantization: Any) -> _Scheme | None:
        """None: of no kind that a GPU keeps. What is malformed is for the engine to refuse."""
        if not isinstance(quantization, dict):
            return None
        if quantization.get("quant_method") == "fp8":
            return cls(8, 0, is_symmetric=True, is_float=True, rounds_inputs=True)
        groups = quantization.get("config_groups")
        if not isinstance(groups, dict):
            bits = quantization.get("bits", quantization.get("w_bit"))
            size = quantization.get("group_size", quantization.get("q_group_size"))
            symmetric = quantization.get("sym", not quantization.get("zero_point", False))
            return cls._of(bits, size, symmetric=symmetric, is_float=False, rounds_inputs=False)
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                return cls._of(
                    weights.get("num_bits"), weights.get("group_size"),
                    symmetric=weights.get("symmetric", True),
                    is_float=weights.get("type") == "float",
                    rounds_inputs=bool(group.get("input_activations")),
                )  # fmt: skip
        return None

    @classmethod
    def _of(
        cls, bits: Any, size: Any, *, symmetric: Any, is_float: bool, rounds_inputs: bool
    ) -> _Scheme | None:
        if bits not in (4, 8):
            return None
        group_size = size if isinstance(size, int) and size > 0 else 0
        return cls(bits, group_size, bool(symmetric), is_float, rounds_inputs)


def _packings(
    types: dict[str, int], dtype: Dtype, quantization: Quantization, *, is_vocabulary: bool
) -> dict[Packing, float]:
    """Which share of the weights is held in which form."""
    shares: dict[Packing, float] = {}
    for stored, count in types.items():
        (packing,) = choose_packings(
            [stored], [count], dtype, quantization, is_vocabulary=is_vocabulary
        )
        shares[packing] = shares.get(packing, 0.0) + count / sum(types.values())
    return shares


def _mean_bits(shares: dict[Packing, float]) -> float:
    return sum(share * BITS[packing] for packing, share in shares.items())


def _mean_device_bits(types: Counter[str], wide: float) -> float:
    bits = sum(DEVICE_BITS.get(stored, wide) * count for stored, count in types.items())
    return bits / types.total()


def _stored_types(config: EngineConfig, files: ModelFiles) -> tuple[dict[str, int], dict[str, int]]:
    """Of the layers' matrices, and of the head, with how many weights are of each."""
    if config.load_format == "dummy":
        return {"BF16": 1}, {"BF16": 1}
    if files.gguf is not None:
        body, heads = _gguf_types(files)
        return body, heads["token_embd.weight"] | heads["output.weight"]
    scheme = _Scheme.read(files.config.get("quantization_config"))
    if scheme is None:
        return {"BF16": 1}, {"BF16": 1}
    return {scheme.stored_type: 1}, {"BF16": 1}


def _gguf_types(files: ModelFiles) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """The layers' types, and those of the two tensors that may be the head."""
    assert files.gguf is not None
    body, heads = Counter[str](), {"token_embd.weight": Counter[str](), "output.weight": Counter()}
    for tensor in files.gguf.tensors.values():
        if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
            body[tensor.type] += math.prod(tensor.shape)
        elif tensor.name in heads:
            heads[tensor.name][tensor.type] = math.prod(tensor.shape)
    return body, heads
