"""How log lines look: a constant message with fields, as text for people or as JSON for machines.

Control characters never reach the output as themselves, so a request cannot forge a line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Literal

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}

# Of the request that a task works for: it stands in every line logged meanwhile.
REQUEST_ID: ContextVar[str | None] = ContextVar("octavo_request_id", default=None)


class TextFormatter(logging.Formatter):
    """`12:03:04 INFO octavo.server Answered status=200 …`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [clock, record.levelname, record.name, _plain(record.getMessage())]
        parts += [f"{key}={_plain(str(value))}" for key, value in fields(record).items()]
        return " ".join(parts) + _traceback(self, record)


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def fields(record: logging.LogRecord) -> dict[str, object]:
    """What was passed as `extra`, and whose request it is about."""
    own = {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and value is not None
    }
    request_id = REQUEST_ID.get()
    return own if request_id is None else {"request_id": request_id, **own}


def set_up_logging(log_format: str, level: str | int) -> None:
    """Everything to stderr, in one shape, libraries included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries speak when something is wrong
    for name in ("octavo", "octavo_engine"):
        logging.getLogger(name).setLevel(level.upper() if isinstance(level, str) else level)


def format_in_use() -> Literal["text", "json"]:
    """How this process logs, for a child that should log alike."""
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    return "json" if any(isinstance(f, JsonFormatter) for f in formatters) else "text"


def _plain(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return "\n" + formatter.formatException(record.exc_info) if record.exc_info else ""
