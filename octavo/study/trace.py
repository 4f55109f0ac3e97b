"""Reads recorded traces: one JSON object a line, prompts given as ids of their blocks.

    {"timestamp": 1022025, "input_length": 1100, "output_length": 83, "hash_ids": [0, 7, 93]}

Timestamps are milliseconds. Block i of a prompt holds its tokens [512 i, 512 (i + 1)), the last one
perhaps fewer; equal ids are equal blocks. This is the format of the Mooncake traces. Other fields
are ignored; tokens without an id count as unique.
"""

from __future__ import annotations

import gzip
import json
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from octavo.study.workload import Arrival, Texts, Workload
from octavo_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_TOKENS = 512
MAX_LENGTH = 2**24  # tokens of a prompt or an answer; more is a mistake in the file
_GZIP = b"\x1f\x8b"


def read_trace(
    path: Path, *, block_tokens: int = BLOCK_TOKENS, max_requests: int | None = None
) -> Workload:
    """Raises ConfigError that names the line and the field."""
    texts = Texts()
    blocks: dict[int, range] = {}
    arrivals: list[Arrival] = []
    for number, line in _lines(path):
        if len(arrivals) == max_requests:
            break
        where = f"{path}, line {number}"
        record = _record(line, where)
        timestamp_ms = record.get("timestamp")
        if not isinstance(timestamp_ms, int | float) or not 0 <= timestamp_ms < 1e15:
            raise ConfigError(f"{where}: timestamp must be milliseconds; got {timestamp_ms!r:.40}")
        num_prompt = _length(record, "input_length", where)
        num_output = _length(record, "output_length", where)
        prompt = []
        left = num_prompt
        for block_id in _hash_ids(record, where):
            if left == 0:
                break
            block = blocks.get(block_id)
            if block is None:
                block = blocks[block_id] = texts.new(block_tokens)
            prompt.append(block[:left])
            left -= len(prompt[-1])
        if left:
            prompt.append(texts.new(left))
        arrivals.append(Arrival(tuple(prompt), texts.new(num_output), timestamp_ms / 1e3))
    if not arrivals:
        raise ConfigError(f"{path} holds no request; give a file with one JSON object a line")
    arrivals.sort(key=attrgetter("delay_s"))
    return Workload(path.name.split(".")[0], tuple(arrivals))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with something on them, numbered from 1; unpacked if the file is gzip's."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == _GZIP
        with gzip.open(path, "rt") if is_packed else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} must be a JSON object; got {line.strip()!r:.40}")
    return record


def _length(record: dict[str, Any], name: str, where: str) -> int:
    """At least one: every request has a prompt and is answered."""
    value = record.get(name)
    if type(value) is not int or not 0 <= value <= MAX_LENGTH:
        raise ConfigError(f"{where}: {name} must be a number of tokens; got {value!r:.40}")
    return max(value, 1)


def _hash_ids(record: dict[str, Any], where: str) -> list[int]:
    value = record.get("hash_ids", [])
    if not isinstance(value, list) or not all(type(block_id) is int for block_id in value):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers; got {value!r:.40}")
    return value
