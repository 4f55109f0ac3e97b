"""Whole models whose weights stay quantised on the device, against the same ones expanded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.packed import FP8, GroupedWeight, PackedExperts, ScaledWeight
from octavo_engine.models.config import ModelConfig
from octavo_engine.weights.checkpoint import Scales, StoredTensor
from octavo_engine.weights.integer_blocks import BLOCK, q4_1_blocks, q8_0_blocks
from octavo_engine.weights.quantize import quantize_groups
from tests.engine.backends.driver import random_tokens, run_alone
from tests.engine.backends.tolerance import FLOAT32, error
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.models.tiny import tiny_model

pytestmark = pytest.mark.slow

MODEL = "qwen3"


class Quantized:
    """The tiny model's checkpoint with its projections as `kind` says."""

    def __init__(self, kind, *, sorts=(), model=MODEL):
        self.inner = tiny_model(model).checkpoint()
        self.kind, self.sorts = kind, sorts
        self.total_bytes = self.inner.total_bytes

    def names(self):
        return self.inner.names()

    def read(self, name, shape):
        stored = self.inner.read(name, shape)
        if not name.endswith("_proj.weight"):
            return stored
        values = stored.data.view(np.float32).reshape(shape)
        made = getattr(self, f"_{self.kind}")(name, values)
        if any(part in name for part in self.sorts):
            place = np.random.default_rng(0).permutation(shape[1]).astype(np.int32)
            made = dataclasses.replace(made, column_map=place)
        return made

    def _int4(self, name, values):
        q, scales, zeros = quantize_groups(values.reshape(-1, BLOCK), 4)
        rows = len(values)
        data = q4_1_blocks(
            q.reshape(values.shape), scales.reshape(rows, -1).astype(np.float32),
            zeros.reshape(rows, -1),
        )  # fmt: skip
        return StoredTensor(name, "Q4_1", values.shape, data)

    def _int8(self, name, values):
        scales = (np.abs(values).max(1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
        q = np.rint(values / scales).clip(-127, 127).astype(np.int8)
        return StoredTensor(name, "Q8_0", values.shape, q8_0_blocks(q, scales), input_dtype="int8")

    def _fp8(self, name, values):
        stored = torch.from_numpy(values / 2).to(FP8).view(torch.uint8).numpy()
        factors = np.full((-(-len(values) // 32), -(-values.shape[1] // 32)), 2, np.float32)
        return StoredTensor(
            name, "F8_E4M3", values.shape, stored.reshape(-1),
            scales=Scales(factors, 32, 32), input_dtype="fp8",
        )  # fmt: skip


def build(checkpoint, device, *, dtype=torch.float32, model=MODEL, **options):
    return open_cuda(
        ModelConfig.from_hf(tiny_model(model).config), checkpoint, max_model_len=512, dtype=dtype,
        device=device.type, **options,
    )  # fmt: skip


def kinds(backend):
    layer = backend._model.body.layers[0]
    linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    weights = [linear.weight for linear in linears]
    return [torch.Tensor if isinstance(w, torch.Tensor) else type(w) for w in weights]


@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_packed_weights_are_the_same_weights(kind, kernels, device):
    token_ids = random_tokens(18 if kernels == "triton" else 60, seed=1)
    backend = build(Quantized(kind), device, kernels=kernels)
    assert kinds(backend) == [GroupedWeight] * 4  # float32: no input is rounded
    expanded = build(Quantized(kind), device, kernels="plain", keep_quantized=False)
    assert kinds(expanded) == [torch.Tensor] * 4
    truth = run_alone(expanded, token_ids)
    np.testing.assert_allclose(run_alone(backend, token_ids, chunks=[17]), truth, **FLOAT32)


@pytest.mark.parametrize(
    ("kind", "kernels", "sorts"),
    [
        ("int4", "plain", ()), ("int8", "plain", ()), ("int4", "triton", ("experts",)),
        ("int8", "triton", ()),
    ],
)  # fmt: skip
def test_a_mixtures_experts_stay_packed(kind, kernels, sorts, device):
    token_ids = random_tokens(12 if kernels == "triton" else 60, seed=1)
    options = {"model": "qwen2-moe", "kernels": kernels}
    backend = build(Quantized(kind, sorts=sorts, model="qwen2-moe"), device, **options)
    mixture = backend._model.body.layers[0].mlp
    assert isinstance(mixture.gate_up, PackedExperts) and isinstance(mixture.down, PackedExperts)
    assert mixture.gate_up.shape == (6, 64, 64) and mixture.down.shape == (6, 64, 32)
    assert isinstance(mixture.gate_up.weight, GroupedWeight)
    assert isinstance(mixture.down.weight, GroupedWeight)
    assert mixture.gate_up.weight.bits == (4 if kind == "int4" else 8)
    assert (mixture.down.weight.order is not None) == bool(sorts)
    options["kernels"] = "plain"
    expanded = build(
        Quantized(kind, sorts=sorts, model="qwen2-moe"), device, keep_quantized=False, **options
    )
    truth = run_alone(expanded, token_ids)
    np.testing.assert_allclose(run_alone(backend, token_ids, chunks=[11]), truth, **FLOAT32)


def test_experts_in_several_orders_are_expanded(device):
    checkpoint = Quantized("int4", sorts=("experts.1.",), model="qwen2-moe")
    backend = build(checkpoint, device, model="qwen2-moe", kernels="plain", dtype=torch.bfloat16)
    assert isinstance(backend._model.body.layers[0].mlp.gate_up, torch.Tensor)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_experts_that_round_their_inputs_stay_packed(kind, device):
    token_ids = random_tokens(40, seed=1)
    options = {"model": "qwen2-moe", "kernels": "plain"}
    checkpoint = Quantized(kind, model="qwen2-moe")
    backend = build(checkpoint, device, dtype=torch.bfloat16, **options)
    mixture = backend._model.body.layers[0].mlp
    for part in (mixture.gate_up, mixture.down):
        assert isinstance(part, PackedExperts) and isinstance(part.weight, ScaledWeight)
    assert mixture.gate_up.shape == (6, 64, 64)
    exact = run_alone(build(checkpoint, device, **options), token_ids)
    found = run_alone(backend, token_ids)
    # A few tokens' scores are so close that the noise sends them to another expert.
    errors = [error(mine, truth) for mine, truth in zip(found, exact, strict=True)]
    assert np.median(errors) < {"int8": 0.05, "fp8": 0.15}[kind]


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_sixteen_bits_between_packed_weights(kind, device):
    token_ids = random_tokens(60, seed=1)
    backend = build(Quantized(kind), device, dtype=torch.bfloat16, kernels="plain")
    assert kinds(backend) == [GroupedWeight if kind == "int4" else ScaledWeight] * 4
    exact = run_alone(build(Quantized(kind), device, kernels="plain"), token_ids)
    # Inputs of 8 bits: each product adds some half a percent (int8) or three (e4m3) of noise.
    limit = {"int4": 0.03, "int8": 0.05, "fp8": 0.15}[kind]
    assert error(run_alone(backend, token_ids), exact) < limit


def test_columns_in_another_order_stay_packed_if_parts_agree(device):
    token_ids = random_tokens(40, seed=1)
    for sorts, expected in (
        (("q_proj", "k_proj", "v_proj", "o_proj"), [GroupedWeight] * 4),
        (("q_proj", "up_proj"), [torch.Tensor, GroupedWeight, torch.Tensor, GroupedWeight]),
    ):
        backend = build(Quantized("int4", sorts=sorts), device, kernels="plain")
        assert kinds(backend) == expected
        expanded = build(
            Quantized("int4", sorts=sorts), device, kernels="plain", keep_quantized=False
        )
        truth = run_alone(expanded, token_ids)
        np.testing.assert_allclose(run_alone(backend, token_ids), truth, **FLOAT32)


def test_rows_in_another_order_stay_packed(device):
    class Permuted(Quantized):
        def read(self, name, shape):
            stored = super().read(name, shape)
            if "q_proj" not in name and "down_proj" not in name:
                return stored
            rows = np.random.default_rng(0).permutation(shape[0]).astype(np.int32)
            return dataclasses.replace(stored, row_map=rows)

    token_ids = random_tokens(40, seed=1)
    backend = build(Permuted("int4"), device, kernels="plain")
    assert kinds(backend) == [GroupedWeight] * 4
    expanded = build(Permuted("int4"), device, kernels="plain", keep_quantized=False)
    truth = run_alone(expanded, token_ids)
    np.testing.assert_allclose(run_alone(backend, token_ids), truth, **FLOAT32)


def test_float32_expands_floats_of_eight_bits(device):
    backend = build(Quantized("fp8"), device, kernels="plain")
    assert kinds(backend) == [torch.Tensor] * 4
    backend = build(Quantized("fp8", model="qwen2-moe"), device, kernels="plain", model="qwen2-moe")
    assert isinstance(backend._model.body.layers[0].mlp.gate_up, torch.Tensor)
