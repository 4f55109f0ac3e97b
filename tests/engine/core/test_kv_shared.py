"""Engines that share a store: one computes, the others read, and no accident is a wrong token.

Red when: the second engine computes what the first one stored; a slow or broken store holds a
request; a block of a torn object is used; the tier is loaded where computing is quicker.
"""

import random
import time

import pytest

from octavo_engine.config import BLOCK_SIZE, EngineConfig, SchedulerConfig
from octavo_engine.core import kv_tiers
from octavo_engine.core.tier_fetch import TierRead
from octavo_engine.errors import ConfigError
from octavo_engine.tiers import run_bucket, run_folder, run_store
from octavo_engine.tiers.price import is_worth_loading
from tests.engine.core.test_kv_tiers import (
    MIB,
    ask,
    break_something,
    forget_pool,
    kill_while_writing,
    make_engine,
    run_some,
)
from tests.fakes.backend import POISON
from tests.fakes.model_store import StoreReply
from tests.fakes.requests import make_prompt


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """This backend computes quicker than any store reads."""
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    monkeypatch.setattr(run_folder, "RESCAN_S", 0.02)
    monkeypatch.setattr(run_bucket, "RESCAN_S", 0.02)
    monkeypatch.setattr(run_store, "RETRY_S", 0.05)


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_the_first_request_of_a_second_engine_is_a_hit(place, windows):
    prompt = make_prompt(100)
    first, backend = make_engine(windows=windows, kv_shared_store=place)
    assert ask(first, backend, prompt) == 100
    assert first._tiers.stored[0].store.flush()
    second, backend = make_engine(windows=windows, kv_shared_store=place)
    assert ask(second, backend, prompt) == 4
    stats = second.stats().tiers
    assert stats.shared_hit_blocks >= 6 and stats.disk_hit_blocks == 0
    assert stats.shared_load_seconds > 0
    first.close()
    second.close()


def test_an_engine_that_runs_finds_what_others_store_later(place):
    first, first_backend = make_engine(kv_shared_store=place)
    second, second_backend = make_engine(kv_shared_store=place)
    prompt = make_prompt(100)
    ask(first, first_backend, prompt)
    end = time.monotonic() + 10
    while second.stats().tiers.shared_blocks < 6 and time.monotonic() < end:
        time.sleep(0.01)
    assert ask(second, second_backend, prompt) == 4
    first.close()
    second.close()


def test_a_block_is_read_from_disk_before_the_shared_store(tmp_path):
    folders = {"kv_disk_path": str(tmp_path / "disk"), "kv_shared_store": str(tmp_path / "shared")}
    prompt = make_prompt(100)
    engine, backend = make_engine(**folders)
    ask(engine, backend, prompt)
    engine.close()
    engine, backend = make_engine(**folders)
    assert ask(engine, backend, prompt) == 4
    stats = engine.stats().tiers
    assert (stats.disk_hit_blocks, stats.shared_hit_blocks) == (6, 0)
    engine.close()
    for path in (tmp_path / "disk").glob("*/*.kv"):
        path.unlink()
    engine, backend = make_engine(**folders)
    assert ask(engine, backend, prompt) == 4
    assert engine.stats().tiers.shared_hit_blocks == 6
    engine.close()


def test_a_store_slower_than_computing_is_not_read(monkeypatch, place):
    prompt = make_prompt(100)
    engine, backend = make_engine(kv_shared_store=place)
    ask(engine, backend, prompt)
    (tier,) = engine._tiers.stored
    tier.store.flush()
    forget_pool(engine, backend)
    monkeypatch.setattr(kv_tiers, "is_worth_loading", is_worth_loading)
    tier._trial = TierRead("shared", tier.meter, [], 0.0)  # it was measured
    tier.meter.replace(1, 3600.0)
    assert ask(engine, backend, prompt) == 100
    assert engine.stats().tiers.refused == 1
    engine.close()


