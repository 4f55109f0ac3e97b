"""Block digests are a wire format: golden values, and what must keep two caches apart."""

from __future__ import annotations

import hashlib
import struct

import pytest

from octavo_engine.protocol.prefix_hash import (
    block_digest,
    chain_digests,
    make_cache_key,
    pack_tokens,
    root_digest,
    vllm_block_hash,
    vllm_event_id,
    vllm_none_hash,
)

LORA = ("lora", "adapter", "/adapters/adapter")


def test_tokens_are_packed_as_little_endian_u32():
    assert pack_tokens([1, 258, 2**32 - 1]) == bytes.fromhex("01000000 02010000 ffffffff")
    assert pack_tokens([]) == b""


def test_the_chain_is_blake2b_of_parent_and_tokens():
    """Written out once more without our code: another implementation must be able to agree."""

    def blake(data: bytes, person: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, person=person).digest()

    parts = (b"octavo-kv-1", b"key", b"tenant", b"")
    joined = b"".join(struct.pack("<I", len(part)) + part for part in parts)
    root = blake(joined, b"octavo root")
    tokens = list(range(32))
    first = blake(root + struct.pack("<16I", *tokens[:16]), b"octavo block")
    second = blake(first + struct.pack("<16I", *tokens[16:]), b"octavo block")

    assert root_digest(b"key", salt="tenant") == root
    assert chain_digests(root, tokens) == [first, second]


def test_golden_digests():
    """These bytes are in the field: they may change only together with VERSION."""
    root = root_digest(make_cache_key(b"model", "tokenizer", "bf16"))
    assert [digest.hex() for digest in chain_digests(root, range(40))] == [
        "084d4d81fa50e9cac6dfc11052790cc8",
        "5c57d7be793d3b529d24366603a217e7",
    ]


def test_only_full_blocks_are_chained():
    root = root_digest(b"")
    assert [len(chain_digests(root, range(n))) for n in (0, 1, 15, 16, 17, 31, 32)] == [
        0, 0, 0, 1, 1, 1, 2,
    ]  # fmt: skip


def test_a_chain_can_be_continued():
    root = root_digest(b"")
    whole = chain_digests(root, range(64))
    assert chain_digests(whole[1], range(32, 64)) == whole[2:]


def test_a_digest_depends_on_all_tokens_before():
    root = root_digest(b"")
    tokens = list(range(48))
    for changed in range(48):
        other = [*tokens[:changed], 999, *tokens[changed + 1 :]]
        same = [
            a == b
            for a, b in zip(chain_digests(root, tokens), chain_digests(root, other), strict=True)
        ]
        assert same == [16 * (i + 1) <= changed for i in range(3)]


def test_model_tokenizer_format_salt_and_adapter_have_their_own_roots():
    roots = {
        root_digest(make_cache_key(b"m", "t", "bf16")),
        root_digest(make_cache_key(b"n", "t", "bf16")),
        root_digest(make_cache_key(b"m", "u", "bf16")),
        root_digest(make_cache_key(b"m", "t", "int8")),
        root_digest(make_cache_key(b"m", "tbf16")),
        root_digest(make_cache_key(b"m", "t", "bf16"), salt="a"),
        root_digest(make_cache_key(b"m", "t", "bf16"), adapter="a"),
        root_digest(make_cache_key(b"m", "t", "bf16"), salt="ab"),
        root_digest(make_cache_key(b"m", "t", "bf16"), salt="a", adapter="b"),
    }
    assert len(roots) == 9


def test_extras_differ_from_tokens_and_from_each_other():
    root = root_digest(b"")
    digests = {
        block_digest(root, b"abcdefgh"),
        block_digest(root, b"abcd", extras=[b"efgh"]),
        block_digest(root, b"abcd", extras=[b"ef", b"gh"]),
        block_digest(root, b"abcd", extras=[b"efg", b"h"]),
        block_digest(root, b"abcd"),
    }
    assert len(digests) == 5


def test_vllm_golden_vectors():
    assert vllm_none_hash().hex() == (
        "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
    )
    a = vllm_block_hash(None, [1, 2, 3, 4])
    assert a.hex() == "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111"
    assert vllm_event_id(a) == 9561501211280363793
    b = vllm_block_hash(a, [5, 6, 7, 8])
    assert b.hex() == "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1"
    assert vllm_event_id(b) - 2**64 == -3153830497298837583


def test_vllm_extra_keys():
    keys = (
        LORA,
        ("mm", "mm-abc", 0),
        ("cache_salt", "salt-1"),
        ("prompt_embeds", bytes(range(32))),
    )
    c = vllm_block_hash(None, [1, 2, 3, 4], keys)
    assert c.hex() == "280bce663478b44320e68be593605214c94f7648ac34b4b94274fdcd0f2a8a04"
    d = vllm_block_hash(c, [5, 6, 7, 8], (LORA, ("mm", "mm-abc", -4)))
    assert d.hex() == "33e7394e25b7be46c7bf0c090da02e903b4e9d9536b1c18eed4d6e57e7a3658a"


def test_vllm_long_blocks():
    tokens = [(7919 * i + 13) % 152064 for i in range(256)]
    d0 = vllm_block_hash(None, tokens[:128])
    assert d0.hex() == "3c922374e6fe67f3c64e75b88a3b8bd6185b538f7019674b72aefbf8dd8754f8"
    assert vllm_event_id(d0) == 8263819412558533880
    d1 = vllm_block_hash(d0, tokens[128:])
    assert d1.hex() == "2e69fa8c8aebe362593b51b8b212f1aeb45f9bb56c4258c0bf2a94f1e384e2a5"


def test_vllm_seed_replaces_the_constant():
    assert vllm_none_hash("0") == hashlib.sha256(b"\x610").digest()
    assert vllm_none_hash("") == hashlib.sha256(b"\x60").digest()


def test_vllm_keys_of_unknown_kinds_are_refused():
    with pytest.raises(TypeError, match="float"):
        vllm_block_hash(None, [1], (1.5,))
    with pytest.raises(OverflowError, match="64 bits"):
        vllm_block_hash(None, [2**64])
