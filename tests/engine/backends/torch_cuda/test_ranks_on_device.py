"""Ranks of --device cuda: parts of weights in every form, graphs that hold gathers, and a GPU for
each. The device is a CPU, or pretended; with one that is real, NCCL is not met here."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from octavo_engine.backends import rank_devices
from octavo_engine.backends.native.shard import RankPlace, Shard
from octavo_engine.backends.rank_devices import check_devices, environment_of
from octavo_engine.backends.torch.rank_group import RankGroup, ranges_of
from octavo_engine.config import EngineConfig
from octavo_engine.errors import ConfigError, GatherFailed
from octavo_engine.executor.rank_processes import RankProcesses
from octavo_engine.models.config import ModelConfig
from tests.engine.backends.ranks import MAX_MODEL_LEN, mixed_steps
from tests.engine.backends.torch_cuda import pretend
from tests.engine.backends.torch_cuda.opening import open_cuda
from tests.engine.backends.torch_cuda.ranks_on_device import install_gathers
from tests.engine.backends.torch_cuda.test_packed_models import Quantized
from tests.engine.backends.torch_cuda.test_pretended import build, check, said, write
from tests.engine.backends.torch_ranks import TorchThreadRanks
from tests.engine.models.tiny import tiny_model
from tests.fakes.rank_processes import started_by

TWO = EngineConfig(model="demo://smollm2", device="cuda", tensor_parallel_size=2)


def on_cpu(family, checkpoint=None, place=None, dtype=torch.float32):
    model = tiny_model(family)
    return open_cuda(
        ModelConfig.from_hf(model.config), checkpoint or model.checkpoint(),
        max_model_len=MAX_MODEL_LEN, dtype=dtype, device="cpu", kernels="plain",
        place=place, shares_device=True,
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "olmo2", "gpt2", "bloom"])
def test_ranks_compute_what_one_process_does(family, size):
    alone = mixed_steps(on_cpu(family))
    ranks = TorchThreadRanks(size, lambda place: on_cpu(family, place=place))
    found = mixed_steps(ranks)
    ranks.close()
    np.testing.assert_allclose(found, alone, atol=1e-5)
    np.testing.assert_array_equal(found.argmax(-1), alone.argmax(-1))


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    # In float32 no inputs are rounded to eight bits.
    [("int4", torch.float32, 1e-5), ("int8", torch.bfloat16, 0.01), ("fp8", torch.bfloat16, 0.01)],
)
def test_weights_stay_quantised_in_parts(kind, dtype, tolerance):
    alone = mixed_steps(on_cpu("qwen3", Quantized(kind), dtype=dtype))
    ranks = TorchThreadRanks(2, lambda place: on_cpu("qwen3", Quantized(kind), place, dtype))
    layers = [rank._model.body.layers[0] for rank in ranks.ranks]
    for linear in ("qkv", "output"):
        weights = [getattr(layer.attention, linear).weight for layer in layers]
        assert not any(isinstance(weight, torch.Tensor) for weight in weights)
    found = mixed_steps(ranks)
    ranks.close()
    assert np.abs(found - alone).mean() < tolerance * alone.std()


def test_all_ranks_together_hold_each_weight_once():
    def held(backend):
        return sum(storage.nbytes() for storage in backend._parking._storages.values())

    alone = on_cpu("qwen3")
    ranks = TorchThreadRanks(2, lambda place: on_cpu("qwen3", place=place))
    parts = [held(rank) for rank in ranks.ranks]
    ranks.close()
    assert max(parts) < 0.6 * held(alone)


def test_blocks_are_counted_for_all_ranks():
    """Two KV heads: both ranks of two have one each, and of four two have the same."""
    sizes = {}
    for size in (1, 2, 4):
        ranks = TorchThreadRanks(size, lambda place: on_cpu("qwen3", place=place))
        sizes[size] = ranks.ranks[0].kv_bytes_per_block
        ranks.close()
    assert sizes[1] == sizes[2] == sizes[4] // 2


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_an_engine_of_two_ranks_on_one_gpu(tmp_path, monkeypatch, request, kernels):
    """On a real one through gloo; on one that is pretended gathers are part of graphs."""
    folder, is_real = write(tmp_path, "qwen3"), torch.cuda.is_available()
    truth = said(build(folder, device="cpu", num_threads=1))
    monkeypatch.setenv(rank_devices.SHARES_GPU, "1")
    module = "octavo_engine.executor.worker"
    if not is_real:
        request.getfixturevalue("pretended")
        install_gathers(monkeypatch)
        module = "tests.engine.backends.torch_cuda.pretended_rank"
        command = (sys.executable, "-m", module)
        monkeypatch.setattr(RankProcesses.__init__, "__defaults__", (command,))
    engine = build(folder, device="cuda", kernels=kernels, tensor_parallel_size=2)
    assert len(started_by(psutil.Process(), module)) == 1
    for _ in range(2):  # from the prefix cache, and by graphs that were captured
        check(said(engine), truth)
    graphs = engine.executor._backend._backend._graphs.captured
    assert bool(graphs) == (kernels == "triton" and not is_real)
    engine.close()


class FakeNccl:
    """NCCL's place in torch.distributed, taken by gloo."""

    class Options:
        _timeout = None

    made: ClassVar[tuple[Any, ...]] = ()

    def __init__(self, store, rank, size, options):
        FakeNccl.made = (*FakeNccl.made, (rank, size, options._timeout))
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's
        gloo._timeout = timedelta(seconds=60)
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, gloo)
        self.ended = threading.Event()

    def _allgather_base(self, parts, own, options):
        return self.gloo._allgather_base(parts, own, options)

    def abort(self):
        self.ended.set()


