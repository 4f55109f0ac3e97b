"""KV blocks on their way between a device and pinned memory: the bits that left come back, no block
is overwritten before it is copied, and engines with tiers say what they say without.

Red when: slots are given back before they are copied; a load fills another slot than is placed;
saves take the slots of loads; steps ahead save nothing; pages come back while they are in use.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from octavo_engine.backends.torch import block_copies
from octavo_engine.backends.torch.block_copies import SlotCopies, count_slots
from octavo_engine.backends.torch.cuda import CudaBackend
from octavo_engine.backends.torch.device_kv import DeviceKV
from octavo_engine.backends.torch.pinned_pages import PinnedPages
from octavo_engine.backends.torch.plain import PlainKernels
from octavo_engine.backends.torch.triton_kernels import TritonKernels
from octavo_engine.caches import KVSpec, one_group
from octavo_engine.config import BLOCK_SIZE, EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core import kv_tiers, make_tiers
from octavo_engine.core.build import build_engine
from octavo_engine.core.process import wire
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import LIMITS, random_tokens
from tests.engine.backends.torch_cuda import pretend
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.variants import Variants
from tests.engine.core.test_kv_tiers import MIB, PagedBackend, ask, break_something, run_some
from tests.engine.core.test_kv_transfer import running, transfer
from tests.engine.models.tiny import tiny_model
from tests.fakes.backend import POISON
from tests.fakes.requests import make_prompt, make_request

pytestmark = pytest.mark.slow

LAYOUT = one_group([KVSpec(2, 16), KVSpec(1, 32), KVSpec(2, 16)])
NUM_BLOCKS, NUM_SLOTS = 12, 8
SHAPE = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=16)


@pytest.fixture(autouse=True)
def load_always(monkeypatch):
    """Tiny models compute quicker than anything is read."""
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)


class Rig:
    """A cache of random bytes, and copies of it."""

    def __init__(self, device, kernels="plain", *, has_scales=False, host_pages=20):
        dtype = torch.float8_e4m3fn if has_scales else torch.float16
        self.kv = DeviceKV(
            LAYOUT, num_blocks=NUM_BLOCKS, dtype=dtype, device=device, has_scales=has_scales
        )
        page_bytes = self.kv.page_words * 4
        made = PlainKernels() if kernels == "plain" else TritonKernels(device, dtype, SHAPE)
        self.woken = threading.Event()
        self.copies = SlotCopies(
            made, device, lambda: self.kv, num_slots=NUM_SLOTS, page_bytes=page_bytes,
            host_bytes=host_pages * page_bytes, is_stored=False, woken=self.woken.set,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        for region in self.kv.regions():
            words = rng.integers(-(2**31), 2**31, region.shape).astype(np.int32)
            region.copy_(torch.from_numpy(words))

    def block(self, block):
        """Its page, layer by layer."""
        parts = [region[:, block].cpu().numpy().reshape(-1) for region in self.kv.regions()]
        return np.concatenate(parts).view(np.uint8)

    def saved(self, blocks):
        copy = self.copies.begin_save(blocks)
        copy.wait()
        assert not copy.is_failed
        return copy.pages

    def loaded(self, pages, blocks):
        copy = self.copies.begin_load(pages)
        copy.wait()
        self.copies.place(copy, blocks)


@pytest.fixture(params=["plain", "triton"])
def kernels(request):
    return request.param


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are seen in the interpreter")
def test_whatever_is_moved_was_compiled_when_copies_were_opened(device, monkeypatch):
    variants = Variants(monkeypatch)
    rig = Rig(device, "triton", has_scales=True)
    known = variants.take()
    assert known
    for count in (1, 2, 3, 4, 5):
        rig.loaded(rig.saved(list(range(count))), list(range(count)))
    assert variants.take() <= known
    rig.copies.close()


@pytest.mark.parametrize("has_scales", [False, True])
def test_the_bits_that_come_back_are_those_that_left(device, kernels, has_scales):
    rig = Rig(device, kernels, has_scales=has_scales)
    before = [rig.block(block) for block in range(NUM_BLOCKS)]
    pages = rig.saved([3, 0, 7])
    for page, block in zip(pages, (3, 0, 7), strict=True):
        assert np.array_equal(page, before[block])
    rig.loaded(pages, [5, -1, 2])
    wanted = before.copy()
    wanted[5], wanted[2] = before[3], before[7]
    for block in range(NUM_BLOCKS):
        assert np.array_equal(rig.block(block), wanted[block]), block
    rig.copies.close()


def test_a_block_is_saved_as_steps_launched_before_leave_it(device):
    """It is overwritten right after, while the device may not even have begun."""
    rig = Rig(device)
    for _ in range(20):
        before = rig.block(4)
        if device.type == "cuda":
            torch.cuda._sleep(5_000_000)
        copy = rig.copies.begin_save([4])
        for region in rig.kv.regions():
            region[:, 4] += 1
        copy.wait()
        assert np.array_equal(copy.pages[0], before)
    rig.copies.close()


def test_slots_return_when_they_are_copied_and_a_quarter_is_for_loads(device, monkeypatch):
    rig = Rig(device)
    goes = threading.Event()
    move = SlotCopies._copy

    def held(self, *args, **options):
        assert goes.wait(10)
        move(self, *args, **options)

    monkeypatch.setattr(SlotCopies, "_copy", held)
    before = [rig.block(block) for block in range(NUM_BLOCKS)]
    assert rig.copies.num_saves_free == NUM_SLOTS - NUM_SLOTS // 4
    saves = [rig.copies.begin_save([block]) for block in range(6)]
    assert rig.copies.num_saves_free == 0 and rig.copies.num_loads_free == 2
    rig.kv.poison(list(range(6)))
    assert not any(save.is_done for save in saves)
    rig.woken.clear()
    goes.set()
    for block, save in enumerate(saves):
        save.wait()
        assert np.array_equal(save.pages[0], before[block])
    assert rig.woken.wait(5)
    assert rig.copies.num_loads_free == NUM_SLOTS
    rig.copies.close()


def test_a_copy_that_fails_says_so_and_gives_its_slots_back(device, monkeypatch):
    rig = Rig(device)

    def fails(self, *args, **options):
        raise RuntimeError("the link is down")

    with monkeypatch.context() as patch:
        patch.setattr(SlotCopies, "_copy", fails)
        save, load = rig.copies.begin_save([1]), rig.copies.begin_load([rig.block(1)])
        save.wait()
        load.wait()
        assert save.is_failed and load.is_failed
        rig.copies.drop(load)
    assert rig.copies.num_loads_free == NUM_SLOTS
    assert np.array_equal(rig.saved([2])[0], rig.block(2))
    rig.copies.close()


def test_pages_from_elsewhere_are_kept_pinned_from_then_on(device):
    rig = Rig(device)
    page = rig.block(2)
    page.flags.writeable = False
    copy = rig.copies.begin_load([page])
    copy.wait()
    assert rig.copies._pages.has(copy.pages[0]) and not rig.copies._pages.has(page)
    rig.copies.place(copy, [9])
    assert np.array_equal(rig.block(9), page)
    rig.copies.close()


def test_a_page_comes_back_when_nothing_refers_to_it():
    pages = PinnedPages(2, 64, is_pinned=False)
    first, second = pages.take(), pages.take()
    assert pages.take() is None and len(pages) == 0
    assert first is not None and second is not None
    part = first[8:16]
    first[:] = 7
    del first
    gc.collect()
    assert len(pages) == 0, "a part of it is in use"
    assert part.tolist() == [7] * 8
    del part
    assert len(pages) == 1
    third = pages.take()
    assert third is not None and pages.has(third)
    del second, third
    assert len(pages) == 2


def test_memory_that_cannot_be_pinned_is_a_sentence(monkeypatch):
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(ConfigError, match=r"cannot be pinned .CUDA error 2.: lower --kv-off"):
        PinnedPages(2, 4096, is_pinned=True)


def test_slots_hold_a_steps_blocks_and_no_more_than_a_bound():
    assert count_slots(LIMITS, 1024) == LIMITS.max_tokens // 16 + block_copies.SPARE_SLOTS
    assert count_slots(LIMITS, 64 << 20) == 8
    assert count_slots(LIMITS, 1 << 30) == 2


def test_memory_sleeps_and_wakes_with_nothing_under_way(device):
    rig = Rig(device)
    page = rig.saved([1])[0]
    late = rig.copies.begin_load([page])
    rig.copies.release()
    assert late.is_done and rig.copies.num_saves_free == rig.copies.num_loads_free == 0
    rig.copies.restore()
    rig.copies.place(late, [3])  # of before: its slots are not those of now
    assert not np.array_equal(rig.block(3), page)
    rig.loaded([page], [3])
    assert np.array_equal(rig.block(3), page)
    assert rig.copies.num_loads_free == NUM_SLOTS
    rig.copies.close()


# ── engines ──


class Copying(PagedBackend):
    """The backend that knows every slot's truth, whose blocks are copied by threads that take their
    time, through few slots."""

    def open_copies(self, *, host_bytes, is_stored, woken):
        blocks = self._blocks()
        words = torch.from_numpy(blocks.view(np.int64)[None]).view(torch.int32)
        cache = SimpleNamespace(regions=lambda: [words])
        return SlotCopies(
            PlainKernels(), torch.device("cpu"), lambda: cache, num_slots=5,
            page_bytes=self.kv_bytes_per_block, host_bytes=host_bytes, is_stored=is_stored,
            woken=woken,
        )  # fmt: skip


def copying_engine(num_blocks=40, **settings):
    backend = Copying(num_blocks)
    config = EngineConfig(
        device="sim", max_model_len=256, sim=SimConfig(kv_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), **settings,
    )  # fmt: skip
    return build_engine(config, backend=backend)[0], backend


@pytest.fixture
def few_pages(monkeypatch):
    monkeypatch.setattr(block_copies, "STORED_BYTES", 40 * 8 * BLOCK_SIZE)


@pytest.mark.usefixtures("few_pages")
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_with_accidents_yield_only_true_tokens(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.2)
    chance = random.Random(seed)
    move = SlotCopies._copy

    def slow(self, *args, **options):
        if chance.random() < 0.2:
            time.sleep(0.002)
        if chance.random() < 0.01:
            raise RuntimeError("the link is down")
        move(self, *args, **options)

    prefixes = [make_prompt(chance.randint(16, 150), first=i) for i in range(5)]
    hits = 0
    for _life in range(3):
        engine, backend = copying_engine(
            kv_offloading_size=chance.choice([0.0, 4096 / 2**30, MIB / 16]),
            kv_disk_path=str(tmp_path),
            kv_disk_size=chance.choice([30_000 / 2**30, MIB]),
        )
        with monkeypatch.context() as patch:
            patch.setattr(SlotCopies, "_copy", slow)
            for turn in range(12):
                run_some(engine, backend, prefixes, chance, turn)
                pool = engine.scheduler.kv.pool
                free = [block.id for block in pool.blocks if not block.is_published]
                backend.kv.reshape(-1, BLOCK_SIZE)[free] = POISON
                break_something(chance, tmp_path, engine, backend)
            stats = engine.stats().tiers
            hits += stats.host_hit_blocks + stats.disk_hit_blocks
            engine.close()
    assert hits > 0


@pytest.mark.usefixtures("few_pages")
def test_a_prompt_of_more_blocks_than_slots_comes_back_whole(tmp_path):
    engine, backend = copying_engine(kv_disk_path=str(tmp_path))
    prompt = make_prompt(200)
    assert ask(engine, backend, prompt) == 200
    engine.close()  # flushes
    engine, backend = copying_engine(kv_disk_path=str(tmp_path))
    assert ask(engine, backend, prompt) == 200 - 192
    assert engine.stats().tiers.disk_hit_blocks == 12
    engine.close()


def test_what_sleeps_is_saved_before(device):
    engine, backend = copying_engine(kv_offloading_size=MIB)
    prompt = make_prompt(200)
    ask(engine, backend, prompt)
    engine.sleep(on=True)
    backend.poison_blocks(list(range(backend.num_blocks)))
    engine.sleep(on=False)
    assert ask(engine, backend, prompt) == 200 - 192
    engine.close()


def build(device, kernels="plain", **options):
    model = tiny_model("llama")
    return open_cuda(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=256,
        dtype=torch.float32, device=device.type, kernels=kernels, **options,
    )  # fmt: skip


CONFIG = EngineConfig(
    device="sim", max_model_len=256, sim=SimConfig(kv_blocks=40),
    scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=48),
)  # fmt: skip


def answers(engine, requests, *, forgets):
    """Of each request. With `forgets` the cache loses all after each round of three."""
    tokens: dict[str, list[int]] = {}
    for start in range(0, len(requests), 3):
        for request in requests[start : start + 3]:
            tokens[request.request_id] = []
            engine.add(request)
        while engine.has_work:
            for output in engine.step().outputs:
                assert output.finish_reason != "error", output.error
                tokens[output.request_id] += output.token_ids
            engine.scheduler.check_invariants()
        if forgets:
            engine._tiers.flush()
            assert engine.reset_prefix_cache()
            engine.executor.poison_blocks(list(range(engine.stats().kv_blocks_total)))
    return tokens


def make_requests(max_tokens=6, length=70):
    return [
        make_request(
            [*random_tokens(length, seed=seed % 2), *random_tokens(9, seed=seed)],
            request_id=f"{turn}-{seed}", max_tokens=max_tokens, temperature=0.0,
        )
        for turn in range(2)
        for seed in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "kv_cache_dtype"), [("plain", "auto"), ("plain", "fp8"), ("triton", "auto")]
)
@pytest.mark.parametrize("is_ahead", [False, True])
def test_answers_with_tiers_are_those_without(tmp_path, device, kernels, kv_cache_dtype, is_ahead):
    if kernels == "triton" and device.type == "cpu" and not is_ahead:
        pytest.skip("slow in the interpreter, and the other one has steps ahead")
    requests = make_requests(3, 26) if kernels == "triton" else make_requests()
    config = dataclasses.replace(CONFIG, async_scheduling=is_ahead)
    options = {"kernels": kernels, "kv_cache_dtype": kv_cache_dtype}
    in_plain = options | {"kernels": "plain"}
    engine, _ = build_engine(config, backend=build(device, **in_plain))
    truth = answers(engine, requests, forgets=False)
    engine.close()
    stored = config.replace(kv_offloading_size=MIB * 8, kv_disk_path=str(tmp_path))
    for life in range(1 if kernels == "triton" else 2):
        engine, _ = build_engine(stored, backend=build(device, **options))
        assert answers(engine, requests[:3] if life else requests, forgets=True).items() <= (
            truth.items()
        )
        stats = engine.stats().tiers
        assert stats is not None
        assert stats.disk_hit_blocks > 0 if life else stats.host_hit_blocks > 0
        engine.close()


@pytest.fixture
def some_gpu(request):
    """A pretended one where there is no other."""
    if not torch.cuda.is_available():
        request.getfixturevalue("pretended")


@pytest.mark.usefixtures("some_gpu")
def test_captured_steps_run_on_while_blocks_come_and_go_and_the_memory_sleeps():
    model = tiny_model("llama")
    backend = open_cuda(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=256,
        dtype=torch.float32, kernels="triton",
    )  # fmt: skip
    engine, _ = build_engine(CONFIG.replace(kv_offloading_size=MIB * 8), backend=backend)
    requests = make_requests(4, 26)
    first = answers(engine, requests[:3], forgets=True)
    assert backend._graphs is not None and backend._graphs.captured
    engine.sleep(on=True)
    assert backend._copies is not None and backend._copies.num_loads_free == 0
    engine.sleep(on=False)
    again = answers(engine, requests[3:], forgets=True)
    assert [first[f"0-{seed}"] for seed in range(3)] == [again[f"1-{seed}"] for seed in range(3)]
    stats = engine.stats().tiers
    assert stats is not None and stats.host_hit_blocks > 0
    engine.close()


def test_an_idle_engine_saves_what_it_computed_without_a_further_request():
    engine, _ = copying_engine(kv_offloading_size=MIB)
    with running(engine) as inbox:
        inbox.put(wire.AddRequests([make_request(make_prompt(200), max_tokens=1)]))
        until = time.monotonic() + 10
        while len(engine._tiers.host) < 12:
            assert time.monotonic() < until
            time.sleep(0.002)


def test_blocks_that_another_engine_computed_are_loaded(device):
    if device == pretend.DEVICE and torch.cuda.get_device_name() == "pretended":
        pytest.skip("it pretends in one thread only, and engines have one each")
    requests = make_requests(4)[:3]
    settings = dataclasses.replace(CONFIG, async_scheduling=True)
    engines, source = [], None
    for role in ("kv_producer", "kv_consumer"):
        config = settings.replace(kv_transfer_config=transfer(role))
        engine, info = build_engine(config, backend=build(device))
        source = source or info.kv_source
        engines.append(engine)
    first, second = engines
    truth = answers(first, requests, forgets=False)
    with running(first):
        sent = [msgspec.structs.replace(request, kv_source=source) for request in requests]
        assert answers(second, sent, forgets=False) == truth
    stats = second.stats().tiers
    assert stats is not None and stats.peer_hit_blocks >= 2 * 4  # two share a beginning
    second.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is free there changes")
def test_memory_for_copies_is_counted_before_kv_gets_its_share(pretended):
    model = tiny_model("llama")
    left: dict[bool, int] = {}
    for has_tiers in (False, True):
        backend = open_cuda(
            ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=512,
            kernels="triton", use_graphs=False, has_tiers=has_tiers,
        )  # fmt: skip
        left[has_tiers] = backend.kv_memory(LIMITS, 1.0) or 0
    page_bytes = backend.kv_bytes_per_block
    assert left[False] - left[True] == count_slots(LIMITS, page_bytes) * page_bytes


def test_another_build_or_device_has_blocks_of_its_own(device, monkeypatch):
    backend = build(device)
    key = make_tiers.disk_key(b"model", backend)
    assert key == make_tiers.disk_key(b"model", build(device))
    monkeypatch.setattr(CudaBackend, "isa", "another")
    assert key != make_tiers.disk_key(b"model", backend)
