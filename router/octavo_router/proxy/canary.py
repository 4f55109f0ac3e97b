"""Test generations: a few greedy tokens for a fixed prompt, sent to an engine under suspicion."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

from octavo_router.proxy.failures import NOT_ACCEPTED
from octavo_router.proxy.prefill_decode.engine_call import EngineCall, EngineReply

if TYPE_CHECKING:
    from octavo_router.config.settings import RouterConfig
    from octavo_router.endpoints.endpoint import Endpoint
    from octavo_router.proxy.upstreams import Upstreams
    from octavo_router.routing.dispatcher import Dispatcher

_MAX_TOKENS: Final = 4
_TIMEOUT_S: Final = 10.0


class Canaries:
    """Runs them, and reports the result to the dispatcher."""

    def __init__(self, dispatcher: Dispatcher, upstreams: Upstreams, config: RouterConfig) -> None:
        self.config = config  # may be replaced at any time
        self._dispatcher = dispatcher
        self._upstreams = upstreams
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, endpoint: Endpoint) -> None:
        task = asyncio.get_running_loop().create_task(self._run(endpoint))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, endpoint: Endpoint) -> None:
        reply = await self._ask(endpoint)
        self._dispatcher.canary_finished(
            endpoint,
            _text_of(reply.body) if reply.status == 200 else None,
            is_refused=reply.status in NOT_ACCEPTED,
        )

    async def _ask(self, endpoint: Endpoint) -> EngineReply:
        """What it said; status 0 where that was nothing in time."""
        upstream = self._upstreams.of(endpoint)
        body = {
            "prompt": self.config.health.canary_prompt,
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
        }
        if endpoint.names:
            body["model"] = endpoint.names[0]
        question = json.dumps(body).encode()
        reply: asyncio.Future[EngineReply] = asyncio.get_running_loop().create_future()
        call = EngineCall(
            b"".join(
                (
                    b"POST ",
                    upstream.lines.prefix,
                    b"/v1/completions",
                    upstream.lines.host,
                    upstream.lines.extra,
                    b"content-type: application/json\r\n",
                    b"content-length: %d\r\n\r\n" % len(question),
                    question,
                )
            ),
            reply.set_result,
        )
        call.start(upstream)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await reply
        except TimeoutError:
            return EngineReply(0)
        finally:
            call.cancel()


def _text_of(data: bytes) -> str | None:
    try:
        text = json.loads(data)["choices"][0]["text"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) and text else None
