"""What a router knows of an engine's stream; kept apart from the router's own code."""

from __future__ import annotations

import json
from typing import Any

from octavo_engine.protocol.resume import BEGIN, LINE_PREFIX, Resume


def events_of(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


def lines_of(event: bytes) -> tuple[list[bytes], bytes]:
    """Our lines, and what is left without them."""
    lines = event.splitlines(keepends=True)
    ours = [line for line in lines if line.startswith(LINE_PREFIX)]
    return ours, b"".join(line for line in lines if not line.startswith(LINE_PREFIX))


class StreamReader:
    """After so many events."""

    def __init__(self) -> None:
        self.begin: dict[str, Any] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: list[int] = []
        self.events: list[bytes] = []  # without our lines

    @property
    def clean(self) -> bytes:
        return b"".join(self.events)

    def read(self, event: bytes) -> None:
        ours, clean = lines_of(event)
        self.events.append(clean)
        for line in ours:
            if line.startswith(BEGIN):  # again after a resume, and the same
                begin = json.loads(line[len(BEGIN) :])
                begin.pop("cached")  # what another engine has cached is its own affair
                assert self.begin in ({}, begin)
                self.begin = begin
                continue
            index, _, ids = line[len(LINE_PREFIX) :].decode().strip().partition(" ")
            known = self.tokens.setdefault(int(index), [])
            known += [int(token) for token in ids.split(",") if token]
            if b'"finish_reason":"' in clean:
                self.finished.append(int(index))

    @property
    def resume(self) -> Resume:
        begin = self.begin
        tokens = [self.tokens.get(index, []) for index in range(begin["answers"])]
        return Resume(
            begin["id"], begin["created"], begin["seed"], tokens, self.finished, list(self.tokens)
        )


def read_all(stream: bytes) -> StreamReader:
    reader = StreamReader()
    for event in events_of(stream):
        reader.read(event)
    return reader
