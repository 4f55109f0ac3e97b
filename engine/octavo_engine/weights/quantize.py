"""Writes a checkpoint with its matrices as integers: compressed-tensors, pack-quantized.

Groups of 32 columns. int8 is symmetric: the largest value is 127. int4 has a zero point; of some
ranges drawn in from the group's ends the one with the least squared error is taken. Embedding and
head stay as they are, and so does what is no matrix of whole groups.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.weights.integer_blocks import BLOCK, pack_words
from octavo_engine.weights.safetensors import INDEX_NAME, READABLE, SafetensorsCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from octavo_engine.weights.source import ModelFiles

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
CHUNK_VALUES = 1 << 22  # quantised at a time
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


class _Out(NamedTuple):
    """A tensor to be written: known before its values are."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def quantize_folder(
    files: ModelFiles, bits: int, output: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the model of safetensors `files` with 8- or 4-bit weights into an empty folder."""
    if files.kind != "safetensors":
        raise ModelError(f"{files.path} is a GGUF file; only safetensors can be quantised")
    if files.config.get("quantization_config") is not None:
        raise ModelError(f"{files.path} is quantised already; name the original model")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(f"{output} is not an empty folder; name a new one")
    checkpoint = SafetensorsCheckpoint.open(files.path)
    output.mkdir(parents=True, exist_ok=True)
    _write_tensors(checkpoint, bits, output / "model.safetensors", progress)
    config = files.config | {"quantization_config": _config(bits)}
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in sorted(files.path.iterdir()):  # tokenizer, templates, licence
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name == INDEX_NAME
        if path.is_file() and not is_weights and path.name != "config.json":
            shutil.copyfile(path, output / path.name)


def _config(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": bits == 8, "strategy": "group"}
    weights |= {"group_size": BLOCK, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _write_tensors(
    checkpoint: SafetensorsCheckpoint,
    bits: int,
    path: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    """The header first, from shapes alone; then each tensor as it is made."""
    names = sorted(checkpoint.names())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        for part, out in _outputs(checkpoint, name, bits).items():
            end = position + out.num_bytes
            header[part] = {"dtype": out.dtype, "shape": out.shape, "data_offsets": [position, end]}
            position = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for index, name in enumerate(names):
            for data in _values(checkpoint, name, bits):
                file.write(data.tobytes())
            if progress is not None:
                progress(index + 1, len(names))


def _is_quantized(checkpoint: SafetensorsCheckpoint, name: str) -> bool:
    entry = checkpoint.entry(name)
    is_matrix = len(entry.shape) == 2 and name.endswith(".weight") and entry.dtype in READABLE
    if not is_matrix or name.endswith(_VOCABULARY):
        return False
    rows, columns = entry.shape
    return rows % 8 == 0 and rows > 0 and columns % BLOCK == 0 and columns > 0


def _outputs(checkpoint: SafetensorsCheckpoint, name: str, bits: int) -> dict[str, _Out]:
    entry = checkpoint.entry(name)
    if not _is_quantized(checkpoint, name):
        return {name: _Out(entry.dtype, entry.shape, entry.end - entry.begin)}
    rows, columns = entry.shape
    groups = columns // BLOCK
    outputs = {
        f"{name}_packed": _Out("I32", (rows, columns * bits // 32), rows * columns * bits // 8),
        f"{name}_scale": _Out("F16", (rows, groups), rows * groups * 2),
        f"{name}_shape": _Out("I64", (2,), 16),
    }
    if bits == 4:
        outputs[f"{name}_zero_point"] = _Out("I32", (rows // 8, groups), rows * groups // 2)
    return outputs


def _values(checkpoint: SafetensorsCheckpoint, name: str, bits: int) -> Iterator[NDArray[Any]]:
    """In the order of `_outputs`."""
    if not _is_quantized(checkpoint, name):
        yield checkpoint.data(name)
        return
    values = checkpoint.numbers(name, 2)
    if not np.isfinite(values).all():
        raise checkpoint.error(name, "has values that are not finite")
    step = max(1, CHUNK_VALUES // values.shape[1])
    parts = [
        quantize_groups(values[row : row + step].reshape(-1, BLOCK), bits)
        for row in range(0, len(values), step)
    ]
    q, scales, zeros = (np.concatenate(part) for part in zip(*parts, strict=True))
    rows = len(values)
    yield pack_words(q.reshape(rows, -1), bits)
    yield scales.reshape(rows, -1)
    yield np.array(values.shape, np.int64)
    if bits == 4:
        yield np.ascontiguousarray(pack_words(np.ascontiguousarray(zeros.reshape(rows, -1).T), 4).T)


def quantize_groups(
    groups: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.uint8]]:
    """Integers [n, 32], scales and zero points [n] of n groups: value = (q - zero) * scale."""
    if bits == 8:
        scales = (np.abs(groups).max(1) / 127).astype(np.float16)
        zeros = np.full(len(groups), 128, np.uint8)
        return _rounded(groups, scales, zeros, 1, 255), scales, zeros
    low = np.minimum(groups.min(1), 0)
    high = np.maximum(groups.max(1), 0)
    best_error = np.full(len(groups), np.inf, np.float32)
    best_q = np.zeros(groups.shape, np.uint8)
    best_scale = np.zeros(len(groups), np.float16)
    best_zero = np.zeros(len(groups), np.uint8)
    for shrink in SHRINKS:
        scales = ((high - low) * np.float32(shrink / 15)).astype(np.float16)
        zeros = _divided(-low * np.float32(shrink), scales).clip(0, 15).astype(np.uint8)
        q = _rounded(groups, scales, zeros, 0, 15)
        off = (q.astype(np.float32) - zeros[:, None]) * scales[:, None] - groups
        error = np.einsum("gi,gi->g", off, off)
        is_better = error < best_error
        best_error[is_better] = error[is_better]
        best_q[is_better] = q[is_better]
        best_scale[is_better] = scales[is_better]
        best_zero[is_better] = zeros[is_better]
    return best_q, best_scale, best_zero


def _rounded(
    groups: NDArray[np.float32],
    scales: NDArray[np.float16],
    zeros: NDArray[np.uint8],
    lowest: int,
    highest: int,
) -> NDArray[np.uint8]:
    steps = _divided(groups, scales[:, None])
    return (steps + zeros[:, None].astype(np.float32)).clip(lowest, highest).astype(np.uint8)


def _divided(values: NDArray[np.float32], scales: NDArray[np.float16]) -> NDArray[np.float32]:
    """To the nearest whole number; a group whose scale is zero is all zeros."""
    wide = scales.astype(np.float32)
    return np.rint(values / np.where(wide > 0, wide, np.float32(np.inf)))
