"""The disk tier: what was written is read after a restart, and what is wrong is never read.

Red when: pages of two sizes are in one file; the checksum of a page or of the header is not
compared; a file is found under its last name before it is whole; the budget counts only this
model's files; a vanished file stays in the index; an encrypted file of another key is deleted; a
page or a name is on disk in clear.
"""

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from octavo_engine.caches import STATE_GROUP
from octavo_engine.encryption import EncryptionKeys
from octavo_engine.tiers import run_folder, run_store
from octavo_engine.tiers.page import PageSizes, block_name
from octavo_engine.tiers.run_folder import LocalFolder
from octavo_engine.tiers.run_store import RunStore

KEY = b"k" * 16
PAGE, STATE = 4096, 10_000


def name(number: int) -> bytes:
    return number.to_bytes(17, "big")


def page(number: int):
    return np.random.default_rng(number).integers(0, 256, PAGE, np.uint8)


@pytest.fixture(params=[None, EncryptionKeys([b"k" * 32])], ids=["plain", "encrypted"])
def opened(tmp_path, request):
    stores = []

    def open_store(*, key=KEY, max_bytes=1 << 20, folder=tmp_path, encryption=request.param):
        store = RunStore(
            LocalFolder(folder, key), key,
            sizes=PageSizes(PAGE, STATE), max_bytes=max_bytes, encryption=encryption,
        )  # fmt: skip
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


def fill(store, *numbers):
    for number in numbers:
        store.put(name(number), page(number))
    assert store.flush()


def read(store, *numbers, **more):
    return read_named(store, [name(number) for number in numbers], **more)


def read_named(store, names, **more):
    found: list[Any] = []
    store.fetch(names, found.append, **more)
    end = time.monotonic() + 10
    while not found and time.monotonic() < end:
        time.sleep(0.002)
    return [None if p is None else bytes(p) for p in found[0]]


def files(folder):
    return sorted(folder.glob("*/*.kv"))


def test_what_was_written_is_found_after_a_restart(opened):
    fill(opened(), 1, 2, 3)
    again = opened()
    assert read(again, 3, 1, 9) == [bytes(page(3)), bytes(page(1)), None]


def test_states_lie_in_files_of_their_own(opened, tmp_path):
    """Whatever order they come in; what waits is bounded by bytes."""
    store = opened()
    states = {block_name(bytes([n]) * 16, STATE_GROUP): np.full(STATE, n, np.uint8) for n in (1, 2)}
    pages = states | {name(number): page(number) for number in (1, 2, 3)}
    for one in sorted(pages, key=lambda one: one[1]):
        store.put(one, pages[one])
    assert store.flush() and store._pending_bytes == 0
    assert len(files(tmp_path)) >= 2
    again = opened()
    assert read_named(again, list(pages)) == [bytes(one) for one in pages.values()]


def test_a_state_larger_than_what_may_wait_is_written_alone(opened, monkeypatch):
    monkeypatch.setattr(run_store, "MAX_PENDING_BYTES", PAGE)
    store = opened()
    state = block_name(b"s" * 16, STATE_GROUP)
    store.put(state, np.zeros(STATE, np.uint8))
    assert store.flush() and state in store


def test_engines_of_another_key_find_nothing(opened):
    fill(opened(), 1)
    assert name(1) not in opened(key=b"x" * 16)


@pytest.mark.parametrize("place", ["magic", "header", "page", "cut off", "empty"])
def test_a_damaged_file_is_dropped(opened, tmp_path, place, caplog):
    fill(opened(), 1)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    offsets = {"magic": 3, "header": 45, "page": len(data) - 7}
    if place in offsets:
        data[offsets[place]] ^= 1
    path.write_bytes(data[:-5] if place == "cut off" else b"" if place == "empty" else data)
    again = opened()
    assert read(again, 1) == [None]
    assert name(1) not in again and not path.exists() and "Dropped" in caplog.text


def test_a_file_that_vanishes_is_forgotten(opened, tmp_path):
    store = opened()
    fill(store, 1)
    files(tmp_path)[0].unlink()
    assert read(store, 1) == [None] and name(1) not in store


def test_the_budget_is_of_all_models_and_the_least_recently_used_file_goes(opened, tmp_path):
    fill(opened(key=b"o" * 16), 1)
    os.utime(files(tmp_path)[0], (0, 0))
    store = opened(max_bytes=4 * PAGE)
    for number in range(2, 8):
        fill(store, number)
        os.utime(tmp_path / KEY.hex() / store._index[name(number)], (number, number))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 4 * PAGE
    assert name(7) in store and name(2) not in store
    assert not list((tmp_path / (b"o" * 16).hex()).glob("*.kv"))


