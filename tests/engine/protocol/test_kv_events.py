"""KV events byte by byte: what vLLM writes, and what it wrote before."""

from __future__ import annotations

import msgspec
import pytest

from octavo_engine.protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    as_wire,
    from_wire,
    pack_sequence,
    unpack_sequence,
)
from tests.fakes.golden_events import golden_events

STORED = BlockStored(
    [5], 4, [1, 2], 16, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
)
STORED_MAP, REMOVED_MAP, STORED_ARRAY, REMOVED_ARRAY = golden_events()


def encode(batch: KVEventBatch) -> bytes:
    return msgspec.msgpack.encode(as_wire(batch))


def test_a_stored_block_is_written_as_vllm_writes_it():
    assert encode(KVEventBatch(1.5, [STORED], 0)) == STORED_MAP


def test_removed_and_cleared_blocks_are_written_as_vllm_writes_them():
    removed = BlockRemoved([5], "GPU", group_idx=0)
    assert encode(KVEventBatch(1.5, [removed, AllBlocksCleared()], 0)) == REMOVED_MAP


@pytest.mark.parametrize("data", [STORED_MAP, REMOVED_MAP])
def test_what_was_written_is_read_back(data):
    assert encode(from_wire(msgspec.msgpack.decode(data))) == data


def test_arrays_of_older_versions_are_read():
    batch = from_wire(msgspec.msgpack.decode(STORED_ARRAY))
    assert batch == KVEventBatch(
        1.5, [BlockStored([5], 4, [1, 2], 16, None, "GPU", None, group_idx=0)], 0
    )
    batch = from_wire(msgspec.msgpack.decode(REMOVED_ARRAY))
    assert batch == KVEventBatch(1.5, [BlockRemoved([5], "GPU"), AllBlocksCleared()], 0)


def test_shorter_arrays_and_unknown_kinds_are_read_as_far_as_they_go():
    batch = from_wire([2.0, [["BlockStored", [7], None, [1], 1], ["Unheard", 1], {"type": "Of"}]])
    assert batch == KVEventBatch(2.0, [BlockStored([7], None, [1], 1)], None)


@pytest.mark.parametrize(
    "value", [None, [], [1.0], [1.0, 2], [1.0, [3], 0], [1.0, [["BlockStored"]], 0]]
)
def test_what_is_no_batch_is_refused(value):
    with pytest.raises(ValueError):
        from_wire(value)


def test_numbers_are_eight_bytes_big_endian():
    assert pack_sequence(258) == b"\0\0\0\0\0\0\1\2"
    assert unpack_sequence(pack_sequence(2**63)) == 2**63
    with pytest.raises(ValueError, match="8 bytes"):
        unpack_sequence(b"\0" * 7)
