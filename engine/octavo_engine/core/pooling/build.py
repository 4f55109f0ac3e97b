"""From settings to a pooling engine that is loaded and warm, as `core.build` for generation."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from typing import TYPE_CHECKING

from octavo_engine.backends.registry import check_activation_bits
from octavo_engine.core.capacity import check_context
from octavo_engine.core.identity import architecture_of, format_of, implementation_in
from octavo_engine.core.info import ModelInfo
from octavo_engine.core.pooling.engine import PoolingEngine, PoolingLimits
from octavo_engine.errors import ConfigError
from octavo_engine.models.pooling_config import LibraryBody
from octavo_engine.weights.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.pooling import PoolingBackend
    from octavo_engine.config import EngineConfig
    from octavo_engine.models.pooling_config import PoolingConfig
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)

# A step must hold the longest text. Some models could take far longer ones than clients send, and
# the memory for them would lie idle; --max-model-len allows them.
LONGEST_BY_DEFAULT = 8192


def pooling_config(config: EngineConfig, files: ModelFiles | None) -> PoolingConfig | None:
    """What the model is if it pools; None of one that generates. Raises ModelError."""
    if files is None:
        if config.sim.task == "generate":
            return None
        from octavo_engine.backends.sim.pooling import sim_pooling_config

        return sim_pooling_config(config)
    from octavo_engine.models.pooling_config import (
        pooling_by_library,
        pools_by_class,
        read_pooling,
        refuse_by_name,
    )

    refuse_by_name(files.config)
    folder = files.path if files.path.is_dir() else None
    if folder is None or not pools_by_class(files.config, folder):
        return read_pooling(files.config, folder)
    if implementation_in(config, files) == "transformers":
        from octavo_engine.backends.torch.fallback.texts import read_body

        return pooling_by_library(files.config, folder, read_body(config, folder, files.config))
    return read_pooling(files.config, folder)


def build_pooling_engine(
    config: EngineConfig,
    pooling: PoolingConfig,
    files: ModelFiles | None,
    *,
    progress: Callable[[int, int], None] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> tuple[PoolingEngine, ModelInfo]:
    """Load, size and warm up. Raises ConfigError or ModelError; then nothing is left behind."""
    started = time.monotonic()
    if config.num_ranks > 1:
        raise ConfigError(
            f"{config.ranks_flag} is for models that generate, and this one pools; leave it out"
        )
    if config.enable_expert_parallel:
        raise ConfigError(
            "--enable-expert-parallel is for models that generate, and this one pools; leave it out"
        )
    check_context(config, pooling.body.max_position_embeddings)
    max_model_len = config.max_model_len or min(pooling.max_length, LONGEST_BY_DEFAULT)
    backend = _backend(config, pooling, files, max_model_len, progress)
    settings = config.scheduler
    limits = PoolingLimits(
        max_model_len=max_model_len,
        max_tokens=max(settings.max_num_batched_tokens, max_model_len),
        max_texts=settings.max_num_seqs,
        max_queue=settings.max_queue,
    )
    try:
        engine = PoolingEngine(backend, limits, now=now)
        engine.warm_up()
    except BaseException:
        backend.close()
        raise
    info = ModelInfo(
        names=config.names,
        max_model_len=max_model_len,
        vocab_size=pooling.body.vocab_size,
        eos_token_ids=(),
        num_blocks=0,
        kv_bytes=0,
        backend=backend.name,
        default_params={},
        load_seconds=time.monotonic() - started,
        architecture=architecture_of(files),
        implementation=implementation_in(config, files),
        format=format_of(config, files),
        tasks=pooling.tasks,
        embedding_size=0 if pooling.is_classifier else pooling.num_columns,
        dimensions=pooling.dimensions,
        labels=pooling.labels,
        prompts=dict(pooling.prompts),
        default_prompt=pooling.default_prompt,
        similarity=pooling.similarity,
        cache_key=_cache_key(config, files),
    )
    logger.info(
        "Loaded %s on %s in %.1f s: %s, texts of up to %d tokens, %d tokens a step",
        info.names[0], info.backend, info.load_seconds, " and ".join(info.tasks),
        limits.max_model_len, limits.max_tokens,
    )  # fmt: skip
    return engine, info


def _backend(
    config: EngineConfig,
    pooling: PoolingConfig,
    files: ModelFiles | None,
    max_model_len: int,
    progress: Callable[[int, int], None] | None,
) -> PoolingBackend:
    for flag, is_set, why in (
        ("--kv-cache-dtype", config.kv_cache_dtype != "auto", "keeps no KV cache"),
        ("--speculative-config", config.speculation is not None, "generates no tokens"),
    ):
        if is_set:
            model = "a model for embeddings and scores"
            raise ConfigError(f"{flag} has no effect on {model}, which {why}; leave it out")
    if files is None:
        check_activation_bits(config)
        from octavo_engine.backends.sim.pooling import SimPoolingBackend

        return SimPoolingBackend(config, pooling)
    if config.device in ("auto", "cpu") and not isinstance(pooling.body, LibraryBody):
        from octavo_engine.core.extension import require_extension

        require_extension()
    from octavo_engine.backends.pooling_registry import build_pooling_backend

    return build_pooling_backend(
        config, pooling, files, max_model_len=max_model_len, progress=progress
    )


def _cache_key(config: EngineConfig, files: ModelFiles | None) -> bytes:
    """There is no cache; still, two models should not look like one."""
    facts: dict[str, object] = {"names": config.names}
    if files is not None:
        is_dummy = config.load_format == "dummy"
        facts |= {
            "config": files.config,
            "weights": None if is_dummy else fingerprint(files.path),
        }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
