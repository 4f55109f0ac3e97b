"""Engines with tiers: every token is the truth of its prefix, whatever becomes of the tiers.

The backend's next token depends on every slot of the KV cache that is seen, so a block with another
one's bytes, or with none, is a wrong token. Free memory is small, so blocks come and go.

Red when: a page is put into another block than was published; a loaded block is published and not
written; a fetch that is never answered holds its request; spoiled blocks stay in a tier.
"""

import json
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.config import BLOCK_SIZE, EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core import kv_tiers
from octavo_engine.core.build import build_engine
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig
from octavo_engine.state.retention import KVRetention
from octavo_engine.tiers.price import is_worth_loading
from tests.engine.backends.driver import random_tokens
from tests.engine.models.tiny import tiny_model
from tests.fakes.backend import POISON, FakeBackend
from tests.fakes.requests import make_prompt, make_request

MIB = 1 / 1024
CONNECTOR = json.dumps(
    {"kv_connector": "tests.engine.core.test_kv_connector:MemoryConnector", "kv_role": "kv_both"}
)


@pytest.fixture(autouse=True)
def load_always(monkeypatch):
    """This backend computes quicker than any disk reads."""
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)


class PagedBackend(FakeBackend):
    """Blocks go in and out as bytes."""

    kv_bytes_per_block = 8 * BLOCK_SIZE

    def save_blocks(self, block_ids):
        return [self._blocks()[i].copy().view(np.uint8) for i in block_ids]

    def load_blocks(self, block_ids, pages):
        for i, page in zip(block_ids, pages, strict=True):
            self._blocks()[i] = page.view(np.uint64)

    def _blocks(self):
        return self.kv.reshape(-1, BLOCK_SIZE)


def make_engine(num_blocks=40, *, windows=(None,), **settings):
    backend = PagedBackend(num_blocks, windows=windows)
    config = EngineConfig(
        device="sim",
        max_model_len=256,
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        sim=SimConfig(kv_blocks=num_blocks),
        **settings,
    )
    engine, _ = build_engine(config, backend=backend)
    return engine, backend


def run(engine, *requests, steps=20_000):
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    endings = {}
    while engine.has_work:
        steps -= 1
        assert steps > 0, "a request is stuck"
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                endings[output.request_id] = output.finish_reason
        engine.scheduler.check_invariants()
        if engine.last_step_was_empty:  # a thread is about to bring what is waited for
            time.sleep(0.0005)
    return tokens, endings


def run_some(engine, backend, prefixes, chance, turn):
    """A few requests at once, which may share a beginning; their tokens are checked."""
    requests = []
    for _ in range(chance.randint(1, 5)):
        prompt = [*chance.choice(prefixes), *make_prompt(chance.randint(1, 40), first=turn)]
        retention = chance.choice(
            [None, KVRetention(0.01), KVRetention(60.0, chance.randint(0, 9))]
        )
        requests.append(
            make_request(
                prompt,
                max_tokens=chance.randint(1, 30),
                temperature=0.0,
                retention=retention,
            )
        )
    tokens, endings = run(engine, *requests)
    for request in requests:
        assert endings[request.request_id] == "length"
        wanted = backend.continuation(request.prompt_token_ids, request.params.max_tokens)
        assert tokens[request.request_id] == wanted


def ask(engine, backend, prompt, num_tokens=4, **given):
    """Its tokens are checked; returns how many of its prompt's were computed."""
    before = backend.num_tokens
    request = make_request(prompt, max_tokens=num_tokens, temperature=0.0, **given)
    tokens, _ = run(engine, request)
    assert tokens[request.request_id] == backend.continuation(prompt, num_tokens)
    return backend.num_tokens - before - (num_tokens - 1)


def forget_pool(engine, backend):
    assert engine.reset_prefix_cache()
    backend.poison_blocks(list(range(backend.num_blocks)))


@pytest.mark.parametrize("windows", [(None,), (None, 40), (40,), (None, None, 24)])
def test_a_prompt_that_left_the_pool_is_loaded_from_host_memory(windows):
    engine, backend = make_engine(windows=windows, kv_offloading_size=MIB)
    prompt = make_prompt(100)
    assert ask(engine, backend, prompt) == 100
    forget_pool(engine, backend)
    assert ask(engine, backend, prompt) == 100 - 96
    stats = engine.stats().tiers
    assert stats.host_hit_blocks > 0 and stats.disk_hit_blocks == 0
    engine.close()


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_the_first_repeat_after_a_restart_is_a_hit_on_disk(tmp_path, windows):
    prompt = make_prompt(100)
    engine, backend = make_engine(windows=windows, kv_disk_path=str(tmp_path))
    ask(engine, backend, prompt)
    engine.close()
    engine, backend = make_engine(windows=windows, kv_disk_path=str(tmp_path))
    assert ask(engine, backend, prompt) == 4
    assert engine.stats().tiers.disk_hit_blocks > 0
    engine.close()


