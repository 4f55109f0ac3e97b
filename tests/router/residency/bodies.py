"""Bodies by chance, whole and broken, and a long comparison of the two scanners:

python -m tests.router.residency.bodies 100000 [SEED]
"""

from __future__ import annotations

import json
import sys
from random import Random
from typing import Any

from octavo_router.residency import native
from octavo_router.residency import scan as slow
from octavo_router.residency.api import (
    CHAT,
    COMPLETION,
    MESSAGES,
    OTHER,
    PRIVILEGED,
    RESPONSES,
    Scan,
    ScanError,
    ScanFunction,
)

KINDS = (CHAT, COMPLETION, OTHER, MESSAGES, RESPONSES)
FIELDS = tuple(slow.PyScan.__slots__)
ADAPTERS = {"lora": "adapter"}
CHARACTERS = [
    "a",
    "b",
    " ",
    "é",
    "日",
    "😀",
    "\n",
    '"',
    "\\",
    "\0",
    "\x7f",
    "\u2028",
    "zz zz",
    "\x1e",
]
TOP_LEVEL = [
    "tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort",
    "mm_processor_kwargs", "add_special_tokens", "truncate_prompt_tokens", "truncation_side",
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "priority",
    "user", "cache_salt", "session_id", "session_params", "prompt_cache_key", "tool_choice",
    "temperature", "x", "system", "instructions", "input", "thinking", "output_config", "reasoning",
    "max_output_tokens", *sorted(PRIVILEGED), "bootstrap_host", "bootstrap",
]  # fmt: skip
FRAGMENTS = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"NaN", b"-Infinity", b"-",
    b"0", b"1e999", b"\\ud800", b"\\udc00", b"\\ud83d\\ude00", b"\xff", b"\xed\xa0\x80",
    b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\x00", b" ", b"\t", b"1.", b".5", b"1e5", b"-0",
    b'"a":1,', b"\\u00e9", b"\\x", b"\\/", b"[[" * 20, b"1" * 5000,
]  # fmt: skip


def outcome(scan: ScanFunction, body: bytes, kind: int, adapters: Any = None) -> tuple[Any, ...]:
    """All fields, or that it was refused."""
    try:
        return fields_of(scan(body, kind, adapters))
    except ScanError:
        return ("refused",)


def fields_of(scan: Scan) -> tuple[Any, ...]:
    return tuple(getattr(scan, name) for name in FIELDS)


