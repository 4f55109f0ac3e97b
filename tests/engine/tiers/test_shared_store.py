"""A shared store: what one engine wrote another reads, and what goes wrong is a miss.

Red when: an object is found that is torn, of another key or changed on its way; a store that fails
loses its files, or is tried by every read; an id differs between engines of one store, or is that
of another; the budget is not kept in a bucket.
"""

import time

import pytest

from octavo_engine.encryption import EncryptionKeys
from octavo_engine.errors import ConfigError
from octavo_engine.tiers import run_bucket, run_folder, run_store
from octavo_engine.tiers.page import PageSizes
from octavo_engine.tiers.run_store import RunStore
from octavo_engine.tiers.shared_store import open_shared
from tests.engine.tiers.test_run_store import KEY, PAGE, fill, name, page, read
from tests.fakes.model_store import StoreReply


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setattr(run_folder, "RESCAN_S", 0.05)
    monkeypatch.setattr(run_bucket, "RESCAN_S", 0.05)
    monkeypatch.setattr(run_store, "RETRY_S", 0.2)
    stores = []

    def open_store(place, *, key=KEY, max_bytes=1 << 20, encryption=None):
        shared = open_shared(place, key)
        store = RunStore(
            shared.folder, key, sizes=PageSizes(PAGE), max_bytes=max_bytes, encryption=encryption,
            is_shared=True,
        )  # fmt: skip
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@pytest.mark.parametrize("encryption", [None, EncryptionKeys([b"e" * 32])])
def test_what_one_engine_wrote_another_reads(opened, place, encryption):
    one, other = opened(place, encryption=encryption), opened(place, encryption=encryption)
    fill(one, 1, 2, 3)
    until(lambda: name(3) in other)
    assert read(other, 3, 1, 9) == [bytes(page(3)), bytes(page(1)), None]
    later = opened(place, encryption=encryption)  # its first request is a hit
    assert read(later, 2) == [bytes(page(2))]
    assert name(1) not in opened(place, key=b"x" * 16, encryption=encryption)


def test_an_engine_that_starts_knows_a_listing_of_several_pages(opened, bucket):
    bucket.page = 2
    store = opened("s3://kv")
    for number in range(7):
        fill(store, number)
    again = opened("s3://kv")
    assert read(again, *range(7)) == [bytes(page(number)) for number in range(7)]


def test_one_request_reads_blocks_that_lie_side_by_side(opened, bucket):
    store = opened("s3://kv")
    fill(store, *range(8))
    before = len(bucket.store.ranges())
    read(store, *range(8))
    assert len(bucket.store.ranges()) - before <= bucket.num_puts


@pytest.mark.parametrize("accident", ["flip", "tear", "empty", "of another model"])
def test_a_wrong_object_is_a_miss_and_goes(opened, bucket, accident, caplog):
    fill(opened("s3://kv"), 1)
    ((key, content),) = bucket.objects.items()
    fill(opened("s3://kv", key=b"x" * 16), 1)
    (other,) = (value for each, value in bucket.objects.items() if each != key)
    flipped = bytearray(content)
    flipped[-9] ^= 1
    bucket.objects[key] = {
        "flip": bytes(flipped), "tear": content[:-5], "empty": b"", "of another model": other,
    }[accident]  # fmt: skip
    store = opened("s3://kv")
    assert read(store, 1) == [None]
    assert name(1) not in store and key not in bucket.objects and "Dropped" in caplog.text


def test_an_object_torn_after_it_was_listed_is_a_miss(opened, bucket):
    store = opened("s3://kv")
    fill(store, 1)
    (key,) = bucket.objects
    bucket.objects[key] = bucket.objects[key][:-1]
    assert read(store, 1) == [None] and name(1) not in store


