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

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo_engine.backends.torch.triton import (
    attention,
    cut,
    decode,
    draw,
    experts,
    gemv,
    grouped,
    heads,
    matmul,
    pages,
    routing,
    rows,
    scaled,
    splits,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FP8_TARGETS = ("sm_90",)  # elsewhere weights of FP8 are expanded
# Numbers that are multiples of 16 in any real model; the compiler gets them at the launch, too.
WHOLE_SIXTEENS = (
    "num_columns",
    "num_outputs",
    "num_inputs",
    "vocab",
    "group_size",
    "page_words",
    "first_word",
)
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
    unusual = {"HAS_WINDOW": True, "HAS_CAP": True}
    wide = {"HEAD_DIM": 256, "DIM": 256, "GROUP": 2}
    exact = {"EXACT": True}
    values = dict.fromkeys(("out", "q", "k_cache", "v_cache"), "*bf16")
    values |= dict.fromkeys(("parts", "part_maxima", "part_sums"), "*fp32")
    values |= dict.fromkeys(("k_scales", "v_scales"), "*bf16")
    values |= {"score_scale": "fp32", "soft_cap": "fp32", "window": "i32"}
    numbers = dict.fromkeys(("split_tokens", "first_tile", "part_rows"), "i32")
    for label, is_split, extra in (
        ("prompt", False, {}),
        ("prompt split", True, {}),
        ("prompt window cap", False, unusual),
        ("prompt 256", False, wide | unusual),
        ("prompt float32", False, exact),
    ):
        shape, itemsize = LLAMA | extra, 4 if "EXACT" in extra else 2
        tile = attention.choose_tile(
            group=shape["GROUP"], head_dim=shape["HEAD_DIM"], itemsize=itemsize
        )
        constants = {
            **LLAMA, "PAGE": 16, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "HAS_WINDOW": False, "HAS_CAP": False, "SPLIT": is_split, "ALWAYS_MASKED": False,
            "EXACT": False, "HAS_SCALES": False, **extra,
        }  # fmt: skip
        types = in_float32(values) if itemsize == 4 else values
        found.append(
            Case(f"attend {label}", attention.attend_kernel, types | numbers, constants,
                 tile.num_warps, {"num_stages": tile.num_stages})
        )  # fmt: skip
    for label, extra in (
        ("", {}), (" window cap", unusual), (" 256", wide | unusual), (" float32", exact),
    ):  # fmt: skip
        shape, itemsize = LLAMA | extra, 4 if "EXACT" in extra else 2
        walk = decode.choose_tile(head_dim=shape["HEAD_DIM"], itemsize=itemsize)
        constants = {
            **LLAMA, "PAGE": 16, "ROWS": 16, "MEMBERS": shape["GROUP"], "BLOCK_N": walk.block_n,
            "PARTS": decode.JOINED_VALUES // (shape["GROUP"] * shape["DIM"]),
            "HAS_WINDOW": False, "HAS_CAP": False, "EXACT": False, "HAS_SCALES": False, **extra,
        }  # fmt: skip
        types = in_float32(values) if itemsize == 4 else values
        found.append(
            Case(f"walk{label}", decode.walk_kernel, types, constants, walk.num_warps,
                 {"num_stages": walk.num_stages})
        )  # fmt: skip
    found += eight_bit_cases(values | numbers)
    found.append(
        Case("join", attention.join_kernel,
             {"out": "*bf16", "parts": "*fp32", "part_maxima": "*fp32", "part_sums": "*fp32",
              **dict.fromkeys(("num_splits", "first_tile", "part_rows"), "i32")},
             {**LLAMA, "BLOCK_M": 16}, 2)
    )  # fmt: skip
    found.append(
        Case("turn and store", heads.turn_and_store_kernel,
             {**dict.fromkeys(("q_out", "k_cache", "v_cache", "qkv"), "*bf16"),
              **dict.fromkeys(("cos_sin", "q_norm", "k_norm"), "*fp32"), "eps": "fp32"},
             {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "DIM": 128, "HALF": 64,
              "HAS_Q_NORM": True, "HAS_K_NORM": True, "HEADS": heads.HEADS_PER_PROGRAM,
              "PAGE": 16, "HAS_SCALES": False}, 4)
    )  # fmt: skip
    norm = {"out": "*bf16", "total": "*fp32", "x": "*fp32", "y": "*bf16", "weight": "*fp32",
            "num_columns": "i32", "scale": "fp32", "eps": "fp32"}  # fmt: skip
    found.append(Case("add rms norm", rows.rms_norm_kernel, norm,
                      {"HAS_ADD": True, "BLOCK": 4096}, 8))  # fmt: skip
    found.append(Case("glu", rows.glu_kernel, {"out": "*bf16", "x": "*bf16", "num_columns": "i32"},
                      {"ACTIVATION": "silu", "BLOCK": rows.GLU_COLUMNS}, 4))  # fmt: skip
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
    found += quantized_cases()
    found += [
        Case(f"experts {label}", experts.experts_kernel,
             {**dict.fromkeys(("out", "x", "weights"), "*bf16"), "num_outputs": "i32",
              "num_inputs": "i32"},
             {"PAIRS_PER_ROW": 2, "BLOCK_M": block_m, "BLOCK_N": experts.BLOCK_N,
              "BLOCK_K": experts.BLOCK_K}, 4, {"num_stages": 3})
        for label, block_m in (
            ("few rows", routing.FEW_PER_EXPERT), ("prompt", routing.MANY_PER_EXPERT)
        )
    ]  # fmt: skip
    routes = {"scores": "*bf16", "results": "*bf16", "out": "*bf16", "shares": "*fp32",
              "num_experts": "i32", "num_pairs": "i32", "num_tiles": "i32",
              "num_columns": "i32"}  # fmt: skip
    found += [
        Case(f"routing: {kernel.__name__.removesuffix('_kernel')}", kernel, routes,
             {"TOP_K": 8, "PLACES": 8, "RENORMALISE": True, "BLOCK_M": routing.MANY_PER_EXPERT,
              "BLOCK": block, "BINS": 256, "PIECE": routing.PIECE}, num_warps)
        for kernel, block, num_warps in (
            (routing.route_kernel, 128, 1), (routing.place_kernel, 0, 4),
            (routing.combine_kernel, routing.COLUMNS, 4),
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


def eight_bit_cases(types: dict[str, str]) -> list[Case]:
    """A KV cache in e4m3: written, read by prompts, and by single tokens; and blocks that move."""
    types = types | dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv")
    tile = attention.choose_tile(group=4, head_dim=128, itemsize=2, has_scales=True)
    walk = decode.choose_tile(head_dim=128, itemsize=2, has_scales=True)
    common = {**LLAMA, "PAGE": 16, "HAS_WINDOW": False, "HAS_CAP": False, "EXACT": False,
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
              **dict.fromkeys(("cos_sin", "q_norm", "k_norm"), "*fp32"), "eps": "fp32"},
             {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "DIM": 128, "HALF": 64,
              "HAS_Q_NORM": True, "HAS_K_NORM": True, "HEADS": heads.HEADS_PER_PROGRAM,
              "PAGE": 16, "HAS_SCALES": True}, 4),
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
               "num_columns")  # fmt: skip
    common = dict.fromkeys(numbers, "i32") | {"bias": "*bf16", "x_scales": "*fp32"}
    found = []
    for label, num_rows in (("few rows", 5), ("prompt", 2048)):
        halves = dict.fromkeys(("scales", "minima"), "*fp16")
        for kind, bits, has_minima, one_group in (
            ("int4 minima", 4, True, True), ("int4", 4, False, True),
            ("int4 by 32", 4, True, False), ("int8 weight", 8, False, True),
        ):  # fmt: skip
            types = common | halves | {"x": "*bf16", "packed": "*i8"}
            constants = {"BITS": bits, "HAS_MINIMA": has_minima, "ONE_GROUP": one_group,
                         "HALF": 64 if one_group else 32}  # fmt: skip
            if num_rows <= grouped.MANY_ROWS:
                found.append(product_case(f"{kind} {label}", grouped.grouped_kernel, types,
                                          constants, num_rows, sums_twice=True))  # fmt: skip
                found.append(
                    Case(f"{kind} row", gemv.grouped_gemv_kernel, types | {"out": "*bf16"},
                         constants | {"HAS_BIAS": False, "BLOCK_N": gemv.GROUPED_OUTPUTS,
                                      "TILES": gemv.GROUPED_COLUMNS // 2 // constants["HALF"]}, 4)
                )  # fmt: skip
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
            found.append(product_case(f"{kind} {label}", scaled.scaled_kernel, types, constants,
                                      num_rows, sums_twice=in_blocks))  # fmt: skip
    for kind, value in (("int8", "*i8"), ("fp8", "*fp8e4nv")):
        types = common | {"out": value, "scales": "*fp32", "x": "*bf16", "largest": "fp32"}
        constants = {"IS_INTEGER": value == "*i8", "BLOCK": 4096}
        found.append(Case(f"round {kind}", scaled.round_rows_kernel, types, constants, 8))
    for label, block_m in (
        ("few rows", routing.FEW_PER_EXPERT), ("prompt", routing.MANY_PER_EXPERT)
    ):  # fmt: skip
        types = common | {"out": "*bf16", "x": "*bf16", "packed": "*i8", "scales": "*fp16",
                          "minima": "*fp16"}  # fmt: skip
        found.append(
            Case(f"int4 experts {label}", experts.grouped_experts_kernel, types,
                 {"PAIRS_PER_ROW": 2, "BITS": 4, "HAS_MINIMA": True, "ONE_GROUP": True, "HALF": 64,
                  "BLOCK_M": block_m, "BLOCK_N": experts.BLOCK_N}, 4, {"num_stages": 3})
        )  # fmt: skip
        for kind, value in (("int8", "*i8"), ("fp8", "*fp8e4nv")):
            types = common | {"out": "*bf16", "x": value, "values": value, "scales": "*fp32"}
            constants = {"PAIRS_PER_ROW": 2, "IS_INTEGER": value == "*i8",
                         "IN_BLOCKS": value != "*i8", "BLOCK_M": block_m,
                         "BLOCK_N": experts.BLOCK_N, "BLOCK_K": scaled.BLOCK_K}  # fmt: skip
            found.append(Case(f"{kind} experts {label}", experts.scaled_experts_kernel, types,
                              constants, 4, {"num_stages": 3}))  # fmt: skip
    types = common | {"out": "*bf16", "parts": "*fp32"}
    found.append(Case("join splits", splits.join_kernel, types,
                      {"HAS_BIAS": True, "BLOCK": splits.JOIN_COLUMNS}, 4))  # fmt: skip
    return found


def product_case(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_rows: int,
    *,
    sums_twice: bool,
) -> Case:
    """A product cut as 4096 outputs of as many inputs are on an H100."""
    work = splits.cut(num_rows, 4096, 32, 132, batch_invariant=False, sums_twice=sums_twice)
    shape = {"BLOCK_M": work.block_m, "BLOCK_N": work.block_n, "HAS_BIAS": False}
    out = "*bf16" if work.num_splits == 1 else "*fp32"
    return Case(name, kernel, types | {"out": out}, constants | shape, work.num_warps,
                {"num_stages": work.num_stages})  # fmt: skip


def compile_case(case: Case, target_name: str) -> dict[str, Any]:
    """Raises what the compiler raises."""
    names = case.kernel.arg_names
    constants = {name: value for name, value in case.constants.items() if name in names}
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
        if name in FP8_TARGETS or "*fp8e4nv" not in case.types.values()
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
