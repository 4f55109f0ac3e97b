"""The engine core's main loop: takes commands, steps while there is work, blocks otherwise."""

from __future__ import annotations

import logging
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from octavo_common import failpoints
from octavo_engine.core.core_engine import ServesBlocks
from octavo_engine.core.process import wire
from octavo_engine.core.refusals import refusal_of
from octavo_engine.errors import EngineDead, OctavoError, WorkerLost
from octavo_engine.executor.executor import WatchesWorkers
from octavo_engine.profile import StepProfile
from octavo_engine.state.outputs import ProfileWritten

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo_engine.core.core_engine import CoreEngine
    from octavo_engine.state.pooling import PoolingRequest
    from octavo_engine.state.request import EngineRequest

logger = logging.getLogger(__name__)

# SimpleQueue, because its put is safe in a signal handler and its get blocks without polling.
Command: TypeAlias = "wire.ToCore | WorkerLost | Wake"
Inbox: TypeAlias = SimpleQueue[Command]


class Wake:
    """Something came for the engine from a thread of its own."""


class CoreLoop:
    """Runs in the thread that calls `run`, until Shutdown; all the engine's state belongs to it."""

    def __init__(
        self, engine: CoreEngine, inbox: Inbox, emit: Callable[[wire.FromCore], None]
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._emit = emit
        self._closing = False  # no new requests; ends when the last one is done
        self._stopped = False
        self._written: ProfileWritten | None = None  # not sent yet

    def run(self) -> None:
        engine = self._engine
        if isinstance(engine, WatchesWorkers):
            engine.watch_workers(self._inbox.put)
        if isinstance(engine, ServesBlocks):
            engine.wake_with(lambda: self._inbox.put(Wake()))
            engine.serve_blocks()  # what others wanted before they could wake it
        idled = False  # work is there, but nothing could be done: never spin on that
        while True:
            messages = self._take(wait=not engine.has_work, pause_s=0.005 if idled else 0.0)
            engine.heartbeat.begin()
            if failpoints.IS_ON and any(isinstance(one, wire.AddRequests) for one in messages):
                failpoints.hit("core.commands")
            for message in messages:
                self._handle(message)
            if self._stopped or (self._closing and not engine.has_work):
                return
            step = engine.step() if engine.has_work else engine.report([])
            engine.heartbeat.end()
            refused = engine.take_refused()
            for request_id, error in refused:
                self._emit(wire.refusal(request_id, error))
            idled = engine.last_step_was_empty and not step.outputs and not step.adapters
            if step.outputs or step.pooled or messages or refused or not idled:
                step.profile, self._written = self._written, None
                if failpoints.IS_ON and step.outputs:
                    failpoints.hit("core.outputs")
                self._emit(wire.Outputs(step))
                if failpoints.IS_ON and step.outputs:
                    failpoints.hit("core.sent")
                if engine.profile is not None:
                    engine.profile.sent()

    def _take(self, *, wait: bool, pause_s: float) -> list[Command]:
        """All commands that are there; at least one with `wait`."""
        messages: list[Command] = []
        try:
            if wait and not self._closing:
                messages.append(self._inbox.get())
            elif pause_s:
                messages.append(self._inbox.get(timeout=pause_s))
            while True:
                messages.append(self._inbox.get_nowait())
        except Empty:
            return messages

    def _handle(self, message: Command) -> None:
        match message:
            case WorkerLost():
                raise message
            case Wake():
                if isinstance(self._engine, ServesBlocks):
                    self._engine.serve_blocks()
            case wire.AddRequests(requests, prompt, media_items):
                for request in requests:
                    if prompt and not request.prompt_token_ids:
                        request = msgspec.structs.replace(
                            request, prompt_token_ids=prompt, media_items=media_items
                        )
                    self._add(request)
            case wire.AddPooling(texts):
                self._add_pooling(texts)
            case wire.Abort(request_ids, has_left):
                for request_id in request_ids:
                    self._engine.abort(request_id, has_left=has_left)
            case wire.Suspend(request_ids, on):
                for request_id in request_ids:
                    self._engine.suspend(request_id, on=on)
            case wire.ResetPrefixCache():
                self._engine.reset_prefix_cache()
            case wire.SleepCommand(on, level):
                self._engine.sleep(on=on, level=level)
            case wire.Label(request_id, labels):
                self._engine.label(request_id, labels)
            case wire.WatchResidency(on):
                self._engine.watch(on=on)
            case wire.ProfileCommand(on, path):
                self._profile(path, on=on)
            case wire.LoadAdapter(load_id, path, is_pinned):
                load = partial(self._engine.load_adapter, load_id, path, is_pinned=is_pinned)
                self._take_in([load_id], load)
            case wire.UnloadAdapter(digest):
                self._engine.unload_adapter(digest)
            case wire.Shutdown(graceful):
                self._closing = True
                self._stopped = not graceful
            case _:
                logger.warning("Dropped an unexpected message", extra={"kind": type(message)})

    def _profile(self, path: str, *, on: bool) -> None:
        engine, profile = self._engine, self._engine.profile
        if on:
            engine.record(StepProfile())
            return
        engine.record(None)
        if profile is None:
            self._written = ProfileWritten(path, error="no steps were being recorded")
            return
        try:
            self._written = ProfileWritten(path, profile.write(path))
        except OctavoError as error:
            self._written = ProfileWritten(path, error=str(error))

    def _add(self, request: EngineRequest) -> None:
        self._take_in([request.request_id], lambda: self._engine.add(request))

    def _add_pooling(self, requests: list[PoolingRequest]) -> None:
        ids = [request.request_id for request in requests]
        self._take_in(ids, lambda: self._engine.add_pooling(requests))

    def _take_in(self, request_ids: list[str], add: Callable[[], None]) -> None:
        """What goes wrong with one request ends that request only."""
        try:
            if self._closing:
                raise EngineDead("the engine is shutting down", retry_after_s=1)
            add()
        except Exception as error:
            refusal = refusal_of(error, request_ids[0] if request_ids else "")
            for request_id in request_ids:
                self._emit(wire.refusal(request_id, refusal))
