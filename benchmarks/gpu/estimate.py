"""What each kernel of a step must take at least, by bytes and multiplications: to read with a run.

    python -m benchmarks.gpu.estimate [--bandwidth GB/S] [--peak TFLOP/S] [--sequences 64]
                                      [--context 300]
    python -m benchmarks.gpu.estimate --prompt 8192

For an 8B-shaped model in bfloat16 on an H200 (copy bandwidth in GB/s, products in TFLOP/s); an H100
has --bandwidth 3016 --peak 786. A launch costs a microsecond even in a graph.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

from benchmarks.gpu.random_model import LLAMA_8B

LAUNCH_MS = 1e-3


class KernelEstimate(NamedTuple):
    """Of all its launches in one step."""

    name: str
    launches: int
    num_bytes: float
    flops: float

    def ms(self, bytes_per_s: float, flops_per_s: float) -> float:
        return max(
            self.num_bytes / bytes_per_s * 1e3,
            self.flops / flops_per_s * 1e3,
            self.launches * LAUNCH_MS,
        )


def of_decode(shape: dict[str, Any], num_seqs: int, context: int) -> list[KernelEstimate]:
    """A token for each of so many sequences."""
    return _of_step(shape, num_seqs, num_seqs, num_seqs * context, num_seqs * context)


def of_prompt(shape: dict[str, Any], num_tokens: int) -> list[KernelEstimate]:
    """One prompt in one step."""
    return _of_step(shape, num_tokens, 1, num_tokens, num_tokens * (num_tokens + 1) / 2)


def _of_step(
    shape: dict[str, Any], tokens: int, logit_rows: int, kv_tokens: int, pairs: float
) -> list[KernelEstimate]:
    """`kv_tokens`: whose keys and values are read. `pairs`: of a query and a key."""
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    dim, inner, vocab = hidden // heads, shape["intermediate_size"], shape["vocab_size"]
    qkv = (heads + 2 * kv_heads) * dim

    def product(name: str, outputs: int, inputs: int, rows: int, launches: int) -> KernelEstimate:
        moved = 2 * (outputs * inputs + rows * (outputs + inputs))
        return KernelEstimate(
            name, launches, launches * moved, 2.0 * launches * rows * outputs * inputs
        )

    return [
        product("qkv", qkv, hidden, tokens, layers),
        product("o", hidden, heads * dim, tokens, layers),
        product("gate, up", 2 * inner, hidden, tokens, layers),
        product("down", hidden, inner, tokens, layers),
        product("head", vocab, hidden, logit_rows, 1),
        KernelEstimate(
            "attention", layers, layers * 2 * (2 * kv_tokens * kv_heads + 2 * tokens * heads) * dim,
            layers * 4 * pairs * heads * dim,
        ),
        # The sum stays float32: read, written, with what is added and the norm of it in 16 bits.
        KernelEstimate("norms", 2 * layers + 1, (2 * layers + 1) * tokens * hidden * 12, 0.0),
        KernelEstimate("rope, cache", layers, layers * tokens * qkv * 4, 0.0),
        KernelEstimate("glu", layers, layers * tokens * inner * 6, 0.0),
        KernelEstimate("draw", 7, 3 * logit_rows * vocab * 4, 0.0),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bandwidth", type=float, default=4300.0, help="GB/s")
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, help="a step of so many tokens of one prompt")
    options = parser.parse_args(arguments)
    if options.prompt:
        estimates = of_prompt(LLAMA_8B, options.prompt)
    else:
        estimates = of_decode(LLAMA_8B, options.sequences, options.context)
    total = 0.0
    for each in estimates:
        ms = each.ms(options.bandwidth * 1e9, options.peak * 1e12)
        total += ms
        print(
            f"{each.name:12} {each.launches:4} x  {each.num_bytes / 1e9:8.3f} GB"
            f"  {each.flops / 1e12:8.3f} TFLOP  {ms:8.3f} ms"
        )
    print(f"{'a step':12} {'':4}    {'':11}  {'':14}  {total:8.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
