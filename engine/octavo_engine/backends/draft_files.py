"""From the settings to the weights of a model, and of the draft model beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.backends.draft_part import DraftPart
from octavo_engine.backends.text_part import TextPart
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig
from octavo_engine.models.decoder_names import under_our_names
from octavo_engine.weights.open import open_checkpoint

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.weights.checkpoint import Checkpoint
    from octavo_engine.weights.source import ModelFiles


_HEADS = "a set of heads"
_DEVICES = ("auto", "cpu", "cuda", "torch")


def open_weights(config: EngineConfig, model: ModelConfig, files: ModelFiles) -> Checkpoint:
    """The model's weights under our names."""
    checkpoint = open_checkpoint(files, load_format=config.load_format, seed=config.seed)
    if config.load_format == "dummy":
        return checkpoint  # has whatever is requested
    if model.is_part:
        checkpoint = TextPart(checkpoint)
    # A GGUF's names are ours already.
    return checkpoint if files.kind == "gguf" else under_our_names(model, checkpoint)


def check_draft_device(config: EngineConfig, *, is_fallback: bool = False) -> None:
    """Raises ConfigError where a draft model or heads are named that the device does not compute,
    or transformers, the fallback."""
    if config.draft is None and config.draft_head is None and config.heads is None:
        return
    what = "a draft model" if config.draft else "a draft head" if config.draft_head else _HEADS
    if is_fallback:
        raise ConfigError(
            f"--speculative-config: a model that transformers computes does not take {what}; use "
            "the method ngram"
        )
    if config.device not in _DEVICES:
        raise ConfigError(
            f"--speculative-config: {what} is computed by --device cpu, cuda and torch only; with "
            f"--device {config.device} use the method ngram"
        )
    speculation = config.speculation
    stored = "auto" if speculation is None else speculation.quantization
    if config.device == "cuda" and stored in ("int8", "int4"):
        raise ConfigError(
            f"--speculative-config: quantization {stored} is computed by --device cpu only; "
            "--device cuda takes auto or none"
        )
    if config.num_ranks > 1:
        raise ConfigError(
            f"--speculative-config: {what} is not computed with {config.ranks_flag}; with several "
            "ranks use the method ngram"
        )


def open_draft(config: EngineConfig, model: ModelConfig) -> DraftPart | None:
    """The draft model that the settings name, if any. Raises ConfigError where it does not fit the
    model, and ModelError."""
    speculation = config.draft
    if speculation is None:
        return None
    from octavo_engine.weights.source import resolve_model

    check_draft_device(config)
    files = resolve_model(
        speculation.model, revision=speculation.revision, download_dir=config.download_dir
    )
    draft = ModelConfig.from_hf(files.config)
    if draft.recurrent is not None:
        raise ConfigError(
            f"--speculative-config: the draft model {speculation.model} ({draft.architecture}) has "
            "layers with recurrent states, which no draft model can have: name another one"
        )
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"--speculative-config: the draft model {speculation.model} has {draft.vocab_size} "
            f"tokens and the model {model.vocab_size}: choose a draft model of the same family, "
            "with the same tokenizer"
        )
    length = config.max_model_len or model.max_position_embeddings
    if draft.max_position_embeddings < length:
        raise ConfigError(
            f"--speculative-config: the draft model {speculation.model} is for "
            f"{draft.max_position_embeddings} tokens and the model is served with {length}: set "
            f"--max-model-len {draft.max_position_embeddings}"
        )
    return DraftPart(draft, open_weights(config, draft, files), speculation.quantization)
