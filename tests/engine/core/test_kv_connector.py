"""Engines with a connector of another package: every token is the truth of its prefix, whatever
the connector does.

The backend's next token depends on every slot of the KV cache that is seen, so a block with another
one's bytes, or with none, is a wrong token.

Red when: bytes that were not saved under a block's name are taken; a connector that raises or hangs
holds a request; a spoiled block is found by another engine.
"""

import json
import random
import threading
import time
from typing import ClassVar

import numpy as np
import pytest

from octavo_engine.config import BLOCK_SIZE, EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core import kv_peers, kv_tiers
from octavo_engine.core.build import build_engine
from octavo_engine.errors import ConfigError
from octavo_engine.tiers import connector_blocks
from octavo_engine.tiers.connector import (
    KV_LAYER,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from octavo_engine.tiers.page import block_name
from tests.docs.pages import ROOT
from tests.engine.core.test_kv_tiers import (
    ask,
    forget_pool,
    requests_that_come_again,
    run_some,
    tiny_backend,
)
from tests.engine.core.test_kv_tiers import make_engine as make_tiered_engine
from tests.fakes.lmcache_server import lmcache_server
from tests.fakes.requests import make_prompt


@pytest.fixture(autouse=True)
def load_always(monkeypatch):
    """This backend computes quicker than any connector brings blocks."""
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    monkeypatch.setattr(connector_blocks, "RETRY_S", 0.0)
    MemoryConnector.blocks.clear()
    MemoryConnector.calls.clear()
    MemoryConnector.finished.clear()


class Transfer(KVConnectorMetadata):
    def __init__(self, loads, saves):
        self.loads, self.saves = loads, saves


class MemoryConnector(KVConnectorBase_V1):
    """Holds rows in this process, for all engines."""

    blocks: ClassVar[dict[bytes, np.ndarray]] = {}
    calls: ClassVar[list[str]] = []
    finished: ClassVar[list[str]] = []
    last_request: ClassVar[str] = ""
    is_async = False

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.loads = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        assert self.role is KVConnectorRole.SCHEDULER
        place = first = num_computed_tokens // BLOCK_SIZE
        while place < len(request.block_hashes) and request.block_hashes[place] in self.blocks:
            place += 1
        return (place - first) * BLOCK_SIZE, self.is_async

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        assert 0 < num_external_tokens <= len(blocks.get_block_ids()[0]) * BLOCK_SIZE
        self.request_id, self.loads = request.request_id, blocks.blocks

    def build_connector_meta(self, scheduler_output):
        loads, self.loads = self.loads, []
        return Transfer(loads, scheduler_output.saved_blocks)

    def request_finished(self, request, block_ids):
        self.finished.append(request.request_id)
        return super().request_finished(request, block_ids)

    def register_kv_caches(self, kv_caches):
        assert self.role is KVConnectorRole.WORKER
        self.rows = kv_caches[KV_LAYER]

    def transfer(self) -> Transfer:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Transfer)
        return metadata

    def start_load_kv(self, forward_context, **kwargs):
        for block in self.transfer().loads:
            self.rows[block.block_id] = self.blocks[block.block_hash]
            self.calls.append("load")

    def wait_for_layer_load(self, layer_name):
        assert layer_name == KV_LAYER

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        for block in self.transfer().saves:
            self.blocks[block.block_hash] = kv_layer[block.block_id].copy()

    def wait_for_save(self):
        pass


def make_engine(kind="MemoryConnector", role="kv_both", *, extra=None, **settings):
    config = {
        "kv_connector": f"{__name__}:{kind}", "kv_role": role,
        "kv_connector_extra_config": extra or {},
    }  # fmt: skip
    return make_tiered_engine(kv_transfer_config=json.dumps(config), **settings)


def saved(engine):
    assert engine._tiers._connector.flush(10.0)


@pytest.mark.parametrize("windows", [(None,), (None, 40), (40,), (None, None, 24)])
def test_a_prompt_computed_by_another_engine_is_loaded(windows):
    first, first_backend = make_engine(role="kv_producer", windows=windows)
    second, backend = make_engine(role="kv_consumer", windows=windows)
    prompt = make_prompt(100)
    assert ask(first, first_backend, prompt) == 100
    saved(first)
    assert ask(second, backend, prompt) == 100 - 96
    stats = second.stats().tiers
    assert stats.peer_hit_blocks > 0 and stats.failed_reads == 0 and stats.peer_failures == 0
    num_blocks = len(MemoryConnector.blocks)
    assert ask(second, backend, make_prompt(40, first=9)) == 40
    saved(second)
    assert len(MemoryConnector.blocks) == num_blocks, "a consumer saves nothing"
    first.close()
    second.close()
    assert len(set(MemoryConnector.finished)) == 2


def test_a_prompt_longer_than_the_buffer_is_loaded_in_parts(monkeypatch):
    monkeypatch.setattr(connector_blocks, "BUFFER_BYTES", 320)  # two rows
    first, first_backend = make_engine()
    second, backend = make_engine()
    prompt = make_prompt(100)
    ask(first, first_backend, prompt)
    saved(first)
    assert ask(second, backend, prompt) == 4
    first.close()
    second.close()


