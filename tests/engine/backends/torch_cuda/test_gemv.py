"""Products of one row, and of many with expanded weights, against the same in plain torch."""

from __future__ import annotations

import pytest
import torch

from octavo_engine.backends.torch import packed
from octavo_engine.backends.torch.cuda_loader import DeviceLinear
from octavo_engine.backends.torch.triton import gemv, grouped
from octavo_engine.backends.torch.triton_kernels import TritonKernels
from tests.engine.backends.torch_cuda.test_quantized_products import (
    grouped_weight,
    random,
    stored_matrix,
)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 256), (37, 300), (5, 2304), (1, 40)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_equals_the_plain_product(num_outputs, num_inputs, has_bias, device):
    x = random(1, num_inputs).half().to(device)
    weight = random(num_outputs, num_inputs, seed=1).half().to(device)
    bias = random(num_outputs, seed=2).half().to(device) if has_bias else None
    expected = x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    found = gemv.matmul(x, weight, bias, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    rounded = gemv.matmul(x, weight, bias, torch.float16)
    torch.testing.assert_close(rounded.float(), expected, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 32), (8, 32), (8, 128)])
def test_an_expanded_weight_holds_its_values(bits, group, device):
    weight = grouped_weight(stored_matrix(bits, 41, 256, group), device)
    found = grouped.expand(weight, torch.float16)
    assert torch.equal(found, packed.dequantize(weight).half())


def test_many_rows_meet_the_expanded_weight(device):
    weight = grouped_weight(stored_matrix(4, 41, 256, 128), device)
    x = random(grouped.MANY_ROWS, 256).half().to(device)
    found = grouped.matmul(x, weight, None, torch.float16, num_processors=4)
    expected = packed.grouped_product(x, weight)
    assert (found - expected).norm() / expected.norm() < 2e-3


def test_the_backend_multiplies_a_row_so_unless_bits_must_not_depend_on_rows(device, monkeypatch):
    monkeypatch.setattr(gemv, "matmul", lambda *args: "gemv")

    class Shape:
        num_heads, num_kv_heads, head_dim = 4, 2, 16

    layer = DeviceLinear(random(8, 64).half().to(device))
    x = random(5, 64).half().to(device)
    kernels = TritonKernels(device, torch.float16, Shape())
    assert kernels.linear(x[:1], layer) == "gemv"
    assert kernels.linear(x, layer).shape == (5, 8)
    invariant = TritonKernels(device, torch.float16, Shape(), batch_invariant=True)
    assert invariant.linear(x[:1], layer).shape == (1, 8)
