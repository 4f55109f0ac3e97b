"""The device backend against transformers and the reference, whole models at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo_engine.backends.backend import BackendLimits
from octavo_engine.backends.torch.backend import TorchBackend
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.errors import ConfigError, ModelError
from octavo_engine.models.config import ModelConfig
from octavo_engine.sampling.batch import SAMPLED_OK, SamplingBatch
from octavo_engine.sampling.rows import new_table
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.tolerance import (
    BF16_AGAINST_FLOAT32,
    BF16_AGAINST_ROUNDED_REFERENCE,
    FLOAT32,
    error,
)
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.recorders import RunAgain
from tests.engine.backends.torch_cuda.steps import alone_and_together
from tests.engine.models.tiny import ON_DEVICES, MemoryCheckpoint, tiny_model

pytestmark = pytest.mark.slow


def build(name, device, *, dtype=torch.float32, kernels="plain", stored="F32", **options):
    model = tiny_model(name)
    return open_cuda(
        ModelConfig.from_hf(model.config),
        model.checkpoint(stored),
        max_model_len=512,
        dtype=dtype,
        device=device.type,
        kernels=kernels,
        **options,
    )


@pytest.mark.parametrize("name", ON_DEVICES)
def test_every_family_equals_transformers(name, device):
    model = tiny_model(name)
    token_ids = random_tokens(90, seed=1)
    logits = run_alone(build(name, device), token_ids, chunks=[40, 1, 1])
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


# The interpreter is slow: families whose kernels differ, and few tokens.
@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "gemma2",
        "olmo2",
        "gpt2",
        "bloom",
        "hunyuan",
        "solar-open",
        "gpt-oss",
        "llama4",
        "deepseek-v3",
        "deepseek-v2-lite",
    ],
)
def test_triton_kernels_give_whole_models(name, device):
    model = tiny_model(name)
    token_ids = random_tokens(19, seed=1)
    logits = run_alone(build(name, device, kernels="triton"), token_ids, chunks=[17, 1])
    np.testing.assert_allclose(logits, model.logits(token_ids), **FLOAT32)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bloom", "with linear biases"), ("gpt-oss", "with sinks"), ("llama4", "within chunks"),
        ("deepseek-v3", "latent attention"),
    ],
)  # fmt: skip
def test_flashinfer_is_refused_for_attention_that_it_does_not_compute(name, what, device):
    with pytest.raises(ConfigError, match=rf"flashinfer does not compute .*{what}.*use auto"):
        build(name, device, dtype=torch.bfloat16, kernels="triton", attention="flashinfer")


@pytest.mark.parametrize("kernels", ["plain", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "granite", "llama-tied-biased", "bloom", "hunyuan", "youtu"]
)
def test_bf16_is_as_near_as_bf16_can_be(name, kernels, device):
    model = tiny_model(name)
    token_ids = random_tokens(100, seed=2)
    backend = build(name, device, dtype=torch.bfloat16, kernels=kernels)
    logits = run_alone(backend, token_ids)
    assert error(logits, model.logits(token_ids)) < BF16_AGAINST_FLOAT32


def test_a_mixed_step_equals_each_sequence_alone(device):
    backend = build("mistral", device)
    prompts = [random_tokens(count, seed=count) for count in (30, 3, 50)]
    alone = [run_alone(backend, prompt) for prompt in prompts]
    driver = Driver(backend)
    requests = [driver.add(row, prompt) for row, prompt in enumerate(prompts)]
    driver.step([(requests[0], 29), (requests[2], 20)])
    driver.step([(requests[2], 29), (requests[0], 1), (requests[1], 3)])
    driver.step([(requests[2], 1)])
    for request, truth in zip(requests, alone, strict=True):
        np.testing.assert_allclose(np.array(request.logits), truth, **FLOAT32)


def test_copied_blocks_and_poison(device):
    driver = Driver(build("llama", device))
    first = driver.add(0, random_tokens(40))
    driver.step([(first, 40)])
    second = driver.add(1, [*first.token_ids[:38], 9, 8, 7], prefix=first)
    copy = driver.take_block()
    second.blocks.append(copy)
    second.num_computed = 38
    driver.step([(second, 3)], copies=[(first.blocks[2], copy, 6)])
    truth = tiny_model("llama").logits(second.token_ids)[38:]
    np.testing.assert_allclose(np.array(second.logits), truth, **FLOAT32)
    driver.backend.poison_blocks(second.blocks[:1])
    second.token_ids.append(1)
    assert np.isnan(driver.step([(second, 1)])[0]).all()


def test_a_step_samples_what_the_logits_say(device):
    backend = build("qwen2", device, stored="BF16")
    driver = Driver(backend)
    request = driver.add(0, random_tokens(20))
    inner = dataclasses.replace(driver.plan([(request, 12)]), logit_rows=np.empty(0, np.int32))
    nothing = backend.execute(inner, greedy(0))
    assert nothing.tokens.tolist() == [] == nothing.status.tolist()
    last = dataclasses.replace(driver.plan([(request, 8)]), logit_rows=np.array([7], np.int32))
    sampled = backend.execute(last, greedy(1))
    reference = TorchBackend(
        backend.config, tiny_model("qwen2").checkpoint("BF16"), max_model_len=512,
        precision=Precision(),
    )  # fmt: skip
    truth = run_alone(reference, request.token_ids)[-1]
    assert sampled.tokens.tolist() == [int(truth.argmax())]
    assert sampled.status.tolist() == [SAMPLED_OK]


def greedy(num_rows: int) -> SamplingBatch:
    zeros = np.zeros(num_rows, np.int32)
    return SamplingBatch(new_table(1), zeros, zeros + 20, zeros - 1, np.zeros((1, 64), np.int32))


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_weights_are_converted_on_their_way(stored, device):
    tensors = tiny_model("llama-tied-biased").checkpoint(stored)
    expected = tensors.read("model.layers.0.mlp.down_proj.weight", (64, 96))
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[stored]
    truth = torch.from_numpy(expected.data.copy()).view(dtype).view(64, 96)
    backend = build("llama-tied-biased", device, dtype=torch.float16, stored=stored)
    layer = backend._model.body.layers[0]
    assert torch.equal(layer.mlp.down.weight.cpu(), truth.to(torch.float16))


def test_missing_tensors_are_listed_and_progress_is_told(device):
    model = tiny_model("llama")
    checkpoint = MemoryCheckpoint(model.tensors)
    seen = []
    open_cuda(
        ModelConfig.from_hf(model.config), checkpoint, max_model_len=64, device=device.type,
        progress=lambda done, total: seen.append((done, total)),
    ).close()  # fmt: skip
    assert seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)
    del checkpoint._tensors["model.norm.weight"], checkpoint._tensors["lm_head.weight"]
    with pytest.raises(ModelError, match=r"lacks 2 tensors.*lm_head\.weight"):
        open_cuda(
            ModelConfig.from_hf(model.config), checkpoint, max_model_len=64, device=device.type
        )


def test_a_device_that_is_not_there_is_an_error_that_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="--device cuda needs a GPU"):
        open_cuda(
            ModelConfig.from_hf(tiny_model("llama").config),
            tiny_model("llama").checkpoint(),
            max_model_len=64,
        )


def test_names_and_sizes_are_told(device):
    backend = build("llama", device, dtype=torch.bfloat16)
    assert backend.name == "cuda/bfloat16/plain"
    assert backend.vocab_size == 256
    assert backend.kv_bytes_per_block == 2 * 2 * 16 * 2 * 16 * 2
    backend.prepare(BackendLimits(max_tokens=8, max_seqs=2, max_logit_rows=4, max_model_len=64), 3)
    backend.close()


@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2-window", torch.float32),
        ("deepseek-v3", torch.float32),
        pytest.param("gpt-oss", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("deepseek-v3", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("gemma2", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_batch_invariant_bits_depend_on_nothing_but_the_tokens(name, dtype, device):
    backend = build(name, device, dtype=dtype, kernels="triton", batch_invariant=True)
    alone, requests, _ = alone_and_together(backend)
    for request, truth in zip(requests, alone, strict=True):
        assert np.array_equal(np.array(request.logits), truth)


def test_steps_in_buckets_with_padding_equal_each_sequence_alone(device):
    """Everything of a replayed step but the graph itself."""
    backend = build("llama", device, kernels="triton")
    backend._use_graphs, backend._recorder = True, RunAgain(backend)
    driver = Driver(backend)
    requests = [driver.add(row, random_tokens(9 + row, seed=row)) for row in range(3)]
    driver.step([(request, 4 + row) for row, request in enumerate(requests)])
    for shift in range(4):  # in another order each time: rows are not places in the bucket
        order = requests[shift % 3 :] + requests[: shift % 3]
        driver.step([(request, 1) for request in order])
    assert backend._graphs is not None and backend._graphs.captured == {4}
    assert backend._recorder.num_replays == 3
    for request in requests:
        truth = tiny_model("llama").logits(request.token_ids)[:-1]
        np.testing.assert_allclose(np.array(request.logits), truth, **FLOAT32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "llama4", "deepseek-v3"])
def test_captured_steps_give_the_bits_of_launched_ones(name, device):
    results = []
    for use_graphs in (False, True):
        backend = build(name, device, dtype=torch.bfloat16, kernels="triton", use_graphs=use_graphs)
        driver = Driver(backend)
        requests = [driver.add(row, random_tokens(60, seed=row)) for row in range(3)]
        driver.step([(request, 40) for request in requests])
        for _ in range(20):  # first by launches, then captured, then replayed
            driver.step([(request, 1) for request in requests])
        results.append(np.array([request.logits for request in requests]))
        backend.close()
    assert np.isfinite(results[0]).all()
    np.testing.assert_allclose(results[1], results[0], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_the_device_rounds_as_the_reference_does(device):
    model = tiny_model("qwen3")
    token_ids = random_tokens(100, seed=2)
    reference = TorchBackend(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=512,
        precision=Precision(storage=torch.bfloat16),
    )  # fmt: skip
    backend = build("qwen3", device, dtype=torch.bfloat16, kernels="triton")
    rounded = run_alone(reference, token_ids)
    # Values between operations are bf16 here too, not only what linears take.
    assert error(run_alone(backend, token_ids), rounded) < 4 * BF16_AGAINST_ROUNDED_REFERENCE
