"""KV events of plain servers: golden bytes, and what they say of prompts given as token ids."""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_engine.protocol.route_keys import keys_of, pack_keys
from octavo_router.errors import Unreachable
from octavo_router.metrics import LabelledCounter
from octavo_router.residency.index import PyResidencyIndex
from octavo_router.signals.kv_events import Cleared, Removed, Stored, decode_batch
from octavo_router.signals.kv_residency import KvResidency
from tests.fakes.golden_events import golden_events

STORED_MAP, REMOVED_MAP, STORED_ARRAY, REMOVED_ARRAY = golden_events()


@pytest.mark.parametrize("payload", [STORED_MAP, STORED_ARRAY])
def test_both_encodings_of_a_stored_block(payload):
    assert decode_batch(payload) == [Stored((5,), 4, (1, 2), 16)]


@pytest.mark.parametrize("payload", [REMOVED_MAP, REMOVED_ARRAY])
def test_both_encodings_of_removed_and_cleared(payload):
    assert decode_batch(payload) == [Removed((5,)), Cleared()]


def test_signed_hashes_are_the_same_hashes():
    payload = msgspec.msgpack.encode([0.0, [["BlockRemoved", [-1]]], None])
    assert decode_batch(payload) == [Removed((2**64 - 1,))]


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.binary(max_size=120), st.integers(0, len(STORED_MAP)))
def test_any_bytes_are_events_or_an_error(data, cut):
    for payload in (data, STORED_MAP[:cut] + data):
        with suppress(Unreachable):
            decode_batch(payload)


class Server:
    """A plain server's cache: what it holds, told as events, and what the router makes of that."""

    def __init__(self, block_size: int = 16) -> None:
        self.index = PyResidencyIndex()
        self.slot = self.index.add_slot()
        self.tally = LabelledCounter()
        self.residency = KvResidency(self.index, self.slot, self.tally)
        self.block_size = block_size

    def store(
        self, tokens: list[int], *, parent: int | None = None, first: int = 1, **more: object
    ) -> None:
        count = len(tokens) // self.block_size
        hashes = tuple(range(first, first + count))
        event = Stored(hashes, parent, tuple(tokens), self.block_size, **more)  # type: ignore[arg-type]  # fields by name
        self.residency.apply([event])

    def cached(self, tokens: list[int], *, adapter: str = "", salt: str = "") -> int:
        body: dict[str, object] = {"prompt": tokens}
        if salt:
            body["cache_salt"] = salt
        keys = pack_keys(keys_of(body, "completion", adapter))
        return self.index.match(keys, [self.slot])[0]


TOKENS = list(range(1000, 1080))


def test_stored_blocks_are_found_by_prompts_of_token_ids():
    server = Server()
    server.store(TOKENS[:48])
    assert server.cached(TOKENS) == 48
    assert server.cached(TOKENS[:40]) == 32
    assert server.cached([1, *TOKENS]) == 0
    server.store(TOKENS[48:80], parent=3, first=4)
    assert server.cached(TOKENS) == 80


@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
def test_whatever_the_block_size(block_size):
    server = Server(block_size)
    server.store(TOKENS[:64])
    assert server.cached(TOKENS) == 64
    last = 64 // block_size
    server.residency.apply([Removed((last,))])
    assert server.cached(TOKENS) == (64 - block_size) // 16 * 16


def test_adapter_and_salt_belong_to_the_prefix():
    server = Server()
    extras = ([["lora", "law", "/adapters/law"], ["cache_salt", "s"]], None)
    server.store(TOKENS[:32], lora_name="law", extra_keys=extras)
    assert server.cached(TOKENS, adapter="law", salt="s") == 32
    assert server.cached(TOKENS, adapter="law") == 0
    assert server.cached(TOKENS) == 0


def test_blocks_with_images_name_nothing():
    server = Server()
    server.store(TOKENS[:32], extra_keys=(None, [["mm", "digest", 0]]))
    server.store(TOKENS[32:64], parent=2, first=3)
    assert server.cached(TOKENS) == 16


def test_children_wait_for_their_parents():
    server = Server()
    server.store(TOKENS[32:64], parent=2, first=3)
    assert server.cached(TOKENS) == 0
    server.store(TOKENS[:32])
    assert server.cached(TOKENS) == 64
    assert server.tally["stored", "parked"] == 1


def test_a_block_with_two_copies_is_gone_with_the_second():
    server = Server()
    server.store(TOKENS[:16])
    server.store(TOKENS[:16])
    server.residency.apply([Removed((1,))])
    assert server.cached(TOKENS) == 16
    server.residency.apply([Removed((1,))])
    assert server.cached(TOKENS) == 0


def test_stores_and_removals_of_one_batch_count_in_their_order():
    server = Server()
    stored, removed = Stored((1,), None, tuple(TOKENS[:16]), 16), Removed((1,))
    server.residency.apply([stored, removed])
    assert server.cached(TOKENS) == 0
    server.residency.apply([stored, removed, stored])
    assert server.cached(TOKENS) == 16
    server.residency.apply([removed, stored])
    assert server.cached(TOKENS) == 16


def test_other_memory_and_other_attention_do_not_count():
    server = Server()
    server.store(TOKENS[:16], medium="CPU")
    server.store(TOKENS[:16], kind="sliding_window")
    server.residency.apply([Stored((9,), None, (), 0)])  # a placeholder for what lies elsewhere
    assert server.cached(TOKENS) == 0
    server.store(TOKENS[:16])
    server.residency.apply([Removed((1,), medium="CPU")])
    assert server.cached(TOKENS) == 16


def test_a_cleared_cache_voids_our_own_history_too():
    server = Server()
    server.store(TOKENS[:16])
    text = pack_keys(keys_of({"prompt": "a" * 640}, "completion"))
    server.index.assume(server.slot, text, 16.0)
    server.residency.apply([Cleared()])
    assert server.cached(TOKENS) == 0
    assert server.index.match(text, [server.slot]) == [0]


def test_random_stores_and_removals_leave_what_is_really_there():
    rng = random.Random(11)
    for block_size in (4, 16, 32):
        server = Server(block_size)
        prompts = [[rng.randrange(3) for _ in range(96)] for _ in range(6)]
        held: dict[int, tuple[int, ...]] = {}  # block id to all tokens up to its end
        for _ in range(400):
            prompt = rng.choice(prompts)
            count = rng.randrange(1, 96 // block_size + 1)
            if rng.random() < 0.5:
                parent = None
                for number in range(count):
                    upto = tuple(prompt[: (number + 1) * block_size])
                    id_ = hash(upto) & 0xFFFF_FFFF
                    if id_ not in held:
                        held[id_] = upto
                        server.store(list(upto[-block_size:]), parent=parent, first=id_)
                    parent = id_
            elif held:
                # As vLLM frees: the end of a chain before its beginning.
                longest = max(held, key=lambda id_: (len(held[id_]), id_))
                del held[longest]
                server.residency.apply([Removed((longest,))])
            there = set(held.values())
            for each in prompts:
                blocks = 0
                while (
                    tuple(each[: (blocks + 1) * block_size]) in there and blocks < 96 // block_size
                ):
                    blocks += 1
                assert server.cached(each) == blocks * block_size // 16 * 16
        for id_ in list(held):
            server.residency.apply([Removed((id_,))])
        assert server.index.num_keys(server.slot) == 0
