"""The tensors of a GGUF file under Hugging Face names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from octavo_engine.errors import ModelError
from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.gguf_config import architecture_of, gguf_config
from octavo_engine.weights.gguf_names import hugging_face_name, unpermuted_rows
from octavo_engine.weights.gguf_types import READABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo_engine.weights.gguf import GGUFFile, GGUFTensor


class GGUFCheckpoint:
    """Undoes what the converter did to rows and norms; the bytes stay where they are."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._architecture = architecture_of(file)
        config = gguf_config(file)
        self._heads = {
            ".self_attn.q_proj.": config["num_attention_heads"],
            ".self_attn.k_proj.": config["num_key_value_heads"],
        }
        self._tensors: dict[str, GGUFTensor] = {}
        self._experts: dict[str, int] = {}  # the number of the one whose tensor it is
        for tensor in file.tensors.values():
            name = hugging_face_name(tensor.name, self._architecture)
            if name is None:
                continue
            if "*" not in name:
                self._tensors[name] = tensor
                continue
            for expert in range(tensor.shape[0]):
                own = name.replace("*", str(expert))
                self._tensors[own], self._experts[own] = tensor, expert

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"tensor {name} is missing from {self._file.path}")
        described = f"tensor {name} ({tensor.name}) in {self._file.path}"
        if tensor.type not in READABLE:
            raise ModelError(
                f"{described} has type {tensor.type}; readable are {', '.join(READABLE)}"
            )
        # Norms by head lie side by side, a row for each head.
        is_by_head = name.endswith(("q_norm.weight", "k_norm.weight"))
        expert = self._experts.get(name)
        own_shape = tensor.shape if expert is None else tensor.shape[1:]
        if own_shape != tuple(shape) and not (
            is_by_head and math.prod(own_shape) == math.prod(shape)
        ):
            raise ModelError(
                f"{described} has shape {list(own_shape)}; its metadata asks for {list(shape)}"
            )
        row_map = None
        heads = next((count for part, count in self._heads.items() if part in name), None)
        if self._architecture.permutes_heads and heads is not None:
            if tensor.shape[0] % (2 * heads):
                raise ModelError(f"{described}: {tensor.shape[0]} rows do not make {heads} heads")
            row_map = unpermuted_rows(tensor.shape[0], heads)
        is_norm = name.endswith("norm.weight")
        offset = self._architecture.norm_offset if is_norm else 0.0
        data = self._file.data(tensor)
        if expert is not None:
            size = len(data) // tensor.shape[0]
            data = data[expert * size : (expert + 1) * size]
        return StoredTensor(name, tensor.type, tuple(shape), data, row_map, offset)

    @property
    def total_bytes(self) -> int:
        return sum(
            tensor.end - tensor.begin
            for name, tensor in self._tensors.items()
            if not self._experts.get(name)
        )
