"""Loads a model by transformers' own classes, and refuses by name what paged attention cannot
serve."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from octavo_engine.backends.torch.fallback.layers import (
    PAGED,
    PROBE,
    PROBE_TOKENS,
    AttentionProbe,
    answered_by,
    register_implementations,
)
from octavo_engine.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from octavo_engine.backends.torch.fallback.layers import AttentionCall
    from octavo_engine.config import EngineConfig

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LENGTH_WHERE_UNSAID = 2048
_HINT = "the transformers fallback cannot serve it"
_ATTENTION_LAYERS = frozenset(("full_attention", "sliding_attention"))
# They choose angles by the longest text of a forward pass, which here is of several texts.
_ROPES_BY_LENGTH = frozenset(("dynamic", "longrope"))


def read_shape(
    config: EngineConfig, folder: Path, model: Mapping[str, Any]
) -> tuple[int, tuple[int, ...]]:
    """Tokens that the model was made for, and those that end a text; `model` is its config.json."""
    settings = read_config(config, folder, model)
    check_architecture(settings, model)
    text = settings.get_text_config(decoder=True)
    length = getattr(text, "max_position_embeddings", None)
    if type(length) is not int or length < 1:
        length = config.max_model_len or _LENGTH_WHERE_UNSAID
        logger.warning("The model does not say how long texts may be: %d tokens are", length)
    eos = settings.eos_token_id if text.eos_token_id is None else text.eos_token_id
    ids = eos if isinstance(eos, list) else [eos]
    return length, tuple(i for i in ids if type(i) is int and i >= 0)


def read_config(config: EngineConfig, folder: Path, model: Mapping[str, Any]) -> Any:
    """transformers' own configuration object of the model. Raises ModelError."""
    if config.trust_remote_code:
        _log_remote_code(folder, model)
    try:
        return AutoConfig.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            **config.overrides,
        )
    except Exception as error:  # it raises anything
        files = _code_of(model)
        if files and not config.trust_remote_code:
            raise ModelError(
                f"{folder / 'config.json'}: model_type {model.get('model_type')!r:.60} needs code "
                f"of the model's repository ({', '.join(files)}); --trust-remote-code runs it"
            ) from error
        raise ModelError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot read it: "
            f"{first_line(error)}"
        ) from error


