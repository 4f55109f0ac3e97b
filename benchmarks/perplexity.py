"""What fewer bits cost in quality, of weights and of the KV cache: a model's perplexity on a fixed
text, form by form.

    python -m benchmarks.perplexity [--model MODEL] [--text FILE|reference] [--types | --formats]
                                    [--only NAME]... [--results FILE]

Each form is computed from the model's own file. Of a GGUF file whose weights are 4-bit already,
`auto` and `int4` keep them and `none` is the same weights without rounding of activations; how much
was lost on the way to 4 bits shows only where the model is a bf16 checkpoint. A8: activations meet
integer weights in 8 bits instead of 16.

--types takes a GGUF file's weights for the truth and rounds all matrices but embedding and head to
each GGUF type in turn (see benchmarks/reencoding.py); they are computed in float32, so that the
type alone makes the difference, unless --dtype names another. --formats does the same with the
formats of safetensors.

--text reference is the language reference that every Python brings (pydoc_data): some 100,000
tokens, of which the first --tokens count, in windows of --window tokens.

--only measures the rows whose names contain NAME, and the first, which the others are compared
with. With --results each window is written to FILE when it is measured, and those that FILE has of
the same model, text, tokens, window and dtype are taken from there: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize

from benchmarks.reencoding import FORMATS, TYPES, round_to
from octavo import LLM, SamplingParams
from octavo_engine.weights.source import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


class Part(NamedTuple):
    """A window that was read: one line of the results' file."""

    logprob: float  # of all its tokens but the first, together
    num_tokens: int
    is_last: bool  # of the text


Measure: TypeAlias = "Callable[[int], Iterator[Part]]"  # the windows from this one on


class Results:
    """Windows that were measured before, in a file of JSON lines; without a file none are kept."""

    def __init__(self, path: Path | None, measured_with: Sequence[object]) -> None:
        self._path = path
        self._key = hashlib.sha256(repr(tuple(measured_with)).encode()).hexdigest()[:16]
        self._parts: dict[str, list[Part]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry.pop("key") == self._key:
                    self._parts.setdefault(entry.pop("name"), []).append(Part(**entry))

    def perplexity(self, name: str, measure: Measure) -> tuple[float, int]:
        """Of all tokens but the windows' first, given those before; and how many they are."""
        parts = self._parts.setdefault(name, [])
        if not parts or not parts[-1].is_last:
            for part in measure(len(parts)):
                parts.append(part)
                self._keep(name, part)
        count = sum(part.num_tokens for part in parts)
        return math.exp(-math.fsum(part.logprob for part in parts) / count), count

    def _keep(self, name: str, part: Part) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": self._key, "name": name, **part._asdict()}) + "\n")


def main() -> None:
    args = arguments()
    text = Text(read(args.text), args.tokens, args.window)
    dtype = args.dtype or FORMS[0].dtype
    if args.types or args.formats:
        kinds = FORMATS if args.formats else TYPES
        measures = of_types(args.model, text, kinds, dtype)
    else:
        measures = of_forms(args.model, text)
    names = chosen(list(measures), args.only)
    rounded = ("formats" if args.formats else "types", dtype) if args.types or args.formats else ()
    results = Results(args.results, (args.model, *text, *rounded))
    print(f"{'weights':<16}{'perplexity':>12}{'to the first':>14}{'tokens':>8}")
    first = math.nan
    for name in names:
        value, count = results.perplexity(name, measures[name])
        first = value if math.isnan(first) else first
        print(f"{name:<16}{value:>12.3f}{value / first - 1:>+14.2%}{count:>8}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo://smollm2")
    parser.add_argument("--text", default=str(Path(__file__).with_suffix(".txt")))
    parser.add_argument("--tokens", type=int, default=1 << 15, help="of the text, at most")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read together")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="some rows")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep windows, and go on")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of --types, --formats")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--types", action="store_true", help="round the weights to GGUF's types")
    kinds.add_argument("--formats", action="store_true", help="and to formats of safetensors")
    args = parser.parse_args()
    if args.dtype and not (args.types or args.formats):
        parser.error("--dtype is of --types and --formats; other rows have their own")
    return args


def chosen(names: list[str], only: list[str]) -> list[str]:
    """The first, which the others are compared with, and those that contain one of `only`."""
    for wanted in only:
        if not any(wanted.lower() in name.lower() for name in names):
            sys.exit(f"--only: no row is called {wanted!r}; there are: {'; '.join(names)}")
    return [
        name
        for name in names
        if not only or name == names[0] or any(w.lower() in name.lower() for w in only)
    ]


def read(name: str) -> str:
    if name != "reference":
        return Path(name).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    print(f"text: the language reference of Python {platform.python_version()}")
    return "\n\n".join(topics[name] for name in sorted(topics))


def of_forms(model: str, text: Text) -> dict[str, Measure]:
    return {form.name: partial(read_windows, model, text, form) for form in FORMS}


def of_types(model: str, text: Text, kinds: tuple[str, ...], dtype: DType) -> dict[str, Measure]:
    def measure(kind: str | None, first: int) -> Iterator[Part]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_rounded(locate(model), kind, path)
            yield from read_windows(str(path), text, Form("", dtype), first)

    return {kind or "the file's own": partial(measure, kind) for kind in (None, *kinds)}


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


def read_windows(model: str, text: Text, form: Form, first: int) -> Iterator[Part]:
    with LLM(
        model,
        dtype=form.dtype,
        quantization=form.quantization,
        kv_cache_dtype=form.kv_cache_dtype,
        activation_bits=form.activation_bits,
        kv_cache_memory_bytes=KV_BYTES,
    ) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        windows = text.windows(llm)
        for number, window in enumerate(windows[first:], first + 1):
            [output] = llm.generate([window], params, use_tqdm=False)
            logprobs = [
                place.logprob for place in output.prompt_logprobs or () if place is not None
            ]
            yield Part(math.fsum(logprobs), len(logprobs), number == len(windows))


if __name__ == "__main__":
    main()
