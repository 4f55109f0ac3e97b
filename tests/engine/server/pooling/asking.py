"""Asks a server for what must succeed, and for what must be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.server import RunningServer


def ask(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    return server.answer(path, body)


def refusal(server: RunningServer, path: str, **body: Any) -> tuple[str, str]:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["code"]