def load_model(
    config: EngineConfig,
    folder: Path,
    model: Mapping[str, Any],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Any:
    """The model with its weights on the device. None: the dtype that its files have."""
    register_implementations()
    settings = read_config(config, folder, model)
    model_class = AutoModelForCausalLM._model_mapping.get(type(settings), None)
    if model_class is None and not _is_remote(settings):
        raise ModelError(
            f"config.json: model_type {settings.model_type!r} is not one that transformers "
            f"{transformers.__version__} generates text with"
        )
    if isinstance(model_class, type):
        _check_class(model_class)
    _check_config(config, settings)
    options = {
        "dtype": dtype or "auto",
        "attn_implementation": PAGED,
        "trust_remote_code": config.trust_remote_code,
    }
    try:
        loaded = _made(config, folder, settings, options)
    except Exception as error:  # it raises anything
        raise ModelError(f"{folder}: transformers cannot load it: {first_line(error)}") from error
    _check_class(type(loaded))
    return loaded.to(device).eval()


def _made(config: EngineConfig, folder: Path, settings: Any, options: dict[str, Any]) -> Any:
    auto: Any = AutoModelForCausalLM  # published without types
    if config.load_format == "dummy":
        torch.manual_seed(config.seed)
        if options["dtype"] == "auto":
            del options["dtype"]
        return auto.from_config(settings, **options)
    return auto.from_pretrained(
        folder, config=settings, local_files_only=True, use_safetensors=True, **options
    )


def check_architecture(
    settings: Any, model: Mapping[str, Any], auto_class: str = "AutoModelForCausalLM"
) -> None:
    """A class that transformers has not may compute other than the one of its model_type."""
    names = model.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    is_remote = _is_remote(settings, auto_class)
    if isinstance(name, str) and not hasattr(transformers, name) and not is_remote:
        raise ModelError(
            f"transformers {transformers.__version__} has no class {name!r:.80}; where it has the "
            "weights of a class that there is, name that one: --hf-overrides "
            """'{"architectures": ["…"]}'"""
        )


def _check_class(model_class: type[Any]) -> None:
    """Raises ModelError for one whose memory is more than keys and values, or not ours to keep."""
    name = model_class.__name__
    if model_class._is_stateful:
        raise ModelError(
            f"{name} carries a state from token to token (a recurrent or convolutional layer): "
            f"{_HINT}"
        )
    if not model_class._supports_attention_backend:
        raise ModelError(
            f"the attention of {name} does not go through transformers' attention interface: "
            f"{_HINT}"
        )
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(f"{name} does not take position_ids: {_HINT}")


def _check_config(config: EngineConfig, settings: Any) -> None:
    text = settings.get_text_config(decoder=True)
    if getattr(settings, "is_encoder_decoder", False):
        raise ModelError(f"{type(settings).__name__} has an encoder and a decoder: {_HINT}")
    other = sorted({*(getattr(text, "layer_types", None) or ())} - _ATTENTION_LAYERS)
    if other:
        raise ModelError(
            f"{type(settings).__name__} has layers of the type {', '.join(other)}, which keep "
            f"other than keys and values of all tokens or a window: {_HINT}"
        )
    original = _length_of_rope(text)
    length = config.max_model_len or int(getattr(text, "max_position_embeddings", None) or 0)
    if original and length > original:
        raise ConfigError(
            f"--max-model-len must be at most {original} in the transformers fallback: the model's "
            f"rope changes for all texts of a step when one is longer; got {length}"
        )


def _length_of_rope(text: Any) -> int:
    """Up to which angles are the same for texts of all lengths; 0: they always are."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for part in parts:
        if part.get("rope_type", part.get("type")) in _ROPES_BY_LENGTH:
            own = part.get("original_max_position_embeddings")
            own = own or getattr(text, "original_max_position_embeddings", None)
            return int(own or text.max_position_embeddings)
    return 0


def probe_layers(model: Any) -> list[AttentionCall]:
    """What each call of the attention interface is like. Raises ModelError."""
    probe = AttentionProbe()
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device=model.device)
    name = type(model).__name__
    model.set_attn_implementation(PROBE)
    try:
        with torch.inference_mode(), answered_by(probe):
            model(
                input_ids=ids,
                position_ids=torch.arange(PROBE_TOKENS, device=model.device)[None],
                use_cache=False,
            )
    except ModelError as error:
        raise ModelError(f"{name}: {error}: {_HINT}") from error
    except Exception as error:  # the model's own code
        raise ModelError(f"{name} failed on a text of {PROBE_TOKENS} tokens: {error!r}") from error
    finally:
        model.set_attn_implementation(PAGED)
    if not probe.calls:
        raise ModelError(f"{name} never calls transformers' attention interface: {_HINT}")
    return probe.calls


def _log_remote_code(folder: Path, model: Mapping[str, Any]) -> None:
    files = _code_of(model)
    if files:
        logger.warning(
            "--trust-remote-code: this process runs code of the model's repository, %s: %s",
            folder, ", ".join(files),
        )  # fmt: skip
    else:
        logger.info("--trust-remote-code: the model's config.json names no code of its own")


def _code_of(model: Mapping[str, Any]) -> list[str]:
    """Classes that config.json says are in files of its repository, as `module.Class`."""
    targets = model.get("auto_map")
    values = targets.values() if isinstance(targets, dict) else ()
    return sorted({text for text in values if isinstance(text, str)})


def _is_remote(settings: Any, auto_class: str = "AutoModelForCausalLM") -> bool:
    return auto_class in (getattr(settings, "auto_map", None) or {})


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:400] or type(error).__name__
