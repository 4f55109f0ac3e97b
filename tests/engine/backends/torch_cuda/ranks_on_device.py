"""Ranks on a device that is pretended: gloo gathers through the host, and a graph can hold it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from octavo_engine.backends.torch.rank_group import RankGroup

if TYPE_CHECKING:
    from torch import Tensor


def install_gathers(monkeypatch: Any) -> None:
    """As NCCL's, which can be captured: a replay gathers again."""
    monkeypatch.setattr(RankGroup, "can_capture", True)
    monkeypatch.setattr(RankGroup, "_exchange", _exchange)


def _exchange(group: RankGroup, own: Tensor) -> Tensor:
    own = own.contiguous()
    parts = own.new_empty((group.shard.size * len(own), own.shape[1]))
    return _show(parts, own, group=group).view(group.shard.size, *own.shape)


def _show(parts: Tensor, own: Tensor, *, group: RankGroup) -> Tensor:
    if has_torch_function((parts, own)):
        found: Tensor = handle_torch_function(_show, (parts, own), parts, own, group=group)
        return found
    if own.numel():
        group._run(parts.view(torch.uint8), own.view(torch.uint8))
    return parts
