"""Whisper's tensors as its page wants them: convolutions as matrices, and each bias there is or is
not as a vector.

The first convolution (3 frames, stride 1) is made for two frames at once: a row of features has
four neighbouring frames, of which the even output frame sees the first three and the odd one the
last three. The second (stride 2) is the sum of three matrices: of the odd frame before, the even
one and the odd one.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.errors import ModelError
from octavo_engine.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from octavo_engine.weights.checkpoint import Checkpoint

_ENCODER = "model.encoder."
_TAPS = 3
_SECOND = {"previous": 0, "even": 1, "odd": 2}
_MADE = re.compile(r"^model\.encoder\.(conv[12])\.(previous|even|odd)\.(weight|bias)$")
_KEY_BIAS = re.compile(r"\.k_proj\.bias$")
_NUMPY = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


class SpeechNames:
    """A checkpoint of Whisper."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        # Some files leave the prefix out.
        self._stored = {
            name if name.startswith(("model.", "proj_out.")) else f"model.{name}": name
            for name in checkpoint.names()
        }

    def names(self) -> Iterable[str]:
        for name in self._stored:
            if name == "proj_out.weight":  # the embedding again
                continue
            if name.startswith(f"{_ENCODER}conv"):
                yield from _made_of(name)
                continue
            yield name
            if name.endswith(".k_proj.weight"):
                bias = f"{name.removesuffix('.weight')}.bias"
                if bias not in self._stored:
                    yield bias

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        match = _MADE.match(name)
        if match is not None:
            return self._made(name, shape, *match.groups())
        if _KEY_BIAS.search(name) and name not in self._stored:
            return StoredTensor(name, "F32", shape, np.zeros(4 * shape[0], np.uint8))
        stored = self._checkpoint.read(self._stored.get(name, name), shape)
        return dataclasses.replace(stored, name=name)

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes

    def _made(
        self, name: str, shape: tuple[int, ...], conv: str, part: str, kind: str
    ) -> StoredTensor:
        source = self._stored.get(f"{_ENCODER}{conv}.{kind}", f"{conv}.{kind}")
        if kind == "bias":
            return dataclasses.replace(self._checkpoint.read(source, shape), name=name)
        rows, columns = shape
        inputs = columns // 4 if conv == "conv1" else columns
        stored = self._checkpoint.read(source, (rows, inputs, _TAPS))
        if stored.dtype not in _NUMPY:
            raise ModelError(f"tensor {source} is of type {stored.dtype}; a convolution is plain")
        words = np.ascontiguousarray(stored.data).view(_NUMPY[stored.dtype])
        kernel = words.reshape(rows, inputs, _TAPS)
        if conv == "conv2":
            made = kernel[:, :, _SECOND[part]]
        else:
            made = _over_four_frames(kernel, is_odd=part == "odd")
        data = np.ascontiguousarray(made).view(np.uint8).reshape(-1)
        return dataclasses.replace(stored, name=name, shape=tuple(shape), data=data)


def _made_of(name: str) -> Iterable[str]:
    """Tensors of the page that a convolution's weight or bias becomes."""
    place, _, kind = name.rpartition(".")
    parts = ["even"] if place.endswith("conv2") and kind == "bias" else ["even", "odd"]
    if place.endswith("conv2") and kind == "weight":
        parts.append("previous")
    for part in parts:
        yield f"{place}.{part}.{kind}"


def _over_four_frames(kernel: NDArray[np.generic], *, is_odd: bool) -> NDArray[np.generic]:
    """[out, 4 frames * inputs] of [out, inputs, 3 taps]; the frame that it does not see has zeros,
    which are all bits zero in every type."""
    rows, inputs, taps = kernel.shape
    wide = np.zeros((rows, taps + 1, inputs), kernel.dtype)
    first = 1 if is_odd else 0
    wide[:, first : first + taps] = kernel.transpose(0, 2, 1)
    return wide.reshape(rows, -1)
