"""Compiles every Triton kernel for GPUs that need not be there, and prints what each one takes.

    python benchmarks/gpu/compile_report.py [--json FILE] [--targets sm_90 …] [--only NAME …]

Shapes are those of an 8B model (32 query heads and 8 kv heads of 128, bf16). Spilled registers
(`stack` or `local` above 0) cost more than anything else a kernel may do wrong, and show here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo_engine.backends.torch import adapter_tiles
from octavo_engine.backends.torch.triton import (
    adapters,
    attention,
    chunked,
    chunked_delta,
    cut,
    decode,
    draw,
    experts,
    few,
    gemv,
    grouped,
    heads,
    latent,
    matmul,
    pages,
    prompts,
    routing,
    rows,
    scaled,
    scans,
    short_conv,
    splits,
    state_scans,
    texts,
)
from octavo_engine.backends.torch.triton.integers import assembly

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FP8_TARGETS = ("sm_90",)  # elsewhere weights of FP8 are expanded
COPYING_TARGETS = ("sm_90",)  # elsewhere long prompts stay in pages
# Numbers that are multiples of 16 in any real model; the compiler gets them at the launch, too.
WHOLE_SIXTEENS = (
    "num_columns", "num_outputs", "num_inputs", "vocab", "group_size", "group_step", "split_inputs",
    "arena_values", "arena_words", "width", "x_stride", "y_stride", "xbc_stride", "dt_stride",
    "b_stride", "c_stride", "qkv_stride", "gates_stride", "slot_stride", "page_words", "first_word",
)  # fmt: skip
LLAMA = {"GROUP": 4, "HEAD_DIM": 128, "DIM": 128}


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments and its launch."""

    name: str
    kernel: Any
    types: dict[str, str]  # of what is neither an int32 number nor an int32 pointer
    constants: dict[str, Any]
    num_warps: int
    options: dict[str, Any] = field(default_factory=dict)