class Bodies:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def body(self) -> bytes:
        """Whole JSON; what is in it may be nonsense."""
        pick = self.random.choice
        separators = pick([(",", ":"), (", ", ": "), (" ,\n", ":\t")])
        return json.dumps(
            self.request(), ensure_ascii=self.chance(0.5), separators=separators
        ).encode()

    def broken(self) -> bytes:
        """Whole JSON with a few bytes changed, most of the time."""
        random = self.random
        raw = bytearray(self.body())
        for _ in range(random.choice([0, 1, 1, 2, 4])):
            at = random.randrange(len(raw) + 1)
            how = random.random()
            if how < 0.3:
                raw[at : at + random.randrange(4)] = b""
            elif how < 0.6:
                raw[at:at] = random.choice(FRAGMENTS)
            elif how < 0.8:
                raw[at : at + 1] = bytes([random.randrange(256)])
            elif how < 0.9:
                start = random.randrange(len(raw) + 1)
                raw[at:at] = raw[start : start + random.randrange(30)]
            else:
                del raw[at:]
        return bytes(raw)

    def request(self) -> dict[str, Any]:
        random = self.random
        fields: dict[str, Any] = {"model": random.choice(["m", "lora", self.text()])}
        if self.chance(0.7):
            fields["messages"] = [self.message() for _ in range(random.randrange(5))]
        if self.chance(0.6):
            fields["prompt"] = self.prompt()
        for name in TOP_LEVEL:
            if self.chance(0.12):
                fields[name] = self.value()
        if self.chance(0.5):
            fields["system"] = self.content()
        if self.chance(0.5):
            fields["instructions"] = self.text()
        if self.chance(0.6):
            fields["input"] = [self.item() for _ in range(random.randrange(5))]
        if self.chance(0.05):
            fields["previous_response_id"] = self.value()
            fields["truncation"] = random.choice(["auto", "disabled"])
        if self.chance(0.1):
            fields["tool_choice"] = {"type": random.choice(["none", "auto"])}
        if self.chance(0.1):
            fields["tool_choice"] = "none"
        if self.chance(0.1):
            fields["stream_options"] = {"include_usage": random.choice([True, False, 1])}
        if self.chance(0.1):
            fields["session_params"] = {"session_id": self.text()}
        return self.shuffled(fields)

    def message(self) -> Any:
        if self.chance(0.03):
            return self.value()
        message: dict[str, Any] = {
            "role": self.random.choice(["user", "assistant", "system", self.text()])
        }
        if self.chance(0.9):
            message["content"] = self.content()
        extra = ("name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content", "other")
        for name in extra:
            if self.chance(0.15):
                message[name] = self.value()
        if self.chance(0.03):
            message["role"] = self.value()
        return self.shuffled(message)

    def item(self) -> Any:
        if self.chance(0.03):
            return self.value()
        kinds = ["message", "function_call", "function_call_output", "reasoning", self.value()]
        item: dict[str, Any] = {"type": self.random.choice(kinds), "role": "user"}
        if self.chance(0.3):
            del item["type"]
        for name in ("content", "output"):
            if self.chance(0.6):
                item[name] = self.content()
        if self.chance(0.5):
            item["call_id"] = self.text()
        return self.shuffled(item)

    def content(self) -> Any:
        if self.chance(0.5):
            return self.text()
        if self.chance(0.4):
            return self.value()
        return [self.part() for _ in range(self.random.randrange(4))]

    def part(self) -> Any:
        return self.random.choice(
            [
                {"type": "text", "text": self.text()},
                {"type": "input_text", "text": self.text(), "x": 1},
                {"type": "image_url", "image_url": {"url": self.text()}},
                {"type": "input_audio", "uuid": self.text(), "input_audio": self.value()},
                {"type": self.random.choice(["image_url", "image"]), "uuid": self.value()},
                {"type": "text"},
                {"type": "tool_use", "id": self.text(), "input": self.value()},
                {"type": "tool_result", "tool_use_id": self.text(), "content": self.value()},
                {
                    "type": "tool_result",
                    "content": [{"type": "text", "text": self.text()}, self.value()],
                },
                {"type": self.value(), "text": self.value()},
                self.value(),
            ]
        )

    def prompt(self) -> Any:
        random = self.random
        ids = [random.randrange(2**17) for _ in range(random.randrange(60))]
        odd = [[2**32], [1, True], [1, 2.0], [[1], "a", 2], [-1]]
        return random.choice(
            [self.text(), ids, [self.text(), self.text()], [ids, [4]], self.value(), *odd]
        )

    def value(self, depth: int = 0) -> Any:
        random = self.random
        how = random.random()
        if how < 0.25:
            return self.text()
        if how < 0.4:
            return random.choice([0, 1, -1, 2**53, 2**53 - 1, 2**64, 10**30, random.randrange(999)])
        if how < 0.5:
            return random.choice([0.0, -0.0, 1.5, 1e300, 1e-300, 5e-324, random.random()])
        if how < 0.6 or depth > 4:
            return random.choice([None, True, False, [], {}])
        count = random.randrange(4)
        if how < 0.8:
            return [self.value(depth + 1) for _ in range(count)]
        return {self.text()[:6]: self.value(depth + 1) for _ in range(count)}

    def text(self) -> str:
        size = self.random.choice([0, 1, 3, 10, 60, 200])
        return "".join(self.random.choices(CHARACTERS, k=size))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def shuffled(self, fields: dict[str, Any]) -> dict[str, Any]:
        items = list(fields.items())
        self.random.shuffle(items)
        return dict(items)


def main() -> None:
    count = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    fast = native.load()
    if not fast.is_native:
        raise SystemExit(fast.problem)
    bodies = Bodies(seed)
    num_refused = 0
    for _ in range(count):
        body = bodies.broken()
        for kind in KINDS:
            expected = outcome(slow.scan, body, kind, ADAPTERS)
            found = outcome(fast.scan, body, kind, ADAPTERS)
            if found != expected:
                raise SystemExit(f"kind {kind}: {body!r}\n{found}\nbut in Python\n{expected}")
            num_refused += expected == ("refused",)
    print(f"{len(KINDS) * count} scans of {count} bodies agree, {num_refused} of them refusals")  # noqa: T201


if __name__ == "__main__":
    main()
