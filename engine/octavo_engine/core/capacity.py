"""How many KV blocks there will be and how long a sequence may get. Arithmetic, with reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo_engine.config import BLOCK_SIZE, HOST_MEMORY_FRACTION, EngineConfig
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from octavo_engine.kv.needs import KVNeeds

# A context cut to less is of no use; --max-model-len sets one.
MIN_CONTEXT = 128


class Capacity(NamedTuple):
    """The settled sizes, and the sum in words."""

    num_blocks: int
    max_model_len: int
    note: str
    max_num_seqs: int = 0  # with recurrent states: how many may run; 0: as the settings say
    num_snapshots: int = 0


def kv_memory(config: EngineConfig, free_bytes: int) -> int:
    """Bytes for the KV cache: what was requested, or a share of what is free after loading."""
    requested = config.kv_cache_memory_bytes
    if requested is None:
        return int(free_bytes * (config.memory_fraction or HOST_MEMORY_FRACTION))
    if requested > free_bytes:
        raise ConfigError(
            f"--kv-cache-memory-bytes asks for {gib(requested)}, but only {gib(free_bytes)} of "
            "memory are free after loading the model"
        )
    return requested


def check_context(config: EngineConfig, own_max_model_len: int) -> None:
    """Raises ConfigError. Needs no weights, so it is known before they are loaded."""
    requested = config.max_model_len
    if requested is not None and requested > own_max_model_len:
        raise ConfigError(
            f"--max-model-len {requested} is more than the model was made for "
            f"({own_max_model_len} tokens)"
        )


def settle_capacity(
    config: EngineConfig, needs: KVNeeds, *, own_max_model_len: int, max_blocks: int, where: str
) -> Capacity:
    """`max_blocks` is what there is room for; `where` names that room in errors. `needs` says how
    many of them a sequence takes.

    Never more blocks than `max_num_seqs` sequences of full length can use. A context that was
    requested and does not fit is an error; the model's own is cut.
    """
    check_context(config, own_max_model_len)
    requested = config.max_model_len
    most = requested or own_max_model_len
    length = min(most, needs.tokens(max_blocks, most))
    wanted = requested or min(MIN_CONTEXT, own_max_model_len)
    if length < wanted:
        raise ConfigError(
            f"one sequence of {wanted} tokens needs {needs.blocks(wanted)} KV blocks, but {where} "
            f"holds {max_blocks}; free memory, raise --kv-cache-memory-bytes or --memory-fraction, "
            "or lower --max-model-len"
        )
    num_blocks = min(max_blocks, config.scheduler.max_num_seqs * needs.blocks(length))
    note = f"{num_blocks} KV blocks of {BLOCK_SIZE} tokens, sequences of up to {length} tokens"
    if needs.windowed:
        note += f" in {needs.blocks(length)} blocks each at most"
    if length < most:
        note += f" (cut from the model's own {own_max_model_len}: that is what {where} holds)"
    return Capacity(num_blocks, length, note)


def gib(num_bytes: int) -> str:
    """A size for people."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
