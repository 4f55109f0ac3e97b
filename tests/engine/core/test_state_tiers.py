"""Models with recurrent states and tiers: what left the slots comes back, and no bit differs.

After each request the pool and the slots are forgotten and poisoned, so what is found was loaded.
Snapshots stand at every 32nd token here.

Red when: a snapshot is saved under another block's name, or loaded into another slot; one that was
overwritten is saved; a prefix is gone on with without its states; the states' page is taken for a
block's; spoiled states stay in a tier; a slot that is being saved to is loaded into.
"""

from __future__ import annotations

import json
import random
import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from octavo_engine import _native
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.caches import STATE_GROUP
from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core import build, kv_peers, kv_tiers
from octavo_engine.core.build import build_engine
from octavo_engine.core.capacity import Capacity
from octavo_engine.core.make_tiers import GIB, make_tiers, page_sizes
from octavo_engine.core.process import wire
from octavo_engine.errors import ConfigError
from octavo_engine.kv.states import StateSnapshots
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.tiers import run_format, run_store
from octavo_engine.tiers.page import block_name, is_state
from tests.engine.backends.driver import random_tokens
from tests.engine.core.test_kv_transfer import running, transfer
from tests.engine.models.tiny import tiny_model
from tests.fakes.random_life import random_requests
from tests.fakes.requests import make_request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from octavo_engine.config import DType
    from octavo_engine.core.engine import Engine
    from octavo_engine.state.kv_source import KVSource
    from octavo_engine.state.outputs import TierStats
    from octavo_engine.state.request import EngineRequest

    Answers = dict[str, tuple[list[int], list[float]]]

STRIDE = 32
MAX_NUM_SEQS = 4
MODELS = ["lfm2", "jamba", "mamba2", "qwen3-next", "falcon-h1", "zamba2"]


