"""What a model is, as far as the core needs to know before its weights are read."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo_engine.core.info import SpeechInfo
from octavo_engine.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo_engine.config import EngineConfig
    from octavo_engine.models.implementation import Implementation
    from octavo_engine.weights.source import ModelFiles

_SIM_EOS = 257  # of ByteTokenizer

# generation_config.json's names for our sampling parameters.
_DEFAULT_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_INTEGERS = ("top_k", "max_tokens")


class ModelIdentity(NamedTuple):
    """Facts from the model's files, weights aside."""

    own_max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_params: dict[str, int | float]
    speech: SpeechInfo | None
    digest: bytes  # 16 bytes; covers whatever makes two models' KV differ
    parts: dict[str, str]  # a digest of each fact that it covers, to say which one differs


def identify(config: EngineConfig, files: ModelFiles | None) -> ModelIdentity:
    """Of the simulator, which has no files, when they are None."""
    if files is None:
        facts = {"sim": config.names[0], "vocab": config.sim.vocab_size}
        own = config.max_model_len or config.scheduler.max_model_len
        return ModelIdentity(own, (_SIM_EOS,), {}, None, _digest(facts), _parts(facts))
    from octavo_engine.weights.fingerprint import fingerprint

    implementation = implementation_in(config, files)
    own_length, eos = _shape(config, files, implementation)
    generation_eos = _ids(files.generation_config.get("eos_token_id"))
    facts = {
        "config": files.config,
        "weights": None if config.load_format == "dummy" else fingerprint(files.path),
        "tokenizer": config.tokenizer,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "activation_bits": config.activation_bits,
        "kv_cache_dtype": config.kv_cache_dtype,
        "device": config.device,
        "load_format": "dummy" if config.load_format == "dummy" else "auto",
        "seed": config.seed if config.load_format == "dummy" else None,
    }
    if implementation == "transformers":
        facts["implementation"] = implementation
    if (draft := _draft_facts(config)) is not None:  # a block holds the draft layers too
        facts["draft"] = draft
    return ModelIdentity(
        own_length,
        tuple(dict.fromkeys((*eos, *generation_eos))),
        default_params(files.generation_config),
        _speech(files, implementation),
        _digest(facts),
        _parts(facts),
    )


def _draft_facts(config: EngineConfig) -> list[Any] | None:
    """Of what has layers in the cache beside the model's. Raises ModelError."""
    draft = config.draft or config.draft_head
    if draft is None:
        return None
    if draft.method == "mtp":  # its files are the model's
        return [draft.method, draft.quantization]
    from octavo_engine.weights.fingerprint import fingerprint
    from octavo_engine.weights.source import resolve_model

    files = resolve_model(draft.model, revision=draft.revision, download_dir=config.download_dir)
    facts = [files.config, fingerprint(files.path), draft.quantization]
    return facts if draft.method == "draft_model" else [draft.method, *facts]


def _speech(files: ModelFiles, implementation: Implementation) -> SpeechInfo | None:
    from octavo_engine.backends.alignment import alignment_heads
    from octavo_engine.models.config import ModelConfig

    if implementation == "transformers":
        return None
    shape = ModelConfig.from_hf(files.config)
    if shape.speech is None:
        return None
    given = files.generation_config or files.config
    return SpeechInfo(
        num_mels=shape.speech.num_mels,
        num_frames=shape.speech.num_frames,
        suppressed=_ids(given.get("suppress_tokens")),
        suppressed_at_begin=_ids(given.get("begin_suppress_tokens")),
        num_aligned_heads=len(alignment_heads(files, shape)),
    )


def implementation_in(config: EngineConfig, files: ModelFiles | None) -> Implementation:
    """Who computes the model. Raises ConfigError and ModelError."""
    if files is None:
        return "octavo"
    from octavo_engine.models.implementation import implementation_of

    return implementation_of(config, files.config, is_gguf=files.gguf is not None)


def _shape(
    config: EngineConfig, files: ModelFiles, implementation: Implementation
) -> tuple[int, tuple[int, ...]]:
    """Tokens that the model was made for, and those that end a text."""
    if implementation == "transformers":
        from octavo_engine.backends.torch.fallback.model import read_shape

        try:
            return read_shape(config, files.path, files.config)
        except ModelError as error:
            if config.model_impl == "transformers":
                raise
            raise ModelError(
                f"config.json: architecture {architecture_of(files)!r} is not supported here, and "
                f"the fallback to transformers fails: {error}"
            ) from error
    from octavo_engine.models.config import ModelConfig

    shape = ModelConfig.from_hf(files.config)
    return shape.max_position_embeddings, shape.eos_token_ids


def default_params(generation_config: Mapping[str, Any]) -> dict[str, int | float]:
    """Sampling parameters that the model's makers recommend; what is no number is passed over."""
    found: dict[str, int | float] = {}
    for theirs, ours in _DEFAULT_PARAMS.items():
        value = generation_config.get(theirs)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            continue
        found[ours] = int(value) if ours in _INTEGERS else float(value)
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def architecture_of(files: ModelFiles | None) -> str:
    """The class that config.json names; empty for the simulator."""
    names = files.config.get("architectures") if files is not None else None
    return str(names[0])[:128] if isinstance(names, list) and names else ""


def format_of(config: EngineConfig, files: ModelFiles | None) -> str:
    """How the weights are stored and, where that differs, kept: safetensors gptq int4."""
    if files is None:
        return ""
    if config.load_format == "dummy":
        return "dummy"
    words: list[str] = [files.kind]
    quantization = files.config.get("quantization_config")
    if isinstance(quantization, dict):
        words.append(str(quantization.get("quant_method"))[:32])
        bits = quantization.get("bits")
        words += [f"int{bits}"] if isinstance(bits, int) else []
    elif words == ["safetensors"]:
        stored = files.config.get("dtype") or files.config.get("torch_dtype")
        words += [stored[:32]] if isinstance(stored, str) else []
    kept = config.quantization in ("int8", "int4")
    return " ".join(words) + (f", {config.quantization} in memory" if kept else "")


def _ids(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _parts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: _digest({name: value}).hex() for name, value in facts.items()}


def _digest(facts: Mapping[str, Any]) -> bytes:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
