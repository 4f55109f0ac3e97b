"""Nobody reads the log: lines are lost, and no process waits for that.

Red when: a process whose log is a full pipe stands still.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import httpx
import pytest

from octavo_common.logs import PipeHandler, TextFormatter
from tests.fakes.process import PATIENCE_S, environment, serving

PROGRAM = """
import logging, sys
from octavo_common.logs import set_up_logging
set_up_logging("text", "info")
for number in range(5000):
    logging.getLogger("octavo").info("Line", extra={"number": number, "words": "x" * 200})
logging.getLogger("octavo").info("Long", extra={"words": "y" * 20_000})
print("done", flush=True)
sys.stdin.readline()
logging.getLogger("octavo").info("Last")
"""


def test_lines_that_nobody_reads_are_lost_counted_and_hold_nobody_up():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "done\n"  # it did not wait for a reader
        kept = os.read(process.stderr.fileno(), 1 << 20)  # all that a pipe holds
        process.stdin.write("\n")
        process.stdin.close()
        read = kept.decode() + process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    lines = read.splitlines()
    numbers = [int(line.split("number=")[1].split()[0]) for line in lines if "number=" in line]
    assert numbers == list(range(len(numbers)))
    assert 100 < len(numbers) < 5000
    assert lines[-1].endswith("INFO octavo Last")
    assert f"Log lines were lost: nobody read them lines={5001 - len(numbers)}" in lines[-2]


def test_a_line_that_was_cut_ends_before_the_next_one():
    reader, writer = os.pipe()
    try:
        handler = PipeHandler(writer)
        handler.setFormatter(TextFormatter())
        lines = ("a" * 100_000, "b", "c")
        for number, words in enumerate(lines):
            if number == 2:
                first = os.read(reader, 1 << 20)
            handler.emit(logging.makeLogRecord({"name": "octavo", "msg": words, "levelname": "I"}))
        rest = os.read(reader, 1 << 20).decode().splitlines()
        assert first.endswith(b"a")
        assert rest[0] == "" and rest[1].endswith("lines=2") and rest[2].endswith("c")
        os.close(reader)
        handler.emit(logging.makeLogRecord({"name": "octavo", "msg": "nobody", "levelname": "I"}))
    finally:
        os.close(writer)


@pytest.mark.slow
def test_an_engine_whose_log_is_not_read_is_healthy_and_answers():
    flags = ("m", "--served-model-name", "sim", "--log-level", "debug", "--enable-log-requests")
    with serving(*flags, env=environment()) as engine, engine.client() as client:
        body = {"model": "sim", "prompt": "hi", "max_tokens": 1}
        for _ in range(400):  # nobody reads what is logged of them
            assert client.post("/v1/completions", json=body).status_code == 200
        began_at = time.monotonic()
        assert httpx.get(f"{engine.url}/health", timeout=PATIENCE_S).status_code == 200
        assert time.monotonic() - began_at < 5.0
