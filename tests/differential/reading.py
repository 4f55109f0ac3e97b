"""What a client makes of an answer, in one form whether it came whole or in pieces."""

from __future__ import annotations

import json
from typing import Any

from tests.differential.bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES


def of_whole(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    match path:
        case _ if path == RESPONSES:
            return _response(answer)
        case _ if path == MESSAGES:
            return _message(answer)
        case _:
            return _whole(path, answer)


def of_stream(path: str, stream: bytes) -> dict[str, Any]:
    """Of a clean stream, without lines for routers."""
    events = [event for event in stream.split(b"\n\n") if event]
    if path == RESPONSES:
        return _responses_stream(events)
    if path == MESSAGES:
        return _messages_stream(events)
    assert events.pop() == b"data: [DONE]"
    assert all(event.startswith(b"data: ") for event in events)
    return _chunks(path, [json.loads(event[6:]) for event in events])


def call_ids(reported: dict[str, Any]) -> list[Any]:
    """Taken out: they are made up anew for each request, but not for one that is resumed."""
    return [call.pop("id") for choice in reported["choices"].values() for call in choice["calls"]]


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Without what was found in the cache, which is each engine's own affair."""
    return {
        name: value
        for name, value in usage.items()
        if name not in ("prompt_tokens_details", "input_tokens_details")
    }


def _empty() -> dict[str, Any]:
    return {
        "text": "", "reasoning": "", "calls": [], "logprobs": [], "ids": [], "role": None,
        "end": None, "prompt_ids": None,
    }  # fmt: skip


def _scores(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry a token, in either shape."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*(logprobs[name] for name in sorted(logprobs)), strict=True))


# -- chats, texts and tokens ----------------------------------------------------------------------


def _whole(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for choice in answer["choices"]:
        known = choices.setdefault(choice["index"], _empty())
        known["end"] = (choice["finish_reason"], choice.get("stop_reason"))
        known["ids"] = choice.get("token_ids") or []
        known["logprobs"] = _scores(choice["logprobs"])
        known["prompt_ids"] = choice.get("prompt_token_ids")
        if path == COMPLETIONS:
            known["text"] = choice["text"]
        elif path == CHAT:
            message = choice["message"]
            known["text"], known["role"] = message["content"] or "", message["role"]
            known["reasoning"] = message["reasoning"] or ""
            known["calls"] = [
                {"id": call["id"], **call["function"]} for call in message.get("tool_calls") or []
            ]
            if message["function_call"] is not None:
                known["calls"] = [{"id": None, **message["function_call"]}]
    return {
        "choices": choices,
        "usage": _usage(answer["usage"]),
        "prompt_ids": answer.get("prompt_token_ids"),
        "prompt_text": answer.get("prompt_text"),
    }


def _chunks(path: str, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    reported: dict[str, Any] = {
        "choices": choices, "usage": None, "prompt_ids": None, "prompt_text": None,
    }  # fmt: skip
    heads = {tuple(chunk.get(name) for name in ("id", "request_id", "created", "model", "object"))
             for chunk in chunks}  # fmt: skip
    assert len(heads) == 1, heads
    sums = [0]
    for chunk in chunks:
        for name in ("prompt_token_ids", "prompt_text"):
            if chunk.get(name) is not None:
                key = name.replace("prompt_token_ids", "prompt_ids")
                assert reported[key] is None, f"{name} is told twice"
                reported[key] = chunk[name]
        if usage := chunk.get("usage"):
            if not chunk["choices"]:
                assert reported["usage"] is None, "usage is told twice"
                reported["usage"] = _usage(usage)
            else:
                details = usage.get("completion_tokens_details", {})
                sums.append(usage["completion_tokens"] + details.get("reasoning_tokens", 0))
        for choice in chunk["choices"]:
            _add(path, choices.setdefault(choice["index"], _empty()), choice)
    assert sums == sorted(sums), f"sums on the way shrink: {sums}"
    reported["choices"] = dict(sorted(choices.items()))
    return reported


def _add(path: str, known: dict[str, Any], choice: dict[str, Any]) -> None:
    assert known["end"] is None, "an answer goes on after its end"
    known["ids"] += choice.get("token_ids") or []
    known["logprobs"] += _scores(choice.get("logprobs"))
    if choice.get("prompt_token_ids") is not None:
        assert known["prompt_ids"] is None
        known["prompt_ids"] = choice["prompt_token_ids"]
    if choice["finish_reason"] is not None:
        known["end"] = (choice["finish_reason"], choice.get("stop_reason"))
    if path == COMPLETIONS:
        known["text"] += choice["text"]
    elif path == CHAT:
        delta = choice["delta"]
        if "role" in delta:
            assert known["role"] is None, "an answer begins twice"
            known["role"] = delta["role"]
        known["text"] += delta.get("content") or ""
        known["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(known["calls"]), "calls begin in their order"
                known["calls"].append({"id": call["id"], "name": call["function"]["name"],
                                       "arguments": ""})  # fmt: skip
            known["calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
        if call := delta.get("function_call"):
            if "name" in call:
                known["calls"].append({"id": None, "name": call["name"], "arguments": ""})
            known["calls"][0]["arguments"] += call.get("arguments") or ""


# -- responses ------------------------------------------------------------------------------------


def _response(answer: dict[str, Any]) -> dict[str, Any]:
    kept = {
        name: value
        for name, value in answer.items()
        if name not in ("id", "created_at", "completed_at", "output", "usage")
    }
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in answer["output"]
    ]
    return {**kept, "output": items, "usage": _usage(answer["usage"]), "choices": {}}


def _responses_stream(events: list[bytes]) -> dict[str, Any]:
    reported = [json.loads(event.partition(b"data: ")[2]) for event in events]
    assert [event["sequence_number"] for event in reported] == list(range(len(reported)))
    last = reported[-1]
    assert last["type"] in ("response.completed", "response.incomplete"), last
    joined: dict[int, dict[str, Any]] = {}
    for event in reported[2:-1]:
        known = joined.setdefault(event["output_index"], {"text": "", "logprobs": []})
        kind = event["type"].rpartition(".")[2]
        if kind == "delta":
            known["text"] += event["delta"]
            known["logprobs"] += event.get("logprobs") or []
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            assert item == last["response"]["output"][event["output_index"]]
            content = (item.get("content") or [{}])[0]
            assert known["text"] == item.get("arguments", content.get("text"))
            assert known["logprobs"] == (content.get("logprobs") or [])
    assert len(joined) == len(last["response"]["output"])
    return _response(last["response"])


# -- messages -------------------------------------------------------------------------------------


def _message(answer: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {name: value for name, value in block.items() if name != "id"}
        for block in answer["content"]
    ]
    usage = dict(answer["usage"])
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    return {
        "role": answer["role"], "content": blocks, "usage": usage, "choices": {},
        "end": (answer["stop_reason"], answer["stop_sequence"]),
    }  # fmt: skip


def _messages_stream(events: list[bytes]) -> dict[str, Any]:
    reported = [json.loads(event.partition(b"data: ")[2]) for event in events]
    message = reported[0]["message"]
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in reported:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        block[name] += delta[name]
                if "partial_json" in delta:
                    inputs.setdefault(event["index"], "")
                    inputs[event["index"]] += delta["partial_json"]
            case "message_delta":
                message["stop_reason"] = event["delta"]["stop_reason"]
                message["stop_sequence"] = event["delta"]["stop_sequence"]
                message["usage"] |= event["usage"]
    assert reported[-1]["type"] == "message_stop"
    for index, text in inputs.items():
        blocks[index]["input"] = _input(text)
    message["content"] = blocks
    return _message(message)


def _input(text: str) -> dict[str, Any]:
    """As the whole message shows what is no object."""
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return {"_invalid": text}
    return value if isinstance(value, dict) else {"_invalid": text}
