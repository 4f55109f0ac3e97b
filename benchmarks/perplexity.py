"""What fewer bits cost in quality, of weights and of the KV cache: a model's perplexity on a fixed
text, form by form.

    python -m benchmarks.perplexity [--model MODEL] [--text FILE|reference] [--types | --formats]

Each form is computed from the model's own file. Of a GGUF file whose weights are 4-bit already,
`auto` and `int4` keep them and `none` is the same weights without rounding of activations; how much
was lost on the way to 4 bits shows only where the model is a bf16 checkpoint. A8: activations meet
integer weights in 8 bits instead of 16.

--types takes a GGUF file's weights for the truth and rounds all matrices but embedding and head to
each GGUF type in turn (see benchmarks/reencoding.py); they are computed in float32, so that the
type alone makes the difference. --formats does the same with the formats of safetensors.

--text reference is the language reference that every Python brings (pydoc_data): some 100,000
tokens, of which the first --tokens count, in windows of --window tokens.
"""

from __future__ import annotations

import argparse
import math
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize

from benchmarks.reencoding import FORMATS, TYPES, round_to
from octavo import LLM, SamplingParams
from octavo_engine.weights.source import locate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo_engine.config import DType, KVCacheDType, Quantization


class Form(NamedTuple):
    """In how many bits what is held."""

    name: str
    dtype: DType = "bfloat16"
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    activation_bits: int = 16


FORMS = (
    Form("float32", "float32"),
    Form("bf16"),
    Form("int8", quantization="int8"),
    Form("int4", quantization="int4"),
    Form("the file's own", "auto", "auto"),
    Form("int8, A8", quantization="int8", activation_bits=8),
    Form("int4, A8", quantization="int4", activation_bits=8),
    Form("its own, A8", "auto", "auto", activation_bits=8),
    Form("bf16, KV int8", kv_cache_dtype="int8"),
    Form("bf16, KV e4m3", kv_cache_dtype="fp8_e4m3"),
    Form("bf16, KV e5m2", kv_cache_dtype="fp8_e5m2"),
    Form("int4, KV int8", quantization="int4", kv_cache_dtype="int8"),
)
KV_BYTES = 256 << 20


class Text(NamedTuple):
    """What is read, and how much of it at a time."""

    text: str
    tokens: int
    window: int

    def windows(self, llm: LLM) -> list[list[int]]:
        ids = list(llm.get_tokenizer().encode(self.text))[: self.tokens]
        # Where a text begins with a token of its own, so does each window.
        begins = ids[:1] if ids[:1] == list(llm.get_tokenizer().encode(""))[:1] else []
        ids = ids[len(begins) :]
        size = self.window - len(begins)
        return [begins + ids[first : first + size] for first in range(0, len(ids), size)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--text", default=str(Path(__file__).with_suffix(".txt")))
    parser.add_argument("--tokens", type=int, default=1 << 15, help="of the text, at most")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read together")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--types", action="store_true", help="round the weights to GGUF's types")
    kinds.add_argument("--formats", action="store_true", help="and to formats of safetensors")
    args = parser.parse_args()
    text = Text(read(args.text), args.tokens, args.window)
    print(f"{'weights':<16}{'perplexity':>12}{'to the first':>14}{'tokens':>8}")
    first = math.nan
    if args.types or args.formats:
        measured = of_types(args.model, text, FORMATS if args.formats else TYPES)
    else:
        measured = of_forms(args.model, text)
    for name, value, count in measured:
        first = value if math.isnan(first) else first
        print(f"{name:<16}{value:>12.3f}{value / first - 1:>+14.2%}{count:>8}", flush=True)


def read(name: str) -> str:
    if name != "reference":
        return Path(name).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    print(f"text: the language reference of Python {platform.python_version()}")
    return "\n\n".join(topics[name] for name in sorted(topics))


def of_forms(model: str, text: Text) -> Iterator[tuple[str, float, int]]:
    for form in FORMS:
        yield form.name, *perplexity(model, text, form)


def of_types(model: str, text: Text, kinds: tuple[str, ...]) -> Iterator[tuple[str, float, int]]:
    source = locate(model)
    for kind in (None, *kinds):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_rounded(source, kind, path)
            yield kind or "the file's own", *perplexity(str(path), text, FORMS[0])


def write_rounded(source: Path, kind: str | None, path: Path) -> None:
    """A copy of the GGUF file whose matrices, but embedding and head, went through this type."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        if len(tensor.shape) != 2 or tensor.name.startswith(("token_embd", "output")):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        rounded = values if kind is None else round_to(kind, values)
        writer.add_tensor(tensor.name, np.ascontiguousarray(rounded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def perplexity(model: str, text: Text, form: Form) -> tuple[float, int]:
    """Of the windows' tokens but their first, each given all before it; and how many they are."""
    with LLM(
        model,
        dtype=form.dtype,
        quantization=form.quantization,
        kv_cache_dtype=form.kv_cache_dtype,
        activation_bits=form.activation_bits,
        kv_cache_memory_bytes=KV_BYTES,
    ) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        outputs = llm.generate(text.windows(llm), params, use_tqdm=False)
    places = [place for output in outputs for place in output.prompt_logprobs or ()]
    logprobs = [place.logprob for place in places if place is not None]
    return math.exp(-math.fsum(logprobs) / len(logprobs)), len(logprobs)


if __name__ == "__main__":
    main()