def test_salted_requests_find_only_their_own():
    engine, backend = make_engine()
    ask(engine, backend, make_prompt(64), cache_salt="a")
    saved(engine)
    forget_pool(engine, backend)
    assert ask(engine, backend, make_prompt(64), cache_salt="b") == 64
    assert ask(engine, backend, make_prompt(64), cache_salt="a") < 64
    engine.close()


class LaterConnector(MemoryConnector):
    """Needs more time to say what it has, and to load it."""

    is_async = True
    num_lookups = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.num_lookups += 1
        if self.num_lookups % 3:
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def start_load_kv(self, forward_context, **kwargs):
        loads = self.transfer().loads
        if loads:
            self.polls, self.rest = 0, loads

    def get_finished(self, finished_req_ids):
        self.polls = getattr(self, "polls", 0) + 1
        if self.polls < 5 or not getattr(self, "rest", None):
            return None, None
        for block in self.rest:
            self.rows[block.block_id] = self.blocks[block.block_hash]
        self.rest = []
        return None, {MemoryConnector.last_request}

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        MemoryConnector.last_request = request.request_id
        super().update_state_after_alloc(request, blocks, num_external_tokens)


def test_a_load_that_goes_on_after_it_began_is_waited_for():
    engine, backend = make_engine("LaterConnector")
    ask(engine, backend, make_prompt(100))
    saved(engine)
    forget_pool(engine, backend)
    assert ask(engine, backend, make_prompt(100)) == 4
    engine.close()


def failing(name):
    def fail(self, *args, **kwargs):
        raise RuntimeError("it broke")

    return type(f"Failing_{name}", (MemoryConnector,), {name: fail})


METHODS = (
    "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "request_finished",
    "get_block_ids_with_load_errors", "shutdown",
)  # fmt: skip
for _name in METHODS:
    globals()[f"Failing_{_name}"] = failing(_name)


@pytest.mark.parametrize("name", METHODS)
def test_a_connector_that_raises_costs_a_computation(caplog, name):
    writer, writer_backend = make_engine()
    ask(writer, writer_backend, make_prompt(100))
    saved(writer)
    writer.close()
    engine, backend = make_engine(f"Failing_{name}")
    for first in (0, 5, 0):
        assert ask(engine, backend, make_prompt(100, first=first)) in (100, 4)
        engine._tiers._connector.flush(10.0)
        forget_pool(engine, backend)
    engine.close()
    assert "it broke" in caplog.text
    if name != "shutdown":
        assert engine.stats().tiers.peer_failures > 0


class HangingConnector(MemoryConnector):
    release = threading.Event()

    def start_load_kv(self, forward_context, **kwargs):
        self.release.wait(20)
        super().start_load_kv(forward_context, **kwargs)