def test_an_error_while_writing_costs_the_blocks_only(opened, monkeypatch, caplog):
    store = opened()

    def full(*_: object):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run_store, "write_run", full)
        reports: list[tuple[bytes, bool]] = []
        store.listeners.append(lambda name, is_there: reports.append((name, is_there)))
        fill(store, 1)
    assert name(1) not in store and store.num_unsaved == 1 and "No space left" in caplog.text
    assert reports == [(name(1), False)]  # it was found while it waited
    fill(store, 1)
    assert read(store, 1) == [bytes(page(1))]


def test_files_of_another_engine_are_found(opened, monkeypatch):
    monkeypatch.setattr(run_folder, "RESCAN_S", 0.02)
    one, other = opened(), opened()
    fill(one, 5)
    end = time.monotonic() + 10
    while name(5) not in other and time.monotonic() < end:
        time.sleep(0.01)
    assert read(other, 5) == [bytes(page(5))]


def test_what_does_not_fit_into_the_queue_is_not_saved(opened, monkeypatch):
    monkeypatch.setattr(run_store, "MAX_PENDING_BYTES", 2 * PAGE)
    store, may_write = opened(), threading.Event()
    monkeypatch.setattr(store, "_make_room", lambda num_bytes: may_write.wait(10))
    for number in (1, 2, 3):
        store.put(name(number), page(number))
    assert name(2) in store and name(3) not in store and store.num_unsaved == 1
    may_write.set()
    assert store.flush() and store.num_blocks == 2


def test_spoiled_blocks_are_never_found_again(opened, tmp_path):
    store = opened()
    fill(store, 1, 2)
    store.drop([name(2), name(3)])
    assert name(2) not in store and name(2) not in opened()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_read_only(opened, tmp_path):
    fill(opened(), 1)
    (tmp_path / KEY.hex()).chmod(0o555)
    store = opened()
    store.put(name(2), page(2))
    assert read(store, 1, 2) == [bytes(page(1)), None]
    (tmp_path / KEY.hex()).chmod(0o755)


def test_a_file_left_half_written_is_neither_read_nor_kept_forever(opened, tmp_path):
    fill(opened(), 1)
    (path,) = files(tmp_path)
    torn = path.with_suffix(".part")
    torn.write_bytes(path.read_bytes()[:-1])
    opened()
    assert torn.exists(), "its writer may be at work"
    os.utime(torn, (0, 0))
    opened()
    assert not torn.exists()


OLD, NEW = b"o" * 32, b"n" * 32


def test_old_encryption_keys_still_read_and_new_ones_write(opened, tmp_path):
    fill(opened(encryption=EncryptionKeys([OLD])), 1)
    rotated = opened(encryption=EncryptionKeys([NEW, OLD]))
    assert read(rotated, 1) == [bytes(page(1))]
    fill(rotated, 2)
    assert read(opened(encryption=EncryptionKeys([NEW])), 1, 2) == [None, bytes(page(2))]


@pytest.mark.parametrize("encryption", [None, EncryptionKeys([NEW])], ids=["no key", "another key"])
def test_blocks_of_an_unknown_encryption_key_are_a_miss_and_stay(
    opened, tmp_path, caplog, encryption
):
    fill(opened(encryption=EncryptionKeys([OLD])), 1)
    fill(opened(encryption=EncryptionKeys([OLD])), 2)
    store = opened(encryption=encryption)
    assert name(1) not in store and read(store, 1) == [None]
    fill(store, 1)
    assert read(store, 1) == [bytes(page(1))]
    assert caplog.text.count("Ignored") == 1 and "encrypted" in caplog.text
    assert read(opened(encryption=EncryptionKeys([OLD])), 1, 2) == [bytes(page(1)), bytes(page(2))]


def test_with_an_encryption_key_blocks_in_clear_are_deleted(opened, tmp_path, caplog):
    fill(opened(encryption=None), 1)
    assert name(1) not in opened(encryption=EncryptionKeys([OLD]))
    assert not files(tmp_path) and "it is not encrypted" in caplog.text


def test_no_byte_of_a_page_or_a_name_is_on_disk(opened, tmp_path):
    store = opened(encryption=EncryptionKeys([OLD]))
    fill(store, 1, 2)
    for path in files(tmp_path):
        data = path.read_bytes()
        for secret in (name(1), name(2), KEY, bytes(page(1))[:16], bytes(page(2))[-16:]):
            assert secret not in data
    fill(opened(encryption=None, folder=tmp_path / "plain"), 1)
    (path,) = files(tmp_path / "plain")
    assert name(1) in path.read_bytes()  # so the search finds what is there


def test_pages_that_changed_places_are_not_read(opened, tmp_path):
    store = opened(encryption=EncryptionKeys([OLD]))
    store.put(name(1), page(1))
    store.put(name(2), page(2))
    assert store.flush()
    for path in files(tmp_path):
        data = path.read_bytes()
        size = PAGE + 16
        if len(data) > 2 * size:  # both in one file
            path.write_bytes(data[: -2 * size] + data[-size:] + data[-2 * size : -size])
            assert read(opened(encryption=EncryptionKeys([OLD])), 1) == [None]
