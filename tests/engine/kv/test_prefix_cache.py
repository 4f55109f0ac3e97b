"""Finding what is cached: whole blocks by name, the best of many siblings by what they hold."""

from __future__ import annotations

from octavo_engine.kv.block import Block
from octavo_engine.kv.prefix_cache import PrefixCache
from octavo_engine.protocol.prefix_hash import chain_digests, pack_tokens, root_digest

ROOT = root_digest(b"")


def publish(cache: PrefixCache, block_id: int, tokens: list[int], *, parent: bytes = ROOT) -> Block:
    block = Block(block_id)
    digest = chain_digests(parent, tokens)[0] if len(tokens) == 16 else None
    assert cache.publish(block, parent, pack_tokens(tokens), digest)
    return block


def test_full_blocks_are_matched_from_the_left_until_one_is_missing():
    cache, tokens = PrefixCache(), list(range(64))
    digests = chain_digests(ROOT, tokens)
    first = publish(cache, 0, tokens[:16])
    second = publish(cache, 1, tokens[16:32], parent=digests[0])
    publish(cache, 3, tokens[48:], parent=digests[2])
    found = cache.match(ROOT, digests, tokens, 63)
    assert found.blocks == [first, second]
    assert found.source is None
    assert found.num_tokens == 32


def test_the_limit_turns_a_full_hit_into_a_partial_one():
    """The last token of a prompt is always computed; the fifteen before it are copied."""
    cache, tokens = PrefixCache(), list(range(32))
    digests = chain_digests(ROOT, tokens)
    first = publish(cache, 0, tokens[:16])
    second = publish(cache, 1, tokens[16:], parent=digests[0])
    found = cache.match(ROOT, digests, tokens, 31)
    assert found.blocks == [first]
    assert found.source is second
    assert found.num_copied == 15
    assert found.num_tokens == 31


def test_of_many_siblings_the_one_with_the_longest_common_prefix_is_found():
    cache = PrefixCache()
    for i in range(500):
        publish(cache, i, [i % 7, i, 1, 2])
    best = publish(cache, 1000, [3, 17, 9, 9, 9, 5])
    publish(cache, 1001, [3, 17, 9, 8])
    found = cache.match(ROOT, [], [3, 17, 9, 9, 9, 9, 9], 7)
    assert found.source is best
    assert found.num_copied == 5


def test_common_bytes_of_different_tokens_do_not_count():
    cache = PrefixCache()
    publish(cache, 0, [0x0102, 7])
    found = cache.match(ROOT, [], [0x0202, 7, 8], 3)  # same low byte first in memory
    assert (found.source, found.num_copied) == (None, 0)


def test_what_adds_nothing_is_not_kept():
    cache, tokens = PrefixCache(), list(range(16))
    publish(cache, 0, tokens)
    digest = chain_digests(ROOT, tokens)[0]
    assert not cache.publish(Block(1), ROOT, pack_tokens(tokens), digest)
    assert not cache.publish(Block(2), ROOT, pack_tokens(tokens[:9]), None)
    assert len(cache) == 1


def test_a_block_published_again_with_more_tokens_is_found_with_those():
    cache = PrefixCache()
    block = publish(cache, 0, [1, 2])
    assert cache.publish(block, ROOT, pack_tokens([1, 2, 3]), None)
    assert len(cache) == 1
    assert cache.match(ROOT, [], [1, 2, 3, 4], 4).num_copied == 3


def test_a_retracted_block_is_not_found_and_its_sibling_is():
    cache = PrefixCache()
    block = publish(cache, 0, [1, 2, 3])
    other = publish(cache, 1, [1, 9])
    cache.retract(block)
    assert not block.is_published
    found = cache.match(ROOT, [], [1, 2, 3], 3)
    assert (found.source, found.num_copied) == (other, 1)
    cache.retract(other)
    assert len(cache) == 0