class HangingLookupConnector(MemoryConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        HangingConnector.release.wait(20)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


@pytest.mark.parametrize("kind", ["HangingConnector", "HangingLookupConnector"])
def test_a_connector_that_hangs_costs_a_computation(monkeypatch, kind):
    monkeypatch.setattr(kv_tiers, "LEAST_PATIENCE_S", 0.05)
    monkeypatch.setattr(kv_peers, "LOOKUP_S", 0.05)
    HangingConnector.release.clear()
    writer, writer_backend = make_engine()
    prompt = make_prompt(100)
    ask(writer, writer_backend, prompt)
    saved(writer)
    writer.close()
    engine, backend = make_engine(kind)
    started_at = time.monotonic()
    assert ask(engine, backend, prompt) == 100
    assert engine._tiers._connector.is_down
    forget_pool(engine, backend)
    assert ask(engine, backend, prompt) == 100, "it is left alone while it hangs"
    assert time.monotonic() - started_at < 10
    HangingConnector.release.set()
    while engine._tiers._connector.is_down:
        assert time.monotonic() - started_at < 20
        time.sleep(0.001)
    forget_pool(engine, backend)
    assert ask(engine, backend, prompt) == 4
    engine.close()


class LyingConnector(MemoryConnector):
    """Fills rows with something else."""

    chance = random.Random(1)

    def start_load_kv(self, forward_context, **kwargs):
        loads = self.transfer().loads
        hashes = [block.block_hash for block in loads]
        kind = self.chance.randrange(6)
        for block in loads:
            row = self.rows[block.block_id]
            row[:] = self.blocks[block.block_hash]
            if kind == 0:
                row[self.chance.randrange(len(row))] ^= 1
            elif kind == 1:
                row[:] = self.blocks[self.chance.choice(hashes)]
            elif kind == 2:
                row[self.chance.randrange(len(row)) :] = 0
            elif kind == 3:
                row[:] = 0
            elif kind == 4:
                row[:] = np.roll(row, 1)


class CountingWrongConnector(MemoryConnector):
    chance = random.Random(2)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.chance.choice([10**9, -5, 2.5, "all", True, 7, 16]), False

    def start_load_kv(self, forward_context, **kwargs):
        for block in self.transfer().loads:
            if block.block_hash in self.blocks:
                self.rows[block.block_id] = self.blocks[block.block_hash]


@pytest.mark.parametrize("kind", ["MemoryConnector", "LyingConnector", "CountingWrongConnector"])
@pytest.mark.parametrize("windows", [(None,), (None, 40)])
def test_random_lives_yield_only_true_tokens(kind, windows):
    chance = random.Random(3)
    prefixes = [make_prompt(chance.randint(16, 150), first=i) for i in range(4)]
    hits = 0
    for _life in range(2):
        engine, backend = make_engine(kind, windows=windows)
        for turn in range(10):
            run_some(engine, backend, prefixes, chance, turn)
            if engine.reset_prefix_cache():
                backend.poison_blocks(list(range(backend.num_blocks)))
        hits += engine.stats().tiers.peer_hit_blocks
        engine.close()
    assert hits > 0 or kind == "CountingWrongConnector"


def test_a_spoiled_block_is_found_by_no_engine():
    engine, backend = make_engine()
    prompt = make_prompt(80)
    ask(engine, backend, prompt)
    saved(engine)
    assert len(MemoryConnector.blocks) == 5
    blocks = engine.scheduler.kv.pool.blocks
    names = [block_name(block.digest, 0) for block in blocks if block.digest is not None]
    engine._tiers._connector.drop(names)
    saved(engine)
    engine.close()
    other, other_backend = make_engine()
    assert ask(other, other_backend, prompt) == 80
    other.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_connector": "NixlConnector"}, "NixlConnector is not installed; there are: Octavo"),
        ({"kv_connector": "no.such:Thing"}, "cannot be imported: ModuleNotFoundError"),
        ({"kv_connector": f"{__name__}:Nothing"}, "cannot be imported: AttributeError"),
        ({"kv_connector": f"{__name__}:Transfer"}, "must be a subclass of octavo_engine.tiers"),
        (
            {"kv_connector": "Transfer", "kv_connector_module_path": __name__},
            "must be a subclass of octavo_engine.tiers",
        ),
        (
            {"kv_connector": "octavo_engine.tiers.connector:KVConnectorBase_V1"},
            "lacks the methods build_connector_meta",
        ),
        ({"kv_connector": f"{__name__}:MemoryConnector", "kv_port": 1}, "kv_port has no effect"),
        ({"kv_connector": 3}, "kv_connector must be a string"),
        ({"kv_connector": f"{__name__}:MemoryConnector", "kv_role": "x"}, "kv_role must be one of"),
        ({"kv_connector": f"{__name__}:Refusing"}, "cannot be used: set x"),
    ],
)
def test_a_connector_that_cannot_be_used_is_refused(given, message):
    config = json.dumps({"kv_role": "kv_both", **given})
    with pytest.raises(ConfigError, match=message):
        make_tiered_engine(kv_transfer_config=config)


class Refusing(MemoryConnector):
    def __init__(self, *args):
        raise ValueError("set x")


def test_the_example_for_lmcache_moves_blocks_between_engines(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "kv_connector"))
    prompt = make_prompt(100)
    with lmcache_server() as server:

        def make(role):
            config = {
                "kv_connector": "LMCacheConnector", "kv_role": role,
                "kv_connector_module_path": "lmcache_connector",
                "kv_connector_extra_config": {"remote_url": server.url},
            }  # fmt: skip
            return make_tiered_engine(kv_transfer_config=json.dumps(config))

        first, first_backend = make("kv_producer")
        second, backend = make("kv_consumer")
        ask(first, first_backend, prompt)
        saved(first)
        for _ in range(500):  # a put has no reply: the server may still be reading
            if len(server.blocks) == 6:
                break
            time.sleep(0.01)
        assert len(server.blocks) == 6
        assert ask(second, backend, prompt) == 4
        third, third_backend = make("kv_both")
    assert ask(third, third_backend, make_prompt(64, first=3)) == 64, "the server is gone"
    for engine in (first, second, third):
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_real_models_answer_the_same_with_a_connector_as_without(family):
    requests = requests_that_come_again()
    answers = []
    transfer = json.dumps({"kv_connector": f"{__name__}:MemoryConnector", "kv_role": "kv_both"})
    for config in (None, transfer):
        engine, _ = build_engine(
            EngineConfig(
                device="sim", max_model_len=256, sim=SimConfig(kv_blocks=64),
                scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=48),
                kv_transfer_config=config,
            ),
            backend=tiny_backend(family, "bf16"),
        )  # fmt: skip
        said = []
        for request in requests:
            engine.add(request)
            while engine.has_work:
                said += [(o.token_ids, o.logprobs) for o in engine.step().outputs]
            if config is not None:
                saved(engine)
            assert engine.reset_prefix_cache()
            engine.executor.poison_blocks(list(range(engine.stats().kv_blocks_total)))
        answers.append(said)
        tiers = engine.stats().tiers
        engine.close()
    assert answers[0] == answers[1]
    assert tiers is not None and tiers.peer_hit_blocks > 0
