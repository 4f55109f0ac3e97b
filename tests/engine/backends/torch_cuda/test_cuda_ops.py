"""Sums that wait for the norm after them."""

from __future__ import annotations

import pytest
import torch

from octavo_engine.backends.torch.cuda_ops import Context, CudaOps, Sum
from octavo_engine.backends.torch.device_kv import DeviceKV
from octavo_engine.backends.torch.plain import PlainKernels
from octavo_engine.backends.torch.ropes import DeviceRopeTables
from octavo_engine.caches import KVSpec, one_group
from tests.engine.backends.torch_cuda.steps import make_step, of_prompts

WEIGHT = torch.ones(8)


@pytest.fixture
def ops():
    cpu = torch.device("cpu")
    kv = DeviceKV(
        one_group([KVSpec(num_kv_heads=1, head_dim=8)]),
        num_blocks=2,
        dtype=torch.bfloat16,
        device=cpu,
    )
    context = Context(PlainKernels(), kv, DeviceRopeTables(8, cpu), torch.bfloat16)
    step = of_prompts(make_step([(0, 3), (2, 2)]), cpu)
    return CudaOps(step, context)


def test_the_norm_forms_the_sum_on_its_way(ops):
    x, y = torch.randn(5, 8), torch.randn(5, 8).bfloat16()
    total = ops.add(x, y, scale=0.5)
    assert not total.is_formed
    normed = ops.rms_norm(total, WEIGHT, 1e-6)
    assert normed.dtype == torch.bfloat16
    assert total.is_formed
    formed = total.form()
    assert formed.dtype == torch.float32
    torch.testing.assert_close(formed, x + 0.5 * y.float())
    assert ops.add(total, y).x is formed  # not summed a second time


def test_rows_are_selected_before_the_sum_is_formed(ops):
    x, y = torch.randn(5, 8), torch.randn(5, 8)
    selected = ops.select_rows(ops.add(x, y))
    assert isinstance(selected, Sum) and selected.x.shape == (2, 8)
    torch.testing.assert_close(selected.form(), (x + y)[[2, 4]])
    assert torch.equal(ops.select_rows(x), x[[2, 4]])


def test_a_sum_that_no_norm_follows_is_formed_all_the_same(ops):
    x = torch.full((5, 8), 2.0)
    total = ops.add(x, x)
    assert torch.equal(ops.scale(total, 0.5), x)
    assert torch.equal(ops.activation(ops.add(x, x, scale=-2.0), "relu"), torch.zeros(5, 8))