@pytest.fixture(autouse=True)
def load_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models compute quicker than any disk reads; and a busy machine may take its time."""
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 20.0)
    monkeypatch.setattr(kv_tiers, "LEAST_FOLLOW_S", 20.0)
    monkeypatch.setattr(kv_peers, "LOOKUP_S", 20.0)
    monkeypatch.setattr(build, "StateSnapshots", partial(StateSnapshots, stride=STRIDE))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        folder, model = tmp_path_factory.mktemp(name), tiny_model(name)
        save_file(model.tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(model.config))
        return folder

    return write


def make_engine(
    model: Path, *, dtype: DType = "float32", num_snapshots: int = 12, num_blocks: int = 60,
    budget: int = 64, **settings: Any,
) -> tuple[Engine, KVSource | None]:  # fmt: skip
    capacity = Capacity(num_blocks, 256, "", MAX_NUM_SEQS, num_snapshots)
    config = EngineConfig(
        model=str(model),
        device="cpu",
        dtype=dtype,
        num_threads=1,
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=budget),
        **settings,
    )
    with mock.patch.object(build, "_capacity", lambda *_: capacity):
        engine, info = build_engine(config)
    return engine, info.kv_source


def ask(engine: Engine, *requests: EngineRequest) -> Answers:
    """Tokens and log-probabilities by request."""
    for request in requests:
        engine.add(request)
    said: Answers = {r.request_id: ([], []) for r in requests}
    for _ in range(20_000):
        for output in engine.step().outputs:
            assert output.finish_reason in (None, "length"), output
            tokens, scores = said[output.request_id]
            tokens += output.token_ids
            scores += [one.logprob for one in output.logprobs]
        engine.scheduler.check_invariants()
        if not engine.has_work:
            return said
        if engine.last_step_was_empty:  # a thread is about to bring what is waited for
            time.sleep(0.0005)
    raise AssertionError("a request is stuck")


def num_found(engine: Engine, request: EngineRequest) -> int:
    """Prompt tokens of it that need not be computed."""
    before = hits(engine)
    ask(engine, request)
    return hits(engine) - before


def forget(engine: Engine) -> None:
    assert engine.reset_prefix_cache()
    states = engine.scheduler.kv.states
    assert states is not None
    engine.executor.poison_blocks(list(range(engine.stats().kv_blocks_total)))
    backend_of(engine).poison_states(list(range(MAX_NUM_SEQS + states.num_snapshots)))


def backend_of(engine: Engine) -> NativeBackend:
    backend = engine.executor._backend  # type: ignore[attr-defined]
    assert isinstance(backend, NativeBackend)
    return backend


def of_prompt(prompt: Sequence[int], **given: Any) -> EngineRequest:
    given = {"max_tokens": 4, "temperature": 0.0, "logprobs": 0, "ignore_eos": True} | given
    source = given.pop("kv_source", None)
    return msgspec.structs.replace(make_request(list(prompt), **given), kv_source=source)


def hits(engine: Engine) -> int:
    return engine.stats().prefix_hits


def tiers_of(engine: Engine) -> TierStats:
    tiers = engine.stats().tiers
    assert tiers is not None
    return tiers


def requests_that_come_again() -> list[EngineRequest]:
    """Twice each; two of four share a prefix."""
    return [
        of_prompt(
            [*random_tokens(90, seed=seed % 2), *random_tokens(10, seed=seed)],
            request_id=f"{turn}-{seed}",
            max_tokens=8,
        )
        for turn in range(2)
        for seed in range(4)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_without_tiers(
    folder: Callable[[str], Path], tmp_path: Path, name: str, dtype: DType
) -> None:
    model, requests, answers = folder(name), requests_that_come_again(), []
    cases: list[dict[str, Any]] = [
        {},
        {"kv_offloading_size": 0.1},
        {"kv_disk_path": str(tmp_path / "disk"), "budget": 23},
        {"kv_offloading_size": 0.0001, "kv_shared_store": str(tmp_path / "shared")},
    ]
    (tmp_path / "shared").mkdir()
    for settings in cases:
        engine, _ = make_engine(model, dtype=dtype, **settings)
        said: Answers = {}
        for request in requests:
            said |= ask(engine, request)
            for tier in () if engine._tiers is None else engine._tiers.stored:
                assert tier.store.flush()
            forget(engine)
        answers.append(said)
        found = hits(engine)
        engine.close()
        # All of the second turn, as far as the last snapshot.
        assert found >= 4 * 96 if settings else found == 0
    assert answers.count(answers[0]) == len(cases)


def test_a_snapshot_on_disk_is_found_after_a_restart(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, prompt = folder("qwen3-next"), random_tokens(100)
    engine, _ = make_engine(model, kv_disk_path=str(tmp_path))
    truth = ask(engine, of_prompt(prompt, request_id="a"))["a"]
    engine.close()
    engine, _ = make_engine(model, kv_disk_path=str(tmp_path))
    assert ask(engine, of_prompt(prompt, request_id="a"))["a"] == truth
    assert hits(engine) == 96
    assert tiers_of(engine).disk_hit_blocks == 6 + 1
    engine.close()


def test_of_a_text_the_last_snapshot_is_kept_and_those_that_were_used(
    folder: Callable[[str], Path],
) -> None:
    engine, _ = make_engine(folder("jamba"), kv_offloading_size=0.1)
    assert engine._tiers is not None and engine._tiers.host is not None
    prompt = random_tokens(200)

    def kept() -> int:
        assert engine._tiers is not None and engine._tiers.host is not None
        return sum(map(is_state, engine._tiers.host._pages))

    ask(engine, of_prompt(prompt))
    assert kept() == 1
    ask(engine, of_prompt([*prompt[:70], *random_tokens(40, seed=3)]))  # from 64 on; ends at 96
    assert kept() == 3
    forget(engine)
    for length, found in ((200, 192), (100, 64), (64, 0)):
        assert num_found(engine, of_prompt(prompt[:length])) == found
        forget(engine)
    engine.close()


def test_an_answer_that_was_stopped_is_gone_on_with(folder: Callable[[str], Path]) -> None:
    engine, _ = make_engine(folder("jamba"), kv_offloading_size=0.1)
    prompt = random_tokens(100)
    engine.add(of_prompt(prompt, request_id="stopped", max_tokens=100))
    tokens: list[int] = []
    while len(tokens) < 40:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    engine.abort("stopped")
    assert engine._tiers is not None
    engine._tiers.flush()
    forget(engine)
    assert num_found(engine, of_prompt([*prompt, *tokens])) == 128
    engine.close()


def test_states_that_are_sooner_computed_than_copied_are_not_saved(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine(folder("jamba"), kv_offloading_size=0.1)
    assert engine._tiers is not None and engine._tiers.host is not None
    seen: list[tuple[float, float]] = []

    def is_worth_loading(*, load_s: float, recompute_s: float) -> bool:
        seen.append((load_s, recompute_s))
        return len(seen) > 1

    monkeypatch.setattr(kv_tiers, "is_worth_loading", is_worth_loading)
    monkeypatch.setattr(StepTimeModel, "prefill_s", lambda self, num_tokens: num_tokens * 1e-3)
    for tokens in (random_tokens(100), random_tokens(200, seed=5)):
        ask(engine, of_prompt(tokens))
    assert sum(map(is_state, engine._tiers.host._pages)) == 1
    load_s = seen[0][0]
    assert load_s > 0.0 and seen == [(load_s, 96 * 1e-3), (load_s, 192 * 1e-3)]
    engine.close()


def test_a_snapshot_that_was_overwritten_is_not_saved(folder: Callable[[str], Path]) -> None:
    """In the step that begins with it: the only slot is saved to further on."""
    engine, _ = make_engine(folder("jamba"), kv_offloading_size=0.1, num_snapshots=1, budget=32)
    assert engine._tiers is not None and engine._tiers.host is not None
    prompt, host = random_tokens(100), engine._tiers.host
    truth = ask(engine, of_prompt(prompt[:70], request_id="a"))["a"]
    host.drop([name for name in host._pages if is_state(name)])
    ask(engine, of_prompt(prompt))
    assert hits(engine) == 64 and tiers_of(engine).unsaved_blocks == 1
    forget(engine)
    assert ask(engine, of_prompt(prompt[:70], request_id="a"))["a"] == truth
    engine.close()


def test_of_a_model_without_attention_only_snapshots_are_held(
    folder: Callable[[str], Path],
) -> None:
    engine, _ = make_engine(folder("mamba2"), kv_offloading_size=0.1)
    prompt = random_tokens(100)
    ask(engine, of_prompt(prompt))
    forget(engine)
    assert num_found(engine, of_prompt(prompt)) == 96
    stats = tiers_of(engine)
    assert stats.host_blocks == stats.host_hit_blocks == 1
    state_bytes = backend_of(engine).cache_layout.state_bytes
    assert stats.saved_bytes == stats.loaded_bytes == stats.host_bytes == state_bytes
    engine.close()


def test_a_prefix_without_its_states_is_computed(folder: Callable[[str], Path]) -> None:
    engine, _ = make_engine(folder("jamba"), kv_offloading_size=0.1)
    assert engine._tiers is not None and engine._tiers.host is not None
    prompt = random_tokens(100)
    truth = ask(engine, of_prompt(prompt, request_id="a"))["a"]
    forget(engine)
    host = engine._tiers.host
    host.drop([name for name in host._pages if is_state(name)])
    assert ask(engine, of_prompt(prompt, request_id="a"))["a"] == truth
    assert hits(engine) == 0 and tiers_of(engine).loaded_bytes == 0
    engine.close()


def test_spoiled_states_leave_the_tiers(folder: Callable[[str], Path], tmp_path: Path) -> None:
    engine, _ = make_engine(
        folder("jamba"), kv_offloading_size=0.1, kv_disk_path=str(tmp_path), num_snapshots=4
    )
    assert engine._tiers is not None
    stores = [engine._tiers.host, engine._tiers.stored[0].store]
    prompt = random_tokens(100)
    ask(engine, of_prompt(prompt))
    assert stores[1].flush()  # type: ignore[union-attr]
    kv, request = engine.scheduler.kv, of_prompt(prompt, request_id="spoiled", max_tokens=50)
    engine.add(request)
    engine.step()
    sequence = engine.scheduler.sequences["spoiled"]
    name = block_name(sequence.digests[5], STATE_GROUP)
    assert all(name in store for store in stores)  # type: ignore[operator]
    kv.spoiled += sequence.digests
    engine._tiers.save()
    assert not any(name in store for store in stores)  # type: ignore[operator]
    engine.abort("spoiled")
    engine.close()


def test_without_a_free_slot_nothing_is_loaded(folder: Callable[[str], Path]) -> None:
    engine, _ = make_engine(folder("jamba"), kv_offloading_size=0.1, num_snapshots=1)
    states = engine.scheduler.kv.states
    assert states is not None
    prompt = random_tokens(100)
    truth = ask(engine, of_prompt(prompt, request_id="a"))["a"]
    forget(engine)
    slots, states.free = states.free, []  # as if they were being saved to
    states.num_snapshots = 0
    assert ask(engine, of_prompt(prompt, request_id="a"))["a"] == truth
    assert hits(engine) == 0
    states.free, states.num_snapshots = slots, 1
    engine.close()


@pytest.mark.parametrize("name", ["jamba", "mamba2"])
@pytest.mark.parametrize("is_computing", [False, True])
def test_another_engine_goes_on_with_what_one_computed(
    folder: Callable[[str], Path], name: str, is_computing: bool
) -> None:
    model = folder(name)
    first, source = make_engine(model, kv_transfer_config=transfer("kv_producer"))
    second, _ = make_engine(model, kv_transfer_config=transfer("kv_consumer"))
    assert source is not None
    prompt = random_tokens(200)
    truth = ask(second, of_prompt(prompt, request_id="a", max_tokens=20))["a"]
    forget(second)
    with running(first) as inbox:
        request = of_prompt(prompt, request_id="p", max_tokens=1)
        inbox.put(wire.AddRequests([request]))
        if not is_computing:
            while first.stats().prefix_queries == 0 or first.has_work:
                time.sleep(0.005)
        source = msgspec.structs.replace(source, is_computing=is_computing)
        again = of_prompt(prompt, request_id="a", max_tokens=20, kv_source=source)
        assert ask(second, again)["a"] == truth
    assert hits(second) == 192
    stats = tiers_of(second)
    assert stats.peer_hit_blocks > 0 and stats.peer_failures == 0 and stats.failed_reads == 0
    second.close()


def test_a_slot_is_saved_and_loaded_whole() -> None:
    states = _native.StateCache(3, [5, 40])
    assert states.bytes_per_slot == (16 + 48) * 4
    pages = [np.frombuffer(random.Random(i).randbytes(256), np.uint8).copy() for i in range(3)]
    for slot, page in enumerate(pages):
        states.load(slot, page)
    states.copy(np.array([[2, 0]], np.int32))
    states.poison([2])
    for slot, page in enumerate([pages[2], pages[1], np.full(256, 0xFF, np.uint8)]):
        found = np.empty(256, np.uint8)
        states.save(slot, found)
        assert np.array_equal(found, page)
    with pytest.raises(ValueError, match="slot 3 of 3"):
        states.save(3, pages[0])
    with pytest.raises(ValueError, match="a page of 255 bytes; it must have 256"):
        states.load(0, pages[0][1:])


def test_of_an_engines_snapshots_the_last_that_is_left_is_taken(
    folder: Callable[[str], Path],
) -> None:
    """An engine that serves others has slots for few of them."""
    model = folder("jamba")
    first, source = make_engine(model, kv_transfer_config=transfer("kv_producer"))
    second, _ = make_engine(model, kv_transfer_config=transfer("kv_consumer"))
    prompt = random_tokens(200)
    truth = ask(first, of_prompt(prompt, request_id="a"))["a"]
    states = first.scheduler.kv.states
    assert states is not None
    states.retract(list(states.cached)[-1:])
    with running(first):
        again = of_prompt(prompt, request_id="a", kv_source=source)
        assert ask(second, again)["a"] == truth
    assert hits(second) == 160 and tiers_of(second).failed_reads == 0
    second.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_random_life(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Little of everything: blocks, slots, host memory; files are lost, reads fail."""
    chance = random.Random(7)
    model = folder(name)
    requests = random_requests(chance)
    plain, _ = make_engine(model, num_snapshots=20, num_blocks=120)
    truth: Answers = {}
    for request in requests:
        truth |= ask(plain, request)
        forget(plain)
    sizes = page_sizes(backend_of(plain))
    plain.close()
    engine, _ = make_engine(
        model, num_snapshots=3, num_blocks=40, budget=32, kv_disk_path=str(tmp_path),
        kv_offloading_size=(12 * sizes.block + 4 * sizes.state) / GIB,
    )  # fmt: skip
    assert engine._tiers is not None
    disk, read = engine._tiers.stored[0].store, run_format.read_page

    def read_page(*args: Any) -> Any:
        if chance.random() < 0.02:
            raise run_format.TierFileError("it is made up")
        return read(*args)

    monkeypatch.setattr(run_store, "read_page", read_page)
    for turn in range(10):
        some = chance.sample(requests, 5)
        for request_id, said in ask(engine, *some).items():
            assert said == truth[request_id]
        assert disk.flush()
        if turn % 2:
            forget(engine)
    stats = tiers_of(engine)
    assert stats.host_hit_blocks > 0 and stats.disk_hit_blocks > 0
    engine.close()


def test_what_cannot_move_states_says_so(tmp_path: Path) -> None:
    backend: Any = SimpleNamespace(
        name="torch", save_blocks=lambda ids: [], load_blocks=lambda ids, pages: None
    )
    scheduler: Any = SimpleNamespace(kv=SimpleNamespace(states=StateSnapshots(4, 4)))
    config = EngineConfig(device="sim", kv_disk_path=str(tmp_path))
    with pytest.raises(ConfigError, match="recurrent states by the backend torch"):
        make_tiers(config, backend, scheduler, b"")
    backend.save_states, backend.load_states = lambda slot: None, lambda slot, page: None
    connector = {"kv_connector": "package:Connector", "kv_role": "kv_both"}
    config = EngineConfig(device="sim", kv_transfer_config=json.dumps(connector))
    with pytest.raises(ConfigError, match="takes no recurrent states"):
        make_tiers(config, backend, scheduler, b"")
