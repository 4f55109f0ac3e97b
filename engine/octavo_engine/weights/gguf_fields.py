"""A GGUF file's metadata under the keys of its architecture: every value is checked, every error
names its key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from octavo_engine.weights.gguf import GGUFFile

MAX_SIZE = 2**31 - 1


class GGUFFields:
    """Of a file whose architecture is known."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = str(file.metadata["general.architecture"])

    def has(self, tensor: str, *, layer: int = 0) -> bool:
        """Whether a layer has the tensor."""
        return f"blk.{layer}.{tensor}" in self.file.tensors

    def flag(self, name: str) -> bool:
        return self.file.metadata.get(f"{self.prefix}.{name}") is True

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.file.path}: {problem}")

    def count(self, name: str, *, limit: int = MAX_SIZE) -> int:
        value = self.required(name)
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(
                f"metadata {self.prefix}.{name} must be a whole number from 1 "
                f"to {limit}; got {value}"
            )
        return value

    def required(self, name: str) -> int | float:
        value: int | float | None = self.number(name)
        if value is None:
            raise self.error(f"metadata {self.prefix}.{name} is missing")
        return value

    def number(self, name: str) -> Any:
        """An int or a float; None if absent. An array whose entries agree counts as one number."""
        key = f"{self.prefix}.{name}"
        value = self.file.metadata.get(key)
        if isinstance(value, np.ndarray) and value.ndim == 1 and len(value):
            if np.any(value != value[0]):
                raise self.error(
                    f"metadata {key} differs from layer to layer, which no supported model does"
                )
            value = value[0].item()
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(f"metadata {key} is not a number: {value!r:.40}")
        return value
