"""Steps launched one ahead on the device backend: the same tokens, and nobody waits meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.device_step import StepSizes
from octavo_engine.config import EngineConfig, SchedulerConfig, SimConfig
from octavo_engine.core.build import build_engine
from octavo_engine.models.config import ModelConfig
from octavo_engine.sampling.batch import SAMPLED_NOT_FINITE
from tests.engine.backends.driver import Driver, random_tokens
from tests.engine.backends.tolerance import FLOAT32
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.recorders import NothingWaits, RunAgain
from tests.engine.backends.torch_cuda.steps import make_sampling
from tests.engine.models.tiny import tiny_model
from tests.fakes.clock import ManualClock
from tests.fakes.requests import make_request

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(
    device="sim",
    max_model_len=128,
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
    sim=SimConfig(kv_blocks=24),
)


def build(name, device, kernels="plain"):
    model = tiny_model(name)
    return open_cuda(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=512,
        dtype=torch.float32, device=device.type, kernels=kernels,
    )  # fmt: skip


class Marks:
    """Marks of a device that is never done by itself. What the host does is written down."""

    def __init__(self):
        self.log: list[str] = []
        self.num_marks = 0
        self.done = 0  # marks before this one have been waited for

    def __call__(self):
        self.num_marks += 1
        return Mark(self, self.num_marks)


class Mark:
    def __init__(self, marks, number):
        self.marks, self.number = marks, number

    def wait(self):
        if self.number > self.marks.done:  # else there is nothing to wait for
            self.marks.done = self.number
            self.marks.log.append("wait")


def run(backend, *, is_ahead, requests):
    config = dataclasses.replace(CONFIG, async_scheduling=is_ahead)
    engine, _ = build_engine(config, backend=backend, now=ManualClock())
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    logprobs: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    endings: dict[str, Any] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
            logprobs[output.request_id] += output.logprobs
            endings[output.request_id] = output.finish_reason
        engine.scheduler.check_invariants()
    return tokens, logprobs, endings


def test_whole_engines_say_the_same_ahead_and_not(device):
    prompt = random_tokens(50, seed=3)
    greedy: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0}
    requests = [
        make_request(prompt[:33], request_id="greedy", **greedy),
        make_request(prompt, request_id="drawn", seed=5, max_tokens=16, top_p=0.9, logprobs=2),
        make_request(
            prompt[7:], request_id="stopped", stop_token_ids=tuple(range(0, 256, 12)), max_tokens=60
        ),
        make_request(
            prompt[:20],
            request_id="penalised",
            max_tokens=9,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            logit_bias={9: 1.5},
            min_tokens=4,
            eos=(7, 11),
        ),
        make_request(prompt[20:], request_id="last", **greedy),
    ]
    ahead = run(build("llama", device), is_ahead=True, requests=requests)
    waiting = run(build("llama", device), is_ahead=False, requests=requests)
    assert ahead[0] == waiting[0] and ahead[2] == waiting[2]
    for found, expected in zip(ahead[1]["drawn"], waiting[1]["drawn"], strict=True):
        assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
        # Their company differs from step to step, and plain products round with it.
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert found.top_ids == expected.top_ids
    assert len(ahead[1]["drawn"]) == 16
    assert ahead[2]["stopped"] == "stop"


@pytest.mark.parametrize(("name", "num_logprobs"), [("llama", 2), ("mixtral", -1)])
def test_nothing_waits_between_launches(name, num_logprobs, device, monkeypatch):
    """With Triton's kernels, which here run on the host and therefore need no mode around them."""
    backend = build(name, device, kernels="triton")
    driver = Driver(backend)
    backend._make_mark = marks = Marks()
    forward = type(backend)._forward

    def watched(*args, **options):
        with NothingWaits():
            return forward(*args, **options)

    monkeypatch.setattr(type(backend), "_forward", watched)
    requests = [driver.add(row, random_tokens(8, seed=row)) for row in range(2)]
    pending = []
    for counts in ([3, 2], [1, 1], [1, 1]):
        step = driver.plan(list(zip(requests, counts, strict=True)))
        last = (step.seq_starts[1:] - 1).astype(np.int32)
        sampling = make_sampling(2, temperature=[0.0, 0.7])
        sampling.num_logprobs = num_logprobs
        marks.log.append("launch")
        pending.append(backend.launch(dataclasses.replace(step, logit_rows=last), sampling))
        if len(pending) == 2:
            assert len(pending.pop(0).wait().tokens) == 2
    pending.pop().wait()
    assert marks.log == ["launch", "launch", "wait", "launch", "wait", "wait"]


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_a_step_takes_the_tokens_of_the_one_under_way(kernels, device):
    """Replayed steps too: the second and third of single tokens are captured."""
    backend = build("llama", device, kernels)
    if kernels == "triton":
        backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = Driver(backend)
    requests = [driver.add(row, random_tokens(4 + row, seed=row)) for row in (2, 0)]
    reported = []
    work = [(request, len(request.token_ids)) for request in requests]
    for number in range(4):
        step = driver.plan(work)
        last = (step.seq_starts[1:] - 1).astype(np.int32)
        step = dataclasses.replace(step, logit_rows=last)
        if number:
            step.token_ids[:] = 99  # the host does not know them
            step.awaited = step.rows.copy()
        sampling = make_sampling(3, temperature=0.0)
        sampling = dataclasses.replace(
            sampling, rows=step.rows, positions=step.seq_lens, targets=np.full(2, -1, np.int32)
        )
        reported.append(backend.launch(step, sampling))
        for request in requests:
            request.token_ids.append(0)
        work = [(request, 1) for request in reversed(requests)]
        requests.reverse()
    tokens = np.array([landed.wait().tokens for landed in reported])
    tokens[1::2] = tokens[1::2, ::-1]  # back in one order
    for column, row in enumerate((2, 0)):
        whole = random_tokens(4 + row, seed=row)
        for token in tokens[:, column].tolist():
            assert token == tiny_model("llama").logits(whole)[-1].argmax()
            whole.append(token)
    if kernels == "triton":
        assert backend._recorder.num_replays > 0


