"""Tiny random models that see or hear: transformers' own, and their files as it writes them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from octavo_engine.backends.media import TakesMedia, tiles_of
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.text_part import TextPart
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.backends.vision_part import media_part
from octavo_engine.core.media.prepare import prepare_image
from octavo_engine.core.media.spec import PadToTiles, PictureSpec
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.vision_config import MediaConfig, read_media_config
from octavo_engine.speech.mel import feature_rows
from octavo_engine.state.media import MediaItem, MediaSpan
from tests.engine.models.tiny import MemoryCheckpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLACEHOLDER = 90
VOCABULARY = 96
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "pad_token_id": 0,
}
_TOWER = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 42,
    "patch_size": 7,
}
BEGIN, END = 91, 92  # around a picture of Gemma 3; behind a line of Pixtral, and the last one
SEEING = (
    "llava", "llava-full", "llava-siglip", "llava-qwen2", "llava-mistral", "llava-next",
    "idefics3", "smolvlm",
    "gemma3", "qwen2vl", "qwen2.5vl", "qwen3vl", "internvl", "internvl-rms",
    "pixtral", "mistral3", "llava-onevision", "qwen2audio",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class SeeingModel:
    reference: Any
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def media(self) -> MediaConfig:
        media = read_media_config(self.config)
        assert media is not None
        return media

    def backend(
        self, dtype: str, *, stored: str = "F32", max_model_len: int = 512, **options: Any
    ) -> NativeBackend | TorchBackend:
        """`dtype`: torch, torch-bf16, f32 or bf16."""
        checkpoint = MemoryCheckpoint(self.tensors, stored)
        config = ModelConfig.from_hf(self.config)
        text = TextPart(checkpoint)
        backend: NativeBackend | TorchBackend
        if dtype.startswith("torch"):
            storage = torch.bfloat16 if dtype == "torch-bf16" else None
            precision = Precision(storage=storage)
            backend = TorchBackend(config, text, max_model_len=max_model_len, precision=precision)
        else:
            backend = NativeBackend(
                config, text, max_model_len=max_model_len, dtype=dtype,  # type: ignore[arg-type]
                **{"num_threads": 1} | options,
            )  # fmt: skip
        assert isinstance(backend, TakesMedia)
        backend.load_media(self.media, media_part(checkpoint, self.media))
        return backend

    def logits(
        self, tokens: list[int], items: list[MediaItem],
        sizes: list[tuple[int, int]] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """`sizes`: height and width of the pictures that were cut, but those that `tile` made."""
        ids = torch.tensor([tokens])
        if self.media.kind == "audio":
            return self._heard(ids, items)
        types = (ids == self.media.token_id).long()
        options = {}
        if self.media.family == "qwen2_vl":
            pixels, grids = patches_of(items)
            options = {"image_grid_thw": grids, "mm_token_type_ids": types}
        elif self.media.family == "pixtral":
            options = {"image_sizes": torch.tensor([(i.height, i.width) for i in items])}
            pixels = in_one_size(items)
        else:
            tiles = [tile for item in items for tile in tiles_of(item, self.media)]
            pixels = torch.from_numpy(np.stack([normalised(tile) for tile in tiles]))
        if self.media.grids:
            sizes = [ORIGINALS[item.digest] for item in items] if sizes is None else sizes
            options = {"image_sizes": torch.tensor(sizes)}
        if self.media.most_tiles:
            is_cut = items[0].tiles is not None and items[0].tiles.rows > 0
            options["batch_num_images"] = torch.tensor([1] * len(items) if is_cut else [len(items)])
        if self.media.family == "idefics3":
            pixels = pixels[None]
        if self.media.is_two_way:
            options = {"token_type_ids": types}
        with torch.inference_mode():
            output = self.reference(input_ids=ids, pixel_values=pixels, use_cache=False, **options)
        logits: NDArray[np.float32] = output.logits[0].float().numpy()
        return logits

    def _heard(self, ids: torch.Tensor, items: list[MediaItem]) -> NDArray[np.float32]:
        most = 2 * self.media.vision.num_tokens
        features = torch.from_numpy(np.stack([spectrogram(item, most) for item in items]))
        mask = torch.zeros(len(items), most, dtype=torch.long)
        for index, item in enumerate(items):
            mask[index, : 2 * item.height] = 1
        with torch.inference_mode():
            output = self.reference(
                input_ids=ids, input_features=features, feature_attention_mask=mask,
                attention_mask=torch.ones_like(ids), use_cache=False,
            )  # fmt: skip
        logits: NDArray[np.float32] = output.logits[0].float().numpy()
        return logits


def spectrogram(item: MediaItem, num_frames: int) -> NDArray[np.float32]:
    """[mels, frames] of a sound, whose rows have four neighbouring frames each; zeros behind."""
    rows = np.frombuffer(item.pixels, np.float32).reshape(item.height, 4, -1)
    frames = np.zeros((rows.shape[2], num_frames), np.float32)
    own = rows[:, 1:3].reshape(2 * item.height, -1)
    frames[:, : len(own)] = own.T
    if len(own) < num_frames:
        frames[:, len(own)] = rows[-1, 3]
    return frames


def normalised(item: MediaItem) -> NDArray[np.float32]:
    """By its definition: [3, height, width]."""
    pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.height, item.width, 3)
    scaled = (pixels.astype(np.float64) * item.scale).astype(np.float32)
    values = (scaled - np.array(item.mean, np.float32)) / np.array(item.std, np.float32)
    by_colour: NDArray[np.float32] = np.ascontiguousarray(values.transpose(2, 0, 1), np.float32)
    return by_colour


def in_one_size(items: list[MediaItem]) -> torch.Tensor:
    """With zeros at the right and below."""
    height, width = (max(getattr(i, side) for i in items) for side in ("height", "width"))
    pixels = torch.zeros(len(items), 3, height, width)
    for index, item in enumerate(items):
        pixels[index, :, : item.height, : item.width] = torch.from_numpy(normalised(item))
    return pixels


def patches_of(items: list[MediaItem]) -> tuple[torch.Tensor, torch.Tensor]:
    """As Qwen2-VL's own processor cuts them, and the lines and columns of each."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    cut = [
        Qwen2VLImageProcessorPil().patchify(
            normalised(item), patch_size=7, merge_size=2, temporal_patch_size=2
        )
        for item in items
    ]
    grids = torch.tensor([[1, lines, columns] for _, lines, columns in cut])
    return torch.from_numpy(np.concatenate([patches for patches, _, _ in cut])), grids


