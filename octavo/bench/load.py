"""Load on a server as clients make it, closed or open loop, and what they see of it.

ttft  from the request handed to the socket to the first event with a choice
tpot  (last event - first event) / (tokens - 1), one figure a request
itl   the gaps between events with a choice, all requests together
e2e   from the request to its last event
Times are taken when bytes arrive, before they are parsed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench.report import summary
from octavo.http_client import DONE, HttpConnection, ServerError, ServerReply, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from octavo.http_client import ServerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to send, and how fast."""

    address: ServerAddress
    model: str
    prompts: Sequence[list[int]]
    output_len: int
    max_concurrency: int
    request_rate: float = float("inf")  # per second, Poisson; infinite: as fast as answers come
    seed: int = 0
    timeout_s: float = 600.0
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # merged into every body
    extras: Sequence[Mapping[str, Any]] = ()  # one for each prompt, merged into its body; or none


@dataclass(slots=True)
class LoadResult:
    """One request as its client saw it."""

    sent_at: float = 0.0
    times: list[float] = field(default_factory=list)  # of events with a choice
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""


async def run(plan: LoadPlan) -> tuple[list[LoadResult], float]:
    """All results, and the seconds it took. Errors are results, not exceptions."""
    results = [LoadResult() for _ in plan.prompts]
    idle: list[HttpConnection] = []
    gate = asyncio.Semaphore(plan.max_concurrency)
    began_at = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        extras = plan.extras or [{}] * len(plan.prompts)
        for result, prompt, extra, due_at in zip(
            results, plan.prompts, extras, _due(plan), strict=True
        ):
            wait_s = began_at + due_at - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await gate.acquire()
            tasks.create_task(_one(plan, prompt, extra, result, idle, gate))
    elapsed_s = time.perf_counter() - began_at
    for connection in idle:
        connection.close()
    return results, elapsed_s


def figures(plan: LoadPlan, results: Sequence[LoadResult], elapsed_s: float) -> dict[str, Any]:
    """The sums and percentiles, under vLLM's names where it has them."""
    good = [result for result in results if not result.error]
    kinds: dict[str, int] = {}
    for result in results:
        if result.error:
            kinds[result.error] = kinds.get(result.error, 0) + 1
    output_tokens = sum(result.output_tokens for result in good)
    prompt_tokens = sum(result.prompt_tokens for result in good)
    spans = [
        (r.times[-1] - r.times[0]) / (r.output_tokens - 1) for r in good if r.output_tokens > 1
    ]
    gaps = [b - a for r in good for a, b in zip(r.times, r.times[1:], strict=False)]
    return {
        "model": plan.model,
        "num_prompts": len(results),
        "max_concurrency": plan.max_concurrency,
        "request_rate": None if plan.request_rate == float("inf") else plan.request_rate,
        "completed": len(good),
        "failed": len(results) - len(good),
        "errors": kinds,
        "wrong_length": sum(result.output_tokens != plan.output_len for result in good),
        "duration_s": elapsed_s,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / elapsed_s,
        "output_throughput": output_tokens / elapsed_s,
        "total_token_throughput": (prompt_tokens + output_tokens) / elapsed_s,
        **summary("ttft", [result.times[0] - result.sent_at for result in good]),
        **summary("tpot", spans),
        **summary("itl", gaps),
        **summary("e2el", [result.times[-1] - result.sent_at for result in good]),
    }


def _due(plan: LoadPlan) -> Iterator[float]:
    """Seconds after the start at which each request is due."""
    rng = random.Random(f"{plan.seed}/arrivals")
    at = 0.0
    for _ in plan.prompts:
        yield at
        if plan.request_rate != float("inf"):
            at += rng.expovariate(plan.request_rate)


async def _one(
    plan: LoadPlan,
    prompt: list[int],
    extra: Mapping[str, Any],
    result: LoadResult,
    idle: list[HttpConnection],
    gate: asyncio.Semaphore,
) -> None:
    body = {
        "model": plan.model,
        "prompt": prompt,
        "max_tokens": plan.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **plan.extra,
        **extra,
    }
    payload = json.dumps(body).encode()

    def on_event(data: bytes, at: float) -> None:
        if data == DONE:
            return
        event = json.loads(data)
        if event.get("error"):
            result.error = f"stream: {event['error'].get('code')}"
        if usage := event.get("usage"):
            result.output_tokens = usage["completion_tokens"]
            result.prompt_tokens = usage["prompt_tokens"]
        if event.get("choices"):
            result.times.append(at)

    try:
        async with asyncio.timeout(plan.timeout_s):
            reply, connection = await _send(plan, payload, on_event, idle)
            result.sent_at = reply.sent_at
            if reply.status != 200:
                result.error = f"http {reply.status}"
            elif not result.times:
                result.error = result.error or "no token"
            if connection.is_open:
                idle.append(connection)
    except TimeoutError:
        result.error = "timeout"
    except ServerError as error:
        result.error = str(error)
    finally:
        gate.release()


async def _send(
    plan: LoadPlan,
    payload: bytes,
    on_event: Callable[[bytes, float], None],
    idle: list[HttpConnection],
) -> tuple[ServerReply, HttpConnection]:
    """By a kept connection; by a new one if there is none, or the server has just given it up."""
    while True:
        while idle and not idle[-1].is_open:
            idle.pop()
        is_kept = bool(idle)
        connection = idle.pop() if is_kept else await HttpConnection.connect(plan.address)
        try:
            reply = await connection.request(
                "POST", "/v1/completions", payload, headers=plan.headers, on_event=on_event
            )
        except Unanswered:
            if not is_kept:
                raise
        else:
            return reply, connection
