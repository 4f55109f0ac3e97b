"""A draft model must write what the model reads: their vocabularies are compared at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo_engine.config import EngineConfig
    from octavo_engine.tokenization.tokenizer import Tokenizer
    from octavo_engine.weights.source import ModelFiles


def check_draft_tokenizer(config: EngineConfig, files: ModelFiles | None) -> None:
    """Raises ConfigError that names the first token that differs, and ModelError. A draft model
    that comes without a tokenizer is taken to share the model's."""
    draft = config.draft
    if draft is None or files is None:
        return
    from octavo_engine.tokenization.load import load_tokenizer
    from octavo_engine.weights.source import resolve_model

    draft_files = resolve_model(
        draft.model, revision=draft.revision, download_dir=config.download_dir
    )
    if draft_files.gguf is None and not (draft_files.path / "tokenizer.json").exists():
        return
    own = load_tokenizer(files, override=config.tokenizer)
    check_same_tokens(own, load_tokenizer(draft_files), draft.model)


def check_same_tokens(own: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raises ConfigError. One vocabulary may have more special tokens behind the other's."""
    for token in range(min(own.vocab_size, draft.vocab_size)):
        if own.token_bytes(token) != draft.token_bytes(token):
            raise ConfigError(
                f"--speculative-config: the draft model {name} has another tokenizer than the "
                f"model: token {token} is {draft.token_name(token)!r:.40} there and "
                f"{own.token_name(token)!r:.40} here; choose a draft model of the same family"
            )
