"""The step loop: a request's failure is its own, a step's failure is its sequences', no more."""

import dataclasses

import pytest

from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.errors import (
    ConfigError,
    DeviceLost,
    InvalidRequest,
    ModelError,
    OctavoError,
    QueueFull,
)
from tests.fakes.backend import FakeBackend
from tests.fakes.requests import make_prompt, make_request

CONFIG = EngineConfig(
    device="sim",
    max_model_len=256,
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_queue=3),
    sim=SimConfig(kv_blocks=64),
)


def make_engine(backend, config=CONFIG):
    engine, info = build_engine(config, backend=backend)
    return engine, info


def run(engine):
    """Tokens and endings by request id, checking the books after each step."""
    tokens: dict[str, list[int]] = {}
    endings: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in endings, "an ending comes once"
                endings[output.request_id] = output.finish_reason
        engine.scheduler.check_invariants()
    return tokens, endings


def test_every_request_gets_the_truth_of_its_prefix():
    backend = FakeBackend(64)
    engine, _ = make_engine(backend)
    requests = [make_request(20 + i, max_tokens=9, temperature=0.0) for i in range(4)]
    for request in requests[:3]:
        engine.add(request)
    engine.step()
    engine.add(requests[3])
    tokens, endings = run(engine)
    for request in requests:
        known = 1 if request.request_id != requests[3].request_id else 0
        truth = backend.continuation(request.prompt_token_ids, 9)
        assert tokens[request.request_id] in (truth, truth[known:])
        assert endings[request.request_id] == "length"


def test_what_is_reported_of_the_model_is_what_was_settled():
    config = dataclasses.replace(CONFIG, served_model_names=("m",), max_model_len=None)
    _, info = make_engine(FakeBackend(64), config)
    assert (info.names, info.backend, info.vocab_size) == (("m",), "fake", 512)
    # 64 blocks hold 1024 tokens: the context is cut to it, and one sequence uses all.
    assert (info.num_blocks, info.max_model_len) == (64, 1024)


def test_the_cache_key_is_the_models_and_not_the_runs():
    keys = [
        make_engine(FakeBackend(64), config)[1].cache_key
        for config in (
            CONFIG,
            dataclasses.replace(CONFIG, seed=9),
            dataclasses.replace(CONFIG, model="other"),
        )
    ]
    assert keys[0] == keys[1] != keys[2]


def test_warming_up_leaves_no_trace():
    backend = FakeBackend(64)
    engine, _ = make_engine(backend)
    assert backend.num_steps > 0
    stats = engine.stats()
    counted = (stats.steps, stats.prompt_tokens, stats.generation_tokens, stats.prefix_queries)
    assert counted == (0, 0, 0, 0)
    assert stats.kv_blocks_used == 0
    engine.add(make_request([0] * 16, max_tokens=1))
    (output,) = engine.step().outputs
    assert output.num_cached_tokens == 0
    assert engine.stats().steps == 1


def test_a_model_that_computes_no_numbers_is_refused_at_start():
    backend = FakeBackend(64)
    backend.fail_after([0] * 16)
    with pytest.raises(ModelError, match="the model cannot compute"):
        make_engine(backend)
    assert backend.is_closed


def test_settings_that_cannot_work_close_what_was_loaded():
    backend = FakeBackend(64)
    with pytest.raises(ConfigError, match="holds 64"):
        make_engine(backend, dataclasses.replace(CONFIG, max_model_len=5000))
    assert backend.is_closed


def test_not_a_number_fails_its_request_alone():
    backend = FakeBackend(64)
    engine, _ = make_engine(backend)
    bad, good = make_request(make_prompt(9, first=1)), make_request(make_prompt(9, first=2))
    backend.fail_after(bad.prompt_token_ids)
    engine.add(bad)
    engine.add(good)
    tokens, endings = run(engine)
    assert endings == {bad.request_id: "error", good.request_id: "length"}
    assert tokens[good.request_id] == backend.continuation(good.prompt_token_ids, 16)


def test_a_failing_step_fails_what_it_computed_and_the_engine_goes_on():
    backend = FakeBackend(64)
    engine, _ = make_engine(backend)
    first = make_request(make_prompt(9, first=1))
    engine.add(first)
    engine.step()

    def explode(step):
        raise RuntimeError("the kernel said no")

    backend.on_execute = explode
    (output,) = engine.step().outputs
    assert (output.request_id, output.finish_reason) == (first.request_id, "error")
    assert output.error == "the engine failed to compute a step: RuntimeError"
    backend.on_execute = None
    engine.scheduler.check_invariants()
    assert not engine.has_work and engine.stats().kv_blocks_used == 0
    second = make_request(make_prompt(9, first=1))  # nothing half computed was cached
    engine.add(second)
    tokens, _ = run(engine)
    assert tokens[second.request_id] == backend.continuation(second.prompt_token_ids, 16)