# Of towers that take pictures of any size, by seed.
SIZES = ((42, 56), (28, 14), (56, 42))


ORIGINALS: dict[bytes, tuple[int, int]] = {}  # height and width of pictures that were cut
ORIGINAL_SIZES = ((80, 60), (60, 200), (50, 50), (120, 125))


def _cut_picture(media: MediaConfig, seed: int) -> MediaItem:
    size = ORIGINAL_SIZES[seed % len(ORIGINAL_SIZES)]
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    side = media.vision.image_size
    shape = PadToTiles(media.grids)
    spec = PictureSpec(
        media=media, shape=shape, size=(side, side), resample=3, scale=1 / 255,
        mean=(0.5, 0.4, 0.3), std=(0.25, 0.3, 0.2),
    )  # fmt: skip
    (item,) = prepare_image(Image.fromarray(pixels), spec).tiles
    ORIGINALS[item.digest] = size
    return item


def _sound(media: MediaConfig, seed: int) -> MediaItem:
    """Rows of random frames, fewer than there may be; an odd count loses its last one."""
    count = (7, 12, 20)[seed % 3]
    frames = np.random.default_rng(seed).standard_normal((2 * count + 2, media.vision.num_mels))
    rows = feature_rows(frames.astype(np.float32))[:count]
    data = np.ascontiguousarray(rows).tobytes()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return MediaItem(digest, count, rows.shape[1], data)


def tile(media: MediaConfig, seed: int) -> MediaItem:
    if media.kind == "audio":
        return _sound(media, seed)
    if media.grids:
        return _cut_picture(media, seed)
    size = media.vision.image_size
    height, width = (size, size) if size else SIZES[seed % len(SIZES)]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8).tobytes()
    digest = hashlib.blake2b(pixels, digest_size=16).digest()
    return MediaItem(digest, height, width, pixels, mean=(0.5, 0.4, 0.3), std=(0.25, 0.3, 0.2))


