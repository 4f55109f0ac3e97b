"""Adapters in the engine: answers are those of each alone, whatever waits or shares or goes."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from octavo_engine.backends.adapters import AdapterLimits
from octavo_engine.backends.draft_part import DraftPart
from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core import kv_tiers
from octavo_engine.core.adapters import AdapterQueue
from octavo_engine.core.build import build_engine
from octavo_engine.core.engine import Engine
from octavo_engine.core.offline.llm import LLM
from octavo_engine.core.offline.lora_request import LoRARequest
from octavo_engine.core.process import wire
from octavo_engine.errors import GenerationFailed, InvalidRequest, ModelUnknown
from octavo_engine.grammar.normal import regex_spec
from octavo_engine.models.config import ModelConfig
from octavo_engine.scheduling.adapter_slots import AdapterSlots
from octavo_engine.scheduling.invariants import check_invariants
from octavo_engine.scheduling.step_time import StepTimeModel
from octavo_engine.state.adapter import AdapterRef, HeldAdapter
from octavo_engine.state.sampling_params import SamplingParams
from octavo_engine.weights.adapter import read_adapter
from tests.engine.models.tiny import tiny_model
from tests.fakes.adapters import write_adapter
from tests.fakes.requests import make_request, make_sequence
from tests.fakes.unforeseen import fail_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


DRAFT = '{"model": "draft", "num_speculative_tokens": 3}'
NGRAMS = '{"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
LAYERS = {
    f"model.layers.{layer}.{name}": size
    for layer in range(2)
    for name, size in {
        "self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.down_proj": (96, 64)
    }.items()
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        str(write_adapter(root / str(seed), LAYERS, seed=seed, rank=3 + seed)) for seed in range(5)
    ]


def draft_part() -> DraftPart:
    """It drafts what the model without an adapter would say."""
    model = tiny_model("llama", vocab_size=320)
    return DraftPart(ModelConfig.from_hf(model.config), model.checkpoint())


def make_llm(*, max_loras: int = 2, kv_blocks: int = 64, **settings: Any) -> LLM:
    """The native backend with a tiny model, so that answers have all their bits to differ in."""
    model = tiny_model("llama", vocab_size=320)
    config = EngineConfig(
        device="sim", enable_lora=True, max_loras=max_loras, max_cpu_loras=max(3, max_loras),
        max_model_len=160, sim=SimConfig(vocab_size=320, kv_blocks=kv_blocks),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64), **settings,
    )  # fmt: skip
    backend = NativeBackend(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=160, num_threads=2,
        adapters=AdapterLimits(max_loras, 64),
        draft=draft_part() if settings.get("speculative_config") == DRAFT else None,
    )  # fmt: skip
    return LLM.from_config(config, backend=backend)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as llm:
        yield llm


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    """Some of them begin alike, so that the prefix cache has something to confuse."""
    shared = [rng.randrange(256) for _ in range(40)]
    return [
        shared[: rng.choice((0, 20, 40))]
        + [rng.randrange(256) for _ in range(rng.randrange(2, 40))]
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"kv_blocks": 24}, {"max_loras": 1},
        {"speculative_config": NGRAMS}, {"speculative_config": DRAFT},
        {"kv_blocks": 24, "kv_offloading_size": 1 / 256},
        {"kv_blocks": 24, "kv_offloading_size": 1 / 256, "speculative_config": DRAFT},
    ],
    ids=["plain", "little-memory", "one-slot", "ngrams", "draft", "tiers", "tiers-draft"],
)  # fmt: skip
def test_answers_together_are_those_of_each_alone(
    settings: dict[str, Any], folders: list[str], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever this machine's times: they decide whether to load and to speculate.
    monkeypatch.setattr(kv_tiers, "is_worth_loading", lambda **_: True)
    monkeypatch.setattr(StepTimeModel, "observe", lambda *_: None)
    rng = random.Random(3)
    prompts = prompts_of(rng, 24)
    requests = [None, *(LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(folders))]
    adapters = [rng.choice(requests) for _ in prompts]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(1, 30), temperature=rng.choice((0.0, 1.0)), seed=seed,
            n=rng.choice((1, 3)), logprobs=1, ignore_eos=True,
            grammar=rng.choice((None, None, regex_spec("(ab|ba)+"))),
        )
        for seed in range(len(prompts))
    ]  # fmt: skip
    params = [each if each.temperature else msgspec.structs.replace(each, n=1) for each in params]
    with make_llm(**settings) as together:
        answers = together.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        again = together.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        assert [answer.outputs for answer in again] == [answer.outputs for answer in answers]
        assert isinstance(together._engine, Engine)
        check_invariants(together._engine.scheduler)
        stats = together._engine.stats()
        assert (stats.spec_draft_tokens > 20) == ("speculative_config" in settings)
        if "kv_offloading_size" in settings:
            assert stats.tiers is not None and stats.tiers.host_hit_blocks > 5
    for prompt, each, adapter, answer in zip(prompts, params, adapters, answers, strict=True):
        alone = llm.generate([prompt], each, lora_request=adapter, use_tqdm=False)[0]
        for mine, theirs in zip(answer.outputs, alone.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == theirs.logprobs
            assert mine.finish_reason == theirs.finish_reason


def test_adapters_change_answers_and_prefixes_are_their_own(llm: LLM, folders: list[str]) -> None:
    prompt = list(range(100))
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    one, same, other = (
        LoRARequest(name, 1, path)
        for name, path in (("x1", folders[0]), ("x2", folders[0]), ("x3", folders[1]))
    )
    answers = [
        llm.generate([prompt], params, lora_request=each, use_tqdm=False)[0]
        for each in (None, one, other, same)
    ]
    tokens = [answer.outputs[0].token_ids for answer in answers]
    assert tokens[1] == tokens[3] and len({tuple(each) for each in tokens}) == 3
    assert [answer.num_cached_tokens for answer in answers] == [0, 0, 0, 99]


def test_an_adapter_is_read_again_only_in_place(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    def answer(**fields: Any) -> list[int]:
        request = LoRARequest("changing", 1, str(tmp_path), **fields)
        return (
            llm.generate([[1, 2, 3]], params, lora_request=request, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )

    write_adapter(tmp_path, LAYERS, seed=20)
    first = answer()
    write_adapter(tmp_path, LAYERS, seed=21)
    assert answer() == first
    assert answer(load_inplace=True) != first


def test_what_cannot_be_read_fails_only_its_requests(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelUnknown, match="no folder of a LoRA adapter"):
        llm.generate(["a"], lora_request=LoRARequest("none", 1, str(tmp_path)))
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (32, 64)})
    with pytest.raises(InvalidRequest, match="the adapter is of another model"):
        llm.generate(["a"], lora_request=LoRARequest("none", 1, str(tmp_path)))
    assert llm.generate(["a"], use_tqdm=False)[0].finished


@pytest.mark.slow
def test_without_the_switch_adapters_are_refused() -> None:
    with LLM(device="sim") as llm, pytest.raises(InvalidRequest, match="--enable-lora"):
        llm.generate(["a"], lora_request=LoRARequest("a", 1, "/nowhere"))


def sim_engine(**settings: Any) -> Engine:
    config = EngineConfig(device="sim", enable_lora=True, sim=SimConfig(time_scale=0.0), **settings)
    return build_engine(config)[0]


def test_a_request_whose_adapter_went_waits_for_it_outside_the_line(folders: list[str]) -> None:
    engine = sim_engine(max_loras=1, max_cpu_loras=1)
    refs = [AdapterRef(f"a{n}", path, read_adapter(path).digest) for n, path in enumerate(folders)]
    for number, ref in enumerate(refs):  # none of them was loaded
        engine.add(make_request(request_id=f"r{number}", adapter=ref, max_tokens=3))
    assert engine.stats().num_waiting_adapter == 5
    assert engine.stats().waiting_adapters == [ref.name for ref in refs]
    engine.abort("r3")
    ended = set()
    most = 0
    while engine.has_work:
        ended |= {o.request_id for o in engine.step().outputs if o.finish_reason == "length"}
        most = max(most, len(engine.stats().running_adapters))
        check_invariants(engine.scheduler)
    assert ended == {"r0", "r1", "r2", "r4"}
    assert (most, engine.stats().num_adapters_held) == (1, 1)
    engine.close()


def test_what_nobody_foresaw_of_one_that_waited_for_its_adapter_ends_it_alone(
    folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(bad: str = "") -> dict[str, list[int]]:
        engine = sim_engine()
        fail_for(monkeypatch, engine.scheduler, "add", bad)
        ref = AdapterRef("a", folders[0], read_adapter(folders[0]).digest)
        for name, adapter in (("plain", None), ("bad", ref), ("good", ref)):
            engine.add(make_request(request_id=name, adapter=adapter, max_tokens=5))
        tokens: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            for request_id, error in engine.take_refused():
                assert (request_id, type(error)) == ("bad", GenerationFailed)
            check_invariants(engine.scheduler)
        engine.close()
        return tokens

    whole = answers()
    assert len(whole.pop("bad")) == 5
    assert answers("bad") == whole


def test_a_backend_hears_of_each_request_whose_adapter_is_in_memory(folders: list[str]) -> None:
    """So that it may send the adapter to its device before there is a slot."""
    expected: list[object] = []
    queue = AdapterQueue(
        lambda files: files.digest, max_held=2, max_rank=64, expect=expected.append
    )
    ref = AdapterRef("a", folders[0], read_adapter(folders[0]).digest)
    requests = [make_request(3, request_id=str(n), adapter=ref) for n in range(3)]
    assert queue.submit(requests[0]) is None  # its reading sends it
    queue.wait(10)
    assert len(queue.settle().ready) == 1 and not expected
    for request in requests[1:]:
        held = queue.submit(request)
        assert held is not None and expected.pop() == held.packed == ref.digest
    queue.close()


def test_memory_for_the_next_load_is_made_ready_only_while_nothing_is_to_be_read(
    folders: list[str],
) -> None:
    """A load that comes meanwhile does not wait for it."""
    prepared: list[int] = []
    is_ready = threading.Event()

    def prepare() -> None:
        prepared.append(1)
        is_ready.set()

    def queue_with(after_s: float) -> AdapterQueue:
        return AdapterQueue(
            lambda files: files.digest, max_held=4, max_rank=64, prepare=prepare,
            prepare_after_s=after_s,
        )  # fmt: skip

    patient = queue_with(3600.0)
    for number, folder in enumerate(folders[:2]):
        patient.load(str(number), folder)
        patient.wait(30)
        assert len(patient.settle().loaded) == 1
    patient.close()
    patient._threads.shutdown(wait=True)
    assert not prepared
    prompt = queue_with(0.0)
    prompt.load("0", folders[0])
    assert is_ready.wait(30)
    prompt.close()


def test_a_deadline_passes_while_the_adapter_is_read(folders: list[str]) -> None:
    engine = sim_engine()
    ref = AdapterRef("a", folders[0], "0" * 32)
    engine.add(make_request(request_id="late", adapter=ref, deadline_at=0.0))
    engine.add(make_request(request_id="other", adapter=ref))
    outputs, refused = [], []
    while engine.has_work:
        outputs += engine.step().outputs
        refused += engine.take_refused()
    # Which of the two comes first is the thread's affair; neither is answered.
    assert {o.request_id: o.finish_reason for o in outputs} in ({"late": "deadline"}, {})
    assert "other" in dict(refused)
    assert "are others than when it was loaded" in dict(refused)["other"].message
    engine.close()


def test_a_reading_whose_requests_are_gone_is_no_later_request_s(tmp_path: Path) -> None:
    """Its files may be others by then, or there again."""
    engine = sim_engine()
    path = tmp_path / "adapter"
    engine.add(make_request(request_id="gone", adapter=AdapterRef("a", str(path), "0" * 32)))
    engine.abort("gone")
    assert engine._adapters is not None
    (reading,) = engine._adapters._readings.values()
    assert reading.result(timeout=10).error is not None
    write_adapter(path, LAYERS)
    ref = AdapterRef("a", str(path), read_adapter(str(path)).digest)
    engine.add(make_request(request_id="next", adapter=ref, max_tokens=2))
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
        assert engine.take_refused() == []
    assert outputs[-1].finish_reason == "length"
    assert engine._adapters._readings == {}
    engine.close()


def test_commands_and_answers_cross_the_wire(folders: list[str]) -> None:
    ref = AdapterRef("a", folders[0], "d")
    request = make_request(adapter=ref)
    messages: list[wire.ToCore] = [
        wire.AddRequests([request]), wire.LoadAdapter("adapter-1", "/x", True),
        wire.UnloadAdapter("d"),
    ]  # fmt: skip
    reader = wire.MessageReader(wire.TO_CORE)
    assert reader.feed(b"".join(map(wire.encode, messages))) == messages


def test_slots_are_counted_and_the_longest_unused_goes_first() -> None:
    """A random life: whoever runs has its own adapter in its slot, and no slot is lost."""
    rng = random.Random(5)
    slots = AdapterSlots(3)
    adapters = [HeldAdapter(str(n), 4, 1, n) for n in range(6)]
    held: dict[int, HeldAdapter] = {}
    last_used = dict.fromkeys(range(3), -1)
    running: list[Any] = []
    for now in range(3000):
        adapter = rng.choice(adapters)
        if rng.random() < 0.5 and slots.has_room(adapter):
            before = dict(held)
            sequence = make_sequence(adapter=AdapterRef(adapter.digest, "", adapter.digest))
            sequence.adapter = adapter
            slots.acquire(sequence)
            for slot, placed in slots.take_placed():
                idle = set(range(3)) - {s.adapter_slot for s in running}
                assert placed is adapter and adapter not in before.values()
                assert slot == min(idle, key=last_used.__getitem__)
                held[slot] = placed
            assert held[sequence.adapter_slot] is adapter
            running.append(sequence)
        elif running:
            sequence = running.pop(rng.randrange(len(running)))
            last_used[sequence.adapter_slot] = now
            slots.release(sequence)
        slots.check(running)
    assert len({s.adapter_slot for s in running}) <= 3


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_answer_alike_after_a_sleep(level: int, tmp_path: Path) -> None:
    """One that is in a slot, one that is in memory only, and one that is loaded only then."""
    layers = {f"model.layers.{n}.self_attn.q_proj": (576, 576) for n in range(0, 30, 3)}
    layers |= {f"model.layers.{n}.mlp.up_proj": (576, 1536) for n in range(0, 30, 3)}
    refs = [
        LoRARequest(f"a{n}", n + 1, str(write_adapter(tmp_path / str(n), layers, seed=n, size=1.0)))
        for n in range(4)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

    def ask(llm: LLM, *chosen: LoRARequest | None) -> list[list[int]]:
        prompts = ["The capital of France is"] * len(chosen)
        outputs = llm.generate(prompts, params, lora_request=list(chosen))
        return [list(each.outputs[0].token_ids) for each in outputs]

    with LLM(
        "demo://smollm2", enable_lora=True, max_loras=2, kv_cache_memory_bytes=64 << 20
    ) as llm:
        before = [ask(llm, one)[0] for one in (*refs[:3], None)]
        assert len({tuple(one) for one in before}) == 4
        llm.sleep(level)
        llm.wake_up()
        assert ask(llm, refs[2], None, refs[0], refs[1]) == [before[n] for n in (2, 3, 0, 1)]
        assert ask(llm, refs[3])[0] not in before
        assert ask(llm, refs[0], None) == [before[0], before[3]]
