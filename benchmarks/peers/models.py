"""SmolLM2 in the forms that peers want: the same numbers, rounded to bf16 once.

    python -m benchmarks.peers.models FOLDER

writes FOLDER/smollm2 (safetensors, config, tokenizer), FOLDER/smollm2-bf16.gguf, and a link to
the 4-bit file they come from. Needs gguf, transformers and torch, which `make test` installs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.weights.bfloat16 import to_bfloat16
from octavo_engine.weights.gguf_checkpoint import GGUFCheckpoint
from octavo_engine.weights.gguf_config import architecture_of
from octavo_engine.weights.gguf_names import hugging_face_name
from octavo_engine.weights.source import resolve_model

if TYPE_CHECKING:
    from octavo_engine.weights.gguf import GGUFFile

SOURCE = "demo://smollm2"
SAFETENSORS, BF16_GGUF, Q4_GGUF = "smollm2", "smollm2-bf16.gguf", "smollm2-q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    write_models(folder)


def write_models(folder: Path) -> None:
    """What is there already stays."""
    files = resolve_model(SOURCE)
    assert files.gguf is not None  # the demo is one
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / Q4_GGUF
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(files.path)
    if not (folder / BF16_GGUF).exists():
        write_gguf(files.path, folder / BF16_GGUF)
    checkpoint = folder / SAFETENSORS
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
        for name, shape in sorted(shapes.items()):
            out.write(to_bfloat16(to_float32(checkpoint.read(name, shape))).tobytes())
    part.replace(path)


def write_gguf(source: Path, path: Path) -> None:
    """The same file with bf16 matrices, all else as it was; by llama.cpp's own library."""
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        value = field.contents()
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            numbers = to_bfloat16(values).view(np.uint8)
            writer.add_tensor(tensor.name, numbers, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def _write_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    source = source.resolve()
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    main()