def test_a_prefetch_brings_blocks_back_and_computes_nothing(tmp_path):
    prompt = make_prompt(100)
    engine, backend = make_engine(kv_disk_path=str(tmp_path))
    ask(engine, backend, prompt)
    engine.close()
    engine, backend = make_engine(kv_disk_path=str(tmp_path))
    before = backend.num_tokens
    ahead = make_request(prompt, is_prefetch=True, retention=KVRetention(60.0))
    assert run(engine, ahead) == ({ahead.request_id: []}, {ahead.request_id: "length"})
    assert backend.num_tokens == before
    stats = engine.stats()
    assert stats.tiers.disk_hit_blocks == stats.kv_blocks_retained == 6
    assert stats.kv_blocks_used == 0
    loads = stats.tiers.disk_load_seconds
    assert ask(engine, backend, prompt) == 4
    assert engine.stats().tiers.disk_load_seconds == loads, "it was in the pool"
    engine.close()


def test_salted_requests_find_only_their_own(tmp_path):
    engine, backend = make_engine(kv_disk_path=str(tmp_path))
    ask(engine, backend, make_prompt(64), cache_salt="a")
    forget_pool(engine, backend)
    assert ask(engine, backend, make_prompt(64), cache_salt="b") == 64
    assert ask(engine, backend, make_prompt(64), cache_salt="a") < 64
    engine.close()


def test_a_store_that_never_answers_costs_a_computation(monkeypatch, tmp_path):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.05)
    engine, backend = make_engine(kv_disk_path=str(tmp_path))
    prompt = make_prompt(80)
    ask(engine, backend, prompt)
    forget_pool(engine, backend)
    disk = engine._tiers.stored[0].store
    disk.flush()
    monkeypatch.setattr(disk, "fetch", lambda names, done, **_: None)
    started_at = time.monotonic()
    assert ask(engine, backend, prompt) == 80
    assert time.monotonic() - started_at < 5
    assert engine.stats().tiers.failed_reads == 1
    engine.close()


def test_what_is_slower_than_computing_is_not_loaded(monkeypatch):
    monkeypatch.setattr(kv_tiers, "is_worth_loading", is_worth_loading)
    engine, backend = make_engine(kv_offloading_size=MIB)
    prompt = make_prompt(80)
    ask(engine, backend, prompt)
    forget_pool(engine, backend)
    for _ in range(50):
        engine._tiers._host_meter.observe(1, 3600.0)
    assert ask(engine, backend, prompt) == 80
    assert engine.stats().tiers.refused == 1
    engine.close()


def test_a_disk_that_seems_too_slow_is_read_once_to_know_better(monkeypatch, tmp_path):
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda *, load_s, recompute_s: load_s < 1.0)
    engine, backend = make_engine(kv_disk_path=str(tmp_path))
    prompt = make_prompt(80)
    ask(engine, backend, prompt)
    tiers = engine._tiers
    tiers.stored[0].store.flush()
    forget_pool(engine, backend)
    tiers.stored[0].meter.replace(1, 3600.0)
    assert ask(engine, backend, prompt) == 80
    until = time.monotonic() + 5
    while tiers.stored[0]._trial is not None:
        assert time.monotonic() < until
        tiers.settle()
        time.sleep(0.001)
    forget_pool(engine, backend)
    assert ask(engine, backend, prompt) == 80 - 64
    assert engine.stats().tiers.refused == 1
    engine.close()


def test_an_aborted_request_leaves_its_fetch_behind(monkeypatch, tmp_path):
    engine, backend = make_engine(kv_disk_path=str(tmp_path))
    prompt = make_prompt(80)
    ask(engine, backend, prompt)
    forget_pool(engine, backend)
    held = []
    disk = engine._tiers.stored[0].store
    disk.flush()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "fetch", lambda *args, **_: held.append(args))
        request = make_request(prompt, max_tokens=2, temperature=0.0)
        engine.add(request)
        engine.step()
        assert held and engine._tiers.is_fetching
        engine.abort(request.request_id)
    disk.fetch(*held[0])
    disk.close()
    run(engine, make_request(5, max_tokens=1))
    assert not engine._tiers.is_fetching
    engine.close()


def test_spoiled_blocks_leave_the_tiers():
    engine, backend = make_engine(kv_offloading_size=MIB)
    prompt = make_prompt(80)
    backend.fail_after(prompt)
    request = make_request(prompt, max_tokens=2, temperature=0.0)
    _, endings = run(engine, request)
    assert endings[request.request_id] == "error"
    run(engine, make_request([1, 2, 3], max_tokens=1))
    assert len(engine._tiers.host) == 0
    engine.close()


