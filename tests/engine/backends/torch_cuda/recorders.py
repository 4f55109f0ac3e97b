"""What stands in for a device: graphs on a host, and a watch on what the host waits for."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RunAgain:
    """Captures by keeping the work, replays by doing it again. What capturing did to the backend's
    words and recurrent states is undone: on a device nothing runs then."""

    def __init__(self, backend) -> None:
        self.num_replays = 0
        self._backend = backend

    def has_room(self) -> bool:
        return True

    def capture(self, work):
        states = self._backend._context.states
        changed = [self._backend._buffer._device, *(() if states is None else (states._data,))]
        before = [part.clone() for part in changed]
        result = [part.clone() for part in work()]
        for part, as_it_was in zip(changed, before, strict=True):
            part.copy_(as_it_was)

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
