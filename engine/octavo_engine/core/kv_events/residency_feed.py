"""The API server's end of residency: passes changes on from the core, and labels to the core."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

from octavo_engine.core.process import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.state.labels import Labels
    from octavo_engine.state.outputs import StepOutput


class StepListener(Protocol):
    """Called on the event loop's thread. Implementations never block and never raise."""

    def on_step(self, step: StepOutput) -> None:
        """A step was done, or a command was carried out."""

    def on_lost(self) -> None:
        """The core is gone, and its cache with it; `epoch` is a new one."""


class ResidencyFeed:
    """One core at a time; `epoch` names the one at hand and changes when its cache is lost."""

    def __init__(self, send: Callable[[wire.ToEngine], None]) -> None:
        self.epoch = _new_epoch()
        self.is_watched = False  # a router follows this engine
        self._send = send
        self._listener: StepListener | None = None

    def listen(self, listener: StepListener) -> None:
        """From now on it is called after every step. There is one at most."""
        self._listener = listener

    def watch(self, *, on: bool) -> None:
        """Have the core report residency, with a snapshot first; or stop."""
        self.is_watched = on
        self._send(wire.WatchResidency(on))

    def label(self, sequence_id: str, labels: Labels) -> None:
        """Name prefixes that end in the answer of a sequence that has ended."""
        self._send(wire.Label(sequence_id, labels))

    def on_step(self, step: StepOutput) -> None:
        if self._listener is not None:
            self._listener.on_step(step)

    def on_lost(self) -> None:
        self.epoch = _new_epoch()
        self.is_watched = False
        if self._listener is not None:
            self._listener.on_lost()


def _new_epoch() -> str:
    return secrets.token_hex(8)