def test_a_store_that_fails_is_left_alone_and_keeps_its_objects(opened, bucket, caplog):
    store = opened("s3://kv")
    fill(store, 1, 2)
    objects = dict(bucket.objects)
    bucket.accident = lambda request: StoreReply(503)
    assert read(store, 1, 2) == [None, None]
    assert name(1) not in store and "No KV blocks from s3://kv/" in caplog.text
    before = len(bucket.store.requested)
    assert read(store, 1) == [None] and len(bucket.store.requested) == before
    bucket.accident = lambda request: None
    until(lambda: name(1) in store)
    assert read(store, 1) == [bytes(page(1))] and bucket.objects == objects


def test_a_put_that_fails_costs_the_blocks_only(opened, bucket):
    store = opened("s3://kv")
    bucket.accident = lambda request: StoreReply(507) if request.method == "PUT" else None
    fill(store, 1)
    assert name(1) not in store and store.num_unsaved == 1
    fill(store, 2)  # without a request
    assert store.num_unsaved == 2
    bucket.accident = lambda request: None
    until(lambda: not store._writing.is_on)
    fill(store, 1)
    assert read(store, 1) == [bytes(page(1))]


def test_bytes_that_change_on_their_way_there_are_refused(opened, bucket):
    store = opened("s3://kv")
    flip = bucket._put

    def changed(key, request):
        request.body = request.body[:-1] + bytes([request.body[-1] ^ 1])
        return flip(key, request)

    bucket._put = changed
    fill(store, 1)
    assert not bucket.objects and store.num_unsaved == 1


def test_reads_that_nobody_wants_any_more_are_skipped(opened, bucket):
    store = opened("s3://kv")
    fill(store, 1)
    before = len(bucket.store.ranges())
    assert read(store, 1, is_wanted=lambda: False) == [None]
    assert len(bucket.store.ranges()) == before
    assert read(store, 1) == [bytes(page(1))]


def test_the_oldest_objects_of_all_models_make_room(opened, bucket):
    fill(opened("s3://kv", key=b"x" * 16), 1)
    store = opened("s3://kv", max_bytes=4 * PAGE)
    for number in range(2, 8):
        fill(store, number)
        assert sum(map(len, bucket.objects.values())) <= 4 * PAGE
    assert name(7) in store and name(2) not in store
    assert not any((b"x" * 16).hex() in key for key in bucket.objects)


def test_spoiled_blocks_leave_a_shared_store(opened, place):
    store = opened(place)
    fill(store, 1)
    store.drop([name(1)])
    assert name(1) not in store
    until(lambda: not store.folder.names())


def test_the_id_is_of_the_store_and_the_model(tmp_path, bucket):
    folder, other = str(tmp_path / "a"), str(tmp_path / "b")
    ids = [open_shared(place, KEY).id for place in (folder, other, "s3://kv/a", "s3://kv/b")]
    assert len(set(ids)) == 4
    assert [open_shared(place, KEY).id for place in (folder, "s3://kv/a/")] == [ids[0], ids[2]]
    assert open_shared(folder, b"x" * 16).id not in ids
    (tmp_path / "a").rename(tmp_path / "moved")  # another pod mounts it elsewhere
    assert open_shared(str(tmp_path / "moved"), KEY).id == ids[0]


@pytest.mark.parametrize(
    ("status", "text"), [(403, "list, get, put and delete"), (404, "does not exist")]
)
def test_a_bucket_that_may_not_be_used_ends_the_start(bucket, status, text):
    bucket.accident = lambda request: StoreReply(status)
    with pytest.raises(ConfigError, match=f"--kv-shared-store s3://kv/x cannot be used: .*{text}"):
        open_shared("s3://kv/x", KEY)


def test_a_bucket_out_of_reach_is_used_once_it_is_back(opened, bucket, caplog):
    fill(opened("s3://kv"), 1)
    bucket.accident = lambda request: StoreReply(503)
    store = opened("s3://kv")
    assert name(1) not in store and "is not used for now" in caplog.text
    bucket.accident = lambda request: None
    until(lambda: name(1) in store)
    assert read(store, 1) == [bytes(page(1))]
