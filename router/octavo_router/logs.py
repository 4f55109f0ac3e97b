"""How the router's log lines look: a constant message with fields, for people or for machines.

Control characters never reach the output as themselves, so a request cannot forge a line.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_LOGGERS = ("octavo", "octavo_router")


class TextLines(logging.Formatter):
    """`12:03:04 INFO octavo.router Draining in_flight=3`"""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        parts = [clock, record.levelname, record.name, _plain(record.getMessage())]
        parts += [f"{key}={_plain(str(value))}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(form: str, level: str) -> None:
    """Everything to stderr, in one shape, libraries included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries speak when something is wrong
    change_level(level)


def change_level(level: str) -> None:
    """Of our own loggers, from now on."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What was passed as `extra`."""
    return {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and value is not None
    }


def _plain(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
