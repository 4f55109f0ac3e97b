"""Who computes a model: a page of this package (or of a plug-in), or transformers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.encoder_config import encoder_family
from octavo_engine.models.families import FAMILIES
from octavo_engine.models.plugins import plugin_architectures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.config import EngineConfig

Implementation = Literal["octavo", "transformers"]

_PACKAGES = ("torch", "transformers")
_INSTALL = "pip install torch transformers"
_DEVICES = ("auto", "cpu", "torch", "cuda")


def implementation_of(
    config: EngineConfig, model: Mapping[str, Any], *, is_gguf: bool = False
) -> Implementation:
    """Of the model with this config.json, as --model-impl has it. Raises ConfigError and
    ModelError that say what is missing."""
    names = model.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    has_page = not isinstance(architecture, str) or _has_page(architecture)
    wanted = config.model_impl
    if wanted == "octavo" or (wanted == "auto" and (has_page or is_gguf)):
        if config.trust_remote_code:
            raise ConfigError(
                "--trust-remote-code is for models that transformers computes, and this one is "
                "computed here, where no code of a model's repository is run: leave it out, or use "
                "--model-impl transformers"
            )
        return "octavo"
    if is_gguf:
        raise ConfigError("--model-impl transformers takes a folder of safetensors, not a GGUF")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing and wanted == "auto":
        raise ModelError(
            f"config.json: architecture {architecture!r} is not supported here, and the fallback "
            f"to transformers needs {' and '.join(missing)}: {_INSTALL}"
        )
    if missing:
        raise ConfigError(f"--model-impl transformers needs {' and '.join(missing)}: {_INSTALL}")
    _check_settings(config)
    return "transformers"


def _has_page(architecture: str) -> bool:
    return (
        architecture in FAMILIES
        or encoder_family(architecture) is not None
        or any(f"{stem}ForCausalLM" in FAMILIES for stem in _stems(architecture))
        or architecture in plugin_architectures()
    )


def _stems(architecture: str) -> list[str]:
    """Of classes that pool with the body of one that generates."""
    endings = ("TextModel", "Model", "ForSequenceClassification")
    return [architecture.removesuffix(end) for end in endings if architecture.endswith(end)]


def _check_settings(config: EngineConfig) -> None:
    """Raises ConfigError for what only our own pages do."""
    dtype_only = ("auto", config.dtype)
    for flag, is_fine, advice in (
        (f"--device {config.device}", config.device in _DEVICES, "use cpu or cuda"),
        (f"--quantization {config.quantization}", config.quantization in ("auto", "none"),
         "leave it out"),
        ("--activation-bits 8", config.activation_bits == 16, "leave it out"),
        (f"--kv-cache-dtype {config.kv_cache_dtype}", config.kv_cache_dtype in dtype_only,
         "the KV cache has the dtype of the model: leave it out"),
        ("--enable-lora", not config.enable_lora, "merge the adapter into the model"),
        (config.ranks_flag, config.num_ranks == 1, "leave it out"),
        ("--batch-invariant", not config.batch_invariant, "leave it out"),
    ):  # fmt: skip
        if not is_fine:
            raise ConfigError(
                f"{flag} is not available for a model that transformers computes "
                f"(--model-impl): {advice}"
            )
