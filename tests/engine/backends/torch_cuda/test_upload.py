"""Bytes on their way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo_engine.backends.torch.upload import Uploader


def test_tensors_larger_than_the_ring_arrive_whole(device):
    rng = np.random.default_rng(0)
    with Uploader(device, buffer_bytes=100, num_buffers=3) as uploader:
        targets, sources = [], []
        for count in (1, 99, 100, 101, 5000):
            sources.append(rng.integers(0, 256, count, dtype=np.uint8))
            targets.append(torch.zeros(count, dtype=torch.uint8, device=device))
            uploader.copy(targets[-1], sources[-1])
        uploader.finish()
        for target, source in zip(targets, sources, strict=True):
            assert np.array_equal(target.cpu().numpy(), source)


def test_a_mapped_file_that_may_not_be_written_is_read(device, tmp_path):
    path = tmp_path / "weights"
    np.arange(64, dtype=np.float32).tofile(path)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    target = torch.empty((8, 8), device=device)
    with Uploader(device, buffer_bytes=64, num_buffers=2) as uploader:
        uploader.copy(target, data)
        uploader.finish()
    assert target.flatten().tolist() == list(range(64))


def test_a_failed_read_is_raised_where_one_waits(device):
    with Uploader(device, buffer_bytes=64, num_buffers=1) as uploader:
        uploader.copy(torch.empty(8, dtype=torch.uint8, device=device), np.zeros(8, np.uint8))
        uploader._slots[0]._bytes = np.zeros(1, np.uint8)  # too small for what comes next
        uploader.copy(torch.empty(8, dtype=torch.uint8, device=device), np.zeros(8, np.uint8))
        with pytest.raises(ValueError, match="could not broadcast"):
            uploader.finish()
