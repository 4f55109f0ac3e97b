"""What fewer bits cost in quality, of weights and of the KV cache: a model's perplexity on a fixed
text, form by form.

    python -m benchmarks.perplexity [--model MODEL] [--text FILE]

Each form is computed from the model's own file. Of a GGUF file whose weights are 4-bit already,
`auto` and `int4` keep them and `none` is the same weights without rounding of activations; how much
was lost on the way to 4 bits shows only where the model is a bf16 checkpoint.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import LLM, SamplingParams

if TYPE_CHECKING:
    from octavo_engine.config import DType, KVCacheDType, Quantization

FORMS: tuple[tuple[str, DType, Quantization, KVCacheDType], ...] = (
    ("float32", "float32", "none", "auto"),
    ("bf16", "bfloat16", "none", "auto"),
    ("int8", "bfloat16", "int8", "auto"),
    ("int4", "bfloat16", "int4", "auto"),
    ("the file's own", "auto", "auto", "auto"),
    ("bf16, KV int8", "bfloat16", "none", "int8"),
    ("bf16, KV e4m3", "bfloat16", "none", "fp8_e4m3"),
    ("bf16, KV e5m2", "bfloat16", "none", "fp8_e5m2"),
    ("int4, KV int8", "bfloat16", "int4", "int8"),
)
KV_BYTES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--text", type=Path, default=Path(__file__).with_suffix(".txt"))
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    print(f"{'weights':<16}{'perplexity':>12}{'to the first':>14}{'tokens':>8}")
    first = math.nan
    for name, dtype, quantization, kv_cache_dtype in FORMS:
        value, count = perplexity(args.model, text, dtype, quantization, kv_cache_dtype)
        first = value if math.isnan(first) else first
        print(f"{name:<16}{value:>12.3f}{value / first - 1:>+14.2%}{count:>8}")


def perplexity(
    model: str, text: str, dtype: DType, quantization: Quantization, kv_cache_dtype: KVCacheDType
) -> tuple[float, int]:
    """Of the text's tokens but the first, each given all before it; and how many they are."""
    with LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=KV_BYTES,
    ) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        (output,) = llm.generate([text], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    logprobs = [place.logprob for place in output.prompt_logprobs if place is not None]
    return math.exp(-math.fsum(logprobs) / len(logprobs)), len(logprobs)


if __name__ == "__main__":
    main()
