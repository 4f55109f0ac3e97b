"""Which modules a compressed-tensors checkpoint has quantised in which way: groups with targets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.errors import ModelError
from octavo_engine.weights.by_module import ByModule
from octavo_engine.weights.four_bit_floats import Mxfp4, Nvfp4
from octavo_engine.weights.integer_blocks import BLOCK
from octavo_engine.weights.layouts import AsBlocks, Float8, IntQuantized, PackQuantized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.weights.layouts import Layout

_PATTERN = "re:"


class _Group(NamedTuple):
    targets: tuple[str, ...]
    layout: Layout


def compressed_tensors_layout(config: Mapping[str, Any]) -> ByModule:
    """Modules on the list `ignore` have plain weights, and are read as these say."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise refused("compressed-tensors without config_groups")
    read = tuple(_group(config, group) for group in groups.values())
    return ByModule(tuple(group.layout for group in read), lambda name: _find(read, name))


def _group(config: Mapping[str, Any], group: object) -> _Group:
    if not isinstance(group, dict):
        raise refused("compressed-tensors with a group that is no object")
    targets = group.get("targets", [])
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise refused(f"compressed-tensors with targets {targets!r:.40}")
    for target in targets:
        if target.startswith(_PATTERN):
            try:
                re.compile(target.removeprefix(_PATTERN))
            except (re.error, RecursionError, OverflowError):
                raise refused(f"compressed-tensors with the target {target!r:.40}") from None
    return _Group(tuple(targets), _layout(group.get("format") or config.get("format"), group))


def _layout(kind: object, group: Mapping[str, Any]) -> Layout:
    weights = group.get("weights")
    if isinstance(weights, dict):
        match kind, weights.get("type"), weights.get("num_bits"):
            case "pack-quantized", "int", 4 | 8 as bits:
                return AsBlocks(PackQuantized(int(bits)))
            case "int-quantized", "int", 8:
                has_inputs = isinstance(group.get("input_activations"), dict)
                return AsBlocks(IntQuantized(), "int8" if has_inputs else None)
            case "float-quantized", "float", 8:
                block = weights.get("block_structure")
                return Float8(".weight_scale", None if block is None else read_block(block))
            case "nvfp4-pack-quantized", "float", 4:
                return Nvfp4(".weight_packed", ".weight_global_scale", divides=True)
            case "mxfp4-pack-quantized", "float", 4:
                return Mxfp4()
    raise refused(f"compressed-tensors of format {kind!r:.40}")


def _find(groups: tuple[_Group, ...], name: str) -> Layout | None:
    """By a target of exactly this name, then by a pattern, then by a class: what is quantised is a
    linear layer. A module that no target names is of the only group there is."""
    for group in groups:
        if name in group.targets:
            return group.layout
    for group in groups:
        patterns = [t.removeprefix(_PATTERN) for t in group.targets if t.startswith(_PATTERN)]
        if any(re.match(pattern, name) for pattern in patterns):
            return group.layout
    for group in groups:
        if "Linear" in group.targets:
            return group.layout
    return groups[0].layout if len(groups) == 1 else None


def read_block(value: object) -> tuple[int, int]:
    if isinstance(value, str):  # such as "128x128"
        value = [int(size) if size.isdigit() else size for size in value.split("x")]
    match value:
        case [int(rows), int(columns)] if rows >= 1 and columns >= BLOCK and columns % BLOCK == 0:
            return rows, columns
    raise refused(f"blocks of {value!r:.40}")


def refused(what: str) -> ModelError:
    return ModelError(
        f"config.json: quantization_config: {what} is not supported; there are: gptq with 2, 3, 4 "
        "and 8 bits, awq (gemm, gemv) with 4, auto-round packed as one of these, bitsandbytes "
        "int8, nf4 and fp4, fp8, hqq, modelopt FP8 and NVFP4, torchao Int8WeightOnlyConfig and "
        "Float8WeightOnlyConfig, compressed-tensors pack-quantized with 4 and 8, int-quantized and "
        "float-quantized with 8, nvfp4- and mxfp4-pack-quantized, mxfp4; "
        "or use the original model, or a GGUF file of it"
    )
