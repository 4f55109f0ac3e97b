"""What processes of engine and router show of themselves: one port each, and no secret."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml

from tests.fakes.process import ServeProcess, serving
from tests.fakes.router_process import RouterProcess, routing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

pytestmark = pytest.mark.slow

ENGINE_KEY, TENANT_KEY, WRONG_KEY = "canary-engine-5a1f", "canary-tenant-77c2", "canary-wrong-0b9e"
TEXTS = ("canary-prompt-e41d", "canary-tool-90aa", "canary-stop-3c8b", "canary-schema-b7f0")
SECRETS = (ENGINE_KEY, TENANT_KEY, WRONG_KEY, *TEXTS)
PROMPT, TOOL, STOP, SCHEMA = TEXTS
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MESSAGES = [{"role": "user", "content": PROMPT}]
_TOOL = {"type": "function", "function": {"name": "f", "description": TOOL, "parameters": {}}}
_SCHEMA = {"type": "object", "properties": {SCHEMA: {"type": "integer"}}}
# Served, refused for a field, and refused as a whole: each with all of its texts.
BODIES = (
    (CHAT, {"messages": _MESSAGES, "max_tokens": 2, "tools": [_TOOL]}),
    (CHAT, {"messages": _MESSAGES, "max_tokens": 2, "stream": True, "stop": [STOP]}),
    (CHAT, {"messages": _MESSAGES, "temperature": -1}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "structured_outputs": {"json": _SCHEMA}}),
    (COMPLETIONS, {"prompt": PROMPT, "n": 10**9, "stop": STOP}),
)


@dataclass
class Platform:
    engine: ServeProcess
    router: RouterProcess


@contextmanager
def platform(folder: Path) -> Iterator[Platform]:
    """Both with keys in files; the router's pool has the engine's key."""
    keys, config = folder / "keys", folder / "router.yaml"
    keys.write_text(ENGINE_KEY + "\n")
    with serving("m", "--access-log", "all", "--api-key-file", str(keys)) as engine:
        settings = {
            "discovery": {"upstreams": [{"url": engine.url}], "engine_key": ENGINE_KEY},
            "flow": {"keys": [{"tenant": "t", "key": TENANT_KEY}]},
        }
        config.write_text(yaml.safe_dump(settings))
        with routing("--config", str(config)) as router:
            yield Platform(engine, router)


def ask_everything(client: httpx.Client, key: str) -> list[int]:
    statuses = []
    for shown in (key, WRONG_KEY):
        headers = {"authorization": f"Bearer {shown}"}
        for path, body in BODIES:
            answer = client.post(path, headers=headers, json={"model": "m", **body})
            statuses.append(answer.status_code)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    broken = client.post(CHAT, headers=headers, content=f'{{"messages": "{PROMPT}'.encode())
    return [*statuses, broken.status_code]


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def listeners(pid: int) -> set[tuple[object, ...]]:
    return {
        tuple(connection.laddr)
        for process in family(pid)
        for connection in process.net_connections(kind="inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }


def found_in(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def test_each_process_listens_at_its_own_port_of_the_loopback_interface_alone(tmp_path: Path):
    with platform(tmp_path) as parts:
        port = int(parts.engine.url.rpartition(":")[2])
        assert listeners(parts.engine.process.pid) == {("127.0.0.1", port)}
        assert listeners(parts.router.process.pid) == {("127.0.0.1", parts.router.port)}


def test_no_key_and_no_text_of_a_request_is_in_logs_metrics_or_arguments(tmp_path: Path):
    with platform(tmp_path) as parts:
        with parts.engine.client() as client:
            statuses = ask_everything(client, ENGINE_KEY)
            metrics = client.get("/metrics").text
        assert {200, 400, 401} <= set(statuses), statuses
        statuses = ask_everything(parts.router.client, TENANT_KEY)
        assert {200, 400, 401} <= set(statuses), statuses
        metrics += parts.router.client.get("/metrics").text
        processes = family(parts.engine.process.pid) + family(parts.router.process.pid)
        arguments = "".join(" ".join(process.cmdline()) for process in processes)
        for part in (parts.router, parts.engine):
            part.signal(signal.SIGTERM)  # what is still to be logged is, then
            assert part.wait() == 0
        logs = str(parts.engine.lines) + parts.router.log.read_text()
    assert "/v1/chat/completions" in logs
    assert "octavo" in metrics
    assert (found_in(logs), found_in(metrics), found_in(arguments)) == ([], [], [])