def test_a_bucket_that_hangs_costs_a_computation(monkeypatch, bucket):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.05)
    prompt = make_prompt(100)
    engine, backend = make_engine(kv_shared_store="s3://kv")
    ask(engine, backend, prompt)
    engine._tiers.stored[0].store.flush()
    forget_pool(engine, backend)
    bucket.store.stalls = [10] * 100
    assert ask(engine, backend, prompt) == 100
    assert engine.stats().tiers.failed_reads > 0
    bucket.store.stalls = []
    bucket.store.released.set()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_random_lives_of_two_engines_on_one_folder(tmp_path, monkeypatch, seed, windows):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.2)
    chance = random.Random(seed)
    prefixes = [make_prompt(chance.randint(16, 150), first=i) for i in range(5)]
    settings = {"kv_shared_store": str(tmp_path), "kv_shared_size": 30_000 / 2**30}
    engines = [
        make_engine(windows=windows, kv_offloading_size=size, **settings) for size in (0.0, MIB)
    ]
    for turn in range(20):
        engine, backend = chance.choice(engines)
        live(engine, backend, prefixes, chance, turn)
        break_something(chance, tmp_path, engine, backend)
    for engine, _ in engines:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_lives_with_a_bucket_that_fails_at_each_step(bucket, monkeypatch, seed):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.2)
    chance = random.Random(seed)
    prefixes = [make_prompt(chance.randint(16, 150), first=i) for i in range(5)]
    settings = {"kv_shared_store": "s3://kv/a", "kv_shared_size": 200_000 / 2**30}
    engines = [make_engine(**settings) for _ in range(2)]
    for turn in range(20):
        engine, backend = chance.choice(engines)
        break_bucket(chance, bucket)
        live(engine, backend, prefixes, chance, turn)
        if chance.random() < 0.3:
            forget_pool(engine, backend)
    bucket.accident = lambda request: None
    for engine, _ in engines:
        engine.close()
    assert bucket.num_puts > 0


def live(engine, backend, prefixes, chance, turn):
    run_some(engine, backend, prefixes, chance, turn)
    free = [block.id for block in engine.scheduler.kv.pool.blocks if not block.is_published]
    backend.kv.reshape(-1, BLOCK_SIZE)[free] = POISON


def break_bucket(chance, bucket):
    """The store as it is for the next requests."""
    kind = chance.choice(["full", "gone", "slow", "cut", "flip", "tear", "vanish", "well", "well"])
    bucket.accident, bucket.store.cuts = (lambda request: None), []
    if kind == "full":
        bucket.accident = lambda request: StoreReply(507) if request.method == "PUT" else None
    elif kind == "gone":
        bucket.accident = lambda request: StoreReply(503)
    elif kind == "slow":
        bucket.accident = lambda request: time.sleep(0.05)
    elif kind == "cut":
        bucket.store.cuts = [chance.randint(0, 200) for _ in range(3)]
    elif bucket.objects and kind in ("flip", "tear", "vanish"):
        key = chance.choice(sorted(bucket.objects))
        content = bytearray(bucket.objects[key])
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        torn = bytes(content[: chance.randrange(len(content))])
        if kind == "vanish":
            del bucket.objects[key]
        else:
            bucket.objects[key] = bytes(content) if kind == "flip" else torn


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_files_to_others(place):
    second, backend = make_engine(kv_shared_store=place)
    kill_while_writing(kv_shared_store=place)
    end = time.monotonic() + 10
    while second.stats().tiers.shared_blocks < 6 and time.monotonic() < end:
        time.sleep(0.01)
    assert ask(second, backend, make_prompt(100)) == 4
    assert second.stats().tiers.failed_reads == 0
    second.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_shared_store": ""}, "must be a folder or s3://bucket/prefix"),
        ({"kv_shared_store": "gs://kv"}, "must be a folder or s3://bucket/prefix"),
        ({"kv_shared_size": 0.0}, "--kv-shared-size must be above 0"),
        ({"kv_shared_store": "/x", "kv_disk_path": "/x"}, "another folder than --kv-disk-path"),
        ({"kv_shared_store": "/x", "data_parallel_size": 2}, "needs --data-parallel-size 1"),
        ({"kv_shared_store": "/x", "scheduler": SchedulerConfig(enable_prefix_caching=False)},
         "need --enable-prefix-caching"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**settings)


def test_a_place_that_cannot_be_used_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"--kv-shared-store .* cannot be used: "):
        make_engine(kv_shared_store=str(file))
    with pytest.raises(ConfigError, match="is not the name of a bucket"):
        make_engine(kv_shared_store="s3:///x")
