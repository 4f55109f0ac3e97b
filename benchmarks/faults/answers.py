"""Requests of every kind, and what their answers say, whole or joined from a stream."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.vision_model import data_url
from benchmarks.vision_pictures import render, scenes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PICTURE_SEEDS: Final = 24  # so that some pictures come again
_WORDS: Final = [
    "harbor",
    "letter",
    "window",
    "garden",
    "mountain",
    "bridge",
    "engine",
    "painter",
    "river",
    "candle",
    "market",
    "forest",
    "winter",
    "doctor",
    "island",
    "teacher",
    "ocean",
    "bread",
    "silver",
    "village",
]
_TOOL: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request."""

    name: str
    path: str
    fields: Mapping[str, Any]
    streaming: Mapping[str, Any] = field(default_factory=dict)  # further fields of a stream
    num_pictures: int = 0


class Answer(NamedTuple):
    """What a client must get exactly once."""

    choices: tuple[tuple[object, ...], ...]  # text, calls, log-probabilities, finish reason
    prompt_tokens: int
    output_tokens: int


_USAGE: Final = {"stream_options": {"include_usage": True}}
CASES: Final = (
    Case("chat, greedy", CHAT, {"temperature": 0, "max_tokens": 40}, _USAGE),
    Case("chat, seeded", CHAT, {"temperature": 0.9, "top_p": 0.95, "max_tokens": 32}, _USAGE),
    Case("chat, log-probabilities", CHAT,
         {"temperature": 0.7, "logprobs": True, "top_logprobs": 3, "max_tokens": 24}, _USAGE),
    Case("chat, three choices", CHAT, {"temperature": 1.0, "n": 3, "max_tokens": 20}, _USAGE),
    Case("chat, stop strings", CHAT,
         {"temperature": 0.5, "stop": [".", " the"], "max_tokens": 48}, _USAGE),
    Case("chat, a tool call", CHAT, {
        "temperature": 0.8, "max_tokens": 64, "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "forecast", "parameters": _TOOL}}],
    }, _USAGE),
    Case("chat, a JSON schema", CHAT, {
        "temperature": 0.8, "max_tokens": 64,
        "response_format": {"type": "json_schema",
                            "json_schema": {"name": "trip", "schema": _TOOL, "strict": True}},
    }, _USAGE),
    Case("completions, greedy", COMPLETIONS, {"temperature": 0, "max_tokens": 40}, _USAGE),
    Case("completions, seeded, penalties", COMPLETIONS,
         {"temperature": 0.8, "frequency_penalty": 0.5, "max_tokens": 32}, _USAGE),
    Case("completions, two choices, log-probabilities", COMPLETIONS,
         {"temperature": 0.8, "n": 2, "logprobs": 2, "max_tokens": 16}, _USAGE),
    Case("responses", RESPONSES, {"temperature": 0, "max_output_tokens": 32}),
    Case("messages", MESSAGES, {"temperature": 0, "max_tokens": 32}),
)  # fmt: skip
# For models that see.
PICTURE_CASES: Final = (
    Case("chat, a picture", CHAT, {"temperature": 0, "max_tokens": 32}, _USAGE, num_pictures=1),
    Case("chat, two pictures, two choices, seeded", CHAT,
         {"temperature": 0.9, "n": 2, "max_tokens": 24}, _USAGE, num_pictures=2),
    Case("responses, a picture", RESPONSES,
         {"temperature": 0, "max_output_tokens": 24}, num_pictures=1),
    Case("messages, a picture", MESSAGES, {"temperature": 0, "max_tokens": 24}, num_pictures=1),
)  # fmt: skip


def body_of(case: Case, number: int, seed: int) -> dict[str, Any]:
    """A body of its own: of different length and words, and with a seed where it is sampled."""
    rng = random.Random(f"{seed}:{number}")
    words = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(3, 90)))
    text = f"Tell me something about {words}."
    body: dict[str, Any] = {"model": "m", **case.fields}
    if case.path == COMPLETIONS:
        body["prompt"] = text
    elif case.num_pictures:
        content = _content(case, text, rng)
        body["input" if case.path == RESPONSES else "messages"] = [
            {"role": "user", "content": content}
        ]
    elif case.path == RESPONSES:
        body["input"] = text
    else:
        body["messages"] = [{"role": "user", "content": text}]
    if body["temperature"] and case.path in (CHAT, COMPLETIONS):
        body["seed"] = rng.randrange(1 << 31)
    return body


def _content(case: Case, text: str, rng: random.Random) -> list[dict[str, Any]]:
    """Pictures, and the text behind them, in the parts that the endpoint takes."""
    drawn = islice(scenes(rng.randrange(PICTURE_SEEDS)), case.num_pictures)
    urls = [data_url(render(scene)) for scene in drawn]
    if case.path == CHAT:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}} for url in urls
        ]
    elif case.path == RESPONSES:
        parts = [{"type": "input_image", "image_url": url} for url in urls]
    else:
        parts = [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": url.partition(",")[2]}}
            for url in urls
        ]  # fmt: skip
    return [*parts, {"type": "input_text" if case.path == RESPONSES else "text", "text": text}]


