"""Whole engines on a device that is pretended, built and run as on a GPU, operand by operand.

What the arithmetic is worth other tests say; here nothing may meet what lies elsewhere, nothing may
wait where a graph is captured, and a graph must do what the step that it stands for would do.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.config import EngineConfig, SchedulerConfig
from octavo_engine.core.build import build_engine
from octavo_engine.errors import DeviceLost
from octavo_engine.models.config import ModelConfig
from octavo_engine.state.request import EngineRequest
from octavo_engine.state.sampling_params import SamplingParams
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.models.tiny import tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
]
PROMPTS = [list(range(5, 26)), list(range(5, 20)), [7, 8, 9], [3] * 5]
WISHES = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=5, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, top_k=40, max_tokens=5,
                   min_tokens=3, logit_bias={5: 2.0}, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.05, max_tokens=4, prompt_logprobs=1, ignore_eos=True),
]  # fmt: skip


def write(folder, family):
    model = tiny_model(family)
    save_file(model.tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config))
    return str(folder)


def build(folder, **options):
    config = EngineConfig(
        model=folder, dtype="float32", max_model_len=128, kv_cache_memory_bytes=8 << 20,
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16), **options,
    )  # fmt: skip
    return build_engine(config)[0]


def said(engine):
    """Tokens and scores of each request, in company, their prompts in chunks."""
    texts: dict[str, tuple[list[int], list[float]]] = {}
    for number, (prompt, params) in enumerate(zip(PROMPTS, WISHES, strict=True)):
        name = str(number)
        texts[name] = ([], [])
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=7))
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.finish_reason != "error", output.error
            tokens, scores = texts[output.request_id]
            tokens += output.token_ids
            scores += [entry.logprob for entry in (*output.prompt_logprobs, *output.logprobs)]
    return texts


def check(found, truth):
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in truth.items()
    }
    for name, (_, scores) in found.items():
        assert scores == pytest.approx(truth[name][1], abs=2e-4)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"kernels": "triton"}),
        ("mixtral", {"kernels": "plain"}),
        ("gemma2", {"kernels": "plain"}),
        ("deepseek-v3", {"kernels": "triton"}),
        ("gpt-oss", {"kernels": "triton"}),
    ],
)
def test_an_engine_says_what_it_says_on_the_cpu(tmp_path, pretended, family, options):
    folder = write(tmp_path, family)
    truth = said(build(folder, device="cpu", num_threads=1))
    engine = build(folder, device="cuda", **options)
    assert engine.executor._backend.device == pretended
    found = said(engine)
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in truth.items()
    }
    for name, (_, scores) in found.items():
        assert scores == pytest.approx(truth[name][1], abs=2e-4)
    graphs = engine.executor._backend._graphs.captured
    assert bool(graphs) == (options["kernels"] == "triton")
    engine.close()


def test_memory_for_splits_is_counted_before_kv_gets_its_share(pretended):
    """Contexts of 131,072 tokens have 128 parts where bits depend on nothing but the tokens."""
    model = tiny_model("llama")
    limits = BackendLimits(max_tokens=64, max_seqs=4, max_logit_rows=8, max_model_len=131_072)
    left = {}
    for batch_invariant in (False, True):
        backend = open_cuda(
            ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=512,
            kernels="triton", use_graphs=False, batch_invariant=batch_invariant,
        )  # fmt: skip
        workspace = backend._kernels.workspace_bytes(limits)
        assert workspace > 0
        for_kv = backend.kv_memory(limits, 1.0)
        assert for_kv is not None
        left[batch_invariant] = for_kv + workspace
        assert batch_invariant == (workspace > 10 << 20)
        backend.close()
    assert left[False] == left[True]


# ── what a GPU refuses ──


def test_operands_lie_on_one_side(pretended):
    there, here = torch.ones(3, device=pretended), torch.ones(3)
    assert there.device == pretended and there.is_cuda and not there.cpu().is_cuda
    with pytest.raises(RuntimeError, match="same device"):
        there + here
    with pytest.raises(RuntimeError, match="same device"):
        there[torch.tensor([0, 1])] = here[:2]
    there[:2] = here[1:] + 1  # a copy
    there += torch.tensor(1.0)
    assert there.view(3, 1)[1].tolist() == [3.0]
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="pinned"):
        there.pin_memory()


def test_kernels_take_the_devices_tensors_only(pretended):
    from octavo_engine.backends.torch.triton.rows import rms_norm

    x, weight = torch.ones((2, 16)), torch.ones(16, device=pretended)
    with pytest.raises(ValueError, match="cannot be accessed"):
        rms_norm(x, weight, 1e-5, torch.float32)


def test_a_graph_does_what_was_recorded_and_nothing_else(pretended):
    x, factor = torch.ones(4, device=pretended), 2
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.graph(graph):
            y = (x * factor)[1:] + 1
            x.add_(10)
        assert x.tolist() == [1.0] * 4  # nothing ran
        factor = 5  # a number of the host's
        x.fill_(3)
        graph.replay()
    assert (y.tolist(), x.tolist()) == ([7.0] * 3, [13.0] * 4)
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(graph):
        x.sum().item()
    with pytest.raises(AssertionError, match="waits"), torch.cuda.graph(graph):
        torch.cuda.synchronize()


def test_a_device_that_answers_with_errors_alone_is_lost(pretended, tmp_path, monkeypatch):
    engine = build(write(tmp_path, "llama"), device="cuda", num_threads=1, kernels="plain")
    backend = engine.executor._backend
    assert not backend.device_is_lost()

    def fail(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(backend, "launch", fail)
    monkeypatch.setattr(backend, "execute", fail)
    request = EngineRequest(request_id="a", prompt_token_ids=[5, 6, 7], params=WISHES[0], seed=7)
    engine.add(request)
    assert [each.finish_reason for each in engine.step().outputs] == ["error"]  # and it goes on
    with monkeypatch.context() as broken:
        broken.setattr(torch.cuda, "synchronize", fail)
        engine.add(request)
        with pytest.raises(DeviceLost, match="illegal memory access"):
            engine.step()
    engine.close()
