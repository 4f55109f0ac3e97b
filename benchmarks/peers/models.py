"""Models in the forms that peers want: the same numbers, rounded to bf16 once.

    python -m benchmarks.peers.models FOLDER [--large] [--ranks]

writes FOLDER/smollm2 (safetensors, config, tokenizer), FOLDER/smollm2-bf16.gguf, and a link to
the 4-bit file they come from. `--large`: a model of 1.4 billion random weights too, with SmolLM2's
tokens, for which memory is what binds; 6.5 GB. `--ranks`: one of random weights that is as large as
SmolLM2 and has an even number of heads, as vLLM's ranks need; 0.7 GB. Needs gguf, transformers and
torch, which `make test` installs.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo.measure.shapes import SHAPES
from octavo_engine.backends.dequantize import to_float32
from octavo_engine.weights.bfloat16 import to_bfloat16
from octavo_engine.weights.gguf_checkpoint import GGUFCheckpoint
from octavo_engine.weights.gguf_config import architecture_of
from octavo_engine.weights.gguf_names import hugging_face_name
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from octavo_engine.weights.gguf import GGUFFile

SOURCE = "demo://smollm2"


class ModelForms(NamedTuple):
    """One model's names under the folder."""

    safetensors: str  # a folder
    bf16: str  # a GGUF file
    q4: str  # the same


