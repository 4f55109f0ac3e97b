"""FlashInfer's attention, with a package that answers like it and computes in plain torch."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.device_step import cut_walks
from octavo_engine.backends.torch.flashinfer import FlashInferAttention
from octavo_engine.backends.torch.kernels import choose_kernels
from octavo_engine.backends.torch.operands import LayerKV
from octavo_engine.backends.torch.plain import PlainKernels
from octavo_engine.errors import ConfigError
from octavo_engine.ops import AttentionSpec
from tests.engine.backends.torch_cuda.steps import NUM_BLOCKS, make_step, of_prompts, on_device

CPU = torch.device("cpu")
SHAPE = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=64)


class FakeFlashInfer:
    """Its wrapper's two methods as its documentation describes them; keeps what they were given."""

    def __init__(self):
        self.plans = []
        self.BatchPrefillWithPagedKVCacheWrapper = self._make

    def _make(self, workspace, layout):
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        return SimpleNamespace(plan=self._plan, run=self._run)

    def _plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
        num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        *, causal, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal and q_data_type == kv_data_type
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype == torch.int32
        self.plans.append(
            SimpleNamespace(
                starts=qo_indptr.tolist(), pages=paged_kv_indptr.tolist(),
                indices=paged_kv_indices.long(), last=paged_kv_last_page_len.tolist(),
                group=num_qo_heads // num_kv_heads, shape=(num_qo_heads, head_dim_qk),
                page_size=page_size, scale=sm_scale, window=window_left, cap=logits_soft_cap,
            )
        )  # fmt: skip

    def _run(self, q, kv):
        p = self.plans[-1]
        assert q.shape[1:] == p.shape
        out = torch.empty_like(q)
        for i, last in enumerate(p.last):
            own = slice(p.starts[i], p.starts[i + 1])
            pages = p.indices[p.pages[i] : p.pages[i + 1]]
            length = (len(pages) - 1) * p.page_size + last
            k, v = (c[pages].flatten(0, 1)[:length].repeat_interleave(p.group, 1) for c in kv)
            scores = torch.einsum("thd,shd->hts", q[own].float(), k.float()) * p.scale
            if p.cap:
                scores = p.cap * torch.tanh(scores / p.cap)
            positions = torch.arange(length)
            rows = positions[length - (own.stop - own.start) :, None]
            seen = positions <= rows
            if p.window >= 0:
                seen &= positions >= rows - p.window
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[own] = torch.einsum("hts,shd->thd", weights, v.float()).to(q.dtype)
        return out


def spec(layer=0, **changes):
    fields = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "scale": 0.1}
    return AttentionSpec(layer=layer, **{**fields, **changes})


def test_it_is_told_where_the_tokens_and_blocks_of_each_sequence_are():
    """Its answer would be wrong otherwise: the fake reads nothing but what it was given."""
    fake = FakeFlashInfer()
    attention = FlashInferAttention(CPU, fake)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn((2, NUM_BLOCKS, 16, 2, 64), generator=generator)
    step = of_prompts(make_step([(0, 20), (31, 1), (16, 16), (5, 40)]), CPU)
    q = torch.randn((77, 256), generator=generator)
    for case in (spec(), spec(window=9), spec(soft_cap=3.0)):
        found = attention.attend(q, LayerKV(k, v), step, case)
        expected = PlainKernels().attend(q, LayerKV(k, v), step, case)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert [(plan.window, plan.cap) for plan in fake.plans] == [(-1, None), (8, None), (-1, 3.0)]
    assert fake.plans[0].last == [4, 16, 16, 13]


def test_a_step_is_planned_once_for_all_layers_of_a_kind():
    fake = FakeFlashInfer()
    attention = FlashInferAttention(CPU, fake)
    k = v = torch.ones((NUM_BLOCKS, 16, 2, 64))
    q = torch.ones((5, 256))
    for _ in range(2):
        step = of_prompts(make_step([(0, 5)]), CPU)
        for layer in range(3):
            attention.attend(q, LayerKV(k, v), step, spec(layer))
    assert len(fake.plans) == 2


@pytest.fixture
def installed(monkeypatch):
    fake = FakeFlashInfer()
    find = importlib.util.find_spec
    found = lambda name: object() if name == "flashinfer" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    return fake


def choose(requested, *, dtype=torch.bfloat16, shape=SHAPE, **options):
    return choose_kernels(CPU, dtype, shape, choice="triton", attention=requested, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its operands are the host's")
def test_prompts_go_to_it_and_single_tokens_do_not(installed, caplog):
    caplog.set_level("INFO")
    kernels = choose("flashinfer", dtype=torch.float16)
    assert "Chose flashinfer for attention: requested, for prompts" in caplog.text
    k = v = torch.ones((NUM_BLOCKS, 16, 2, 64), dtype=torch.float16)
    step = of_prompts(make_step([(0, 5)]), CPU)
    kernels.attend(torch.ones((5, 256), dtype=torch.float16), LayerKV(k, v), step, spec())
    assert len(installed.plans) == 1
    single = on_device(make_step([(4, 1)]), CPU, cut_walks(np.array([5], np.int32), 0))
    out = kernels.attend(torch.ones((1, 256), dtype=torch.float16), LayerKV(k, v), single, spec())
    assert len(installed.plans) == 1
    np.testing.assert_allclose(out.numpy(), 1, rtol=1e-3)


@pytest.mark.usefixtures("installed")
def test_what_it_cannot_do_is_said(caplog):
    caplog.set_level("INFO")
    choose("auto")
    assert "--attention-backend flashinfer is there too" in caplog.text
    with pytest.raises(ConfigError, match="leave out --batch-invariant"):
        choose("flashinfer", batch_invariant=True)
    with pytest.raises(ConfigError, match="a --dtype of 16 bits, not float32"):
        choose("flashinfer", dtype=torch.float32)
    with pytest.raises(ConfigError, match="heads of 64, 128, 256 columns; this model's have 80"):
        odd = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=80)
        choose("flashinfer", shape=odd)


def test_without_it_or_without_triton_there_is_no_choice():
    if importlib.util.find_spec("flashinfer") is None:
        with pytest.raises(ConfigError, match="pip install flashinfer-python"):
            choose("flashinfer")
    with pytest.raises(ConfigError, match="goes with the Triton kernels; requested"):
        choose_kernels(CPU, torch.bfloat16, SHAPE, choice="plain", attention="flashinfer")
