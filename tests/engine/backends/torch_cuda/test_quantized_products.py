"""Products with weights that stay quantised: Triton against plain torch, both against the file."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from octavo_engine.backends.dequantize import to_float32
from octavo_engine.backends.torch import packed, repack
from octavo_engine.backends.torch.packed import FP8, ScaledWeight
from octavo_engine.backends.torch.triton import grouped, scaled
from octavo_engine.backends.torch.triton.splits import FEW_ROWS, cut
from octavo_engine.weights.checkpoint import StoredTensor
from octavo_engine.weights.integer_blocks import q4_1_blocks, q8_0_blocks

CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored_matrix(bits, rows, columns, group, *, is_symmetric=False, seed=0):
    """As a checkpoint hands it out."""
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.005, 0.02, (rows, columns // group)).astype(np.float16)
    if bits == 8:
        q = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
        return StoredTensor("w", "Q8_0", (rows, columns), q8_0_blocks(q, scales / np.float32(16)))
    q4 = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    zeros = np.full(scales.shape, 8) if is_symmetric else rng.integers(1, 16, scales.shape)
    data = q4_1_blocks(q4, scales.astype(np.float32), zeros)
    return StoredTensor("w", "Q4_1", (rows, columns), data)


def grouped_weight(stored, device, order=None):
    raw = torch.from_numpy(stored.data.reshape(-1)).to(device)
    blocks = repack.read_blocks(raw, stored.dtype, stored.shape[0])
    return repack.grouped(blocks, order)


# Groups of a tile, of half a tile, of several; columns that take the smallest tile.
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize(("bits", "is_symmetric"), [(4, False), (4, True), (8, True)])
def test_blocks_become_the_groups_they_came_from(bits, is_symmetric, group, device):
    stored = stored_matrix(bits, 24, 256, group, is_symmetric=is_symmetric)
    weight = grouped_weight(stored, device)
    assert weight.group_size == group
    assert (weight.minima is None) == is_symmetric
    assert weight.shape == (24, 256)
    expected = torch.from_numpy(to_float32(stored))
    torch.testing.assert_close(packed.dequantize(weight).cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "is_symmetric", "columns", "group", "half"),
    [
        (4, False, 256, 128, 64),
        (4, True, 256, 128, 64),
        (4, False, 128, 32, 32),  # two groups in a tile
        (4, False, 96, 96, 16),  # three blocks: tiles of one
        (8, True, 256, 64, 64),  # two groups in a tile
        (8, True, 96, 32, 16),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 3, 20, 40, 70])
def test_any_group_equals_the_plain_product(
    bits, is_symmetric, columns, group, half, num_rows, device
):
    stored = stored_matrix(bits, 70, columns, group, is_symmetric=is_symmetric)
    weight = grouped_weight(stored, device)
    assert weight.half == half
    x, bias = random(num_rows, columns).to(device), random(70, seed=2).to(device)
    truth = x.double().cpu() @ torch.from_numpy(to_float32(stored)).double().t()
    torch.testing.assert_close(packed.grouped_product(x, weight).cpu(), truth.float(), **CLOSE)
    found = grouped.matmul(x, weight, bias, torch.float32, num_processors=4)
    torch.testing.assert_close(found.cpu(), truth.float() + bias.cpu(), **CLOSE)
    half_found = grouped.matmul(x.half(), weight, None, torch.float32, num_processors=4)
    half_truth = x.half().double().cpu() @ torch.from_numpy(to_float32(stored)).double().t()
    torch.testing.assert_close(half_found.cpu(), half_truth.float(), **CLOSE)


def test_inputs_are_split_for_few_rows_and_joined_in_order(device):
    stored = stored_matrix(4, 70, 2048, 128)
    weight = grouped_weight(stored, device)
    x, bias = random(2, 2048).to(device), random(70, seed=2).to(device)
    work = grouped.choose_cut(2, 70, 16, 132, is_one_group=True, batch_invariant=False)
    assert (work.num_splits, work.steps_per_split) == (4, 4)
    found = grouped.matmul(x, weight, bias, torch.float32, num_processors=132)
    expected = packed.grouped_product(x, weight) + bias
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    again = grouped.matmul(x, weight, bias, torch.float32, num_processors=132)
    assert torch.equal(found, again)


def test_work_is_cut_so_that_every_step_belongs_to_one_split():
    for num_steps in range(1, 70):
        for outputs in (64, 1000, 9000):
            work = cut(1, outputs, num_steps, 132, batch_invariant=False)
            assert (work.num_splits - 1) * work.steps_per_split < num_steps
            assert work.num_splits * work.steps_per_split >= num_steps
    assert cut(1, 64, 60, 132, batch_invariant=True) == cut(999, 64, 60, 132, batch_invariant=True)


def test_products_with_groups_are_cut_so_too():
    for num_rows in (1, 17, 33, 65, 128):
        for num_tiles in (1, 5, 32, 112):
            for outputs in (64, 4096, 28672):
                for is_one_group in (True, False):
                    work = grouped.choose_cut(
                        num_rows, outputs, num_tiles, 132,
                        is_one_group=is_one_group, batch_invariant=False,
                    )  # fmt: skip
                    assert (work.num_splits - 1) * work.steps_per_split < num_tiles
                    assert work.num_splits * work.steps_per_split >= num_tiles
                    assert work.block_m >= min(num_rows, 64) and work.num_splits <= 8
    invariant = functools.partial(
        grouped.choose_cut, num_outputs=64, num_tiles=60, num_processors=132, batch_invariant=True
    )
    assert invariant(1, is_one_group=True) == invariant(999, is_one_group=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "is_symmetric"), [(4, False), (4, True), (8, True)])
def test_each_integer_meets_its_input_as_it_is(bits, is_symmetric, dtype, device):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    weight = grouped_weight(stored_matrix(bits, 70, 256, 128, is_symmetric=is_symmetric), device)
    values = packed.dequantize(weight)
    one_hot = torch.eye(256, dtype=dtype, device=device)
    for columns in (slice(0, 1), slice(0, 60), slice(100, 200)):
        found = grouped.matmul(one_hot[columns], weight, None, torch.float32, num_processors=4)
        torch.testing.assert_close(found, values[:, columns].t(), rtol=1e-6, atol=1e-6)


def test_columns_sorted_into_groups_meet_their_own_inputs(device):
    stored = stored_matrix(4, 40, 128, 64)
    order = torch.from_numpy(np.random.default_rng(3).permutation(128)).to(device)
    weight = grouped_weight(stored, device, order)
    x = random(3, 128).to(device)
    expected = x[:, order].cpu() @ torch.from_numpy(to_float32(stored)).t()
    torch.testing.assert_close(packed.grouped_product(x, weight).cpu(), expected, **CLOSE)
    found = grouped.matmul(x, weight, None, torch.float32, num_processors=4)
    torch.testing.assert_close(found.cpu(), expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("block", [200, 64])
def test_rows_are_rounded_alike(dtype, block, device):
    x = random(5, 200) * torch.tensor([1e-4, 1.0, 30.0, 1e4, 0.0])[:, None]
    x[1, 3:40] *= torch.logspace(-6, 0, 37)  # down to where floats of 8 bits end
    x = x.to(device)
    plain, fast = packed.round_rows(x, dtype, block), scaled.round_rows(x, dtype, block)
    assert torch.equal(fast.scales, plain.scales)
    assert torch.equal(fast.values.float(), plain.values.float())
    spread = plain.values.float() * plain.scales.repeat_interleave(block, 1)[:, :200]
    step = 1 / 254 if dtype == torch.int8 else 1 / 16
    assert ((spread - x).abs().amax(1) <= step * x.abs().amax(1)).all()


def int8_weight(rows, columns, device):
    values = torch.randint(
        -127, 128, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(1)
    )
    return ScaledWeight(values.to(device), (random(rows, 1).abs() / 50).to(device), columns)


def float8_weight(rows, columns, block, device):
    values = random(rows, columns, seed=1).to(FP8)
    scales = random(rows, -(-columns // block)).abs() / 5
    return ScaledWeight(values.to(device), scales.to(device), block)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_integers_on_both_sides_are_summed_exactly(num_rows, device):
    weight = int8_weight(70, 200, device)
    x, bias = random(num_rows, 200).to(device), random(70, seed=2).to(device)
    rounded = packed.round_rows(x, torch.int8, 200)
    sums = (rounded.values.double() @ weight.values.double().t()).float()
    expected = sums * rounded.scales * weight.scales.t() + bias
    found = scaled.matmul(x, weight, bias, torch.float32, num_processors=4)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(packed.scaled_product(x, weight) + bias, expected, **CLOSE)


@pytest.mark.parametrize(("block", "num_rows"), [(300, 1), (300, 40), (128, 20), (32, 1)])
def test_floats_of_eight_bits_on_both_sides(block, num_rows, device):
    weight = float8_weight(70, 300, block, device)
    x, bias = random(num_rows, 300).to(device), random(70, seed=2).to(device)
    found = scaled.matmul(x, weight, bias, torch.float32, num_processors=4)
    expected = packed.scaled_product(x, weight) + bias
    if device.type == "cuda" and num_rows > FEW_ROWS:
        # Its matrix units align what they add to the largest, and keep 13 bits behind the point.
        weights = weight.values.float() * weight.scales.repeat_interleave(block, 1)[:, :300]
        assert ((found - expected).abs() <= 2**-11 * (x.abs() @ weights.abs().t())).all()
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    exact = x @ (weight.values.float() * weight.scales.repeat_interleave(block, 1)[:, :300]).t()
    error = (found - bias - exact).norm() / exact.norm()
    assert 0.005 < error < 0.05  # three bits of mantissa, and no more lost


@pytest.mark.gpu
def test_many_rows_of_floats_of_eight_bits_go_through_the_library(device):
    """Scales lie as it wants them, and its sums are as the kernel's."""
    weight = float8_weight(64, 320, 320, device)
    x, bias = random(40, 320).to(device).bfloat16(), random(64, seed=2).to(device).bfloat16()
    assert scaled._fits_library(x.to(FP8), weight, torch.bfloat16) == (
        torch.cuda.get_device_capability(device)[0] == 9
    )
    found = scaled.matmul(x, weight, bias, torch.bfloat16, num_processors=132).float()
    expected = packed.scaled_product(x, weight) + bias.float()
    assert (found - expected).norm() / expected.norm() < 5e-3


