"""Text of Qwen2-VL and Qwen2.5-VL: transformers' logits, from files of both spellings."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.text_part import TextPart
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.decoder_names import under_our_names
from octavo_engine.models.vision_config import read_media_config
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.models.tiny import SHAPE, MemoryCheckpoint

KINDS = ("Qwen2VL", "Qwen2_5_VL")
MAX_MODEL_LEN = 160
_TEXT = SHAPE | {"vocab_size": 512}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_VISION = {
    "Qwen2VL": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    "Qwen2_5_VL": {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2},
}


@cache
def saved(kind: str) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    import transformers
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(
        text_config={**_TEXT, "rope_parameters": _ROPE}, vision_config=_VISION[kind]
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
        return model, written, load_file(Path(folder) / "model.safetensors")


def as_published(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As Qwen's own files are: text fields beside the vision_config, a rope of type mrope."""
    text = dict(config["text_config"])
    text.pop("rope_parameters")
    flat = {key: value for key, value in config.items() if key != "text_config"} | text
    flat |= {
        "architectures": config["architectures"],
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    renamed = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in tensors.items()
    }
    return flat, renamed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["saved", "published"])
def test_logits_of_text_are_those_of_transformers(kind: str, form: str) -> None:
    model, config, tensors = saved(kind)
    if form == "published":
        config, tensors = as_published(config, tensors)
    assert config["architectures"] == [f"{kind}ForConditionalGeneration"]
    tokens = random_tokens(100, seed=3)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    ours = ModelConfig.from_hf(config)
    assert ours.is_part is (form == "saved")
    stored = MemoryCheckpoint(tensors, "F32")
    part = under_our_names(ours, TextPart(stored) if ours.is_part else stored)
    native = NativeBackend(ours, part, max_model_len=MAX_MODEL_LEN, dtype="f32", num_threads=1)
    reference = TorchBackend(ours, part, max_model_len=MAX_MODEL_LEN)
    np.testing.assert_allclose(run_alone(reference, tokens), expected, **FLOAT32)
    logits = run_alone(native, tokens, chunks=[50, 1, 1])
    np.testing.assert_allclose(logits, expected, **FLOAT32)
    media = read_media_config(config)
    assert media is not None and media.text_size == 64
    assert bool(media.vision.window) == (kind == "Qwen2_5_VL")
