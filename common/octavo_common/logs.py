"""How log lines look: a constant message with fields, as text or as JSON, one record a line."""

from __future__ import annotations

import json
import logging
import os
import select
import stat
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_PIPE_PATIENCE_MS = 100
OWN_LOGGERS = ("octavo", "octavo_engine", "octavo_router")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message", "asctime", "color_message", "taskName",
}  # fmt: skip

# Of the request that a task works for: it stands in every line logged meanwhile.
REQUEST_ID: ContextVar[str | None] = ContextVar("octavo_request_id", default=None)


def local_head(record: logging.LogRecord) -> str:
    """`12:03:04 INFO octavo.server`"""
    clock = time.strftime("%H:%M:%S", time.localtime(record.created))
    return f"{clock} {record.levelname} {record.name}"


def utc_head(record: logging.LogRecord) -> str:
    """`2026-01-02T12:03:04.567Z I`"""
    return f"{_utc(record)} {record.levelname[0]}"


class TextFormatter(logging.Formatter):
    """`12:03:04 INFO octavo.server Answered status=200 …`

    `escapes`: control characters never reach the output as themselves, so that a request cannot
    forge a line. `shows_none`: fields whose value is None are written too.
    """

    def __init__(
        self,
        head: Callable[[logging.LogRecord], str] = local_head,
        *,
        escapes: bool = True,
        shows_none: bool = False,
    ) -> None:
        super().__init__()
        self._head = head
        self._escape = _escaped if escapes else str
        self._shows_none = shows_none

    def format(self, record: logging.LogRecord) -> str:
        parts = [self._head(record), self._escape(record.getMessage())]
        for key, value in fields(record, shows_none=self._shows_none).items():
            parts.append(f"{key}={self._escape(str(value))}")
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line, all of it ASCII unless `is_ascii` is false."""

    def __init__(self, *, is_ascii: bool = True, shows_none: bool = False) -> None:
        super().__init__()
        self._is_ascii = is_ascii
        self._shows_none = shows_none

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in fields(record, shows_none=self._shows_none).items():
            line.setdefault(key, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=self._is_ascii)


def fields(record: logging.LogRecord, *, shows_none: bool = False) -> dict[str, object]:
    """What was passed as `extra`, and whose request it is about."""
    own = {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and (shows_none or value is not None)
    }
    request_id = REQUEST_ID.get()
    return own if request_id is None else {"request_id": request_id, **own}


def set_up_logging(log_format: str, level: str | int) -> None:
    """Everything to stderr, in one shape, libraries included. `log_format` is json or text."""
    write_to_stderr(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.getLogger().setLevel(logging.WARNING)  # libraries speak when something is wrong
    change_level(level)


def write_to_stderr(formatter: logging.Formatter) -> None:
    """Whatever is logged in this process, and to nowhere else."""
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = TerminalHandler()
    elif (pipe := _pipe_of(sys.stderr)) is not None:
        handler = PipeHandler(pipe)
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.getLogger().handlers[:] = [handler]


if TYPE_CHECKING:
    _Handler = logging.StreamHandler[TextIO]
else:
    _Handler = logging.StreamHandler


class TerminalHandler(_Handler):
    """Of a terminal: where this process or its parent draws a progress bar, a line replaces it."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def format(self, record: logging.LogRecord) -> str:
        return f"\r\033[K{super().format(record)}"


class PipeHandler(logging.Handler):
    """Of a pipe: where its reader stops reading, lines are lost, and this process does not wait.

    The descriptor is shared with other processes, so it stays a blocking one: a poll of the pipe
    shows first whether it takes a piece.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._num_lost = 0
        self._is_cut = False  # a line ended in its midst

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n"
        except Exception:
            self.handleError(record)
            return
        if self._num_lost:
            head, lost = "\n" if self._is_cut else "", self._num_lost
            record = logging.makeLogRecord(
                {"name": "octavo", "levelno": logging.WARNING, "levelname": "WARNING",
                 "msg": "Log lines were lost: nobody read them", "lines": lost}
            )  # fmt: skip
            line = f"{head}{self.format(record)}\n{line}"
        # Once it was waited for in vain, the next lines do not wait.
        patience_ms = 0 if self._num_lost else _PIPE_PATIENCE_MS
        if self._write(line.encode(errors="backslashreplace"), patience_ms):
            self._num_lost = 0
        else:
            self._num_lost += 1

    def _write(self, data: bytes, patience_ms: int) -> bool:
        for start in range(0, len(data), select.PIPE_BUF):
            if not self._poll.poll(patience_ms):
                self._is_cut = self._is_cut or start > 0
                return False
            try:
                os.write(self._fd, data[start : start + select.PIPE_BUF])
            except OSError:  # its reader is gone
                return False
        self._is_cut = False
        return True


def _pipe_of(stream: TextIO) -> int | None:
    """The descriptor, where it is a pipe."""
    try:
        fd = stream.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
    except (OSError, ValueError):  # a test's stand-in, or closed
        return None
    return fd if is_pipe else None


def change_level(level: str | int) -> None:
    """Of our own loggers, from now on."""
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level.upper() if isinstance(level, str) else level)


def format_in_use() -> Literal["text", "json"]:
    """How this process logs, for a child that should log alike."""
    formatters = (handler.formatter for handler in logging.getLogger().handlers)
    return "json" if any(isinstance(f, JsonFormatter) for f in formatters) else "text"


def _utc(record: logging.LogRecord) -> str:
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{clock}.{int(record.msecs):03d}Z"


def _escaped(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
