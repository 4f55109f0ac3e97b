"""The program that `helm test` runs, asked to look at servers that behave and that do not."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.chart import CHART
from tests.fakes.http_handler import QuietHandler, handled

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = CHART / "files" / "ask_router.py"


@contextmanager
def router(*, key: str = "", unready: int = 0) -> Iterator[str]:
    """Its URL. It is ready only after being asked `unready` times."""
    requested: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            body: dict[str, Any]
            if self.path == "/ready":
                status, body = (503 if len(requested) <= unready else 200), {}
            elif key and self.headers["Authorization"] != f"Bearer {key}":
                status, body = 401, {"error": {"code": "invalid_api_key"}}
            else:
                status, body = 200, {"data": [{"id": "smollm2"}, {"id": "qwen3"}]}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with handled(Handler) as url:
        yield url


def ask(url: str, **more: str) -> tuple[int, str]:
    """As in the pod: no shell, the text of the program as an argument."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", SCRIPT.read_text()],
        env={"ROUTER_URL": url, **more}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.slow
def test_it_says_which_models_there_are():
    with router(unready=1) as url:
        assert ask(url) == (0, f"{url} is ready and serves: smollm2, qwen3\n")


def test_it_shows_its_key_and_ends_at_once_where_that_is_wrong():
    with router(key="secret") as url:
        assert ask(url, ROUTER_KEY="secret")[0] == 0
        code, said = ask(url)
    assert code == 1
    assert "answered 401" in said and "test.apiKeySecret" in said
