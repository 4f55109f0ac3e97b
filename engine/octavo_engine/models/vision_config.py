"""The part of a model that sees or hears, read from config.json: its tower, its projector, its
token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from octavo_engine.models.config import (
    ACTIVATIONS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    deep_layers,
)
from octavo_engine.models.families import FAMILIES
from octavo_engine.models.fields import ConfigFields
from octavo_engine.models.speech_config import FRAMES_PER_ROW, MAX_MELS, MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from octavo_engine.ops import Activation
    from octavo_engine.state.media import MediaItem

ImageFamily = Literal[
    "llava", "llava_next", "llava_onevision", "idefics3", "gemma3", "qwen2_vl", "internvl",
    "pixtral", "qwen2_audio",
]  # fmt: skip
MediaKind = Literal["image", "audio"]
TowerActivation: TypeAlias = "Activation | Literal['quick_gelu']"

HEAD_MULTIPLE = 16  # columns of a panel of weights, of which a head is made up
MAX_PATCHES = 5120  # of a picture whose size a tower leaves as it is: a million pixels of Qwen2-VL
MAX_IMAGE_SIZE = 4096  # pixels of a side that a tower reads at once
MOST_MORE = 1.1  # of a side, with which rows of several tiles are left as they are
MAX_TILES = 40  # into which a picture may be cut
ROWS_A_SOUND_TOKEN = 2  # of an encoder of sound, whose mean becomes one row
# Model classes that see, and the language models that may be inside them.
_FAMILIES: Mapping[str, ImageFamily] = MappingProxyType(
    {
        "LlavaForConditionalGeneration": "llava",
        "LlavaNextForConditionalGeneration": "llava_next",
        "LlavaOnevisionForConditionalGeneration": "llava_onevision",
        "Idefics3ForConditionalGeneration": "idefics3",
        "SmolVLMForConditionalGeneration": "idefics3",
        "Gemma3ForConditionalGeneration": "gemma3",
        "Mistral3ForConditionalGeneration": "pixtral",
        "InternVLForConditionalGeneration": "internvl",
        "Qwen2VLForConditionalGeneration": "qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
        "Qwen3VLForConditionalGeneration": "qwen2_vl",
        "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    }
)
_CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_ONEVISION = {
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "image_token_index": 151_646,
}
_INTERNVL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_QWEN2_VL = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_AUDIO = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "scale_embedding": False,
    "activation_function": "gelu",
}
_QWEN2_5_VL = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}

_NEXT_GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))  # rows and columns
_ONEVISION_GRIDS = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))

_QWEN3_VL = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision transformer: patches of a square picture, each a token, all seen by all."""

    hidden_size: int
    intermediate_size: int
    num_layers: int  # that are computed; a checkpoint may have more
    num_heads: int
    image_size: int  # pixels of a side; 0: any whole patches, up to MAX_PATCHES
    patch_size: int
    activation: TowerActivation
    norm_eps: float
    has_class: bool  # a token of its own stands before the patches
    has_pre_norm: bool
    has_post_norm: bool
    patch_bias: bool
    qkv_bias: bool = True
    has_qk_norms: bool = False  # RMS norms of all heads' queries, and of their keys, together
    has_layer_scale: bool = False  # what a layer adds is multiplied by a vector, column by column
    linear_bias: bool = True  # of what is behind attention, and of the MLP
    rope_theta: float | None = None  # patches know by a rope where they are, not by a table
    # Lines and columns turn by every other frequency of one list; else both by a list of half.
    rope_alternates: bool = False
    # Or by both: a square of so many on a side, which is stretched over the picture.
    positions_side: int = 0
    deep_layers: tuple[int, ...] = ()  # whose outputs the language model reads besides
    num_frames: int = 1  # of a film that a patch covers; a picture stands still in them
    has_rms_norms: bool = False
    post_norm_eps: float | None = None  # where it is another one
    is_gated: bool = False  # an MLP's activation multiplies the other half of what goes in
    # Of a tower that hears: bands of a spectrogram, of which a token has some frames in place of a
    # patch, and the most tokens. 0: it sees.
    num_mels: int = 0
    most_rows: int = MAX_PATCHES
    # Patches see windows of so many on a side, all but in these layers. 0: they see all.
    window: int = 0
    whole_layers: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def head_columns(self) -> int:
        """As it is computed: with columns of zeros, up to whole panels."""
        return -(-self.head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE

    @property
    def side(self) -> int:
        """Patches in a row."""
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        """At most."""
        return self.side**2 + self.has_class if self.image_size else self.most_rows

    def operations(self, num_tokens: int) -> float:
        """Multiplications that so many tokens take, about."""
        wide = (3 if self.is_gated else 2) * self.intermediate_size
        linear = self.hidden_size * (4 * self.hidden_size + wide)
        num_whole = len(self.whole_layers) if self.window else self.num_layers
        seen = num_whole * num_tokens
        seen += (self.num_layers - num_whole) * min(num_tokens, self.window**2)
        return float(num_tokens) * (self.num_layers * linear + 2 * self.hidden_size * seen)

    @property
    def patch_columns(self) -> int:
        if self.num_mels:
            return FRAMES_PER_ROW * self.num_mels
        return 3 * self.num_frames * self.patch_size**2

    @property
    def input_columns(self) -> int:
        """A patch, and what its place is."""
        return self.patch_columns + (self.hidden_size if self.positions_side else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """How pictures become rows of the language model's input."""

    family: ImageFamily
    vision: VisionConfig
    token_id: int  # of each row
    text_size: int  # columns of the language model
    projector_activation: Activation = "gelu"
    projector_bias: bool = False
    shuffle: int = 1  # patches of a square of that side become one row
    pool: int = 1  # the mean of a square of that side becomes one row
    keeps_class: bool = False
    merges: bool = False  # what becomes one row goes through a matrix of its own before
    ends_lines: bool = False  # a token of the text stands behind each line of rows
    projector_norm: Literal["none", "rms", "layer"] = "none"  # before it
    projector_norm_eps: float = 1e-6
    # Tokens before and behind a tile's rows; the first is what a rendered prompt has of a picture.
    # None: there it has `token_id`.
    edges: tuple[int, int] | None = None
    is_two_way: bool = False  # rows of a tile see each other, the later ones too
    has_axes: bool = False  # the language model's rope turns by lines and columns of rows
    # Rows and columns of tiles of which one picture may be made, in the order of preference where
    # several suit it as well. Empty: each tile has a place of its own in the prompt.
    grids: tuple[tuple[int, int], ...] = ()
    # Rows of so many tiles, and a tenth more on a side: what tiles of a grid make together is
    # shrunk to that if there are more. 0: never.
    most_tiles: int = 0

    @property
    def kind(self) -> MediaKind:
        """What it takes."""
        return "audio" if self.vision.num_mels else "image"

    @property
    def noun(self) -> str:
        """What it takes, in messages."""
        return "sounds" if self.kind == "audio" else "pictures"

    @property
    def row_columns(self) -> int:
        """What the embedding takes, and then what layers add."""
        return self.text_size * (1 + len(self.vision.deep_layers))

    @property
    def num_tiles(self) -> int:
        """That are encoded as one, at most."""
        return 1 + max((rows * columns for rows, columns in self.grids), default=0)

    @property
    def num_rows(self) -> int:
        """Of what is encoded as one, at most."""
        side = self.vision.side if self.grids else 0
        most = math.ceil(MOST_MORE**2 * self.most_tiles * side**2) or MAX_TILES * side**2
        more = (
            min(rows * side * columns * side, most) + rows * side for rows, columns in self.grids
        )
        return self.tile_rows + max(more, default=0)

    @property
    def tile_rows(self) -> int:
        """Of one tile; of the largest, where they have sizes of their own."""
        if self.kind == "audio":
            return self.vision.num_tokens // ROWS_A_SOUND_TOKEN
        if not self.vision.image_size:
            return self.vision.num_tokens // self.shuffle**2
        return (self.vision.side // (self.shuffle * self.pool)) ** 2 + self.keeps_class

    def lines_of(self, item: MediaItem) -> tuple[int, int] | None:
        """Lines of a tile's rows, and rows in each, where tiles have sizes of their own."""
        if self.vision.image_size or self.kind == "audio":
            return None
        pixels = self.vision.patch_size * self.shuffle
        return item.height // pixels, item.width // pixels

    def rows_of(self, item: MediaItem) -> int:
        """As many as the encoder makes of it."""
        if self.kind == "audio":
            return item.height // ROWS_A_SOUND_TOKEN
        if item.tiles is not None:
            return self.tile_rows + item.tiles.num_kept
        lines = self.lines_of(item)
        return self.tile_rows if lines is None else lines[0] * lines[1]

    @property
    def projector_columns(self) -> int:
        return self.vision.hidden_size * self.shuffle**2


def read_media_config(config: Mapping[str, Any]) -> MediaConfig | None:
    """Of a config.json's object; None where the model does not see. Raises ModelError."""
    fields = ConfigFields(config)
    names = fields.raw("architectures")
    family = _FAMILIES.get(names[0]) if isinstance(names, list) and names else None
    if family is None:
        return None
    if family == "llava_onevision":
        fields = ConfigFields(config, defaults=_ONEVISION)
    if family == "qwen2_vl":
        if names == ["Qwen3VLForConditionalGeneration"]:
            return _read_qwen3_vl(fields)
        return _read_qwen2_vl(fields, is_windowed=names == ["Qwen2_5_VLForConditionalGeneration"])
    part = "audio_config" if family == "qwen2_audio" else "vision_config"
    vision, text = fields.raw(part), fields.raw("text_config")
    if vision is None and family == "gemma3":
        return None  # files of its text part alone
    if not isinstance(vision, dict):
        raise fields.error(part, "must be an object")
    text_fields = ConfigFields(
        text if isinstance(text, dict) else {},
        defaults={"hidden_size": 2304 if family == "gemma3" else 4096, "rms_norm_eps": 1e-6},
        path="config.json: text_config",
    )
    text_size = text_fields.integer("hidden_size", maximum=MAX_WIDTH)
    if family == "pixtral":
        return _read_mistral3(fields, vision, text_fields)
    if family == "gemma3":
        media = _read_gemma3(fields, vision, text_size)
        window = text_fields.raw("sliding_window")
        if isinstance(window, int) and window < media.num_rows:
            raise text_fields.error("sliding_window", f"must be at least {media.num_rows}")
        return media
    read = {
        "llava": _read_llava, "llava_next": _read_llava_next, "idefics3": _read_idefics3,
        "llava_onevision": _read_llava_onevision, "internvl": _read_internvl,
        "qwen2_audio": _read_qwen2_audio,
    }[family]  # fmt: skip
    return read(fields, vision, text_size)


def _read_llava(fields: ConfigFields, vision: dict[str, Any], text_size: int) -> MediaConfig:
    layer = fields.raw("vision_feature_layer")
    layer = -2 if layer is None else layer
    if not isinstance(layer, int) or not -MAX_LAYERS <= layer < 0:
        raise fields.error("vision_feature_layer", "must be one negative number")
    strategy = fields.optional_text("vision_feature_select_strategy") or "default"
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", "must be default or full")
    token = "image_token_index" if fields.raw("image_token_id") is None else "image_token_id"
    kind = vision.get("model_type")
    if kind == "pixtral":
        return _read_pixtral(fields, vision, text_size)
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise fields.error(
            "vision_config", "model_type must be clip_vision_model, siglip_vision_model or pixtral"
        )
    is_clip = kind == "clip_vision_model"
    if strategy == "default" and not is_clip:
        raise fields.error("vision_feature_select_strategy", "must be full for a SigLIP tower")
    tower = _read_tower(vision, is_clip=is_clip, layers_less=-1 - layer, has_post_norm=False)
    return MediaConfig(
        family="llava",
        vision=tower,
        token_id=fields.integer(token, minimum=0, maximum=MAX_VOCABULARY),
        text_size=text_size,
        projector_activation=_projector_activation(fields),
        projector_bias=fields.raw("multimodal_projector_bias") is not False,
        keeps_class=is_clip and strategy == "full",
    )


def _read_pixtral(fields: ConfigFields, vision: dict[str, Any], text_size: int) -> MediaConfig:
    if fields.raw("vision_feature_select_strategy") not in (None, "full"):
        raise fields.error("vision_feature_select_strategy", "must be full for a Pixtral tower")
    return MediaConfig(
        family="pixtral",
        vision=_read_pixtral_tower(fields, ConfigFields(
            vision, defaults=_PIXTRAL, path="config.json: vision_config"
        )),
        token_id=_image_token(fields, 10),
        text_size=text_size,
        projector_activation=_projector_activation(fields),
        projector_bias=fields.raw("multimodal_projector_bias") is not False,
        ends_lines=True,
    )  # fmt: skip


def _read_mistral3(fields: ConfigFields, vision: dict[str, Any], text: ConfigFields) -> MediaConfig:
    """The norm before its projector is of patches, as if it were the tower's last."""
    tower = _read_pixtral_tower(
        fields, ConfigFields(vision, defaults=_PIXTRAL, path="config.json: vision_config")
    )
    return MediaConfig(
        family="pixtral",
        vision=replace(tower, has_post_norm=True, post_norm_eps=text.positive("rms_norm_eps")),
        token_id=_image_token(fields, 10),
        text_size=text.integer("hidden_size", maximum=MAX_WIDTH),
        projector_activation=_projector_activation(fields),
        projector_bias=fields.boolean("multimodal_projector_bias"),
        shuffle=fields.optional_integer("spatial_merge_size", maximum=16) or 2,
        merges=True,
        ends_lines=True,
    )


def _read_pixtral_tower(fields: ConfigFields, own: ConfigFields) -> VisionConfig:
    """`own`: of the tower, `fields`: of the model."""
    if own.raw("model_type") not in (None, "pixtral"):
        raise own.error("model_type", "must be pixtral")
    layer = fields.raw("vision_feature_layer")
    if layer not in (None, -1):
        raise fields.error("vision_feature_layer", "must be -1 for a Pixtral tower")
    size = own.integer("hidden_size", maximum=MAX_WIDTH)
    heads = own.integer("num_attention_heads", maximum=MAX_HEADS)
    if size % (4 * heads):
        raise own.error("hidden_size", f"must be a multiple of 4 x {heads} heads")
    activation = own.text("hidden_act")
    if activation not in ACTIVATIONS:
        raise own.error("hidden_act", f"must be one of {', '.join(ACTIVATIONS)}")
    rope = own.section("rope_parameters") or own
    return VisionConfig(
        hidden_size=size,
        intermediate_size=own.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=own.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=heads,
        image_size=0,
        patch_size=own.integer("patch_size", maximum=MAX_IMAGE_SIZE),
        activation=ACTIVATIONS[activation],
        norm_eps=1e-5,
        has_class=False,
        has_pre_norm=True,
        has_post_norm=False,
        patch_bias=False,
        qkv_bias=False,
        linear_bias=False,
        rope_theta=rope.optional_positive("rope_theta") or 10_000.0,
        rope_alternates=True,
        has_rms_norms=True,
        is_gated=True,
    )


def _image_token(fields: ConfigFields, default: int) -> int:
    for name in ("image_token_id", "image_token_index"):
        if fields.raw(name) is not None:
            return fields.integer(name, minimum=0, maximum=MAX_VOCABULARY)
    return default


def _projector_activation(fields: ConfigFields) -> Activation:
    activation = fields.optional_text("projector_hidden_act") or "gelu"
    if activation not in ACTIVATIONS:
        raise fields.error("projector_hidden_act", f"must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _read_llava_next(fields: ConfigFields, vision: dict[str, Any], text_size: int) -> MediaConfig:
    media = _read_llava(fields, vision, text_size)
    if media.keeps_class:
        raise fields.error("vision_feature_select_strategy", "must be default")
    grids = _read_grids(fields, media.vision.image_size, _NEXT_GRIDS)
    return replace(media, family="llava_next", grids=grids)


def _read_llava_onevision(
    fields: ConfigFields, vision: dict[str, Any], text_size: int
) -> MediaConfig:
    media = _read_llava(fields, vision, text_size)
    if media.vision.has_class:
        raise fields.error("vision_config", "model_type must be siglip_vision_model")
    ratio = fields.optional_text("vision_aspect_ratio") or "anyres_max_9"
    most = ratio.removeprefix("anyres_max_")
    if most == ratio or not most.isdecimal() or not 1 <= int(most) <= MAX_TILES:
        raise fields.error("vision_aspect_ratio", f"must be anyres_max_1 to anyres_max_{MAX_TILES}")
    grids = _read_grids(fields, media.vision.image_size, _ONEVISION_GRIDS)
    return replace(media, family="llava_onevision", grids=grids, most_tiles=int(most))


def _read_grids(
    fields: ConfigFields, side: int, default: Iterable[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Rows and columns of tiles of so many pixels."""
    sizes = fields.raw("image_grid_pinpoints")
    if sizes is None:
        sizes = [(h * side, w * side) for h, w in default]
    is_list = isinstance(sizes, list) and bool(sizes)
    if not is_list or not all(
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(type(pixels) is int and pixels > 0 and pixels % side == 0 for pixels in size)
        and size[0] // side * (size[1] // side) < MAX_TILES
        for size in sizes
    ):
        raise fields.error(
            "image_grid_pinpoints",
            f"must be a list of heights and widths of whole tiles of {side} pixels, fewer than "
            f"{MAX_TILES}",
        )
    return tuple((height // side, width // side) for height, width in sizes)


def _read_idefics3(fields: ConfigFields, vision: dict[str, Any], text_size: int) -> MediaConfig:
    tower = _read_tower(vision, is_clip=False, layers_less=0, has_post_norm=True)
    shuffle = fields.optional_integer("scale_factor", maximum=16) or 2
    if tower.side % shuffle:
        raise fields.error("scale_factor", f"must divide {tower.side} patches")
    return MediaConfig(
        family="idefics3",
        vision=tower,
        token_id=fields.integer("image_token_id", minimum=0, maximum=MAX_VOCABULARY),
        text_size=text_size,
        shuffle=shuffle,
    )


def _read_internvl(fields: ConfigFields, vision: dict[str, Any], text_size: int) -> MediaConfig:
    own = ConfigFields(vision, defaults=_INTERNVL, path="config.json: vision_config")
    norms = own.optional_text("norm_type") or "layer_norm"
    if norms not in ("layer_norm", "rms_norm"):
        raise own.error("norm_type", "must be layer_norm or rms_norm")
    if own.raw("use_absolute_position_embeddings") is False:
        raise own.error("use_absolute_position_embeddings", "must be true")
    one_side = {name: own.raw(name) for name in ("image_size", "patch_size")}
    for name, value in one_side.items():  # a list of height and width
        if isinstance(value, list | tuple):
            if len(set(value)) != 1:
                raise own.error(name, "must be a number, or height and width of a square")
            one_side[name] = value[0]
    has_qk_norms = own.boolean("use_qk_norm")
    tower = replace(
        _read_tower({**_INTERNVL, **vision, **one_side}, is_clip=True, layers_less=0,
                    has_post_norm=own.raw("use_mean_pooling") is False),
        has_pre_norm=False,
        patch_bias=True,
        qkv_bias=own.boolean("attention_bias"),
        has_rms_norms=norms == "rms_norm",
        has_qk_norms=has_qk_norms,
        has_layer_scale=True,
    )  # fmt: skip
    if has_qk_norms and tower.head_dim != tower.head_columns:
        raise own.error("use_qk_norm", f"needs heads of whole {HEAD_MULTIPLE} columns")
    if tower.has_rms_norms and tower.has_post_norm:
        raise own.error("use_mean_pooling", "must be true with RMS norms")
    if fields.raw("vision_feature_layer") not in (None, -1):
        raise fields.error("vision_feature_layer", "must be -1")
    if fields.raw("vision_feature_select_strategy") not in (None, "default"):
        raise fields.error("vision_feature_select_strategy", "must be default")
    ratio = fields.optional_positive("downsample_ratio") or 0.5
    shuffle = round(1 / ratio)
    if shuffle * ratio != 1.0 or tower.side % shuffle:
        raise fields.error("downsample_ratio", f"must divide {tower.side} patches")
    return MediaConfig(
        family="internvl",
        vision=tower,
        token_id=fields.optional_integer("image_token_id", minimum=0, maximum=MAX_VOCABULARY)
        or 151_667,
        text_size=text_size,
        projector_activation=_projector_activation(fields),
        projector_bias=True,
        projector_norm="layer",
        projector_norm_eps=1e-5,
        shuffle=shuffle,
    )


def _read_gemma3(fields: ConfigFields, vision: dict[str, Any], text_size: int) -> MediaConfig:
    tower = _read_tower(vision, is_clip=False, layers_less=0, has_post_norm=True)
    num_rows = fields.optional_integer("mm_tokens_per_image", maximum=tower.num_tokens) or 256
    side = math.isqrt(num_rows)
    if side**2 != num_rows or tower.side % side:
        raise fields.error(
            "mm_tokens_per_image", f"must be the square of a divisor of {tower.side} patches"
        )

    def token(name: str, default: int) -> int:
        for field in (f"{name}_token_id", f"{name}_token_index"):
            if fields.raw(field) is not None:
                return fields.integer(field, minimum=0, maximum=MAX_VOCABULARY)
        return default

    return MediaConfig(
        family="gemma3",
        vision=tower,
        token_id=token("image", 262_144),
        text_size=text_size,
        pool=tower.side // side,
        projector_norm="rms",
        projector_norm_eps=tower.norm_eps,
        edges=(token("boi", 255_999), token("eoi", 256_000)),
        is_two_way=True,
    )


def _read_qwen2_vl(fields: ConfigFields, *, is_windowed: bool) -> MediaConfig:
    """Qwen2-VL, or Qwen2.5-VL. Text fields stand in a text_config or beside the vision_config."""
    given = fields.raw("vision_config")
    if not isinstance(given, dict):
        raise fields.error("vision_config", "must be an object")
    vision = ConfigFields(
        given, defaults=_QWEN2_5_VL if is_windowed else _QWEN2_VL,
        path="config.json: vision_config",
    )  # fmt: skip
    width, out = ("hidden_size", "out_hidden_size") if is_windowed else ("embed_dim", "hidden_size")
    size = vision.integer(width, maximum=MAX_WIDTH)
    heads = vision.integer("num_heads", maximum=MAX_HEADS)
    if size % (4 * heads):
        raise vision.error(width, f"must be a multiple of 4 x {heads} heads")
    activation = vision.optional_text("hidden_act") or "quick_gelu"
    is_quick = activation == "quick_gelu" and not is_windowed
    if not is_quick and activation not in ACTIVATIONS:
        raise vision.error("hidden_act", f"must be one of {', '.join(ACTIVATIONS)}")
    patch = vision.integer("patch_size", maximum=MAX_IMAGE_SIZE)
    merge = vision.integer("spatial_merge_size", maximum=16)
    _check_axes(fields)
    tower = VisionConfig(
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", maximum=MAX_WIDTH)
        if is_windowed
        else int(size * vision.positive("mlp_ratio")),
        num_layers=vision.integer("depth", maximum=MAX_LAYERS),
        num_heads=heads,
        image_size=0,
        patch_size=patch,
        activation="quick_gelu" if is_quick else ACTIVATIONS[activation],
        norm_eps=1e-6,
        has_class=False,
        has_pre_norm=False,
        has_post_norm=True,
        patch_bias=False,
        rope_theta=10_000.0,
        num_frames=vision.integer("temporal_patch_size", maximum=16),
        has_rms_norms=is_windowed,
        is_gated=is_windowed,
        **(_read_windows(vision, patch * merge, merge) if is_windowed else {}),
    )
    return MediaConfig(
        family="qwen2_vl",
        vision=tower,
        token_id=fields.optional_integer("image_token_id", maximum=MAX_VOCABULARY) or 151_655,
        text_size=vision.integer(out, maximum=MAX_WIDTH),
        projector_bias=True,
        shuffle=merge,
        has_axes=True,
    )


def _check_axes(fields: ConfigFields) -> None:
    text = fields.section("text_config") or fields
    rope = text.section("rope_parameters") or text.section("rope_scaling")
    if rope is None or rope.raw("mrope_section") is None:
        raise text.error("rope_scaling", "must have an mrope_section")


def _read_qwen3_vl(fields: ConfigFields) -> MediaConfig:
    given = fields.raw("vision_config")
    if not isinstance(given, dict):
        raise fields.error("vision_config", "must be an object")
    vision = ConfigFields(given, defaults=_QWEN3_VL, path="config.json: vision_config")
    size = vision.integer("hidden_size", maximum=MAX_WIDTH)
    heads = vision.integer("num_heads", maximum=MAX_HEADS)
    if size % (4 * heads):
        raise vision.error("hidden_size", f"must be a multiple of 4 x {heads} heads")
    activation = vision.text("hidden_act")
    if activation not in ACTIVATIONS:
        raise vision.error("hidden_act", f"must be one of {', '.join(ACTIVATIONS)}")
    num_positions = vision.integer("num_position_embeddings", maximum=MAX_IMAGE_SIZE**2)
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise vision.error("num_position_embeddings", "must be those of a square")
    num_layers = vision.integer("depth", maximum=MAX_LAYERS)
    deep = deep_layers(vision, FAMILIES["Qwen3VLForConditionalGeneration"])
    if deep and deep[-1] >= num_layers:
        raise vision.error("deepstack_visual_indexes", f"must be below {num_layers} layers")
    _check_axes(fields)
    tower = VisionConfig(
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=heads,
        image_size=0,
        patch_size=vision.integer("patch_size", maximum=MAX_IMAGE_SIZE),
        activation=ACTIVATIONS[activation],
        norm_eps=1e-6,
        has_class=False,
        has_pre_norm=False,
        has_post_norm=True,
        patch_bias=True,
        rope_theta=10_000.0,
        positions_side=side,
        deep_layers=deep,
        num_frames=vision.integer("temporal_patch_size", maximum=16),
    )
    return MediaConfig(
        family="qwen2_vl",
        vision=tower,
        token_id=fields.optional_integer("image_token_id", maximum=MAX_VOCABULARY) or 151_655,
        text_size=vision.integer("out_hidden_size", maximum=MAX_WIDTH),
        projector_bias=True,
        shuffle=vision.integer("spatial_merge_size", maximum=16),
        has_axes=True,
    )


def _read_qwen2_audio(fields: ConfigFields, audio: dict[str, Any], text_size: int) -> MediaConfig:
    own = ConfigFields(audio, defaults=_QWEN2_AUDIO, path="config.json: audio_config")
    if own.boolean("scale_embedding"):
        raise own.error("scale_embedding", "must be false")
    size = own.integer("d_model", maximum=MAX_WIDTH)
    heads = own.integer("encoder_attention_heads", maximum=MAX_HEADS)
    if size % (HEAD_MULTIPLE * heads):
        raise own.error("d_model", f"must be a multiple of {HEAD_MULTIPLE} x {heads} heads")
    activation = own.text("activation_function")
    if activation not in ACTIVATIONS:
        raise own.error("activation_function", f"must be one of {', '.join(ACTIVATIONS)}")
    tower = VisionConfig(
        hidden_size=size,
        intermediate_size=own.integer("encoder_ffn_dim", maximum=MAX_WIDTH),
        num_layers=own.integer("encoder_layers", maximum=MAX_LAYERS),
        num_heads=heads,
        image_size=0,
        patch_size=1,
        activation=ACTIVATIONS[activation],
        norm_eps=1e-5,
        has_class=False,
        has_pre_norm=False,
        has_post_norm=False,
        patch_bias=True,
        num_mels=own.integer("num_mel_bins", maximum=MAX_MELS),
        most_rows=own.integer("max_source_positions", minimum=2, maximum=MAX_ROWS),
    )
    token = "audio_token_index" if fields.raw("audio_token_id") is None else "audio_token_id"
    return MediaConfig(
        family="qwen2_audio",
        vision=tower,
        token_id=fields.optional_integer(token, minimum=0, maximum=MAX_VOCABULARY) or 151_646,
        text_size=text_size,
        projector_bias=True,
        projector_norm="layer",
        projector_norm_eps=1e-5,
    )


def _read_windows(vision: ConfigFields, pixels: int, merge: int) -> dict[str, Any]:
    """`pixels`: of a side of what becomes one row."""
    rows = vision.integer("window_size", maximum=MAX_IMAGE_SIZE) // pixels
    if not rows:
        raise vision.error("window_size", f"must be at least {pixels}")
    layers = vision.raw("fullatt_block_indexes")
    if not isinstance(layers, list | tuple) or not all(type(layer) is int for layer in layers):
        raise vision.error("fullatt_block_indexes", "must be a list of numbers")
    return {"window": rows * merge, "whole_layers": tuple(layers)}


def _read_tower(
    values: dict[str, Any], *, is_clip: bool, layers_less: int, has_post_norm: bool
) -> VisionConfig:
    fields = ConfigFields(
        values, defaults=_CLIP if is_clip else _SIGLIP, path="config.json: vision_config"
    )
    size = fields.integer("hidden_size", maximum=MAX_WIDTH)
    heads = fields.integer("num_attention_heads", maximum=MAX_HEADS)
    if size % heads:
        raise fields.error("hidden_size", f"must be a multiple of {heads} attention heads")
    image_size = fields.integer("image_size", maximum=MAX_IMAGE_SIZE)
    patch_size = fields.integer("patch_size", maximum=image_size)
    layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS) - layers_less
    if layers < 0:
        raise fields.error("num_hidden_layers", f"must be at least {layers_less}")
    activation = fields.optional_text("hidden_act") or "gelu"
    if activation != "quick_gelu" and activation not in ACTIVATIONS:
        raise fields.error("hidden_act", f"must be quick_gelu or one of {', '.join(ACTIVATIONS)}")
    return VisionConfig(
        hidden_size=size,
        intermediate_size=fields.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=layers,
        num_heads=heads,
        image_size=image_size,
        patch_size=patch_size,
        activation="quick_gelu" if activation == "quick_gelu" else ACTIVATIONS[activation],
        norm_eps=fields.positive("layer_norm_eps"),
        has_class=is_clip,
        has_pre_norm=is_clip,
        has_post_norm=has_post_norm,
        patch_bias=not is_clip,
    )
