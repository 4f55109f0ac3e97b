"""A batch's files behind URLs: fetched, sent, and never lost."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from octavo.batch.remote import local_input, local_output
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Store(BaseHTTPRequestHandler):
    files: dict[str, bytes]

    def do_GET(self) -> None:
        content = self.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.end_headers()
        self.wfile.write(content or b"")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        is_allowed = "sig=right" in self.path
        if is_allowed:
            self.files[self.path] = content
        self.send_response(200 if is_allowed else 403)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def store(**given: bytes) -> Iterator[tuple[str, dict[str, bytes]]]:
    class Handler(Store):
        files = {f"/{name}": content for name, content in given.items()}  # noqa: RUF012

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", Handler.files
        finally:
            server.shutdown()
            thread.join()


def test_what_is_at_a_url_is_a_file_for_a_while():
    with store(questions=b"a\nb\n") as (url, _), local_input(f"{url}/questions") as path:
        assert Path(path).read_bytes() == b"a\nb\n"
    assert not Path(path).exists()


def test_answers_are_sent_once_all_are_there():
    with store() as (url, files):
        with local_output(f"{url}/answers?sig=right") as path:
            Path(path).write_bytes(b"x\n" * 100_000)
            assert files == {}
        assert files == {"/answers?sig=right": b"x\n" * 100_000}
    assert not Path(path).exists()


def test_other_paths_stay_as_they_are():
    with local_input("-") as source, local_output("/some/file") as target:
        assert (source, target) == ("-", "/some/file")


def test_what_is_not_there_is_said_without_the_right_to_it():
    with (
        store() as (url, _),
        pytest.raises(ConfigError, match="404 Not Found") as raised,
        local_input(f"{url}/none?sig=secret"),
    ):
        pass
    assert "secret" not in str(raised.value)


def test_answers_that_could_not_be_sent_stay():
    with store() as (url, files), pytest.raises(ConfigError, match="403") as raised:
        with local_output(f"{url}/answers?sig=wrong") as path:
            Path(path).write_bytes(b"x\n")
        assert files == {}
    assert path in str(raised.value) and Path(path).read_bytes() == b"x\n"
    Path(path).unlink()


def test_a_run_that_breaks_off_sends_nothing_and_keeps_what_it_has(capsys):
    with store() as (url, files), pytest.raises(KeyboardInterrupt):
        with local_output(f"{url}/answers?sig=right") as path:
            Path(path).write_bytes(b"x\n")
            raise KeyboardInterrupt
        assert files == {}
    assert path in capsys.readouterr().err
    Path(path).unlink()
