"""From a model's config to its page: the one place that knows all pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo_engine.models.gemma import Gemma
from octavo_engine.models.gemma3n import Gemma3n
from octavo_engine.models.gpt import Gpt
from octavo_engine.models.hybrid import Hybrid
from octavo_engine.models.llama import Llama
from octavo_engine.models.whisper import Whisper
from octavo_engine.models.zamba import Zamba

if TYPE_CHECKING:
    from octavo_engine.models.config import ModelConfig
    from octavo_engine.ops import Loader, Model


def build_model(config: ModelConfig, loader: Loader, max_model_len: int) -> Model:
    """The model with its weights taken from the loader; the caller ends with `loader.finish()`."""
    page = config.family.page
    if not isinstance(page, str):
        return page(config, loader, max_model_len)
    match page:
        case "llama":
            return Llama(config, loader, max_model_len)
        case "gemma":
            return Gemma(config, loader, max_model_len)
        case "gemma3n":
            return Gemma3n(config, loader, max_model_len)
        case "gpt":
            return Gpt(config, loader, max_model_len)
        case "whisper":
            # NOTE: its forward pass needs CrossOps, which every backend that runs it has.
            return cast("Model", Whisper(config, loader, max_model_len))
        case "hybrid":
            return Hybrid(config, loader, max_model_len)
        case "zamba":
            return Zamba(config, loader, max_model_len)
