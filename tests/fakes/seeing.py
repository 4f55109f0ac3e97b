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


def write_seeing_model(folder: Path) -> Path:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = seeing_model("llava")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.tensors, folder / "model.safetensors")
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    vocabulary |= {f"w{index}": index for index in range(len(WORDS), PLACEHOLDER)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in (
        ("config.json", model.config),
        ("preprocessor_config.json", PREPROCESSOR),
        ("tokenizer_config.json", {"chat_template": TEMPLATE}),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


def encoded(image: Image, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
