"""One line for each request: which ones, with what in it, and never in their way."""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from octavo_router import access_log
from octavo_router.access_log import AccessLog
from octavo_router.metrics import RequestRecord
from tests.fakes.facts import run, until

if TYPE_CHECKING:
    from pathlib import Path

RECORD = RequestRecord(
    request_id="r1", route="/v1/chat/completions", client="10.0.0.9", model="m", pool="p",
    tenant="t", endpoint="10.0.0.1:8000", policy="prefix-load", status=200, outcome="ok",
    is_stream=True, duration_s=1.23456789, ttft_s=0.5, prompt_tokens=10, cached_tokens=0,
    output_tokens=5, attempts=1,
)  # fmt: skip
FAILED = replace(RECORD, request_id="r2", status=502, outcome="broken", code="upstream_lost")


def written(tmp_path: Path, *records: RequestRecord, mode: Any = "all", form: Any = "json") -> str:
    path = tmp_path / "log"

    async def story() -> None:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        try:
            log = AccessLog(mode, form, fd=fd, clock=lambda: 1_700_000_000.25)
            for record in records:
                log.write(record)
            await log.close()
        finally:
            os.close(fd)

    run(story())
    return path.read_text()


def test_a_line_as_json(tmp_path):
    line = json.loads(written(tmp_path, RECORD))
    assert line == {
        "time": "2023-11-14T22:13:20.250Z", "level": "info", "logger": "octavo.access",
        "message": "Answered", "request_id": "r1", "method": "POST",
        "route": "/v1/chat/completions", "status": 200, "outcome": "ok", "model": "m", "pool": "p",
        "tenant": "t", "endpoint": "10.0.0.1:8000", "policy": "prefix-load", "client": "10.0.0.9",
        "is_stream": True, "duration_s": 1.234568, "ttft_s": 0.5, "prompt_tokens": 10,
        "output_tokens": 5, "attempts": 1,
    }  # fmt: skip


def test_a_line_as_text(tmp_path):
    line = written(tmp_path, RECORD, form="text")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d INFO octavo\.access Answered request_id=r1 method=POST .* attempts=1\n",
        line,
    )


@pytest.mark.parametrize(("mode", "ids"), [("all", ["r1", "r2"]), ("errors", ["r2"]), ("none", [])])
def test_which_requests_get_a_line(tmp_path, mode, ids):
    lines = written(tmp_path, RECORD, FAILED, mode=mode).splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == ids


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_client_can_forge_a_line(tmp_path, form):
    evil = "m\n12:00:00 INFO octavo.access forged\x1b[31m status=200 \u2028" + "x" * 10_000
    text = written(tmp_path, replace(RECORD, model=evil, request_id=evil, tenant=evil), form=form)
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert " forged" not in text or form == "json"
    assert len(text) < 2000


def test_lines_are_written_together_soon_after():
    async def story() -> None:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            log = AccessLog("all", "json", fd=writing, flush_s=0.001)
            got = b""
            for _ in range(3):
                log.write(RECORD)
            assert _read(reading) == b""  # nothing yet: they go together

            def has_all() -> bool:
                nonlocal got
                got += _read(reading)
                return got.count(b"\n") == 3

            await until(has_all)
            await log.close()
        finally:
            os.close(reading)
            os.close(writing)

    run(story())


def test_a_reader_that_stands_still_costs_lines_and_not_requests(monkeypatch):
    monkeypatch.setattr(access_log, "MAX_WAITING", 10)

    async def story() -> None:
        reading, writing = os.pipe()
        try:
            log = AccessLog("all", "json", fd=writing, flush_s=0.001)
            big = replace(RECORD, model="m" * 120, tenant="t" * 120)
            filled = 0
            while filled < 400:  # more than the pipe holds: the thread is stuck in its write
                log.write(big)
                filled += 1
                if filled % 10 == 0:
                    await asyncio.sleep(0.002)
            os.set_blocking(reading, False)
            got = b""

            def says_so() -> bool:
                nonlocal got
                got += _read(reading)
                return b"Dropped lines" in got

            await until(says_so)
            closing = asyncio.create_task(log.close())
            await until(lambda: _read(reading) is not None and closing.done())
        finally:
            os.close(reading)
            os.close(writing)

    run(story())


def test_nobody_reads_any_more():
    async def story() -> None:
        reading, writing = os.pipe()
        os.close(reading)
        try:
            log = AccessLog("all", "json", fd=writing)
            log.write(RECORD)
            await log.close()
        finally:
            os.close(writing)

    run(story())


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""