def prompt_of(
    media: MediaConfig, *parts: list[int] | MediaItem
) -> tuple[list[int], tuple[MediaSpan, ...], tuple[MediaItem, ...]]:
    """Tokens, spans and items of text and pictures in turn."""
    tokens: list[int] = []
    spans: list[MediaSpan] = []
    items: dict[bytes, MediaItem] = {}
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        lines, ids = media.lines_of(part), [media.token_id] * media.rows_of(part)
        line_rows = lines[1] if lines and media.ends_lines else 0
        if lines and line_rows:
            ids = [*([*ids[:line_rows], BEGIN] * lines[0])[:-1], END]
        spans.append(
            MediaSpan(
                part.digest, len(tokens), len(ids), is_two_way=media.is_two_way,
                grid=lines if media.has_axes else None, line_rows=line_rows,
            )
        )  # fmt: skip
        tokens += ids
        items[part.digest] = part
    return tokens, tuple(spans), tuple(items.values())


@functools.cache
def seeing_model(name: str) -> SeeingModel:
    import transformers

    model_class, config = _made(transformers, name)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                fan_in = math.prod(parameter.shape[1:])
                parameter.copy_(values * (1.2 / math.sqrt(fan_in)))
            elif parameter_name.endswith(".weight"):
                parameter.copy_(1.0 + 0.2 * values)
            else:
                parameter.copy_(0.1 * values)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        from safetensors.torch import load_file

        as_json = json.loads((Path(folder) / "config.json").read_text())
        tensors = load_file(Path(folder) / "model.safetensors")
    return SeeingModel(model, as_json, tensors)


def _made(transformers: Any, name: str) -> tuple[Any, Any]:
    kind = next((kind for kind in ("Qwen2", "Mistral") if name.endswith(kind.lower())), "Llama")
    text = getattr(transformers, f"{kind}Config")(**_TEXT)
    if name.startswith("internvl"):
        return transformers.InternVLForConditionalGeneration, _internvl(transformers, name)
    if name == "qwen2audio":
        return transformers.Qwen2AudioForConditionalGeneration, _qwen2_audio(transformers)
    if name in ("pixtral", "mistral3"):
        return _pixtral(transformers, name)
    if name == "llava-next":
        side = _TOWER["image_size"]
        config = transformers.LlavaNextConfig(
            vision_config=transformers.CLIPVisionConfig(**_TOWER),
            text_config=text,
            image_token_index=PLACEHOLDER,
            image_grid_pinpoints=[
                [h * side, w * side] for h, w in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
            ],
        )
        return transformers.LlavaNextForConditionalGeneration, config
    if name == "llava-onevision":
        return _llava_onevision(transformers)
    if name.startswith("llava"):
        is_siglip = name == "llava-siglip"
        kind = "SiglipVisionConfig" if is_siglip else "CLIPVisionConfig"
        config = transformers.LlavaConfig(
            vision_config=getattr(transformers, kind)(**_TOWER),
            text_config=text,
            image_token_index=PLACEHOLDER,
            vision_feature_select_strategy="default" if name == "llava" else "full",
            vision_feature_layer=-1 if is_siglip else -2,
        )
        return transformers.LlavaForConditionalGeneration, config
    if name == "qwen2vl":
        return transformers.Qwen2VLForConditionalGeneration, _qwen2_vl(transformers)
    if name == "qwen3vl":
        return transformers.Qwen3VLForConditionalGeneration, _qwen3_vl(transformers)
    if name == "qwen2.5vl":
        return transformers.Qwen2_5_VLForConditionalGeneration, _qwen2_5_vl(transformers)
    if name == "gemma3":
        return transformers.Gemma3ForConditionalGeneration, _gemma3(transformers)
    prefix = "Idefics3" if name == "idefics3" else "SmolVLM"
    vision = getattr(transformers, f"{prefix}VisionConfig")(**_TOWER)
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_id=PLACEHOLDER,
        scale_factor=2,
        pad_token_id=0,
    )
    return getattr(transformers, f"{prefix}ForConditionalGeneration"), config