@pytest.fixture
def two_groups(pretended, monkeypatch):
    """Two ranks with a pretended GPU each, whose waits end after a second."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl)
    monkeypatch.setattr(FakeNccl, "made", ())
    monkeypatch.setattr("os.environ", dict(os.environ))
    file = os.memfd_create("octavo-test")
    groups = [
        RankGroup(RankPlace(Shard(rank, 2), file, 1.0), pretended, shares_device=False)
        for rank in range(2)
    ]
    os.close(file)
    both(groups, RankGroup.connect)
    yield groups
    for group in groups:
        group.close()


def both(groups, work):
    def run(group):
        with pretend.Pretending():
            return work(group)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, groups))


def test_ranks_with_a_gpu_each_are_connected_by_nccl(two_groups):
    assert [made[:2] for made in sorted(FakeNccl.made)] == [(0, 2), (1, 2)]
    # Its own watch would end the process, and not say which rank it waited for.
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert min(made[2] for made in FakeNccl.made) > timedelta(days=1)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert all(group.can_capture for group in two_groups)
    for name, total in (("self_attn.o_proj", 48), ("mlp.gate_proj", 96)):  # rows, and halves
        cuts = two_groups[0].cuts(name, total)

        def gather(group, cuts=cuts, total=total):
            row = torch.arange(total, device=group._device).float()
            return group.gather(ranges_of(row, group.own(cuts))[None], cuts).cpu()

        for found in both(two_groups, gather):
            assert found.tolist() == [list(range(total))]


def test_a_device_that_waits_for_a_rank_in_vain_is_freed(two_groups):
    group = two_groups[0]
    with pytest.raises(GatherFailed, match="not all ranks came"), group.waiting():
        assert group._backend.ended.wait(20)  # a gather on the device, until it is aborted
    with pytest.raises(GatherFailed), group.waiting():
        pass  # what was launched before has no results either
    with two_groups[1].waiting():
        pass


def test_a_gpu_for_each_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs a GPU for each rank, and "
                                          "torch sees 1: lower it"):  # fmt: skip
        check_devices(TWO)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(TWO)


@pytest.mark.parametrize(
    ("visible", "expected"), [({}, "1"), ({"CUDA_VISIBLE_DEVICES": "4, GPU-7,6"}, "GPU-7")]
)
def test_a_rank_sees_its_own_gpu(visible, expected):
    assert environment_of(1, TWO, visible) == {"CUDA_VISIBLE_DEVICES": expected}
    assert environment_of(1, TWO.replace(device="torch"), visible) is None


def test_ranks_that_share_a_gpu_see_the_same(monkeypatch):
    monkeypatch.setenv(rank_devices.SHARES_GPU, "1")
    check_devices(TWO)
    assert environment_of(1, TWO, {}) is None
