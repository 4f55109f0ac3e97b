"""Asks engines to load and unload adapters, over vLLM's endpoints, and reports what they said."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

from octavo_router.proxy.prefill_decode.engine_call import EngineCall, EngineReply

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from octavo_router.adapters.fleet import AdapterFleet
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.proxy.upstreams import Upstreams

_LOAD_PATH: Final = "/v1/load_lora_adapter"
_UNLOAD_PATH: Final = "/v1/unload_lora_adapter"
_LOAD_S: Final = 300.0  # an engine may fetch it first
_UNLOAD_S: Final = 10.0
_LOADED: Final = "already"  # vLLM's refusal of a second load: "has already been loaded"


class EngineAdapterCalls:
    """An `adapters.fleet.AdapterCalls`. Set `fleet` before the first call."""

    fleet: AdapterFleet

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self, endpoint: Endpoint, name: str, uri: str, *, in_place: bool) -> None:
        self._start(self._load(endpoint, name, uri, in_place=in_place))

    def unload(self, endpoint: Endpoint, name: str, then: Callable[[], None]) -> None:
        self._start(self._unload(endpoint, name, then))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, endpoint: Endpoint, name: str, uri: str, *, in_place: bool) -> None:
        question: dict[str, object] = {"lora_name": name, "lora_path": uri}
        if in_place:
            question["load_inplace"] = True
        reply = await self._ask(endpoint, _LOAD_PATH, question, _LOAD_S)
        reason = _reason(reply)
        if reply.status == 200 or (reply.status == 400 and _LOADED in reason):
            self.fleet.loaded(endpoint, name)
        else:
            self.fleet.failed(endpoint, name, reason)

    async def _unload(self, endpoint: Endpoint, name: str, then: Callable[[], None]) -> None:
        await self._ask(endpoint, _UNLOAD_PATH, {"lora_name": name}, _UNLOAD_S)
        self.fleet.unloaded(endpoint, name)
        then()

    async def _ask(
        self, endpoint: Endpoint, path: str, question: Mapping[str, object], timeout_s: float
    ) -> EngineReply:
        """What it said; status 0 where that was nothing in time."""
        upstream = self._upstreams.of(endpoint)
        body = json.dumps(question).encode()
        reply: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        head = (
            b"POST ", upstream.lines.prefix, path.encode(), upstream.lines.host,
            upstream.lines.extra, b"content-type: application/json\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        )  # fmt: skip
        call = EngineCall(b"".join((*head, body)), reply.set_result)
        try:
            call.start(upstream)
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            return EngineReply(0, problem=f"no answer within {timeout_s:g} s")
        finally:
            call.cancel()


def _reason(reply: EngineReply) -> str:
    """In the engine's words, where it has any."""
    if not reply.status:
        return reply.problem or "the engine did not answer"
    try:
        body = json.loads(reply.body)
        error = body.get("error", body)
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = ""
    return message if isinstance(message, str) and message else f"status {reply.status}"