def _gemma3(transformers: Any) -> Any:
    """A window that is shorter than prompts, and heads of the tower that fill no whole panels."""
    text = transformers.Gemma3TextConfig(
        **_TEXT, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    )  # fmt: skip
    tower = _TOWER | {"hidden_size": 96, "num_attention_heads": 4}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**tower, vision_use_head=False),
        mm_tokens_per_image=9,
        image_token_index=PLACEHOLDER,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )


def _internvl(transformers: Any, name: str) -> Any:
    """As the smaller ones are, or with all that the largest has."""
    is_large = name == "internvl-rms"
    kind = transformers.Qwen3Config if is_large else transformers.Qwen2Config
    more = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True}
    return transformers.InternVLConfig(
        vision_config=_TOWER | (more if is_large else {}),
        text_config=kind(**_TEXT).to_dict(),
        image_token_id=PLACEHOLDER,
        tie_word_embeddings=False,
    )


def _llava_onevision(transformers: Any) -> tuple[Any, Any]:
    """At most two tiles' rows, so that pictures of three and more are shrunk."""
    side = _TOWER["image_size"]
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**_TOWER, vision_use_head=False),
        text_config=transformers.Qwen2Config(**_TEXT),
        image_token_index=PLACEHOLDER,
        video_token_index=VOCABULARY - 1,
        image_grid_pinpoints=[[h * side, w * side] for h in (1, 2, 3) for w in (1, 2, 3)],
        vision_aspect_ratio="anyres_max_2",
    )
    return transformers.LlavaOnevisionForConditionalGeneration, config


def _pixtral(transformers: Any, name: str) -> tuple[Any, Any]:
    vision = {
        "hidden_size": 96, "intermediate_size": 84, "num_hidden_layers": 2, "patch_size": 7,
        "num_attention_heads": 4, "image_size": 140, "hidden_act": "silu", "model_type": "pixtral",
    }  # fmt: skip
    prefix = "Mistral3" if name == "mistral3" else "Llava"
    own = {} if name == "mistral3" else {"vision_feature_select_strategy": "full"}
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=transformers.PixtralVisionConfig(**vision),
        text_config=transformers.MistralConfig(**_TEXT, rms_norm_eps=1e-4, sliding_window=None),
        image_token_index=PLACEHOLDER,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **own,
    )
    return getattr(transformers, f"{prefix}ForConditionalGeneration"), config


def _qwen2_audio(transformers: Any) -> Any:
    audio = transformers.Qwen2AudioEncoderConfig(
        num_mel_bins=16, d_model=48, encoder_layers=2, encoder_attention_heads=3,
        encoder_ffn_dim=80, max_source_positions=25,
    )  # fmt: skip
    text = transformers.Qwen2Config(**_TEXT)
    return transformers.Qwen2AudioConfig(
        audio_config=audio, text_config=text, audio_token_index=PLACEHOLDER
    )


def _qwen2_vl(transformers: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2VLConfig(
        text_config=_TEXT | {"rope_parameters": rope},
        vision_config={
            "depth": 2, "embed_dim": 96, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2,
            "patch_size": 7,
        },
        image_token_id=PLACEHOLDER,
        video_token_id=VOCABULARY - 1,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )  # fmt: skip


def _qwen2_5_vl(transformers: Any) -> Any:
    """Windows of two by two rows, some smaller at the edges, and an MLP of no whole panels."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    return transformers.Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": rope},
        vision_config={
            "depth": 3, "hidden_size": 96, "out_hidden_size": 64, "num_heads": 4,
            "intermediate_size": 84, "patch_size": 7, "window_size": 28,
            "fullatt_block_indexes": [1],
        },
        image_token_id=PLACEHOLDER,
        video_token_id=VOCABULARY - 1,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )  # fmt: skip


def _qwen3_vl(transformers: Any) -> Any:
    """A square of positions that no picture is as large as, and two layers that are read besides;
    pairs of a head that are left when lines and columns have theirs."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
    return transformers.Qwen3VLConfig(
        text_config=_TEXT | {"rope_parameters": rope | {"mrope_interleaved": True}},
        vision_config={
            "depth": 4, "hidden_size": 96, "out_hidden_size": 64, "num_heads": 4,
            "intermediate_size": 80, "patch_size": 7, "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=PLACEHOLDER,
        video_token_id=VOCABULARY - 1,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )  # fmt: skip
