"""The way back of a step's results: one copy to pinned memory, and a mark behind it to wait for.

Nothing here holds up who launches. Results are words of four bytes, side by side in one matrix with
a row for each row of logits, however many kinds of them a step has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from octavo_engine.sampling.batch import Sampled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class StreamMark(Protocol):
    """A place in the device's work: all that was launched before."""

    def wait(self) -> None:
        """Until the device has come that far."""


class CudaMark:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class HostMark:
    """Of a device that has done everything when a call returns."""

    def wait(self) -> None:
        pass


def marks_of(device: torch.device) -> Callable[[], StreamMark]:
    """What makes them."""
    return CudaMark if device.type == "cuda" else HostMark


class Landing:
    """Of one device."""

    def __init__(self, device: torch.device, make_mark: Callable[[], StreamMark]) -> None:
        self._is_pinned = device.type == "cuda"
        self._make_mark = make_mark

    def begin(self, found: Tensor, scores: LandedScores | None = None) -> Landed:
        """`found` [2, S]: tokens and statuses; with `scores` log-probabilities come along."""
        words = found.t() if scores is None else torch.cat([found.t(), *scores.words()], dim=1)
        # From the allocator of pinned memory, which hands it out again once the copy is done.
        host = torch.empty(words.shape, dtype=torch.int32, pin_memory=self._is_pinned)
        host.copy_(words, non_blocking=True)
        return Landed(host, self._make_mark(), 0 if scores is None else scores.num_top)


class LandedScores:
    """Log-probabilities of a step's tokens, on the device."""

    def __init__(
        self, logprobs: Tensor, ranks: Tensor, top_ids: Tensor, top_logprobs: Tensor
    ) -> None:
        """[S], [S], [S, K], [S, K]; logprobs are float32."""
        self.num_top = top_ids.shape[1]
        self._columns = (logprobs[:, None], ranks[:, None], top_ids, top_logprobs)

    def words(self) -> list[Tensor]:
        return [
            column.contiguous().view(torch.int32) if column.is_floating_point() else column.int()
            for column in self._columns
        ]


class Landed:
    """Results that are on their way, or there."""

    def __init__(self, host: Tensor, mark: StreamMark, num_top: int) -> None:
        self._host = host
        self._mark = mark
        self._num_top = num_top

    def wait(self) -> Sampled:
        self._mark.wait()
        words = self._host.numpy()
        # Copies: the pinned memory goes back.
        sampled = Sampled(words[:, 0].copy(), words[:, 1].astype(np.uint8))
        if words.shape[1] > 2:
            top = self._num_top
            sampled.logprobs = words[:, 2].copy().view(np.float32)
            sampled.ranks = words[:, 3].copy()
            sampled.top_ids = words[:, 4 : 4 + top].copy()
            sampled.top_logprobs = words[:, 4 + top :].copy().view(np.float32)
        return sampled
