"""A rank above 0 whose device is pretended, as `octavo_engine.executor.worker` otherwise."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined

import pytest
import torch

from octavo_engine.executor import worker
from tests.engine.backends.torch_cuda import pretend
from tests.engine.backends.torch_cuda.conftest import quicken
from tests.engine.backends.torch_cuda.ranks_on_device import install_gathers


def main() -> int:
    quicken()
    torch.set_num_threads(1)
    monkeypatch = pytest.MonkeyPatch()
    pretend.install(monkeypatch)
    install_gathers(monkeypatch)
    with pretend.Pretending():
        return worker.main()


if __name__ == "__main__":
    sys.exit(main())
