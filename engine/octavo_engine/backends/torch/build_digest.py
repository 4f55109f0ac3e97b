"""What the bits of KV blocks depend on, on a device: the code that computes, and the device."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from octavo_engine.backends.torch.kernels import Kernels


def digest_build(device_name: str, kernels: Kernels) -> bytes:
    """Engines whose digests differ may round differently."""
    digest = hashlib.sha256(_code())
    settings = (device_name, torch.__version__, kernels.name, kernels.can_capture_prompts,
                kernels.walks)  # fmt: skip
    digest.update(repr(settings).encode())
    return digest.digest()


@cache
def _code() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