def cases() -> list[Case]:
    """One of each kernel as the engine launches it."""
    found = []
    usual = {"HAS_WINDOW": False, "IS_CHUNKED": False, "HAS_CAP": False, "HAS_SINKS": False,
             "HAS_ALIBI": False, "EXACT": False}  # fmt: skip
    unusual = {"HAS_WINDOW": True, "HAS_CAP": True}
    gpt_oss = {"HAS_WINDOW": True, "HAS_SINKS": True, "GROUP": 8, "HEAD_DIM": 64, "DIM": 64}
    chunked, alibi = {"HAS_WINDOW": True, "IS_CHUNKED": True}, {"HAS_ALIBI": True}
    wide = {"HEAD_DIM": 256, "DIM": 256, "GROUP": 2}
    exact = {"EXACT": True}
    values = dict.fromkeys(("out", "q", "k_cache", "v_cache"), "*bf16")
    values |= dict.fromkeys(("parts", "part_maxima", "part_sums", "sinks", "alibi"), "*fp32")
    values |= dict.fromkeys(("k_scales", "v_scales"), "*bf16")
    values |= {"score_scale": "fp32", "soft_cap": "fp32", "window": "i32"}
    numbers = dict.fromkeys(("split_tokens", "first_tile", "part_rows"), "i32")
    for label, is_split, extra in (
        ("prompt", False, {}),
        ("prompt split", True, {}),
        ("prompt window cap", False, unusual),
        ("prompt 256", False, wide | unusual),
        ("prompt float32", False, exact),
        ("prompt sinks", False, gpt_oss),
        ("prompt chunks", False, chunked),
        ("prompt alibi", False, alibi),
    ):
        shape, itemsize = LLAMA | extra, 4 if "EXACT" in extra else 2
        tile = attention.choose_tile(
            group=shape["GROUP"], head_dim=shape["HEAD_DIM"], itemsize=itemsize
        )
        constants = {
            **LLAMA, **usual, "PAGE": 16, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "SPLIT": is_split, "ALWAYS_MASKED": False, "HAS_SCALES": False, **extra,
        }  # fmt: skip
        types = in_float32(values) if itemsize == 4 else values
        found.append(
            Case(f"attend {label}", attention.attend_kernel, types | numbers, constants,
                 tile.num_warps, {"num_stages": tile.num_stages})
        )  # fmt: skip
    sides = dict.fromkeys(("k_rows", "v_rows"), f"tensordesc<bf16[{prompts.BLOCK_N},128]>")
    found.append(
        Case("long prompt", prompts.prompt_kernel,
             values | sides | {"count": "i32", "seq_len": "i32"},
             {"GROUP": 4, "HEAD_DIM": 128, "BLOCK_M": prompts.BLOCK_M, "BLOCK_N": prompts.BLOCK_N,
              "NEVER": prompts.NEVER}, prompts.NUM_WARPS, {"num_stages": prompts.NUM_STAGES})
    )  # fmt: skip
    for label, extra in (
        ("", {}), (" window cap", unusual), (" 256", wide | unusual), (" float32", exact),
        (" sinks", gpt_oss), (" chunks", chunked), (" alibi", alibi),
    ):  # fmt: skip
        shape, itemsize = LLAMA | extra, 4 if "EXACT" in extra else 2
        walk = decode.choose_tile(head_dim=shape["HEAD_DIM"], itemsize=itemsize)
        constants = {
            **LLAMA, **usual, "PAGE": 16, "ROWS": 16, "MEMBERS": shape["GROUP"],
            "BLOCK_N": walk.block_n, "HAS_SCALES": False,
            "PARTS": decode.JOINED_VALUES // (shape["GROUP"] * shape["DIM"]), **extra,
        }  # fmt: skip
        types = in_float32(values) if itemsize == 4 else values
        found.append(
            Case(f"walk{label}", decode.walk_kernel, types, constants, walk.num_warps,
                 {"num_stages": walk.num_stages})
        )  # fmt: skip
    for label, width, extra in (
        (" of 5", 5, {}), (" of 5 window cap", 5, unusual), (" of 5 256", 5, wide | unusual),
        (" of 16", 16, {}), (" of 32", 32, {}), (" of 5 float32", 5, exact),
    ):  # fmt: skip
        shape, itemsize = LLAMA | extra, 4 if "EXACT" in extra else 2
        num_rows = few.rows_of(shape["GROUP"], width)
        walk = few.choose_tile(rows=num_rows, head_dim=shape["HEAD_DIM"], itemsize=itemsize)
        constants = {
            **LLAMA, "PAGE": 16, "ROWS": num_rows, "MEMBERS": shape["GROUP"], "TOKENS": width,
            "BLOCK_N": walk.block_n,
            "PARTS": max(2, decode.JOINED_VALUES // (shape["GROUP"] * shape["DIM"])),
            "HAS_WINDOW": False, "HAS_CAP": False, "EXACT": False, **extra,
        }  # fmt: skip
        types = in_float32(values) if itemsize == 4 else values
        found.append(
            Case(f"few{label}", few.few_kernel, types, constants, walk.num_warps,
                 {"num_stages": walk.num_stages})
        )  # fmt: skip
    found += eight_bit_cases(values | numbers)
    found.append(
        Case("join", attention.join_kernel,
             {"out": "*bf16", "parts": "*fp32", "part_maxima": "*fp32", "part_sums": "*fp32",
              "sinks": "*fp32", **dict.fromkeys(("num_splits", "first_tile", "part_rows"), "i32")},
             {**LLAMA, "BLOCK_M": 16, "HAS_SINKS": True}, 2)
    )  # fmt: skip
    found += [
        Case(f"turn and store{label}", heads.turn_and_store_kernel,
             {**dict.fromkeys(("q_out", "k_cache", "v_cache", "qkv"), "*bf16"),
              **dict.fromkeys(("cos_sin", "q_norm", "k_norm"), "*fp32"),
              **dict.fromkeys(("eps", "warmth", "warmth_floor"), "fp32")},
             {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "DIM": 128, "HALF": 64,
              "HAS_Q_NORM": True, "HAS_K_NORM": True, "NORMS_LAST": norms_last, "WARMS": norms_last,
              "HEADS": heads.HEADS_PER_PROGRAM, "PAGE": 16, "HAS_SCALES": False}, 4)
        for label, norms_last in (("", False), (" norms last", True))
    ]  # fmt: skip
    norm = {"out": "*bf16", "total": "*fp32", "x": "*fp32", "y": "*bf16", "weight": "*fp32",
            "num_columns": "i32", "scale": "fp32", "eps": "fp32"}  # fmt: skip
    found.append(Case("add rms norm", rows.rms_norm_kernel, norm,
                      {"HAS_ADD": True, "BLOCK": 4096}, 8))  # fmt: skip
    found += [
        Case(f"glu {activation}", rows.glu_kernel,
             {"out": "*bf16", "x": "*bf16", "num_columns": "i32"},
             {"ACTIVATION": activation, "BLOCK": rows.GLU_COLUMNS}, 4)
        for activation in ("silu", "swiglu_clamped")
    ]  # fmt: skip
    found.append(
        Case("matmul", matmul.matmul_kernel,
             {**dict.fromkeys(("out", "x", "weight", "bias"), "*bf16"),
              **dict.fromkeys(("num_rows", "num_outputs", "num_inputs"), "i32")},
             {"HAS_BIAS": True, "EXACT": False, "BLOCK_M": matmul.BLOCK_M,
              "BLOCK_N": matmul.BLOCK_N, "BLOCK_K": matmul.BLOCK_K}, 4, {"num_stages": 3})
    )  # fmt: skip
    found.append(
        Case("row", gemv.gemv_kernel,
             {**dict.fromkeys(("out", "x", "weight", "bias"), "*bf16"),
              **dict.fromkeys(("num_outputs", "num_inputs"), "i32")},
             {"HAS_BIAS": False, "IS_WHOLE": True, "BLOCK_N": gemv.BLOCK_N,
              "BLOCK_K": gemv.BLOCK_K}, gemv.BLOCK_K // 256)
    )  # fmt: skip
    found += latent_cases()
    found += text_cases()
    found += quantized_cases()
    found += adapter_cases()
    found += scan_cases()
    found += [
        Case(f"experts {label}", experts.experts_kernel,
             {**dict.fromkeys(("out", "x", "weights", "bias"), "*bf16"), "num_outputs": "i32",
              "num_inputs": "i32"},
             {"PAIRS_PER_ROW": 2, "HAS_BIAS": True, "BLOCK_M": block_m, "BLOCK_N": experts.BLOCK_N,
              "BLOCK_K": experts.BLOCK_K}, 4, {"num_stages": 3})
        for label, block_m in (
            ("few rows", routing.FEW_PER_EXPERT), ("prompt", routing.MANY_PER_EXPERT)
        )
    ]  # fmt: skip
    routes = {"scores": "*bf16", "results": "*bf16", "out": "*bf16", "x": "*bf16",
              "weights": "*fp32", "bias": "*fp32", "scale": "fp32", "num_experts": "i32",
              "num_pairs": "i32", "num_tiles": "i32", "num_columns": "i32"}  # fmt: skip
    found += [
        Case(f"routing: {kernel.__name__.removesuffix('_kernel')}", kernel, routes,
             {"TOP_K": 8, "PLACES": 8, "RENORMALISE": True, "BLOCK_M": routing.MANY_PER_EXPERT,
              "IS_SIGMOID": block == 256, "HAS_BIAS": block == 256, "GROUPS": 8, "NUM_GROUPS": 8,
              "TOP_GROUPS": 4 if block == 256 else 8, "BEST_OF_GROUP": 2, "IS_WEIGHED": False,
              "BLOCK": block, "BINS": 256, "PIECE": routing.PIECE}, num_warps)
        for kernel, block, num_warps in (
            (routing.route_kernel, 128, 1), (routing.route_kernel, 256, 1),
            (routing.place_kernel, 0, 4), (routing.combine_kernel, routing.COLUMNS, 4),
            (routing.weigh_kernel, routing.COLUMNS, 4),
        )
    ]  # fmt: skip
    floats = dict.fromkeys(
        ("logits", "maxima", "inverse_temperatures", "leasts", "top_ps"), "*fp32"
    )
    floats |= {"found": "*fp32"}
    numbers = {"vocab": "i32", "num_chunks": "i32"}
    numbers |= dict.fromkeys(("masses", "bins", "befores", "totals"), "*i64")
    constants = {"CHUNK": draw.CHUNK, "CHUNKS": 64, "BINS": cut.BINS, "OWN_BINS": 128,
                 "ROOM": cut.ROOM, "PIECE": cut.PIECE}  # fmt: skip
    found += [
        Case(f"draw: {kernel.__name__.removesuffix('_kernel')}", kernel, floats | numbers,
             constants, 8, {"enable_fp_fusion": False})
        for kernel in (
            draw.scan_kernel, cut.bins_kernel, cut.edge_kernel, cut.gather_kernel, cut.cut_kernel,
            draw.weigh_kernel, draw.pick_kernel,
        )
    ]  # fmt: skip
    return found


def latent_cases() -> list[Case]:
    """DeepSeek-V3's 128 heads, and 16 as the smaller ones have."""
    sizes = {"RANK": 512, "RANKS": 512, "ROPE": 64, "ROPES": 64, "PAGE": 16}
    values = dict.fromkeys(("out", "absorbed", "turned", "cache", "q", "kv"), "*bf16")
    values |= dict.fromkeys(("parts", "part_maxima", "part_sums", "cos_sin", "kv_norm"), "*fp32")
    values |= {"score_scale": "fp32", "eps": "fp32"}
    numbers = ("first_tile", "part_rows", "window", "split_tokens", "num_rows", "row_stride",
               "head_stride", "num_outputs", "num_inputs")  # fmt: skip
    values |= dict.fromkeys(numbers, "i32")
    found = []
    for num_heads in (128, 16):
        tile = latent.choose_tile(num_heads=num_heads, itemsize=2)
        cut = {**sizes, "GROUP": tile.group, "BLOCK_M": tile.block_m, "ROWS": tile.walk_rows,
               "BLOCK_N": tile.block_n, "EXACT": False, "HAS_WINDOW": False}  # fmt: skip
        stages = {"num_stages": tile.num_stages}
        for label, extra in (
            ("", {"SPLIT": False, "ALWAYS_MASKED": False}),
            (" split", {"SPLIT": True, "ALWAYS_MASKED": False}),
            (" invariant", {"SPLIT": True, "ALWAYS_MASKED": True}),
        ):
            found.append(Case(f"latent prompt {num_heads}{label}", latent.attend_kernel, values,
                              cut | extra, tile.num_warps, stages))  # fmt: skip
        found.append(Case(f"latent walk {num_heads}", latent.walk_kernel, values, cut,
                          tile.num_warps, stages))  # fmt: skip
    found += [
        Case("latent join", latent.join_kernel, values, sizes | {"PARTS": latent.JOINED_PARTS}, 4),
        Case("latent store", latent.store_kernel, values,
             {**sizes, "NUM_HEADS": 128, "NOPE": 128, "NEIGHBOURS": True,
              "HEADS": latent.TURNED_HEADS}, 4),
        Case("latent heads", latent.heads_kernel, values | {"x": "*bf16", "weight": "*bf16"},
             {"BLOCK_M": latent.HEAD_M, "BLOCK_N": latent.HEAD_N, "BLOCK_K": latent.HEAD_K,
              "EXACT": False}, 4, {"num_stages": 3}),
    ]  # fmt: skip
    return found


def text_cases() -> list[Case]:
    """Models that pool: a BERT, a ModernBERT of long texts, a decoder that embeds."""
    values = dict.fromkeys(("out", "q", "k", "v"), "*fp16")
    values |= {"slopes": "*fp32", "score_scale": "fp32", "soft_cap": "fp32", "window": "i32"}
    bert = {"group": 1, "head_dim": 64, "max_text_len": 512}
    found = []
    for label, shape, extra in (
        ("bert", bert, {}),
        ("minilm", bert | {"head_dim": 32}, {}),
        ("long window", bert | {"max_text_len": 8192}, {"HAS_WINDOW": True}),
        ("long", bert | {"max_text_len": 8192}, {}),
        ("decoder", {"group": 4, "head_dim": 128, "max_text_len": 8192}, {"IS_CAUSAL": True}),
        ("window cap 256", {"group": 2, "head_dim": 256, "max_text_len": 8192},
         {"IS_CAUSAL": True, "HAS_WINDOW": True, "HAS_CAP": True}),
        ("biases", {"group": 1, "head_dim": 128, "max_text_len": 2048},
         {"IS_CAUSAL": True, "HAS_ALIBI": True}),
        ("float32", bert, {"EXACT": True}),
    ):  # fmt: skip
        group, head_dim = shape["group"], shape["head_dim"]
        tile = texts.choose_tile(**shape, itemsize=4 if "EXACT" in extra else 2)
        constants = {
            "Q_STRIDE": 24 * head_dim, "KV_STRIDE": 24 * head_dim, "GROUP": group,
            "HEAD_DIM": head_dim, "DIM": head_dim, "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n, "IS_CAUSAL": False, "HAS_WINDOW": False, "HAS_CAP": False,
            "HAS_ALIBI": False, "EXACT": False, **extra,
        }  # fmt: skip
        types = {n: "*fp32" if "EXACT" in extra and k == "*fp16" else k for n, k in values.items()}
        found.append(
            Case(f"texts {label}", texts.attend_texts_kernel, types, constants, tile.num_warps,
                 {"num_stages": tile.num_stages})
        )  # fmt: skip
    norm = {"out": "*fp16", "total": "*fp32", "x": "*fp32", "y": "*fp16", "weight": "*fp32",
            "bias": "*fp32", "num_columns": "i32", "scale": "fp32", "eps": "fp32"}  # fmt: skip
    flags = dict.fromkeys(("HAS_ADD", "KEEPS_SUM", "HAS_WEIGHT", "HAS_BIAS"), True)
    found.append(
        Case("texts layer norm", texts.layer_norm_kernel, norm, flags | {"BLOCK": 1024}, 2)
    )
    found += [
        Case(f"texts pool {how}", texts.pool_kernel,
             {"out": "*fp32", "x": "*fp16", "num_columns": "i32"},
             {"HOW": how, "ROWS": texts.POOLED_ROWS, "BLOCK": texts.POOLED_COLUMNS}, 4)
        for how in ("mean", "max")
    ]  # fmt: skip
    return found


def eight_bit_cases(types: dict[str, str]) -> list[Case]:
    """A KV cache in e4m3: written, read by prompts, and by single tokens; and blocks that move."""
    types = types | dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv")
    tile = attention.choose_tile(group=4, head_dim=128, itemsize=2, has_scales=True)
    walk = decode.choose_tile(head_dim=128, itemsize=2, has_scales=True)
    common = {**LLAMA, "PAGE": 16, "HAS_WINDOW": False, "HAS_CAP": False, "EXACT": False,
              "IS_CHUNKED": False, "HAS_SINKS": False, "HAS_ALIBI": False,
              "HAS_SCALES": True}  # fmt: skip
    found = [
        Case("attend prompt fp8 kv", attention.attend_kernel, types,
             common | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SPLIT": False,
                       "ALWAYS_MASKED": False}, tile.num_warps, {"num_stages": tile.num_stages}),
        Case("walk fp8 kv", decode.walk_kernel, types,
             common | {"ROWS": 16, "MEMBERS": 4, "BLOCK_N": walk.block_n,
                       "PARTS": decode.JOINED_VALUES // (4 * 128)}, walk.num_warps,
             {"num_stages": walk.num_stages}),
        Case("turn and store fp8 kv", heads.turn_and_store_kernel,
             {**types, **dict.fromkeys(("q_out", "qkv"), "*bf16"),
              **dict.fromkeys(("cos_sin", "q_norm", "k_norm"), "*fp32"),
              **dict.fromkeys(("eps", "warmth", "warmth_floor"), "fp32")},
             {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "DIM": 128, "HALF": 64,
              "HAS_Q_NORM": True, "HAS_K_NORM": True, "HEADS": heads.HEADS_PER_PROGRAM,
              "NORMS_LAST": False, "WARMS": False, "PAGE": 16, "HAS_SCALES": True}, 4),
    ]  # fmt: skip
    return found + [
        Case(f"pages: {label}", pages.move_pages_kernel,
             dict.fromkeys(("num_blocks", "page_words", "first_word"), "i32"),
             {"ROW_WORDS": 8192, "BLOCK": pages.WORDS, "IS_SAVE": label == "save"}, 4)
        for label in ("save", "load")
    ]  # fmt: skip


def in_float32(types: dict[str, str]) -> dict[str, str]:
    return {name: "*fp32" if kind == "*bf16" else kind for name, kind in types.items()}


def quantized_cases() -> list[Case]:
    """Products with 4, 8 and again 8 bits, for few rows and for a prompt."""
    numbers = ("num_rows", "num_outputs", "num_inputs", "group_size", "tiles_per_split",
               "num_blocks", "steps_per_split", "num_splits", "block_columns",
               "num_columns", "group_step")  # fmt: skip
    common = dict.fromkeys(numbers, "i32") | {"bias": "*bf16", "x_scales": "*fp32"}
    found = []
    for label, num_rows in (("few rows", 5), ("prompt", 2048)):
        halves = dict.fromkeys(("scales", "minima"), "*fp16")
        for kind, bits, has_minima, one_group in (
            ("int4 minima", 4, True, True), ("int4", 4, False, True),
            ("int4 by 32", 4, True, False), ("int8 weight", 8, False, True),
        ):  # fmt: skip
            types = common | halves | {"x": "*bf16", "x_sums": "*fp32", "packed": "*i8"}
            constants = {"row_step": 1, "BITS": bits, "HAS_MINIMA": has_minima,
                         "ONE_GROUP": one_group, "HALF": 64 if one_group else 32,
                         "ASM": assembly(bits, torch.bfloat16, has_minima=has_minima,
                                         is_nvidia=True)}  # fmt: skip
            if num_rows <= grouped.MANY_ROWS:
                work = grouped.choose_cut(num_rows, 4096, 32, 132, is_one_group=one_group,
                                          batch_invariant=False)  # fmt: skip
                found.append(product_case(f"{kind} {label}", grouped.grouped_kernel, types,
                                          constants, work))  # fmt: skip
            else:
                found.append(
                    Case(f"{kind} expanded", grouped.expand_kernel, types | {"out": "*bf16"},
                         constants | {"TILES": grouped.EXPANDED_TILES,
                                      "ROWS": grouped.EXPANDED_ROWS}, 4)
                )  # fmt: skip
        for kind, value, in_blocks in (
            ("int8 both", "*i8", False), ("fp8 both", "*fp8e4nv", False),
            ("fp8 blocks", "*fp8e4nv", True),
        ):  # fmt: skip
            types = common | {"x": value, "values": value, "scales": "*fp32"}
            constants = {"IS_INTEGER": value == "*i8", "IN_BLOCKS": in_blocks,
                         "BLOCK_K": scaled.BLOCK_K}  # fmt: skip
            work = splits.cut(num_rows, 4096, 32, 132, batch_invariant=False, sums_twice=in_blocks)
            found.append(
                product_case(f"{kind} {label}", scaled.scaled_kernel, types, constants, work)
            )
    for kind, value in (("int8", "*i8"), ("fp8", "*fp8e4nv")):
        types = common | {"out": value, "scales": "*fp32", "x": "*bf16", "largest": "fp32"}
        constants = {"IS_INTEGER": value == "*i8", "BLOCK": 4096}
        found.append(Case(f"round {kind}", scaled.round_rows_kernel, types, constants, 8))
    for label, block_m in (
        ("few rows", routing.FEW_PER_EXPERT), ("prompt", routing.MANY_PER_EXPERT)
    ):  # fmt: skip
        types = common | {"out": "*bf16", "x": "*bf16", "x_sums": "*fp32", "packed": "*i8",
                          "scales": "*fp16", "minima": "*fp16"}  # fmt: skip
        found.append(
            Case(f"int4 experts {label}", experts.grouped_experts_kernel, types,
                 {"row_step": 1, "PAIRS_PER_ROW": 2, "HAS_BIAS": True, "BITS": 4,
                  "HAS_MINIMA": True, "ONE_GROUP": True, "HALF": 64,
                  "ASM": assembly(4, torch.bfloat16, has_minima=True, is_nvidia=True),
                  "BLOCK_M": block_m, "BLOCK_N": experts.BLOCK_N}, 4, {"num_stages": 3})
        )  # fmt: skip
        for kind, value in (("int8", "*i8"), ("fp8", "*fp8e4nv")):
            types = common | {"out": "*bf16", "x": value, "values": value, "scales": "*fp32"}
            constants = {"PAIRS_PER_ROW": 2, "HAS_BIAS": False, "IS_INTEGER": value == "*i8",
                         "IN_BLOCKS": value != "*i8", "BLOCK_M": block_m,
                         "BLOCK_N": experts.BLOCK_N, "BLOCK_K": scaled.BLOCK_K}  # fmt: skip
            found.append(Case(f"{kind} experts {label}", experts.scaled_experts_kernel, types,
                              constants, 4, {"num_stages": 3}))  # fmt: skip
    found.append(Case("sums", grouped.sums_kernel,
                      {"out": "*fp32", "x": "*bf16", "num_sums": "i32"},
                      {"SPAN": 128, "SUMS": grouped.SUMS}, 4))  # fmt: skip
    types = common | {"out": "*bf16", "parts": "*fp32"}
    found.append(Case("join splits", splits.join_kernel, types,
                      {"HAS_BIAS": True, "BLOCK": splits.JOIN_COLUMNS}, 4))  # fmt: skip
    return found


def adapter_cases() -> list[Case]:
    """Both products, of few rows (or batch-invariant) and of a prompt, ranks up to 64."""
    types = dict.fromkeys(("x", "y", "values"), "*bf16")
    types |= dict.fromkeys(("partials", "floats"), "*fp32") | {"arena_values": "i64"}
    numbers = ("arena_words", "first_part", "num_rows", "num_inputs", "num_outputs", "split_inputs")
    types |= dict.fromkeys(numbers, "i32")
    common = {"PARTS": 3, "RANKS": 64, "UNIT": adapter_tiles.UNIT,
              "ENTRY": adapter_tiles.ENTRY_WORDS, "EXACT": False, "IS_WHOLE": True,
              "IN_UNITS": True, "BLOCK_N": adapter_tiles.BLOCK_OUTPUTS}  # fmt: skip
    found = []
    for label, num_rows, num_splits in (
        ("few rows", adapter_tiles.FEW_ROWS, adapter_tiles.FEW_SPLITS),
        ("prompt", adapter_tiles.MANY_ROWS, 1),
    ):
        tile = adapters.choose_tile(num_rows, 64)
        constants = common | {"BLOCK_M": num_rows, "BLOCK_R": tile.block_r, "BLOCK_K": tile.block_k,
                              "SPLITS": num_splits}  # fmt: skip
        found += [
            Case(f"adapters: shrink {label}", adapters.shrink_kernel, types, constants,
                 tile.num_warps, {"num_stages": tile.num_stages}),
            Case(f"adapters: expand {label}", adapters.expand_kernel, types, constants, 4,
                 {"num_stages": 2}),
        ]  # fmt: skip
    return found


def scan_cases() -> list[Case]:
    """Recurrent states: Mamba 2 as in a model of 2.7B, Mamba 1 as in one of 7B, and the gated delta
    net of Qwen3-Next."""
    types = dict.fromkeys(("out", "x", "y", "xbc", "dt", "b", "c", "qkv", "gates"), "*bf16")
    types |= dict.fromkeys(("memory", "weight", "bias", "a_log", "d", "dt_bias"), "*fp32")
    types |= {"inverses": "*fp32", "num_tokens": "i32"}
    types |= dict.fromkeys(("dt_min", "dt_max", "scale", "eps"), "fp32")
    strides = ("x", "y", "xbc", "dt", "b", "c", "qkv", "gates", "slot")
    types |= dict.fromkeys((*(f"{name}_stride" for name in strides), "num_columns", "width"), "i32")
    conv = {"KERNEL": 4, "HAS_BIAS": True, "IS_SILU": True, "BLOCK": short_conv.COLUMNS}
    ssd = {"NUM_HEADS": 80, "HEAD_DIM": 64, "NUM_GROUPS": 1, "STATE": 128, "ROWS": 128}
    delta = {"NUM_HEADS": 32, "NUM_KEYS": 16, "KEY_DIM": 128, "DIM": 128, "ROWS": 128}
    by_chunk = {"BLOCK": chunked_delta.TILE.columns, "CHUNK": chunked_delta.CHUNK,
                "PRECISION": "tf32"}  # fmt: skip
    one_by_one = {"BLOCK": state_scans.COLUMNS}
    in_chunks, exact = (
        {"BLOCK": tile.columns, "CHUNK": tile.tokens, "PRECISION": precision}
        for tile, precision in ((chunked.TILE, "tf32"), (chunked.EXACT_TILE, "ieee"))
    )
    return [
        Case("scan: conv step", short_conv.conv_step_kernel, types, conv, 4),
        Case("scan: conv", short_conv.conv_kernel, types, conv, 4),
        Case("scan: conv state", short_conv.conv_state_kernel, types, conv, 4),
        Case("scan: ssd", state_scans.ssd_kernel, types, ssd | one_by_one, 4),
        Case("scan: ssd chunks", chunked.ssd_chunk_kernel, types,
             ssd | in_chunks, chunked.NUM_WARPS),
        Case("scan: ssd chunks float32", chunked.ssd_chunk_kernel, in_float32(types),
             ssd | exact, chunked.NUM_WARPS),
        Case("scan: selective", state_scans.selective_kernel, types,
             {"STATE": 16, "ROWS": 16, "BLOCK": state_scans.SELECTIVE_COLUMNS}, 4),
        Case("scan: delta", state_scans.delta_kernel, types, delta | one_by_one, 4),
        Case("scan: delta inverses", chunked_delta.invert_kernel, types, delta | by_chunk, 4),
        Case("scan: delta chunks", chunked_delta.delta_chunk_kernel, types, delta | by_chunk,
             chunked_delta.TILE.num_warps),
        Case("scan: delta chunks float32", chunked_delta.delta_chunk_kernel, in_float32(types),
             delta | by_chunk | {"BLOCK": chunked_delta.EXACT_TILE.columns, "PRECISION": "ieee"},
             chunked_delta.EXACT_TILE.num_warps),
        Case("scan: multiply", scans.multiply_kernel, types,
             {"ACTIVATION": "silu", "BLOCK": scans.COLUMNS}, 4),
        Case("scan: group norm", scans.group_norm_kernel, types,
             {"SIZE": 5120, "IS_SHARED": False, "BLOCK": 8192}, 8),
    ]  # fmt: skip


def product_case(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    work: splits.AxisCut,
) -> Case:
    shape = {"BLOCK_M": work.block_m, "BLOCK_N": work.block_n, "HAS_BIAS": False}
    out = "*bf16" if work.num_splits == 1 else "*fp32"
    return Case(name, kernel, types | {"out": out}, constants | shape, work.num_warps,
                {"num_stages": work.num_stages})  # fmt: skip


def compile_case(case: Case, target_name: str) -> dict[str, Any]:
    """Raises what the compiler raises."""
    names = case.kernel.arg_names
    constants = {name: value for name, value in case.constants.items() if name in names}
    if "ASM" in constants and TARGETS[target_name].backend != "cuda":
        constants["ASM"] = ""
    signature = {
        name: "constexpr" if name in constants else case.types.get(name, "*i32") for name in names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in WHOLE_SIXTEENS
    }
    source = ASTSource(case.kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": case.num_warps, **case.options}
    compiled = triton.compile(source, target=TARGETS[target_name], options=options)
    report: dict[str, Any] = {
        "kernel": case.name, "target": target_name, "shared": compiled.metadata.shared,
    }  # fmt: skip
    if "cubin" in compiled.asm:
        report |= _resources(compiled.asm["cubin"])
        report["wgmma"] = "wgmma" in compiled.asm["ptx"]
        report["fused"] = len(re.findall(r"\bFFMA\b", _cuobjdump(compiled.asm["cubin"], "-sass")))
    else:
        text = compiled.asm["amdgcn"]
        spills = re.search(r"vgpr_spill_count:\s*(\d+)", text)
        registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
        report["registers"] = int(registers.group(1)) if registers else None
        report["stack"] = int(spills.group(1)) if spills else None
    return report


def _resources(cubin: bytes) -> dict[str, int]:
    text = _cuobjdump(cubin, "--dump-resource-usage")
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"]),
            "local": int(found["LOCAL"])}  # fmt: skip


def _cuobjdump(cubin: bytes, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, what, file.name], capture_output=True, text=True, check=True
        ).stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--only", nargs="+", help="kernels whose name begins so")
    options = parser.parse_args(arguments)
    chosen = [
        case for case in cases() if not options.only or case.name.startswith(tuple(options.only))
    ]
    reports = [
        compile_case(case, name)
        for name in options.targets
        for case in chosen
        if (name in FP8_TARGETS or "*fp8e4nv" not in case.types.values())
        and (name in COPYING_TARGETS or not case.name.startswith("long prompt"))
    ]
    for report in reports:
        cells = [
            f"{key} {value}" for key, value in report.items() if key not in ("kernel", "target")
        ]
        print(f"{report['target']:7} {report['kernel']:18} {', '.join(cells)}")
    if options.json:
        options.json.write_text(json.dumps(reports, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