def answer_of(case: Case, whole: dict[str, Any]) -> Answer:
    """Of an answer that came whole. Raises ValueError, KeyError."""
    usage = whole["usage"]
    if case.path == CHAT:
        choices = [
            (one["message"]["content"] or "", _calls(one["message"].get("tool_calls") or []),
             _chat_logprobs(one), one["finish_reason"])
            for one in whole["choices"]
        ]  # fmt: skip
    elif case.path == COMPLETIONS:
        choices = [
            (one["text"], (), _text_logprobs([one]), one["finish_reason"])
            for one in whole["choices"]
        ]
    elif case.path == RESPONSES:
        texts = [part["text"] for item in whole["output"] for part in item.get("content") or []]
        choices = [("".join(texts), (), (), whole["status"])]
    else:
        texts = [block["text"] for block in whole["content"]]
        choices = [("".join(texts), (), (), whole["stop_reason"])]
    return Answer(tuple(choices), *_counts(usage))


def joined(case: Case, raw: bytes) -> Answer:
    """Of a stream. Raises ValueError where it has an error, or does not end."""
    events = list(_events(case, raw))
    if case.path == RESPONSES:
        return _joined_response(case, events)
    if case.path == MESSAGES:
        return _joined_message(events)
    by_index: dict[int, list[dict[str, Any]]] = defaultdict(list)
    usage: dict[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            by_index[choice["index"]].append(choice)
    choices = []
    for index in sorted(by_index):
        parts = by_index[index]
        ends = [part["finish_reason"] for part in parts if part.get("finish_reason")]
        if len(ends) != 1:
            raise ValueError(f"choice {index} ends {len(ends)} times")
        if case.path == CHAT:
            deltas = [part["delta"] for part in parts]
            text = "".join(delta.get("content") or "" for delta in deltas)
            logprobs: tuple[object, ...] = sum((_chat_logprobs(part) for part in parts), ())
            choices.append((text, _joined_calls(deltas), logprobs, ends[0]))
        else:
            text = "".join(part["text"] for part in parts)
            choices.append((text, (), _text_logprobs(parts), ends[0]))
    return Answer(tuple(choices), *_counts(usage))


def _events(case: Case, raw: bytes) -> Iterator[dict[str, Any]]:
    """All but the last line of a stream, whose end is looked for."""
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    if case.path in (CHAT, COMPLETIONS):
        num_ends = lines.count("[DONE]")
        if num_ends != 1 or lines.pop() != "[DONE]":
            raise ValueError(f"the stream does not end once: {raw[-300:]!r}")
    for line in lines:
        event = json.loads(line)
        if "error" in event and event["error"] is not None:
            raise ValueError(f"the stream has an error: {line[:300]}")
        yield event


def _joined_response(case: Case, events: list[dict[str, Any]]) -> Answer:
    ends = [one for one in events if one["type"] in ("response.completed", "response.incomplete")]
    if len(ends) != 1 or ends[0] is not events[-1]:
        raise ValueError("the stream does not end once")
    answer = answer_of(case, ends[0]["response"])
    deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    if "".join(deltas) != answer.choices[0][0]:
        raise ValueError("the deltas are not the text of the end")
    return answer


def _joined_message(events: list[dict[str, Any]]) -> Answer:
    if not events or events[-1]["type"] != "message_stop":
        raise ValueError("the stream does not end")
    texts = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    (start,) = (one["message"] for one in events if one["type"] == "message_start")
    (end,) = (one for one in events if one["type"] == "message_delta")
    usage = {**start["usage"], **end["usage"]}
    return Answer((("".join(texts), (), (), end["delta"]["stop_reason"]),), *_counts(usage))


def _counts(usage: dict[str, Any]) -> tuple[int, int]:
    if "completion_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    cached = usage.get("cache_read_input_tokens", 0)  # which /v1/messages counts apart
    return usage["input_tokens"] + cached, usage["output_tokens"]


def _calls(calls: list[dict[str, Any]]) -> tuple[object, ...]:
    """Without their ids, which are random."""
    return tuple((one["function"]["name"], one["function"]["arguments"]) for one in calls)


def _joined_calls(deltas: list[dict[str, Any]]) -> tuple[object, ...]:
    names: dict[int, str] = defaultdict(str)
    arguments: dict[int, str] = defaultdict(str)
    for delta in deltas:
        for call in delta.get("tool_calls") or []:
            function = call["function"]
            names[call["index"]] += function.get("name") or ""
            arguments[call["index"]] += function.get("arguments") or ""
    return tuple((names[index], arguments[index]) for index in sorted(names))


def _chat_logprobs(choice: dict[str, Any]) -> tuple[object, ...]:
    content = (choice.get("logprobs") or {}).get("content") or []
    return tuple(
        (one["token"], one["logprob"], tuple(top["logprob"] for top in one["top_logprobs"]))
        for one in content
    )


def _text_logprobs(parts: list[dict[str, Any]]) -> tuple[object, ...]:
    found: list[object] = []
    for part in parts:
        logprobs = part.get("logprobs") or {}
        found += zip(
            logprobs.get("tokens") or [], logprobs.get("token_logprobs") or [], strict=True
        )
    return tuple(found)
