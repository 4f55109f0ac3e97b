"""Server-sent chunks, built by hand around the one part that changes: the text.

Hot path: a chunk costs one JSON string and one join, no tree of objects.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class Ending(Protocol):
    """How an answer ended, or that it did not."""

    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> str | int | None: ...


class Chunks:
    """Writes the chunks of one response; `chat` or not differ in where the text stands."""

    def __init__(self, *, id: str, model: str, created: int, chat: bool, role: str = "") -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = _encode({"id": id, "object": kind, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._before = b',"delta":{"content":' if chat else b',"text":'
        self._after = b"}" if chat else b""
        self._empty = b',"delta":{}' if chat else b',"text":""'
        self._opening = b',"delta":{"role":' + _encode(role) + b',"content":'
        self._rest = b',"logprobs":null,"finish_reason":null'
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands around mere text

    def role(
        self,
        index: int,
        *,
        content: str = "",
        prompt_token_ids: list[int] | None = None,
        prompt_text: str | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """The first chunk of a choice of a chat."""
        parts = [self._head, b'{"index":', str(index).encode(), self._opening, _encode(content)]
        parts += [b"}", self._rest, b"}]"]
        if prompt_token_ids is not None:
            parts += [b',"prompt_token_ids":', _encode(prompt_token_ids)]
        if prompt_text is not None:
            parts += [b',"prompt_text":', _encode(prompt_text)]
        if usage is not None:
            parts += [b',"usage":', _encode(usage)]
        return b"".join((*parts, b"}\n\n"))

    def text(self, index: int, text: str) -> bytes:
        """As `delta` for text alone. Hot path: once per token."""
        around = self._around.get(index)
        if around is None:
            place = b'{"index":' + str(index).encode()
            around = self._around[index] = (
                self._head + place + self._before, self._after + self._rest + b"}]}\n\n"
            )  # fmt: skip
        return around[0] + _encode(text) + around[1]

    def delta(
        self,
        index: int,
        output: Ending,
        text: str,
        *,
        delta: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
        token_ids: list[int] | None = None,
        prompt_token_ids: list[int] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """New text of a choice, or all of its `delta`, and how it ended if it did."""
        parts = [self._head, b'{"index":', str(index).encode()]
        if delta:
            parts += [b',"delta":', _encode(delta)]
        elif text or output.finish_reason is None:
            parts += [self._before, _encode(text), self._after]
        else:
            parts.append(self._empty)
        if logprobs is None and output.finish_reason is None:
            parts.append(self._rest)
        else:
            parts += [b',"logprobs":', _encode(logprobs)]
            parts += [b',"finish_reason":', _encode(output.finish_reason)]
        if output.finish_reason is not None:
            parts += [b',"stop_reason":', _encode(output.stop_reason)]
        if token_ids is not None:
            parts += [b',"token_ids":', _encode(token_ids)]
        if prompt_token_ids is not None:
            parts += [b',"prompt_token_ids":', _encode(prompt_token_ids)]
        parts.append(b"}]")
        if usage is not None:
            parts += [b',"usage":', _encode(usage)]
        parts.append(b"}\n\n")
        return b"".join(parts)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, without choices."""
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"
