"""A folder with a tiny LLaVA: weights, tokenizer, chat template and preprocessor, as published."""

from __future__ import annotations

import base64
import io
import json
from typing import TYPE_CHECKING, Any

from tests.engine.models.tiny_seeing import PLACEHOLDER, seeing_model

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image
    from tokenizers import Tokenizer

# As llava-hf publishes it, but for names of roles.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image> ' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)
WORDS = ("<unk>", "user", "assistant", "system", "what", "colour", "is", "it", "?", "red", "blue",
         "tell", "me", "more", "of", "this")  # fmt: skip
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 42},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 42, "width": 42},
    "do_rescale": True,
    "rescale_factor": 0.00392156862745098,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_convert_rgb": True,
}


# As SmolVLM's is, with sizes of the tiny tower: at most three tiles in a row.
SPLITTING: dict[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_resize": True,
    "size": {"longest_edge": 126},
    "resample": 1,
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 42},
    "do_rescale": True,
    "rescale_factor": 0.00392156862745098,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pad": True,
    "do_convert_rgb": True,
}
# As Gemma 3's is.
STRETCHING: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 42, "width": 42},
}
# As Qwen2-VL's is, with patches of the tiny tower.
FITTING: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 784,
    "max_pixels": 5000,
    "patch_size": 7,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# As InternVL's is: its processor cuts pictures whatever `crop_to_patches` says.
FILLING: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "crop_to_patches": False,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "max_patches": 6,
    "min_patches": 1,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 42, "width": 42},
}
# As LLaVA-NeXT's is, with tiles of the tiny tower.
PADDING: dict[str, Any] = PREPROCESSOR | {
    "image_processor_type": "LlavaNextImageProcessor",
    "aspect_ratio_setting": "anyres",
    "image_grid_pinpoints": [[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]],
}
# As Qwen3-VL's is: more pixels than the tower reads here.
FITTING_LARGE: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 16_777_216, "shortest_edge": 784},
    "patch_size": 7,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# As Mistral Small 3.1's is, with patches of the tiny tower.
LINED: dict[str, Any] = {
    "image_processor_type": "PixtralImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": {"height": 7, "width": 7},
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 84},
}
# As LLaVA-OneVision's is, with tiles of the tiny tower.
ANYRES: dict[str, Any] = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_grid_pinpoints": [[42 * h, 42 * w] for h in (1, 2, 3) for w in (1, 2, 3)],
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 42, "width": 42},
}
# As Qwen2-Audio's is, with bands of the tiny tower.
HEARING: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "chunk_length": 30,
    "feature_size": 16,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 8000,
    "nb_max_frames": 50,
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 16000,
}
PREPROCESSORS = {
    "qwen2audio": HEARING,
    "mistral3": LINED,
    "pixtral": LINED,
    "llava-onevision": ANYRES,
    "qwen3vl": FITTING_LARGE,
    "llava-next": PADDING,
    "internvl": FILLING,
    "llava": PREPROCESSOR,
    "smolvlm": SPLITTING,
    "gemma3": STRETCHING,
    "qwen2vl": FITTING,
}
# What chat templates write for a picture.
MARKS = {
    "qwen2audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "mistral3": "[IMG]",
    "llava-onevision": "<image> ",
    "llava-next": "<image> ",
    "internvl": "<IMG_CONTEXT>",
    "llava": "<image> ",
    "smolvlm": "<image> ",
    "gemma3": "<start_of_image>",
    "qwen2vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
AROUND_TILES = ("<fake_token_around_image>", "<global-img>", *PLACES)


def write_seeing_model(folder: Path, name: str = "llava") -> Path:
    """Of "llava", "smolvlm", "gemma3", "qwen2vl", "qwen2.5vl", "qwen3vl", "internvl", "llava-next",
    "llava-onevision", "pixtral", "mistral3" or "qwen2audio", which hears."""
    from safetensors.torch import save_file

    model = seeing_model(name)
    if name == "qwen2.5vl":  # all else is equal
        name = "qwen2vl"
    preprocessor = PREPROCESSORS[name]
    name = {"qwen3vl": "qwen2vl", "pixtral": "mistral3"}.get(name, name)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.tensors, folder / "model.safetensors")
    tokenizer(name).save(str(folder / "tokenizer.json"))
    for file, value in (
        ("config.json", model.config),
        ("preprocessor_config.json", preprocessor),
        ("tokenizer_config.json", {"chat_template": _template(name)}),
    ):
        (folder / file).write_text(json.dumps(value))
    return folder


def _template(name: str) -> str:
    kind = "audio" if name == "qwen2audio" else "image"
    return TEMPLATE.replace("'equalto', 'image'", f"'equalto', '{kind}'").replace(
        "<image> ", MARKS[name]
    )


def tokenizer(name: str) -> Tokenizer:
    """Words; with SmolVLM the tokens around tiles; with both others those of runs of newlines."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if name in ("llava-next", "llava-onevision"):
        name = "llava"
    runs = ["\n" * count for count in range(1, 7)]
    special = {
        "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "internvl": ["<IMG_CONTEXT>", "<img>", "</img>"],
        "llava": ["<image>"],
        "smolvlm": ["<image>", *AROUND_TILES],
        "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        "qwen2vl": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "qwen2audio": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
    }[name]
    words = {
        "mistral3": WORDS,
        "llava": WORDS,
        "smolvlm": (*WORDS, *runs[:2], *AROUND_TILES),
        "gemma3": (*WORDS, *runs),
        "qwen2vl": WORDS,
        "qwen2audio": WORDS,
        "internvl": WORDS,
    }[name]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {f"w{index}": index for index in range(len(words), PLACEHOLDER)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    newlines = pre_tokenizers.Split(Regex("\n+"), "isolated")
    spaces = pre_tokenizers.Split(Regex(" +"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([newlines, spaces])
    tokenizer.decoder = decoders.WordPiece()
    if name == "gemma3":  # a newline spells that alone
        pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(pieces)
    tokenizer.add_special_tokens(special)
    return tokenizer


def encoded(image: Image, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
