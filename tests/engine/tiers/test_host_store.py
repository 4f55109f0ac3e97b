"""Host memory: never more bytes than allowed, and the least recently used block goes first.

Red when: a hit does not count as use; `drop` forgets to give bytes back; a page larger than the
store empties it.
"""

import numpy as np

from octavo_engine.tiers.host_store import HostStore


def page(number: int, size: int = 10):
    return np.full(size, number, np.uint8)


def test_the_least_recently_used_block_goes_first():
    store = HostStore(30)
    for number in range(3):
        store.put(bytes((number,)), page(number))
    assert store.get(b"\0") is not None
    store.put(b"\3", page(3))
    assert [bytes((n,)) in store for n in range(4)] == [True, False, True, True]
    assert store.num_bytes == 30


def test_a_page_larger_than_the_store_is_not_taken():
    store = HostStore(30)
    store.put(b"a", page(1))
    store.put(b"b", page(2, 31))
    assert b"a" in store and b"b" not in store


def test_dropped_blocks_give_their_bytes_back():
    store = HostStore(30)
    store.put(b"a", page(1))
    store.put(b"a", page(1))
    store.drop([b"a", b"never there"])
    assert store.get(b"a") is None and store.num_bytes == 0 and len(store) == 0
