"""The API server's end of the engine core, wherever that runs: commands out, outputs in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo_engine.core.info import CoreHealth
from octavo_engine.core.load_meter import LoadMeter
from octavo_engine.core.process import wire
from octavo_engine.protocol.loading import LOADING

if TYPE_CHECKING:
    from octavo_engine.core.info import ModelInfo
    from octavo_engine.errors import OctavoError, RequestError
    from octavo_engine.state.outputs import StepOutput


class Listener(Protocol):
    """Hears of everything on the event loop's thread."""

    def on_step(self, step: StepOutput) -> None:
        """A step was done."""

    def on_refused(self, sequence_id: str, error: RequestError) -> None:
        """The core did not take this sequence."""

    def on_lost(self, error: RequestError) -> None:
        """The core is gone; so is all that was in flight."""


class EngineClient(Protocol):
    """One engine core. It begins to load when the client is made; `ready` waits for that."""

    async def ready(self) -> ModelInfo:
        """Once requests are taken. Raises the ConfigError or ModelError that ended the start."""

    def send(self, message: wire.ToEngine) -> None:
        """To a core that is not there, nothing: its requests were reported lost already."""

    def health(self) -> CoreHealth: ...

    async def stop(self) -> None:
        """End the core; what is in flight is not reported any more."""


class CoreListener:
    """What one core has said of itself; passes the rest on to the listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.info: ModelInfo | None = None
        self.meter = LoadMeter(LOADING)
        self.fatal: OctavoError | None = None

    def loading(self) -> CoreHealth:
        """While there is no info yet."""
        progress = self.meter.read()
        share = (progress.share if progress else None) or 0.0
        return CoreHealth("loading", "the model is being loaded", share, progress)

    def receive(self, message: wire.FromCore) -> None:
        match message:
            case wire.Outputs(step):
                self._listener.on_step(step)
            case wire.RequestRefused():
                self._listener.on_refused(message.request_id, wire.error_of(message))
            case wire.CoreProgress(done, total):
                self.meter.note(done, total)
            case wire.Ready(info):
                self.info = info
            case wire.Fatal():
                self.fatal = wire.startup_error_of(message)
            case wire.Pong():
                pass  # of interest to a supervisor only
