"""What stands in for a device: graphs on a host, and a watch on what the host waits for."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RunAgain:
    """Captures by keeping the work, replays by doing it again. What capturing did to the backend's
    words is undone: on a device nothing runs then."""

    def __init__(self, backend) -> None:
        self.num_replays = 0
        self._backend = backend

    def has_room(self) -> bool:
        return True

    def capture(self, work):
        words = self._backend._buffer._device
        before = words.clone()
        result = [part.clone() for part in work()]
        words.copy_(before)

        def replay() -> None:
            self.num_replays += 1
            for part, again in zip(result, work(), strict=True):
                part.copy_(again)

        return tuple(result), replay


class NothingWaits(TorchDispatchMode):
    """Fails at an operation for which a device's host would have to wait."""

    WAITING = frozenset(
        ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero")
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.WAITING, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool]
            assert not masks, f"{name} by a mask waits for the device"
        return function(*args, **(kwargs or {}))
