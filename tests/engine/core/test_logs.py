"""Log lines: one shape for all of a server's processes, and no request can forge one."""

import json
import logging
import sys

import pytest

from octavo_engine.core.logs import (
    JsonFormatter,
    TextFormatter,
    format_in_use,
    set_up_logging,
)


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("octavo.x", logging.INFO, "f.py", 1, message, (), None)
    vars(made).update(fields)
    return made


@pytest.fixture
def root():
    """The root logger, as it was before afterwards."""
    logger = logging.getLogger()
    before, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)
    for name in ("octavo", "octavo_engine"):
        logging.getLogger(name).setLevel(logging.NOTSET)


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


@pytest.mark.parametrize("shape", ["text", "json"])
def test_a_child_can_be_told_how_its_parent_logs(root, shape):
    set_up_logging(shape, logging.DEBUG)
    assert format_in_use() == shape
    assert logging.getLogger("octavo_engine.core").getEffectiveLevel() == logging.DEBUG
    assert root.level == logging.WARNING  # libraries only speak when something is wrong
