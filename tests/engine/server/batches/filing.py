"""A server that keeps files, and what its tests ask of it again and again."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo_engine.server.settings import ServerSettings
from tests.fakes.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.fakes.engine import FakeEngine
    from tests.fakes.server import RunningServer

URL = "/v1/completions"


@contextmanager
def filing(
    folder: Path, engine: FakeEngine | None = None, **settings: Any
) -> Iterator[tuple[RunningServer, httpx.Client]]:
    kept = ServerSettings(files_dir=str(folder), **settings)
    with running(engine, kept) as server, server.client() as client:
        yield server, client


def question(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url,
            "body": {"prompt": "a", "max_tokens": 4, "temperature": 0} | body}  # fmt: skip


def lines(*questions: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in questions)


def upload(client: httpx.Client, content: bytes, **more: Any) -> httpx.Response:
    data = {"purpose": "batch"} | more.pop("data", {})
    return client.post("/v1/files", files={"file": ("in.jsonl", content)}, data=data, **more)


def begin(client: httpx.Client, content: bytes, endpoint: str = URL, **more: Any) -> dict[str, Any]:
    file = upload(client, content).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"} | more
    batch: dict[str, Any] = client.post("/v1/batches", json=body).raise_for_status().json()
    return batch


def over(server: RunningServer, client: httpx.Client, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch once it is over."""
    batches = server.service.batches
    assert batches is not None
    task = batches._tasks.get(batch["id"])
    if task is not None:

        async def wait() -> None:
            await asyncio.wait([task])

        asyncio.run_coroutine_threadsafe(wait(), server.loop).result(20)
    reported: dict[str, Any] = client.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    return reported


def content(client: httpx.Client, file_id: str) -> list[dict[str, Any]]:
    answer = client.get(f"/v1/files/{file_id}/content").raise_for_status()
    return [json.loads(line) for line in answer.text.splitlines()]
