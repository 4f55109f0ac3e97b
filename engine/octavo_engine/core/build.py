"""The composition root of the core: from settings to an engine that is loaded, sized and warm."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from typing import TYPE_CHECKING

from octavo_engine.backends.backend import (
    BackendLimits,
    DraftsByHeads,
    EncodesAudio,
    ExpectsAdapters,
    LaunchesSteps,
    PipelinesSteps,
    PreparesAdapters,
    TakesAdapters,
)
from octavo_engine.backends.media import TakesMedia
from octavo_engine.core.audio_queue import AudioQueue
from octavo_engine.core.capacity import Capacity, check_context, gib, kv_memory, settle_capacity
from octavo_engine.core.draft_tokenizer import check_draft_tokenizer
from octavo_engine.core.engine import Engine
from octavo_engine.core.extension import require_extension
from octavo_engine.core.identity import architecture_of, format_of, identify, implementation_in
from octavo_engine.core.info import ModelInfo
from octavo_engine.core.kv_events.publisher import KVEventPublisher
from octavo_engine.core.kv_events.recorder import KVEventRecorder
from octavo_engine.core.kv_transfer import kv_identity, use_connector, use_transfer
from octavo_engine.core.make_tiers import build_digest, disk_key, make_tiers, page_sizes
from octavo_engine.core.media.spec import check_picture_overrides
from octavo_engine.core.memory import free_memory
from octavo_engine.core.model_files import load_model_tokenizer, resolve
from octavo_engine.core.state_capacity import MAX_EMPTY_BLOCKS, StateCapacity, settle_states
from octavo_engine.errors import ConfigError
from octavo_engine.executor.uni import UniExecutor
from octavo_engine.kv.needs import KVNeeds
from octavo_engine.kv.states import StateSnapshots
from octavo_engine.scheduling.media import MediaLimits
from octavo_engine.scheduling.scheduler import SPARE_LOGITS, Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import Backend
    from octavo_engine.backends.native.shard import RankPlace
    from octavo_engine.config import EngineConfig, SpeculationConfig
    from octavo_engine.core.adapters import AdapterQueue
    from octavo_engine.core.grammar_queue import GrammarQueue
    from octavo_engine.core.identity import ModelIdentity
    from octavo_engine.grammar.compiler import CompilerSettings
    from octavo_engine.state.kv_source import KVSource
    from octavo_engine.tokenization.tokenizer import Tokenizer
    from octavo_engine.weights.source import ModelFiles

logger = logging.getLogger(__name__)

AUDIO_FRACTION = 0.2  # of what is free once the KV cache is planned, for windows of audio
SPEECH_ARCHITECTURES = ("WhisperForConditionalGeneration",)

MEDIA_CACHE_BYTES = 128 << 20  # for rows of pictures that may come again
MIN_MEDIA = 4  # of the largest pictures there is room for at least


def build_engine(
    config: EngineConfig,
    *,
    files: ModelFiles | None = None,
    progress: Callable[[int, int], None] | None = None,
    backend: Backend | None = None,
    peers: RankPlace | None = None,
    now: Callable[[], float] = time.monotonic,
) -> tuple[Engine, ModelInfo]:
    """Load, size and warm up. Raises ConfigError or ModelError; then nothing is left behind.

    `files` are those of the settings' model, where they were found before. A `backend` that is
    given is used, and closed, instead of the one that the settings name. With `peers` it computes
    some of the experts for other cores too.
    """
    started = time.monotonic()
    files = files or resolve(config)
    identity = identify(config, files)
    check_context(config, identity.own_max_model_len)
    check_draft_tokenizer(config, files)
    check_speech(config, files)
    check_picture_overrides(files, config.picture_overrides)
    if backend is None:
        if config.device in ("auto", "cpu"):
            require_extension()
        backend = _build_backend(config, files, progress, peers)
    try:
        capacity = _capacity(config, backend, identity.own_max_model_len)
        cache_key = _cache_key(identity, backend)
        engine = _assemble(
            config, backend, capacity, cache_key, now,
            lambda: load_model_tokenizer(config, files), identity.eos_token_ids,
        )  # fmt: skip
        engine.warm_up()
        kv_source, kv_store = _use_tiers(config, backend, engine, identity, cache_key, now)
        if config.kv_events.is_on:
            engine.tell_kv_events(KVEventRecorder(), KVEventPublisher(config.kv_events))
    except BaseException:
        backend.close()
        raise
    kv_bytes = 0 if config.device == "sim" else capacity.num_blocks * backend.kv_bytes_per_block
    info = ModelInfo(
        names=config.names,
        max_model_len=capacity.max_model_len,
        vocab_size=backend.vocab_size,
        eos_token_ids=identity.eos_token_ids,
        num_blocks=capacity.num_blocks,
        kv_bytes=kv_bytes,
        num_cache_groups=len(backend.cache_layout.groups),
        backend=backend.name,
        default_params=identity.default_params,
        load_seconds=time.monotonic() - started,
        architecture=architecture_of(files),
        implementation=implementation_in(config, files),
        format=format_of(config, files),
        cache_key=cache_key,
        sees=media_limits(config, backend) is not None,
        tasks=("generate",) if identity.speech is None else ("transcribe",),
        speech=identity.speech,
        kv_source=kv_source,
        kv_store=kv_store,
    )
    logger.info(
        "Loaded %s on %s in %.1f s: %s, %s",
        info.names[0], info.backend, info.load_seconds, capacity.note,
        _memory_note(kv_bytes, config),
    )  # fmt: skip
    return engine, info


def _cache_key(identity: ModelIdentity, backend: Backend) -> bytes:
    return hashlib.blake2b(identity.digest + backend.name.encode(), digest_size=16).digest()


def _use_tiers(
    config: EngineConfig,
    backend: Backend,
    engine: Engine,
    identity: ModelIdentity,
    cache_key: bytes,
    now: Callable[[], float],
) -> tuple[KVSource | None, str]:
    """Hold KV blocks beside the pool, as the settings say. Returns where others get them, and the
    id of the store that engines share."""
    tiers = make_tiers(config, backend, engine.scheduler, cache_key, now)
    if tiers is None:
        return None, ""
    engine.use_tiers(tiers)
    store_id = next((tier.store_id for tier in tiers.stored if tier.store_id), "")
    if config.kv_transfer is None:
        return None, store_id
    if not config.kv_transfer.is_own:
        use_connector(
            config.kv_transfer,
            tiers,
            key=disk_key(cache_key, backend),
            page_bytes=backend.kv_bytes_per_block,
            model=config.names[0],
        )
        return None, store_id
    facts = kv_identity(identity.parts, backend, build_digest(backend))
    source = use_transfer(config.kv_transfer, tiers, facts, page_sizes(backend))
    return source, store_id


def _build_backend(
    config: EngineConfig,
    files: ModelFiles | None,
    progress: Callable[[int, int], None] | None,
    peers: RankPlace | None,
) -> Backend:
    if config.num_ranks > 1 and config.device != "sim":  # which computes for all of them
        from octavo_engine.executor.leader import start_ranks

        assert files is not None, "only the simulator has none"
        return start_ranks(config, files, progress)
    from octavo_engine.backends.registry import build_backend

    return build_backend(config, files, progress, peers)


def _media_bytes(config: EngineConfig, backend: Backend) -> int:
    """For rows of pictures and for encoding one, beside the KV cache."""
    limits = media_limits(config, backend)
    if limits is None or not isinstance(backend, TakesMedia) or backend.media is None:
        return 0
    return limits.cache_bytes + backend.media.work_bytes


def _memory_note(kv_bytes: int, config: EngineConfig) -> str:
    if not kv_bytes:
        return "no memory"
    is_plain = config.kv_cache_dtype == "auto"
    return f"{gib(kv_bytes)} of memory" + ("" if is_plain else f" in {config.kv_cache_dtype}")


def _capacity(config: EngineConfig, backend: Backend, own_max_model_len: int) -> Capacity:
    """Measured now, after loading: what is free is what is really there."""
    length = config.max_model_len or own_max_model_len
    states = StateCapacity(config.scheduler.max_num_seqs, 0, 0)
    if config.device == "sim":
        max_blocks, where = config.sim.kv_blocks, "the simulated KV pool"
    else:
        own_memory = backend.kv_memory(_limits(config, length), config.memory_fraction)
        memory = (
            kv_memory(config, free_memory() - _media_bytes(config, backend))
            if own_memory is None
            else config.kv_cache_memory_bytes or own_memory
        )
        block_bytes = backend.kv_bytes_per_block
        states = settle_states(
            config.scheduler,
            memory,
            state_bytes=backend.cache_layout.state_bytes,
            length=length,
            has_pages=block_bytes > 0,
            num_drafts=0 if config.speculation is None else SPARE_LOGITS,
        )
        max_blocks = states.memory // block_bytes if block_bytes else MAX_EMPTY_BLOCKS
        where = f"the KV cache of {gib(memory)}"
    needs = KVNeeds(
        backend.cache_layout.windows,
        _max_under_way(config, backend) * config.scheduler.max_num_batched_tokens,
    )
    capacity = settle_capacity(
        config, needs, own_max_model_len=own_max_model_len, max_blocks=max_blocks, where=where
    )
    if not states.note:
        return capacity
    return capacity._replace(
        note=f"{capacity.note}, {states.note}",
        max_num_seqs=states.max_num_seqs,
        num_snapshots=states.num_snapshots,
    )


def _assemble(
    config: EngineConfig,
    backend: Backend,
    capacity: Capacity,
    cache_key: bytes,
    now: Callable[[], float],
    make_tokenizer: Callable[[], Tokenizer],
    eos_token_ids: tuple[int, ...],
) -> Engine:
    settings = dataclasses.replace(
        config.scheduler,
        max_model_len=capacity.max_model_len,
        max_num_seqs=capacity.max_num_seqs or config.scheduler.max_num_seqs,
    )
    limits = _limits(config, capacity.max_model_len)
    states = None
    if capacity.max_num_seqs:
        states = StateSnapshots(capacity.max_num_seqs, capacity.num_snapshots)
        limits = dataclasses.replace(
            limits,
            max_seqs=capacity.max_num_seqs,
            num_state_slots=capacity.max_num_seqs + capacity.num_snapshots,
        )
    executor = UniExecutor(
        backend, scheduler_config=settings, limits=limits, num_blocks=capacity.num_blocks
    )
    scheduler = Scheduler(
        settings,
        num_blocks=capacity.num_blocks,
        windows=backend.cache_layout.windows,
        states=states,
        max_under_way=_max_under_way(config, backend),
        num_stages=backend.num_stages if isinstance(backend, PipelinesSteps) else 1,
        cache_key=cache_key,
        speculation=_speculation(config, backend),
        num_adapter_slots=config.max_loras if config.enable_lora else 0,
        media=media_limits(config, backend),
        now=now,
    )
    launches = executor if _runs_ahead(config, backend, executor) else None
    under_way = _max_under_way(config, backend)
    engine = Engine(
        scheduler,
        executor,
        launches=launches,
        max_under_way=under_way,
        counts_experts=config.expert_metrics,
        now=now,
    )
    if isinstance(backend, EncodesAudio) and backend.feature_shape is not None:
        num_slots = _audio_slots(config, backend)
        backend.prepare_audio(num_slots)
        max_waiting = config.scheduler.max_queue
        engine.use_audio(AudioQueue(backend, num_slots, max_waiting=max_waiting, now=now))
    if config.enable_lora:
        engine.use_adapters(_make_adapters(config, backend, now))
    engine.use_grammars(
        lambda: make_grammars(
            make_tokenizer, vocab_size=backend.vocab_size, eos_token_ids=eos_token_ids, now=now
        )
    )
    return engine


def _speculation(config: EngineConfig, backend: Backend) -> SpeculationConfig | None:
    """Heads draft no more tokens than there are of them."""
    speculation = config.speculation
    if speculation is None or not isinstance(backend, DraftsByHeads) or not backend.num_heads:
        return speculation
    count = min(speculation.num_speculative_tokens, backend.num_heads)
    return dataclasses.replace(speculation, num_speculative_tokens=count)


def _audio_slots(config: EngineConfig, backend: EncodesAudio) -> int:
    """Windows of audio in memory: as many as sequences can run, if a part of what is free does."""
    fits = int(AUDIO_FRACTION * free_memory()) // backend.audio_slot_bytes
    if fits < 1:
        raise ConfigError(
            f"a window of audio takes {gib(backend.audio_slot_bytes)} of memory, and "
            f"{gib(free_memory())} are free"
        )
    return min(fits, config.scheduler.max_num_seqs)


def check_speech(config: EngineConfig, files: ModelFiles | None) -> None:
    """Raises ConfigError for what models that read audio cannot be combined with."""
    if files is None or architecture_of(files) not in SPEECH_ARCHITECTURES:
        return
    for flag, is_set in (
        (config.ranks_flag, config.num_ranks > 1),
        ("--enable-lora", config.enable_lora),
        ("--speculative-config", config.speculation is not None),
        (f"--device {config.device}", config.device not in ("auto", "cpu", "torch")),
    ):
        if is_set:
            raise ConfigError(f"{flag} is not available for models that read audio; leave it out")


def media_limits(config: EngineConfig, backend: Backend) -> MediaLimits | None:
    """None where the model does not see, or the backend does not compute that."""
    if not isinstance(backend, TakesMedia) or backend.media is None:
        return None
    media = backend.media.config
    least_tokens = config.scheduler.max_num_seqs + 2 * media.num_rows
    if media.is_two_way and config.scheduler.max_num_batched_tokens < least_tokens:
        raise ConfigError(  # beside answers and drafts
            f"--max-num-batched-tokens must be at least {least_tokens} for this model and "
            f"--max-num-seqs {config.scheduler.max_num_seqs}: a step computes all "
            f"{media.num_rows} tokens of a picture; or refuse pictures by --limit-mm-per-prompt "
            "image=0"
        )
    row_bytes = 4 * media.row_columns
    least = MIN_MEDIA * media.num_rows * row_bytes
    gib = config.mm_processor_cache_gb
    given = MEDIA_CACHE_BYTES if gib is None else int(gib * 2**30)
    return MediaLimits(row_bytes, max(given, least))


def _make_adapters(
    config: EngineConfig, backend: Backend, now: Callable[[], float]
) -> AdapterQueue:
    from octavo_engine.core.adapters import AdapterQueue

    if not isinstance(backend, TakesAdapters):
        raise ConfigError(f"--enable-lora: the backend {backend.name} takes no adapters")
    return AdapterQueue(
        backend.pack_adapter,
        max_held=config.num_held_adapters,
        max_rank=config.max_lora_rank,
        expect=backend.expect_adapter if isinstance(backend, ExpectsAdapters) else None,
        prepare=backend.prepare_adapter if isinstance(backend, PreparesAdapters) else None,
        now=now,
    )


def _max_under_way(config: EngineConfig, backend: Backend) -> int:
    """Batches that may be planned and not reported yet."""
    if not isinstance(backend, LaunchesSteps) or config.async_scheduling is False:
        return 1
    return backend.num_stages if isinstance(backend, PipelinesSteps) else 2


def _runs_ahead(config: EngineConfig, backend: Backend, executor: UniExecutor) -> bool:
    """Raises ConfigError if that was requested and cannot be."""
    if config.async_scheduling is None:
        knows_tokens = isinstance(backend, PipelinesSteps)  # so that more can be guessed
        return executor.launch_gains and (knows_tokens or config.speculation is None)
    if config.async_scheduling and not executor.can_launch:
        raise ConfigError(
            f"--async-scheduling is of --device cuda and plugin; --device {config.device} computes "
            "each step while the host waits: leave it out"
        )
    return config.async_scheduling


def make_grammars(
    make_tokenizer: Callable[[], Tokenizer],
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    settings: CompilerSettings | None = None,
    now: Callable[[], float] = time.monotonic,
) -> GrammarQueue:
    """What compiles grammars for a model. Its vocabulary is read with the first one."""
    from octavo_engine.core.grammar_queue import GrammarQueue
    from octavo_engine.grammar.compiler import GrammarCompiler
    from octavo_engine.grammar.vocabulary import Vocabulary

    def make_vocabulary() -> Vocabulary:
        return Vocabulary(make_tokenizer(), vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    return GrammarQueue(GrammarCompiler(make_vocabulary, settings, now=now), now=now)


def _limits(config: EngineConfig, max_model_len: int) -> BackendLimits:
    settings = config.scheduler
    return BackendLimits(
        max_tokens=settings.max_num_batched_tokens,
        max_seqs=settings.max_num_seqs,
        max_logit_rows=settings.max_num_seqs + SPARE_LOGITS,
        max_model_len=max_model_len,
    )