def test_three_failing_steps_in_a_row_are_no_requests_fault():
    backend = FakeBackend(64)
    engine, _ = make_engine(backend)

    def explode(step):
        raise RuntimeError("sticky")

    backend.on_execute = explode
    for _ in range(2):
        engine.add(make_request(5))
        assert [o.finish_reason for o in engine.step().outputs] == ["error"]
    engine.add(make_request(5))
    with pytest.raises(OctavoError, match=r"3 steps in a row failed.*RuntimeError: sticky"):
        engine.step()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_device_that_is_lost_ends_the_engine_at_the_first_failed_step(is_lost, monkeypatch):
    """So that its streams go on elsewhere: the fault is no request's."""
    backend = FakeBackend(64)
    monkeypatch.setattr(backend, "device_is_lost", lambda: is_lost, raising=False)
    engine, _ = make_engine(backend)

    def explode(step):
        raise RuntimeError("an illegal memory access was encountered")

    backend.on_execute = explode
    engine.add(make_request(5))
    if is_lost:
        with pytest.raises(DeviceLost, match=r"nothing any more: RuntimeError: an illegal memory"):
            engine.step()
    else:
        assert [output.finish_reason for output in engine.step().outputs] == ["error"]


def test_failures_between_good_steps_do_not_add_up():
    backend = FakeBackend(64)
    engine, _ = make_engine(backend)
    countdown = [0]

    def every_other(step):
        countdown[0] += 1
        if countdown[0] % 2:
            raise RuntimeError("now and then")

    backend.on_execute = every_other
    for _ in range(8):
        engine.add(make_request(5, max_tokens=1))
        engine.step()


def test_failing_to_schedule_ends_all_there_is(monkeypatch):
    engine, _ = make_engine(FakeBackend(64))
    requests = [make_request(5) for _ in range(3)]
    for request in requests:
        engine.add(request)

    def explode():
        raise RuntimeError("books do not balance")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", explode)
        outputs = engine.step().outputs
    assert {o.request_id for o in outputs} == {r.request_id for r in requests}
    assert {o.finish_reason for o in outputs} == {"error"}
    engine.add(make_request(5, request_id="next"))
    assert run(engine)[1] == {"next": "length"}


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "after", "twice", "unknown"])
def test_abort_in_each_phase_frees_everything(phase):
    backend = FakeBackend(64)
    engine, _ = make_engine(backend)
    victim = make_request(make_prompt(100, first=3), max_tokens=30)
    other = make_request(10, max_tokens=30)
    engine.add(other)
    engine.add(victim)
    steps = {"waiting": 0, "prefill": 2, "decode": 12, "after": 60, "twice": 3, "unknown": 3}[phase]
    seen = []
    for _ in range(steps):
        seen += engine.step().outputs
    if phase == "unknown":
        assert engine.abort("nobody") is None
    aborted = engine.abort(victim.request_id)
    assert (aborted is None) == (phase == "after")
    if phase == "twice":
        assert engine.abort(victim.request_id) is None
    while engine.has_work:
        seen += engine.step().outputs
        engine.scheduler.check_invariants()
    tokens = [t for o in seen if o.request_id == other.request_id for t in o.token_ids]
    assert tokens == backend.continuation(other.prompt_token_ids, 30)
    assert engine.stats().kv_blocks_used == 0


def test_a_full_queue_says_so_and_when_to_come_back():
    engine, _ = make_engine(FakeBackend(64))
    for _ in range(3):
        engine.add(make_request(5))
    with pytest.raises(QueueFull, match="max-queue") as caught:
        engine.add(make_request(5))
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
    assert len(run(engine)[1]) == 3


def test_a_logits_processor_that_is_not_installed_is_refused():
    engine, _ = make_engine(FakeBackend(64))
    with pytest.raises(InvalidRequest, match="no logits processor 'nonesuch'") as caught:
        engine.add(make_request(5, logits_processors=("nonesuch",)))
    assert caught.value.param == "logits_processors" and not engine.has_work