def test_what_failed_has_no_token_and_spoils_no_step_behind_it(device):
    backend = build("llama", device)
    driver = Driver(backend)
    sick, well = (driver.add(row, random_tokens(20, seed=row)) for row in range(2))
    driver.step([(sick, 10), (well, 10)])
    backend.poison_blocks(sick.blocks)
    step = driver.plan([(sick, 1), (well, 1)])
    first = backend.launch(step, make_sampling(2, temperature=0.0))
    step = driver.plan([(sick, 1), (well, 1)])
    step.awaited = np.array([0, -1], np.int32)
    second = backend.launch(step, make_sampling(2, temperature=0.0))
    assert first.wait().status.tolist() == second.wait().status.tolist() == [SAMPLED_NOT_FINITE, 0]


def test_small_mixed_steps_are_captured_and_equal_each_sequence_alone(device):
    """Three steps of one bucket: launched, captured, replayed."""
    backend = build("qwen2-window", device, kernels="triton")
    backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = Driver(backend)
    requests = [driver.add(row, random_tokens(22, seed=row)) for row in range(3)]
    for counts in ([9, 2, 1], [1, 3, 6], [5, 1, 2]):
        step = driver.plan(list(zip(requests, counts, strict=True)))
        last = (step.seq_starts[1:] - 1).astype(np.int32)
        found = backend.logits(dataclasses.replace(step, logit_rows=last))
        for request, logits in zip(requests, found, strict=True):
            seen = request.token_ids[: request.num_computed]
            truth = tiny_model("qwen2-window").logits(seen)[-1]
            np.testing.assert_allclose(logits, truth, **FLOAT32)
    (captured,) = backend._graphs.captured
    assert isinstance(captured, StepSizes) and captured[:3] == (16, 4, 4)
    assert backend._recorder.num_replays == 2


def test_a_graph_keeps_no_token_where_the_sampler_is_still_to_come(device):
    """Its own draw, of logits that nothing was done to, would hide the one that is awaited."""
    backend = build("llama", device, kernels="triton")
    backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = Driver(backend)
    request = driver.add(0, random_tokens(5, seed=1))
    reported: list[Any] = []
    work, penalty = 5, {"temperature": 0.0, "frequency_penalty": 2.0}
    for number in range(4):
        step = driver.plan([(request, work)])
        step = dataclasses.replace(step, logit_rows=(step.seq_starts[1:] - 1).astype(np.int32))
        sampling = dataclasses.replace(
            make_sampling(1, num_prompt_tokens=5, **penalty), positions=step.seq_lens,
            history=np.array([[*request.token_ids, 0]], np.int32),
        )  # fmt: skip
        if number:
            step.token_ids[:] = 99
            step.awaited = step.rows.copy()
            sampling.awaited = np.array([True])
            # All but the last are known by now.
            sampling.history[0, 5 : 5 + number - 1] = [
                int(t.wait().tokens[0]) for t in reported[:-1]
            ]
            sampling.history[0, 5 + number - 1] = -1
        reported.append(backend.launch(step, sampling))
        request.token_ids.append(0)
        work = 1
    whole = random_tokens(5, seed=1)
    for landed in reported:
        logits = tiny_model("llama").logits(whole)[-1].copy()
        ids, counts = np.unique(whole[5:], return_counts=True)
        logits[ids.astype(int)] -= 2 * counts
        assert int(landed.wait().tokens[0]) == logits.argmax()
        whole.append(int(logits.argmax()))
    assert backend._recorder.num_replays > 0
