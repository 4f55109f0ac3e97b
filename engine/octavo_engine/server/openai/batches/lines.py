"""The lines of batch files in OpenAI's format: requests are read, answers written."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from octavo_engine.server.openai.batches.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v2/embed",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling",
    "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
MESSAGES_URL = "/v1/messages"  # of Anthropic's batches
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"  # codes of requests that were not answered
_SHOWN_CHARS = 100
_AS_IT_IS = Storage()


@dataclass(frozen=True, slots=True)
class BatchTask:
    """A request that can be sent."""

    number: int  # of its line, from 1
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request."""

    number: int
    custom_id: str | None
    problem: str


class LineReader:
    """Turns lines into tasks; knows which ids it has met."""

    def __init__(self, done: FinishedLine | None = None, *, endpoint: str = "") -> None:
        self._done = done or FinishedLine()
        self._endpoint = endpoint  # that all must have; empty: each its own
        self._ids: set[str] = set()

    def read(self, lines: Iterable[bytes]) -> Iterator[BatchTask | BadLine]:
        """Blank lines, and what has its answer already, are left out."""
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            entry = self._entry(number, line)
            if not self._done.holds(entry):
                yield entry

    def _entry(self, number: int, line: bytes) -> BatchTask | BadLine:
        try:
            fields = msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:
            return BadLine(number, None, f"not valid JSON: {error}")
        if not isinstance(fields, dict):
            return BadLine(number, None, "must be a JSON object")
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            return BadLine(number, None, "custom_id must be a string that is not empty")
        if custom_id in self._ids:
            return BadLine(number, custom_id, "custom_id was given before")
        self._ids.add(custom_id)
        problem = _problem(fields, self._endpoint)
        if not problem and self._endpoint and fields["url"] != self._endpoint:
            problem = f"url must be the batch's endpoint, {self._endpoint}; got {fields['url']}"
        if problem:
            return BadLine(number, custom_id, problem)
        return BatchTask(number, custom_id, fields["url"], msgspec.json.encode(fields["body"]))


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """What an earlier run has answered."""

    ids: frozenset[str] = frozenset()
    lines: frozenset[int] = frozenset()  # of broken ones

    @classmethod
    def read(cls, answers: Iterable[bytes]) -> FinishedLine:
        """Raises ValueError that names the line which is no answer of ours."""
        ids: set[str] = set()
        lines: set[int] = set()
        for number, answer in enumerate(answers, 1):
            try:
                known = msgspec.json.decode(answer, type=_Known)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} is not an answer: {error}") from None
            if known.error is not None and known.error.line is not None:
                lines.add(known.error.line)
            elif known.custom_id is not None:
                ids.add(known.custom_id)
        return cls(frozenset(ids), frozenset(lines))

    def holds(self, entry: BatchTask | BadLine) -> bool:
        if isinstance(entry, BadLine):
            return entry.number in self.lines
        return entry.custom_id in self.ids


def done_so_far(path: Path, storage: Storage = _AS_IT_IS) -> FinishedLine:
    """What a file of answers holds, whose half line at the end is dropped. Raises ValueError."""
    storage.drop_half(path)
    with storage.read(path) as file:
        return FinishedLine.read(file)


def answered(task: BatchTask, status: int, request_id: str, body: bytes) -> bytes:
    """Errors of the API are answers too: their status and error object tell."""
    return _line(
        task.custom_id,
        {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)},
        None,
    )


def refused(broken: BadLine) -> bytes:
    error = {
        "code": "invalid_line",
        "message": f"line {broken.number}: {broken.problem}",
        "line": broken.number,
    }
    return _line(broken.custom_id, None, error)


def expired(task: BatchTask) -> bytes:
    """For a request that was not sent in time."""
    message = "This request was not answered before the batch expired."
    return _line(task.custom_id, None, {"code": EXPIRED, "message": message})


def cancelled(task: BatchTask) -> bytes:
    """For what was not answered when its batch was cancelled."""
    message = "This request was not answered before the batch was cancelled."
    return _line(task.custom_id, None, {"code": CANCELLED, "message": message})


def unanswered(path: Path, storage: Storage) -> int:
    """How many requests of a file of errors were expired or cancelled."""
    with storage.read(path) as lines:
        found = [msgspec.json.decode(line, type=_Known).error for line in lines]
    return sum(error is not None and error.code in (EXPIRED, CANCELLED) for error in found)


def _line(custom_id: str | None, response: Any, error: Any) -> bytes:
    answer = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(answer) + b"\n"


def _problem(fields: dict[str, Any], endpoint: str) -> str:
    """Empty when it is a request."""
    method, url, body = fields.get("method"), fields.get("url"), fields.get("body")
    if method not in (None, "POST"):
        return f"method must be POST; got {_shown(method)}"
    if url not in URLS and not (endpoint and url == endpoint):
        return f"url must be one of {', '.join(URLS)}; got {_shown(url)}"
    if not isinstance(body, dict):
        return "body must be a JSON object"
    for name in ("stream", "background"):
        if body.get(name):
            return f"{name} is not supported in a batch; leave it out of the body"
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


class _KnownError(msgspec.Struct):
    line: int | None = None
    code: str = ""


class _Known(msgspec.Struct):
    custom_id: str | None
    error: _KnownError | None = None
