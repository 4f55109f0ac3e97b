"""KV events byte by byte: what vLLM writes, and what it wrote before."""

from __future__ import annotations

import msgspec
import pytest

from octavo_engine.protocol.kv_events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    as_wire,
    from_wire,
    pack_sequence,
    unpack_sequence,
)

STORED = BlockStored(
    [5], 4, [1, 2], 16, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
)
STORED_MAP = bytes.fromhex(
    "93cb3ff8000000000000918aa474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739105b1"
    "706172656e745f626c6f636b5f6861736804a9746f6b656e5f696473920102aa626c6f636b5f73697a6510a76c"
    "6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63"
    "616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
)
REMOVED_MAP = bytes.fromhex(
    "93cb3ff80000000000009284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739105"
    "a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c6561726564"
    "00"
)
STORED_ARRAY = bytes.fromhex(
    "93cb3ff8000000000000919cab426c6f636b53746f72656491050492010210c0a3475055c0c000c0c000"
)
REMOVED_ARRAY = bytes.fromhex(
    "93cb3ff80000000000009294ac426c6f636b52656d6f7665649105a3475055c091b0416c6c426c6f636b73436c"
    "656172656400"
)


def encode(batch: Batch) -> bytes:
    return msgspec.msgpack.encode(as_wire(batch))


def test_a_stored_block_is_written_as_vllm_writes_it():
    assert encode(Batch(1.5, [STORED], 0)) == STORED_MAP


def test_removed_and_cleared_blocks_are_written_as_vllm_writes_them():
    removed = BlockRemoved([5], "GPU", group_idx=0)
    assert encode(Batch(1.5, [removed, AllBlocksCleared()], 0)) == REMOVED_MAP


@pytest.mark.parametrize("data", [STORED_MAP, REMOVED_MAP])
def test_what_was_written_is_read_back(data):
    assert encode(from_wire(msgspec.msgpack.decode(data))) == data


def test_arrays_of_older_versions_are_read():
    batch = from_wire(msgspec.msgpack.decode(STORED_ARRAY))
    assert batch == Batch(1.5, [BlockStored([5], 4, [1, 2], 16, None, "GPU", None, group_idx=0)], 0)
    batch = from_wire(msgspec.msgpack.decode(REMOVED_ARRAY))
    assert batch == Batch(1.5, [BlockRemoved([5], "GPU"), AllBlocksCleared()], 0)


def test_shorter_arrays_and_unknown_kinds_are_read_as_far_as_they_go():
    batch = from_wire([2.0, [["BlockStored", [7], None, [1], 1], ["Unheard", 1], {"type": "Of"}]])
    assert batch == Batch(2.0, [BlockStored([7], None, [1], 1)], None)


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
