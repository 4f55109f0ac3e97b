"""A KV cache in e4m3 with a scale for each token and head: written, read, copied, counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo_engine.backends.native.backend import NativeBackend
from octavo_engine.backends.torch.device_kv import DeviceKV
from octavo_engine.backends.torch.device_step import WalkCut, cut_tiles
from octavo_engine.backends.torch.kv_format import E4M3, narrow_rows, settle_kv_format, widen_blocks
from octavo_engine.backends.torch.plain import PlainKernels
from octavo_engine.backends.torch.precision import Precision
from octavo_engine.backends.torch.reference import PagedKV, ReferenceOps
from octavo_engine.backends.torch.triton import attention, decode, heads
from octavo_engine.caches import KVSpec, LatentSpec, one_group
from octavo_engine.config import BLOCK_SIZE
from octavo_engine.errors import ConfigError
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.driver import Driver, random_tokens, run_alone
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.steps import NUM_BLOCKS, make_step, on_device
from tests.engine.backends.torch_cuda.test_attention import (
    DECODE,
    MIXED,
    SPECS,
    cos_sin,
    make_spec,
    on_host,
    to_device,
)
from tests.engine.backends.torch_cuda.test_decode import in_parts
from tests.engine.models.tiny import tiny_model

# A number has 4 bits with its hidden one: rounded by up to a 16th of itself, and a scale, rounded
# up, makes the numbers smaller by up to a 128th.
WORST = 1 / 16 + 1 / 128


class Paged:
    """A cache of random rows where sequences have their tokens, and of NaN everywhere else."""

    def __init__(self, sequences, spec, device, dtype=torch.float32, *, seed=0):
        self.step, self.spec = make_step(sequences, seed=seed), spec
        rng = torch.Generator().manual_seed(seed)
        layout = one_group([KVSpec(spec.num_kv_heads, spec.head_dim)])
        self.kv = DeviceKV(
            layout, num_blocks=NUM_BLOCKS, dtype=E4M3, device=device, has_scales=True
        )
        self.kv.poison(list(range(NUM_BLOCKS)))
        self.wide = torch.full(
            (2, NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim), torch.nan
        )
        scales = self.kv.scales(0)
        assert scales is not None
        for index, (context, _) in enumerate(sequences):
            first = 0 if spec.window is None else max(0, context + 1 - spec.window)
            for position in range(first, context):
                block = self.step.block_tables[0, self.step.rows[index], position // BLOCK_SIZE]
                at = position % BLOCK_SIZE
                for side, cache in enumerate(self.kv.layer(0)[:2]):
                    row = torch.randn(self.wide.shape[3:], generator=rng) * 3
                    values, own = narrow_rows(row)
                    cache.view(torch.uint8)[block, at] = values.view(torch.uint8).to(device)
                    scales[side][block, :, at] = own.to(device)
                    self.wide[side, block, at] = values.float() * own.float()[:, None]
        columns = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = torch.randn((len(self.step.token_ids), columns), generator=rng).to(device, dtype)

    def reference(self):
        """In float32 on the host, from the context as it was rounded; new rows are not."""
        spec = on_host(self.spec)
        paged = PagedKV(
            one_group([KVSpec(spec.num_kv_heads, spec.head_dim)]), NUM_BLOCKS, torch.float32
        )
        paged.layers[0][:] = self.wide
        result = ReferenceOps(self.step, paged, Precision()).attention(self.qkv.float().cpu(), spec)
        return result, paged.layers[0]

    def widened(self):
        scales = self.kv.scales(0)
        assert scales is not None
        sides = zip(self.kv.layer(0)[:2], scales, strict=True)
        return torch.stack([widen_blocks(v.cpu(), s.cpu(), torch.float32) for v, s in sides])


def scales_of(kv):
    scales = kv.scales(0)
    assert scales is not None
    return scales


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


def slopes_of(spec, q):
    return None if spec.alibi is None else torch.from_numpy(spec.alibi).to(q.device)


def by_triton(paged, *, is_decode):
    spec, device = paged.spec, paged.qkv.device
    if is_decode:
        tiles = in_parts(paged.step.seq_lens.tolist(), 32)
        step = on_device(paged.step, device, tiles, walks=WalkCut(50, spec.num_heads))
    else:
        per_tile = 16 * spec.num_kv_heads // spec.num_heads
        step = on_device(paged.step, device, cut_tiles(paged.step.seq_starts, per_tile))
    kv, angles = paged.kv.layer(0), cos_sin(spec.rope, device)
    q = heads.turn_and_store(paged.qkv, angles, kv, step, spec)
    if is_decode:
        tile = decode.WalkTile(16, 4, 1)
        out = decode.attend(q, kv, step, spec, tile=tile, alibi=slopes_of(spec, q))
    else:
        out = attention.attend(
            q, kv, step, spec, tile=attention.Tile(16, 16, 4, 1), num_splits=1,
            alibi=slopes_of(spec, q),
        )  # fmt: skip
    return out.float().cpu()


def by_plain(paged):
    spec, device = paged.spec, paged.qkv.device
    step = on_device(paged.step, device, cut_tiles(paged.step.seq_starts, 16))
    kv, angles, kernels = paged.kv.layer(0), cos_sin(spec.rope, device), PlainKernels()
    q = kernels.turn_and_store(paged.qkv, angles, kv, step, spec)
    return kernels.attend(q, kv, step, spec).float().cpu()


def test_rows_are_scaled_to_the_largest_and_rounded_to_the_nearest():
    rows = torch.randn(200, 64) * torch.logspace(-8, 8, 200)[:, None]
    rows[3] = 0
    rows[4] = 1e-35
    values, scales = narrow_rows(rows)
    wide = values.float() * scales.float()[:, None]
    largest = rows.abs().amax(1, keepdim=True)
    assert (wide[3:5] == 0).all() and (scales[3:5] == 0).all()
    # A number, or of the small ones half a step of the subnormals.
    bound = torch.maximum(rows.abs() * WORST, largest / 448 * 2**-9)
    assert ((wide - rows).abs() <= bound)[5:].all()
    assert values.float().abs().max() <= 448
    for bad in (torch.inf, -torch.inf, torch.nan):
        rows[7, 5] = bad
        assert narrow_rows(rows)[1][7].isnan()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "rope", "norms", "odd head", "one group"])
def test_triton_stores_what_plain_torch_stores(name, device):
    spec = to_device(SPECS[name], device)
    plain, triton = Paged(MIXED, spec, device), Paged(MIXED, spec, device)
    by_plain(plain)
    by_triton(triton, is_decode=False)
    for mine, other in zip(scales_of(plain.kv), scales_of(triton.kv), strict=True):
        if name == "plain":
            assert torch.equal(mine.view(torch.int16), other.view(torch.int16))
        else:  # norms and turns round in another order: then a scale may be a unit larger
            torch.testing.assert_close(mine, other, rtol=2**-7, atol=0, equal_nan=True)
    for mine, other in zip(plain.kv.layer(0)[:2], triton.kv.layer(0)[:2], strict=True):
        mine, other = mine.float(), other.float()
        if name == "plain":
            assert torch.equal(mine.nan_to_num(), other.nan_to_num())
        assert (mine.nan_to_num() != other.nan_to_num()).float().mean() < 0.02
        torch.testing.assert_close(mine, other, rtol=1 / 8, atol=2**-9, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("is_decode", [False, True])
def test_attention_is_as_near_as_rounded_rows_can_be(name, is_decode, device):
    paged = Paged(DECODE if is_decode else MIXED, to_device(SPECS[name], device), device)
    expected, kv = paged.reference()
    found = by_triton(paged, is_decode=is_decode)
    wide = paged.widened()
    assert torch.equal(wide.isnan(), kv.isnan())
    there = ~kv.isnan()
    assert error(wide[there], kv[there]) < 0.03
    assert error(found, expected) < 0.06
    # The reference over the very rows that were stored differs by float32's rounding alone.
    paged.wide = wide
    spec = on_host(paged.spec)
    layout = one_group([KVSpec(spec.num_kv_heads, spec.head_dim)])
    again = PagedKV(layout, NUM_BLOCKS, torch.float32)
    again.layers[0][:] = wide
    ops = ReferenceOps(paged.step, again, Precision())
    # Its own store would replace them by rows that are not rounded.
    kept = again.layers[0].clone()
    q, _, _ = ops._heads(paged.qkv.float().cpu(), spec)
    again.layers[0][:] = kept
    outputs = [ops._attend(q, index, spec) for index in range(len(paged.step.seq_lens))]
    torch.testing.assert_close(found, torch.cat(outputs), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_plain_attention_equals_tritons(name, device):
    spec = to_device(SPECS[name], device)
    plain, triton = Paged(MIXED, spec, device), Paged(MIXED, spec, device)
    assert error(by_plain(plain), by_triton(triton, is_decode=False)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("is_decode", [False, True])
def test_sixteen_bit_queries_read_eight_bit_keys(dtype, is_decode, device):
    paged = Paged(DECODE if is_decode else MIXED, make_spec(), device, dtype)
    expected, _ = paged.reference()
    assert error(by_triton(paged, is_decode=is_decode), expected) < 0.06


def build(name, device, kernels, **options):
    model = tiny_model(name)
    return open_cuda(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=512,
        dtype=torch.float32, device=device.type, kernels=kernels, kv_cache_dtype="fp8", **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["plain", "triton"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_whole_model_is_as_close_to_float32_as_on_the_cpu(name, kernels, device):
    model, token_ids = tiny_model(name), random_tokens(30, seed=1)
    found = run_alone(build(name, device, kernels), token_ids, chunks=[20, 1, 1])
    native = NativeBackend(
        ModelConfig.from_hf(model.config), model.checkpoint(), max_model_len=512,
        dtype="f32", num_threads=1, kv_cache_dtype="fp8",
    )  # fmt: skip
    on_cpu = run_alone(native, token_ids)
    exact = model.logits(token_ids)

    def away(left, right):
        return np.linalg.norm(left - right) / np.linalg.norm(exact - exact.mean())

    assert away(found, exact) < max(0.02, 1.1 * away(on_cpu, exact))
    assert away(found, on_cpu) < 0.02  # which has no subnormals


@pytest.mark.slow
@pytest.mark.usefixtures("row_by_row")
def test_batch_invariant_bits_do_not_depend_on_chunks(device):
    token_ids = random_tokens(24, seed=3)
    backend = build("llama", device, "triton", batch_invariant=True)
    whole = run_alone(backend, token_ids)
    backend = build("llama", device, "triton", batch_invariant=True)
    assert np.array_equal(run_alone(backend, token_ids, chunks=[7, 1, 12, 1]), whole)


def test_a_block_takes_a_byte_a_number_and_two_a_row(device):
    backend = build("llama", device, "plain")
    rows = [(spec.num_kv_heads, spec.head_dim) for spec in backend.cache_layout.specs]
    num_bytes = sum(2 * 16 * heads * (dim + 2) for heads, dim in rows)
    assert backend.kv_bytes_per_block == num_bytes
    driver = Driver(backend)
    request = driver.add(0, random_tokens(40, seed=1))
    driver.step([(request, 40)])
    pages = backend.save_blocks(request.blocks)
    assert {page.nbytes for page in pages} == {num_bytes}
    backend.poison_blocks(request.blocks)
    backend.load_blocks(request.blocks, pages)
    for page, again in zip(pages, backend.save_blocks(request.blocks), strict=True):
        assert np.array_equal(page, again)


def test_a_copied_beginning_takes_its_scales_along(device):
    layout = one_group([KVSpec(2, 16)])
    kv = DeviceKV(layout, num_blocks=4, dtype=E4M3, device=device, has_scales=True)
    for cache, scales in zip(kv.layer(0)[:2], scales_of(kv), strict=True):
        cache.view(torch.uint8)[1] = 5
        scales[1] = 2
    kv.copy(np.array([[1, 3, 9]], np.int32))
    for cache, scales in zip(kv.layer(0)[:2], scales_of(kv), strict=True):
        assert cache.view(torch.uint8)[3, :, 0, 0].tolist() == [5] * 9 + [0] * 7
        assert scales[3, 1].tolist() == [2.0] * 9 + [0.0] * 7


def test_formats_that_are_not_computed_are_refused():
    def settle(requested, dtype=torch.float16, spec=None, *, has_e4m3=True, reads_scales=True):
        layout = one_group([spec or KVSpec(2, 16)])
        return settle_kv_format(
            requested, dtype, layout, has_e4m3=has_e4m3, reads_scales=reads_scales
        )

    assert settle("float32", torch.float32).dtype == torch.float32
    assert settle("auto", has_e4m3=False).dtype == torch.float16
    assert settle("fp8_e4m3").has_scales
    for requested in ("int8", "fp8_e5m2", "bfloat16"):
        with pytest.raises(ConfigError, match=f"{requested} is not computed by --device cuda"):
            settle(requested)
    with pytest.raises(ConfigError, match="latent attention; use auto"):
        settle("fp8", spec=LatentSpec(rank=16, rope_dim=8))
    with pytest.raises(ConfigError, match="use --attention-backend triton"):
        settle("fp8", reads_scales=False)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 on"):
        settle("fp8", has_e4m3=False)