FORMS = {
    "smollm2": ModelForms("smollm2", "smollm2-bf16.gguf", "smollm2-q4_1.gguf"),
    "large": ModelForms("large", "large-bf16.gguf", "large-q4_1.gguf"),
    "even": ModelForms("even", "even-bf16.gguf", "even-q4_1.gguf"),
}
LARGE = SHAPES["1.5b"] | {"vocab_size": 49_152}
EVEN = SHAPES["135m"] | {"hidden_size": 640, "num_attention_heads": 10, "num_key_value_heads": 2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--large", action="store_true", help="the large one as well")
    parser.add_argument("--ranks", action="store_true", help="the one for ranks as well")
    args = parser.parse_args()
    write_models(args.folder)
    if args.large:
        write_random(args.folder, "large", LARGE)
    if args.ranks:
        write_random(args.folder, "even", EVEN)


def write_models(folder: Path) -> None:
    """What is there already stays."""
    files = resolve_model(SOURCE)
    assert files.gguf is not None  # the demo is one
    folder.mkdir(parents=True, exist_ok=True)
    forms = FORMS["smollm2"]
    link = folder / forms.q4
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(files.path)
    if not (folder / forms.bf16).exists():
        write_gguf(files.path, folder / forms.bf16)
    checkpoint = folder / forms.safetensors
    if not (checkpoint / "tokenizer.json").exists():
        checkpoint.mkdir(exist_ok=True)
        config = files.config | {"torch_dtype": "bfloat16"}
        (checkpoint / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_safetensors(files.gguf, checkpoint / "model.safetensors")
        _write_tokenizer(files.path, checkpoint)  # last: it says that all is there


def write_safetensors(file: GGUFFile, path: Path) -> None:
    """A GGUF file's tensors under Hugging Face names, each as bf16."""
    checkpoint, architecture = GGUFCheckpoint(file), architecture_of(file)
    shapes = {}
    for tensor in file.tensors.values():
        name = hugging_face_name(tensor.name, architecture)
        if name is not None:
            shapes[name] = tensor.shape
    values = (to_float32(checkpoint.read(name, shapes[name])) for name in sorted(shapes))
    _write_bf16(path, shapes, values)


def _write_bf16(
    path: Path, shapes: dict[str, tuple[int, ...]], values: Iterable[NDArray[np.float32]]
) -> None:
    """`values` by the order of the names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in sorted(shapes.items()):
        end = position + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in values:
            out.write(to_bfloat16(tensor).tobytes())
    part.replace(path)


def write_gguf(source: Path, path: Path) -> None:
    """The same file with bf16 matrices, all else as it was."""
    import gguf

    reader = gguf.GGUFReader(source)
    tensors = (
        (tensor.name, np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in reader.tensors
    )
    _write_gguf(path, reader, {}, ((name, values, "BF16") for name, values in tensors))


def _write_gguf(
    path: Path,
    like: Any,
    changes: dict[str, Any],
    tensors: Iterable[tuple[str, NDArray[np.float32], str]],
) -> None:
    """By llama.cpp's own library: the metadata of the reader `like` with `changes`, and `tensors`
    by name, values and the type of matrices."""
    import gguf

    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, like.fields["general.architecture"].contents())
    for name, field in like.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        value = changes.get(name, field.contents())
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for name, values, form in tensors:
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim < 2:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType[form]
        rounded = to_bfloat16(values).view(np.uint8)
        packed = rounded if form == "BF16" else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def write_random(folder: Path, name: str, config: dict[str, Any]) -> None:
    """A model of random weights in all forms, after `write_models`. All layers have the same."""
    import gguf

    forms, small = FORMS[name], FORMS["smollm2"]
    checkpoint = folder / forms.safetensors
    if (checkpoint / "tokenizer.json").exists():
        return
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = dict(_random_weights(config))
    names = {_of_layer(name, layer): name for name in weights for layer in _layers(name, config)}
    shapes = {name: weights[kind].shape for name, kind in names.items()}
    _write_bf16(
        checkpoint / "model.safetensors", shapes, (weights[names[name]] for name in sorted(names))
    )
    reader = gguf.GGUFReader(folder / small.q4)
    for path, form, of_head in ((forms.bf16, "BF16", "BF16"), (forms.q4, "Q4_1", "Q8_0")):
        tensors = (
            (_gguf_name(name), _as_llama_cpp_has_it(kind, weights[kind], config),
             of_head if kind == "model.embed_tokens.weight" else form)
            for name, kind in names.items()
        )  # fmt: skip
        _write_gguf(folder / path, reader, _gguf_sizes(config), tensors)
    for source in (folder / small.safetensors).glob("*token*.json"):
        if source.name != "tokenizer.json":
            shutil.copy(source, checkpoint)
    shutil.copy(folder / small.safetensors / "tokenizer.json", checkpoint)  # says that all is there


_KINDS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_LAYER = "model.layers.{}."


def _random_weights(config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Of one layer, and of what is outside the layers, by Hugging Face's names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    rows = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden, "gate_proj": inner,
            "up_proj": inner, "down_proj": hidden}  # fmt: skip
    random = np.random.default_rng(0)

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return random.standard_normal((rows, cols), np.float32) * np.float32(0.02)

    yield "model.embed_tokens.weight", matrix(config["vocab_size"], hidden)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    for kind in _KINDS:
        name = kind.rpartition(".")[2]
        cols = inner if name == "down_proj" else hidden
        values = matrix(rows[name], cols) if name in rows else np.ones(hidden, np.float32)
        yield f"{_LAYER}{kind}.weight", values


def _layers(name: str, config: dict[str, Any]) -> range:
    return range(config["num_hidden_layers"] if name.startswith(_LAYER) else 1)


def _of_layer(name: str, layer: int) -> str:
    return name.format(layer)


def _gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[1] != "layers":
        return {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[1]]
    return f"blk.{parts[2]}.{_KINDS['.'.join(parts[3:-1])]}.weight"


def _as_llama_cpp_has_it(
    kind: str, values: NDArray[np.float32], config: dict[str, Any]
) -> NDArray[np.float32]:
    """Pairs of rows that are rotated together lie side by side there."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    size = heads.get(kind.split(".")[-2])
    if size is None:
        return values
    cut = values.reshape(config[size], 2, -1, values.shape[1])
    return cut.swapaxes(1, 2).reshape(values.shape)


def _gguf_sizes(config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": head_dim,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.context_length": config["max_position_embeddings"],
    }


def _write_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    source = source.resolve()
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    main()
