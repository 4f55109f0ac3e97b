"""The files of a model and its tokenizer: what both processes need, without what computes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo_engine.core.expected_files import check_files
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.config import EngineConfig
    from octavo_engine.tokenization.tokenizer import Tokenizer
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)


def resolve(
    config: EngineConfig, progress: Callable[[int, int], None] | None = None
) -> ModelFiles | None:
    """The model's files, fetched if need be; None for the simulator, which has none."""
    if config.device == "sim":
        return None
    from octavo_engine.weights.source import resolve_model

    files = resolve_model(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        progress=progress,
        with_code=config.trust_remote_code,
    )
    check_files(config, files)
    if config.overrides:
        logger.info("Replaced fields of config.json: %s", ", ".join(sorted(config.overrides)))
    return files.with_overrides(config.overrides)


def localized(config: EngineConfig, files: ModelFiles | None) -> EngineConfig:
    """The same settings with the model found: it is not fetched again."""
    if files is None:
        return config
    return config.replace(
        model=str(files.path.absolute()), served_model_names=config.names, revision=None
    )


def load_model_tokenizer(config: EngineConfig, files: ModelFiles | None) -> Tokenizer:
    """Of the simulator, which speaks bytes, when there are no files."""
    if files is None:
        from octavo_engine.tokenization.bytes_tokenizer import ByteTokenizer

        for flag, value in (
            ("--tokenizer", config.tokenizer),
            ("--chat-template", config.chat_template),
        ):
            if value is not None:
                raise ConfigError(f"{flag} has no effect with --device sim; leave it out")
        return ByteTokenizer(config.sim.vocab_size)
    # The simulator needs neither tokenizers nor jinja2.
    from octavo_engine.tokenization.load import load_tokenizer

    return load_tokenizer(files, override=config.tokenizer, chat_template=config.chat_template)
