"""The tower and the projector inside a checkpoint, under the names that their pages ask for."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.hearing_part import HearingPart

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from octavo_engine.models.vision_config import MediaConfig
    from octavo_engine.weights.checkpoint import Checkpoint, StoredTensor

_TOWER = re.compile(r"^(?:model\.)?(?:vision_tower|vision_model|visual)\.(?:vision_model\.)?(.+)$")
_RULES = (
    (re.compile(r"^embeddings\.patch_embedding\."), "vision.patches."),
    (re.compile(r"^embeddings\.position_embedding\."), "vision.positions."),
    (re.compile(r"^embeddings\.class_embedding$"), "vision.class"),
    (re.compile(r"^encoder\.layers\."), "vision.layers."),
    (re.compile(r"^pre_layrnorm\."), "vision.pre_norm."),
    (re.compile(r"^post_layernorm\."), "vision.post_norm."),
    # Of InternVL.
    (re.compile(r"^embeddings\.patch_embeddings\.projection\."), "vision.patches."),
    (re.compile(r"^embeddings\.position_embeddings$"), "vision.positions.weight"),
    (re.compile(r"^embeddings\.cls_token$"), "vision.class"),
    (re.compile(r"^encoder\.layer\.(\d+)\.layernorm_before\."), r"vision.layers.\1.layer_norm1."),
    (re.compile(r"^encoder\.layer\.(\d+)\.layernorm_after\."), r"vision.layers.\1.layer_norm2."),
    (
        re.compile(r"^encoder\.layer\.(\d+)\.attention\.projection_layer\."),
        r"vision.layers.\1.self_attn.out_proj.",
    ),
    (re.compile(r"^encoder\.layer\.(\d+)\.attention\."), r"vision.layers.\1.self_attn."),
    (re.compile(r"^encoder\.layer\."), "vision.layers."),
    (re.compile(r"^layernorm\."), "vision.post_norm."),
    # Of Pixtral.
    (re.compile(r"^patch_conv\."), "vision.patches."),
    (re.compile(r"^ln_pre\."), "vision.pre_norm."),
    (
        re.compile(r"^transformer\.layers\.(\d+)\.attention_norm\."),
        r"vision.layers.\1.layer_norm1.",
    ),
    (re.compile(r"^transformer\.layers\.(\d+)\.ffn_norm\."), r"vision.layers.\1.layer_norm2."),
    (
        re.compile(r"^transformer\.layers\.(\d+)\.attention\.o_proj\."),
        r"vision.layers.\1.self_attn.out_proj.",
    ),
    (re.compile(r"^transformer\.layers\.(\d+)\.attention\."), r"vision.layers.\1.self_attn."),
    (re.compile(r"^transformer\.layers\.(\d+)\.feed_forward\."), r"vision.layers.\1.mlp."),
    # Of Qwen2-VL.
    (re.compile(r"^patch_embed\.proj\."), "vision.patches."),
    (re.compile(r"^merger\.ln_q\."), "vision.post_norm."),
    (re.compile(r"^merger\.mlp\.0\."), "projector.linear_1."),
    (re.compile(r"^merger\.mlp\.2\."), "projector.linear_2."),
    (re.compile(r"^pos_embed\.weight$"), "vision.stretched"),
    (re.compile(r"^merger\.norm\."), "vision.post_norm."),
    (re.compile(r"^merger\.linear_fc([12])\."), r"projector.linear_\1."),
    (re.compile(r"^deepstack_merger_list\.(\d+)\.linear_fc([12])\."), r"deep.\1.linear_\2."),
    (re.compile(r"^deepstack_merger_list\.(\d+)\.norm\."), r"deep.\1.norm."),
    (re.compile(r"^blocks\.(\d+)\.mlp\.linear_fc([12])\."), r"vision.layers.\1.mlp.fc\2."),
    (re.compile(r"^blocks\.(\d+)\.norm([12])\."), r"vision.layers.\1.layer_norm\2."),
    (re.compile(r"^blocks\.(\d+)\.attn\.proj\."), r"vision.layers.\1.self_attn.out_proj."),
    (re.compile(r"^blocks\.(\d+)\.attn\.qkv\."), r"vision.layers.\1.self_attn.qkv."),
    (re.compile(r"^blocks\.(\d+)\.mlp\."), r"vision.layers.\1.mlp."),
)
_QKV = ".self_attn.qkv."  # three of ours
_PROJECTOR = re.compile(
    r"^(?:model\.)?(?:multi_modal_projector\.(linear_[12]|layer_norm)|connector\.modality_projection\.proj)"
    r"\.(weight|bias)$"
)
_GEMMA3_PROJECTOR = {
    "mm_soft_emb_norm.weight": "projector.norm.weight",
    "mm_input_projection_weight": "projector.linear_1.weight",  # [inputs, outputs]
}
_MISTRAL3_PROJECTOR = {
    "norm.weight": "vision.post_norm.weight",
    "patch_merger.merging_layer.weight": "projector.merge.weight",
}
_LAYER = re.compile(r"^vision\.layers\.(\d+)\.")
_ATTENTION = re.compile(r"^vision\.layers\.\d+\.self_attn\.(q|k|v|out)_proj\.(weight|bias)$")
# What a layer adds, and the vector by which it is multiplied, where there is one.
_SCALED = re.compile(r"^(vision\.layers\.\d+\.)(self_attn\.out_proj|mlp\.fc2)\.(?:weight|bias)$")
_SCALES = {"self_attn.out_proj": "lambda_1", "mlp.fc2": "lambda_2"}
_SCALE = re.compile(r"^vision\.layers\.\d+\.lambda_[12]$")
_CLASS, _POSITIONS, _PATCHES = "vision.class", "vision.positions.weight", "vision.patches.weight"


class VisionPart:
    """A checkpoint of which only what sees is visible, and of that only what is computed."""

    def __init__(self, checkpoint: Checkpoint, config: MediaConfig) -> None:
        self._checkpoint = checkpoint
        self._config = config.vision
        self._is_gemma3 = config.family == "gemma3"
        self._stored_names = {
            part: name
            for name in checkpoint.names()
            if (ours := _our_name(name)) is not None and self._is_computed(ours)
            for part in _parts(ours)
        }

    def names(self) -> Iterable[str]:
        return [name for name in self._stored_names if name != _CLASS and not _SCALE.match(name)]

    def read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._read(name, shape)
        met = _SCALED.match(name) if self._config.has_layer_scale else None
        if met is None:
            return stored
        scale = to_float32(self._read(f"{met[1]}{_SCALES[met[2]]}", shape[:1]))
        return _replaced(stored, name, (to_float32(stored).T * scale).T)

    def _read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored_name = self._stored_names.get(name, name)
        if name == _PATCHES:
            side = self._config.patch_size
            frames = (self._config.num_frames,) if self._config.num_frames > 1 else ()
            stored = self._checkpoint.read(stored_name, (shape[0], 3, *frames, side, side))
            return dataclasses.replace(stored, name=name, shape=shape)
        if name == "vision.stretched":
            width = self._config.hidden_size
            stored = self._checkpoint.read(stored_name, (shape[0] // width, width))
            return dataclasses.replace(stored, name=name, shape=shape)
        if name == "projector.linear_1.weight" and self._is_gemma3:
            stored = self._checkpoint.read(stored_name, shape[::-1])
            return _replaced(stored, name, to_float32(stored).T)
        if name == "projector.merge.weight":
            return self._merge(name, stored_name, shape)
        attention = _ATTENTION.match(name)
        if attention is not None and (
            self._config.head_columns != self._config.head_dim or ".qkv." in stored_name
        ):
            return self._padded(name, stored_name, shape, attention[1], attention[2])
        if name == _POSITIONS and self._config.has_class:
            return self._positions(stored_name, shape)
        return self._checkpoint.read(stored_name, shape)

    def _positions(self, stored_name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The first token's pixels are zero: what it is can as well stand in its position, less
        what a bias adds to all."""
        ones = () if stored_name.endswith(".weight") else (1,)
        stored = self._checkpoint.read(stored_name, (*ones, *shape))
        class_name = self._stored_names.get(_CLASS, _CLASS)
        own = self._checkpoint.read(class_name, (*ones, *ones, *shape[1:]))
        values = to_float32(stored).reshape(shape).copy()
        values[0] += to_float32(own).reshape(-1)
        if self._config.patch_bias:
            bias = self._stored_names.get("vision.patches.bias", "vision.patches.bias")
            values[0] -= to_float32(self._checkpoint.read(bias, shape[1:]))
        return _replaced(stored, _POSITIONS, values)

    def _merge(self, name: str, stored_name: str, shape: tuple[int, ...]) -> StoredTensor:
        """It is stored for patches whose columns lie side by side, column by column."""
        stored = self._checkpoint.read(stored_name, shape)
        by_column = to_float32(stored).reshape(shape[0], self._config.hidden_size, -1)
        return _replaced(stored, name, by_column.transpose(0, 2, 1).reshape(shape))

    def _padded(
        self, name: str, stored_name: str, shape: tuple[int, ...], role: str, kind: str
    ) -> StoredTensor:
        """With columns of zeros behind those of each head, which change no result; out of what
        holds queries, keys and values, if that is stored."""
        config = self._config
        own, heads = config.head_dim, config.num_heads
        if role == "out" and kind == "bias":
            return self._checkpoint.read(stored_name, shape)
        axis = 1 if role == "out" else 0
        inner = tuple(heads * own if i == axis else size for i, size in enumerate(shape))
        if ".qkv." in stored_name:
            stored = self._checkpoint.read(stored_name, (3 * inner[0], *inner[1:]))
            first = "qkv".index(role) * inner[0]
            values = to_float32(stored)[first : first + inner[0]]
        else:
            stored = self._checkpoint.read(stored_name, inner)
            values = to_float32(stored)
        by_head = values.reshape(*inner[:axis], heads, own, *inner[axis + 1 :])
        widths = [(0, 0)] * by_head.ndim
        widths[axis + 1] = (0, config.head_columns - own)
        return _replaced(stored, name, np.pad(by_head, widths).reshape(shape))

    @property
    def total_bytes(self) -> int:
        return self._checkpoint.total_bytes

    def _is_computed(self, name: str) -> bool:
        if name.startswith("vision.post_norm."):
            return self._config.has_post_norm
        met = _LAYER.match(name)
        return met is None or int(met[1]) < self._config.num_layers