def test_few_rows_of_long_inputs_are_split_too(device):
    weight = float8_weight(64, 2048, 128, device)
    x = random(1, 2048).to(device)
    found = scaled.matmul(x, weight, None, torch.float32, num_processors=132)
    torch.testing.assert_close(found, packed.scaled_product(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("kind", ["grouped", "int8", "fp8"])
def test_batch_invariant_rows_have_the_same_bits_in_any_company(kind, device):
    options: dict[str, Any] = {"num_processors": 132, "batch_invariant": True}

    def product(x):
        if kind == "grouped":
            weight = grouped_weight(stored_matrix(4, 40, 256, 64), device)
            return grouped.matmul(x, weight, None, torch.float32, **options)
        make = int8_weight if kind == "int8" else functools.partial(float8_weight, block=128)
        return scaled.matmul(x, make(40, 256, device=device), None, torch.float32, **options)

    x = random(70, 256).to(device)
    together = product(x)
    for rows in (slice(0, 1), slice(65, 70), slice(13, 60)):
        assert torch.equal(product(x[rows]), together[rows])


def test_no_rows(device):
    empty = torch.empty((0, 128), device=device)
    weight = grouped_weight(stored_matrix(4, 40, 128, 64), device)
    assert grouped.matmul(empty, weight, None, torch.float32, num_processors=4).shape == (0, 40)
    eight = int8_weight(40, 128, device)
    assert scaled.matmul(empty, eight, None, torch.float32, num_processors=4).shape == (0, 40)
