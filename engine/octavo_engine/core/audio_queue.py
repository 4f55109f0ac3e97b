"""Requests that wait for their audio to be encoded, and the windows that are encoded.

A window stays in its slot while a request uses it, and after that until the slot is needed: a
request with the same window, such as a second try at another temperature, costs no encoder. The
scheduler sees a request once its window is there; the names of its KV blocks cover the window.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from octavo_engine.core.pooling.async_pooling import WrongTask
from octavo_engine.errors import InvalidRequest, QueueFull
from octavo_engine.state.outputs import SequenceOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from octavo_engine.backends.backend import EncodesAudio
    from octavo_engine.state.request import EngineRequest

MAX_PARTS = 64
FIRST_ENCODE_S = 10.0  # taken for the first one, as nothing is known


class _Encoding(NamedTuple):
    """A window on its way into a slot."""

    digest: bytes
    slot: int
    features: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    part: int
    num_parts: int


class AudioQueue:
    """Between a request's arrival and its place in line. The engine's thread owns it.

    While others decode the encoder runs in parts, one for each of their steps, each of about
    `part_s`.
    """

    def __init__(
        self,
        backend: EncodesAudio,
        num_slots: int,
        *,
        max_waiting: int = 1 << 30,
        part_s: float = 0.05,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        shape = backend.feature_shape
        assert shape is not None, "the model reads audio"
        self.shape = shape
        self.num_encoded = 0
        self.num_hits = 0
        self.encode_seconds = 0.0
        self._backend = backend
        self._max_waiting = max_waiting
        self._part_s = part_s
        self._now = now
        self._waiting: dict[str, EngineRequest] = {}  # in the order they came
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # of windows that are there, by use
        self._users: dict[bytes, set[str]] = {}
        self._digests: dict[str, bytes] = {}  # of requests that use a window
        self._free = list(range(num_slots))
        self._encoding: _Encoding | None = None
        self._encode_s = FIRST_ENCODE_S  # of the last window
        self._spent_s = 0.0  # on the one under way

    def __len__(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    def submit(self, request: EngineRequest) -> EngineRequest | None:
        """The request with its slot if its window is there; otherwise it waits here."""
        audio = request.audio
        if audio is None:
            raise WrongTask(
                "this model transcribes audio and generates nothing else; use "
                "/v1/audio/transcriptions or /v1/audio/translations",
                param="model",
            )
        rows, columns = self.shape
        if len(audio.features) != 4 * rows * columns:
            raise InvalidRequest(
                f"the audio has {len(audio.features)} bytes of features; this model takes "
                f"{rows} rows of {columns} numbers of 4 bytes",
                param="file",
            )
        if request.request_id in self._waiting or request.request_id in self._digests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if audio.digest in self._slots:
            self.num_hits += 1
            return self._placed(request)
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(
                f"{len(self._waiting)} requests wait for their audio to be encoded, the most "
                "allowed (--max-queue)",
                retry_after_s=min(max(math.ceil(len(self._waiting) * self._encode_s), 1), 60),
            )
        self._waiting[request.request_id] = request
        return None

    def forget_counts(self) -> None:
        """What a warm-up did is not counted."""
        self.num_encoded, self.num_hits, self.encode_seconds = 0, 0, 0.0

    def forget_windows(self) -> None:
        """Their memory is given back. Only while no request is there."""
        self._free += self._slots.values()
        self._slots.clear()
        self._users.clear()
        self._digests.clear()
        if self._encoding is not None:
            self._free.append(self._encoding.slot)
            self._encoding = None

    def expected_s(self) -> float:
        """How long the next `advance` may take."""
        return self._encode_s

    def advance(self, *, is_busy: bool) -> list[EngineRequest]:
        """Encode some more: a part while others decode, else a whole window. The requests whose
        window is there now."""
        if self._encoding is None:
            self._begin(is_busy=is_busy)
        while self._encoding is not None:
            encoding = self._encoding
            began_at = self._now()
            try:
                self._backend.encode_audio(
                    encoding.slot, encoding.features, encoding.part, encoding.num_parts
                )
            except BaseException:
                self._encoding = None
                self._free.append(encoding.slot)
                raise
            self._spent_s += self._now() - began_at
            if encoding.part + 1 == encoding.num_parts:
                self._settle(encoding)
            else:
                self._encoding = encoding._replace(part=encoding.part + 1)
            if is_busy:
                break
        ready = [r for r in self._waiting.values() if r.audio and r.audio.digest in self._slots]
        for request in ready:
            del self._waiting[request.request_id]
        return [self._placed(request) for request in ready]

    def take_late(self) -> list[SequenceOutput]:
        """End those whose deadline has passed."""
        now = self._now()
        late = [
            request_id
            for request_id, request in self._waiting.items()
            if request.deadline_at is not None and request.deadline_at <= now
        ]
        for request_id in late:
            del self._waiting[request_id]
        return [SequenceOutput(request_id=each, finish_reason="deadline") for each in late]

    def abort(self, request_id: str) -> SequenceOutput | None:
        """Forget one that waits; a window under way is encoded all the same."""
        if self._waiting.pop(request_id, None) is None:
            return None
        return SequenceOutput(request_id=request_id, finish_reason="abort")

    def take_all(self) -> list[str]:
        """Forget all that wait."""
        ids = list(self._waiting)
        self._waiting.clear()
        return ids

    def release(self, request_ids: Iterable[str]) -> None:
        """These have ended: their windows may go."""
        for request_id in request_ids:
            digest = self._digests.pop(request_id, None)
            if digest is not None:
                self._users[digest].discard(request_id)

    def _begin(self, *, is_busy: bool) -> None:
        request = next(iter(self._waiting.values()), None)
        if request is None:
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return  # all are in use
        assert request.audio is not None
        features = np.frombuffer(request.audio.features, np.float32).reshape(self.shape)
        num_parts = 1
        if is_busy:
            num_parts = min(MAX_PARTS, max(1, math.ceil(self._encode_s / self._part_s)))
        self._spent_s = 0.0
        self._encoding = _Encoding(request.audio.digest, slot, features, 0, num_parts)

    def _evict(self) -> int | None:
        """The slot of the window that no request used for longest."""
        for digest in self._slots:
            if not self._users.get(digest):
                self._users.pop(digest, None)
                return self._slots.pop(digest)
        return None

    def _settle(self, encoding: _Encoding) -> None:
        self._slots[encoding.digest] = encoding.slot
        self._encoding = None
        self._encode_s = self._spent_s
        self.num_encoded += 1
        self.encode_seconds += self._spent_s

    def _placed(self, request: EngineRequest) -> EngineRequest:
        audio = request.audio
        assert audio is not None
        self._slots.move_to_end(audio.digest)
        self._users.setdefault(audio.digest, set()).add(request.request_id)
        self._digests[request.request_id] = audio.digest
        placed = msgspec.structs.replace(audio, features=b"", slot=self._slots[audio.digest])
        return msgspec.structs.replace(request, audio=placed)