def media_part(checkpoint: Checkpoint, config: MediaConfig) -> VisionPart | HearingPart:
    """Of a checkpoint what this model sees or hears with."""
    is_audio = config.kind == "audio"
    return HearingPart(checkpoint) if is_audio else VisionPart(checkpoint, config)


def _replaced(stored: StoredTensor, name: str, values: NDArray[np.float32]) -> StoredTensor:
    data = np.ascontiguousarray(values, np.float32)
    return dataclasses.replace(
        stored, name=name, shape=data.shape, dtype="F32", data=data.view(np.uint8).reshape(-1)
    )


def _parts(name: str) -> list[str]:
    if _QKV not in name:
        return [name]
    return [name.replace(_QKV, f".self_attn.{part}_proj.") for part in "qkv"]


def _our_name(name: str) -> str | None:
    if name in ("model.image_newline", "image_newline"):
        return "projector.newline"
    own = name.removeprefix("model.").removeprefix("multi_modal_projector.")
    for projector in (_GEMMA3_PROJECTOR, _MISTRAL3_PROJECTOR):
        if own in projector and "multi_modal_projector." in name:
            return projector[own]
    if met := _PROJECTOR.match(name):
        part = "norm" if met[1] == "layer_norm" else met[1] or "linear_1"
        return f"projector.{part}.{met[2]}"
    met = _TOWER.match(name)
    if met is None:
        return None
    for pattern, ours in _RULES:
        if pattern.match(met[1]):
            return pattern.sub(ours, met[1])
    return None
