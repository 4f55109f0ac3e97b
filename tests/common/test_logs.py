"""Log lines: one shape for each of a component's processes, and no request can forge one."""

import argparse
import json
import logging
import sys
import time

import pytest

from octavo_common.logs import (
    OWN_LOGGERS,
    REQUEST_ID,
    JsonFormatter,
    TextFormatter,
    change_level,
    format_in_use,
    set_up_logging,
)
from octavo_operator import cli as operator_cli


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("octavo.x", logging.INFO, "f.py", 1, message, (), None)
    vars(made).update(fields)
    return made


def dated(message: str, **fields: object) -> logging.LogRecord:
    return record(message, created=1767323045.25, msecs=250.0, **fields)


@pytest.fixture
def root():
    """The root logger, as it was before afterwards."""
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)
    for name in (*OWN_LOGGERS, "kopf", "asyncio"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def formatter(root: logging.Logger) -> logging.Formatter:
    (handler,) = root.handlers
    assert handler.formatter is not None
    return handler.formatter


def test_text_is_a_line_with_fields_and_nothing_else():
    line = TextFormatter().format(record("Answered\nforged", path="/a\r\nb", status=None))
    assert line.endswith(r"INFO octavo.x Answered\nforged path=/a\r\nb")
    assert len(line.splitlines()) == 1


def test_json_is_an_object_a_line_tracebacks_included():
    made = record("Broke", status=500)
    try:
        raise ValueError("x\ny")
    except ValueError:
        made.exc_info = sys.exc_info()
    (line,) = JsonFormatter().format(made).splitlines()
    parsed = json.loads(line)
    assert (parsed["message"], parsed["status"], parsed["level"]) == ("Broke", 500, "info")
    assert "ValueError: x\ny" in parsed["exception"]


def test_a_field_cannot_take_the_place_of_what_every_line_has():
    parsed = json.loads(JsonFormatter().format(record("Answered", level="x", time="y")))
    assert (parsed["level"], parsed["time"][4]) == ("info", "-")


@pytest.mark.parametrize("shape", ["text", "json"])
def test_a_child_can_be_told_how_its_parent_logs(root, shape):
    set_up_logging(shape, logging.DEBUG)
    assert format_in_use() == shape
    assert logging.getLogger("octavo_engine.core").getEffectiveLevel() == logging.DEBUG
    assert root.level == logging.WARNING  # libraries only speak when something is wrong


def test_the_level_of_our_loggers_can_change_later(root):
    set_up_logging("text", "info")
    change_level("debug")
    levels = [logging.getLogger(name).getEffectiveLevel() for name in OWN_LOGGERS]
    assert levels == [logging.DEBUG] * len(OWN_LOGGERS)
    assert root.level == logging.WARNING


def test_lines_of_engine_and_router(root):
    """Byte for byte: people parse them."""
    token = REQUEST_ID.set("r1")
    try:
        made = dated("Answered ü", path="/a", why=None, color_message="x")
        set_up_logging("json", "info")
        assert formatter(root).format(made) == (
            '{"time": "2026-01-02T03:04:05.250Z", "level": "info", "logger": "octavo.x", '
            '"message": "Answered \\u00fc", "request_id": "r1", "path": "/a"}'
        )
        set_up_logging("text", "info")
        clock = time.strftime("%H:%M:%S", time.localtime(made.created))
        line = f"{clock} INFO octavo.x Answered ü request_id=r1 path=/a"
        assert formatter(root).format(made) == line
    finally:
        REQUEST_ID.reset(token)


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (
            "json",
            '{"time": "2026-01-02T03:04:05.250Z", "level": "info", "logger": "octavo.x", '
            '"message": "Took ü", "key": "m", "why": null}',
        ),
        ("plain", "2026-01-02T03:04:05.250Z I Took ü key=m why=None"),
    ],
)
def test_lines_of_the_operator(root, form, line):
    options = argparse.ArgumentParser()
    operator_cli.add_options(options)
    values = operator_cli.read_values(options.parse_args([f"--log-format={form}"]), {})
    operator_cli._set_up_logging(values)
    assert formatter(root).format(dated("Took ü", key="m", why=None)) == line
    assert root.level == logging.INFO
    assert logging.getLogger("kopf").level == logging.CRITICAL
