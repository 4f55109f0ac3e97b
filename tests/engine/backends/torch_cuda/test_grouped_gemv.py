"""The CUDA kernel for a few rows: its source built for the host, loaded by torch, against plain
products; and when it is chosen. The same source is compiled for devices where nvcc is."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import products
from benchmarks.gpu.measure import Ceilings
from octavo_engine.backends.torch import grouped_gemv
from octavo_engine.backends.torch.cuda_loader import DeviceLinear
from octavo_engine.backends.torch.packed import GroupedWeight, grouped_product
from octavo_engine.backends.torch.triton import grouped
from octavo_engine.backends.torch.triton_kernels import TritonKernels

SOURCES = Path(__file__).parents[4] / "csrc" / "cuda"
SHAPE = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=16)
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def build():
    spec = importlib.util.spec_from_file_location("build_cuda_kernels", SOURCES / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library(build, tmp_path_factory):
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    out = tmp_path_factory.mktemp("cuda") / "grouped_gemv.so"
    assert build.main(["--host", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def product(library):
    return grouped_gemv.load(library)


def weight_of(outputs, inputs, *, bits, group, half, has_minima, ordered=False):
    generator = torch.Generator().manual_seed(outputs + bits)
    shape = (outputs, inputs * bits // 8)
    packed = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    scales = (torch.rand((outputs, inputs // group), generator=generator) / 8).half()
    scales[0, 0] = 3e-6  # a subnormal
    minima = -scales * 7 if has_minima else None
    order = torch.randperm(inputs, generator=generator) if ordered else None
    return GroupedWeight(packed, scales, minima, bits, half, order)


def rows_of(count, inputs, dtype=torch.float32):
    return torch.randn((count, inputs), generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("bits", "group", "half", "has_minima"),
    [(4, 128, 64, False), (4, 128, 64, True), (4, 32, 32, True), (4, 96, 16, True),
     (4, 96, 32, False), (8, 32, 32, False), (8, 192, 64, False)],
)  # fmt: skip
def test_products_are_those_of_plain_torch(bits, group, half, has_minima, count, product):
    inputs = {128: 1280, 96: 96 * 4, 32: 64, 192: 384}[
        group
    ]  # more than a warp reads at once, or less
    weight = weight_of(37, inputs, bits=bits, group=group, half=half, has_minima=has_minima)
    x = rows_of(count, inputs)
    found = product(x, weight, None, torch.float32)
    torch.testing.assert_close(found, grouped_product(x, weight), rtol=2e-5, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_in_and_out_with_a_bias_and_columns_in_order(dtype, product):
    weight = weight_of(20, 256, bits=4, group=64, half=32, has_minima=True, ordered=True)
    x, bias = rows_of(3, 256, dtype), rows_of(1, 20, dtype)[0]
    exact = grouped_product(x, weight) + bias.float()
    torch.testing.assert_close(product(x, weight, bias, torch.float32), exact, rtol=2e-5, atol=2e-4)
    found = product(x, weight, bias, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found, product(x, weight, bias, torch.float32).to(dtype), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_sixteen_bits_is_read_and_written_as_it_is(dtype, product):
    """Through a product by one: the weight is the unit matrix."""
    inputs = 64
    packed = torch.eye(inputs, dtype=torch.int8)
    weight = GroupedWeight(packed, torch.ones((inputs, 1)).half(), None, 8, 32)
    words = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    words = words[words.isfinite()]
    for part in words[: len(words) // 256 * 256].view(-1, 4, inputs):
        found = product(part.contiguous(), weight, None, dtype)
        assert torch.equal(found, part)


def test_what_no_kernel_takes_is_an_error_and_no_wrong_number(product):
    weight = weight_of(8, 64, bits=4, group=32, half=32, has_minima=False)
    for x, bias in (
        (rows_of(5, 64), None),  # rows
        (rows_of(1, 128), None),  # columns
        (rows_of(1, 64), rows_of(1, 7)[0]),
    ):
        with pytest.raises(RuntimeError, match=r"no kernel takes|do not meet|bias must be"):
            product(x, weight, bias, torch.float32)


def plain(x, weight, bias, dtype):
    return grouped_product(x, weight).to(dtype)


def timer_of(times):
    """The kernel's and Triton's, one after the other."""
    left = iter(times)
    return lambda work: (work(), next(left))[1]


def test_it_is_chosen_for_the_rows_for_which_it_was_faster(library, monkeypatch, caplog):
    monkeypatch.setattr(grouped_gemv, "TRIED_SHAPE", (64, 256))
    timer = timer_of([5.0, 9.0, 6.0, 9.0, 9.0, 9.0, 12.0, 9.0])
    with caplog.at_level(logging.INFO):
        chosen = grouped_gemv.choose(CPU, torch.float32, plain, library=library, timer=timer)
    assert set(chosen) == {1, 2}
    assert "groups of 1, 2 rows: 1: 5 us, Triton 9; 2: 6 us, Triton 9" in caplog.text


def test_without_a_library_or_with_one_that_does_not_load_triton_multiplies(tmp_path, caplog):
    file = tmp_path / "none.so"
    assert grouped_gemv.choose(CPU, torch.float32, plain, library=file) == {}
    assert not caplog.text
    file.write_bytes(b"not a library")
    assert grouped_gemv.choose(CPU, torch.float32, plain, library=file) == {}
    assert "Triton multiplies" in caplog.text


def test_who_computes_something_else_is_not_taken_however_fast(library, monkeypatch, caplog):
    monkeypatch.setattr(grouped_gemv, "TRIED_SHAPE", (64, 256))

    def other(x, weight, bias, dtype):
        return plain(x, weight, bias, dtype) * 1.05

    chosen = grouped_gemv.choose(
        CPU, torch.float32, other, library=library, timer=timer_of([1.0, 9.0] * 4)
    )
    assert chosen == {}
    assert "its products of 1 rows are not Triton's" in caplog.text


def test_few_rows_take_it_and_others_and_batch_invariant_ones_do_not(product, monkeypatch):
    asked = []

    def choose(device, dtype, rival):
        asked.append(rival)
        return {1: lambda *args: "cuda", 2: lambda *args: "cuda"}

    monkeypatch.setattr(grouped_gemv, "choose", choose)
    monkeypatch.setattr(grouped, "matmul", lambda *args, **options: "triton")
    layer = DeviceLinear(weight_of(8, 64, bits=4, group=32, half=32, has_minima=False))
    kernels = TritonKernels(CPU, torch.float32, SHAPE, tries_cuda=True)
    assert [kernels.linear(rows_of(n, 64), layer) for n in (1, 2, 3)] == ["cuda", "cuda", "triton"]
    for tries, invariant in ((False, False), (True, True)):
        kernels = TritonKernels(
            CPU, torch.float32, SHAPE, tries_cuda=tries, batch_invariant=invariant
        )
        assert kernels.linear(rows_of(1, 64), layer) == "triton"
    assert len(asked) == 1


def test_it_compiles_for_ampere_and_hopper(build):
    nvcc = build.find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc (docs/gpu.md says how to have one)")
    assert build.main(["--check", "--nvcc", str(nvcc)]) == 0


def test_without_nvcc_the_build_says_who_multiplies_then(build, monkeypatch, capsys):
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert build.main(["--check"]) == 2
    assert "Triton's are used" in capsys.readouterr().err


def test_the_benchmark_times_it_beside_triton(library):
    best = Ceilings(bytes_per_s=1e9, flops_per_s=1e12)
    found = products.quantized(
        best, device=CPU, shape=(64, 256), rows=(1, 4, 5), kernels="plain",
        timer=lambda works: ([work() for work in works], 2.0)[1], library=library, rotated_bytes=0,
    )  # fmt: skip
    timed = sorted(name for name in found if name.endswith("_cuda_ms"))
    kinds = ("int4", "int4_by_32", "int4_symmetric", "int8_weight")
    assert timed == sorted(f"{kind}_{rows}_cuda_ms" for kind in kinds for rows in (1, 4))
