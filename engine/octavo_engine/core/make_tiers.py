"""From the settings to the tiers of KV blocks, and to what tells blocks of two engines apart."""

from __future__ import annotations

import hashlib
import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from octavo_engine.backends.backend import CopiesKV, MovesKV, MovesStates, NamesBuild
from octavo_engine.core.kv_tiers import KVTiers
from octavo_engine.core.tier_fetch import StoredTier
from octavo_engine.encryption import read_encryption_keys
from octavo_engine.errors import ConfigError
from octavo_engine.protocol.kv_events import DISK_MEDIUM, SHARED_MEDIUM
from octavo_engine.tiers.host_store import HostStore
from octavo_engine.tiers.page import PageSizes
from octavo_engine.tiers.price import TierMeter
from octavo_engine.tiers.run_folder import LocalFolder
from octavo_engine.tiers.run_store import RunStore
from octavo_engine.tiers.shared_store import open_shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.backends.backend import Backend, BlockCopies
    from octavo_engine.config import EngineConfig
    from octavo_engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

# What is assumed before anything was read: low, so that no more than a little time can be lost.
DISK_LATENCY_S, DISK_BYTES_PER_S = 5e-3, 2e8
GIB = 1 << 30


def make_tiers(
    config: EngineConfig,
    backend: Backend,
    scheduler: Scheduler,
    cache_key: bytes,
    now: Callable[[], float] = time.monotonic,
) -> KVTiers | None:
    """The tiers that the settings name; None without any. Raises ConfigError."""
    if not config.has_kv_tiers:
        return None
    _check_supported(config, backend, scheduler)
    assert isinstance(backend, MovesKV)
    sizes = page_sizes(backend)
    host_bytes = int(config.kv_offloading_size * GIB)
    open_copies = None
    if isinstance(backend, CopiesKV) and sizes.block:
        is_stored = config.kv_disk_path is not None or config.kv_shared_store is not None
        open_copies = partial(_open_copies, backend, host_bytes, is_stored=is_stored)
    stored: list[StoredTier] = []
    try:
        if config.kv_disk_path is not None:
            stored.append(_disk_tier(config, config.kv_disk_path, cache_key, backend))
        if config.kv_shared_store is not None:
            stored.append(_shared_tier(config, config.kv_shared_store, cache_key, backend))
    except BaseException:
        for tier in stored:
            tier.store.close()
        raise
    return KVTiers(
        scheduler.kv,
        backend,
        sizes=sizes,
        states=backend if isinstance(backend, MovesStates) else None,
        host=HostStore(host_bytes) if config.kv_offloading_size else None,
        stored=tuple(stored),
        will_compute=scheduler.will_compute,
        publish_tails=scheduler.publish_tails,
        now=now,
        open_copies=open_copies,
    )


def _check_supported(config: EngineConfig, backend: Backend, scheduler: Scheduler) -> None:
    """Raises ConfigError."""
    flags = [
        flag
        for flag, is_set in (
            ("--kv-offloading-size", config.kv_offloading_size > 0),
            ("--kv-disk-path", config.kv_disk_path is not None),
            ("--kv-shared-store", config.kv_shared_store is not None),
            ("--kv-transfer-config", config.kv_transfer is not None),
        )
        if is_set
    ]
    them = "them" if len(flags) > 1 else "it"
    named = f"{' and '.join(flags)} {'are' if len(flags) > 1 else 'is'}"
    if config.device == "plugin":
        raise ConfigError(
            f"{named} not supported by --device plugin yet: leave {them} out, or use --device cuda "
            "or cpu"
        )
    if not isinstance(backend, MovesKV):
        raise ConfigError(
            f"{named} not supported by the backend {backend.name}: leave {them} out; models with a "
            "page of ours have them with --device cpu and --tensor-parallel-size 1, cuda, torch or "
            "sim"
        )
    if scheduler.kv.states is None:
        return
    if not isinstance(backend, MovesStates):
        raise ConfigError(
            f"{named} not supported for models with recurrent states by the backend "
            f"{backend.name}: leave {them} out, or use --device cpu or cuda"
        )
    if config.kv_transfer is not None and not config.kv_transfer.is_own:
        raise ConfigError(
            "a kv_connector of another package takes no recurrent states, which this model has: "
            "use OctavoConnector, --kv-offloading-size, --kv-disk-path or --kv-shared-store"
        )


def page_sizes(backend: Backend) -> PageSizes:
    return PageSizes(backend.kv_bytes_per_block, backend.cache_layout.state_bytes)


def _disk_tier(config: EngineConfig, path: str, cache_key: bytes, backend: Backend) -> StoredTier:
    """Raises ConfigError."""
    key = disk_key(cache_key, backend)
    meter = TierMeter(latency_s=DISK_LATENCY_S, bytes_per_s=DISK_BYTES_PER_S)
    try:
        store = RunStore(
            LocalFolder(Path(path), key),
            key,
            sizes=page_sizes(backend),
            max_bytes=int(config.kv_disk_size * GIB),
            encryption=read_encryption_keys(config.encryption_key_file),
        )
    except OSError as error:
        raise ConfigError(
            f"--kv-disk-path {path} cannot be used: {error.strerror or error}"
        ) from None
    logger.info("%d KV blocks are on disk in %s", store.num_blocks, path)
    return StoredTier("disk", DISK_MEDIUM, store, meter)


def _shared_tier(
    config: EngineConfig, place: str, cache_key: bytes, backend: Backend
) -> StoredTier:
    """Raises ConfigError."""
    key = disk_key(cache_key, backend)
    encryption = read_encryption_keys(config.encryption_key_file)
    shared = open_shared(place, key)
    store = RunStore(
        shared.folder,
        key,
        sizes=page_sizes(backend),
        max_bytes=int(config.kv_shared_size * GIB),
        encryption=encryption,
        is_shared=True,
    )
    logger.info("%d KV blocks are in %s", store.num_blocks, place)
    meter = TierMeter(latency_s=shared.latency_s, bytes_per_s=shared.bytes_per_s)
    return StoredTier("shared", SHARED_MEDIUM, store, meter, store_id=shared.id)


def _open_copies(
    backend: CopiesKV, host_bytes: int, woken: Callable[[], None], *, is_stored: bool
) -> BlockCopies:
    return backend.open_copies(host_bytes=host_bytes, is_stored=is_stored, woken=woken)


def disk_key(cache_key: bytes, backend: Backend) -> bytes:
    """What separates files of engines whose blocks differ: the model's content and the settings
    (both in `cache_key`), the layout of a page, and the build of the kernels."""
    digest = hashlib.blake2b(cache_key, digest_size=16, person=b"octavo tier")
    digest.update(repr((backend.cache_layout, backend.kv_bytes_per_block)).encode())
    digest.update(build_digest(backend))
    return digest.digest()


def build_digest(backend: Backend) -> bytes:
    """Of what computes, where another build may round differently: the compiled module, or the
    kernels of a device."""
    if isinstance(backend, NamesBuild):
        return backend.build_digest()
    if not backend.name.startswith("native"):
        return b""
    from octavo_engine import _native

    assert _native.__file__ is not None
    with Path(_native.__file__).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