def break_something(chance, folder, engine, backend):
    """One accident in a tier."""
    files = list(folder.glob("*/*.kv"))
    kind = chance.choice(["vanish", "tear", "flip", "clear", "none"])
    if kind == "clear" and engine.reset_prefix_cache():
        backend.poison_blocks(list(range(backend.num_blocks)))
    if not files or kind in ("none", "clear"):
        return
    path = chance.choice(files)
    try:
        data = bytearray(path.read_bytes())
        if kind == "vanish" or not data:  # torn to nothing before
            path.unlink()
        elif kind == "tear":
            path.write_bytes(data[: chance.randrange(len(data))])
        elif kind == "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
    except FileNotFoundError:
        return  # the engine dropped it meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_random_lives_with_accidents_yield_only_true_tokens(tmp_path, monkeypatch, seed, windows):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.2)
    chance = random.Random(seed)
    prefixes = [make_prompt(chance.randint(16, 150), first=i) for i in range(5)]
    for _life in range(3):
        engine, backend = make_engine(
            windows=windows,
            kv_offloading_size=chance.choice([0.0, 4096 / 2**30, MIB]),
            kv_disk_path=str(tmp_path),
            kv_disk_size=chance.choice([30_000 / 2**30, MIB]),
        )
        for turn in range(12):
            run_some(engine, backend, prefixes, chance, turn)
            free = [block.id for block in engine.scheduler.kv.pool.blocks if not block.is_published]
            backend.kv.reshape(-1, BLOCK_SIZE)[free] = POISON
            break_something(chance, tmp_path, engine, backend)
        engine.close()


def test_a_plug_in_device_has_no_tiers():
    config = EngineConfig(device="plugin", max_model_len=64, kv_offloading_size=1.0)
    with pytest.raises(ConfigError, match="not supported by --device plugin yet"):
        build_engine(config, backend=PagedBackend(5000))


def test_settings_that_cannot_work_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"--kv-disk-path .* cannot be used"):
        make_engine(kv_disk_path=str(file))
    with pytest.raises(ConfigError, match="not supported by the backend fake"):
        config = EngineConfig(device="sim", max_model_len=64, kv_offloading_size=1.0)
        build_engine(config, backend=FakeBackend(5000))
    with pytest.raises(ConfigError, match="--kv-offloading-size must be at least 0"):
        EngineConfig(kv_offloading_size=-1.0)
    with pytest.raises(ConfigError, match="--kv-disk-size must be above 0"):
        EngineConfig(kv_disk_size=0.0)
    with pytest.raises(ConfigError, match="need --enable-prefix-caching"):
        EngineConfig(kv_offloading_size=1.0, scheduler=SchedulerConfig(enable_prefix_caching=False))


WRITER = """
import sys
from tests.engine.core.test_kv_tiers import ask, make_engine
from tests.fakes.requests import make_prompt
engine, backend = make_engine(**dict([sys.argv[1:]]))
ask(engine, backend, make_prompt(100))
engine._tiers.stored[0].store.flush()
print("written", flush=True)
for number in range(1, 100000):
    ask(engine, backend, make_prompt(200, first=number))
"""


def kill_while_writing(**place):
    """An engine in a process of its own that has stored a prompt, and stores others."""
    [setting] = place.items()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, *setting], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"written\n"
        time.sleep(0.1)
        writer.kill()


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_files_and_the_first_repeat_is_a_hit(tmp_path):
    kill_while_writing(kv_disk_path=str(tmp_path))
    engine, backend = make_engine(kv_disk_path=str(tmp_path))
    assert ask(engine, backend, make_prompt(100)) == 4
    stats = engine.stats().tiers
    assert stats.disk_hit_blocks == 6 and stats.failed_reads == 0
    engine.close()


def tiny_backend(family, dtype):
    model = tiny_model(family)
    config = ModelConfig.from_hf(model.config)
    if dtype == "torch":
        return TorchBackend(config, model.checkpoint(), max_model_len=256)
    return NativeBackend(config, model.checkpoint(), max_model_len=256, dtype=dtype, num_threads=1)


def requests_that_come_again():
    """Twice each; two of four share a prefix."""
    return [
        make_request(
            [*random_tokens(90, seed=seed % 2), *random_tokens(10, seed=seed)],
            request_id=f"{turn}-{seed}", max_tokens=8, temperature=0.0, logprobs=2,
        )
        for turn in range(2)
        for seed in range(4)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "torch"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
def test_real_models_say_the_same_with_tiers_as_without(tmp_path, family, dtype):
    requests = requests_that_come_again()
    answers = []
    cases: list[dict[str, Any]] = [
        {},
        {"kv_offloading_size": MIB * 8, "kv_disk_path": str(tmp_path)},
    ]
    for settings in cases:
        config = EngineConfig(
            device="sim",
            max_model_len=256,
            scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=48),
            sim=SimConfig(kv_blocks=64),
            **settings,
        )
        engine, _ = build_engine(config, backend=tiny_backend(family, dtype))
        said = []
        for request in requests:
            engine.add(request)
            while engine.has_work:
                said += [(o.token_ids, o.logprobs) for o in engine.step().outputs]
            engine.scheduler.check_invariants()
            assert engine.reset_prefix_cache()
            engine.executor.poison_blocks(list(range(engine.stats().kv_blocks_total)))
        answers.append(said)
        tiers = engine.stats().tiers
        engine.close()
    if dtype == "torch":  # its sums depend on how a prompt is cut into steps
        tokens = [[ids for ids, _ in said] for said in answers]
        scores = [[one.logprob for _, row in said for one in row] for said in answers]
        assert tokens[0] == tokens[1] and scores[0] == pytest.approx(scores[1], abs=1e-4)
    else:
        assert answers[0] == answers[1]
    assert tiers is not None and tiers.host_hit_blocks > 0
